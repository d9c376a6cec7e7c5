"""What a channel is: its name, bounds and policy; the same for all who use it. Pure."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import pickle
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from aiorlinf.address import WorkerAddress
from aiorlinf.channel.affinity import replica_name
from aiorlinf.channel.policies import LoadBalancePolicy, import_policy
from aiorlinf.channel.records import Key
from aiorlinf.errors import UsageError, WireError

__all__ = ["NOT_HELD", "ChannelSettings", "PolicySource", "check_key", "check_name", "check_target", "check_weight", "worker_of"]

PolicySource = str | LoadBalancePolicy | None

NOT_HELD = "holds no channel"
"""In the words of a channel worker that is asked for one that it has not got."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-/]{0,54}", re.ASCII)
_NEVER_ENDS = 2**31 - 1
"""Producers: so many never come."""

_LARGEST = sys.float_info.max
_MAX_KEY_BYTES = 1024
_MAX_SHOWN = 80
_MAX_DESCRIPTION = 400
_MAX_POLICY_BYTES = 256 * 1024


def worker_of(name: str) -> WorkerAddress:
    """The address of the channel worker of this name."""
    return WorkerAddress(f"channel.{name}:0")


def check_name(name: object, what: str = "name") -> str:
    """A channel's name.

    Raises:
        UsageError: not a text that can be part of an address.
    """
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        hint = "at most 55 letters, digits and _ . - /, the first one a letter"
        raise UsageError(f"{what}={name!r} cannot be the name of a channel", operation="create_channel", hint=hint)
    return name


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """All that those who create and connect agree on.

    Attributes:
        name: unique in the job.
        maxsize: bound on items, 0: none.
        max_bytes: bound on payload bytes, None: none.
        policy: name or import path of the policy, or what was given as an object; empty: whoever asks next gets the next item.
        policy_object: that object, pickled, as base64.
        producers: so many must have come before the stream can end.
        worker: the channel worker that holds it.
        shared_max_bytes: bound on the payload bytes of all channels of that worker, None: none.
        distributed: there is a replica on each node that uses it (`channel.spread`); the bounds are of each.
    """

    name: str
    maxsize: int = 0
    max_bytes: int | None = None
    policy: str = ""
    policy_object: str = ""
    producers: int = 1
    worker: str = ""
    shared_max_bytes: int | None = None
    distributed: bool = False

    @classmethod
    def make(
        cls,
        name: str,
        *,
        maxsize: int = 0,
        max_bytes: int | None = None,
        policy: PolicySource = None,
        producers: int = 1,
        worker: str | None = None,
        shared_max_bytes: int | None = None,
        distributed: bool = False,
    ) -> ChannelSettings:
        """Check what a user says.

        Raises:
            UsageError: with the argument concerned.
        """
        check_name(name)
        _whole("maxsize", maxsize, 0)
        _whole("producers", producers, 1)
        for what, value in (("max_bytes", max_bytes), ("shared_max_bytes", shared_max_bytes)):
            if value is not None:
                _whole(what, value, 1)
        if type(distributed) is not bool:
            raise UsageError(f"distributed={distributed!r} is neither true nor false", operation="create_channel")
        description, pickled = _describe(policy)
        address = worker_of(name if worker is None else check_name(worker, "worker"))
        return cls(name, maxsize, max_bytes, description, pickled, producers, str(address), shared_max_bytes, distributed)

    def replica(self, node: str) -> ChannelSettings:
        """Of the replica on another node than the first. It does not end by itself."""
        worker = WorkerAddress(self.worker).removeprefix("channel.").rpartition(":")[0]
        address = str(worker_of(replica_name(worker, node)))
        return replace(self, name=replica_name(self.name, node), worker=address, producers=_NEVER_ENDS, distributed=False)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ChannelSettings:
        """From JSON values. Raises WireError on anything malformed."""
        try:
            settings = cls(**data)
            for name in ("name", "policy", "policy_object", "worker"):
                if not isinstance(getattr(settings, name), str):
                    raise TypeError(name)
            check_name(settings.name)
            WorkerAddress(settings.worker)
            _whole("maxsize", settings.maxsize, 0)
            _whole("producers", settings.producers, 1)
            if type(settings.distributed) is not bool:
                raise TypeError("distributed")
            for value in (settings.max_bytes, settings.shared_max_bytes):
                if value is not None:
                    _whole("max_bytes", value, 1)
        except (TypeError, UsageError) as error:
            raise WireError(f"malformed settings of a channel: {error}") from None
        return settings

    def published(self) -> dict[str, str]:
        """What the manager tells those who look for the channel: all but a policy object, which only the channel worker needs."""
        return {name: json.dumps(value) for name, value in self.to_dict().items() if name != "policy_object"}

    @classmethod
    def unpublished(cls, data: Mapping[str, str]) -> ChannelSettings:
        """The reverse of `published`. Raises WireError on anything malformed."""
        try:
            return cls.from_dict({name: json.loads(value) for name, value in data.items()})
        except json.JSONDecodeError:
            raise WireError("malformed settings of a channel") from None

    def make_policy(self, *, allow_pickle: bool = True) -> LoadBalancePolicy | None:
        """The policy itself.

        Raises:
            UsageError: it cannot be made here.
        """
        if not self.policy:
            return None
        if not self.policy_object:
            return import_policy(self.policy)
        if not allow_pickle:
            raise UsageError("a policy object is pickled, which the job does not allow", hint="give its import path, 'module:name'")
        try:
            policy: LoadBalancePolicy = pickle.loads(base64.b64decode(self.policy_object, validate=True))
        except Exception as error:  # the class's own code runs here
            raise UsageError(f"the policy {self.policy} cannot be made in the channel worker: {type(error).__name__}: {error}") from error
        return policy

    def differs(self, other: ChannelSettings) -> str:
        """What is different, ``maxsize=8 here and 16 there``; empty if nothing is."""
        parts = []
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            if ours != theirs and field.name != "policy_object":
                parts.append(f"{field.name}={ours!r}, not {theirs!r}")
        return "; ".join(parts)


def _describe(policy: PolicySource) -> tuple[str, str]:
    """A policy as text, and as a pickle if it is an object."""
    if policy is None:
        return "", ""
    if isinstance(policy, str):
        if len(policy) > _MAX_DESCRIPTION:
            raise UsageError(f"policy={policy!r:.80} is too long for an import path", operation="create_channel")
        if ":" not in policy:
            import_policy(policy)  # a name that does not exist is an error here
        return policy, ""
    if isinstance(policy, type) or not callable(getattr(policy, "select_consumer", None)):
        raise UsageError(
            f"policy={policy!r} is no policy",
            operation="create_channel",
            hint="a name, an import path 'module:name', or an object with select_consumer(item, consumers)",
        )
    try:
        pickled = pickle.dumps(policy)
    except Exception as error:  # the class's own code runs here
        raise UsageError(f"the policy cannot be pickled: {type(error).__name__}: {error}", operation="create_channel") from error
    if len(pickled) > _MAX_POLICY_BYTES:
        raise UsageError(f"the policy takes {len(pickled)} bytes; at most {_MAX_POLICY_BYTES} are allowed", operation="create_channel")
    kind = type(policy)
    digest = hashlib.blake2b(pickled, digest_size=6).hexdigest()
    return f"{kind.__module__}.{kind.__qualname__}"[-_MAX_DESCRIPTION:] + f" object {digest}", base64.b64encode(pickled).decode("ascii")


def _whole(what: str, value: object, least: int) -> None:
    if type(value) is not int or not least <= value < 2**63:
        raise UsageError(f"{what}={value!r} is not a whole number of at least {least}", operation="create_channel")


def check_weight(weight: object) -> float:
    """The weight of an item.

    Raises:
        UsageError: not a finite number of at least 0.
    """
    if type(weight) is float or (type(weight) is int and 0 <= weight <= _LARGEST):
        value = float(weight)
        if 0.0 <= value < math.inf:
            return value
    raise UsageError(f"weight={_shown(weight)} is not a finite number of at least 0", operation="put")


def check_target(target: object) -> float:
    """The weight of a batch.

    Raises:
        UsageError: not a finite number above 0.
    """
    if type(target) is float or (type(target) is int and 0 <= target <= _LARGEST):
        value = float(target)
        if 0.0 < value < math.inf:
            return value
    raise UsageError(f"target_weight={_shown(target)} is not a finite number above 0", operation="get_batch")


def check_key(key: Any) -> Key:
    """A key.

    Raises:
        UsageError: neither None, text, bytes (1 KiB at most) nor a whole number of 64 bits.
    """
    kind = type(key)
    if key is None or (kind is int and -(2**63) <= key < 2**63):
        return key  # type: ignore[no-any-return]
    if kind is str or kind is bytes:
        size = len(key) if kind is bytes else len(key.encode("utf-8", "surrogatepass"))
        if size <= _MAX_KEY_BYTES:
            return key  # type: ignore[no-any-return]
    raise UsageError(f"key={_shown(key)} cannot be a key", hint="a key is a text or bytes of at most 1 KiB, a whole number, or None")


def _shown(value: object) -> str:
    """For an error."""
    try:
        return repr(value)[:_MAX_SHOWN]
    except ValueError:  # Python does not write whole numbers of thousands of digits
        return f"a {type(value).__name__} of too many digits"
