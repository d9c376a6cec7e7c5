"""The topology as people see it."""

from __future__ import annotations

from aiorlinf.plans.broadcast import Place
from aiorlinf.plans.show import Member, show_topology


def member(address: str, host: str, rack: str, **labels: str) -> Member:
    return Member(f"{address}#1", Place(f"id-{host}", rack), {"host": host, "rack": rack, **labels}, ("cpu",))


def test_two_racks() -> None:
    members = [
        member("rollout:0", "a", "left", zone="z"),
        member("rollout:1", "a", "left"),
        member("rollout:2", "b", "right"),
        member("trainer:0", "c", "right"),
        member("trainer:1", "c", "right"),
    ]
    assert show_topology(members, 3) == [
        "5 workers on 3 hosts in 2 racks",
        "",
        "rack left",
        "  host a",
        "    rollout:0#1  cpu  zone=z",
        "    rollout:1#1  cpu",
        "rack right",
        "  host b",
        "    rollout:2#1  cpu",
        "  host c",
        "    trainer:0#1  cpu",
        "    trainer:1#1  cpu",
        "",
        "a small broadcast from trainer:0#1, 3 rounds:",
        "  trainer:0#1",
        "    -> rollout:0#1 (network, to another rack)",
        "      -> rollout:1#1 (same host: shared memory)",
        "    -> rollout:2#1 (network)",
        "    -> trainer:1#1 (same host: shared memory)",
        "",
        "a large broadcast from trainer:0#1, in pieces, all ways at once:",
        "  trainer:0#1",
        "    -> rollout:2#1 (network)",
        "      -> rollout:0#1 (network, to another rack)",
        "        -> rollout:1#1 (same host: shared memory)",
        "    -> trainer:1#1 (same host: shared memory)",
    ]


def test_one_alone() -> None:
    lines = show_topology([member("w:0", "a", "")], 0)
    assert lines[0] == "1 worker on 1 host in 1 rack"
    assert "rack (no rack)" in lines
    assert lines[-1] == "  w:0#1"
