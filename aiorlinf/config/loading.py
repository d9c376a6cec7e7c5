"""A configuration from wherever it is: a YAML file, a mapping or a record."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from aiorlinf.config.complaints import describe
from aiorlinf.config.job import JobConfig
from aiorlinf.config.options import key_path
from aiorlinf.config.plain import config_to_dict
from aiorlinf.config.reading import read_section
from aiorlinf.errors import ConfigError

__all__ = ["config_errors", "load_config", "read_config_file"]


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
        return read_section(JobConfig, config_to_dict(source), "")
    if isinstance(source, Mapping):
        return read_section(JobConfig, source, "")
    if isinstance(source, (str, os.PathLike)):
        return read_config_file(source)[0]
    raise ConfigError("", f"a configuration is a mapping, a YAML file's path or a JobConfig, not {describe(source)}")


class _StrictLoader(yaml.SafeLoader):
    """YAML that refuses a key given twice in one mapping (plain YAML keeps the last one silently)."""


def read_config_file(file: str | os.PathLike[str]) -> tuple[JobConfig, dict[str, int]]:
    """As `load_config` of a file, and the line of each key in it, by its full path (``cluster.topology.labels[0]`` in lists)."""
    data, lines = _read_yaml(Path(file))
    try:
        return read_section(JobConfig, data, ""), lines
    except ConfigError as error:
        raise _placed(error, file, lines) from None


def config_errors(file: str | os.PathLike[str]) -> list[ConfigError]:
    """Everything that is wrong with a configuration file, each error as `load_config` would raise it if it were the only one."""
    try:
        data, lines = _read_yaml(Path(file))
    except ConfigError as error:
        return [error]
    found: dict[str, ConfigError] = {}
    while True:
        try:
            read_section(JobConfig, data, "")
            return [_placed(error, file, lines) for error in found.values()]
        except ConfigError as error:
            known = error.path in found
            found.setdefault(error.path, error)
            # The rest is looked at without what is wrong. What is missing cannot be taken out, but the section that needs it can.
            path = error.path.rpartition(".")[0] if known else error.path
            while path and not _take_out(data, "", path):
                path = path.rpartition(".")[0]
            if not path:
                return [_placed(error, file, lines) for error in found.values()]


def _take_out(data: object, at: str, path: str) -> bool:
    """Remove the key of this path; of a list the whole list, as what follows in it would have other paths. Whether it was there."""
    if not isinstance(data, dict):
        return False
    for key, value in data.items():
        own = key_path(at, str(key))
        if own == path or (path.startswith(f"{own}[") and isinstance(value, list)):
            del data[key]
            return True
        if path.startswith(f"{own}.") and _take_out(value, own, path):
            return True
    return False


def _placed(error: ConfigError, file: str | os.PathLike[str], lines: Mapping[str, int]) -> ConfigError:
    line = lines.get(error.path)
    error.fill(hint=f"in {file}" + (f", line {line}" if line is not None else ""))
    return error


def _read_yaml(path: Path) -> tuple[Any, dict[str, int]]:
    """The values of a file, and the line of each key."""
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
            return (None if node is None else loader.construct_document(node)), lines
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        where = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise ConfigError("", f"{path}{where}: this is not valid YAML: {error.problem or error.context}") from error
    except ConfigError as error:
        raise _placed(error, path, lines) from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: what looks like a date or a number and is none
        raise ConfigError("", f"{path}: this is not valid YAML: {' '.join(str(error).split())}") from error


def _note_lines(node: yaml.Node | None, path: str, lines: dict[str, int]) -> None:
    """Record the line of every key, and refuse keys given twice."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            inner = key_path(path, str(key.value))
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
