"""Which replica of a channel has which key. Pure.

A channel of several replicas has one on each node that uses it. A key belongs to the node on which it was used first, so that what is put
and got on one node stays there. The first replica, the one under the channel's own name, knows the nodes and the keys.
"""

from __future__ import annotations

import hashlib
import re

from aiorlinf.channel.records import Key

__all__ = ["Affinity", "replica_name"]

_PLAIN = re.compile(r"[A-Za-z0-9_.\-]{1,24}", re.ASCII)
_LONGEST = 55


def replica_name(channel: str, node: str) -> str:
    """The name of a channel's replica on this node: an ordinary channel's."""
    part = node if _PLAIN.fullmatch(node) is not None else hashlib.blake2b(node.encode("utf-8", "replace"), digest_size=6).hexdigest()
    name = f"{channel}/{part}"
    if len(name) <= _LONGEST:
        return name
    digest = hashlib.blake2b(name.encode(), digest_size=6).hexdigest()
    return f"{channel[: _LONGEST - 13]}/{digest}"


class Affinity:
    """See the module.

    Attributes:
        nodes: by name, the name of the replica there; the first one is the channel's own.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, str] = {}
        self._keys: dict[Key, str] = {}

    def join(self, node: str, name: str) -> None:
        """There is a replica on this node."""
        self.nodes.setdefault(node, name)

    def place(self, key: Key, node: str) -> str:
        """The node of this key; if nobody has used it before, the one that asks, if it has a replica."""
        found = self._keys.get(key)
        if found is None:
            found = self._keys[key] = node if node in self.nodes else next(iter(self.nodes), "")
        return found
