"""Makes ``.venv/ray``: an environment that has all of ``.venv``, and Ray. Does nothing when it is up to date.

Ray is heavy, and the library works without it; so what the other tests run in does not have it. Run by ``.venv``'s Python.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

__all__ = ["main"]

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv" / "ray"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "aiorlinf-stamp"
CONSTRAINTS = ROOT / "scripts" / "constraints.txt"


def main() -> int:
    """Bring it up to date; the exit status is pip's."""
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["ray"]
    wanted = hashlib.sha256(f"{ROOT}\n{extra}\n{CONSTRAINTS.read_text()}\n{Path(__file__).read_text()}".encode()).hexdigest()
    if STAMP.exists() and STAMP.read_text() == wanted:
        return 0
    print("setting up .venv/ray ...", file=sys.stderr, flush=True)
    venv.create(VENV, clear=True, with_pip=False)
    # addsitedir and not the bare path: what is installed there editable has a file of this kind, too.
    below = sysconfig.get_path("purelib")
    there = sysconfig.get_path("purelib", vars={"base": str(VENV), "platbase": str(VENV)})
    (Path(there) / "below.pth").write_text(f"import site; site.addsitedir({below!r})\n")
    command = [sys.executable, "-m", "pip", "--python", str(PYTHON), "install", "--quiet", "--quiet", "--disable-pip-version-check"]
    if not sys.dont_write_bytecode:
        command.append("--no-compile")  # see _env.py
    status = subprocess.run([*command, "--no-input", "--constraint", str(CONSTRAINTS), *extra], check=False).returncode
    if status == 0:
        STAMP.write_text(wanted)
    return status


if __name__ == "__main__":
    sys.exit(main())
