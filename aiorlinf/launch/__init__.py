"""Starting the workers of a job on this machine.

``aiorlinf.launch`` is this package and the function alike: ``aiorlinf.launch(main, "rollout=2,trainer=1")`` runs a job, and
``aiorlinf.launch.spec`` is a module in here. A package's name in its parent is bound to the package by the import system at the first
import of anything below it, so binding it to the function instead would depend on the order of imports. The package is callable.
"""

from __future__ import annotations

import inspect
import sys
import types

from aiorlinf.launch.api import launch, launch_async
from aiorlinf.launch.result import LaunchResult, WorkerFailed

__all__ = ["LaunchResult", "WorkerFailed", "launch", "launch_async"]


class _CallablePackage(types.ModuleType):
    __call__ = staticmethod(launch)


sys.modules[__name__].__class__ = _CallablePackage
__signature__: inspect.Signature = inspect.signature(launch)  # for those who ask what the package can be called with
