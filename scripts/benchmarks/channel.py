"""The suite ``channel``: a queue in a process of its own, against a bare socket, a memory copy and Ray's queue. Data only."""

from __future__ import annotations

from typing import Final

from scripts.benchmarks.plan import Aim, Case, Row, Suite, rate_row

__all__ = ["CHANNEL", "POLICIES"]

SINGLE: Final = "bare uvloop TCP, one write per frame"
COALESCED: Final = "bare uvloop TCP, coalesced writes"
COPY: Final = "limit: memory copy of 1 MiB, to the same place again"
COPIES: Final = "limit: memory copy of 1 MiB, to 64 places in turn"
RAY: Final = "ray.util.queue.Queue"
POLICIES: Final = ("performance_aware", "shortest_queue", "weighted_round_robin", "none")

ITEMS = Case(
    "items_1KiB",
    "channel_items",
    "float32[256] items from one process to another",
    "items/s",
    "higher",
    (
        rate_row(SINGLE, "bare", "single_tcp"),
        rate_row(COALESCED, "bare", "coalesced_tcp"),
        rate_row(
            "**aiorlinf** channel, puts and gets pipelined",
            "ours-channel",
            "pipelined",
            aims=(Aim("≥", 0.2, SINGLE), Aim("≥", 50, RAY)),
            compared=(COALESCED,),
        ),
        rate_row("**aiorlinf** channel, each put and get awaited", "ours-channel", "await", compared=(SINGLE,)),
        rate_row(RAY, "ray-queue", ""),
    ),
    notes=("Bare: one hop between two processes. A channel is two hops, through a third process.",),
)

LARGE = Case(
    "items_1MiB",
    "channel_large",
    "Tensors of 1 MiB from one process to another",
    "GB/s",
    "higher",
    (
        rate_row(COPY, "bare", "memcpy_1MiB"),
        rate_row(COPIES, "bare", "memcpy_1MiB_many"),
        rate_row(
            "**aiorlinf** channel, puts and gets pipelined", "ours-channel", "pipelined", aims=(Aim("≥", 0.7, COPIES),), compared=(COPY,)
        ),
        rate_row("**aiorlinf** channel, processes where the scheduler likes", "ours-channel", "wherever", compared=(COPIES,)),
        rate_row(RAY, "ray-queue", ""),
    ),
    notes=(
        "A copy to the same place stays in the processor's cache. A queue holds many items, each in a place of its own.",
        "Who puts has a core of its own; the channel worker and who gets are on others.",
    ),
)

BALANCE = Case(
    "balance",
    "channel_balance",
    "Largest deviation of a consumer's busy time from the mean, 8 processes of speeds 1 to 4, weights 1 to 16",
    "%",
    "lower",
    tuple(
        Row(f"**aiorlinf** {policy}", "ours-channel", policy, "time", aims=(Aim("≤", 5, None),) if policy == "performance_aware" else ())
        for policy in POLICIES
    ),
    notes=("Work is slept, so that eight consumers fit on any machine. Without a policy whoever asks next gets the oldest item.",),
)

CHANNEL = Suite("channel", "a channel in a process of its own", (ITEMS, LARGE, BALANCE))
