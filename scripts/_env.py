"""Makes ``.venv`` with the package (editable), its test tools and what the examples need. Does nothing when it is up to date.

Up to date means: made for this folder from the pyproject.toml and constraints.txt of now. Safe to start several times at
once: the others wait for the first. Uses the standard library only, since it runs before anything is installed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

__all__ = ["main"]

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "aiorlinf-stamp"
UNFINISHED = VENV / "aiorlinf-unfinished"
CONSTRAINTS = ROOT / "scripts" / "constraints.txt"


def main() -> int:
    """Bring ``.venv`` up to date; the exit status is pip's."""
    wanted = _fingerprint()
    with (ROOT / ".venv.lock").open("w") as lock:
        # The kernel drops the lock when its holder ends, however it ends.
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("waiting for another script that is setting up .venv")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_up_to_date(wanted):
            return 0
        _say("setting up .venv (once; this takes a minute or more) ...")
        status = _install(lock.fileno())
        if status == 0:
            STAMP.write_text(wanted)
        else:
            _say(f"pip failed with status {status}; to start afresh: rm -r {VENV}")
        return status


def _fingerprint() -> str:
    """The folder counts too: a copied .venv would import the package from where it was made."""
    digest = hashlib.sha256(os.fsencode(ROOT))
    for path in (ROOT / "pyproject.toml", CONSTRAINTS, Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _is_up_to_date(wanted: str) -> bool:
    return (VENV / "bin" / "python").exists() and STAMP.exists() and STAMP.read_text() == wanted


def _install(lock: int) -> int:
    python = VENV / "bin" / "python"
    # One that somebody made by hand is kept and added to; one that we were stopped in the middle of may be broken anywhere.
    if UNFINISHED.exists() or not python.exists():
        venv.create(VENV, clear=True, with_pip=True)
    UNFINISHED.touch()
    STAMP.unlink(missing_ok=True)
    command = [str(python), "-m", "pip", "install", "--quiet", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--constraint", str(CONSTRAINTS), "--editable", f"{ROOT}[test,examples]"]
    # pip holds the lock too: should we be killed, nobody starts a second one beside it.
    status = subprocess.run(command, check=False, pass_fds=(lock,)).returncode
    if status == 0:
        UNFINISHED.unlink()
    return status


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
