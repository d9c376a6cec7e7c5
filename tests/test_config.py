"""Configuration: strict loading, and errors that say what was meant."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from aiorlinf.config import (
    ClusterConfig,
    CollectiveConfig,
    DelayPairConfig,
    JobConfig,
    NetEmulationConfig,
    NetworkConfig,
    config_to_dict,
    load_config,
    option,
    option_docs,
)
from aiorlinf.config.reading import read_section
from aiorlinf.errors import ConfigError

DEFAULT_YAML = Path(__file__).parents[1] / "config" / "default.yaml"


def nested(path: str, value: object) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    assert isinstance(value, dict)
    return value


# -------------------------------------------------------------------------------------------------------------- loading


def test_nothing_gives_the_defaults() -> None:
    assert load_config(None) == load_config({}) == load_config({"cluster": None}) == JobConfig()


def test_values_are_taken_over() -> None:
    loaded = load_config(
        {"cluster": {"collective": {"backend": "gloo"}, "network": {"port_range": [20000, 20010], "connect_timeout_s": 3}}}
    )
    assert loaded.cluster.collective == CollectiveConfig(backend="gloo")
    assert loaded.cluster.network == NetworkConfig(port_range=(20000, 20010), connect_timeout_s=3.0)
    assert isinstance(loaded.cluster.network.connect_timeout_s, float)


@pytest.mark.parametrize(
    "record",
    [
        JobConfig(),
        JobConfig(ClusterConfig(CollectiveConfig(backend="stream", allow_pickle=False), NetworkConfig(port_range=(1, 2), interface="^lo"))),
    ],
)
def test_round_trip_through_plain_values_and_yaml(record: JobConfig, tmp_path: Path) -> None:
    assert load_config(config_to_dict(record)) == record
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(config_to_dict(record)))
    assert load_config(file) == load_config(str(file)) == record


def test_a_record_is_checked_too() -> None:
    assert load_config(JobConfig()) == JobConfig()
    with pytest.raises(ConfigError, match=r"^cluster\.collective\.window_bytes: 0 is out of range"):
        load_config(JobConfig(ClusterConfig(CollectiveConfig(window_bytes=0))))


def test_records_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        JobConfig().cluster = ClusterConfig()  # type: ignore[misc]


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("cluster.collective.inline_max_byte", 1, "unknown key; do you mean inline_max_bytes? (allowed here: backend, fallback, inl"),
        ("clusters", {}, "unknown key; do you mean cluster? (allowed here: cluster)"),
        ("cluster.zebra", {}, "unknown key (allowed here: collective, network, net_emulation, topology)"),
        ("cluster.collective.backend", "glo", "'glo' is not allowed; do you mean gloo? (allowed: auto, stream, shm, gloo, nccl, cuda_ipc)"),
        ("cluster.collective.backend", "tcp", "'tcp' is not allowed (allowed: auto, stream, shm, gloo, nccl, cuda_ipc)"),
        ("cluster.collective.backend", 3, "text (auto, stream, shm, gloo, nccl, cuda_ipc) is expected, not 3"),
        ("cluster.collective.fallback", 1, "true or false is expected, not 1"),
        ("cluster.collective.fallback", "yes", "true or false is expected, not the text 'yes'"),
        ("cluster.collective.inline_max_bytes", True, "a whole number is expected, not True"),
        ("cluster.collective.inline_max_bytes", 1.5, "a whole number is expected, not 1.5"),
        ("cluster.collective.inline_max_bytes", -1, "-1 is out of range; allowed: at least 0 and at most 16777216"),
        ("cluster.collective.window_bytes", None, "a whole number is expected, not null"),
        ("cluster.collective", [1], "a section with keys is expected, not [1]"),
        ("cluster.network.connect_timeout_s", 0, "0.0 is out of range; allowed: above 0 and at most 86400"),
        ("cluster.network.connect_timeout_s", float("nan"), "a number is expected, not nan"),
        ("cluster.network.connect_timeout_s", float("inf"), "a number is expected, not inf"),
        ("cluster.network.connect_timeout_s", 10**400, "a number is expected, not 1000000"),
        pytest.param("cluster.network.connect_timeout_s", 10**5000, "expected, not a number of thousands of digits", id="no float"),
        pytest.param("cluster.collective.window_bytes", 10**5000, "a number of thousands of digits is out of range", id="huge"),
        ("cluster.collective.window_bytes", 10**100, "000... is out of range; allowed: at least 1"),
        ("cluster.network.connect_timeout_s", "1e-3", "not the text '1e-3' (write 0.001, without quotes and with a decimal point)"),
        ("cluster.network.connect_timeout_s", "soon", "a number is expected, not the text 'soon'"),
        ("cluster.network.port_range", [5], "a list of 2 (a whole number, a whole number) or null is expected, not [5]"),
        ("cluster.network.port_range", "1-5", "or null is expected, not the text '1-5'"),
        ("cluster.network.port_range", [9, 5], "the first port is above the last: [9, 5]"),
        ("cluster.network.bind_host", "", "empty; allowed: auto, a host name or an IP address"),
        ("cluster.network.advertise_host", {"a": 1}, "text or null is expected, not a section with keys"),
    ],
)
def test_errors_name_the_key_and_what_is_allowed(path: str, value: object, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(nested(path, value))
    assert caught.value.path == path
    assert said in caught.value.message
    assert caught.value.message.startswith(f"{path}: ")


def test_an_entry_of_a_list_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"cluster": {"network": {"port_range": [0, 5]}}})
    assert caught.value.path == "cluster.network.port_range[0]"
    with pytest.raises(ConfigError) as caught:
        load_config({"cluster": {"network": {"port_range": [1, "x"]}}})
    assert caught.value.path == "cluster.network.port_range[1]"


@pytest.mark.parametrize("source", [3, [], object()])
def test_a_source_of_another_kind(source: Any) -> None:
    with pytest.raises(ConfigError, match="a configuration is a mapping, a YAML file's path or a JobConfig"):
        load_config(source)


def test_keys_that_are_not_text() -> None:
    source: dict[Any, Any] = {7: 1}
    with pytest.raises(ConfigError, match=r"^7: unknown key"):
        load_config(source)


def test_config_to_dict_takes_records_only() -> None:
    with pytest.raises(TypeError, match="a configuration record is expected"):
        config_to_dict({"cluster": {}})


# ---------------------------------------------------------------------------------------------------------------- files


def test_an_error_in_a_file_names_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("cluster:\n  collective:\n    allow_pickle: true\n    inline_max_byte: 5\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert caught.value.path == "cluster.collective.inline_max_byte"
    assert str(caught.value).endswith(f"(hint: in {file}, line 4)")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cluster: {collective: {backend: auto, backend: gloo}}", "cluster.collective.backend: the key is given twice"),
        ("cluster: [", "is not valid YAML"),
        ("- 1\n", "a section with keys is expected, not [1]"),
        ("cluster: !!python/object:os.system {}", "is not valid YAML"),
        ("a: 1\n---\nb: 2\n", "is not valid YAML"),
        ("cluster: &x {collective: *x}", "is not valid YAML"),
        ("? [1, 2]\n: 3\n", "is not valid YAML"),
        ("cluster: " + "[" * 800, "is not valid YAML"),
        ("cluster: {network: {connect_timeout_s: 2024-13-45}}", "is not valid YAML: month must be in 1..12"),
        ("cluster: {collective: {window_bytes: " + "9" * 5000 + "}}", "is not valid YAML"),
        ("cluster: {collective: {window_bytes: !!int many}}", "is not valid YAML"),
    ],
)
def test_bad_files(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_config(file)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        load_config(tmp_path / "missing.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        load_config(binary)


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("# nothing yet\n")
    assert load_config(file) == JobConfig()
    file.write_text("cluster:\n  network:\n")
    assert load_config(file) == JobConfig()


def test_the_shipped_file_shows_every_key_with_its_default_and_a_comment() -> None:
    assert load_config(DEFAULT_YAML) == JobConfig()
    shown = yaml.safe_load(DEFAULT_YAML.read_text())
    assert shown == config_to_dict(JobConfig())
    lines = DEFAULT_YAML.read_text().splitlines()
    for path, doc, _ in option_docs():
        assert doc
        name = path.rpartition(".")[2]
        # A key that only one codec has stands there as a comment.
        index = next(number for number, line in enumerate(lines) if line.strip().startswith((f"{name}:", f"# {name}:")))
        assert lines[index - 1].strip().startswith("#"), f"{path} has no comment"
    assert all(len(line) <= 140 for line in lines)


@pytest.mark.parametrize("file", sorted(DEFAULT_YAML.parent.glob("*.yaml")), ids=lambda file: file.stem)
def test_each_shipped_file_loads_and_is_explained(file: Path) -> None:
    load_config(file)
    lines = file.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert all(len(line) <= 140 for line in lines)


def test_the_shipped_files_say_what_their_names_say() -> None:
    def compression(name: str) -> Any:
        return load_config(DEFAULT_YAML.with_name(name)).cluster.collective.tensor_compression

    assert not compression("one-host.yaml").enabled
    assert not compression("fast-cluster.yaml").enabled
    slow, very_slow = compression("slow-network.yaml"), compression("very-slow-network.yaml")
    assert (slow.enabled, slow.codec, slow.parameters.acceleration) == (True, "lz4", 1)
    assert (very_slow.enabled, very_slow.codec, very_slow.parameters.level) == (True, "zstd", 3)
    emulated = load_config(DEFAULT_YAML.with_name("emulated-datacentres.yaml")).cluster.net_emulation
    assert emulated.enabled
    assert emulated.crossdc_pairs == (DelayPairConfig("rollout:*", "trainer:*", 20.0),)
    assert [group.bandwidth_mbps for group in emulated.bandwidth_groups] == [1000.0, 1000.0]


# ---------------------------------------------------------------------------------------------------------- compression

COMPRESSION = "cluster.collective.tensor_compression"


def compression_of(**keys: object) -> Any:
    return load_config(nested(COMPRESSION, keys)).cluster.collective.tensor_compression


def test_the_compression_of_the_design() -> None:
    lz4 = compression_of(enabled=True, codec="lz4", min_bytes=16384, excluded_dtypes=["float32"], acceleration=1)
    assert (lz4.enabled, lz4.codec, lz4.min_bytes, lz4.excluded_dtypes) == (True, "lz4", 16384, ("float32",))
    assert lz4.parameters.acceleration == 1
    assert lz4 == compression_of(codec="lz4")
    zstd = compression_of(enabled=True, codec="zstd", level=7, max_inflight=2, excluded_dtypes=[])
    assert (zstd.parameters.level, zstd.parameters.max_inflight, zstd.excluded_dtypes) == (7, 2, ())
    assert compression_of(codec="zstd").parameters == dataclasses.replace(zstd.parameters, level=1, max_inflight=4)


@pytest.mark.parametrize("absent", [{}, {"tensor_compression": None}, {"tensor_compression": {"enabled": False}}])
def test_without_the_section_nothing_is_compressed(absent: dict[str, Any]) -> None:
    loaded = load_config({"cluster": {"collective": absent}})
    assert loaded == JobConfig()
    assert not loaded.cluster.collective.tensor_compression.enabled


def test_a_codec_that_is_off_is_still_checked() -> None:
    off = compression_of(enabled=False, codec="zstd", level=5)
    assert not off.enabled
    assert off.parameters.level == 5
    with pytest.raises(ConfigError, match="100 is out of range"):
        compression_of(enabled=False, codec="zstd", level=100)


@pytest.mark.parametrize("keys", [{"codec": "lz4", "acceleration": 3}, {"codec": "zstd", "level": 3}, {"enabled": False}])
def test_compression_makes_the_round_trip(keys: dict[str, Any]) -> None:
    record = load_config(nested(COMPRESSION, keys))
    plain = config_to_dict(record)
    assert "parameters" not in plain["cluster"]["collective"]["tensor_compression"]
    assert plain["cluster"]["collective"]["tensor_compression"].items() >= keys.items()
    assert load_config(plain) == load_config(yaml.safe_load(yaml.safe_dump(plain))) == load_config(record) == record


@pytest.mark.parametrize(
    ("keys", "wrong", "said"),
    [
        ({"enabled": True}, "codec", "this key is required when compression is enabled (allowed: lz4, zstd, auto)"),
        ({"min_bytes": 1}, "codec", "this key is required when compression is enabled (allowed: lz4, zstd, auto)"),
        ({"codec": "lz5"}, "codec", "'lz5' is not allowed; do you mean lz4? (allowed: lz4, zstd, auto)"),
        ({"codec": "gzip"}, "codec", "'gzip' is not allowed (allowed: lz4, zstd, auto)"),
        ({"codec": 4}, "codec", "text or null is expected, not 4"),
        ({"enabled": 1, "codec": "lz4"}, "enabled", "true or false is expected, not 1"),
        (
            {"codec": "lz4", "level": 1},
            "level",
            "do you mean acceleration? (allowed here: enabled, codec, min_bytes, excluded_dtypes, acceleration)",
        ),
        ({"codec": "lz4", "max_inflight": 1}, "max_inflight", "only codec: zstd has this key, and codec is lz4; do you mean acceleration?"),
        (
            {"codec": "zstd", "acceleration": 1},
            "acceleration",
            "only codec: lz4 has this key, and codec is zstd; do you mean level or max_inflight? (allowed here: enabled, codec, min_bytes",
        ),
        ({"enabled": False, "level": 1}, "level", "only codec: zstd has this key, and codec is not set; do you mean codec: zstd?"),
        ({"codec": "zstd", "levle": 1}, "levle", "unknown key; do you mean level? (allowed here: enabled, codec, min_bytes, excl"),
        ({"codec": "zstd", "min_byte": 1}, "min_byte", "unknown key; do you mean min_bytes?"),
        ({"codec": "lz4", "parameters": {}}, "parameters", "unknown key (allowed here: enabled, codec, min_bytes, excluded_dtypes, accel"),
        ({"codec": "lz4", "acceleration": 0}, "acceleration", "0 is out of range; allowed: at least 1 and at most 65537"),
        ({"codec": "lz4", "acceleration": 1.5}, "acceleration", "a whole number is expected, not 1.5"),
        ({"codec": "zstd", "level": 0}, "level", "0 is out of range; allowed: at least 1 and at most 22"),
        ({"codec": "zstd", "level": True}, "level", "a whole number is expected, not True"),
        ({"codec": "zstd", "max_inflight": 0}, "max_inflight", "0 is out of range; allowed: at least 1"),
        ({"codec": "lz4", "min_bytes": -1}, "min_bytes", "-1 is out of range; allowed: at least 0"),
        ({"codec": "lz4", "excluded_dtypes": "float32"}, "excluded_dtypes", "a list (bool, uint8"),
        ({"codec": "lz4", "excluded_dtypes": ["float23"]}, "excluded_dtypes[0]", "'float23' is not allowed; do you mean float32?"),
        (
            {"codec": "lz4", "excluded_dtypes": ["int8", "torch.int64"]},
            "excluded_dtypes[1]",
            "'torch.int64' is not allowed; do you mean int64?",
        ),
        ({"codec": "lz4", "excluded_dtypes": [3]}, "excluded_dtypes[0]", "text (bool, uint8"),
    ],
)
def test_errors_in_the_compression(keys: dict[str, Any], wrong: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compression_of(**keys)
    assert caught.value.path == f"{COMPRESSION}.{wrong}"
    assert said in caught.value.message


def test_an_error_of_the_codecs_key_has_its_line(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("cluster:\n  collective:\n    tensor_compression:\n      codec: lz4\n      level: 3\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(caught.value).endswith(f"(hint: in {file}, line 5)")


def test_every_dtype_can_be_excluded() -> None:
    from aiorlinf.wire.dtypes import DTYPES

    # Torch's names are written down in the configuration, which does not load torch.
    assert set(compression_of(codec="lz4", excluded_dtypes=sorted(DTYPES)).excluded_dtypes) == set(DTYPES)


def test_a_configuration_loads_without_torch() -> None:
    code = """
import sys
from aiorlinf.config import load_config
keys = {"codec": "zstd", "level": 3, "excluded_dtypes": ["bfloat16"]}
load_config({"cluster": {"collective": {"tensor_compression": keys}}})
print([name for name in ("torch", "lz4", "zstandard") if name in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=DEFAULT_YAML.parent.parent, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["[]"]


# ------------------------------------------------------------------------------------------------------------ emulation

EMULATION = "cluster.net_emulation"


def emulation_of(**keys: object) -> NetEmulationConfig:
    return load_config(nested(EMULATION, keys)).cluster.net_emulation


def pair(src: object = "rollout:0-3", dst: object = "trainer:0", delay_ms: object = 20) -> dict[str, object]:
    return {"src": src, "dst": dst, "delay_ms": delay_ms}


def test_the_emulation_of_the_design() -> None:
    emulated = emulation_of(
        enabled=True, symmetric=True, crossdc_pairs=[pair()], bandwidth_groups=[{"members": ["rollout:0-3"], "bandwidth_mbps": 1000}]
    )
    assert emulated.crossdc_pairs == (DelayPairConfig("rollout:0-3", "trainer:0", 20.0),)
    (group,) = emulated.bandwidth_groups
    assert (group.members, group.bandwidth_mbps) == (("rollout:0-3",), 1000.0)
    record = load_config(nested(EMULATION, {"crossdc_pairs": [pair(["a:*", "b:1"])], "symmetric": False}))
    plain = config_to_dict(record)
    assert load_config(plain) == load_config(yaml.safe_load(yaml.safe_dump(plain))) == load_config(record) == record


@pytest.mark.parametrize("absent", [{}, {"net_emulation": None}, {"net_emulation": {"enabled": False}}])
def test_without_the_section_nothing_is_emulated(absent: dict[str, Any]) -> None:
    assert load_config({"cluster": absent}) == JobConfig()


def test_an_emulation_that_is_off_is_still_checked() -> None:
    assert not emulation_of(enabled=False, crossdc_pairs=[pair()]).enabled
    with pytest.raises(ConfigError, match="names no workers"):
        emulation_of(enabled=False, crossdc_pairs=[pair("rollout")])


@pytest.mark.parametrize(
    ("keys", "wrong", "said"),
    [
        ({"enabled": True}, "enabled", "there is nothing to emulate; give crossdc_pairs, bandwidth_groups or both"),
        ({"symetric": True}, "symetric", "unknown key; do you mean symmetric?"),
        ({"crossdc_pairs": [pair(), {"src": "a:0", "dst": "b:0"}]}, "crossdc_pairs[1].delay_ms", "this key is required"),
        ({"crossdc_pairs": [{**pair(), "delay": 3}]}, "crossdc_pairs[0].delay", "unknown key; do you mean delay_ms?"),
        ({"crossdc_pairs": [pair(delay_ms=-1)]}, "crossdc_pairs[0].delay_ms", "out of range; allowed: at least 0 and at most 60000"),
        ({"crossdc_pairs": [pair(src="rollout")]}, "crossdc_pairs[0].src", "names no workers; do you mean rollout:*? (allowed: group:rank"),
        ({"crossdc_pairs": [pair(dst=["a:0", "b:3-1"])]}, "crossdc_pairs[0].dst[1]", "do you mean b:1-3?"),
        ({"crossdc_pairs": [pair(dst=[])]}, "crossdc_pairs[0].dst", "no workers are named"),
        ({"crossdc_pairs": [pair(src=7)]}, "crossdc_pairs[0].src", "text or a list is expected, not 7"),
        ({"crossdc_pairs": pair()}, "crossdc_pairs", "a list is expected, not a section with keys"),
        (
            {"crossdc_pairs": [pair(), pair("trainer:*", "rollout:3", 30)]},
            "crossdc_pairs[1]",
            "some of its workers have another delay by crossdc_pairs[0] (30 and 20 ms); with symmetric: true each pair counts both ways",
        ),
        (
            {"symmetric": False, "crossdc_pairs": [pair(), pair("rollout:3", "trainer:*", 3)]},
            "crossdc_pairs[1]",
            "another delay by crossdc",
        ),
        ({"bandwidth_groups": [{"members": "a:*"}]}, "bandwidth_groups[0].bandwidth_mbps", "this key is required"),
        ({"bandwidth_groups": [{"members": "a:*", "bandwidth_mbps": 0}]}, "bandwidth_groups[0].bandwidth_mbps", "allowed: at least 0.001"),
        ({"bandwidth_groups": [{"members": "a:*", "bandwidth_mbps": 5e-324}]}, "bandwidth_groups[0].bandwidth_mbps", "is out of range"),
        ({"bandwidth_groups": [{"members": "a:*", "bandwidth_mbps": True}]}, "bandwidth_groups[0].bandwidth_mbps", "not True"),
        ({"crossdc_pairs": [{"src": "a:0", "dst": "b:0", "delay_ms": float("nan")}]}, "crossdc_pairs[0].delay_ms", "expected, not nan"),
        ({"bandwidth_groups": [{"members": ["a:x"], "bandwidth_mbps": 1}]}, "bandwidth_groups[0].members[0]", "do you mean a:*?"),
    ],
)
def test_errors_in_the_emulation(keys: dict[str, Any], wrong: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        emulation_of(**keys)
    assert caught.value.path == f"{EMULATION}.{wrong}"
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("symmetric", "entries"),
    [
        (True, [pair(), pair("trainer:0", "rollout:0-3")]),  # the same said twice
        (True, [pair(), pair("rollout:4", "trainer:0", 30)]),
        (True, [pair("a:*", "b:*", 1), pair("a:*", "c:*", 2), pair("b:*", "c:*", 3)]),
        (False, [pair(), pair("trainer:0", "rollout:0-3", 30)]),
    ],
)
def test_pairs_that_do_not_contradict_each_other(symmetric: bool, entries: list[dict[str, object]]) -> None:
    assert len(emulation_of(symmetric=symmetric, crossdc_pairs=entries).crossdc_pairs) == len(entries)


def test_an_error_in_an_entry_has_its_line(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("cluster:\n  net_emulation:\n    crossdc_pairs:\n      - src: a:0\n        dst: b\n        delay_ms: 1\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(caught.value).endswith(f"(hint: in {file}, line 5)")


# ------------------------------------------------------------------------------- a new section is one more dataclass


@dataclasses.dataclass(frozen=True, slots=True)
class _Pair:
    src: str = option("", "from")
    delay_ms: float = option(0.0, "milliseconds", minimum=0)


@dataclasses.dataclass(frozen=True, slots=True)
class _Emulation:
    name: str
    enabled: bool = option(True, "whether")
    pairs: tuple[_Pair, ...] = option((), "several records")
    sizes: dict[str, int] | None = option(None, "sizes by name", minimum=1)  # noqa: RUF009 - option makes a dataclass field

    def check(self) -> Iterator[tuple[str, str]]:
        if self.enabled and not self.pairs:
            yield "pairs", "enabled, but there are none"


def test_sections_within_lists_and_mappings() -> None:
    def load(data: dict[str, Any]) -> _Emulation:
        return read_section(_Emulation, data, "x")

    made = load({"name": "n", "pairs": [{"src": "a", "delay_ms": 2}], "sizes": {"big": 3}})
    assert made == _Emulation("n", True, (_Pair("a", 2.0),), {"big": 3})
    assert load(config_to_dict(made)) == made
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"name": "n", "pairs": [{"src": "a"}, {"delay": 2}]}, "x.pairs[1].delay"),
        ({"name": "n", "pairs": [{"delay_ms": -2}]}, "x.pairs[0].delay_ms"),
        ({"name": "n", "pairs": {}}, "x.pairs"),
        ({"name": "n", "sizes": {"big": 0}}, "x.sizes.big"),
        ({"name": "n", "sizes": [1]}, "x.sizes"),
        ({"name": "n"}, "x.pairs"),
        ({"enabled": False}, "x.name"),
    ]
    for data, path in wrong:
        with pytest.raises(ConfigError) as caught:
            load(data)
        assert caught.value.path == path


_keys = st.sampled_from(["cluster", "collective", "network", "backend", "window_bytes", "port_range", "interface", "", "x"])
_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["auto", "gloo"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(_keys, _values, max_size=3))
@settings(max_examples=60, deadline=None)
def test_whatever_is_loaded_it_is_a_record_or_a_config_error(data: dict[str, Any]) -> None:
    try:
        record = load_config(data)
    except ConfigError:
        return
    assert load_config(config_to_dict(record)) == record
