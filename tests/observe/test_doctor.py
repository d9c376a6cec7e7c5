"""The doctor says what is the matter and what to do, and two of them meet."""

from __future__ import annotations

import json
import re
import resource
import socket
import threading
from collections.abc import Iterable

import pytest

import aiorlinf
from aiorlinf.cli import main
from aiorlinf.codec.codecs.lz4 import Lz4
from aiorlinf.config import load_config
from aiorlinf.device.registry import accelerator
from aiorlinf.errors import RendezvousError
from aiorlinf.observe.doctor import memory, network, peer, software
from aiorlinf.observe.doctor.findings import Finding, Level, examine
from aiorlinf.rendezvous.hosts import bind_listener, parse_endpoint

__all__: list[str] = []


def levels(findings: Iterable[Finding]) -> dict[str, set[Level]]:
    found: dict[str, set[Level]] = {}
    for finding in findings:
        assert finding.text
        assert finding.remedy or finding.level in (Level.GOOD, Level.NOTE), finding
        found.setdefault(finding.subject, set()).add(finding.level)
    return found


def test_this_machine_is_fit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIORLINF_MANAGER", raising=False)
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    subjects = {finding["subject"] for finding in found}
    assert {"python", "torch", "gloo", "uvloop", "lz4", "zstd", "memory files", "descriptor passing", "interfaces", "listening"} <= subjects
    assert not [finding for finding in found if finding["level"] == "problem"]


def test_for_people_each_finding_is_a_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIORLINF_MANAGER", raising=False)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-1].startswith("0 problems, ")
    assert any(line.startswith("[ok  ] uvloop: ") for line in out)


def test_few_open_files_are_said() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        found = {finding.subject: finding for finding in memory.check_limits()}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found["open files"].level is Level.WARNING
    assert "ulimit -n" in found["open files"].remedy


def test_memory_files_that_cannot_be_made_are_said() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))  # Python ignores the signal, so the call fails
    try:
        found = list(memory.check_memory_files())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert levels(found) == {"memory files": {Level.WARNING}}


def test_a_codec_that_takes_the_slow_way_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiorlinf.codec.codecs.lz4._installed", lambda: "the extension does not export the LZ4 functions")
    found = {finding.subject: finding for finding in software.check_codecs()}
    assert found["lz4"].level is Level.WARNING
    assert "does not export" in found["lz4"].text
    assert found["zstd"].level is Level.GOOD
    assert Lz4().describe()["reason"]


def test_ports_that_are_taken_are_said() -> None:
    with bind_listener("127.0.0.1") as taken:
        port = taken.getsockname()[1]
        config = load_config({"cluster": {"network": {"bind_host": "127.0.0.1", "port_range": [port, port]}}})
        found = list(network.check_ports(config.cluster.network))
        wider = load_config({"cluster": {"network": {"bind_host": "127.0.0.1", "port_range": [port, port + 20]}}})
        note = [each for each in network.check_ports(wider.cluster.network) if "taken" in each.text]
    assert levels(found) == {"listening": {Level.PROBLEM}}
    assert str(port) in found[0].text
    assert "each worker of this machine needs one port" in str(found[0].remedy)
    assert f"ss -ltnp 'sport >= :{port} and sport <= :{port}'" in str(found[0].remedy)
    assert [each.level for each in note] == [Level.NOTE]
    assert re.match(rf"\d+ of the 21 ports are taken: {port}\b", note[0].text)


def test_an_interface_that_is_not_there_is_said() -> None:
    config = load_config({"cluster": {"network": {"interface": "nosuch0"}}})
    found = levels(network.check_interfaces(config.cluster.network))
    assert found["interface chosen"] == {Level.PROBLEM}
    assert levels(examine("listening", lambda: network.check_ports(config.cluster.network)))["listening"] == {Level.PROBLEM}


def test_the_manager_of_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with aiorlinf.init("a:0", loop="thread") as comm:
        monkeypatch.setenv("AIORLINF_MANAGER", comm.manager_address)
        monkeypatch.setenv("AIORLINF_TOKEN", comm.token.decode())
        (found,) = network.check_manager()
        assert found.level is Level.GOOD
        assert "1 workers: a:0#" in found.text
        monkeypatch.setenv("AIORLINF_TOKEN", "wrong")
        (found,) = network.check_manager()
        assert found.level is Level.PROBLEM
        assert "token" in found.text


def test_a_check_that_fails_itself_is_a_finding() -> None:
    def broken() -> Iterable[Finding]:
        yield Finding(Level.GOOD, "x", "so far")
        raise OSError("a strange system")

    assert [finding.level for finding in examine("x", broken)] == [Level.GOOD, Level.WARNING]


# ---- two of them


class Waiting(threading.Thread):
    """A doctor that listens."""

    def __init__(self) -> None:
        super().__init__()
        self.where = ""
        self.told = threading.Event()
        self.found: list[Finding] = []
        self.start()
        assert self.told.wait(20)

    def say(self, text: str) -> None:
        self.where = text.rpartition(" ")[2]
        self.told.set()

    def run(self) -> None:
        self.found.extend(examine("peer", lambda: peer.wait_for_peer("127.0.0.1", 0, self.say, 20)))


def test_two_doctors_meet(capsys: pytest.CaptureFixture[str]) -> None:
    waiting = Waiting()
    here = list(peer.meet(*parse_endpoint(waiting.where)))
    waiting.join(20)
    accelerators = {} if accelerator() is not None else {"devices": {Level.NOTE}}
    for found, subjects in ((here, ("peer", "round trip", "clocks", "way back", "rate")), (waiting.found, ("peer", "way back"))):
        seen = {subject: level for subject, level in levels(found).items() if "->" not in subject}
        assert seen == {subject: {Level.GOOD} for subject in subjects} | accelerators


def test_a_way_back_that_is_blocked_is_said_on_both_sides() -> None:
    waiting = Waiting()
    # The listening side tries the address that the connection came from, where this listener is not.
    here = list(peer.meet(*parse_endpoint(waiting.where), listen_host="127.0.0.9"))
    waiting.join(20)
    for found in (here, waiting.found):
        assert levels(found)["way back"] == {Level.PROBLEM}


def test_nobody_at_all_is_said() -> None:
    with bind_listener("127.0.0.1") as free:
        port = free.getsockname()[1]
    (found,) = peer.meet("127.0.0.1", port)
    assert (found.subject, found.level) == ("peer", Level.PROBLEM)
    assert "nobody listens on this port" in found.remedy
    with pytest.raises(RendezvousError, match="nobody came"):
        list(peer.wait_for_peer("127.0.0.1", 0, lambda text: None, 0.05))


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b'{"hello": "other"}\n', b"[1]\n", b"x" * 100_000])
def test_a_stranger_at_the_port_is_said(answer: bytes) -> None:
    with bind_listener("127.0.0.1") as listener:
        listener.setblocking(True)

        def stranger() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                connection.sendall(answer)

        thread = threading.Thread(target=stranger)
        thread.start()
        found = list(peer.meet(*listener.getsockname()[:2]))
        thread.join(20)
    assert levels(found)["peer"] == {Level.GOOD, Level.PROBLEM}
    assert "is not `aiorlinf doctor --listen`" in found[-1].text
    assert "AIORLINF_MANAGER" in found[-1].remedy


def test_a_manager_and_one_who_says_nothing_are_no_doctors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "_SECONDS", 0.3)
    with aiorlinf.init("a:0", loop="thread") as comm:
        found = list(peer.meet(*parse_endpoint(comm.manager_address)))
    assert "a job's manager or another program" in found[-1].text
    with bind_listener("127.0.0.1") as silent:
        found = list(peer.meet(*silent.getsockname()[:2]))
    assert "says nothing for 0.3 s" in found[-1].text


def test_a_doctor_who_goes_away_in_the_middle_is_another_matter() -> None:
    with bind_listener("127.0.0.1") as listener:
        listener.setblocking(True)

        def leaves() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b'{"hello": "aiorlinf-doctor-1"}\n')

        thread = threading.Thread(target=leaves)
        thread.start()
        found = list(peer.meet(*listener.getsockname()[:2]))
        thread.join(20)
    assert "broke" in found[-1].text
    assert "ended" in found[-1].remedy


@pytest.mark.parametrize("greeting", [b"GET / HTTP/1.1\r\n\r\n", b'{"hello": "aiorlinf-doctor-1", "port": 70000}\n', b"x" * 100_000])
def test_a_stranger_who_comes_is_said(greeting: bytes) -> None:
    waiting = Waiting()
    with socket.create_connection(parse_endpoint(waiting.where)) as client:
        client.sendall(greeting)
        waiting.join(20)
    assert Level.PROBLEM in levels(waiting.found)["peer"]


def test_bad_use_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--peer", "nonsense"]) == 2
    with pytest.raises(SystemExit):
        main(["doctor", "--peer", "a:1", "--listen"])
