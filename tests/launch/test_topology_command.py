"""Labels, wherever they come from, and what `aiorlinf topology` shows of a running job."""

from __future__ import annotations

import asyncio

import pytest

from aiorlinf import cli, init
from aiorlinf.errors import ConfigError, UsageError
from aiorlinf.rendezvous.hosts import host_labels


def test_where_labels_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    configured = {"rack": "configured", "zone": "configured", "tier": "configured"}
    assert host_labels(None, configured).items() >= configured.items()
    monkeypatch.setenv("AIORLINF_LABELS", "zone=environment, rack=labels,,room=")
    assert host_labels(None, configured).items() >= {"rack": "labels", "zone": "environment", "tier": "configured", "room": ""}.items()
    monkeypatch.setenv("AIORLINF_RACK", "environment")
    assert host_labels({"tier": "argument"}, configured).items() >= {"rack": "environment", "tier": "argument"}.items()


@pytest.mark.parametrize("text", ["rack", "=a", "rack=a,b"])
def test_labels_of_another_form(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIORLINF_LABELS", text)
    with pytest.raises(UsageError, match="AIORLINF_LABELS has"):
        host_labels()


@pytest.mark.asyncio
async def test_the_command_shows_a_running_job(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    labels = [{"members": "w:*", "labels": {"rack": "r1"}}, {"members": ["w:1", "w:2-3"], "labels": {"rack": "r2", "zone": "z"}}]
    config = {"cluster": {"topology": {"labels": labels}}}
    async with init("w:0", config=config) as a, init("w:1", config=config) as b:
        for name, value in a.env("x:0").items():
            monkeypatch.setenv(name, value)
        assert await asyncio.to_thread(cli.main, ["topology"]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith("2 workers on 2 hosts in 2 racks"), "a host in two racks counts as two"
        assert "w:1#1  cpu  zone=z" in shown
        assert "a large broadcast from w:0#1" in shown
        assert await asyncio.to_thread(cli.main, ["topology", "--root", "w:1"]) == 0
        assert "a large broadcast from w:1#1" in capsys.readouterr().out
        assert await asyncio.to_thread(cli.main, ["topology", "--root", "w:7"]) == 2
        assert "w:7 is no worker of this job" in capsys.readouterr().err
        await asyncio.gather(a.broadcast("x", members=["w:0", "w:1"]), b.broadcast(members=["w:0", "w:1"]))


def test_without_a_manager(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("AIORLINF_MANAGER", raising=False)
    assert cli.main(["topology"]) == 2
    assert "no manager (hint: give --manager HOST:PORT, or set AIORLINF_MANAGER)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("entry", "path"),
    [
        ({"members": "w", "labels": {"a": "b"}}, r"cluster\.topology\.labels\[0\]\.members"),
        ({"members": "w:0", "labels": {}}, r"cluster\.topology\.labels\[0\]\.labels"),
        ({"members": "w:0", "labels": {"rack": 5}}, r"cluster\.topology\.labels\[0\]\.labels\.rack"),
    ],
)
def test_labels_that_the_configuration_refuses(entry: object, path: str) -> None:
    with pytest.raises(ConfigError, match=path):
        init("w:0", config={"cluster": {"topology": {"labels": [entry]}}})
