"""The codec without pickle: what arrives is built by this module alone, so the peer's bytes cannot name any code.

It knows None, bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset (exactly these classes), tensors,
NumPy arrays and scalars without Python objects in them, and dataclasses that were given to `register_dataclass` in both processes.
A list, dict, set or dataclass that occurs twice, and a tensor or array that does, arrives as one object.
"""

from __future__ import annotations

import dataclasses
import math
import re
import struct
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch.nn import Parameter

from aiorlinf.errors import UnsupportedObject, UsageError, WireError
from aiorlinf.wire.arrays import array_leaf, array_over
from aiorlinf.wire.leaves import Leaf, Refused, raw_leaf, tensor_leaf

__all__ = ["DEPTH_MAX", "decode", "encode", "register_dataclass"]

DEPTH_MAX = 200
_BIG = 64 * 1024

_U32 = struct.Struct("<I")
_I64 = struct.Struct("<q")
_F64 = struct.Struct("<d")
_C128 = struct.Struct("<dd")
_DTYPE_TEXT = re.compile(r"[<>|=]?[a-zA-Z?]\d{0,9}(\[\w{1,32}\])?", re.ASCII)

C = TypeVar("C", bound=type)
T = TypeVar("T")

_by_name: dict[str, type] = {}
_by_class: dict[type, str] = {}


def register_dataclass(cls: C, *, name: str | None = None) -> C:
    """Let instances of a dataclass travel where pickling is switched off. Usable as a decorator; call it in both processes.

        >>> @aiorlinf.register_dataclass
        ... @dataclasses.dataclass
        ... class Score:
        ...     points: int
        >>> with aiorlinf.init("a:0", config={"cluster": {"collective": {"allow_pickle": False}}}) as comm:
        ...     sent = comm.send(Score(21), "a:0")
        ...     comm.recv("a:0").wait(timeout=10)
        Score(points=21)

    Fields travel, whatever their ``init``; ``__init__`` and ``__post_init__`` do not run again on arrival.
    `name` is what stands on the wire; by default the class's module and qualified name.

    Raises:
        UsageError: not a dataclass, or the name belongs to another class.
    """
    if not dataclasses.is_dataclass(cls):
        raise UsageError(f"{cls!r} is not a dataclass")
    try:
        object.__new__(cls)
    except TypeError as error:
        raise UsageError(f"instances of {cls!r} cannot be made from their fields alone: {error}") from error
    name = name or f"{cls.__module__}.{cls.__qualname__}"
    holder = _by_name.get(name)
    # A class made again under its old name (a notebook cell run twice) takes the name over.
    if holder is not None and (holder.__module__, holder.__qualname__) != (cls.__module__, cls.__qualname__):
        raise UsageError(f"the name {name!r} already belongs to {holder!r}")
    _by_name[name] = cls
    _by_class[cls] = name
    return cls


class _Encoder:
    def __init__(self) -> None:
        self.out = bytearray()
        self.leaves: list[Leaf] = []
        self.shared: dict[int, int] = {}  # id of a container or leaf holder -> its number, in the order of their first bytes
        self.keep: list[object] = []  # so that no id is used again while we run
        self.depth = 0

    def value(self, obj: Any) -> None:
        write = _WRITERS.get(type(obj))
        if write is not None:
            write(self, obj)
        elif isinstance(obj, np.generic):
            _write_scalar(self, obj)
        elif type(obj) in _by_class:
            _write_dataclass(self, obj)
        else:
            raise Refused(obj, f"something of type {_full_name(type(obj))} cannot travel without pickle")

    def tag(self, tag: bytes, count: int) -> None:
        self.out += tag
        self.out += _U32.pack(count)

    def seen(self, obj: Any) -> bool:
        """Write a reference if `obj` was written before; else give it the next number."""
        number = self.shared.get(id(obj))
        if number is not None:
            self.tag(b"r", number)
            return True
        self.shared[id(obj)] = len(self.shared)
        self.keep.append(obj)
        return False

    def leaf(self, leaf: Leaf) -> None:
        self.leaves.append(leaf)

    def enter(self, obj: Any) -> None:
        self.depth += 1
        if self.depth > DEPTH_MAX:
            raise Refused(obj, f"nested deeper than {DEPTH_MAX} levels")


def _full_name(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _write_int(encoder: _Encoder, obj: int) -> None:
    if -(2**63) <= obj < 2**63:
        encoder.out += b"i" + _I64.pack(obj)
    else:
        data = obj.to_bytes(obj.bit_length() // 8 + 1, "little", signed=True)
        encoder.tag(b"I", len(data))
        encoder.out += data


def _write_bytes_like(encoder: _Encoder, small: bytes, big: bytes, data: bytes | bytearray) -> None:
    if len(data) < _BIG:
        encoder.tag(small, len(data))
        encoder.out += data
    else:
        encoder.out += big
        encoder.leaf(raw_leaf(memoryview(data)))


def _write_str(encoder: _Encoder, obj: str) -> None:
    _write_bytes_like(encoder, b"s", b"U", obj.encode("utf-8", "surrogatepass"))


def _write_items(encoder: _Encoder, tag: bytes, obj: Any) -> None:
    encoder.enter(obj)
    encoder.tag(tag, len(obj))
    for item in obj:
        encoder.value(item)
    encoder.depth -= 1


def _write_dict(encoder: _Encoder, obj: dict[Any, Any]) -> None:
    if encoder.seen(obj):
        return
    encoder.enter(obj)
    encoder.tag(b"d", len(obj))
    for key, value in obj.items():
        encoder.value(key)
        encoder.value(value)
    encoder.depth -= 1


def _write_shared_items(tag: bytes) -> Callable[[_Encoder, Any], None]:
    def write(encoder: _Encoder, obj: Any) -> None:
        if not encoder.seen(obj):
            _write_items(encoder, tag, obj)

    return write


def _write_tensor(encoder: _Encoder, obj: torch.Tensor) -> None:
    if encoder.seen(obj):
        return
    leaf = tensor_leaf(obj)
    if leaf is None:
        raise Refused(obj, f"a tensor of layout {obj.layout} and dtype {obj.dtype} cannot travel without pickle")
    encoder.out += b"x"
    encoder.leaf(leaf)


def _dtype_descr(owner: Any, dtype: np.dtype[Any]) -> Any:
    """The dtype in plain values, from which `_dtype_from` makes the same one."""
    if not dtype.hasobject and not dtype.metadata and dtype.itemsize and dtype.isbuiltin != 2:
        try:
            descr = np.lib.format.dtype_to_descr(dtype)
            if _dtype_from(descr) == dtype:
                return descr
        except (ValueError, TypeError):
            pass  # overlapping or titled fields
    raise Refused(owner, f"NumPy's dtype {dtype} cannot travel without pickle")


def _dtype_from(descr: Any) -> np.dtype[Any]:
    """Undo `numpy.lib.format.dtype_to_descr`, taking nothing else for a description."""
    if type(descr) is str:
        if _DTYPE_TEXT.fullmatch(descr) is None:
            raise ValueError(f"{descr!r} is not a dtype")
        dtype = np.dtype(descr)
    elif type(descr) is tuple:
        inner, shape = descr
        dtype = np.dtype((_dtype_from(inner), _dims(shape)))
    elif type(descr) is list:
        dtype = _structured_dtype_from(descr)
    else:
        raise TypeError(f"{descr!r} is not a dtype")
    if dtype.hasobject:
        raise ValueError(f"dtype {dtype} holds Python objects")
    return dtype


def _structured_dtype_from(descr: list[Any]) -> np.dtype[Any]:
    names: list[str] = []
    formats: list[np.dtype[Any]] = []
    offsets: list[int] = []
    at = 0
    for name, inner, *shape in descr:
        part = _dtype_from(inner)
        if shape:
            part = np.dtype((part, _dims(*shape)))
        if name != "":  # otherwise padding
            names.append(name)
            formats.append(part)
            offsets.append(at)
        at += part.itemsize
    layout: Any = {"names": names, "formats": formats, "offsets": offsets, "itemsize": at}
    dtype: np.dtype[Any] = np.dtype(layout)
    return dtype


def _dims(shape: Any) -> tuple[int, ...]:
    if type(shape) is not tuple or any(type(dim) is not int or dim < 0 for dim in shape):
        raise TypeError(f"{shape!r} is not a shape")
    return shape


def _write_array(encoder: _Encoder, obj: np.ndarray[Any, Any]) -> None:
    if encoder.seen(obj):
        return
    descr = _dtype_descr(obj, obj.dtype)
    leaf, order = array_leaf(obj)
    encoder.out += b"a"
    encoder.leaf(leaf)
    encoder.value(descr)
    encoder.value((order, obj.flags.writeable, *obj.shape))


def _write_scalar(encoder: _Encoder, obj: np.generic) -> None:
    encoder.out += b"g"
    if isinstance(obj, np.str_ | np.bytes_):  # the empty one has a dtype of no bytes, which nothing can be laid over
        encoder.value(obj.dtype.kind)
        encoder.value(str(obj) if isinstance(obj, np.str_) else bytes(obj))
    else:
        encoder.value(_dtype_descr(obj, obj.dtype))
        encoder.value(obj.tobytes())


def _write_dataclass(encoder: _Encoder, obj: Any) -> None:
    if encoder.seen(obj):
        return
    encoder.enter(obj)
    fields = [field.name for field in dataclasses.fields(obj) if hasattr(obj, field.name)]
    encoder.tag(b"D", len(fields))
    encoder.value(_by_class[type(obj)])
    for name in fields:
        encoder.value(name)
        encoder.value(getattr(obj, name))
    encoder.depth -= 1


def _write_fixed(data: Callable[[Any], bytes]) -> Callable[[_Encoder, Any], None]:
    def write(encoder: _Encoder, obj: Any) -> None:
        encoder.out += data(obj)

    return write


_WRITERS: dict[type, Callable[[_Encoder, Any], None]] = {
    type(None): _write_fixed(lambda obj: b"N"),
    bool: _write_fixed(lambda obj: b"T" if obj else b"F"),
    int: _write_int,
    float: _write_fixed(lambda obj: b"f" + _F64.pack(obj)),
    complex: _write_fixed(lambda obj: b"c" + _C128.pack(obj.real, obj.imag)),
    str: _write_str,
    bytes: lambda encoder, obj: _write_bytes_like(encoder, b"b", b"B", obj),
    bytearray: lambda encoder, obj: _write_bytes_like(encoder, b"y", b"Y", obj),
    list: _write_shared_items(b"l"),
    tuple: lambda encoder, obj: _write_items(encoder, b"t", obj),
    dict: _write_dict,
    set: _write_shared_items(b"S"),
    frozenset: lambda encoder, obj: _write_items(encoder, b"Z", obj),
    torch.Tensor: _write_tensor,
    Parameter: _write_tensor,
    np.ndarray: _write_array,
}


def encode(obj: Any) -> tuple[bytearray, list[Leaf]]:
    """The skeleton and the leaves of an object.

    Raises:
        Refused: a part of it cannot travel without pickle.
    """
    encoder = _Encoder()
    try:
        encoder.value(obj)
    except RecursionError:
        raise Refused(obj, "nested too deeply for what is left of the stack") from None
    return encoder.out, encoder.leaves


class _Decoder:
    def __init__(self, view: memoryview, leaves: list[Any]) -> None:
        self.view = view
        self.at = 0
        self.leaves = iter(leaves)
        self.shared: list[Any] = []
        self.depth = 0

    def take(self, size: int) -> memoryview:
        end = self.at + size
        if end > len(self.view):
            raise WireError(f"an object cut short: {size} bytes wanted, {len(self.view) - self.at} left")
        piece = self.view[self.at : end]
        self.at = end
        return piece

    def count(self) -> int:
        """A number of items; each takes at least a byte, so more than what is left is a lie."""
        count: int = _U32.unpack(self.take(4))[0]
        if count > len(self.view) - self.at:
            raise WireError(f"{count} items announced in {len(self.view) - self.at} bytes")
        return count

    def share(self, obj: T) -> T:
        self.shared.append(obj)
        return obj

    def raw(self) -> memoryview:
        leaf = next(self.leaves, None)
        if not isinstance(leaf, memoryview):
            raise WireError("an object that wants another buffer than the ones sent")
        return leaf

    def value(self) -> Any:
        tag = self.take(1)[0]
        read = _READERS.get(tag)
        if read is None:
            raise WireError(f"unknown tag {tag} in an object")
        return read(self)

    def enter(self) -> int:
        """Go one level down; returns the number of items there. The reader goes up again by itself."""
        self.depth += 1
        if self.depth > DEPTH_MAX:
            raise WireError(f"an object nested deeper than {DEPTH_MAX} levels")
        return self.count()


# The readers of containers are plain loops: each level of the object costs two frames of the stack.


def _read_list(decoder: _Decoder) -> list[Any]:
    items: list[Any] = decoder.share([])
    add = items.append
    for _ in range(decoder.enter()):
        add(decoder.value())
    decoder.depth -= 1
    return items


def _read_dict(decoder: _Decoder) -> dict[Any, Any]:
    items: dict[Any, Any] = decoder.share({})
    for _ in range(decoder.enter()):
        key = decoder.value()
        items[key] = decoder.value()
    decoder.depth -= 1
    return items


def _read_set(decoder: _Decoder) -> set[Any]:
    items: set[Any] = decoder.share(set())
    for _ in range(decoder.enter()):
        items.add(decoder.value())
    decoder.depth -= 1
    return items


def _read_tuple(decoder: _Decoder) -> tuple[Any, ...]:
    items: list[Any] = []
    add = items.append
    for _ in range(decoder.enter()):
        add(decoder.value())
    decoder.depth -= 1
    return tuple(items)


def _read_dataclass(decoder: _Decoder) -> Any:
    slot = len(decoder.shared)
    decoder.shared.append(None)
    count = decoder.enter()
    name = decoder.value()
    cls = _by_name.get(name) if isinstance(name, str) else None
    if cls is None:
        raise UnsupportedObject(
            f"a dataclass {name!r} arrived that is not registered here", hint="call aiorlinf.register_dataclass in both processes"
        )
    obj: Any = object.__new__(cls)
    decoder.shared[slot] = obj
    known = {field.name for field in dataclasses.fields(cls)}
    for _ in range(count):
        field = decoder.value()
        value = decoder.value()
        if field not in known:
            raise UnsupportedObject(f"{_full_name(cls)} has no field {field!r} here", hint="both processes need the same class")
        object.__setattr__(obj, field, value)
    decoder.depth -= 1
    return obj


def _read_tensor(decoder: _Decoder) -> torch.Tensor:
    leaf = next(decoder.leaves, None)
    if not isinstance(leaf, torch.Tensor):
        raise WireError("an object that wants more tensors than were sent")
    return decoder.share(leaf)


def _read_array(decoder: _Decoder) -> np.ndarray[Any, Any]:
    slot = len(decoder.shared)
    decoder.shared.append(None)
    store = decoder.raw()
    dtype = _dtype_from(decoder.value())
    order, writeable, *dims = decoder.value()
    shape = _dims(tuple(dims))
    if dtype.itemsize * math.prod(shape) != store.nbytes:
        raise WireError(f"an array {dtype}{list(shape)} in a buffer of {store.nbytes} bytes")
    array = decoder.shared[slot] = array_over(store, dtype, shape, order, writeable)
    return array


def _read_scalar(decoder: _Decoder) -> Any:
    descr = decoder.value()
    data = decoder.value()
    if descr == "U" and type(data) is str:
        return np.str_(data)
    if descr == "S" and type(data) is bytes:
        return np.bytes_(data)
    dtype = _dtype_from(descr)
    if type(data) is not bytes or len(data) != dtype.itemsize:
        raise WireError("a NumPy scalar of the wrong size")
    return np.frombuffer(data, dtype)[0]


def _read_reference(decoder: _Decoder) -> Any:
    number: int = _U32.unpack(decoder.take(4))[0]
    if number >= len(decoder.shared) or decoder.shared[number] is None:
        raise WireError(f"a reference to part {number} of an object with {len(decoder.shared)} so far")
    return decoder.shared[number]


_READERS: dict[int, Callable[[_Decoder], Any]] = {
    ord("N"): lambda decoder: None,
    ord("T"): lambda decoder: True,
    ord("F"): lambda decoder: False,
    ord("i"): lambda decoder: _I64.unpack(decoder.take(8))[0],
    ord("I"): lambda decoder: int.from_bytes(decoder.take(decoder.count()), "little", signed=True),
    ord("f"): lambda decoder: _F64.unpack(decoder.take(8))[0],
    ord("c"): lambda decoder: complex(*_C128.unpack(decoder.take(16))),
    ord("s"): lambda decoder: str(decoder.take(decoder.count()), "utf-8", "surrogatepass"),
    ord("U"): lambda decoder: str(decoder.raw(), "utf-8", "surrogatepass"),
    ord("b"): lambda decoder: bytes(decoder.take(decoder.count())),
    ord("B"): lambda decoder: bytes(decoder.raw()),
    ord("y"): lambda decoder: bytearray(decoder.take(decoder.count())),
    ord("Y"): lambda decoder: bytearray(decoder.raw()),
    ord("l"): _read_list,
    ord("t"): _read_tuple,
    ord("d"): _read_dict,
    ord("S"): _read_set,
    ord("Z"): lambda decoder: frozenset(_read_tuple(decoder)),
    ord("D"): _read_dataclass,
    ord("x"): _read_tensor,
    ord("a"): _read_array,
    ord("g"): _read_scalar,
    ord("r"): _read_reference,
}


def decode(skeleton: memoryview | bytes | bytearray, leaves: list[Any]) -> Any:
    """The object of a skeleton. `leaves` are finished tensors, or memoryviews for raw buffers, in order.

    Raises:
        WireError: malformed.
        UnsupportedObject: it names a dataclass that is not registered here.
    """
    decoder = _Decoder(memoryview(skeleton), leaves)
    try:
        obj: Any = decoder.value()
    except (WireError, UnsupportedObject):
        raise
    except Exception as error:  # NumPy, and the hash of a registered dataclass, may raise anything for values that no sender wrote
        raise WireError(f"malformed object: {type(error).__name__}: {error}") from error
    if decoder.at != len(decoder.view) or next(decoder.leaves, None) is not None:
        raise WireError("bytes or buffers left over behind an object")
    return obj
