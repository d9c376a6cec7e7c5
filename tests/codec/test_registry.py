"""Codecs are found by being there; a missing library is an error where the configuration is taken over."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aiorlinf.codec import codecs, registry
from aiorlinf.codec.codecs.lz4 import Lz4, Lz4Parameters
from aiorlinf.codec.codecs.zstd import Zstd, ZstdParameters
from aiorlinf.codec.registry import AutoParameters, codec_parameters, codecs_by_name, codecs_by_number, make_codecs, probe
from aiorlinf.config import TensorCompressionConfig, load_config
from aiorlinf.errors import ConfigError

ROOT = Path(__file__).parents[2]

NEW_CODEC = """
import zlib
from dataclasses import dataclass
from aiorlinf.codec.base import Codec, Context
from aiorlinf.codec.memory import byte_view, writable_view
from aiorlinf.config import option
from aiorlinf.errors import WireError

@dataclass(frozen=True, slots=True)
class Parameters:
    effort: int = option(6, "higher compresses more", minimum=1, maximum=9)

class Deflate(Codec, Context):
    name, number, package, max_input, Parameters = "deflate", 77, "python", 2**31 - 1, Parameters
    @classmethod
    def probe(cls): pass
    def context(self): return self
    def compress_bound(self, nbytes): return nbytes + nbytes // 1000 + 100
    def describe(self): return {}
    def compress_into(self, src, dst):
        data = zlib.compress(byte_view(src), self.parameters.effort)
        if len(data) > len(byte_view(dst)): return None
        writable_view(dst)[:len(data)] = data
        return len(data)
    def decompress_into(self, src, dst):
        try: data = zlib.decompress(byte_view(src))
        except zlib.error as error: raise WireError(str(error)) from error
        if len(data) != len(byte_view(dst)): raise WireError("size")
        writable_view(dst)[:] = data

CODEC = Deflate
"""


def test_all_of_them() -> None:
    assert dict(codecs_by_name()) == {"lz4": Lz4, "zstd": Zstd}
    assert dict(codecs_by_number()) == {1: Lz4, 2: Zstd}
    assert codec_parameters() == {"lz4": Lz4Parameters, "zstd": ZstdParameters, "auto": AutoParameters}


def test_parameters_are_frozen_records_of_options() -> None:
    for record in codec_parameters().values():
        assert record.__dataclass_params__.frozen
        for field in dataclasses.fields(record):
            assert field.metadata["doc"]
        assert record() == record()


def test_a_new_codec_is_one_new_file(tmp_path: Path) -> None:
    """A file in the folder is all: configuration, sending and receiving know it."""
    (tmp_path / "deflate.py").write_text(NEW_CODEC)
    code = f"""
import torch
from aiorlinf.codec import codecs
codecs.__path__.append({str(tmp_path)!r})
from aiorlinf.codec.pool import TensorBufferPool
from aiorlinf.codec.provider import CompressionProvider
from aiorlinf.config import load_config
from aiorlinf.wire.tree import flatten
from aiorlinf.codec.compressing import compress_chunks
keys = {{"codec": "deflate", "effort": 9}}
config = load_config({{"cluster": {{"collective": {{"tensor_compression": keys}}}}}}).cluster.collective.tensor_compression
provider = CompressionProvider(config, TensorBufferPool(1 << 24))
data = torch.arange(100_000)
flat = flatten(data)
assert provider.plan(flat) == [None]
out = torch.empty(800_000, dtype=torch.uint8)
receiver = provider.decompressor(out)
for piece in compress_chunks(provider.compressor(flat.leaves[0])):
    used, records = receiver.feed(memoryview(piece.head + bytes(piece.body)))
    for record in records:
        record.run(provider.contexts(77).try_acquire())
        receiver.finish(record)
assert receiver.done and torch.equal(out.view(torch.int64), data)
print(provider.describe()["codec"], provider.codec.parameters.effort)
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.stdout == "deflate 9\n", run.stderr


def test_two_codecs_of_one_number_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(Lz4):
        name = "other"

    with pytest.raises(ValueError, match="codec other: number 1 is taken"):
        registry._by_number([Lz4, Other])
    monkeypatch.setattr(Other, "number", 0)
    with pytest.raises(ValueError, match="number 0 is taken or out of range"):
        registry._by_number([Other])


def config_of(**keys: Any) -> TensorCompressionConfig:
    return load_config({"cluster": {"collective": {"tensor_compression": keys}}}).cluster.collective.tensor_compression


def test_the_codec_has_the_parameters_of_the_configuration() -> None:
    ((label, lz4),) = make_codecs(config_of(codec="lz4", acceleration=9))
    assert label == "lz4"
    assert isinstance(lz4, Lz4)
    assert lz4.parameters.acceleration == 9
    assert [codec.max_inflight for _, codec in make_codecs(config_of(codec="zstd", max_inflight=3))] == [3]
    assert [codec.max_inflight for _, codec in make_codecs(TensorCompressionConfig(codec="zstd"))] == [4]
    with pytest.raises(ValueError, match="compression is off"):
        make_codecs(config_of(enabled=False, codec="lz4"))


def test_auto_has_all_of_them_to_choose_from() -> None:
    assert codec_parameters()["auto"] is AutoParameters
    assert [label for label, _ in make_codecs(config_of(codec="auto"))] == ["lz4", "zstd 1", "zstd 3", "zstd 9"]
    assert [codec.parameters.level for _, codec in make_codecs(config_of(codec="auto"))[1:]] == [1, 3, 9]


@pytest.mark.parametrize(("name", "package", "module"), [("lz4", "lz4", "lz4.block"), ("zstd", "zstandard", "zstandard")])
def test_a_missing_library_is_named(name: str, package: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    probe(config_of(codec=name))
    monkeypatch.setitem(sys.modules, module, None)
    config = config_of(codec=name)  # the driver, who validates, need not have it
    for ask in (probe, make_codecs):
        with pytest.raises(ConfigError) as caught:
            ask(config)
        assert caught.value.path == "cluster.collective.tensor_compression.codec"
        assert f"codec {name} needs the package {package}, which this worker cannot import" in str(caught.value)
        assert caught.value.hint is not None
        assert f"pip install {package}" in caught.value.hint
    assert probe(config_of(enabled=False, codec=name)) == ()


def test_what_can_be_undone_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe(config_of(codec="lz4")) == (1, 2)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert probe(config_of(codec="lz4")) == (1,)


def test_the_folder_holds_nothing_but_codecs() -> None:
    files = {path.stem for folder in codecs.__path__ for path in Path(folder).glob("*.py")} - {"__init__"}
    assert files == set(codecs_by_name())
