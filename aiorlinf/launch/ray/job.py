"""A job whose workers are actors."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from aiorlinf.address import WorkerAddress
from aiorlinf.channel import spawn
from aiorlinf.channel.settings import check_name, worker_of
from aiorlinf.config import JobConfig, load_config
from aiorlinf.errors import UsageError
from aiorlinf.launch.ray.actors import ActorMaker, join_options
from aiorlinf.launch.ray.channels import ChannelActor, use_actors_for_channels
from aiorlinf.launch.ray.needs import driver, node_host
from aiorlinf.launch.ray.ticket import Ticket
from aiorlinf.launch.spec import check_env, format_workers, worker_addresses
from aiorlinf.manager.embedded import EmbeddedManager, Hosting, acquire_embedded
from aiorlinf.rendezvous.settings import ConfigSource
from aiorlinf.rendezvous.tls import tls_of

if TYPE_CHECKING:
    import torch

__all__ = ["Job", "start", "worker"]


class Job:
    """A job on Ray; made by `start`. Use it as ``with aiorlinf.ray.start() as job``, or close it.

    Attributes:
        manager: ``host:port`` of its manager.
        token: its secret.
    """

    def __init__(self, manager: str, token: str, workers: str, tls: Mapping[str, str], embedded: EmbeddedManager | None) -> None:
        self.manager = manager
        self.token = token
        self._workers = workers
        self._tls = dict(tls)
        self._embedded = embedded
        self._channel_workers: list[Any] = []  # an actor ends with its last handle
        self._closed = False

    def __repr__(self) -> str:
        return f"<Job on Ray, manager {self.manager}{', closed' if self._closed else ''}>"

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def worker(
        self,
        cls: Any,
        address: str,
        *,
        labels: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        backend: str | None = None,
        device: str | int | torch.device | None = None,
        loop: Literal["auto", "thread"] = "auto",
        join: bool = True,
        **options: Any,
    ) -> ActorMaker:
        """Make workers of an actor's class: ``job.worker(Rollout, "rollout:0", num_cpus=1).remote(game)`` starts one.

        In the actor, `self.comm` is its `Worker`, from before its `__init__` on (unless the class has something of that name; anywhere
        in the process `aiorlinf.ray.comm()` gives it). An async actor's worker lives on its loop, and joins while the actor is made;
        in another actor it has a thread, and has joined when `__init__` begins. When Ray starts the actor anew (`max_restarts`), that
        is the worker's next incarnation; when nobody needs the actor any more the worker leaves the job; when it is killed or dies,
        the others hear of a death.

        Args:
            cls: a class, with ``@ray.remote`` or without.
            address: ``group:rank``.
            labels: on top of those of the node (of ``ray.io/availability-zone`` the last part is taken) and of AIORLINF_LABELS.
            env: variables for the actor's process.
            backend, device, loop: as of `aiorlinf.init`.
            join: False: the actor only gets the environment, and calls `aiorlinf.init()` itself.
            options: Ray's own: ``num_cpus``, ``num_gpus``, ``resources``, ``label_selector``, ``max_restarts``, ...

        Raises:
            UsageError: at the call, for an argument of ours; the job is closed.
        """
        self._check()
        where = WorkerAddress(address)
        check_env(env or {})
        ticket = Ticket(str(where), self.manager, self.token, self._workers, _texts(labels), {**self._tls, **(env or {})})
        return ActorMaker(cls, lambda: ticket, join_options(join, backend, device, loop), options)

    def channel_worker(self, name: str, *, timeout: float = 60.0, **options: Any) -> Any:
        """Start an actor that holds channels: those made with ``create_channel(..., worker=name)``, and one of that very name.

        Without it `create_channel` starts one itself, on the node of the worker that calls it. Blocks until it has joined.

        Args:
            name: the channel worker's.
            timeout: seconds.
            options: Ray's own; one that needs no CPU unless they say so.

        Raises:
            UsageError: not a name; the job is closed.
            Ray's errors: it could not be started, or not in time.
        """
        self._check()
        ray = driver()
        address = worker_of(check_name(name))
        ticket = Ticket(str(address), self.manager, self.token, env=self._tls)
        actor = ray.remote(ChannelActor).options(**{"num_cpus": 0, **options}).remote(ticket)
        ray.get(actor.begin.remote(), timeout=timeout)
        self._channel_workers.append(actor)
        return actor

    def env(self, address: str) -> dict[str, str]:
        """Environment variables for a process that shall join under this address and is started in another way."""
        self._check()
        return {
            **self._tls,
            "AIORLINF_ADDRESS": str(WorkerAddress(address)),
            "AIORLINF_MANAGER": self.manager,
            "AIORLINF_TOKEN": self.token,
            **({"AIORLINF_WORKERS": self._workers} if self._workers else {}),
        }

    def close(self) -> None:
        """End the manager, if it is in this process. Workers go on with whom they know; channel workers that nobody uses end.

        The actors are yours: they end with their last handle, as always. Further calls do nothing.
        """
        global _current
        if self._closed:
            return
        self._closed = True
        if _current is self:
            _current = None
            spawn.start_with(None)
        self._channel_workers.clear()
        if self._embedded is not None:
            self._embedded.release()

    def _check(self) -> None:
        if self._closed:
            raise UsageError("this job was closed")


_current: Job | None = None


def start(
    workers: str | Mapping[str, int] | None = None,
    *,
    config: ConfigSource = None,
    manager: str | None = None,
    token: str | None = None,
) -> Job:
    """A job in the Ray cluster that this process is connected to. Its manager lives in this process, and the job ends with it.

    This process can be a worker, too: ``aiorlinf.init("driver:0")`` joins the job.

    Args:
        workers: all of them, as ``"rollout=2,trainer=1"``, for collectives of the whole job; None: whoever comes.
        config: the job's configuration. Without ``bind_host`` or ``interface`` in it, the manager listens on the address by which
            Ray's nodes reach this one.
        manager: ``host:port`` of one that runs elsewhere, for a job that shall outlive this process.
        token: the job's secret; else AIORLINF_TOKEN, else a random one. Ray keeps it with the actor's arguments: whoever can ask the
            cluster's services knows it.

    Raises:
        UsageError: Ray is not installed, or not connected; an argument.
        ConfigError: the configuration is not valid.
        RendezvousError: no socket could be bound; or this process has a manager of another job already.
    """
    global _current
    names = "" if workers is None else format_workers(worker_addresses(workers))
    expected = None if workers is None else tuple(str(address) for address in worker_addresses(workers))
    loaded: JobConfig | None = None if config is None else load_config(config)
    secret = token or os.environ.get("AIORLINF_TOKEN") or None
    if manager is not None:
        if secret is None:
            raise UsageError("a manager that runs elsewhere has a token", hint="pass token=, or set AIORLINF_TOKEN")
        tls = tls_of(None if loaded is None else loaded.cluster.network)
        job = Job(manager, secret, names, {} if tls is None else tls.env(), None)
    else:
        driver()
        network = (loaded or JobConfig()).cluster.network
        host = node_host() if network.bind_host == "auto" and network.interface is None else None
        encoded = None if secret is None else secret.encode("utf-8", "surrogateescape")
        embedded = acquire_embedded(loaded, encoded, f"ray-{secrets.token_hex(8)}", Hosting(host=host, expected=expected))
        try:
            tls = tls_of(network)
        except BaseException:
            embedded.release()
            raise
        told = embedded.token.decode("utf-8", "surrogateescape")
        job = Job(embedded.address, told, names, {} if tls is None else tls.env(), embedded)
    use_actors_for_channels()
    _current = job
    return job


def worker(cls: Any, address: str, *, job: Job | None = None, **options: Any) -> ActorMaker:
    """`Job.worker` of the job that this process has started, or is part of: an actor can start further ones.

    Raises:
        UsageError: there is none.
    """
    found = job or _current or _job_of_this_actor()
    return found.worker(cls, address, **options)


def _job_of_this_actor() -> Job:
    environ = os.environ
    manager, token = environ.get("AIORLINF_MANAGER"), environ.get("AIORLINF_TOKEN")
    if not manager or not token:
        raise UsageError("this process has no job on Ray", hint="with aiorlinf.ray.start() as job: job.worker(...)")
    tls = {name: value for name, value in environ.items() if name.startswith("AIORLINF_TLS_")}
    return Job(manager, token, environ.get("AIORLINF_WORKERS", ""), tls, None)


def _texts(labels: Mapping[str, str] | None) -> dict[str, str]:
    for name, value in (labels or {}).items():
        pair: tuple[object, object] = name, value
        if not all(isinstance(text, str) for text in pair) or not name or set("=,\0") & set(name) or set(",\0") & set(value):
            raise UsageError(f"labels: {name!r}: {value!r}: both are text without commas")
    return dict(labels or {})
