"""Processes of ``scripts/bench collectives``: functions that talk to us over a pipe, and end with us."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

__all__ = ["Child", "Ended", "started"]

LIMIT_S: Final = 240.0
"""For one word of a process: far more than any measurement takes."""

_END_S: Final = 5.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["scripts.benchmarks.collectives"])  # torch is imported once


class Ended(SystemExit):
    """A process has ended, or says nothing."""


class Child:
    """A process, seen from here."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._connection, theirs = _context.Pipe()
        self._process = _context.Process(target=function, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def say(self, word: Any) -> None:
        """It gets it by `recv`."""
        self._connection.send(word)

    def hear(self) -> Any:
        """What it sends next. Raises Ended."""
        try:
            if self._connection.poll(LIMIT_S):
                return self._connection.recv()
        except EOFError:
            self._process.join(_END_S)
            raise Ended(f"a process of the benchmark ended with {self._process.exitcode}") from None
        raise Ended(f"a process of the benchmark has said nothing for {LIMIT_S:g} s")

    def end(self) -> None:
        """Close the pipe, which it takes as the sign to end; kill it if it does not."""
        self._connection.close()
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@contextlib.contextmanager
def started(functions: Sequence[Callable[..., None]]) -> Iterator[list[Child]]:
    """Run each of these as ``function(connection)`` in a process of its own."""
    children: list[Child] = []
    try:
        children.extend(map(Child, functions))
        yield children
    finally:
        for child in children:
            child.end()
