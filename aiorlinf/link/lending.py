"""Payloads in shared memory whose place is told by somebody else than the link.

A large message takes several frames: it is announced, its place is told, it ends, it is accepted. Who sends messages of his own anyway (a
channel) can say in one of them where a payload lies: `put_down` copies it to where the peer can see it, `pass_on` lends on what lies in
memory of another peer. On the other side `take_parcel` holds it, `take_leaves` shows it. The memory comes back as always (RELEASE).

Whoever gets no answer but None has to send the payload as a message instead: the two do not share memory, there is none left at the moment,
or the memory file has not come yet.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from aiorlinf.backends.shm.regions import align
from aiorlinf.errors import WireError
from aiorlinf.link.link import LinkState
from aiorlinf.link.packing import pack
from aiorlinf.link.parcel import Parcel
from aiorlinf.link.placement import packed_size
from aiorlinf.wire.manifest import Limits, Manifest, decode_manifest

if TYPE_CHECKING:
    from aiorlinf.link.link import Link
    from aiorlinf.link.shared import SharedOut
    from aiorlinf.link.shared_in import Views
    from aiorlinf.wire.flat import Flat

__all__ = ["INLINE_BYTES", "Stores", "leaves_here", "pass_on", "put_down", "refuse", "take_leaves", "take_parcel"]

INLINE_BYTES = 2 << 20
"""Of payloads up to this size, which are copied on the loop: a thread costs more than that."""

Stores = Sequence[Any]
"""NumPy arrays over the leaves of a message."""

_HEAD = struct.Struct("<I")
_ANY_SIZE = Limits(max_manifest_bytes=2**32 - 1, max_message_bytes=2**64 - 1)
_CACHED_BYTES = 512
_CACHE_MAX = 256
_UP = LinkState.UP


class _Form(NamedTuple):
    """A description, and what is made of it for each message of its form."""

    manifest: Manifest
    sizes: list[int]
    on_devices: bool


_forms: dict[bytes, _Form] = {}


def put_down(link: Link | None, flat: Flat, head: bytes, total: int, versions: tuple[int, ...] | None = None) -> bytes | None:
    """Copy a payload to where the peer can see it; what to tell him, or None. A payload of nothing has no place.

    Args:
        head: the message's description, encoded.
        total: its payload in bytes, at most `INLINE_BYTES`.
        versions: those that the tensors had; None also if somebody has written to one since then, even while it was copied.
    """
    if not total or link is None or (shared := _shared(link)) is None:
        return None
    leaves = flat.leaves
    arena = shared.arena
    region = arena.take(align(total) if len(leaves) == 1 else packed_size([leaf.spec.nbytes for leaf in leaves]))
    if region is None:
        return None
    pack(region.segment.address + region.offset, leaves)
    place = shared.hand_over(region) if versions is None or flat.versions() == versions else None
    if place is None:
        arena.release(region)
        return None
    sender = link.sender
    sender.messages += 1
    sender.payload_bytes += total
    sender.around_bytes += total
    return _HEAD.pack(len(head)) + head + place


def pass_on(link: Link | None, parcel: Parcel, *, private: bool = False) -> bytes | None:
    """Let the peer have what a parcel holds; what to tell him, or None. The parcel stays as it is.

    Args:
        private: he must not write to it; nor will he, if he takes it as private. Several may have it so.
    """
    held = parcel.held
    if held is None or link is None or (shared := _shared(link)) is None or not (held.visible if private else held.free):
        return None
    loan = None if private else held.one_loan
    if loan is None:
        placement = held.placement(private=private)
        place = shared.lend(placement)
        placement.let_go()
    else:
        loan.hold()
        place = shared.hand_over(loan)
        if place is None:
            loan.release()
    if place is None:
        return None
    sender = link.sender
    sender.messages += 1
    sender.payload_bytes += parcel.nbytes
    sender.around_bytes += parcel.nbytes
    return _HEAD.pack(len(parcel.head)) + parcel.head + place


def take_parcel(link: Link | None, told: bytes) -> Parcel | None:
    """What a peer tells of, to be kept and passed on.

    Raises:
        WireError: malformed, or outside of the memory that it says.
    """
    head, place = _split(told)
    shared = None if link is None else link.receiver.shared
    form = _form_of(head)
    held = None if shared is None else shared.hold(form.sizes, place)
    return None if held is None else Parcel.of_held(head, form.manifest, held)


def leaves_here(link: Link | None, told: bytes) -> tuple[Manifest, Stores] | None:
    """What `take_leaves` calls back with if it can do so now, none of it was on an accelerator, and nobody else is shown the same memory;
    else None, and nothing is held.

    Raises:
        WireError: as `take_parcel`.
    """
    shared = None if link is None else link.receiver.shared
    if shared is None:
        return None
    head, place = _split(told)
    form = _form_of(head)
    stores = None if form.on_devices else shared.stores(form.sizes, place)
    return None if stores is None else (form.manifest, stores)


def take_leaves(link: Link | None, told: bytes, then: Callable[[Manifest, Stores | None], None], *, private: bool = False) -> None:
    """What a peer tells of: its description and the memory of its leaves, as `wire.tree.assemble` takes it; or None. Calls back now if the
    memory file is here.

    Args:
        private: see `pass_on`.

    Raises:
        WireError: as `take_parcel`.
    """
    head, place = _split(told)
    manifest, sizes, _ = _form_of(head)
    shared = None if link is None else link.receiver.shared
    if shared is None:
        then(manifest, None)
        return
    stores = None if private else shared.stores(sizes, place)
    if stores is not None:
        then(manifest, stores)
        return

    def placed(views: Views | None) -> None:
        then(manifest, None if views is None else [view.numpy() for view in views])

    shared.place(sizes, place, placed, private=private)


def refuse(link: Link | None, told: bytes) -> None:
    """Nobody wants what the peer tells of.

    Raises:
        WireError: as `take_parcel`.
    """
    head, place = _split(told)
    if link is not None and link.receiver.shared is not None:
        link.receiver.shared.refuse(place, _form_of(head).sizes)


def _shared(link: Link | None) -> SharedOut | None:
    """What large payloads go to this peer through, if that is shared memory."""
    return link.shared_out if link is not None and link.state is _UP and link.backend == "shm" else None


def _split(told: bytes) -> tuple[bytes, memoryview]:
    if len(told) < _HEAD.size:
        raise WireError("a place without a description")
    end = _HEAD.size + _HEAD.unpack_from(told)[0]
    if end > len(told):
        raise WireError("a place whose description is cut short")
    return told[_HEAD.size : end], memoryview(told)[end:]


def _form_of(head: bytes) -> _Form:
    form = _forms.get(head)
    if form is None:
        manifest = decode_manifest(head, limits=_ANY_SIZE)
        form = _Form(manifest, [spec.nbytes for spec in manifest.specs], manifest.on_devices)
        if len(head) <= _CACHED_BYTES:
            if len(_forms) >= _CACHE_MAX:
                _forms.clear()
            _forms[head] = form
    return form
