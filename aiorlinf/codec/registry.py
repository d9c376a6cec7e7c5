"""All codecs, found by looking into `codec/codecs`: by name for the configuration, by number for what arrives."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from aiorlinf.codec import codecs
from aiorlinf.codec.base import Codec
from aiorlinf.config import TensorCompressionConfig
from aiorlinf.errors import ConfigError

__all__ = ["AUTO", "AutoParameters", "codec_parameters", "codecs_by_name", "codecs_by_number", "make_codecs", "probe"]

AUTO = "auto"
"""As the codec's name: each link chooses for itself (`codec.choosing`)."""

_PATH = "cluster.collective.tensor_compression"

AnyCodec = type[Codec[Any]]


@dataclass(frozen=True, slots=True)
class AutoParameters:
    """Keys of ``codec: auto``: none."""


@functools.cache
def codecs_by_name() -> Mapping[str, AnyCodec]:
    """The classes of all codecs, by name. Imports their modules, not their libraries."""
    found = {}
    for module in pkgutil.iter_modules(codecs.__path__):
        codec: AnyCodec = importlib.import_module(f"{codecs.__name__}.{module.name}").CODEC
        found[codec.name] = codec
    _by_number(found.values())  # each number once
    return MappingProxyType(found)


@functools.cache
def codecs_by_number() -> Mapping[int, AnyCodec]:
    """The classes of all codecs, by their number on the wire."""
    return MappingProxyType(_by_number(codecs_by_name().values()))


def _by_number(classes: Iterable[AnyCodec]) -> dict[int, AnyCodec]:
    found: dict[int, AnyCodec] = {}
    for codec in classes:
        if codec.number in found or not 1 <= codec.number <= 255:
            raise ValueError(f"codec {codec.name}: number {codec.number} is taken or out of range")
        found[codec.number] = codec
    return found


def codec_parameters() -> dict[str, type[Any]]:
    """The record of each codec's keys, by the codec's name. Asked by the configuration."""
    return {**{name: codec.Parameters for name, codec in codecs_by_name().items()}, AUTO: AutoParameters}


def probe(config: TensorCompressionConfig) -> tuple[int, ...]:
    """Check that the library of the codec in use is there. To be called where a worker takes its configuration over.

    Returns the numbers of all codecs that can be undone here; none, without a look, if compression is off.

    Raises:
        ConfigError: it is missing; names the package.
    """
    if not config.enabled or config.codec is None:
        return ()
    for codec in codecs_by_name().values() if config.codec == AUTO else (codecs_by_name()[config.codec],):
        try:
            codec.probe()
        except ImportError as error:
            raise ConfigError(
                f"{_PATH}.codec",
                f"codec {config.codec} needs the package {codec.package}, which this worker cannot import: {error}",
                hint=f"pip install {codec.package}, or choose another codec",
            ) from error
    return tuple(number for number, other in sorted(codecs_by_number().items()) if _is_there(other))


def _is_there(codec: AnyCodec) -> bool:
    try:
        codec.probe()
    except ImportError:
        return False
    return True


def make_codecs(config: TensorCompressionConfig) -> list[tuple[str, Codec[Any]]]:
    """The codec in use, with its parameters, and what to call it; with ``codec: auto`` all that there is to choose from.

    Raises:
        ConfigError: a library is missing.
        ValueError: compression is off.
    """
    if not config.enabled or config.codec is None:
        raise ValueError("compression is off")
    probe(config)
    if config.codec == AUTO:
        return [(label, codec(parameters)) for codec in codecs_by_name().values() for label, parameters in codec.choices()]
    return [(config.codec, codecs_by_name()[config.codec](config.parameters))]
