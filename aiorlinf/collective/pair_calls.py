"""The operations of a worker with one other, or with whoever sends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from aiorlinf.address import WorkerAddress
from aiorlinf.collective.inbox import Inbox
from aiorlinf.work.base import AsyncWork

if TYPE_CHECKING:
    import torch

    from aiorlinf.collective.exchange import Exchange

__all__ = ["PairCalls"]


class PairCalls:
    """`Worker.send`, `recv`, `send_tensor`, `recv_tensor` and `inbox`."""

    _exchange: Exchange

    @overload
    def send(
        self, obj: Any, dst: str, *, tag: int = 0, timeout: float | None = None, async_op: Literal[True] = True
    ) -> AsyncWork[None]: ...
    @overload
    def send(self, obj: Any, dst: str, *, tag: int = 0, timeout: float | None = None, async_op: Literal[False]) -> None: ...
    def send(self, obj: Any, dst: str, *, tag: int = 0, timeout: float | None = None, async_op: bool = True) -> AsyncWork[None] | None:
        """As `CollectiveGroup.send` in the unnamed group of us and `dst`; `dst` may be our own address."""
        if not async_op:
            self._exchange.check_may_block()
        work = self._exchange.send(WorkerAddress(dst), 0, obj, tag, timeout)
        return work if async_op else work.wait()

    @overload
    def recv(
        self,
        src: str,
        *,
        tag: int = 0,
        timeout: float | None = None,
        device: str | int | torch.device | None = None,
        async_op: Literal[True] = True,
    ) -> AsyncWork[Any]: ...
    @overload
    def recv(
        self,
        src: str,
        *,
        tag: int = 0,
        timeout: float | None = None,
        device: str | int | torch.device | None = None,
        async_op: Literal[False],
    ) -> Any: ...
    def recv(
        self,
        src: str,
        *,
        tag: int = 0,
        timeout: float | None = None,
        device: str | int | torch.device | None = None,
        async_op: bool = True,
    ) -> Any:
        """As `CollectiveGroup.recv` in the unnamed group of us and `src`; `src` may be our own address."""
        if not async_op:
            self._exchange.check_may_block()
        if device is None:
            work = self._exchange.recv(WorkerAddress(src), 0, tag, timeout)
        else:
            work = self._exchange.recv_to(WorkerAddress(src), 0, tag, timeout, device)
        return work if async_op else work.wait()

    @overload
    def send_tensor(
        self, tensor: torch.Tensor, dst: str, *, tag: int = 0, timeout: float | None = None, async_op: Literal[True] = True
    ) -> AsyncWork[None]: ...
    @overload
    def send_tensor(
        self, tensor: torch.Tensor, dst: str, *, tag: int = 0, timeout: float | None = None, async_op: Literal[False]
    ) -> None: ...
    def send_tensor(
        self, tensor: torch.Tensor, dst: str, *, tag: int = 0, timeout: float | None = None, async_op: bool = True
    ) -> AsyncWork[None] | None:
        """As `CollectiveGroup.send_tensor` in the unnamed group of us and `dst`."""
        if not async_op:
            self._exchange.check_may_block()
        work = self._exchange.send_tensor(WorkerAddress(dst), 0, tensor, tag, timeout)
        return work if async_op else work.wait()

    @overload
    def recv_tensor(
        self, out: torch.Tensor, src: str, *, tag: int = 0, timeout: float | None = None, async_op: Literal[True] = True
    ) -> AsyncWork[torch.Tensor]: ...
    @overload
    def recv_tensor(
        self, out: torch.Tensor, src: str, *, tag: int = 0, timeout: float | None = None, async_op: Literal[False]
    ) -> torch.Tensor: ...
    def recv_tensor(
        self, out: torch.Tensor, src: str, *, tag: int = 0, timeout: float | None = None, async_op: bool = True
    ) -> AsyncWork[torch.Tensor] | torch.Tensor:
        """As `CollectiveGroup.recv_tensor` in the unnamed group of us and `src`."""
        if not async_op:
            self._exchange.check_may_block()
        work = self._exchange.recv_tensor(WorkerAddress(src), 0, out, tag, timeout)
        return work if async_op else work.wait()

    def inbox(self, tag: int = 0) -> Inbox:
        """Messages from anyone: ``async for sender, obj in comm.inbox()``. See `Inbox`."""
        self._exchange.check(tag)
        return Inbox(self._exchange, tag)
