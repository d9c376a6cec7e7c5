"""The driver's side of the victims: starts them, tells them what to do, kills them. None outlives the driver."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import aiorlinf
from scripts.tortures import victim
from scripts.tortures.proc import Footprint, footprint

__all__ = ["Failed", "Stage", "VictimProcess", "wait_until"]

LIMIT_S = 60.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["scripts.tortures.victim"])


class Failed(Exception):
    """A victim did something that it should not, or did not answer."""


class VictimProcess:
    """One life of one worker.

    Attributes:
        life: its number, from 1.
        pid: process id.
    """

    def __init__(self, address: str, life: int, environment: Mapping[str, str]) -> None:
        self.address = address
        self.life = life
        self._connection, theirs = _context.Pipe()
        self._process = _context.Process(target=victim.run, args=(theirs, os.getpid(), dict(environment), address), daemon=True)
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def tell(self, *order: Any) -> None:
        """Give an order; `answer` waits until it is carried out."""
        self._connection.send(order)

    def answer(self) -> Any:
        """Of the oldest order that was not answered. Raises Failed."""
        try:
            if not self._connection.poll(LIMIT_S):
                raise Failed(f"{self} does not answer within {LIMIT_S:g} s")
            state, value = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise Failed(f"{self} died of itself") from None
        if state != "ok":
            raise Failed(f"{self}: {value}")
        return value

    def ask(self, *order: Any) -> Any:
        """`tell` and `answer`."""
        self.tell(*order)
        return self.answer()

    def footprint(self) -> Footprint:
        """What it has now."""
        return footprint(self.pid)

    def kill(self) -> None:
        """SIGKILL, by its process id."""
        self._process.kill()
        self._process.join(LIMIT_S)
        self._connection.close()

    def end(self) -> None:
        """In good order if it can."""
        self._connection.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(LIMIT_S)

    def __str__(self) -> str:
        return f"{self.address}#{self.life} (pid {self.pid})"


class Stage:
    """The manager of a job, and the victims that live in it."""

    def __init__(self, comm: aiorlinf.Worker) -> None:
        self._comm = comm
        self._lives: dict[str, int] = {}
        self.alive: list[VictimProcess] = []

    def start(self, address: str) -> VictimProcess:
        """A worker's next life."""
        life = self._lives[address] = self._lives.get(address, 0) + 1
        made = VictimProcess(address, life, self._comm.env(address))
        self.alive.append(made)
        return made

    def kill(self, victim: VictimProcess) -> None:
        """End a worker's life."""
        self.alive.remove(victim)
        victim.kill()

    @classmethod
    @contextmanager
    def open(cls, config: Mapping[str, Any] | None = None) -> Iterator[Stage]:
        """A job without victims; those that are left at the end are ended."""
        with aiorlinf.init("driver:0", config=config, loop="thread") as comm:
            stage = cls(comm)
            try:
                yield stage
            finally:
                for left in list(stage.alive):
                    stage.alive.remove(left)
                    left.end()


def wait_until(condition: Any, seconds: float) -> bool:
    """Whether it came to hold in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True
