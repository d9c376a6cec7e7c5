"""The section cluster.collective: how messages travel."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from aiorlinf.config.options import option, variant, variant_records

__all__ = ["CollectiveConfig", "SharedMemoryConfig", "TensorBufferPoolConfig", "TensorCompressionConfig"]

_KIB = 1024
_MIB = 1024 * _KIB
_TIB = 1024 * 1024 * _MIB


@dataclass(frozen=True, slots=True)
class SharedMemoryConfig:
    """Payloads between workers of one host, in memory files that both map."""

    enabled: bool = option(True, "off: workers of one host use their connection for large payloads, too")
    max_bytes: int = option(2048 * _MIB, "bound on the shared memory of one worker's sends", minimum=0, maximum=_TIB)
    segment_bytes: int = option(
        64 * _MIB, "size of a memory file, after some smaller ones; larger payloads get their own", minimum=64 * _KIB, maximum=_TIB
    )


@dataclass(frozen=True, slots=True)
class TensorBufferPoolConfig:
    """Memory that payloads are received into, kept for the next ones."""

    max_bytes: int = option(2048 * _MIB, "bound on a worker's memory for received payloads, used and kept", minimum=0, maximum=_TIB)


# Written down, because nothing here loads torch.
_DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    *("uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7", "int1", "int2", "int3", "int4", "int5", "int6", "int7"),
    *("bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"),
)


@dataclass(frozen=True, slots=True)
class TensorCompressionConfig:
    """Lossless compression of tensors in CPU memory."""

    enabled: bool = option(True, "false, or without this section: nothing is compressed")
    codec: str | None = option(
        None, "what compresses: lz4 for fast networks, zstd for slow ones, auto to let each link find out; required when enabled"
    )
    min_bytes: int = option(16 * _KIB, "tensors of fewer bytes go as they are", minimum=0, maximum=_TIB)
    excluded_dtypes: tuple[str, ...] = option(("float32",), "tensors of these dtypes go as they are; [] to try all", choices=_DTYPES)
    parameters: Any = variant("codec", "aiorlinf.codec.registry:codec_parameters")  # noqa: RUF009 - variant makes a dataclass field

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield (key, complaint) for what a single key cannot tell."""
        if self.enabled and self.codec is None:
            allowed = ", ".join(variant_records(dataclasses.fields(self)[-1]))
            yield "codec", f"this key is required when compression is enabled (allowed: {allowed})"


_BACKENDS = ("auto", "stream", "shm", "gloo", "nccl", "cuda_ipc")


@dataclass(frozen=True, slots=True)
class CollectiveConfig:
    """How messages travel between workers."""

    backend: str = option("auto", "carrier of large payloads; auto picks by where the two workers are", choices=_BACKENDS)
    fallback: bool = option(True, "use another backend when the named one is not available, for all messages or for one; off: an error")
    inline_max_bytes: int = option(64 * _KIB, "payloads up to this many bytes ride in the frame", minimum=0, maximum=16 * _MIB)
    window_bytes: int = option(64 * _MIB, "bytes accepted per direction before recv is posted", minimum=1, maximum=_TIB)
    chunk_bytes: int = option(_MIB, "bytes of one piece of a large payload on the stream", minimum=_KIB, maximum=1024 * _MIB)
    max_message_bytes: int = option(_TIB, "larger payloads are refused at the call; bytes", minimum=1, maximum=2**62)
    max_manifest_bytes: int = option(
        16 * _MIB,
        "bound of the description (skeleton and leaf table) of one message that is larger than inline_max_bytes; bytes",
        minimum=_KIB,
        maximum=1024 * _MIB,
    )
    allow_pickle: bool = option(True, "off: only plain containers, tensors, arrays and registered dataclasses can travel")
    shared_memory: SharedMemoryConfig = dataclasses.field(default_factory=SharedMemoryConfig)
    tensor_buffer_pool: TensorBufferPoolConfig = dataclasses.field(default_factory=TensorBufferPoolConfig)
    tensor_compression: TensorCompressionConfig = dataclasses.field(default_factory=lambda: TensorCompressionConfig(enabled=False))
    memory_allocator: str = option(
        "default",
        "what becomes of idle buffers and memory files; aggressive gives them back to the system",
        choices=("default", "aggressive"),
    )
