"""The `sockets` backend: a plain TCP connection for each direction of a link."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from aiorlinf.wire.shown import shown

__all__ = ["SocketPair"]


class SocketPair:
    """One direction: rank 0 sends, rank 1 receives. The two find each other in `store`, whose `get` waits for what the other has `set`,
    within `timeout` seconds; raises RuntimeError or OSError if the other side did not come."""

    def __init__(self, store: Any, rank: int, host: str, timeout: float) -> None:
        self._sends = rank == 0
        if self._sends:
            listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
            listener.settimeout(timeout)
            # Given up while we wait: that ends the waiting, too.
            store.when_aborted(lambda published: _shut(listener))
            with listener:
                store.set("address", f"{host} {listener.getsockname()[1]}")
                self._socket, _ = listener.accept()
        else:
            peer, port = store.get("address").decode().split()
            self._socket = socket.create_connection((peer, int(port)), timeout)
        self._socket.settimeout(None)  # from here on liveness is the link's business
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="aiorlinf-sockets")

    def transfer(self, leaves: list[torch.Tensor], then: Callable[[BaseException | None], None]) -> None:
        """Send or receive these contiguous one-dimensional uint8 tensors, in order; `then` is called once, on any thread."""
        try:
            self._thread.submit(self._move, leaves, then)
        except RuntimeError as error:  # retired
            then(error)

    def _move(self, leaves: list[torch.Tensor], then: Callable[[BaseException | None], None]) -> None:
        error: BaseException | None = None
        try:
            for leaf in leaves:
                view = shown(leaf)
                if self._sends:
                    self._socket.sendall(view)
                while not self._sends and view.nbytes:
                    count = self._socket.recv_into(view)
                    if not count:
                        raise ConnectionError("the other side has closed the pair")
                    view = view[count:]
        except OSError as caught:
            error = caught
        leaves.clear()  # from now on we do not touch their memory
        then(error)

    def retire(self) -> None:
        """End it, and what is under way, without waiting."""
        _shut(self._socket)
        self._thread.shutdown(wait=False)


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)  # wakes whoever waits in it
    except OSError:  # it is closed already
        pass
    sock.close()
