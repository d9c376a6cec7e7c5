"""What torch does with tensors of the fake device: registered once, for the process; without an accelerator that is in use it raises.

Views are made at once by torch's kernels for the CPU. Everything else is queued on the current stream, and done in its turn on the CPU,
over the same memory. For the shape and type of a new tensor the operation is done twice: at once, whatever the memory holds by then,
and in its turn. An operation that needs values at once (`item`, a copy to the CPU) lets time pass until the stream is through.
"""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from aiorlinf.testing.fake.memory import cpu_alias
from aiorlinf.testing.fake.streams import FakeStream

__all__ = ["Engine", "install"]

KIND = "fake"

_VIEWS = (
    *("view", "as_strided", "_reshape_alias", "unfold", "view_as_real", "view_as_complex"),
    *("set_", "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor"),
)


class Engine(Protocol):
    """What the operations need of the accelerator."""

    def count(self) -> int: ...
    def current_device(self) -> int: ...
    def current_stream(self, index: int) -> FakeStream: ...
    def empty(self, nbytes: int, index: int, stream: FakeStream) -> torch.Tensor: ...
    def synchronise(self, stream: FakeStream) -> None: ...
    def launch(
        self,
        what: str,
        stream: FakeStream,
        run: Callable[[], object],
        *,
        reads: list[torch.Tensor] | None = None,
        writes: list[torch.Tensor] | None = None,
        ticks: int | None = None,
    ) -> None: ...


_active: Engine | None = None
_libraries: list[Any] = []


def install(fake: Engine | None) -> None:
    """This is the accelerator from now on."""
    global _active
    if fake is not None and _active is not None:
        raise RuntimeError("one fake accelerator at a time")
    if fake is not None and not _libraries:
        _register()
    _active = fake


def _fake() -> Engine:
    if _active is None:
        raise RuntimeError("tensors of the fake device can be used only while their FakeAccelerator is")
    return _active


def _register() -> None:
    acc: Any = torch._C._acc
    here: Any = torch
    here.utils.rename_privateuse1_backend(KIND)
    module: Any = types.ModuleType(f"torch.{KIND}")
    module.is_available = lambda: False  # torch itself need not make use of it
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None  # `torch.manual_seed` complains about a device without it
    module.device_count = lambda: 0 if _active is None else _active.count()
    module.current_device = lambda: _fake().current_device()
    here._register_device_module(KIND, module)
    guard = type("Guard", (acc.DeviceGuard,), {"type_": lambda self: torch._C._autograd.DeviceType.PrivateUse1})
    acc.register_python_privateuseone_device_guard(guard())
    library = here.library.Library("aten", "IMPL", "PrivateUse1")
    cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    for name in _VIEWS:
        packet, _, overload = name.partition(".")
        library.impl(name, _redispatching(getattr(getattr(torch.ops.aten, packet), overload or "default"), cpu), "PrivateUse1")
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    library.impl("_local_scalar_dense", _item, "PrivateUse1")
    rest = here.library.Library("_", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rest.fallback(_queued, "PrivateUse1")
    _libraries.extend((library, rest))
    sys.modules.setdefault(f"torch.{KIND}", module)


def _redispatching(op: Any, keys: Any) -> Callable[..., Any]:
    def view(*args: Any, **kwargs: Any) -> Any:
        return op.redispatch(keys, *args, **kwargs)

    return view


def _new(like: torch.Tensor, index: int) -> torch.Tensor:
    """A tensor with the form of this one, on a device."""
    fake = _fake()
    nbytes = like.untyped_storage().nbytes()
    stored = fake.empty(nbytes, index, fake.current_stream(index))
    if not nbytes:
        return stored.view(like.dtype).view(like.shape)
    return torch.as_strided(stored.view(like.dtype), like.shape, like.stride())


def _index(device: torch.device | None) -> int:
    return _fake().current_device() if device is None or device.index is None else device.index


def _empty(size: Any, *, dtype: Any = None, device: Any = None, **_rest: Any) -> torch.Tensor:
    return _new(torch.empty(size, dtype=dtype, device="cpu"), _index(device))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **_rest: Any) -> torch.Tensor:
    return _new(torch.empty_strided(size, stride, dtype=dtype, device="cpu"), _index(device))


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_cpu else cpu_alias(tensor)


def _copy_from(source: torch.Tensor, out: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    fake = _fake()
    on_device = [tensor for tensor in (source, out) if not tensor.is_cpu]
    stream = fake.current_stream(on_device[0].get_device())
    of, to = _alias(source), _alias(out)
    if source.is_cpu:
        of = of.clone()  # host memory that is not pinned is read at once
    fake.launch(
        "a copy of torch",
        stream,
        lambda: to.copy_(of),
        reads=[] if source.is_cpu else [source],
        writes=[] if out.is_cpu else [out],
    )
    if out.is_cpu:
        fake.synchronise(stream)
    return out


def _item(tensor: torch.Tensor) -> Any:
    fake = _fake()
    stream = fake.current_stream(tensor.get_device())
    fake.launch("item()", stream, lambda: None, reads=[tensor])
    fake.synchronise(stream)
    return cpu_alias(tensor).item()


def _is_fake(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_cpu


def _queued(op: Any, *args: Any, **kwargs: Any) -> Any:
    fake = _fake()
    leaves, form = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if _is_fake(leaf)]
    devices = [leaf.index for leaf in leaves if isinstance(leaf, torch.device) and leaf.type == KIND]
    index = tensors[0].get_device() if tensors else devices[0] if devices and devices[0] is not None else fake.current_device()
    stream = fake.current_stream(index)

    def on_cpu(leaf: Any) -> Any:
        if _is_fake(leaf):
            return cpu_alias(leaf)
        return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == KIND else leaf

    written = _written(op, args, kwargs)
    if op._overloadname.endswith("out"):
        _resize(op, [out for out in written if not out.numel()], leaves, form, on_cpu, index)
    cpu_args, cpu_kwargs = tree_unflatten([on_cpu(leaf) for leaf in leaves], form)
    if written:
        fake.launch(str(op), stream, lambda: op(*cpu_args, **cpu_kwargs), reads=tensors, writes=written)
        returned = written if len(op._schema.returns) != 1 else written[0]
        return returned if op._schema.returns else None
    if torch.Tag.dynamic_output_shape in op.tags:
        fake.synchronise(stream)
    found = op(*cpu_args, **cpu_kwargs)
    new = tree_map(lambda value: _new(value, index) if isinstance(value, torch.Tensor) else value, found)
    targets = [value for value in tree_flatten(new)[0] if _is_fake(value)]
    aliases = [cpu_alias(target) for target in targets]

    def run() -> None:
        values = [value for value in tree_flatten(op(*cpu_args, **cpu_kwargs))[0] if isinstance(value, torch.Tensor)]
        for alias, value in zip(aliases, values, strict=True):
            alias.copy_(value)

    fake.launch(str(op), stream, run, reads=tensors, writes=targets)
    return new


def _resize(op: Any, outs: list[torch.Tensor], leaves: list[Any], form: Any, on_cpu: Callable[[Any], Any], index: int) -> None:
    """Give results that the caller has provided the size that they are to have."""
    if not outs:
        return
    trial = {id(out): torch.empty(0, dtype=out.dtype, device="cpu") for out in outs}
    trial_args, trial_kwargs = tree_unflatten([trial[id(leaf)] if id(leaf) in trial else on_cpu(leaf) for leaf in leaves], form)
    op(*trial_args, **trial_kwargs)
    for out in outs:
        if out.shape != trial[id(out)].shape:
            out.set_(_new(trial[id(out)], index))  # type: ignore[call-overload]  # the stubs miss this form


def _written(op: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that this operation changes."""
    found = []
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
            found += [each for each in (value if isinstance(value, list | tuple) else [value]) if _is_fake(each)]
    return found
