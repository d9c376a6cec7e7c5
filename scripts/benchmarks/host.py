"""The suite ``host``: what two processes of one host can gain from sharing memory, against copying it. Data only."""

from __future__ import annotations

from typing import Final

from scripts.benchmarks.plan import MIB, Aim, Case, Row, Suite, delay_rows, rate_row, time_row

__all__ = ["HOST"]

CALLBACKS: Final = "bare uvloop Unix socket, callbacks"
TASKS: Final = "bare uvloop Unix socket, tasks that await"
COPY: Final = "limit: memory copy, warm"
GLOO_LIST: Final = "Gloo send_object_list"
SINGLE: Final = "bare uvloop Unix socket, one write per frame"
SMALLEST: Final = "**aiorlinf**, comm.empty of 1 MiB"

SMALL_DICT_RTT = Case(
    "small_dict_rtt",
    "small_dict_rtt",
    "Round trip of a small dict",
    "µs",
    "lower",
    (
        time_row("limit: one byte over uvloop Unix socket", "bare", "byte_unix"),
        time_row(CALLBACKS, "bare", "pickle_unix"),
        time_row(TASKS, "bare", "await_unix"),
        time_row("**aiorlinf** send/recv", "ours-auto", "await", aims=(Aim("≤", 1.5, CALLBACKS),), compared=(TASKS,)),
        time_row("multiprocessing.Pipe", "pipe", ""),
        time_row("torch.multiprocessing.Queue", "torch-queue", ""),
        time_row("pyzmq asyncio", "zmq", ""),
        time_row(GLOO_LIST, "raw-gloo", ""),
        time_row("Ray actor call", "ray", ""),
    ),
    notes=("Bare: length prefix and pickle. A program that awaits its messages cannot be faster than the row with tasks.",),
)

SMALL_TENSOR_RTT = Case(
    "small_tensor_rtt",
    "small_tensor_rtt",
    "Round trip of a float32[64] tensor",
    "µs",
    "lower",
    (
        time_row(CALLBACKS, "bare", "raw_unix"),
        time_row(TASKS, "bare", "await_unix"),
        time_row("**aiorlinf** send/recv", "ours-auto", "await", compared=(CALLBACKS, TASKS)),
        time_row("multiprocessing.Pipe bytes", "pipe", ""),
        time_row("torch.multiprocessing.Queue", "torch-queue", ""),
        time_row("pyzmq asyncio", "zmq", ""),
        time_row("raw Gloo send/recv", "raw-gloo", ""),
        time_row("Ray actor call", "ray", ""),
    ),
    notes=("Bare: length prefix and the tensor's bytes, of which the receiver makes a tensor of its own; the type is not said.",),
)


def tensor_case(name: str, share: int) -> Case:
    return Case(
        name,
        "tensor",
        "One large tensor, acknowledged",
        "GB/s",
        "higher",
        (
            rate_row(COPY, "bare", "memcpy_warm"),
            rate_row("limit: memory copy, fresh memory", "bare", "memcpy_fresh"),
            rate_row("limit: uvloop Unix socket, into a warm buffer", "bare", "into_unix"),
            rate_row("**aiorlinf shm** send/recv", "ours-shm", "fresh", aims=(Aim("≥", 0.9, COPY),)),
            rate_row("**aiorlinf shm** send_tensor/recv_tensor, into a warm buffer", "ours-shm", "into", compared=(COPY,)),
            rate_row("**aiorlinf stream** send/recv", "ours-stream", "fresh"),
            rate_row("raw Gloo send/recv, into a warm buffer", "raw-gloo", "into"),
            rate_row("raw Gloo send/recv, into a fresh tensor", "raw-gloo", "fresh"),
            rate_row("multiprocessing.Pipe bytes, into a warm buffer", "pipe", "into"),
            rate_row("torch.multiprocessing.Queue, a new tensor each time", "torch-queue", "new"),
            rate_row("torch.multiprocessing.Queue, one tensor again and again (shared, not sent)", "torch-queue", "again"),
            rate_row("pyzmq asyncio, a fresh tensor", "zmq", "fresh"),
            rate_row("Ray actor call, the tensor as argument", "ray", "argument"),
            rate_row("Ray put, and a read-only view by the actor", "ray", "stored"),
        ),
        tensor_share=share,
        notes=("A tensor that our receiver gets is its own and may be written to. A receiver of ours that has a buffer copies once more.",),
    )


GIVEN = Case(
    "given",
    "given",
    "A tensor made with comm.empty is sent, acknowledged",
    "µs",
    "lower",
    (
        time_row(SMALLEST, "ours-shm", str(MIB), aims=(Aim("<", 300.0),)),
        time_row("**aiorlinf**, comm.empty of 64 MiB", "ours-shm", str(64 * MIB), aims=(Aim("<", 300.0), Aim("≤", 1.25, SMALLEST))),
        time_row("**aiorlinf**, comm.empty of 256 MiB", "ours-shm", str(256 * MIB), aims=(Aim("<", 300.0), Aim("≤", 1.25, SMALLEST))),
        time_row("**aiorlinf**, 256 MiB, filled just before", "ours-shm", f"{256 * MIB} filled", compared=(SMALLEST,)),
    ),
    notes=(
        "Making and filling the tensor is not in the time: that is the sender's own work, with or without us.",
        "A sender that has just filled 256 MiB has nothing else left in its caches; the other rows write the tensor's ends only.",
    ),
)

NESTED = Case(
    "nested",
    "nested",
    "A nested object of ten tensors with metadata, acknowledged",
    "GB/s",
    "higher",
    (
        rate_row(COPY, "bare", "memcpy_warm"),
        rate_row("limit: memory copy, fresh memory", "bare", "memcpy_fresh"),
        rate_row("**aiorlinf shm** send/recv", "ours-shm", "object", aims=(Aim("≥", 0.85, COPY), Aim("≥", 3.2, GLOO_LIST))),
        rate_row("**aiorlinf stream** send/recv", "ours-stream", "object"),
        rate_row(GLOO_LIST, "raw-gloo", ""),
        rate_row("multiprocessing.Pipe, pickled", "pipe", ""),
        rate_row("torch.multiprocessing.Queue, a new object each time", "torch-queue", "new"),
        rate_row("pyzmq asyncio, pickled", "zmq", ""),
        rate_row("Ray actor call, the object as argument", "ray", "argument"),
    ),
)

STREAM = Case(
    "stream_256B",
    "stream_256B",
    "float32[64] messages one way",
    "messages/s",
    "higher",
    (
        rate_row(SINGLE, "bare", "single_unix"),
        rate_row("bare uvloop Unix socket, coalesced writes", "bare", "coalesced_unix"),
        rate_row(
            "**aiorlinf**, 256 works under way",
            "ours-auto",
            "window",
            aims=(Aim("≥", 0.6, SINGLE),),
            compared=("bare uvloop Unix socket, coalesced writes",),
        ),
        rate_row(
            "**aiorlinf**, `await group.send` in a loop",
            "ours-auto",
            "await",
            aims=(Aim("≥", 0.6, SINGLE),),
            compared=("bare uvloop Unix socket, coalesced writes",),
        ),
        rate_row("multiprocessing.Pipe bytes", "pipe", ""),
        rate_row("pyzmq asyncio", "zmq", ""),
        rate_row("raw Gloo send/recv", "raw-gloo", ""),
    ),
    notes=("Bare: the sender copies each tensor's bytes behind a length prefix, the receiver makes an owned tensor of each frame.",),
)

FIRST_MESSAGE = Case(
    "first_message",
    "first_message",
    "First message between two processes that have never connected, answered",
    "ms",
    "lower",
    (
        time_row("bare uvloop Unix socket", "bare", "unix"),
        time_row("**aiorlinf**, small dict", "ours-auto", "object"),
        time_row("**aiorlinf shm**, 1 MiB tensor (makes the memory)", "ours-shm", "tensor"),
        time_row("raw Gloo, new group and a tensor", "raw-gloo", ""),
        time_row("pyzmq asyncio", "zmq", ""),
    ),
    fresh=True,
)

LOOP_DELAY = Case(
    "loop_delay",
    "loop_delay",
    "Delay of the event loop while large messages pass both ways",
    "ms",
    "lower",
    (
        *delay_rows("idle loop", "bare", "idle"),
        *delay_rows("bare uvloop Unix socket, into a warm buffer", "bare", "into_unix"),
        *delay_rows("**aiorlinf shm** send/recv", "ours-shm", "fresh", aim=Aim("<", 5.0)),
        *delay_rows("**aiorlinf shm** send_tensor/recv_tensor", "ours-shm", "into", aim=Aim("<", 5.0)),
    ),
    notes=("Lateness of a 1 ms timer in both processes, the worse of the two; up to 1 ms of it is uvloop's rounding.",),
)

BOTH_DIRECTIONS = Case(
    "both_directions",
    "both_directions",
    "Large messages both ways at once, sum of both rates",
    "GB/s",
    "higher",
    (
        rate_row("limit: memory copy, warm, in both processes at once", "bare", "memcpy_both"),
        rate_row("bare uvloop Unix socket, into a warm buffer", "bare", "into_unix"),
        rate_row("**aiorlinf shm** send/recv", "ours-shm", "fresh", compared=("limit: memory copy, warm, in both processes at once",)),
        rate_row("**aiorlinf stream** send/recv", "ours-stream", "fresh"),
        rate_row("raw Gloo isend/irecv, into a warm buffer", "raw-gloo", ""),
        rate_row("pyzmq asyncio, copied into a warm buffer", "zmq", ""),
    ),
)


def steady_rows(label: str, contender: str, *, growth: Aim | None = None, faults: Aim | None = None) -> tuple[Row, ...]:
    return (
        Row(f"{label}: growth", contender, "", "growth", "MiB", aims=() if growth is None else (growth,)),
        Row(f"{label}: page faults per message", contender, "", "faults", "", aims=() if faults is None else (faults,)),
        Row(f"{label}: rate", contender, "", "rate", "GB/s (higher is better)"),
    )


STEADY = Case(
    "steady",
    "steady",
    "A steady stream of large tensors, of which the receiver keeps the last 8",
    "MiB and page faults",
    "lower",
    (
        *steady_rows("**aiorlinf shm**", "ours-shm", growth=Aim("≤", 8.0), faults=Aim("≤", 4.0)),
        *steady_rows("**aiorlinf stream**", "ours-stream", growth=Aim("≤", 8.0), faults=Aim("≤", 4.0)),
        *steady_rows("raw Gloo, into fresh tensors", "raw-gloo"),
        *steady_rows("multiprocessing.Pipe, into fresh tensors", "pipe"),
        *steady_rows("torch.multiprocessing.Queue, a copy each time", "torch-queue"),
    ),
    notes=(
        "The first quarter of the messages is not counted; the worse of the two processes is. 16 MiB are 4,096 pages.",
        "Growth is that of everything resident, shared memory included, at its largest.",
    ),
)

HOST: Final = Suite(
    "host",
    "two processes on one host: shared memory against copies of it, sockets, Gloo, multiprocessing, pyzmq and Ray",
    (
        SMALL_DICT_RTT,
        SMALL_TENSOR_RTT,
        tensor_case("tensor_64MiB", 1),
        tensor_case("tensor_256MiB", 4),
        GIVEN,
        NESTED,
        STREAM,
        FIRST_MESSAGE,
        LOOP_DELAY,
        BOTH_DIRECTIONS,
        STEADY,
    ),
)
