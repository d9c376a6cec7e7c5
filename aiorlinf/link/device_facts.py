"""What two workers tell each other about their accelerators, when the first tensor on one is to be sent: then they are in use anyway."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import orjson

from aiorlinf.backends.cuda_ipc import ipc_problem
from aiorlinf.backends.device_pairs import pair_maker
from aiorlinf.backends.select import Choice, select_device_backend
from aiorlinf.device.registry import accelerator
from aiorlinf.errors import WireError
from aiorlinf.rendezvous.hosts import process_identity

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceFacts"]

_MAX_DEVICES = 4096


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One worker's accelerators.

    Attributes:
        process: text that no other process has.
        kind: torch's device type; empty if it has none.
        uuids: of the devices that it sees, by index.
        target: the one where tensors land that it receives; empty: in CPU memory.
        opens_own: it can open what its own process has exported.
        pairs: why it cannot be a member of a pair between devices, None if it can.
        reads: the UUIDs of those of its devices whose memory the target can read itself.
    """

    process: str
    kind: str = ""
    uuids: tuple[str, ...] = ()
    target: str = ""
    opens_own: bool = False
    pairs: str | None = "it has no accelerator"
    reads: tuple[str, ...] = ()

    @classmethod
    def here(cls, landing: torch.device) -> DeviceFacts:
        """Of this process, when tensors land there. Starts the accelerator, if there is one."""
        runtime = accelerator()
        if runtime is None:
            return cls(process_identity())
        uuids = tuple(runtime.identity(index).uuid for index in range(runtime.count()))
        maker = pair_maker(runtime.kind)
        pairs = f"nothing connects {runtime.kind} devices" if maker is None else maker.problem()
        target = uuids[landing.index] if landing.type == runtime.kind else ""
        near = landing.index if target else None
        reads = () if near is None else tuple(uuid for index, uuid in enumerate(uuids) if runtime.peer_access(near, index))
        return cls(process_identity(), runtime.kind, uuids, target, runtime.opens_own, pairs, reads)

    def encode(self) -> bytes:
        """For a DEVICE frame."""
        return orjson.dumps([self.process, self.kind, self.uuids, self.target, self.opens_own, self.pairs, self.reads])

    @classmethod
    def decode(cls, body: bytes | memoryview) -> DeviceFacts:
        """Raises WireError if malformed."""
        try:
            process, kind, uuids, target, opens_own, pairs, reads = orjson.loads(body)
        except (ValueError, TypeError):
            raise WireError("malformed facts about accelerators") from None
        texts = [process, kind, target, "" if pairs is None else pairs]
        if any(type(each) is not list or len(each) > _MAX_DEVICES for each in (uuids, reads)) or type(opens_own) is not bool:
            raise WireError("malformed facts about accelerators")
        if not all(type(each) is str for each in (*texts, *uuids, *reads)) or (target and target not in uuids):
            raise WireError("malformed facts about accelerators")
        return cls(process, kind, tuple(uuids), target, opens_own, pairs, tuple(reads))

    def way_to(
        self,
        peer: DeviceFacts,
        source: str,
        *,
        wanted: str = "auto",
        fallback: bool = True,
        same_host: bool,
        emulated: str | None = None,
        failed: Mapping[str, str] = MappingProxyType({}),
    ) -> Choice:
        """How a tensor on the device of ours with this UUID (empty: none that we see) gets to the peer's target (`select_device_backend`).

        Args:
            failed: backends that cannot be used between the two for another reason, and that reason.

        Raises:
            BackendUnavailable: the named backend cannot be had and `fallback` is off.
        """
        ipc = failed.get("cuda_ipc") or ipc_problem(
            same_host=same_host,
            same_process=peer.process == self.process,
            opens_own=self.opens_own,
            visible=bool(source) and source in peer.uuids,
            reads=not peer.target or source in peer.reads,
        )
        return select_device_backend(
            wanted,
            fallback=fallback,
            src=(self.kind, source),
            dst=(peer.kind, peer.target) if peer.target else None,
            ipc_problem=ipc,
            pair_problem=failed.get("nccl") or self.pairs or peer.pairs,
            emulated=emulated,
        )
