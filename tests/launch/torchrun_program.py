"""What the tests run under torchrun. Its output is one line of JSON from rank 0.

With ``--fail``, rank 1 dies in the middle of a gather in the first round, so that torchrun starts all anew.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import torch

import aiorlinf
from aiorlinf.errors import PeerError

__all__ = ["main"]


def main() -> None:
    """One worker."""
    rank = int(os.environ["RANK"])
    dies = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and "--fail" in sys.argv
    if dies:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it within 0.1 s, before a busy machine lets rank 0 see the death
    with aiorlinf.init(backend="auto") as comm:
        weights = comm.broadcast(torch.arange(50_000.0), root=0, timeout=60).wait()
        assert torch.equal(weights, torch.arange(50_000.0))
        if dies:
            if rank == 1:
                os._exit(3)
            try:
                comm.gather(rank, root=0).wait()
            except PeerError as error:
                raise SystemExit(f"as expected: {error}") from None
        parts = comm.gather((str(comm.address), comm.incarnation, comm.job), root="worker:0", timeout=60).wait()
        links = comm.gather({link.remote: link.backend for link in comm.stats().links}, timeout=60).wait()
    if rank == 0:
        print(json.dumps({"parts": parts, "links": links}), flush=True)


if __name__ == "__main__":
    main()
