"""An accelerator that is not there: tensors on a device of its own, asynchronous streams, and a strict eye on how they are used.

`FakeAccelerator` is all that a test needs; it is a context manager, and what it has to object to fails the test at its end.

The tensors are plain `torch.Tensor` objects of device type ``fake`` (torch's PrivateUse1), so that code sees of them just what it sees
of CUDA tensors: ``type(t) is torch.Tensor``, ``t.is_cpu`` is false, ``t.numpy()`` is refused, version counters and views work. No C++ is
needed: such a tensor is laid over CPU memory through DLPack, whose "extension device" is PrivateUse1 (`memory`), views are torch's own
kernels for the CPU, which do not look at the device, and every other operation is queued on the current stream and done later by the
kernel for the CPU (`kernels`). A subclass of Tensor would have been less work, but the library treats subclasses as users' own classes.
"""

from __future__ import annotations

from aiorlinf.testing.fake.accelerator import FakeAccelerator, Fault
from aiorlinf.testing.fake.streams import FakeEvent, FakeStream

__all__ = ["FakeAccelerator", "FakeEvent", "FakeStream", "Fault"]
