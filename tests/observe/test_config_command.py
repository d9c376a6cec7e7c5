"""`aiorlinf config show` says where each value comes from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from aiorlinf import init
from aiorlinf.cli import main
from aiorlinf.config import load_config, option_docs

__all__: list[str] = []


def shown_origins(text: str) -> dict[str, str]:
    """By the last word of each key, what stands in brackets above it."""
    return dict(reversed(pair) for pair in re.findall(r"# .* \[([^]]*)\]\n *(\w+):", text))


def test_a_file_the_environment_and_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("cluster:\n  network:\n    port_range: [4000, 4010]\n\n  collective: {fallback: false}\n")
    monkeypatch.setenv("AIORLINF_TLS_CA", "/etc/ca.pem")
    assert main(["config", "show", str(file)]) == 0
    text = capsys.readouterr().out
    origins = shown_origins(text)
    assert origins["port_range"] == f"{file}:3"
    assert origins["fallback"] == f"{file}:5"
    assert origins["ca"] == "AIORLINF_TLS_CA of the environment"
    assert origins["window_bytes"] == "default"
    assert "      ca: /etc/ca.pem\n" in text
    plain = [path for path, _, _ in option_docs() if "[]" not in path and "tensor_compression" not in path]
    assert len(re.findall(r"^ *# .* \[[^]]*\]$", text, re.MULTILINE)) >= len(plain), "every key has one"


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        """\
collective:
  backend: stream
cluster:
  window_bytes: 7
  collective:
    windw_bytes: 4096
    backend: sharedmem
    tensor_compression: {enabled: true}
  network:
    port_range: [4000]
  net_emulation:
    delays: [{from: "a:0"}, 7]
"""
    )
    assert main(["config", "check", str(file)]) == 2
    lines = capsys.readouterr().err.splitlines()
    for line, part in (
        (1, "collective: unknown key; do you mean cluster.collective?"),
        (4, "cluster.window_bytes: unknown key; do you mean cluster.collective.window_bytes?"),
        (6, "cluster.collective.windw_bytes: unknown key; do you mean window_bytes?"),
        (7, "cluster.collective.backend: 'sharedmem' is not allowed"),
        (10, "cluster.network.port_range: "),
    ):
        assert any(part in said and said.endswith(f", line {line})") for said in lines), (part, lines)
    assert any("tensor_compression.codec: this key is required" in said for said in lines)
    assert any("net_emulation" in said for said in lines)
    assert len(lines) == len(set(lines))


def test_where_yaml_ends_to_be_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("cluster:\n  network: {}\n  collective:\n   - a: [1\n  b: 2\n")
    assert main(["config", "check", str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"aiorlinf: {file}, line 5: this is not valid YAML: ")
    file.write_text("cluster:\n  network: {}\n")
    assert main(["config", "check", str(file)]) == 0
    assert main(["config", "check", str(tmp_path / "none.yaml")]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_of_a_running_job(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"cluster": {"collective": {"window_bytes": 4096}}}
    with init("a:0", loop="thread", config=config) as comm:
        monkeypatch.setenv("AIORLINF_MANAGER", comm.manager_address)
        monkeypatch.setenv("AIORLINF_TOKEN", comm.token.decode())
        assert main(["config", "show", "--job"]) == 0
        text = capsys.readouterr().out
        assert load_config(yaml.safe_load(text)) == comm.config
    assert shown_origins(text)["window_bytes"] == "the job"
    assert shown_origins(text)["fallback"] == "default"
    assert main(["config", "show", "--job", "file.yaml"]) == 2
