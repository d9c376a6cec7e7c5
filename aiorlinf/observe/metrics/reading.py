"""The figures of a worker of this process, at this moment, from any thread and whatever its loop is doing."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiorlinf.observe.metrics.samples import Sample, of_worker

if TYPE_CHECKING:
    from aiorlinf.worker import Worker

__all__ = ["read_worker"]

_TRIES = 5


def read_worker(comm: Worker) -> Sequence[Sample]:
    """Nothing if it has not joined yet, or is closed. Waits for nothing."""
    if comm.closed or not comm.joined:
        return []
    tries = 0
    while True:
        tries += 1
        try:
            return list(of_worker(str(comm.address), comm.incarnation, socket.gethostname(), comm.report()))
        except RuntimeError:  # something changed while it was looked at from another thread
            if tries == _TRIES:
                raise
