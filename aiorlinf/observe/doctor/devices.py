"""Checks of accelerators: which there are, what they can do with each other, and how tensors would travel between them.

Unlike the library itself, which starts no accelerator before it is used, the doctor does: a driver that does not work is worth knowing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from aiorlinf.backends.device_pairs import pair_maker
from aiorlinf.device.registry import accelerator, runtime_of
from aiorlinf.link.device_facts import DeviceFacts
from aiorlinf.observe.doctor.findings import Finding, Level
from aiorlinf.rendezvous.hosts import process_identity

if TYPE_CHECKING:
    from aiorlinf.backends.select import Choice
    from aiorlinf.device.runtime import Runtime

__all__ = ["check_devices", "facts_here", "ways_to_peer"]

_SLOW = "through host memory, which works and is slower; see what stands against the other ways"


def check_devices() -> Iterator[Finding]:
    """The accelerators of this process, and how tensors on them would get to another process of this host."""
    runtime, reason = _usable()
    if runtime is None:
        yield Finding(Level.NOTE, "accelerator", f"none that this torch can use ({reason})")
        return
    count = runtime.count()
    for index in range(count):
        identity = runtime.identity(index)
        free, total = runtime.memory(index)
        text = f"{identity.name}, {free >> 20} of {total >> 20} MiB free, UUID {identity.uuid}"
        yield Finding(Level.GOOD, f"{runtime.kind}:{index}", text)
    yield from _peer_access(runtime)
    yield _sharing(runtime)
    yield _pairs(runtime)
    here = facts_here()
    other = [dataclasses.replace(facts, process="another one of this host") for facts in here]
    yield from _ways(here, other, "", same_host=True)


def _usable() -> tuple[Runtime | None, str | None]:
    """The accelerator, started; or why there is none."""
    runtime = accelerator()
    if runtime is None:
        cuda = runtime_of("cuda")
        return None, None if cuda is None else cuda.problem()
    try:
        runtime.current_device()
    except RuntimeError as error:  # it is there, but its driver does not work with this torch
        return None, str(error).strip().partition("\n")[0]
    return runtime, None


def _peer_access(runtime: Runtime) -> Iterator[Finding]:
    count = runtime.count()
    for index in range(count if count > 1 else 0):
        others = [other for other in range(count) if other != index]
        near = [f"{runtime.kind}:{other}" for other in others if runtime.peer_access(index, other)]
        far = [f"{runtime.kind}:{other}" for other in others if f"{runtime.kind}:{other}" not in near]
        text = f"reads the memory of {', '.join(near) or 'no other device'}" + (f", not of {', '.join(far)}" if far else "")
        yield Finding(Level.NOTE if far else Level.GOOD, f"{runtime.kind}:{index} peer access", text)


def _sharing(runtime: Runtime) -> Finding:
    """Memory is exported as it would be for another process; it takes one to open it."""
    try:
        index = runtime.current_device()
        tensor = torch.zeros(1, dtype=torch.uint8, device=torch.device(runtime.kind, index))
        runtime.export(tensor)
        runtime.export_event(runtime.side_stream(index, "doctor"))
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        remedy = "tensors take another way between processes; PYTORCH_CUDA_ALLOC_CONF without expandable_segments may help"
        return Finding(Level.WARNING, "cuda_ipc", f"memory cannot be shared between processes: {reason}", remedy)
    return Finding(Level.GOOD, "cuda_ipc", "memory and events can be shared between processes")


def _pairs(runtime: Runtime) -> Finding:
    maker = pair_maker(runtime.kind)
    if maker is None:
        return Finding(Level.NOTE, "nccl", f"nothing connects {runtime.kind} devices")
    problem = maker.problem()
    if problem is not None:
        return Finding(Level.WARNING, "nccl", problem, "install a build of torch with it")
    return Finding(Level.GOOD, "nccl", maker.describe())


def facts_here() -> list[DeviceFacts]:
    """What a worker of this process would tell, for each device that tensors might land on; for CPU memory if there is none."""
    runtime, _ = _usable()
    if runtime is None:
        return [DeviceFacts(process_identity())]
    return [DeviceFacts.here(torch.device(runtime.kind, index)) for index in range(runtime.count())]


def ways_to_peer(here: Sequence[DeviceFacts], there: Sequence[DeviceFacts], *, same_host: bool) -> Iterator[Finding]:
    """How tensors on our devices would get to those of a peer, and from there to us. Both tell at least one landing place."""
    if not here[0].kind and not there[0].kind:
        yield Finding(Level.NOTE, "devices", "neither side has an accelerator")
    if here[0].kind:
        yield from _ways(here, there, "peer's ", same_host=same_host)
    if there[0].kind:
        yield from _ways(there, here, "our ", same_host=same_host, source="peer's ")


def _ways(here: Sequence[DeviceFacts], there: Sequence[DeviceFacts], whose: str, *, same_host: bool, source: str = "") -> Iterator[Finding]:
    """One finding for all targets that are reached the same way."""
    for index, uuid in enumerate(here[0].uuids):
        ways: dict[Choice, list[str]] = {}
        for place, peer in enumerate(there):
            choice = here[0].way_to(peer, uuid, same_host=same_host)
            ways.setdefault(choice, []).append(f"{whose}{peer.kind}:{place}" if peer.target else f"{whose}CPU memory")
        for choice, targets in ways.items():
            slow = choice.name == "staging" and there[0].kind == here[0].kind
            subject = f"{source}{here[0].kind}:{index} -> {', '.join(targets)}"
            yield Finding(Level.WARNING if slow else Level.GOOD, subject, f"{choice.name}: {choice.reason}", _SLOW if slow else "")
