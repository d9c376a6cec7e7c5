"""What the README says about policies, codecs and backends of one's own is followed to the letter, and passes the suites."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

__all__: list[str] = []

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "### Something new\n", "\nLicence:"
CHANGES = ROOT / "examples" / "extend" / "sockets.diff"
PLACES = {"sizes.py": ".", "deflate.py": "aiorlinf/codec/codecs", "sockets.py": "aiorlinf/backends"}


def _chapter() -> str:
    readme = (ROOT / "README.md").read_text()
    assert readme.count(BEGIN) == 1
    return readme.partition(BEGIN)[2].partition(END)[0]


def _write_files(chapter: str, folder: Path) -> None:
    """Each block that begins with a path as a comment becomes that file; files of the example go where the text says that they belong."""
    for name, text in re.findall(r"```python\n# (\S+\.py)\n(.*?)```", chapter, re.DOTALL):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name in re.findall(r"\]\((examples/extend/\w+\.py)\)", chapter):
        (place,) = [place for file, place in PLACES.items() if name.endswith(file)]
        assert place in {".", *re.findall(r"`(aiorlinf/[\w/]+?)/?`", chapter)}, f"the text does not say where {name} goes"
        shutil.copy(ROOT / name, folder / place)


def _change(folder: Path) -> int:
    """Make the changes that lie beside the backend, every one of which must have exactly one place; their number."""
    changes = 0
    for name, lines in re.findall(r"^--- (\S+)\n((?:(?!---).*\n)+)", CHANGES.read_text(), re.MULTILINE):
        before = "".join(line[1:] for line in lines.splitlines(keepends=True) if line[0] in " -")
        after = "".join(line[1:] for line in lines.splitlines(keepends=True) if line[0] in " +")
        path = folder / name
        text = path.read_text()
        assert text.count(before) == 1, f"{name} has {text.count(before)} places that read\n{before}"
        path.write_text(text.replace(before, after))
        changes += 1
    return changes


@pytest.mark.sampled(3)
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("test", "least"), [("test_sizes.py", 10), ("tests/codec/codecs/test_deflate.py", 12), ("tests/backends/test_sockets.py", 14)]
)
def test_each_leads_to_what_passes_its_suite(test: str, least: int, tmp_path: Path) -> None:
    chapter = _chapter()
    shutil.copytree(ROOT / "aiorlinf", tmp_path / "aiorlinf", ignore=shutil.ignore_patterns("__pycache__"))
    _write_files(chapter, tmp_path)
    assert "[examples/extend/sockets.diff](examples/extend/sockets.diff)" in chapter
    assert _change(tmp_path) == 6
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", "-o", "asyncio_mode=strict", test],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) >= least


def test_the_layout_that_is_drawn_is_the_one_that_is_there() -> None:
    """Each folder of the package is named in the picture, in the order in which they may import."""
    readme = (ROOT / "README.md").read_text()
    drawn = re.findall(r"^  (\w+)/ ", readme.partition("```\naiorlinf/\n")[2].partition("```")[0], re.MULTILINE)
    there = {path.parent.name for path in (ROOT / "aiorlinf").glob("*/__init__.py")}
    assert set(drawn) == there
