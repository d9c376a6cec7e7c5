"""What a worker asks of the manager, as checked records. Pure. `parse_request` raises WireError on anything malformed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from aiorlinf.address import Identity, Incarnation, WorkerAddress
from aiorlinf.errors import WireError
from aiorlinf.manager import fields
from aiorlinf.manager.lives import End, Known

__all__ = [
    "KINDS",
    "MAX_DETAIL",
    "MAX_LISTED",
    "AskJob",
    "AskTime",
    "Beat",
    "Book",
    "Expect",
    "Find",
    "Forget",
    "Inspect",
    "Kind",
    "Learn",
    "ListWorkers",
    "Lookup",
    "Pong",
    "Publish",
    "Register",
    "Remember",
    "Request",
    "Subscribe",
    "Told",
    "Unregister",
    "Watch",
    "Withdraw",
    "known_to_list",
    "parse_request",
]

MAX_LISTED = 1000  # entries in one message of `learn` or `watch`
MAX_DETAIL = 300  # characters that say how a life ended

_MAX_ID = 2**53 - 1
_NEW = Incarnation(0)

Kind = Literal["channel", "group"]
KINDS: tuple[Kind, ...] = ("channel", "group")


@dataclass(frozen=True, slots=True)
class Register:
    """I am this worker and listen here. ``host`` None: tell peers the address my connection comes from. ``life``: the number of the life
    that goes on, after its connection to the manager was lost; 0 for a new one."""

    id: int
    address: WorkerAddress
    host: str | None
    port: int
    devices: tuple[str, ...]
    labels: Mapping[str, str]
    host_id: str
    pid: int
    unix: str = ""
    process: str = ""
    life: Incarnation = _NEW


@dataclass(frozen=True, slots=True)
class Unregister:
    """I leave in an orderly way."""

    id: int


@dataclass(frozen=True, slots=True)
class Lookup:
    """Where is this worker, in a life above ``above``? Wait for it up to ``timeout`` seconds (None: as long as the connection lives)."""

    id: int
    address: WorkerAddress
    timeout: float | None
    above: int = 0


@dataclass(frozen=True, slots=True)
class ListWorkers:
    """Who is registered? One page of them, those whose addresses come after ``after``."""

    id: int
    after: WorkerAddress | None


@dataclass(frozen=True, slots=True)
class AskJob:
    """What is the job's configuration? A manager that was started anew may have to learn it first."""

    id: int


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Tell me of every worker that comes or goes."""

    id: int


@dataclass(frozen=True, slots=True)
class Publish:
    """I hold this named thing. ``again``: I did so before the manager was started anew."""

    id: int
    kind: Kind
    name: str
    value: Mapping[str, str]
    again: bool


@dataclass(frozen=True, slots=True)
class Withdraw:
    """I do not hold it any more."""

    id: int
    kind: Kind
    name: str


@dataclass(frozen=True, slots=True)
class Find:
    """Who holds this named thing? Waits as a look-up does."""

    id: int
    kind: Kind
    name: str
    timeout: float | None


@dataclass(frozen=True, slots=True)
class Book:
    """I am about to send ``nbytes`` through these budgets of the emulated network, in this order (`manager.emulation`)."""

    id: int
    budgets: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Forget:
    """The answer to request ``id`` is not wanted any more."""

    id: int


@dataclass(frozen=True, slots=True)
class Expect:
    """These workers will join, too."""

    addresses: tuple[WorkerAddress, ...]


@dataclass(frozen=True, slots=True)
class Learn:
    """This is what I know of the lives of workers."""

    lives: tuple[Known, ...]


@dataclass(frozen=True, slots=True)
class Watch:
    """I have links with these: tell me of their ends."""

    workers: tuple[Identity, ...]


@dataclass(frozen=True, slots=True)
class Remember:
    """What a manager that was started anew told its workers before: the job's configuration, and who belongs to it if it is closed."""

    config: Mapping[str, Any]
    expected: tuple[WorkerAddress, ...] | None


@dataclass(frozen=True, slots=True)
class Inspect:
    """What is this life of a worker doing? It is asked, and its answer passed on; `Forget` when that takes too long."""

    id: int
    worker: Identity


@dataclass(frozen=True, slots=True)
class Told:
    """That is what I am doing, since you asked in ``number``."""

    number: int
    report: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AskTime:
    """What time is it at the manager?"""

    id: int


@dataclass(frozen=True, slots=True)
class Beat:
    """I am alive; say that you are."""


@dataclass(frozen=True, slots=True)
class Pong:
    """I am alive."""


Request = (
    Register
    | Unregister
    | Lookup
    | ListWorkers
    | AskJob
    | Subscribe
    | Publish
    | Withdraw
    | Find
    | Book
    | Forget
    | Expect
    | Learn
    | Watch
    | Remember
    | Inspect
    | Told
    | AskTime
    | Beat
    | Pong
)


def parse_request(message: Mapping[str, Any]) -> Request:
    """Check a worker's message. Raises WireError on anything malformed."""
    op = message.get("op")
    parse = _PARSERS.get(op) if isinstance(op, str) else None
    if parse is None:
        raise WireError(f"the request {op!r:.40} is not known")
    return parse(message)


def known_to_list(known: Known) -> list[str | int]:
    """An entry of `learn`, as JSON values."""
    identity, end = known
    told: list[str | int] = [identity.address, identity.incarnation]
    return told if end is None else [*told, end.reason, end.detail[:MAX_DETAIL]]


def _register(message: Mapping[str, Any]) -> Register:
    return Register(
        id=_id(message),
        address=fields.address(message, "address"),
        host=None if message.get("host") is None else fields.host(message, "host"),
        port=fields.integer(message, "port", 1, 65535),
        devices=fields.texts(message, "devices", 64, 128),
        labels=fields.table(message, "labels"),
        host_id=fields.text(message, "host_id", 256),
        pid=fields.integer(message, "pid", 0, 2**31),
        unix=fields.text(message, "unix", 128),
        process="" if message.get("process") is None else fields.text(message, "process", 64),
        life=Incarnation(0 if message.get("life") is None else fields.integer(message, "life", 0, fields.MAX_INCARNATION)),
    )


def _lookup(message: Mapping[str, Any]) -> Lookup:
    above = 0 if message.get("above") is None else fields.integer(message, "above", 0, fields.MAX_INCARNATION)
    return Lookup(_id(message), fields.address(message, "address"), fields.timeout(message), above)


def _workers(message: Mapping[str, Any]) -> ListWorkers:
    return ListWorkers(_id(message), None if message.get("after") is None else fields.address(message, "after"))


def _publish(message: Mapping[str, Any]) -> Publish:
    return Publish(_id(message), _kind(message), _name(message), fields.table(message, "value"), message.get("again") is True)


def _remember(message: Mapping[str, Any]) -> Remember:
    config = message.get("config")
    if not isinstance(config, dict):
        raise WireError("config is not a table")
    return Remember(config, None if message.get("expected") is None else fields.addresses(message, "expected"))


def _inspect(message: Mapping[str, Any]) -> Inspect:
    return Inspect(_id(message), fields.identity(message.get("address"), message.get("incarnation"), "address"))


def _told(message: Mapping[str, Any]) -> Told:
    report = message.get("report")
    if not isinstance(report, dict):
        raise WireError("report is not a table")
    return Told(fields.integer(message, "number", 1, _MAX_ID), report)


def _learn(message: Mapping[str, Any]) -> Learn:
    return Learn(tuple(_known(entry) for entry in _entries(message, "lives")))


def _watch(message: Mapping[str, Any]) -> Watch:
    workers = []
    for entry in _entries(message, "workers"):
        if len(entry) != 2:
            raise WireError("workers has an entry that is not an address and a number")
        workers.append(fields.identity(entry[0], entry[1], "workers"))
    return Watch(tuple(workers))


def _entries(message: Mapping[str, Any], key: str) -> list[list[Any]]:
    value = message.get(key)
    if not isinstance(value, list) or len(value) > MAX_LISTED or not all(isinstance(entry, list) for entry in value):
        raise WireError(f"{key} is not a list of at most {MAX_LISTED} lists")
    return value


def _known(entry: list[Any]) -> Known:
    if len(entry) not in (2, 4):
        raise WireError("lives has an entry of neither two nor four values")
    identity = fields.identity(entry[0], entry[1], "lives")
    if len(entry) == 2:
        return Known(identity, None)
    reason, detail = entry[2:]
    if reason not in ("left", "lost") or not isinstance(detail, str) or len(detail) > MAX_DETAIL:
        raise WireError("lives has an entry whose end is not left or lost and a short text")
    return Known(identity, End(reason, detail))


def _id(message: Mapping[str, Any]) -> int:
    return fields.integer(message, "id", 1, _MAX_ID)


def _kind(message: Mapping[str, Any]) -> Kind:
    told = message.get("kind")
    for kind in KINDS:
        if told == kind:
            return kind
    raise WireError(f"kind is not one of {', '.join(KINDS)}")


def _name(message: Mapping[str, Any]) -> str:
    name = fields.text(message, "name", 200)
    if not name:
        raise WireError("name is empty")
    return name


_PARSERS: dict[str, Callable[[Mapping[str, Any]], Request]] = {
    "register": _register,
    "unregister": lambda message: Unregister(_id(message)),
    "lookup": _lookup,
    "workers": _workers,
    "job": lambda message: AskJob(_id(message)),
    "subscribe": lambda message: Subscribe(_id(message)),
    "publish": _publish,
    "withdraw": lambda message: Withdraw(_id(message), _kind(message), _name(message)),
    "find": lambda message: Find(_id(message), _kind(message), _name(message), fields.timeout(message)),
    "book": lambda message: Book(_id(message), fields.numbers(message, "budgets", 256), fields.integer(message, "bytes", 1, 2**48)),
    "forget": lambda message: Forget(_id(message)),
    "expect": lambda message: Expect(fields.addresses(message, "addresses")),
    "learn": _learn,
    "watch": _watch,
    "remember": _remember,
    "inspect": _inspect,
    "tell": _told,
    "time": lambda message: AskTime(_id(message)),
    "beat": lambda _: Beat(),
    "pong": lambda _: Pong(),
}
