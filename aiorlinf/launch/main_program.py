"""The program that launched a job, loaded again in a worker to find one of its functions."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types

__all__ = ["MAIN_NAME", "is_loading", "load_main"]

MAIN_NAME = "__mp_main__"
"""The name that multiprocessing gives to it, too. It is not ``__main__``: what a program does under that name shall not be done again."""

_loading = False


def is_loading() -> bool:
    """Whether this process is a worker that is just running the program's file."""
    return _loading


def load_main(path: str) -> types.ModuleType:
    """Run the program's file as a module named `MAIN_NAME`; what the file raises is passed on."""
    global _loading
    loader = importlib.machinery.SourceFileLoader(MAIN_NAME, path)
    spec = importlib.util.spec_from_file_location(MAIN_NAME, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    # Under both names, so that objects whose class was pickled under either find it.
    sys.modules["__main__"] = sys.modules[MAIN_NAME] = module
    _loading = True
    try:
        loader.exec_module(module)
    finally:
        _loading = False
    return module
