"""Imported last by a fork server: what it has imported is left alone by the garbage collectors of the processes that it forks.

Each of them would otherwise look through all of torch's objects at its first full collection, and by that alone get a copy of its own of
fifty megabytes: a quarter of a second for a process that is there in milliseconds.
"""

from __future__ import annotations

import gc

__all__: list[str] = []

gc.collect()
gc.freeze()
