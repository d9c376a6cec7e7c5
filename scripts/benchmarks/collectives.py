"""``scripts/bench collectives``: what broadcast, gather and all-to-all cost, and what is left when a member is killed in the middle.

On one host: a broadcast against one transfer, gather and all-to-all against torch's Gloo (`collectives_host`). Across two racks: what a
broadcast brings over the link between them, and how long it takes (`collectives_racks`). A member killed in the middle of each: how long
until all others know, and until they have done the next one without it (`collectives_deaths`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final

from scripts.benchmarks.collectives_deaths import Death, killed_in_the_middle
from scripts.benchmarks.collectives_host import EXCHANGES, GLOO, NEW, OURS, RECEIVERS, TRANSFER, on_one_host
from scripts.benchmarks.collectives_racks import MBPS, across_two_racks, racks_problem

__all__ = ["SUMMARY", "main"]

SUMMARY: Final = "broadcast, gather and all-to-all: on one host, across two racks, and when a member is killed"

PARTS: Final = ("host", "racks", "deaths")
MIB: Final = 1 << 20
LIMIT_S: Final = 1.0
"""For all others to know that a member is gone."""


def main(arguments: Sequence[str]) -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="scripts/bench collectives", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small amounts: shows that all of it works, not how fast it is")
    parser.add_argument("--mib", type=int, default=256, help="size of the broadcast (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="on one host; medians are printed (default %(default)s)")
    parser.add_argument("--only", choices=PARTS, action="append", help="one part; may be given more than once")
    asked = parser.parse_args(arguments)
    chosen = asked.only or PARTS
    if "host" in chosen:
        _host(*((1, 3) if asked.quick else (asked.mib, asked.rounds)))
    if "racks" in chosen:
        _racks(*((16, 1) if asked.quick else (asked.mib, 3)))
    if "deaths" in chosen:
        _deaths(1 if asked.quick else 5)
    return 0


def _host(size: int, rounds: int) -> None:
    took = on_one_host(size * MIB, rounds)
    print(f"{f'one transfer of {size} MiB on this host':38} {1000 * took[TRANSFER]:8.2f} ms")
    for receivers in RECEIVERS:
        print(f"{f'broadcast to {receivers}':38} {1000 * took[receivers]:8.2f} ms, {took[receivers] / took[TRANSFER]:.2f} times as long")
    print(f"\n{'among 4 workers':34} {OURS:>12} {GLOO:>12} {NEW:>18}   {OURS} / {GLOO}")
    for exchange in EXCHANGES:
        name, nbytes = exchange
        ours, gloo, new = (took[who, *exchange] for who in (OURS, GLOO, NEW))
        title = f"{name} of tensors of {'1 MiB' if nbytes == MIB else '1 KiB'}"
        print(f"{title:34} {1000 * ours:9.2f} ms {1000 * gloo:9.2f} ms {1000 * new:15.2f} ms   {ours / gloo:.2f}, new {ours / new:.2f}")


def _racks(size: int, rounds: int) -> None:
    print(f"\ntwo racks of two hosts of two workers, {MBPS / 1000:g} Gbit/s between the racks, {size} MiB:")
    problem = racks_problem()
    if problem is not None:
        print(f"skipped: {problem}")
        return
    found = across_two_racks(size * MIB, rounds)
    print(f"{'one transfer over that link':38} {1000 * found.transfer_s:8.1f} ms, {found.transfer_bytes:.3f} times its bytes on the link")
    ratio = found.broadcast_s / found.transfer_s
    print(f"{'broadcast to 7':38} {1000 * found.broadcast_s:8.1f} ms, {found.broadcast_bytes:.3f} times its bytes on the link,", end=" ")
    print(f"{ratio:.2f} times as long")
    if found.wrong:
        print(f"WRONG: {', '.join(found.wrong)} got something else")


def _deaths(rounds: int) -> None:
    print("\na member is killed in the middle: until the last of the others has raised, and until the next one without it is over")
    kept = True
    for kind, deaths in killed_in_the_middle(rounds).items():
        raised, went_on = max(death.raised_s for death in deaths), max(death.went_on_s for death in deaths)
        kept &= raised <= LIMIT_S
        print(f"{kind:38} {1000 * raised:8.1f} ms {1000 * went_on:8.1f} ms, worst of {_count(deaths)}")
    print("All within a second." if kept else "NOT all within a second.")


def _count(deaths: Sequence[Death]) -> str:
    missed = sum(death.had_it for death in deaths)
    return f"{len(deaths)}" + (f" ({missed} times one had the object already)" if missed else "")
