"""What this machine can do at best."""

from __future__ import annotations

import time

import torch

from scripts.benchmarks.contender import Effort, Metrics
from scripts.benchmarks.tensors import make_bulk

__all__ = ["memcpy"]


def memcpy(variant: str, effort: Effort) -> Metrics:
    """Copy of a large tensor in one thread, in GB/s: into the same memory again, or into new memory each time."""
    source = make_bulk(effort.tensor_bytes)
    warm = torch.empty_like(source)
    warm.copy_(source)
    took = []
    for _ in range(effort.transfers):
        start = time.perf_counter()
        target = warm if variant == "memcpy_warm" else torch.empty_like(source)
        target.copy_(source)
        took.append(time.perf_counter() - start)
        del target
    took.sort()
    return {"rate": source.nbytes / took[len(took) // 2] / 1e9}
