"""``python -m scripts.benchmarks.codecs``: how small each kind of data gets, and how fast, in one thread and without any network.

All of what a send and a receive do is in it: samples, chunks, buffers, checksums. "raw" in a cell: the tensor would go as it is.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from aiorlinf.codec.base import Codec
from aiorlinf.codec.codecs.lz4 import Lz4, Lz4Parameters
from aiorlinf.codec.codecs.zstd import Zstd, ZstdParameters
from aiorlinf.codec.compressing import LeafCompressor, compress_chunks
from aiorlinf.codec.contexts import ContextPool
from aiorlinf.codec.decompressing import Decompressor
from aiorlinf.codec.memory import byte_view
from aiorlinf.codec.pool import TensorBufferPool
from aiorlinf.codec.provider import CHUNK_BYTES
from aiorlinf.codec.stats import CompressionStats

__all__ = ["DATA", "main", "measure"]


def frames(nbytes: int) -> torch.Tensor:
    """Consecutive frames of Atari's Pong, as the emulator gives them."""
    import ale_py

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    emulator = ale_py.ALEInterface()
    emulator.setInt("random_seed", 1)
    rom = ale_py.roms.get_rom_path("pong")
    if rom is None:
        raise RuntimeError("this ale_py brings no ROMs")
    emulator.loadROM(rom)
    actions = emulator.getMinimalActionSet()
    taken = []
    for index in range(max(1, nbytes // 100_800)):
        for _ in range(4):
            emulator.act(actions[index % len(actions)])
        taken.append(torch.from_numpy(emulator.getScreenRGB()))
    return torch.stack(taken)


def token_ids(nbytes: int) -> torch.Tensor:
    """int64 ids below 50,000, the small ones more often; each row is padded after a random length."""
    rows = nbytes // 8 // 1024
    ids = (torch.rand(rows, 1024) ** 3 * 50_000).long()
    return ids.masked_fill(torch.arange(1024) >= torch.randint(200, 1024, (rows, 1)), 0)


def masks(nbytes: int) -> torch.Tensor:
    """bool: true up to a random length in each row."""
    rows = nbytes // 1024
    return torch.arange(1024) < torch.randint(200, 1024, (rows, 1))


DATA: dict[str, Callable[[int], torch.Tensor]] = {
    "frames": frames,
    "token ids": token_ids,
    "masks": masks,
    "float32 weights": lambda nbytes: torch.randn(nbytes // 4) * 0.02,
    "bfloat16 weights": lambda nbytes: (torch.randn(nbytes // 2) * 0.02).bfloat16(),
    "random bytes": lambda nbytes: torch.randint(0, 256, (nbytes,), dtype=torch.uint8),
}

CODECS: dict[str, Callable[[], Codec[Any]]] = {
    "lz4": lambda: Lz4(Lz4Parameters()),
    "lz4, acceleration 8": lambda: Lz4(Lz4Parameters(acceleration=8)),
    "lz4 by the package's calls": lambda: Lz4(functions="asked for"),
    "zstd, level 1": lambda: Zstd(ZstdParameters(level=1)),
    "zstd, level 3": lambda: Zstd(ZstdParameters(level=3)),
    "zstd, level 9": lambda: Zstd(ZstdParameters(level=9)),
}


def measure(tensor: torch.Tensor, codec: Codec[Any], rounds: int) -> tuple[float, float, float] | tuple[None, float, None]:
    """Ratio, and the best MB/s of compressing and of decompressing; no ratio if the tensor goes as it is."""
    contexts, buffers = ContextPool(codec.context, codec.max_inflight), TensorBufferPool(1 << 30)
    source = byte_view(tensor.reshape(-1).view(torch.uint8))
    out = torch.empty(source.nbytes, dtype=torch.uint8)
    best = [float("inf"), float("inf")]
    size = 0
    for _ in range(rounds):
        start = time.perf_counter()
        compressor = LeafCompressor(source, codec, contexts, buffers, CompressionStats(), chunk_bytes=CHUNK_BYTES)
        pieces = list(compress_chunks(compressor))
        best[0] = min(best[0], time.perf_counter() - start)
        if compressor.raw is not None:
            continue
        size = sum(piece.nbytes for piece in pieces)
        decompressor = Decompressor(out, buffers, (codec.number,), CompressionStats())
        context = contexts.try_acquire()
        start = time.perf_counter()
        for piece in pieces:
            for part in (memoryview(piece.head), piece.body):
                for record in decompressor.feed(part)[1]:
                    record.run(context)
                    decompressor.finish(record)
        best[1] = min(best[1], time.perf_counter() - start)
        if context is not None:
            contexts.release(context)
        for piece in pieces:
            piece.release()
        if not torch.equal(out, torch.frombuffer(source, dtype=torch.uint8)):
            raise AssertionError("what came out is not what went in")
    megabytes = source.nbytes / 1e6
    return (source.nbytes / size, megabytes / best[0], megabytes / best[1]) if size else (None, megabytes / best[0], None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmarks.codecs", description=__doc__)
    parser.add_argument("--mib", type=int, default=12, help="MiB of each kind of data (default 12)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, of which the best counts (default 3)")
    parser.add_argument("--only", action="append", choices=list(DATA), help="this kind of data; may be repeated")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    print("| data | codec | times smaller | compress MB/s | decompress MB/s |")
    print("| --- | --- | --- | --- | --- |")
    for name in options.only or DATA:
        tensor = DATA[name](options.mib << 20)
        for label, make in CODECS.items():
            ratio, compress, decompress = measure(tensor, make(), options.rounds)
            cells = [
                name,
                label,
                "raw" if ratio is None else f"{ratio:.2f}",
                f"{compress:.0f}",
                "" if decompress is None else f"{decompress:.0f}",
            ]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
