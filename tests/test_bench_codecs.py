"""The benchmark of the codecs alone: it runs, and its table says what it measured."""

from __future__ import annotations

import pytest

from scripts.benchmarks import codecs


def test_a_small_run(capsys: pytest.CaptureFixture[str]) -> None:
    codecs.main(["--mib", "1", "--rounds", "1", "--only", "masks", "--only", "token ids", "--only", "random bytes"])
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()[2:]]
    assert len(rows) == 3 * len(codecs.CODECS)
    for data, _, ratio, compress, decompress in rows:
        assert int(compress) > 0
        if data == "random bytes":
            assert (ratio, decompress) == ("raw", "")
        else:
            assert float(ratio) > 2
            assert int(decompress) > 0
