"""Real Atari frames: how much smaller they get. Printed, not asserted beyond the obvious."""

from __future__ import annotations

import pytest
import torch

from tests.codec.material import MIB, compressed, decompressed, make_codec, make_compressor, view_of

FRAMES = 128


@pytest.fixture(scope="module")
def frames() -> torch.Tensor:
    """One rollout's observations, as the emulator gives them."""
    ale_py = pytest.importorskip("ale_py", reason="the examples' requirements are not installed")
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    emulator = ale_py.ALEInterface()
    emulator.setInt("random_seed", 1)
    emulator.loadROM(ale_py.roms.get_rom_path("pong"))
    actions = emulator.getMinimalActionSet()
    out = torch.empty(FRAMES, *emulator.getScreenDims(), 3, dtype=torch.uint8)
    for index in range(FRAMES):
        for _ in range(4):
            emulator.act(actions[index % len(actions)])
        out[index] = torch.from_numpy(emulator.getScreenRGB())
    return out


@pytest.mark.parametrize("name", ["lz4", "zstd"])
def test_frames_get_many_times_smaller(name: str, frames: torch.Tensor) -> None:
    codec = make_codec(name)
    wire = compressed(make_compressor(view_of(frames), codec, chunk=MIB))
    print(f"{name}: {FRAMES} frames of {frames[0].nbytes} bytes, {frames.nbytes / len(wire):.0f} times smaller")
    assert len(wire) < frames.nbytes / 20
    result = decompressed(wire, frames.nbytes, codec.context())
    assert torch.equal(result, frames.reshape(-1))
