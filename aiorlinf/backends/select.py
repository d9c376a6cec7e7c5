"""Which backend carries payloads between two workers, from CPU memory and from accelerators: pure decisions with their reasons."""

from __future__ import annotations

from typing import NamedTuple

from aiorlinf.errors import BackendUnavailable

__all__ = ["DEVICE_BACKENDS", "Choice", "select_backend", "select_device_backend"]

DEVICE_BACKENDS = ("nccl", "cuda_ipc")
"""Those that carry tensors on accelerators only; who asks for one of them leaves the rest to `auto`."""


class Choice(NamedTuple):
    """The backend's name, why it was chosen, and whether another may stand in when it cannot be made."""

    name: str
    reason: str
    required: bool


def select_backend(
    wanted: str, *, fallback: bool, same_host: bool, same_worker: bool, shm_problem: str | None, gloo_problem: str | None
) -> Choice:
    """Choose for payloads that do not fit in a frame.

    Args:
        wanted: auto, stream, shm or gloo.
        fallback: a named backend that cannot be had may be replaced.
        same_host: the two workers share a host.
        same_worker: a worker talks to itself.
        shm_problem, gloo_problem: why that backend cannot be used between the two, None if it can.

    Raises:
        BackendUnavailable: the named backend cannot be had and `fallback` is off.
    """
    if same_worker:
        return Choice("stream", "a worker's messages to itself stay in its memory", False)
    if wanted == "stream":
        return Choice("stream", "asked for", True)
    problems = {"shm": shm_problem, "gloo": gloo_problem}
    if wanted in problems:
        problem = problems[wanted]
        if problem is None:
            return Choice(wanted, "asked for", not fallback)
        if fallback:
            return Choice("stream", f"{wanted} was asked for, but {problem}", False)
        raise BackendUnavailable("the backend asked for cannot be used", {wanted: problem})
    if same_host:
        if shm_problem is None:
            return Choice("shm", "both workers are on one host", False)
        return Choice("stream", f"both workers are on one host, but {shm_problem}", False)
    if gloo_problem is None:
        return Choice("gloo", "the workers are on different hosts", False)
    return Choice("stream", f"the workers are on different hosts, but {gloo_problem}", False)


def select_device_backend(
    wanted: str,
    *,
    fallback: bool,
    src: tuple[str, str],
    dst: tuple[str, str] | None,
    ipc_problem: str | None,
    pair_problem: str | None,
    emulated: str | None = None,
) -> Choice:
    """Choose for tensors on an accelerator: `cuda_ipc`, `nccl`, or `staging` through host memory, which goes on by `select_backend`.

    Args:
        wanted: auto, cuda_ipc, nccl; any other backend is one for host memory.
        fallback: a named backend that cannot be had may be replaced.
        src, dst: type and UUID of the sender's device, and of the one where the peer's tensors land; None: it has no accelerator.
        ipc_problem: why the peer cannot open memory of the sender's device (`backends.cuda_ipc.ipc_problem`), None if it can.
        pair_problem: why no pair can be made between the two devices, None if nothing speaks against it.
        emulated: why payloads have to stay on the link.

    Raises:
        BackendUnavailable: the named backend cannot be had and `fallback` is off.
    """
    if pair_problem is None and src == dst:
        pair_problem = "both workers use the same device"
    shared = {"cuda_ipc": ipc_problem, "nccl": pair_problem}
    against = emulated
    if against is None and dst is None:
        against = "the peer has no accelerator"
    if against is None and dst is not None and dst[0] != src[0]:
        against = f"the one side has {src[0]}, the other {dst[0]}"
    if wanted in shared:
        problem = against or shared[wanted]
        if problem is None:
            return Choice(wanted, "asked for", not fallback)
        if fallback:
            return Choice("staging", f"{wanted} was asked for, but {problem}", False)
        raise BackendUnavailable("the backend asked for cannot be used", {wanted: problem})
    if against is None and wanted != "auto":
        against = f"{wanted} was asked for"
    if against is not None:
        return Choice("staging", against, False)
    if ipc_problem is None:
        reason = "both workers use the same device" if src == dst else "the peer reads the sender's device itself"
        return Choice("cuda_ipc", reason, False)
    if pair_problem is None:
        return Choice("nccl", "two devices", False)
    return Choice("staging", f"no cuda_ipc: {ipc_problem}; no nccl: {pair_problem}", False)
