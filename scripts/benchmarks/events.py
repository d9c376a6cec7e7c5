"""``scripts/bench events``: thousands of works on a device that are not done yet, and what the loop has of it.

On the fake accelerator, so this measures the poller and not the driver: on a real device each question costs about a microsecond more, and
the poller asks for no longer than its budget in any one turn.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import threading
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

import uvloop

from aiorlinf.device.runtime import Event, Runtime
from aiorlinf.link.device_events import watch_events
from aiorlinf.testing.fake import FakeAccelerator
from aiorlinf.work.home import LoopHome
from scripts.benchmarks.summary import quantile

__all__ = ["SUMMARY", "Found", "main", "measure", "render"]

SUMMARY: Final = "thousands of pending events of a device on one loop"

STREAMS: Final = 10
LIMIT_S: Final = 1e-3
TICK_S: Final = 2e-3


class Found(NamedTuple):
    """What was measured, in seconds.

    Attributes:
        turns: of the loop's thread, for each turn.
        late: how late timers of the loop came.
        threads: that there are more than before.
    """

    turns: list[float]
    late: list[float]
    threads: int


async def measure(pending: int, turns: int) -> Found:
    """So many works, that all wait for their events."""
    with FakeAccelerator(self_moving=False) as fake:
        home = LoopHome(asyncio.get_running_loop(), name="bench")
        streams = [fake.new_stream() for _ in range(STREAMS)]
        for stream in streams:
            fake.launch("something long", stream, lambda: None, ticks=1)
        threads = threading.active_count()
        left, all_done = pending, asyncio.Event()

        def over(error: BaseException | None) -> None:
            nonlocal left
            left -= 1
            if not left:
                all_done.set()

        for number in range(pending):
            events: list[tuple[Runtime, Event]] = [(fake, fake.record(streams[number % STREAMS]))]
            watch_events(home, events, over)
        gc.collect()
        spent, late = [], []
        for _ in range(turns):  # in most of them the poller has no share, in the others its whole budget
            begin = time.thread_time()
            await asyncio.sleep(0)
            spent.append(time.thread_time() - begin)
        for _ in range(turns):
            begin = time.perf_counter()
            await asyncio.sleep(TICK_S)
            late.append(time.perf_counter() - begin - TICK_S)
        more = threading.active_count() - threads
        fake.step()
        if pending:
            await all_done.wait()
        await home.close()
    return Found(spent, late, more)


def render(none: Found, found: Found, pending: int) -> str:
    """The table, and whether it is as it should be."""
    rows = [f"# {pending} pending events of a device", "", "| | half within | 99 % within | longest |", "| --- | --- | --- | --- |"]
    for name, values in (
        ("a turn of the loop, in time of its thread", found.turns),
        (f"a timer of {1e3 * TICK_S:.0f} ms, late by", found.late),
        ("the same with nothing pending", none.late),
    ):
        ordered = sorted(values)
        figures = (quantile(ordered, 0.5), quantile(ordered, 0.99), ordered[-1])
        rows.append(f"| {name} | {' | '.join(f'{1e6 * each:.0f} us' for each in figures)} |")
    well = quantile(sorted(found.turns), 0.99) < LIMIT_S and found.threads == 0
    verdict = f"{'met' if well else 'MISSED'}: 99 % of the turns under {1e3 * LIMIT_S:.0f} ms, and no thread more ({found.threads} more)"
    return "\n".join([*rows, "", verdict, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="scripts/bench events", description=SUMMARY)
    parser.add_argument("--pending", type=int, default=10_000, metavar="N", help="works under way (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=500, metavar="N", help="turns of the loop (default: %(default)s)")
    asked = parser.parse_args(arguments)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        none = runner.run(measure(0, asked.turns))
        found = runner.run(measure(asked.pending, asked.turns))
    print(render(none, found, asked.pending), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
