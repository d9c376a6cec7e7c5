"""What two workers tell each other about their accelerators, when the first tensor on one is to be sent: then they are in use anyway."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson

from aiorlinf.backends.device_pairs import pair_maker
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
    """

    process: str
    kind: str = ""
    uuids: tuple[str, ...] = ()
    target: str = ""
    opens_own: bool = False
    pairs: str | None = "it has no accelerator"

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
        return cls(process_identity(), runtime.kind, uuids, target, runtime.opens_own, pairs)

    def encode(self) -> bytes:
        """For a DEVICE frame."""
        return orjson.dumps([self.process, self.kind, list(self.uuids), self.target, self.opens_own, self.pairs])

    @classmethod
    def decode(cls, body: bytes | memoryview) -> DeviceFacts:
        """Raises WireError if malformed."""
        try:
            process, kind, uuids, target, opens_own, pairs = orjson.loads(body)
        except (ValueError, TypeError):
            raise WireError("malformed facts about accelerators") from None
        texts = [process, kind, target, "" if pairs is None else pairs]
        if type(uuids) is not list or len(uuids) > _MAX_DEVICES or type(opens_own) is not bool:
            raise WireError("malformed facts about accelerators")
        if not all(type(each) is str for each in (*texts, *uuids)) or (target and target not in uuids):
            raise WireError("malformed facts about accelerators")
        return cls(process, kind, tuple(uuids), target, opens_own, pairs)
