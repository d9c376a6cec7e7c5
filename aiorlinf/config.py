"""The job's configuration: frozen records, loaded strictly from YAML or a mapping.

A section is a frozen dataclass whose fields are made with `option`; the loader reads nothing but the dataclasses, so a new section
or key is one more field. Unknown keys, wrong types and values out of range are a `ConfigError` that names the key's full path.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import os
import pkgutil
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml

from aiorlinf.address import AddressRange, WorkerAddress
from aiorlinf.errors import ConfigError, UsageError

__all__ = [
    "BandwidthGroupConfig",
    "ClusterConfig",
    "CollectiveConfig",
    "DelayPairConfig",
    "JobConfig",
    "NetEmulationConfig",
    "NetworkConfig",
    "SharedMemoryConfig",
    "TensorBufferPoolConfig",
    "TensorCompressionConfig",
    "TlsConfig",
    "TopologyConfig",
    "WorkerLabelsConfig",
    "address_ranges",
    "config_to_dict",
    "load_config",
    "option",
    "option_docs",
    "read_config_file",
    "required",
    "variant",
]

_KIB = 1024
_MIB = 1024 * _KIB
_TIB = 1024 * 1024 * _MIB

T = TypeVar("T")


def option(
    default: T,
    doc: str,
    *,
    choices: Sequence[object] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
) -> T:
    """A field of a configuration section.

    Args:
        default: the value when the key is absent.
        doc: one line for the user, with the unit.
        choices: the only values allowed.
        minimum, maximum: inclusive bounds of a number, or of each number in a tuple.
        above: exclusive lower bound.
    """
    metadata = {"doc": doc, "choices": choices, "min": minimum, "max": maximum, "above": above}
    return dataclasses.field(default=default, metadata=metadata)


def required(doc: str, *, minimum: float | None = None, maximum: float | None = None, above: float | None = None) -> Any:
    """As `option`, for a key that has no default. Such fields come first in their section."""
    return dataclasses.field(metadata={"doc": doc, "choices": None, "min": minimum, "max": maximum, "above": above})


def variant(key: str, source: str) -> Any:
    """The last field of a section: holds the keys that only some values of another key have. In the file they stand beside that key.

    Args:
        key: the other key; None as its value stands for no keys.
        source: ``module:function``, which gives a record class for each value of that key. It is asked when a configuration that has the
            section is loaded, so that what is built on the configuration can declare keys of its own.
    """
    return dataclasses.field(default=None, metadata={"variant": key, "source": source})


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
            allowed = ", ".join(_variant_records(dataclasses.fields(self)[-1]))
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
        16 * _MIB, "bound of the description (skeleton and leaf table) of one message; bytes", minimum=_KIB, maximum=1024 * _MIB
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


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """Files in PEM format, by which both sides of every connection prove who they are. All three, or none: then nothing is encrypted."""

    cert: str | None = option(None, "certificate of the process, followed by those between it and the authority")
    key: str | None = option(None, "private key of that certificate")
    ca: str | None = option(None, "certificate of the job's own authority, which has signed all the others")

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield (key, complaint) for what a single key cannot tell."""
        named = [name for name in ("cert", "key", "ca") if getattr(self, name)]
        for name in ("cert", "key", "ca"):
            if named and name not in named:
                yield name, f"this key is required when {named[0]} is given"

    @property
    def enabled(self) -> bool:
        """Whether there is any."""
        return self.ca is not None


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    """Where workers listen, what they tell their peers, and how long they wait."""

    bind_host: str = option("auto", "address to listen on; auto is the address of the worker's own connection to the manager")
    advertise_host: str | None = option(None, "address that peers are told, instead of the one learnt from the live connection")
    interface: str | None = option(None, "network interface to use, or ^name,name to exclude some")
    port_range: tuple[int, int] | None = option(
        None, "first and last port of every listening socket; absent: chosen by the kernel", minimum=1, maximum=65535
    )
    connect_timeout_s: float = option(10.0, "seconds for one connection to be made", above=0, maximum=86400)
    handshake_timeout_s: float = option(5.0, "seconds for a connection to prove itself", above=0, maximum=86400)
    rendezvous_timeout_s: float = option(60.0, "seconds to wait for a worker that has not joined yet", above=0, maximum=86400 * 30)
    reconnect_timeout_s: float = option(
        30.0, "seconds that a link between hosts, once cut by the network, is tried to be restored; 0: not at all", minimum=0, maximum=86400
    )
    heartbeat_timeout_s: float = option(
        15.0, "seconds without a word of a worker's process after which it is taken for dead", minimum=0.5, maximum=86400
    )
    close_timeout_s: float = option(5.0, "seconds that close spends flushing", minimum=0, maximum=86400)
    tls: TlsConfig = dataclasses.field(default_factory=TlsConfig)

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield (key, complaint) for what a single key cannot tell."""
        if self.port_range is not None and self.port_range[0] > self.port_range[1]:
            yield "port_range", f"the first port is above the last: {list(self.port_range)}"
        if not self.bind_host:
            yield "bind_host", "empty; allowed: auto, a host name or an IP address"


@dataclass(frozen=True, slots=True)
class DelayPairConfig:
    """Workers that are far from each other."""

    src: str | tuple[str, ...] = required("workers on the one side: trainer:0, rollout:0-3, rollout:*, or a list of such")
    dst: str | tuple[str, ...] = required("workers on the other side, in the same form")
    delay_ms: float = required("milliseconds that a message takes on its way, one way", minimum=0, maximum=60_000)

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield (key, complaint) for what a single key cannot tell."""
        yield from _check_ranges("src", self.src)
        yield from _check_ranges("dst", self.dst)


@dataclass(frozen=True, slots=True)
class BandwidthGroupConfig:
    """Workers behind one link to all others."""

    members: str | tuple[str, ...] = required("workers that share the link: rollout:0-3, rollout:*, or a list of such")
    bandwidth_mbps: float = required("what the link carries per direction; megabits (10^6 bits) per second", above=0, maximum=1_000_000)

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield (key, complaint) for what a single key cannot tell."""
        yield from _check_ranges("members", self.members)


@dataclass(frozen=True, slots=True)
class NetEmulationConfig:
    """A slower network than there is, for trying out what a job would do on it."""

    enabled: bool = option(True, "false, or without this section: messages travel as fast as they can")
    symmetric: bool = option(True, "false: delays hold from src to dst only, bandwidths for what members send only")
    crossdc_pairs: tuple[DelayPairConfig, ...] = option((), "workers that are far from each other, and how far")
    bandwidth_groups: tuple[BandwidthGroupConfig, ...] = option((), "workers that share a link to all others, and its bandwidth")

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield (key, complaint) for what a single key cannot tell."""
        if self.enabled and not self.crossdc_pairs and not self.bandwidth_groups:
            yield "enabled", "there is nothing to emulate; give crossdc_pairs, bandwidth_groups or both, or set enabled: false"
        ways = [
            (index, pair, address_ranges(src), address_ranges(dst))
            for index, pair in enumerate(self.crossdc_pairs)
            for src, dst in ((pair.src, pair.dst), *(((pair.dst, pair.src),) if self.symmetric else ()))
        ]
        for index, pair, src, dst in ways:
            for earlier, other, other_src, other_dst in ways:
                if earlier < index and pair.delay_ms != other.delay_ms and _overlap(src, other_src) and _overlap(dst, other_dst):
                    delays = f"{pair.delay_ms:g} and {other.delay_ms:g} ms"
                    both = "; with symmetric: true each pair counts both ways" if self.symmetric else ""
                    complaint = f"some of its workers have another delay by crossdc_pairs[{earlier}] ({delays}){both}"
                    yield f"crossdc_pairs[{index}]", complaint


def address_ranges(value: str | tuple[str, ...]) -> tuple[AddressRange, ...]:
    """What a key that names workers says. Raises UsageError if it is malformed, which a loaded configuration is not."""
    return tuple(AddressRange.parse(text) for text in ((value,) if isinstance(value, str) else value))


def _overlap(some: tuple[AddressRange, ...], others: tuple[AddressRange, ...]) -> bool:
    return any(one.overlaps(other) for one in some for other in others)


def _check_ranges(key: str, value: str | tuple[str, ...]) -> Iterator[tuple[str, str]]:
    if not value:
        yield key, "no workers are named; allowed: group:rank, group:first-last, group:* or a list of such"
        return
    for index, text in enumerate((value,) if isinstance(value, str) else value):
        try:
            AddressRange.parse(text)
        except UsageError as error:
            yield key if isinstance(value, str) else f"{key}[{index}]", error.message


@dataclass(frozen=True, slots=True)
class WorkerLabelsConfig:
    """Labels of some workers."""

    members: str | tuple[str, ...] = required("workers that have them: rollout:0-3, rollout:*, or a list of such")
    labels: dict[str, str] = required("names and values; rack says who is near whom, others are free")  # noqa: RUF009 - makes a dataclass field

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield (key, complaint) for what a single key cannot tell."""
        yield from _check_ranges("members", self.members)
        if not self.labels:
            yield "labels", "no labels are given"


@dataclass(frozen=True, slots=True)
class TopologyConfig:
    """Where workers are, for what goes to many at once."""

    labels: tuple[WorkerLabelsConfig, ...] = option((), "labels of workers; what a worker's own environment says goes before")

    def of(self, address: WorkerAddress) -> dict[str, str]:
        """The labels of one worker; a later entry goes before an earlier one."""
        found: dict[str, str] = {}
        for entry in self.labels:
            if any(members.holds(address) for members in address_ranges(entry.members)):
                found.update(entry.labels)
        return found


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Everything the workers of one job share."""

    collective: CollectiveConfig = dataclasses.field(default_factory=CollectiveConfig)
    network: NetworkConfig = dataclasses.field(default_factory=NetworkConfig)
    net_emulation: NetEmulationConfig = dataclasses.field(default_factory=lambda: NetEmulationConfig(enabled=False))
    topology: TopologyConfig = dataclasses.field(default_factory=TopologyConfig)


@dataclass(frozen=True, slots=True)
class JobConfig:
    """The whole configuration of one job."""

    cluster: ClusterConfig = dataclasses.field(default_factory=ClusterConfig)


def load_config(source: JobConfig | Mapping[str, Any] | str | os.PathLike[str] | None) -> JobConfig:
    """Load and check a configuration.

        >>> load_config({"cluster": {"collective": {"window_bytes": 1048576}}}).cluster.collective.window_bytes
        1048576
        >>> load_config({"cluster": {"collective": {"windw_bytes": 1048576}}})
        Traceback (most recent call last):
        aiorlinf.errors.ConfigError: cluster.collective.windw_bytes: unknown key...

    Args:
        source: a YAML file's path, a mapping with the same keys, a record (checked again), or None for the defaults.

    Raises:
        ConfigError: a key is unknown, a value is not allowed, or the file cannot be read; ``path`` is the key's full path.
    """
    if source is None:
        return JobConfig()
    if isinstance(source, JobConfig):
        return _section(JobConfig, config_to_dict(source), "")
    if isinstance(source, Mapping):
        return _section(JobConfig, source, "")
    if isinstance(source, (str, os.PathLike)):
        return read_config_file(source)[0]
    raise ConfigError("", f"a configuration is a mapping, a YAML file's path or a JobConfig, not {_describe(source)}")


def config_to_dict(config: object) -> dict[str, Any]:
    """The record as plain dicts, lists and scalars; JSON and YAML can hold it, and `load_config` gives the record back."""
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise TypeError(f"a configuration record is expected, not {_describe(config)}")
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if "variant" not in field.metadata:
            values[field.name] = _plain(value)
        elif value is not None:
            values.update(config_to_dict(value))
    return values


def option_docs(section: type = JobConfig, path: str = "") -> Iterator[tuple[str, str, object]]:
    """Yield (full path, doc, default) of every key, in order."""
    for field in dataclasses.fields(section):
        if "variant" in field.metadata:
            for name, record in _variant_records(field).items():
                for inner, doc, default in option_docs(record, path):
                    yield inner, f"only with {field.metadata['variant']}: {name}; {doc}", default
            continue
        inner = _join(path, field.name)
        nested = _nested_section(_hints(section)[field.name])
        if nested is not None:
            yield from option_docs(nested, inner)
            continue
        yield inner, field.metadata["doc"], field.default
        item = _nested_section(_item_hint(_hints(section)[field.name]))
        if item is not None:
            yield from option_docs(item, f"{inner}[]")


def _plain(value: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return config_to_dict(value)
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


# ---------------------------------------------------------------------------------------------------------------- files


class _StrictLoader(yaml.SafeLoader):
    """YAML that refuses a key given twice in one mapping (plain YAML keeps the last one silently)."""


def read_config_file(file: str | os.PathLike[str]) -> tuple[JobConfig, dict[str, int]]:
    """As `load_config` of a file, and the line of each key in it, by its full path (``cluster.topology.labels[0]`` in lists)."""
    path = Path(file)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("", f"cannot read the configuration file {path}: {error}") from error
    lines: dict[str, int] = {}
    try:
        loader = _StrictLoader(text)
        try:
            node = loader.get_single_node()
            _note_lines(node, "", lines)
            data = None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
        return _section(JobConfig, data, ""), lines
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError("", f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    except ConfigError as error:
        line = lines.get(error.path)
        error.fill(hint=f"in {path}" + (f", line {line}" if line is not None else ""))
        raise


def _note_lines(node: yaml.Node | None, path: str, lines: dict[str, int]) -> None:
    """Record the line of every key, and refuse keys given twice."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            inner = _join(path, str(key.value))
            if inner in seen:
                lines[inner] = key.start_mark.line + 1
                raise ConfigError(inner, "the key is given twice")
            seen.add(inner)
            lines[inner] = key.start_mark.line + 1
            _note_lines(value, inner, lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            inner = f"{path}[{index}]"
            lines[inner] = value.start_mark.line + 1
            _note_lines(value, inner, lines)


# ----------------------------------------------------------------------------------------------------------- validation


@functools.cache
def _hints(section: type) -> dict[str, Any]:
    return typing.get_type_hints(section)


def _nested_section(hint: Any) -> type | None:
    for part in _alternatives(hint):
        if isinstance(part, type) and dataclasses.is_dataclass(part):
            return part
    return None


def _item_hint(hint: Any) -> Any:
    """What is in a list of any length; None if it is none."""
    args = typing.get_args(hint)
    return args[0] if typing.get_origin(hint) is tuple and args[-1] is Ellipsis else None


def _alternatives(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _section(section: type[T], data: object, path: str) -> T:
    if data is None:
        data = {}  # `network:` with every key commented out
    if not isinstance(data, Mapping):
        raise ConfigError(path, f"a section with keys is expected, not {_describe(data)}")
    fields = {field.name: field for field in dataclasses.fields(cast(Any, section))}
    variant_field = next((field for field in fields.values() if "variant" in field.metadata), None)
    if variant_field is not None:
        del fields[variant_field.name]
    hints = _hints(cast(Any, section))
    values: dict[str, Any] = {}
    others: dict[str, object] = {}
    for key, value in data.items():
        if isinstance(key, str) and key in fields:
            if value is None and fields[key].default_factory is not MISSING:
                continue  # a section with every key commented out is as good as none
            values[key] = _value(hints[key], value, _join(path, key), fields[key].metadata)
        elif variant_field is not None:
            others[str(key)] = value
        else:
            raise ConfigError(_join(path, str(key)), _unknown_key(str(key), list(fields)))
    if variant_field is not None:
        values[variant_field.name] = _variant_section(variant_field, values, others, path, list(fields))
    for name, field in fields.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(_join(path, name), "this key is required")
    record = section(**values)
    check = getattr(record, "check", None)
    if check is not None:
        for key, complaint in check():
            raise ConfigError(_join(path, key), complaint)
    return record


def _variant_records(field: dataclasses.Field[Any]) -> Mapping[str, type[Any]]:
    records: Mapping[str, type[Any]] = pkgutil.resolve_name(field.metadata["source"])()
    return records


def _variant_section(
    field: dataclasses.Field[Any], values: Mapping[str, Any], others: Mapping[str, object], path: str, plain: list[str]
) -> object:
    """The record of the keys that stand in the section because of what another key says; None if that says nothing."""
    by = field.metadata["variant"]
    chosen = values.get(by)
    if chosen is None and not others:
        return None
    records = _variant_records(field)
    if chosen is not None:
        _check_rules(chosen, _join(path, by), {"choices": list(records)})
    own = [] if chosen is None else [inner.name for inner in dataclasses.fields(records[chosen])]
    for key in others:
        if key in own:
            continue
        allowed = ", ".join(plain + own)
        has_it = [f"{by}: {name}" for name, record in records.items() if any(inner.name == key for inner in dataclasses.fields(record))]
        if not has_it:
            raise ConfigError(_join(path, key), _unknown_key(key, plain + own))
        meant = " or ".join(own or has_it)
        complaint = f"only {' and '.join(has_it)} has this key, and {by} is {chosen or 'not set'}"
        raise ConfigError(_join(path, key), f"{complaint}; do you mean {meant}? (allowed here: {allowed})")
    return None if chosen is None else _section(records[chosen], others, path)


def _unknown_key(key: str, allowed: list[str]) -> str:
    near = difflib.get_close_matches(key, allowed, n=1, cutoff=0.6)
    meant = f"; do you mean {near[0]}?" if near else ""
    return f"unknown key{meant} (allowed here: {', '.join(allowed)})"


def _value(hint: Any, value: object, path: str, rules: Mapping[str, Any]) -> object:
    alternatives = _alternatives(hint)
    if value is None and type(None) in alternatives:
        return None
    for kind in alternatives:
        if kind is type(None):
            continue
        result = _of_kind(kind, value, path, rules)
        if result is not None:
            checked = result[0]
            _check_rules(checked, path, rules)
            return checked
    raise ConfigError(path, f"{_expected(alternatives, rules)} is expected, not {_describe(value)}{_remedy(alternatives, value)}")


def _of_kind(kind: Any, value: object, path: str, rules: Mapping[str, Any]) -> tuple[Any] | None:
    """The value converted to the kind, in a tuple of one; None if it is of another kind."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return (_section(kind, value, path),)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            return None
        if args[-1] is Ellipsis:
            args = (args[0],) * len(value)
        if len(args) != len(value):
            return None
        return (tuple(_value(arg, item, f"{path}[{index}]", rules) for index, (arg, item) in enumerate(zip(args, value, strict=True))),)
    if origin is dict:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            return None
        return ({key: _value(args[1], item, _join(path, key), rules) for key, item in value.items()},)
    if kind is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return (float(value),)
        return None
    # bool is a subclass of int, but `fallback: 1` and `chunk_bytes: yes` are mistakes
    return (value,) if type(value) is kind else None


def _check_rules(value: object, path: str, rules: Mapping[str, Any]) -> None:
    choices = rules.get("choices")
    if choices is not None and not isinstance(value, tuple) and value not in choices:  # of a tuple, the items were checked
        near = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
        meant = f"; do you mean {near[0]}?" if near else ""
        raise ConfigError(path, f"{value!r} is not allowed{meant} (allowed: {', '.join(str(choice) for choice in choices)})")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        low, high, above = rules.get("min"), rules.get("max"), rules.get("above")
        if (low is not None and value < low) or (high is not None and value > high) or (above is not None and value <= above):
            raise ConfigError(path, f"{value} is out of range; allowed: {_range(rules)}")


def _range(rules: Mapping[str, Any]) -> str:
    low, high, above = rules.get("min"), rules.get("max"), rules.get("above")
    parts = []
    if low is not None:
        parts.append(f"at least {low}")
    if above is not None:
        parts.append(f"above {above}")
    if high is not None:
        parts.append(f"at most {high}")
    return " and ".join(parts)


_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}


def _expected(alternatives: tuple[Any, ...], rules: Mapping[str, Any]) -> str:
    names = []
    for kind in alternatives:
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if origin is tuple and args[-1] is not Ellipsis:
            names.append(f"a list of {len(args)} ({', '.join(_NAMES.get(arg, 'entries') for arg in args)})")
        elif origin is tuple:
            names.append("a list")
        elif origin is dict:
            names.append("a mapping")
        else:
            names.append(_NAMES.get(kind, "a section"))
    text = " or ".join(names)
    choices = rules.get("choices")
    return f"{text} ({', '.join(str(choice) for choice in choices)})" if choices else text


def _describe(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "a section with keys"
    text = repr(value)
    if len(text) > 60:
        text = text[:57] + "..."
    return f"the text {text}" if isinstance(value, str) else text


def _remedy(alternatives: tuple[Any, ...], value: object) -> str:
    """YAML 1.1 takes `1e-3` for text; say so, because the line looks right."""
    if float in alternatives and isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return ""
        if math.isfinite(number):
            return f" (write {number!r}, without quotes and with a decimal point)"
    return ""
