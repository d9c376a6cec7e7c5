"""What is fed, each with a corpus of good input: taken from the code that writes it, so that it never grows old."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from aiorlinf.codec.base import Codec, Context
from aiorlinf.codec.codecs.lz4 import Lz4
from aiorlinf.codec.codecs.zstd import Zstd
from aiorlinf.codec.compressing import LeafCompressor, compress_chunks
from aiorlinf.codec.contexts import ContextPool
from aiorlinf.codec.decompressing import Decompressor
from aiorlinf.codec.header import MIN_CHUNK
from aiorlinf.codec.memory import byte_view
from aiorlinf.codec.pool import TensorBufferPool
from aiorlinf.codec.stats import CompressionStats
from aiorlinf.link.placement import decode_places
from aiorlinf.manager.protocol import MessageReader, encode
from aiorlinf.manager.requests import parse_request
from aiorlinf.wire.frames import Start, Via
from aiorlinf.wire.handshake import ClientHandshake, Done, Hello, ServerHandshake, Write
from aiorlinf.wire.inline import decode_inline, pack_inline
from aiorlinf.wire.manifest import Limits, decode_manifest, encode_manifest
from aiorlinf.wire.tensor_header import decode_tensor_spec, encode_tensor_spec
from aiorlinf.wire.tree import flatten

__all__ = ["Target", "all_targets"]

_TOKEN = b"the job's secret"
_LIMITS = Limits(max_manifest_bytes=1 << 16, max_message_bytes=1 << 20)


@dataclass(frozen=True)
class Target:
    """One reader.

    Attributes:
        name: on the command line.
        corpus: good input.
        read: feeds one input; the errors that it may raise are those of this library.
        share: how much of all inputs it gets, relative to the others.
    """

    name: str
    corpus: tuple[bytes, ...]
    read: Callable[[bytes], object]
    share: int = 1


def _objects() -> list[Any]:
    tensor = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    return [
        None,
        {"step": 1, "reward": 0.5, "name": "a", "tags": [1, 2, (3, None)]},
        tensor,
        [tensor, tensor.to(torch.bfloat16), torch.zeros(0)],
        {"a": tensor, "b": {"c": torch.ones(3, dtype=torch.bool)}},
        {"array": np.arange(6, dtype=">i4").reshape(2, 3), "bytes": bytes(300), 3: {1, 2}, "z": 1 + 2j},
    ]


def _wire() -> Iterable[Target]:
    flats = [flatten(obj, allow_pickle=False) for obj in _objects()]
    yield Target("manifest", tuple(encode_manifest(flat) for flat in flats), lambda data: decode_manifest(data, limits=_LIMITS), 4)
    yield Target("message", tuple(map(pack_inline, flats)), lambda data: decode_inline(memoryview(data), allow_pickle=False), 4)
    tensors = [torch.zeros(2, 3, dtype=dtype) for dtype in (torch.float32, torch.bool, torch.bfloat16)]
    yield Target("tensor-header", tuple(map(encode_tensor_spec, tensors)), decode_tensor_spec, 1)
    places = b"".join(number.to_bytes(8, "little") for number in (1, 64, 2, 128, 3, 0))
    starts = [Start(via, generation=1, threshold=4096, place=places).encode() for via in Via]
    yield Target("start", tuple(starts), lambda data: Start.decode(memoryview(data)), 1)
    yield Target("places", (places, places[:16], b""), lambda data: decode_places(memoryview(data), [100, 200, 300]), 1)


def _greetings() -> tuple[bytes, bytes]:
    """All that a client and a server say in one good handshake."""
    client = ClientHandshake(_TOKEN, Hello("link", "job", "a:0", 1, "b:0"))
    server = ServerHandshake(_TOKEN, Hello("link", "job", "b:0", 1))
    said = {client: bytearray(), server: bytearray()}
    waiting: list[tuple[Any, Any, list[Any]]] = [(client, server, list(client.start())), (server, client, list(server.start()))]
    while waiting:
        speaker, listener, instructions = waiting.pop(0)
        for instruction in instructions:
            if isinstance(instruction, Write):
                said[speaker] += instruction.data
                waiting.append((listener, speaker, list(listener.feed(instruction.data))))
            else:
                assert isinstance(instruction, Done), instruction
    return bytes(said[client]), bytes(said[server])


def _handshakes() -> Iterable[Target]:
    from_client, from_server = _greetings()

    def server(data: bytes) -> None:
        shake = ServerHandshake(_TOKEN, Hello("link", "job", "b:0", 1))
        shake.start()
        _feed(shake, data)

    def client(data: bytes) -> None:
        shake = ClientHandshake(_TOKEN, Hello("link", "job", "a:0", 1, "b:0"))
        shake.start()
        _feed(shake, data)

    strangers = (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", bytes.fromhex("16030102000100"), b"\x80\x04cos\nsystem\n.")
    yield Target("server-handshake", (from_client, *strangers), server, 2)
    yield Target("client-handshake", (from_server, *strangers), client, 2)


def _feed(shake: Any, data: bytes) -> None:
    """In two pieces: a boundary anywhere must not matter."""
    for piece in (data[: len(data) // 3], data[len(data) // 3 :]):
        shake.feed(piece)
    shake.eof()


def _manager() -> Iterable[Target]:
    record = {
        "host": "127.0.0.1",
        "port": 4711,
        "pid": 1,
        "process": "ab",
        "devices": ["cpu"],
        "labels": {"rack": "1"},
        "host_id": "x",
        "unix": "",
    }
    life = ["a:0", 1]
    messages: list[dict[str, Any]] = [
        {"op": "register", "id": 1, "address": "a:0", "incarnation": 1, **record},
        {"op": "unregister", "id": 2},
        {"op": "lookup", "id": 3, "address": "b:0", "timeout": 1.5, "above": 0},
        {"op": "workers", "id": 4},
        {"op": "publish", "id": 5, "kind": "channel", "name": "traj", "value": {"host": "c:0"}, "again": False},
        {"op": "find", "id": 6, "kind": "channel", "name": "traj", "timeout": None},
        {"op": "withdraw", "id": 7, "kind": "channel", "name": "traj"},
        {"op": "watch", "workers": [life]},
        {"op": "learn", "lives": [[*life, record]]},
        {"op": "expect", "workers": ["a:0", "b:0"]},
        {"op": "remember", "config": {"cluster": {}}, "expected": ["a:0"]},
        {"op": "book", "id": 8, "budgets": [1, 2], "nbytes": 100},
        {"op": "beat"},
    ]

    def read(data: bytes) -> None:
        for message in MessageReader().feed(data):
            parse_request(message)

    yield Target("manager", tuple(map(encode, messages)), read, 4)


def _codecs() -> Iterable[Target]:
    plain = torch.arange(40_000, dtype=torch.int64).view(torch.uint8)[:150_000] % 7
    pool = TensorBufferPool(1 << 24)
    stats = CompressionStats()
    both: tuple[Codec[Any], ...] = (Lz4(), Zstd())
    for codec in both:
        contexts = ContextPool(codec.context, codec.max_inflight)
        compressor = LeafCompressor(byte_view(plain), codec, contexts, pool, stats, chunk_bytes=MIN_CHUNK)
        whole = b"".join(piece.head + bytes(piece.body) for piece in compress_chunks(compressor))

        context = codec.context()

        def read(data: bytes, codec: Codec[Any] = codec, context: Context = context) -> None:
            decompressor = Decompressor(torch.empty(plain.numel(), dtype=torch.uint8), pool, {codec.number}, stats)
            try:
                _, records = decompressor.feed(memoryview(data))
                for record in records:
                    try:
                        record.run(context if record.codec else None)
                    finally:
                        decompressor.finish(record)
                decompressor.end()
            finally:
                decompressor.abort()

        yield Target(f"{codec.name}-leaf", (whole,), read, 1)


def all_targets() -> list[Target]:
    """Every reader that needs no link; those of frames are in `scripts.fuzzing.links`."""
    return [*_wire(), *_handshakes(), *_manager(), *_codecs()]
