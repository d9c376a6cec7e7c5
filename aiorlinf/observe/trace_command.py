"""``aiorlinf trace``: from the traces of several workers to one picture."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from aiorlinf.errors import UsageError
from aiorlinf.trace.files import PART, merge

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Traces show what became of each message and call of a worker, and when. They are recorded by `aiorlinf run --trace FOLDER`, with
AIORLINF_TRACE=FOLDER in the environment of a worker, or by comm.trace("file.json") in a program."""

_MERGE = """\
Make one file of those of several workers, for https://ui.perfetto.dev or chrome://tracing. Each worker is a process there, and arrows lead
from each send to the arrival of its message. All times are by the manager's clock; for workers on other hosts than the manager's it is
said how exact that is.

Files that end with .part are of workers that are still running, or were killed; they are good for what they hold."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the ``trace`` command."""
    parser = subparsers.add_parser(
        "trace",
        help="merge the traces of several workers",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(metavar="action", required=True, title="actions")
    merging = actions.add_parser(
        "merge",
        help="one file of several",
        description=_MERGE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    merging.add_argument("paths", nargs="+", metavar="FILE_OR_FOLDER", help="traces, or folders of them")
    merging.add_argument("--output", "-o", default="trace.json", metavar="FILE", help="the new file (default: %(default)s)")
    merging.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Merge; the exit code. Errors are for the command line to show."""
    target = Path(args.output)
    try:
        paths = _files(args.paths, target)
        everybody = merge(paths, target)
    except OSError as error:
        raise UsageError(f"a trace cannot be read or written: {error}") from error
    for facts in everybody:
        exact = "" if facts.error_us == 0 else f", times to within {facts.error_us:.0f} µs"
        dropped = f", {facts.dropped} events beyond the limit are missing" if facts.dropped else ""
        print(f"{facts.worker} (process {facts.pid} on {facts.host}){exact}{dropped}")
    print(f"{target}: open it in https://ui.perfetto.dev")
    return 0


def _files(paths: Sequence[str], target: Path) -> list[Path]:
    """Folders stand for the traces in them; of a trace that is there twice, raw and finished, the finished one counts."""
    found: dict[Path, None] = {}
    for path in map(Path, paths):
        if path.is_dir():
            found.update(dict.fromkeys(sorted(file for file in path.iterdir() if file.name.endswith((".json", f".json{PART}")))))
        else:
            found[path] = None
    finished = {str(path) for path in found}
    twice = {path for path in found if path.suffix == PART and str(path).removesuffix(PART) in finished}
    return [path for path in found if path not in twice and path.resolve() != target.resolve()]
