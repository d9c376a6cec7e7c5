"""One worker's shared memory: the arena of its sends, the socket that peers pass descriptors to, and tensors made with `empty`."""

from __future__ import annotations

import itertools
import logging
import math
import os
import secrets
import sys
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from aiorlinf.address import Identity
from aiorlinf.backends.shm.arena import Arena, ArenaStats, Region
from aiorlinf.backends.shm.descriptors import DescriptorListener, DescriptorReader, DescriptorWriter
from aiorlinf.backends.shm.segment import shm_problem
from aiorlinf.config import SharedMemoryConfig
from aiorlinf.errors import AiorlinfError, UsageError
from aiorlinf.link.link import LinkState
from aiorlinf.link.loan import Keeper
from aiorlinf.link.shared import SharedOut
from aiorlinf.link.shared_in import SharedIn
from aiorlinf.wire.dtypes import NAMES
from aiorlinf.wire.leaves import Leaf, LeafSpec, tensor_over
from aiorlinf.wire.shown import shown

if TYPE_CHECKING:
    from aiorlinf.link.link import Link
    from aiorlinf.work.home import LoopHome

__all__ = ["GivenLeaf", "HostMemory", "Made", "Root"]

log: logging.Logger = logging.getLogger("aiorlinf.link")

EARLY_SECONDS = 30.0
"""A peer that connects to pass descriptors has a link here by then, or never."""

_spec = lru_cache(maxsize=64)(LeafSpec)  # a program makes many tensors of few shapes
_EARLY_LIMIT = 256
_WARN_SECONDS = 0.5


class Made:
    """Memory of a tensor made with `empty`.

    Attributes:
        region: it fills this.
        handle: the tensor that `empty` returned.
        roots: numbers of the `Root`s there are.
    """

    __slots__ = ("handle", "region", "roots")

    def __init__(self, region: Region) -> None:
        self.region: Region = region
        self.handle: weakref.ref[torch.Tensor] | None = None
        self.roots: set[int] = set()

    def is_handle(self, tensor: torch.Tensor) -> bool:
        """The tensor stands for the memory: it is the one that was made, or a Parameter of all of it."""
        if tensor.nbytes != self.region.size:
            return False
        return (self.handle is not None and self.handle() is tensor) or type(tensor) is torch.nn.Parameter


class Root:
    """That somebody here may look at memory made with `empty`: all that looks at it refers to one of these. The memory is free when the
    last one is gone. Any thread.

    A message that was given the memory holds one without looking at it.

    Args:
        spec: of the tensors over it; its flags do not count.
    """

    __slots__ = ("_made", "_memory", "_number", "_segment", "_spec")

    def __init__(self, memory: HostMemory, made: Made, spec: LeafSpec) -> None:
        self._memory = memory
        self._made = made
        self._spec = spec
        self._segment = made.region.segment  # whose mapping ends with its last reference
        self._number = number = next(memory.root_numbers)
        made.roots.add(number)

    @property
    def alone(self) -> bool:
        """There is no other one."""
        return len(self._made.roots) == 1

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """For NumPy, whose arrays then refer to this object."""
        region = self._made.region
        return {"version": 3, "shape": (region.size,), "typestr": "|u1", "data": (self._segment.address + region.offset, False)}

    def tensor(self) -> torch.Tensor:
        """A new tensor over the memory; of an inference mode that the caller may be in it shows nothing."""
        spec = self._spec
        if spec.flags:
            spec = LeafSpec(spec.nbytes, spec.dtype, spec.shape)
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return tensor_over(np.asarray(self), spec)
        return tensor_over(np.asarray(self), spec)

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _ending():
            self._memory._root_gone(self._made, self._number)


class GivenLeaf(Leaf):
    """A leaf whose memory was given to its message, and at which nobody here looks unless it has to be copied after all."""

    __slots__ = ("_root",)

    def __init__(self, spec: LeafSpec, root: Root) -> None:
        super().__init__(spec, None, None, None)
        self._root = root

    @property
    def memory(self) -> torch.Tensor:
        """See `Leaf.memory`."""
        memory = self._memory
        if memory is None:
            memory = self._memory = self._root.tensor()
        return memory

    @property
    def raw(self) -> memoryview | None:
        """See `Leaf.raw`."""
        if self._raw is None:
            self._raw = shown(self.memory)
        return self._raw

    def tobytes(self) -> bytes:
        """See `Leaf.tobytes`."""
        return bytes(self.raw or b"")


class HostMemory:
    """See the module. Home thread only, but for `made`.

    Attributes:
        problem: why this worker cannot share memory, None if it can.
        arena: the memory of its sends.
        used: `empty` has been called.
        keeper: of peers' segments that messages are passed on in.
        root_numbers: for each `Root` another one.
    """

    def __init__(
        self, home: LoopHome, config: SharedMemoryConfig, find: Callable[[str], Link | None], links: Callable[[], list[Link]]
    ) -> None:
        self.home = home
        self.problem = shm_problem() if config.enabled else "cluster.collective.shared_memory.enabled is off"
        self.arena: Arena = Arena(home, config.max_bytes, config.segment_bytes)
        self.arena.on_drop = self._dropped
        self.used: bool = False
        self.keeper: Keeper = Keeper(home, self.arena.new_number, self._dropped)
        self._find: Callable[[str], Link | None] = find
        self._links: Callable[[], list[Link]] = links
        self._key = secrets.token_hex(32)
        self._listener: DescriptorListener | None = None
        self._early: dict[DescriptorReader, tuple[str, int]] = {}
        self._made: dict[int, Made] = {}
        self.root_numbers: itertools.count[int] = itertools.count()
        if self.problem is None:
            try:
                self._listener = DescriptorListener(home.loop, self._key, self._attach, self._cut_off)
            except OSError as error:
                self.problem = f"no socket for descriptors can be opened: {error}"

    def hello(self) -> dict[str, Any]:
        """What we tell a peer in the handshake."""
        if self._listener is None:
            return {"problem": self.problem}
        return {"name": self._listener.name, "key": self._key, "uid": os.getuid()}

    def problem_with(self, hello: dict[str, Any], same_host: bool) -> str | None:
        """Why memory cannot be shared with the peer that said this, None if it can."""
        if not same_host:
            return "the workers are on different hosts"
        if self.problem is not None:
            return self.problem
        if "problem" in hello or not (isinstance(hello.get("name"), str) and isinstance(hello.get("key"), str)):
            return f"the peer says: {str(hello.get('problem', 'nothing about shared memory'))[:200]}"
        if hello.get("uid") != os.getuid():
            return f"the peer runs as another user ({hello.get('uid')} instead of {os.getuid()})"
        return None

    def equip(self, link: Link, hello: dict[str, Any], me: Identity, identity: Identity) -> SharedOut:
        """Give a link its two halves; the sending one is returned."""
        incoming = SharedIn(self.home, link.release_shared, self.keeper)
        link.receiver.shared = incoming
        whose = (str(identity.address), identity.incarnation)
        for reader in [reader for reader, early in self._early.items() if early == whose]:
            del self._early[reader]
            if not incoming.attach(reader):
                reader.close()

        def open_writer() -> DescriptorWriter:
            return DescriptorWriter(hello["name"], hello["key"], str(me.address), me.incarnation)

        chosen = link.backend, link.reason

        def changed(reason: str | None) -> None:
            link.backend, link.reason = chosen if reason is None else ("stream", reason)
            if reason is not None:
                self.home.loop.call_later(_WARN_SECONDS, warn, reason)

        def warn(reason: str) -> None:
            if link.state is LinkState.UP:  # otherwise it was the first that was seen of the peer's end
                log.warning("%s sends to %s without shared memory for a while: %s", me.address, identity.address, reason)

        link.shared_out = SharedOut(self.arena, open_writer, changed)
        return link.shared_out

    def _attach(self, address: str, incarnation: int, reader: DescriptorReader) -> bool:
        link = self._find(address)
        if link is not None and link.identity is not None and link.identity.incarnation == incarnation and link.receiver.shared is not None:
            return link.receiver.shared.attach(reader)
        # Its link may come up here a moment later than there.
        if len(self._early) >= _EARLY_LIMIT:
            return False
        self._early[reader] = (address, incarnation)
        self.home.loop.call_later(EARLY_SECONDS, self._forget_early, weakref.ref(reader))
        return True

    def _forget_early(self, reference: weakref.ref[DescriptorReader]) -> None:
        reader = reference()
        if reader is not None and self._early.pop(reader, None) is not None:
            reader.close()

    def _cut_off(self, reason: str) -> None:
        """Peers that want to pass us descriptors cannot connect."""
        for link in self._links():
            if link.receiver.shared is not None:
                link.receiver.shared.cut_off(reason)

    def _dropped(self, number: int) -> None:
        for link in self._links():
            link.forget_segment(number)

    # ---- tensors made in shared memory

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised CPU tensor in the arena; an ordinary one where memory cannot be shared or the bound is reached.

        Raises:
            UsageError: not a shape, or a dtype without plain memory.
        """
        name = NAMES.get(dtype)
        if name is None:
            raise UsageError(f"{dtype} has no plain memory")
        if any(size < 0 for size in shape):
            raise UsageError(f"{shape} is not the shape of a tensor")
        nbytes = math.prod(shape) * dtype.itemsize
        region = None
        if self.problem is None and nbytes:
            region = self.arena.take(nbytes) or self.arena.make_now(nbytes)
        if region is None:
            with torch.inference_mode(False):  # as those of `Root`
                return torch.empty(shape, dtype=dtype, device="cpu")
        self.used = True
        made = self._made[region.segment.address + region.offset] = Made(region)
        tensor = Root(self, made, _spec(nbytes, name, shape)).tensor()
        made.handle = weakref.ref(tensor)
        return tensor

    def made(self, tensor: torch.Tensor) -> Made | None:
        """The memory that this tensor stands for, if it was made by `empty`. Any thread."""
        made = self._made.get(tensor.data_ptr())
        return made if made is not None and made.is_handle(tensor) else None

    def _root_gone(self, made: Made, number: int) -> None:
        """Called in whatever thread let go of it."""
        roots = made.roots
        roots.discard(number)
        if roots:
            return
        # A new root is entered before the last one is gone, so none means that there will be none. `pop` makes it happen once.
        region = made.region
        address = region.segment.address + region.offset
        if self._made.get(address) is made and self._made.pop(address, None) is made:
            home = self.home
            try:
                if home.on_home():
                    home.loop.call_soon(self.arena.release, region)  # not now: it may be the garbage collector in the middle of anything
                else:
                    home.call_soon(self.arena.release, region)
            except (AiorlinfError, RuntimeError):  # the loop is gone, and the arena with it
                pass

    def stats(self) -> ArenaStats:
        """The arena's counters."""
        return self.arena.stats()

    def close(self) -> None:
        """Accept no descriptors any more and forget the arena; views keep their memory."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self.problem = "the worker was closed"
        for reader in self._early:
            reader.close()
        self._early.clear()
        # Tensors made here refer to this object, and may live for long: not so the links.
        self._find = lambda address: None
        self._links = list
        self.arena.close()
