"""The suite ``p2p``: the connection itself, against a bare socket and raw Gloo. Data only."""

from __future__ import annotations

from typing import Final

from scripts.benchmarks.plan import Aim, Case, Row, Suite, delay_rows, rate_row, time_row

__all__ = ["P2P"]

SMALL_DICT_RTT = Case(
    "small_dict_rtt",
    "small_dict_rtt",
    "Round trip of a small dict",
    "µs",
    "lower",
    (
        time_row("limit: one byte over uvloop TCP", "bare", "byte_tcp"),
        time_row("limit: one byte over uvloop Unix socket", "bare", "byte_unix"),
        time_row("bare uvloop TCP, length prefix and pickle", "bare", "pickle_tcp"),
        time_row("bare uvloop Unix socket, length prefix and pickle", "bare", "pickle_unix"),
        time_row("bare uvloop TCP, the same with tasks that await", "bare", "await_tcp"),
        time_row(
            "**aiorlinf** send/recv",
            "ours-stream",
            "await",
            aims=(Aim("≤", 2.0, "bare uvloop TCP, length prefix and pickle"),),
            compared=("bare uvloop Unix socket, length prefix and pickle",),
        ),
        time_row("multiprocessing.Pipe", "pipe", ""),
        time_row("pyzmq asyncio", "zmq", ""),
        time_row("Gloo send_object_list", "raw-gloo", ""),
    ),
)

TENSOR = Case(
    "tensor_64MiB",
    "tensor",
    "One large tensor, acknowledged",
    "GB/s",
    "higher",
    (
        rate_row("limit: memory copy, warm", "bare", "memcpy_warm"),
        rate_row("limit: memory copy, fresh memory", "bare", "memcpy_fresh"),
        rate_row("limit: uvloop TCP, into a warm buffer", "bare", "into_tcp"),
        rate_row("limit: uvloop TCP, into fresh memory", "bare", "fresh_tcp"),
        rate_row("raw Gloo send/recv, into a warm buffer", "raw-gloo", "into"),
        rate_row("raw Gloo send/recv, into a fresh tensor", "raw-gloo", "fresh"),
        rate_row(
            "**aiorlinf gloo** send_tensor/recv_tensor, into a warm buffer",
            "ours-gloo",
            "into",
            aims=(Aim("≥", 0.9, "raw Gloo send/recv, into a warm buffer"),),
        ),
        rate_row(
            "**aiorlinf gloo** send/recv, a fresh tensor",
            "ours-gloo",
            "fresh",
            aims=(Aim("≥", 0.9, "raw Gloo send/recv, into a fresh tensor"),),
        ),
        rate_row(
            "**aiorlinf stream** send_tensor/recv_tensor, into a warm buffer",
            "ours-stream",
            "into",
            compared=("limit: uvloop TCP, into a warm buffer",),
        ),
        rate_row(
            "**aiorlinf stream** send/recv, a fresh tensor",
            "ours-stream",
            "fresh",
            compared=("limit: uvloop TCP, into fresh memory",),
        ),
        rate_row("multiprocessing.Pipe bytes, into a warm buffer", "pipe", "into"),
        rate_row("multiprocessing.Pipe bytes, a fresh tensor", "pipe", "fresh"),
        rate_row("pyzmq asyncio, copied into a warm buffer", "zmq", "into"),
        rate_row("pyzmq asyncio, a fresh tensor", "zmq", "fresh"),
    ),
)

STREAM = Case(
    "stream_256B",
    "stream_256B",
    "float32[64] messages one way",
    "messages/s",
    "higher",
    (
        rate_row("bare uvloop TCP, one write per frame", "bare", "single_tcp"),
        rate_row("bare uvloop TCP, coalesced writes", "bare", "coalesced_tcp"),
        rate_row("bare uvloop Unix socket, coalesced writes", "bare", "coalesced_unix"),
        rate_row(
            "**aiorlinf**, 256 works under way",
            "ours-stream",
            "window",
            aims=(Aim("≥", 0.3, "bare uvloop TCP, one write per frame"), Aim("≥", 0.3, "bare uvloop TCP, coalesced writes")),
        ),
        rate_row(
            "**aiorlinf**, `await group.send` in a loop",
            "ours-stream",
            "await",
            aims=(Aim("≥", 0.3, "bare uvloop TCP, one write per frame"), Aim("≥", 0.3, "bare uvloop TCP, coalesced writes")),
        ),
        rate_row("multiprocessing.Pipe bytes", "pipe", ""),
        rate_row("pyzmq asyncio", "zmq", ""),
        rate_row("raw Gloo send/recv", "raw-gloo", ""),
    ),
    notes=("Bare: the sender copies each tensor's bytes behind a length prefix, the receiver makes an owned tensor of each frame.",),
)

LOOP_DELAY = Case(
    "loop_delay",
    "loop_delay",
    "Delay of the event loop while large messages pass both ways",
    "ms",
    "lower",
    (
        *delay_rows("idle loop", "bare", "idle"),
        *delay_rows("bare uvloop TCP, into a warm buffer", "bare", "into_tcp"),
        *delay_rows("**aiorlinf stream** send_tensor/recv_tensor", "ours-stream", "into", aim=Aim("<", 5.0)),
        *delay_rows("**aiorlinf stream** send/recv", "ours-stream", "fresh", aim=Aim("<", 5.0)),
        *delay_rows("**aiorlinf gloo** send_tensor/recv_tensor", "ours-gloo", "into", aim=Aim("<", 5.0)),
        *delay_rows("**aiorlinf gloo** send/recv", "ours-gloo", "fresh", aim=Aim("<", 5.0)),
    ),
    notes=(
        "Lateness of a 1 ms timer in both processes, the worse of the two; up to 1 ms of it is uvloop's rounding.",
        "Tensors that arrive are kept to the end: giving 64 MiB back to the system takes 5 ms of the loop's time by itself.",
        "Objects made before the start are left out of Python's full collections (`gc.freeze`), which otherwise take 50 ms and more.",
    ),
)

IN_FLIGHT = Case(
    "in_flight",
    "in_flight",
    "Many receives posted, then as many sends started, then waited for",
    "µs per work",
    "lower",
    (
        time_row("**aiorlinf**, time per work", "ours-stream", "object"),
        Row("**aiorlinf**, threads added", "ours-stream", "object", "threads", "threads", aims=(Aim("≤", 0.0),)),
    ),
)

FIRST_MESSAGE = Case(
    "first_message",
    "first_message",
    "First message between two processes that have never connected, answered",
    "ms",
    "lower",
    (
        time_row("bare uvloop TCP", "bare", "tcp"),
        time_row("**aiorlinf stream**, small dict", "ours-stream", "object"),
        time_row("**aiorlinf gloo**, 1 MiB tensor (makes the pair)", "ours-gloo", "tensor"),
        time_row("raw Gloo, new group and a tensor", "raw-gloo", ""),
        time_row("pyzmq asyncio", "zmq", ""),
    ),
    fresh=True,
)

P2P: Final = Suite(
    "p2p",
    "two processes on one host: latency, rate, message rate, loop delay, works in flight",
    (SMALL_DICT_RTT, TENSOR, STREAM, LOOP_DELAY, IN_FLIGHT, FIRST_MESSAGE),
)
