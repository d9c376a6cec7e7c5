"""Checks of the installed packages."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import sys
from collections.abc import Iterator

from aiorlinf.codec.registry import codecs_by_name
from aiorlinf.observe.doctor.findings import Finding, Level

__all__ = ["check_codecs", "check_python", "check_torch", "check_uvloop"]


def check_python() -> Iterator[Finding]:
    """Version of the interpreter and of this library."""
    yield Finding(Level.GOOD, "python", f"{platform.python_version()} on {sys.platform}, aiorlinf {_version('aiorlinf')}")
    if sys.platform != "linux":
        yield Finding(Level.WARNING, "python", f"{sys.platform} has no memory files: payloads of one host go over sockets", "use Linux")


def check_torch() -> Iterator[Finding]:
    """torch, and its distributed package with Gloo."""
    try:
        import torch
    except ImportError as error:
        yield Finding(Level.PROBLEM, "torch", f"cannot be imported: {error}", "pip install torch")
        return
    yield Finding(Level.GOOD, "torch", str(torch.__version__))
    distributed = torch.distributed.is_available()
    if distributed and hasattr(torch.distributed, "ProcessGroupGloo"):
        yield Finding(Level.GOOD, "gloo", "part of this torch")
    else:
        yield Finding(
            Level.WARNING,
            "gloo",
            "this torch is built without it: payloads of other hosts use the stream",
            "install a usual build of torch",
        )


def check_uvloop() -> Iterator[Finding]:
    """The loop that threads of workers run on."""
    try:
        uvloop = importlib.import_module("uvloop")
    except ImportError as error:
        yield Finding(Level.PROBLEM, "uvloop", f"cannot be imported: {error}", "pip install uvloop")
        return
    yield Finding(Level.GOOD, "uvloop", str(uvloop.__version__))


def check_codecs() -> Iterator[Finding]:
    """Libraries of the codecs, and how they are called."""
    for name, codec in sorted(codecs_by_name().items()):
        try:
            codec.probe()
        except ImportError as error:
            yield Finding(Level.WARNING, name, f"cannot be used for compression: {error}", f"pip install {codec.package}")
            continue
        facts = codec().describe()
        text = f"{codec.package} {_version(codec.package)} ({facts['library']}), called as {facts['calls']}"
        reason = facts.get("reason")
        if reason:
            remedy = f"compression works, but slower; another version of {codec.package} may do better"
            yield Finding(Level.WARNING, name, f"{text}, because {reason}", remedy)
        else:
            yield Finding(Level.GOOD, name, text)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(version unknown)"
