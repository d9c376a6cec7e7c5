"""Ray on this host alone: a tensor as an actor's argument, and an object-store entry that the actor views without a copy.

The leading half starts Ray and the actor; the answering half idles.
"""

from __future__ import annotations

import importlib
import os
import time
from typing import Any, ClassVar, Final

from scripts.benchmarks.contender import SMALL_DICT, BlockingContender, Effort, Metrics, Place, unknown

__all__ = ["Ray"]

WARM_UP: Final = 5
STORE_BYTES: Final = 2 << 30


class Taker:
    """The actor."""

    def echo(self, obj: Any) -> Any:
        return obj

    def take(self, obj: Any, nbytes: int, case: str) -> bool:
        """Look at what came; whether it is what was sent is checked by its ends alone, so that the check costs nothing."""
        if case == "nested":
            obj = obj["state"][-1]["tensor"]
        return bool(obj.nbytes <= nbytes and float(obj[-1]) > float(obj[0]))


class Ray(BlockingContender):
    """Tensors are pickled as torch does; NumPy arrays are the kind that Ray's object store shows without a copy, read-only."""

    needs: ClassVar[tuple[str, ...]] = ("ray", "torch")
    one_sided: ClassVar[bool] = True

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.ray: Any = None
        self.actor: Any = None

    def open_blocking(self, offer: dict[str, str]) -> None:
        if not self.leads:
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self.ray = importlib.import_module("ray")
        self.ray.init(
            address="local", num_cpus=2, object_store_memory=STORE_BYTES, include_dashboard=False, log_to_driver=False,
            configure_logging=False, _temp_dir=str(self.place.directory / "r"), _node_ip_address="127.0.0.1",
        )  # fmt: skip
        self.actor = self.ray.remote(num_cpus=0)(Taker).remote()
        self.ray.get(self.actor.echo.remote(None))

    def close_blocking(self) -> None:
        if self.ray is not None:
            self.ray.shutdown()

    def measure_blocking(self, case: str, variant: str, effort: Effort) -> Metrics:
        if not self.leads:
            return {}
        if case in ("small_dict_rtt", "small_tensor_rtt"):
            return self._round_trips(case, max(20, effort.round_trips // 5))
        if case in ("tensor", "nested"):
            return self._transfers(case, effort, stored=variant == "stored")
        raise unknown(case, variant)

    def _round_trips(self, case: str, count: int) -> Metrics:
        from scripts.benchmarks.tensors import check_small_dict, check_stream, make_stream

        took: list[float] = []
        sample: Any = SMALL_DICT if case == "small_dict_rtt" else make_stream()[1]
        back: Any = None
        for _ in range(count + WARM_UP):
            start = time.perf_counter()
            back = self.ray.get(self.actor.echo.remote(sample))
            took.append(time.perf_counter() - start)
        if case == "small_dict_rtt":
            check_small_dict(back)
        else:
            check_stream(back, 1)
        took = sorted(took[WARM_UP:])
        return {"time": took[len(took) // 2] * 1e6}

    def _transfers(self, case: str, effort: Effort, *, stored: bool) -> Metrics:
        from scripts.benchmarks.tensors import make_bulk, make_nested

        made: Any = (make_bulk if case == "tensor" else make_nested)(effort.tensor_bytes)
        took = []
        for _ in range(effort.transfers + 1):
            start = time.perf_counter()
            argument = self.ray.put(made.numpy()) if stored else made
            whole = self.ray.get(self.actor.take.remote(argument, effort.tensor_bytes, case))
            took.append(time.perf_counter() - start)
            del argument
            if not whole:
                raise AssertionError("the tensor that arrived is not the one that was sent")
        took = sorted(took[1:])
        return {"rate": effort.tensor_bytes / took[len(took) // 2] / 1e9}
