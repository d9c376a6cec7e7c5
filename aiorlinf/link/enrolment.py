"""How a worker comes into its job, and leaves it: it finds or embeds a manager, listens, registers, and lets peers in."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any

from aiorlinf.backends.shm.descriptors import abstract_listener, abstract_name
from aiorlinf.codec.registry import probe
from aiorlinf.link.me import Self
from aiorlinf.link.table import LinkTable
from aiorlinf.manager.embedded import EmbeddedManager, acquire_embedded, embedded_users
from aiorlinf.manager.lifeline import Lifeline
from aiorlinf.manager.protocol import WorkerRecord
from aiorlinf.manager.under_torchrun import host_manager, meet_manager
from aiorlinf.rendezvous.hosts import host_identity, host_labels, interface_host, open_listener, process_identity
from aiorlinf.rendezvous.settings import JoinSettings
from aiorlinf.rendezvous.tls import tls_of
from aiorlinf.work.base import AsyncWork
from aiorlinf.work.home import LoopHome

__all__ = ["Enrolment"]


class Enrolment:
    """One worker's tie to the manager of its job.

    What it has made until then is given back by `leave` or `abandon`, also when `enrol` failed or was cancelled in the middle.

    Attributes:
        life: the connection to the manager, which is made anew when it is lost; None as long as no manager is known.
    """

    def __init__(self, home: LoopHome, settings: JoinSettings, table: LinkTable) -> None:
        self.life: Lifeline | None = None
        self._home = home
        self._settings = settings
        self._table = table
        self._embedded: EmbeddedManager | None = None  # that we have a share in

    async def enrol(self, prepare: Callable[[Lifeline], None]) -> tuple[Self, Lifeline]:
        """Join the job; when this returns, the table takes and makes links.

        Args:
            prepare: given the connection to the manager before anything comes by it.

        Raises:
            AuthenticationError, RendezvousError, ConfigError: as `aiorlinf.init` says.
        """
        settings = self._settings
        manager, token = await self._find_manager()
        limits = None if settings.config is None else settings.config.cluster.network
        tls = self._table.tls = tls_of(limits if self._embedded is None else self._embedded.config.cluster.network)
        life = self.life = Lifeline(self._home, settings.address, manager, token, limits, tls)
        prepare(life)
        host_id = host_identity()
        # Registering needs the port, and the configuration says where to listen: so the manager tells it before.
        config = await life.connect()
        network = config.cluster.network
        codecs = probe(config.cluster.collective.tensor_compression)
        host = network.bind_host
        if network.interface is not None:
            host = interface_host(network.interface)
        elif host == "auto":
            host = life.local_host
        listener = await open_listener(host, network.port_range)
        memory = self._table.share_memory(config)
        unix = _unix_listener()
        try:
            details: dict[str, Any] = {
                "port": listener.getsockname()[1],
                "devices": ["cpu"],
                "labels": host_labels(settings.labels, config.cluster.topology.of(settings.address)),
                "host_id": host_id,
                "unix": "" if unix is None else unix[0],
            }
            registration = await life.register(host=network.advertise_host or (host if network.interface is not None else None), **details)
            record = WorkerRecord(*registration.identity, host=registration.host, pid=os.getpid(), process=process_identity(), **details)
            me = Self(
                identity=registration.identity,
                job=registration.job,
                token=token or b"",
                host_id=host_id,
                config=registration.config,
                backend=settings.backend or registration.config.cluster.collective.backend,
                expected=None if registration.expected is None else frozenset(registration.expected),
                record=record.to_dict(),
                encrypted=tls is not None,
                shared=memory.hello(),
                codecs=codecs,
                began=registration.began,
            )
            await self._table.serve(listener, None if unix is None else unix[1], me, life)
        except BaseException:
            listener.close()
            if unix is not None:
                unix[1].close()
            raise
        return me, life

    async def _find_manager(self) -> tuple[str, bytes | None]:
        """Where it is, and the job's secret."""
        settings = self._settings
        manager = settings.manager
        token = settings.token
        torchrun = settings.torchrun
        if torchrun is not None and torchrun.rank:
            manager, token = await meet_manager(self._home, torchrun, settings.config, token)
        elif manager is None:
            acquiring: AsyncWork[EmbeddedManager]
            if torchrun is not None:
                acquiring = self._home.submit(host_manager, torchrun, settings.config, token, settings.by_rank)
            else:
                acquiring = self._home.submit(acquire_embedded, settings.config, token)
            try:
                self._embedded = await asyncio.shield(acquiring)
            except asyncio.CancelledError:
                self._embedded = await acquiring  # it cannot be recalled; closing gives it back
                raise
            manager, token = self._embedded.address, self._embedded.token
        return manager, token

    def begin_leaving(self) -> None:
        """The worker is being closed: what becomes of its manager meanwhile is not worth a line in the log."""
        if self.life is not None:
            self.life.leaving = True

    async def leave(self, timeout: float, last: Callable[[str], None]) -> None:
        """Say goodbye to the manager, for at most so many seconds.

        Args:
            last: given the address of an embedded manager that ends with us, before it does; in a thread of its own.
        """
        if self.life is not None:
            await self.life.close(timeout)
        if self._embedded is not None:
            if embedded_users(self._embedded.address) == 1:  # the job ends with its manager
                await self._home.submit(last, self._embedded.address)
            await self._home.submit(self._embedded.release)

    def abandon(self) -> None:
        """Leave without a word; any thread."""
        if self.life is not None:
            self.life.abandon()
        if self._embedded is not None:
            self._embedded.release()


def _unix_listener() -> tuple[str, socket.socket] | None:
    """A listening socket for peers on this host, and its name; None where there is no abstract namespace."""
    name = abstract_name("link")
    try:
        return name, abstract_listener(name, socket.SOCK_STREAM)
    except (OSError, AttributeError):
        return None
