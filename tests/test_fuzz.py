"""The short form of ``scripts/fuzz``, and that it finds what it looks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiorlinf.errors import WireError
from scripts.fuzzing.__main__ import Fault, fuzz, main
from scripts.fuzzing.links import frame_targets
from scripts.fuzzing.targets import Target, all_targets

__all__: list[str] = []


def test_changed_input_gives_only_our_errors() -> None:
    with frame_targets() as frames:
        counts = fuzz([*all_targets(), *frames], 4000, seed=20)
    assert sum(total for total, _ in counts.values()) == 4000
    assert min(total for total, _ in counts.values()) > 50
    assert counts["manifest"][1] > counts["manifest"][0] // 2, "most changes are noticed"


@pytest.mark.parametrize("seed", [1, 2])
def test_a_reader_that_raises_something_else_is_found(seed: int) -> None:
    def read(data: bytes) -> None:
        if len(data) < 8:
            raise WireError("short")
        if data[0] > 0x40:
            raise IndexError("a fault")

    with pytest.raises(Fault, match="IndexError: a fault") as caught:
        fuzz([Target("x", (bytes(16),), read)], 1000, seed)
    assert caught.value.data[0] > 0x40


def test_a_reader_that_allocates_what_it_is_told_is_found() -> None:
    def read(data: bytes) -> None:
        bytearray(int.from_bytes(data[:4], "little") % (64 << 20))

    with pytest.raises(Fault, match="were allocated"):
        fuzz([Target("x", (bytes(16),), read)], 5000, seed=1)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--inputs", "200", "--only", "places", "--only", "start", "--out", str(tmp_path)]) == 0
    assert "200" not in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    file = tmp_path / "input.bin"
    file.write_bytes(b"nonsense")
    assert main(["--only", "places", "--replay", str(file)]) == 0
    assert capsys.readouterr().out.endswith("refused\n")


def test_readers_that_keep_what_they_were_given_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.fuzzing.__main__._WARM_INPUTS", 100)
    kept: list[bytearray] = []
    with pytest.raises(Fault, match="the process has grown by"):
        fuzz([Target("x", (bytes(16),), lambda data: kept.append(bytearray(b"x" * 256 * 1024)))], 1000, seed=1)
    assert len(kept) < 1000
