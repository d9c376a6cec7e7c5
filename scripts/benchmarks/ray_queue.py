"""Ray's queue on this host alone: the leading half puts, an actor gets. The answering half idles."""

from __future__ import annotations

import importlib
import os
import time
from typing import Any, ClassVar, Final

from scripts.benchmarks.contender import BlockingContender, Effort, Metrics, Place, unknown

__all__ = ["RayQueue"]

MIB: Final = 1 << 20
STORE_BYTES: Final = 2 << 30


class Getter:
    """The actor."""

    def get(self, queue: Any, count: int) -> int:
        """Get so many items."""
        for _ in range(count):
            queue.get()
        return count


class RayQueue(BlockingContender):
    """`ray.util.queue.Queue`, which is an actor with an asyncio queue."""

    needs: ClassVar[tuple[str, ...]] = ("ray", "torch")
    one_sided: ClassVar[bool] = True

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.ray: Any = None
        self.getter: Any = None

    def open_blocking(self, offer: dict[str, str]) -> None:
        if not self.leads:
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self.ray = importlib.import_module("ray")
        self.ray.init(
            address="local", num_cpus=2, object_store_memory=STORE_BYTES, include_dashboard=False, log_to_driver=False,
            configure_logging=False, _temp_dir=str(self.place.directory / "q"), _node_ip_address="127.0.0.1",
        )  # fmt: skip
        self.getter = self.ray.remote(num_cpus=0)(Getter).remote()

    def close_blocking(self) -> None:
        if self.ray is not None:
            self.ray.shutdown()

    def measure_blocking(self, case: str, variant: str, effort: Effort) -> Metrics:
        if not self.leads:
            return {}
        from scripts.benchmarks.tensors import make_bulk, make_stream

        if case not in ("channel_items", "channel_large"):
            raise unknown(case, variant)
        queue = importlib.import_module("ray.util.queue").Queue(actor_options={"num_cpus": 0})
        small = case == "channel_items"
        item = make_stream(256)[0] if small else make_bulk(MIB)
        count = max(50, int(effort.stream_messages * effort.slow_share / 10)) if small else 10 * effort.transfers
        queue.put(item)
        queue.get()
        getting = self.getter.get.remote(queue, count)
        start = time.perf_counter()
        for _ in range(count):
            queue.put(item)
        self.ray.get(getting)
        took = time.perf_counter() - start
        queue.shutdown()
        return {"rate": count / took if small else count * MIB / took / 1e9}
