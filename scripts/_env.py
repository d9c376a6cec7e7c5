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
from typing import TextIO

__all__ = ["main"]

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "aiorlinf-stamp"
CONSTRAINTS = ROOT / "scripts" / "constraints.txt"
AT_WORK = "at work"


def main() -> int:
    """Bring ``.venv`` up to date; the exit status is pip's."""
    wanted = _fingerprint()
    # Whoever changes .venv holds the lock, and has written AT_WORK into its file until all is done. So those words in a file that
    # nobody holds mean that somebody was stopped in the middle. The kernel drops the lock when its holder ends, however it ends.
    with (ROOT / ".venv.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("waiting for another script that is setting up .venv")
            fcntl.flock(lock, fcntl.LOCK_EX)
        lock.seek(0)
        stopped = lock.read() == AT_WORK
        if not stopped and _is_up_to_date(wanted):
            return 0
        if not stopped and VENV.exists() and not _is_environment():
            _say(f"{VENV} is not a virtual environment that works; remove it, then try again")
            return 1
        _say("setting up .venv (once; this takes a minute or more) ...")
        _write(lock, AT_WORK)
        status = _install(lock, afresh=stopped)
        if status == 0:
            STAMP.write_text(wanted)
        else:
            _say(f"pip failed with status {status}")
        # pip undoes what it could not finish, so the next try may go on from here.
        _write(lock, "")
        return status


def _fingerprint() -> str:
    """The folder counts too: a copied .venv would import the package from where it was made."""
    digest = hashlib.sha256(os.fsencode(ROOT))
    for path in (ROOT / "pyproject.toml", CONSTRAINTS, Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _is_up_to_date(wanted: str) -> bool:
    return PYTHON.exists() and STAMP.exists() and STAMP.read_text() == wanted


def _is_environment() -> bool:
    """Without its pyvenv.cfg, for one, the interpreter in .venv would be the one that it links to, and pip would install over there."""
    show = "import os, pip, sys; print(os.path.realpath(sys.prefix), sys.prefix != sys.base_prefix)"
    try:
        shown = subprocess.run([str(PYTHON), "-c", show], capture_output=True, text=True, check=False).stdout
    except OSError:
        return False
    return shown == f"{VENV.resolve()} True\n"


def _install(lock: TextIO, *, afresh: bool) -> int:
    if afresh or not VENV.exists():
        venv.create(VENV, clear=True, with_pip=True)
    STAMP.unlink(missing_ok=True)
    command = [
        str(PYTHON),
        "-m",
        "pip",
        "--require-virtualenv",
        "install",
        "--quiet",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
    ]
    if not sys.dont_write_bytecode:
        # Half of the time would go into compiling modules of which most are never imported; each is compiled when it is.
        command.append("--no-compile")
    command += ["--constraint", str(CONSTRAINTS), "--editable", f"{ROOT}[test,examples,observe]"]
    # pip holds the lock too: should we be killed, nobody starts a second one beside it.
    return subprocess.run(command, check=False, pass_fds=(lock.fileno(),)).returncode


def _write(lock: TextIO, text: str) -> None:
    lock.truncate(0)
    lock.write(text)
    lock.flush()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
