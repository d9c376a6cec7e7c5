"""What this machine can do at best."""

from __future__ import annotations

import time

import torch

from scripts.benchmarks.contender import Effort, Metrics
from scripts.benchmarks.tensors import make_bulk

__all__ = ["memcpy"]


def memcpy(variant: str, effort: Effort) -> Metrics:
    """Copy of a large tensor in one thread, in GB/s.

    Into the same memory again, into each of 64 places in turn (as what holds many of them has to), or into new memory each time.
    """
    source = make_bulk(effort.tensor_bytes)
    places = [torch.empty_like(source) for _ in range(64 if variant == "memcpy_many" else 1)]
    for place in places:
        place.copy_(source)
    took = []
    for index in range(effort.transfers):
        start = time.perf_counter()
        target = torch.empty_like(source) if variant == "memcpy_fresh" else places[index % len(places)]
        target.copy_(source)
        took.append(time.perf_counter() - start)
        del target
    took.sort()
    return {"rate": source.nbytes / took[len(took) // 2] / 1e9}
