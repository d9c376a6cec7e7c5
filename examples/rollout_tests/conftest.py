"""Jobs as fixtures; and a test that leaves a task, thread, socket, child process or shared memory behind fails."""

from __future__ import annotations

pytest_plugins = ["aiorlinf.testing.pytest_plugin", "aiorlinf.testing.pytest_leaks"]
