"""The program of a worker that runs a function: ``python -m aiorlinf.launch.child module:function``.

It joins the job that the environment names, calls the function with its `Worker` (awaiting it on a uvloop loop if it is a coroutine
function), closes the worker, and ends. An exception ends it with a traceback and exit code 1. SIGTERM lets the function clean up:
a coroutine is cancelled, a plain function gets `SystemExit`; then the process ends by that signal.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import inspect
import json
import os
import pickle
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop

from aiorlinf.errors import UsageError
from aiorlinf.launch.main_program import load_main
from aiorlinf.launch.target import CALL_ENV

__all__ = ["load_function", "main"]


def main(argv: list[str] | None = None) -> int:
    """Run the function named by the environment, or else by the first argument; the process's exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    text = os.environ.pop(CALL_ENV, None)
    call: dict[str, Any] = json.loads(text) if text is not None else {"target": arguments[0] if arguments else ""}
    sys.argv = call.get("argv", sys.argv)
    # The library's heavy part is imported after this: what is wrong with the program shows at once.
    function = load_function(call["target"], call.get("main"))
    args = pickle.loads(base64.b64decode(call["args"])) if "args" in call else ()
    run = _run_coroutine if inspect.iscoroutinefunction(function) else _run_plain
    try:
        run(function, args)
    except _Terminated:
        # Ends by the signal, so that whoever waits sees what happened.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.stdout.flush()
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGTERM)
    return 0


def load_function(target: str, main_file: str | None) -> Callable[..., Any]:
    """Import ``module:qualified.name``; with `main_file`, that file is the main program and the module's name is ``__mp_main__``.

    Raises:
        UsageError: not of that form, or there is no such function.
    """
    module_name, colon, qualname = target.partition(":")
    if not colon or not module_name or not qualname:
        raise UsageError(f"{target!r} does not name a function", hint="write module:function")
    found: Any = importlib.import_module(module_name) if main_file is None else load_main(main_file)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise UsageError(f"{module_name} has no function {qualname}")
    function: Callable[..., Any] = found
    return function


class _Terminated(SystemExit):
    """SIGTERM came."""


def _run_plain(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    def on_sigterm(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough; the launcher has SIGKILL for the impatient
        raise _Terminated(128 + number)

    signal.signal(signal.SIGTERM, on_sigterm)
    from aiorlinf.worker import init

    with init() as comm:
        result = function(comm, *args)
        if inspect.isawaitable(result):  # a wrapped coroutine function does not look like one
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_await(result))


async def _await(result: Awaitable[Any]) -> None:
    await result


def _run_coroutine(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    from aiorlinf.worker import init

    terminated = False

    async def body() -> None:
        task = asyncio.current_task()
        assert task is not None

        def on_sigterm() -> None:
            nonlocal terminated
            terminated = True
            task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, on_sigterm)
        async with init() as comm:
            await function(comm, *args)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(body())
        except asyncio.CancelledError:
            if not terminated:
                raise
    if terminated:
        raise _Terminated


if __name__ == "__main__":
    sys.exit(main())
