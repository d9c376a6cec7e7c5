"""One worker's shared memory: the arena of its sends, the socket that peers pass descriptors to, and tensors made with `empty`."""

from __future__ import annotations

import logging
import math
import os
import secrets
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from aiorlinf.address import Identity
from aiorlinf.backends.shm.arena import Arena, ArenaStats, Region
from aiorlinf.backends.shm.descriptors import DescriptorListener, DescriptorReader, DescriptorWriter
from aiorlinf.backends.shm.segment import shm_problem
from aiorlinf.config import SharedMemoryConfig
from aiorlinf.errors import AiorlinfError, UsageError
from aiorlinf.link.shared import SharedIn, SharedOut
from aiorlinf.wire.dtypes import NAMES
from aiorlinf.wire.leaves import LeafSpec, tensor_over

if TYPE_CHECKING:
    from aiorlinf.link.link import Link
    from aiorlinf.work.home import LoopHome

__all__ = ["HostMemory"]

log = logging.getLogger("aiorlinf.link")

_EARLY_LIMIT = 256


class HostMemory:
    """See the module. Home thread only, but for `owned`.

    Attributes:
        problem: why this worker cannot share memory, None if it can.
        arena: the memory of its sends.
    """

    def __init__(
        self, home: LoopHome, config: SharedMemoryConfig, find: Callable[[str], Link | None], links: Callable[[], list[Link]]
    ) -> None:
        self.home = home
        self.problem = shm_problem() if config.enabled else "cluster.collective.shared_memory.enabled is off"
        self.arena = Arena(home, config.max_bytes, config.segment_bytes)
        self.arena.on_retire = self._retired
        self._find = find
        self._links = links
        self._key = secrets.token_hex(32)
        self._listener: DescriptorListener | None = None
        self._early: dict[tuple[str, int], DescriptorReader] = {}
        self._owned: dict[int, Region] = {}
        self.used = False
        if self.problem is None:
            try:
                self._listener = DescriptorListener(home.loop, self._key, self._attach)
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
        if "problem" in hello or not hello:
            return f"the peer says: {str(hello.get('problem', 'nothing about shared memory'))[:200]}"
        if hello.get("uid") != os.getuid():
            return f"the peer runs as another user ({hello.get('uid')} instead of {os.getuid()})"
        return None

    def equip(self, link: Link, hello: dict[str, Any], me: Identity, identity: Identity) -> SharedOut:
        """Give a link its two halves; the sending one is returned."""
        incoming = SharedIn(self.home, link.release_shared)
        link.receiver.shared = incoming
        early = self._early.pop((str(identity.address), identity.incarnation), None)
        if early is not None:
            incoming.attach(early)

        def open_writer() -> DescriptorWriter:
            return DescriptorWriter(str(hello["name"]), str(hello["key"]), str(me.address), me.incarnation)

        def problem(reason: str) -> None:
            link.backend, link.reason = "stream", reason
            log.warning("%s sends to %s without shared memory from now on: %s", me.address, identity.address, reason)

        link.shared_out = SharedOut(self.arena, open_writer, problem)
        return link.shared_out

    def _attach(self, address: str, incarnation: int, reader: DescriptorReader) -> bool:
        link = self._find(address)
        if link is not None and link.identity is not None and link.identity.incarnation == incarnation and link.receiver.shared is not None:
            return link.receiver.shared.attach(reader)
        # Its link may come up here a moment later than there.
        if len(self._early) >= _EARLY_LIMIT:
            return False
        old = self._early.pop((address, incarnation), None)
        if old is not None:
            old.close()
        self._early[address, incarnation] = reader
        return True

    def _retired(self, number: int) -> None:
        for link in self._links():
            link.forget_segment(number)

    # ---- tensors made in shared memory

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised CPU tensor in the arena; an ordinary one where memory cannot be shared or the bound is reached."""
        name = NAMES.get(dtype)
        if name is None:
            raise UsageError(f"{dtype} has no plain memory")
        nbytes = math.prod(shape) * dtype.itemsize
        if self.problem is not None or not nbytes:
            return torch.empty(shape, dtype=dtype)
        region = self.arena.take(nbytes) or self.arena.make_now(nbytes)
        if region is None:
            return torch.empty(shape, dtype=dtype)
        root = region.segment.view(region.offset, nbytes)
        tensor = tensor_over(root, LeafSpec(nbytes, name, shape))
        address = tensor.data_ptr()
        self.used = True
        self._owned[address] = region
        finalizer = weakref.finalize(root, self._let_go, address)
        finalizer.atexit = False
        return tensor

    def owned(self, tensor: torch.Tensor) -> Region | None:
        """The region that this tensor fills, if it was made by `empty`. Any thread."""
        region = self._owned.get(tensor.data_ptr())
        return region if region is not None and region.size == tensor.nbytes else None

    def _let_go(self, address: int) -> None:
        """The last handle here is gone; called in whatever thread let go of it."""
        region = self._owned.pop(address, None)
        if region is not None:
            try:
                self.home.call_soon(self.arena.release, region)
            except AiorlinfError:  # the loop is gone, and the arena with it
                pass

    def stats(self) -> ArenaStats:
        """The arena's counters."""
        return self.arena.stats()

    def close(self) -> None:
        """Accept no descriptors any more and forget the arena; views keep their memory."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for reader in self._early.values():
            reader.close()
        self._early.clear()
        self.arena.close()
