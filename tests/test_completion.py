"""The shells themselves complete the command line, with the scripts that it prints."""

from __future__ import annotations

import argparse
import os
import pty
import re
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from aiorlinf.cli import build_parser, main
from aiorlinf.completion import SHELLS, completion_script

COMMANDS = sorted(re.findall(r"^    ([a-z]+)(?: |$)", build_parser().format_help(), re.MULTILINE))

# What is typed, with the word to complete last; and what is offered for it. FILES: the files of the folder.
FILES = ["job.yaml", "train.py"]
CASES = [
    ([""], COMMANDS),
    (["ma"], ["manager"]),
    (["nothing-like-it"], []),
    (["--ver"], ["--version"]),
    (["run", "--no"], ["--no-prefix"]),
    (["run", ""], FILES),
    (["run", "--workers", ""], []),
    (["run", "--config", ""], FILES),
    (["run", "--workers", "config", "--gr"], ["--grace"]),  # a value is no command
    (["run", "train.py", "--gr"], []),  # the options of the script are not ours
    (["run", "train.py", "manager", "j"], ["job.yaml"]),
    (["config", ""], ["check", "show"]),
    (["config", "check", ""], FILES),
    (["completion", ""], ["bash", "fish", "zsh"]),
    (["manager", ""], []),
]


@pytest.fixture
def folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The scripts, beside a folder with two files to offer."""
    for shell in SHELLS:
        assert main(["completion", shell]) == 0
        (tmp_path / f"completion.{shell}").write_text(capsys.readouterr().out)
    (tmp_path / "here").mkdir()
    for name in FILES:
        (tmp_path / "here" / name).touch()
    return tmp_path


def _shell(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def _run(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder / "here", stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_bash(folder: Path) -> None:
    # Without a terminal bash does not fall back on the names of files itself; `compopt` is what tells it not to.
    lines = [". ../completion.bash", 'compopt() { [[ "$*" == "+o default +o bashdefault" ]] && fallback=no; }']
    for words, _ in CASES:
        array = " ".join(f"'{word}'" for word in ["aiorlinf", *words])
        lines.append(f'COMP_WORDS=({array}) COMP_CWORD={len(words)} fallback=yes; _aiorlinf; echo "$fallback:${{COMPREPLY[*]}}"')
    printed = _run(folder, _shell("bash"), "--norc", "-c", "\n".join(lines)).splitlines()
    offered = {}
    for (words, _), line in zip(CASES, printed, strict=True):
        fallback, _, reply = line.partition(":")
        files = [name for name in FILES if name.startswith(words[-1])] if fallback == "yes" else []
        offered[" ".join(words)] = sorted(reply.split()) or files
    assert offered == {" ".join(words): wanted for words, wanted in CASES}


def test_bash_makes_three_words_of_an_option_with_its_value(folder: Path) -> None:
    body = ". ../completion.bash; COMP_WORDS=(aiorlinf run --workers = a --no) COMP_CWORD=5; _aiorlinf; echo ${COMPREPLY[*]}"
    assert _run(folder, _shell("bash"), "--norc", "-c", body) == "--no-prefix\n"


def test_fish(folder: Path) -> None:
    offered = {}
    for words, _ in CASES:
        # As typed: what comes before the cursor, with a blank for an empty word.
        typed = " ".join(["aiorlinf", *words])
        printed = _run(folder, _shell("fish"), "--no-config", "-c", f"source ../completion.fish; complete -C '{typed}'")
        offered[" ".join(words)] = sorted(line.split("\t")[0] for line in printed.splitlines())
    assert offered == {" ".join(words): wanted for words, wanted in CASES}


ZSH = """
emulate -L zsh
compdef() { : }
. ../completion.zsh
_describe() { local -a all; all=(${(P)${@[-1]}}); print -rl -- ${(M)${all%%:*}:#${words[CURRENT]}*} }
_files() { print -rl -- *(N) | grep "^${words[CURRENT]}" }
compadd() { shift; print -rl -- "$@" }
ask() { words=("$@"); CURRENT=$#; _aiorlinf; print -r -- --; }
"""


def test_zsh(folder: Path) -> None:
    # What zsh would do with what is offered is done here; `test_in_a_terminal` has the real thing.
    asked = "\n".join("ask aiorlinf " + " ".join(f"'{word}'" for word in words) for words, _ in CASES)
    printed = _run(folder, _shell("zsh"), "-f", "-c", f"{ZSH}\n{asked}")
    offered = [sorted(part.split()) for part in printed.split("--\n")[: len(CASES)]]
    assert dict(zip((" ".join(words) for words, _ in CASES), offered, strict=True)) == {" ".join(words): wanted for words, wanted in CASES}


RC = {
    "bash": """
        PS1='ready> '; bind 'set enable-bracketed-paste off'
        aiorlinf() { echo "ran: $*"; }
        . ../completion.bash
    """,
    "zsh": """
        PS1='ready> '; unset zle_bracketed_paste; autoload -U compinit && compinit -D -u
        aiorlinf() { print -r -- "ran: $*" }
        . ../completion.zsh
    """,
}


@pytest.mark.parametrize("name", ["bash", "zsh"])
def test_in_a_terminal(name: str, folder: Path) -> None:
    """Typed, with the tab key, into a shell that a terminal belongs to."""
    rc = folder / f".{name}rc"
    rc.write_text(RC[name])
    command = [_shell(name), "-i"] if name == "zsh" else [_shell(name), "--rcfile", str(rc), "-i"]
    ours, theirs = pty.openpty()
    env = {"PATH": os.environ["PATH"], "TERM": "dumb", "ZDOTDIR": str(folder), "HOME": str(folder)}
    shell = subprocess.Popen(command, cwd=folder / "here", env=env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    shown = ""
    try:
        end = time.monotonic() + 40
        for prompts, line in enumerate(["aiorlinf conf\tche\tjo\t\n", "exit\n"], 1):
            while shown.count("ready> ") < prompts:
                assert time.monotonic() < end, shown
                if select.select([ours], [], [], 1)[0]:
                    shown += os.read(ours, 4096).decode(errors="replace")
            os.write(ours, line.encode())
        assert shell.wait(20) == 0
    finally:
        shell.kill()
        shell.wait()
        os.close(ours)
    assert "ran: config check job.yaml" in shown


def test_what_a_parser_hides_or_calls_by_another_name() -> None:
    parser = argparse.ArgumentParser(prog="tool")
    parser.add_argument("--level", choices=[1, 2], type=int, help="50%% of %(prog)s's default, %(default)s; it's fine")
    parser.add_argument("--secret", help=argparse.SUPPRESS)
    for shell in SHELLS:
        script = completion_script(parser, shell)
        assert "secret" not in script
        assert "1 2" in script
    assert "50% of tool" in completion_script(parser, "zsh")


def test_every_command_is_offered() -> None:
    assert {"run", "manager", "doctor", "config", "completion"} <= set(COMMANDS)
    for shell in SHELLS:
        script = completion_script(build_parser(), shell)
        assert all(command in script for command in COMMANDS)
