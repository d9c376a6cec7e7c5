"""What must not be removed from the code that works with accelerators, and the tests that fail when it is.

Each mutant takes out one wait for an event, one `hold`, or one turn. `test_mutants.py` holds this list against the code: every such
line is in it, once. To let the tests kill them, each in a copy of the project (some minutes): ``python -m tests.device.mutants [TEXT]``,
where the text picks those with it in their name. It says of each by which test it was killed; a crash, a hang, and a mutant that nothing
notices are all the same: it lives. When the list was last run as a whole, with torch 2.13, each was killed by the tests that are named with
it here, by a failure.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["FILES", "MUTANTS", "Mutant", "main", "mutated"]

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300
"""For the tests of one mutant."""

STAGING = "tests/device/test_staging.py"
DEVICES = "tests/device/test_devices.py"
CHANNEL = "tests/channel/test_devices.py"
STEPS = "tests/link/test_staging_steps.py"
LOANS = "tests/collective/test_device_loans.py"
SHARES = "tests/collective/test_device_shares.py"
OPENINGS = "tests/device/test_openings.py"
TURNS = "tests/device/test_turns.py"


class Mutant(NamedTuple):
    """One of them.

    Attributes:
        file: under ``aiorlinf``.
        code: what is there; it is there once.
        instead: what the mutant has.
        killers: arguments of pytest; the tests that they name fail with it.
    """

    file: str
    code: str
    instead: str
    killers: tuple[str, ...]

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.file}: {self.code.strip()}"


FILES = [
    *("channel/on_device.py", "collective/device_loans.py", "collective/device_shares.py", "collective/devices.py"),
    *("link/device_in.py", "link/device_out.py", "link/staging.py"),
]
"""Those whose waits and holds are all in the list."""

MUTANTS = [
    # ---- waits for events, on the sending side
    Mutant("link/staging.py", "runtime.wait(stream, event)\n            streams[device]", "streams[device]", (STAGING, "-k", "both_send")),
    Mutant("link/device_out.py", "runtime.wait(stream, ready)", "pass", (DEVICES, "-k", "copies_from or same_device")),
    Mutant("link/device_out.py", "runtime.wait(runtime.side_stream(index, maker.out), ready)", "pass", (DEVICES, "-k", "test_a_pair")),
    # ---- on the receiving side
    Mutant(
        "link/device_in.py", "runtime.wait(stream, runtime.open_event(handle, where[uuid]))", "pass", (DEVICES, "-k", "copies_from or same")
    ),
    Mutant("link/staging.py", "runtime.wait(stream, ready.event)", "pass", (STAGING, "-k", "into_tensors")),
    Mutant(
        "link/staging.py",
        "runtime.wait(stream, other.record(other.side_stream(other_index, IN)))",
        "pass",
        (STEPS, "-k", "with_all_waits"),
    ),
    Mutant("link/staging.py", "runtime.wait(stream, event)\n        for tensor", "pass\n        for tensor", (STEPS, "-k", "received_in")),
    Mutant("link/staging.py", "runtime.wait(current, runtime.record(stream))", "pass", (STEPS, "-k", "with_all_waits")),
    Mutant("link/staging.py", "watch_events(home, list(events), settle, tensors)", "settle(None)", (STEPS, "-k", "its_events_have")),
    # ---- in broadcasts that members read from the root's device
    Mutant("link/device_in.py", "runtime.wait(stream, user.event)", "pass", (LOANS, "-k", "straight")),
    Mutant("link/device_in.py", "runtime.hold(target, stream)", "pass", (LOANS, "-k", "dropped")),
    Mutant("collective/device_loans.py", "runtime.hold(memory, user)", "pass", (LOANS, "-k", "lives_as_long")),
    Mutant("collective/device_loans.py", "            give_back()\n            if copied", "            if copied", (LOANS, "-k", "copy")),
    Mutant(
        "collective/device_loans.py",
        "devices.read(self._runtime",
        "give_back()\n        devices.read(self._runtime",
        (LOANS, "-k", "dropped"),
    ),
    Mutant("link/device_out.py", "self._loans[key] = loan", "pass", (LOANS, "-k", "cancelled")),
    Mutant("collective/broadcast.py", "self._check(flat)\n                self.tell", "self.tell", (LOANS, "-k", "written")),
    Mutant("collective/device_loans.py", "self._away.add(route.address)", "pass", (SHARES, "-k", "keeper_has_it_when")),
    Mutant("link/device_out.py", "self._over[key] = over", "pass", (SHARES, "-k", "from_the_roots")),
    Mutant("collective/device_shares.py", "same = source.dtype is target.dtype and source", "same = source", (SHARES, "-k", "type")),
    # ---- in channels
    Mutant("channel/on_device.py", "runtime.wait(runtime.side_stream(index, IN), event)", "pass", (CHANNEL, "-k", "runs_short")),
    Mutant("channel/on_device.py", "runtime.wait(stream, event)", "pass", (CHANNEL, "-k", "that_is_named")),
    # ---- memory that is used by other streams than the one it was made for
    Mutant("link/staging.py", "runtime.hold(memory, stream)", "pass", (STEPS, "-k", "closed_while")),
    Mutant("link/staging.py", "runtime.hold(tensor, stream)", "pass", (STEPS, "-k", "another_stream_uses")),
    Mutant("link/staging.py", "runtime.hold(source, stream)\n        return", "pass\n        return", (STEPS, "-k", "brought_elsewhere")),
    Mutant("link/staging.py", "user_runtime.hold(out, stream)", "pass", (STEPS, "-k", "with_all_waits")),
    Mutant("link/staging.py", "runtime.hold(out, stream)\n    if not source", "pass\n    if not source", (STEPS, "-k", "is_filled")),
    Mutant("link/staging.py", "other.hold(source, stream)", "pass", (STEPS, "-k", "brought_elsewhere")),
    Mutant("link/device_in.py", "runtime.hold(memory, user)", "pass", (DEVICES, "-k", "lives_as_long")),
    Mutant("link/device_out.py", "runtime.hold(leaf, runtime.side_stream(index, maker.out))", "pass", (DEVICES, "-k", "pair_that_fails")),
    Mutant("channel/on_device.py", "runtime.hold(tensor, runtime.current_stream(index))", "pass", (CHANNEL, "-k", "putters_stream")),
    # ---- whose turn it is on a device
    Mutant("device/turns.py", "if self._begun and not joins:", "if False:", (TURNS, "-k", "share_devices")),
    Mutant(
        "link/device_out.py",
        "turn = turns_of(runtime, index, OUTWARD).take(self, go, self._host.home.call_soon)",
        "turn = type(turns_of(runtime, index, OUTWARD))().take(self, go, self._host.home.call_soon)",
        (TURNS, "-k", "share_devices"),
    ),
    # ---- memory of another process that is open here
    Mutant("device/openings.py", "self._close(self._outdated())", "pass", (OPENINGS, "-k", "no_more_than or gave_back")),
    Mutant("link/device_in.py", "if openings.has(leaves) else sys.maxsize", "", (OPENINGS, "-k", "between_two")),
    Mutant("link/device_in.py", "self._copy(runtime, index, targets, start, over)", "over(None)", (DEVICES, "-k", "copies_from")),
]


def mutated(mutant: Mutant) -> str:
    """The file with it. Raises AssertionError if its code is not there once."""
    text = (ROOT / "aiorlinf" / mutant.file).read_text()
    assert text.count(mutant.code) == 1, f"{mutant.name} is there {text.count(mutant.code)} times"
    return text.replace(mutant.code, mutant.instead)


def main(wanted: str = "") -> int:
    """Let the tests kill those with this text in their names, one after the other. Returns how many live."""
    alive = 0
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place)
        for name in ("aiorlinf", "tests", "scripts"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        for mutant in MUTANTS:
            if wanted not in mutant.name:
                continue
            file = copy / "aiorlinf" / mutant.file
            before = file.read_text()
            file.write_text(mutated(mutant))
            verdict = _verdict(copy, mutant.killers)
            file.write_text(before)
            alive += not verdict.startswith("killed")
            print(f"{mutant.name}\n        {verdict}", flush=True)
    print(f"{alive} are alive")
    return alive


def _verdict(copy: Path, killers: Sequence[str]) -> str:
    """Killed is what makes a test fail as tests fail; a crash or a hang is no verdict."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-x", "-p", "no:cacheprovider", *killers]
    try:
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"ALIVE: no verdict within {LIMIT_S} s"
    if done.returncode == 0:
        return f"ALIVE: {done.stdout.splitlines()[-1]}"
    first = next((line for line in done.stdout.splitlines() if line.startswith(("FAILED tests/", "ERROR tests/"))), "")
    if done.returncode != 1 or not first:
        return f"ALIVE: pytest ended with {done.returncode}: {(done.stderr or done.stdout)[-300:]}"
    return f"killed by {first.partition(' ')[2][:200]}"


if __name__ == "__main__":
    sys.exit(bool(main(*sys.argv[1:])))
