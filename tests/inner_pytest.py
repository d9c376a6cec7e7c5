"""Runs pytest in a process of its own on a small file, and tells what became of each test."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

__all__ = ["InnerRun", "run_pytest"]

_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class InnerRun:
    """``outcomes`` maps the name of a test to "passed", "failure" (itself) or "error" (set-up or teardown); ``texts`` to what was said."""

    status: int
    output: str
    outcomes: dict[str, str]
    texts: dict[str, str]


def run_pytest(folder: Path, source: str, *arguments: str) -> InnerRun:
    """Run the tests in ``source``. Nothing of this project's own configuration is used but what ``arguments`` switch on."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_inner.py").write_text(textwrap.dedent(source))
    command = [sys.executable, "-m", "pytest", "--junitxml=report.xml", *arguments, "test_inner.py"]
    done = subprocess.run(
        command,
        cwd=folder,
        env={"PYTHONPATH": str(_ROOT), "PATH": "/usr/bin:/bin"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=50,
        check=False,
    )
    report = folder / "report.xml"
    outcomes: dict[str, str] = {}
    texts: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        name = case.attrib["name"]
        trouble = [part for part in case if part.tag in ("failure", "error")]
        outcomes[name] = trouble[0].tag if trouble else "passed"
        texts[name] = "\n".join(part.text or "" for part in trouble)
    return InnerRun(done.returncode, done.stdout, outcomes, texts)
