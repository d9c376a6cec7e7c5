"""What a worker shall run, turned into a command line."""

from __future__ import annotations

import base64
import inspect
import json
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiorlinf.errors import UsageError
from aiorlinf.launch.main_program import MAIN_NAME

__all__ = ["CALL_ENV", "MAX_CALL", "Target", "callable_target", "module_target", "resolve_target", "script_target"]

CALL_ENV = "AIORLINF_LAUNCH_CALL"
"""The variable in which a worker that runs a function finds which one; it is taken out of the environment before that runs."""

MAX_CALL = 96 * 1024
"""Characters of that variable: Linux takes 128 KiB."""

# The module search path comes first: without it the child may not even find this package.
_BOOTSTRAP = (
    f"import json, os, sys; sys.path[:] = json.loads(os.environ[{CALL_ENV!r}])['path']; "
    "from aiorlinf.launch.child import main; sys.exit(main())"
)


@dataclass(frozen=True, slots=True)
class Target:
    """A command line, and what the environment needs for it."""

    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)


def resolve_target(target: str | os.PathLike[str] | Callable[..., Any], args: Sequence[Any]) -> Target:
    """A script's path, or a function that can be found by name.

    Raises:
        UsageError: no such script, or the function cannot be found by name or its arguments cannot be pickled.
    """
    if isinstance(target, (str, os.PathLike)):
        return script_target(target, args)
    if callable(target):
        return callable_target(target, args)
    raise UsageError(f"a target is a script's path or a function, not a {type(target).__name__}", operation="launch")


def script_target(script: str | os.PathLike[str], args: Sequence[Any]) -> Target:
    """``python script args...``

    Raises:
        UsageError: the script does not exist, or an argument is not text.
    """
    path = os.fspath(script)
    if not os.path.exists(path):
        raise UsageError(f"no script {path!r} in {os.getcwd()}", hint="for a module, as with python -m, use: aiorlinf run -m")
    return Target((_python(), path, *_texts(args)))


def module_target(module: str, args: Sequence[Any]) -> Target:
    """``python -m module args...``

    Raises:
        UsageError: not a module's name, or an argument is not text.
    """
    if not all(part.isidentifier() for part in module.split(".")):
        raise UsageError(f"{module!r} is not a module's name", hint="leave out -m to run a script by its path")
    return Target((_python(), "-m", module, *_texts(args)))


def callable_target(function: Callable[..., Any], args: Sequence[Any]) -> Target:
    """A process that imports the function and calls it with its worker and `args`.

    A function of the main program is supported as multiprocessing's spawn does it: the program's file is run again under the
    name ``__mp_main__``, so that what stands under ``if __name__ == "__main__":`` is not.

    Raises:
        UsageError: the function cannot be found by name from another process, or the arguments cannot be pickled.
    """
    module, qualname, main = _locate(function)
    try:
        pickled = pickle.dumps(tuple(args))
    except Exception as error:  # __reduce__ of the user's objects may raise anything
        raise UsageError(f"the arguments for {qualname} cannot be pickled: {type(error).__name__}: {error}", operation="launch") from error
    call = {
        "path": list(sys.path),
        "argv": [str(arg) for arg in sys.argv],
        "main": main,
        "target": f"{module}:{qualname}",
        "args": base64.b64encode(pickled).decode("ascii"),
    }
    text = json.dumps(call)
    if len(text) > MAX_CALL:
        raise UsageError(
            f"the arguments for {qualname} are too large: {len(pickled)} bytes pickled",
            operation="launch",
            hint="pass a file's path, or send large data to the workers once they run",
        )
    return Target((_python(), "-c", _BOOTSTRAP), {CALL_ENV: text})


def _locate(function: Any) -> tuple[str, str, str | None]:
    """Module, qualified name, and the main program's file if that is where the function is."""
    hint = "define it at the top level of a module or script with def or async def; pass what it needs in args"
    if not inspect.isroutine(function) or not (hasattr(function, "__module__") and hasattr(function, "__qualname__")):
        raise UsageError(f"a {type(function).__name__} cannot be found by name in another process", operation="launch", hint=hint)
    name, qualname = function.__module__, function.__qualname__
    module = sys.modules.get(name)
    if "<" in qualname or module is None:
        raise UsageError(f"{name}.{qualname} cannot be found by name in another process", operation="launch", hint=hint)
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if found is not function:
        raise UsageError(f"{name}.{qualname} is now something else than the function given", operation="launch", hint=hint)
    if name not in ("__main__", MAIN_NAME):
        return name, qualname, None
    spec = getattr(module, "__spec__", None)
    if spec is not None and spec.name not in ("__main__", MAIN_NAME):
        return spec.name, qualname, None  # python -m: the module has a name of its own
    file = getattr(module, "__file__", None)
    if file is None or not os.path.isfile(file):
        raise UsageError(
            f"{qualname} is defined in a program without a file (a notebook, or a prompt), which the workers cannot load",
            operation="launch",
            hint="put the function in a .py file beside it, and import it from there",
        )
    return MAIN_NAME, qualname, os.path.abspath(file)


def _texts(args: Sequence[Any]) -> list[str]:
    texts = [os.fspath(arg) if isinstance(arg, os.PathLike) else arg for arg in args]
    for text in texts:
        if not isinstance(text, str) or "\0" in text:
            raise UsageError(f"argument {text!r} of a script is not text", operation="launch", hint="pass str(...)")
    return texts


def _python() -> str:
    if not sys.executable:
        raise UsageError("this program does not know its Python interpreter (sys.executable is empty)", operation="launch")
    return sys.executable
