"""A parcel that is looked into after all becomes its object: tensors that were on accelerators go to one here, long pickles are read in a
private thread, as when a message is received."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiorlinf.link.parcel import cannot_rebuild
from aiorlinf.link.staging import Landing
from aiorlinf.work.base import AsyncWork

if TYPE_CHECKING:
    import torch

    from aiorlinf.link.parcel import Contents, Parcel
    from aiorlinf.work.home import LoopHome

__all__ = ["Unpacking", "unpack_parcel"]

_HEAVY_BYTES = 256 * 1024
"""Of pickles, from which on they are read in a private thread."""


def unpack_parcel(home: LoopHome, parcel: Parcel, *, allow_pickle: bool = True, device: torch.device | None = None) -> AsyncWork[Any]:
    """The object that a parcel holds, over its memory where it is where it should be. Any thread.

    The parcel is in use until the work is over, and empty then; it is whole again if the work fails or is cancelled.

    Args:
        device: where tensors go that were on an accelerator at the sender; None: to the accelerator of this process, if it has one.

    Raises:
        UsageError: the parcel is empty or in use.

    The work fails as a `recv` would.
    """
    unpacking = Unpacking(home, parcel, parcel.take(), allow_pickle)
    try:
        home.call(unpacking.land, device)
    except BaseException:  # the loop is gone
        parcel.done_with(empty=False)
        raise
    return unpacking.work


class Unpacking:
    """One of them. Home thread only."""

    def __init__(self, home: LoopHome, parcel: Parcel, contents: Contents, allow_pickle: bool) -> None:
        self.work: AsyncWork[Any] = AsyncWork(home, "unpack_parcel", abort=self._give_up)
        self._home = home
        self._parcel = parcel
        self._contents = contents
        self._allow_pickle = allow_pickle

    def land(self, device: torch.device | None) -> None:
        """Bring tensors to their device, and go on."""
        if self.work.done():
            return  # cancelled on its way to this thread
        manifest = self._contents.manifest
        try:
            if manifest is not None and manifest.on_devices:
                landing = Landing(self._home)
                kinds = [spec.device for spec in manifest.specs]
                if landing.bring(self._contents.memory, kinds, landing.target(device), self._landed):
                    return
        except Exception as error:  # whatever the device says
            self._over(None, error)
        else:
            self._landed(None, None)

    def _landed(self, tensors: list[torch.Tensor] | None, error: Exception | None) -> None:
        if self.work.done():
            return
        manifest = self._contents.manifest
        if error is not None:
            self._over(None, error)
        elif manifest is not None and manifest.codec_bytes > _HEAVY_BYTES:
            rebuilding = self._home.submit(self._rebuild, tensors)
            rebuilding.add_done_callback(lambda work: self._over(*(work.result() if not _failed(work) else (None, work.exception()))))
        else:
            self._over(*self._rebuild(tensors))

    def _rebuild(self, tensors: list[torch.Tensor] | None) -> tuple[Any, BaseException | None]:
        """The value or the error; as data, for a work that ends with a CancelledError looks as if it had been cancelled."""
        try:
            return self._contents.rebuild(tensors, allow_pickle=self._allow_pickle), None
        except BaseException as error:  # whatever unpickled code raises, sys.exit() too, concerns this parcel only
            return None, error

    def _over(self, value: Any, error: BaseException | None) -> None:
        if self.work.done():
            return  # and the parcel may be in use by another
        self._parcel.done_with(empty=error is None)
        if error is None:
            self.work._finish(value)
        else:
            self.work._fail(cannot_rebuild(error))
            if isinstance(error, KeyboardInterrupt):
                raise error

    def _give_up(self, _work: AsyncWork[Any]) -> None:
        self._parcel.done_with(empty=False)


def _failed(work: AsyncWork[Any]) -> bool:
    return work.cancelled() or work.exception() is not None
