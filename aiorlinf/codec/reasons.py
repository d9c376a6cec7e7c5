"""Why a tensor travels as it is."""

from __future__ import annotations

from enum import Enum

__all__ = ["RawReason"]


class RawReason(Enum):
    """The value is the name in statistics."""

    KIND = "kind"
    """Part of a pickled object."""
    BUFFER = "buffer"
    """An array or bytes, no tensor."""
    DEVICE = "device"
    """In an accelerator's memory."""
    DTYPE = "dtype"
    """Its dtype is in ``excluded_dtypes``."""
    SMALL = "small"
    """Smaller than ``min_bytes``."""
    TOO_LARGE = "too_large"
    """Larger than the codec takes."""
    RANDOM = "random"
    """Not one of the samples of it got smaller."""
    NOT_SMALLER = "not_smaller"
    """It does not get smaller, or the first few megabytes of it do not."""
    NO_CONTEXT = "no_context"
    """All contexts of the codec were in use, and a sender does not wait."""
    NO_BUFFER = "no_buffer"
    """No buffer was to be had within the pool's budget, and a sender does not wait."""
    FAILED = "failed"
    """The codec failed, such as for want of memory."""
    SLOWER = "slower"
    """``codec: auto`` found that it arrives sooner as it is; counted by the link."""
    SHARED_MEMORY = "shared_memory"
    """The peer is on this host and maps our memory; counted by the link."""
    PEER = "peer"
    """The peer does not know the codec; counted by the link."""
