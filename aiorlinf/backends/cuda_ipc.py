"""The `cuda_ipc` backend: what one process says so that another one can copy from its device memory itself.

The receiver copies into memory of its own and says COPIED; until then the sender keeps the tensors. So what is received is the receiver's
alone, as everywhere, and a device copies within itself faster than anything else could. Both directions are ordered by events: the
receiver's stream waits for the one that the sender recorded behind its producing streams, and COPIED is sent when the copy has happened.
The receiver keeps the sender's allocations open for the next message (`device.openings`).
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from aiorlinf.device.runtime import Shared
from aiorlinf.errors import WireError

__all__ = ["HANDLES_MAX_BYTES", "decode_handles", "encode_handles", "ipc_problem"]

HANDLES_MAX_BYTES = 1 << 20
"""A message whose handles take more goes another way."""

_ADDRESSES = 1 << 48


def ipc_problem(*, same_host: bool, same_process: bool, opens_own: bool, visible: bool, reads: bool = True) -> str | None:
    """Why the peer cannot open memory of a device of ours, None if it can.

    Args:
        opens_own: a process can open what it has exported itself.
        visible: the peer sees the device.
        reads: the peer's own device, where our tensors land, can read ours (peer access).
    """
    if not same_host:
        return "the workers are on different hosts"
    if same_process and not opens_own:
        return "both workers are in one process"
    if not visible:
        return "the peer does not see the sender's device"
    if not reads:
        return "the peer's device has no access to the sender's"
    return None


def encode_handles(events: dict[str, bytes], leaves: Sequence[Shared]) -> bytes:
    """For a START frame: by device the event behind which the memory can be read, and the memory of the leaves in order."""
    told = {uuid: handle.hex() for uuid, handle in events.items()}
    return orjson.dumps([told, [[leaf.uuid, leaf.handle.hex(), leaf.nbytes, leaf.at, leaf.epoch] for leaf in leaves]])


def decode_handles(body: memoryview, sizes: Sequence[int]) -> tuple[dict[str, bytes], list[Shared]]:
    """What `encode_handles` has made, for leaves of these sizes.

    Raises:
        WireError: malformed.
    """
    try:
        told, parts = orjson.loads(body)
        events = {str(uuid): bytes.fromhex(handle) for uuid, handle in told.items()}
        leaves = [Shared(str(uuid), bytes.fromhex(handle), *map(int, numbers)) for uuid, handle, *numbers in parts]
    except (ValueError, TypeError, AttributeError) as error:
        raise WireError(f"malformed handles of device memory: {error}") from None
    if any(leaf.at < 0 or leaf.at + leaf.nbytes > _ADDRESSES for leaf in leaves):
        raise WireError("handles of device memory that no device has")
    if [leaf.nbytes for leaf in leaves] != list(sizes) or not {leaf.uuid for leaf in leaves} <= events.keys():
        raise WireError(f"handles of {len(leaves)} pieces of device memory for {len(sizes)} leaves, or without an event")
    return events, leaves
