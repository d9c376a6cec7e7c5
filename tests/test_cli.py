from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from aiorlinf.cli import main
from aiorlinf.config import JobConfig, config_to_dict, load_config
from tests.launch.programs import child_env, cli


def test_help_of_everything(capsys: pytest.CaptureFixture[str]) -> None:
    commands = (
        "",
        "run",
        "manager",
        "top",
        "trace",
        "trace merge",
        "metrics",
        "doctor",
        "topology",
        "bench",
        "config",
        "config check",
        "config show",
    )
    for command in map(str.split, commands):
        with pytest.raises(SystemExit) as caught:
            main([*command, "--help"])
        assert caught.value.code == 0
        assert capsys.readouterr().out.startswith(" ".join(["usage: aiorlinf", *command]))


def test_version(tmp_path: Path) -> None:
    run = cli("--version", cwd=tmp_path)
    assert run.returncode == 0
    assert re.fullmatch(r"aiorlinf \S.* \(Python 3\.\d+\.\d+\S*\)\n", run.stdout)


@pytest.mark.parametrize("args", [[], ["nonsense"], ["config"], ["config", "check"], ["--nonsense"]])
def test_wrong_use(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(args)
    assert caught.value.code == 2
    assert "usage: aiorlinf" in capsys.readouterr().err


def test_config_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("cluster: {collective: {window_bytes: 1000}}")
    assert main(["config", "check", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: good\n"
    file.write_text("cluster: {collective: {windw_bytes: 1000}}")
    assert main(["config", "check", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("aiorlinf: cluster.collective.windw_bytes: ")
    assert error.count("\n") == 1
    assert main(["config", "check", str(tmp_path / "nowhere.yaml")]) == 2


def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "aiorlinf", "config", "show"]
    run = subprocess.run(command, cwd=tmp_path, env=child_env(), stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (run.returncode, run.stderr) == (141, "")


def test_config_show_gives_what_can_be_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show"]) == 0
    shown = capsys.readouterr().out
    assert load_config(yaml.safe_load(shown)) == JobConfig()
    assert "  # " in shown
    file = tmp_path / "job.yaml"
    file.write_text(
        "cluster: {collective: {fallback: false}, "
        "network: {port_range: [4000, 4010], advertise_host: 'a: b # \"c\"', connect_timeout_s: 0.000001}}"
    )
    assert main(["config", "show", str(file)]) == 0
    assert config_to_dict(load_config(yaml.safe_load(capsys.readouterr().out))) == config_to_dict(load_config(file))


@pytest.mark.parametrize("file", sorted((Path(__file__).parents[1] / "config").glob("*.yaml")), ids=lambda file: file.stem)
def test_config_check_and_show_of_the_shipped_files(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: good\n"
    assert main(["config", "show", str(file)]) == 0
    shown = capsys.readouterr().out
    assert load_config(yaml.safe_load(shown)) == load_config(file)
    if file.stem == "emulated-datacentres":
        assert "    crossdc_pairs: [{src: 'rollout:*', dst: 'trainer:*', delay_ms: 20.0}]\n" in shown
