"""First program of a worker's process: tie its life to the launcher's, then become the worker.

Run by path with ``-I -S``; needs nothing but the standard library. Arguments: the launcher's pid, then the command.

The kernel sends the parent-death signal when the launcher ends, however it ends. The launcher may be gone before the request
is made: the check of the parent after it closes that gap. The request stays in force over the exec.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["main"]

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Set up this process and replace it by the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)
    # What the launcher's own parent blocked or ignored shall not make the worker deaf to the request to end.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
