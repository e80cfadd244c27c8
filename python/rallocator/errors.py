"""The exceptions that rallocator raises.

All of them are a `RallocatorError`. Running out of GPU memory in a tensor operation is not among them: that is
`torch.OutOfMemoryError`, as with torch's own allocator.
"""

from __future__ import annotations

__all__ = [
    "BridgeError",
    "ConfigError",
    "ForkError",
    "InvariantError",
    "NoGpuError",
    "NotEnabledError",
    "OutOfMemoryError",
    "RaceError",
    "RallocatorError",
    "SnapshotError",
    "TooLateError",
    "TorchNotSupportedError",
    "UnmappedAccessError",
    "UseAfterFreeError",
]


class RallocatorError(Exception):
    """The base of all of rallocator's exceptions."""


class TooLateError(RallocatorError):
    """`enable` was called after torch had chosen its CUDA allocator for good.

    torch does so when it initialises CUDA, for which any call that reaches the GPU is enough.
    """


class ForkError(RallocatorError):
    """The process was forked from one that had initialised CUDA, so it cannot use the GPU at all."""


class NoGpuError(RallocatorError):
    """There is no NVIDIA GPU that this process could use, or no driver for it."""


class TorchNotSupportedError(RallocatorError):
    """torch is missing, older than 2.9, or built without CUDA."""


class NotEnabledError(RallocatorError):
    """Something was asked of the allocator before `enable` had installed it."""


class ConfigError(RallocatorError, ValueError):
    """A setting has an unknown name or a value out of its range, or contradicts one that is already in force."""


class BridgeError(RallocatorError):
    """The bridge, the second way to attach to torch, could not be built or loaded."""


class SnapshotError(RallocatorError):
    """A file is not a readable memory snapshot of torch."""


class OutOfMemoryError(RallocatorError, MemoryError):
    """A device has too little memory for a request made outside torch, for instance on a `SimulatedGpu`."""


class InvariantError(RallocatorError):
    """The allocator's own full check found a contradiction in its state: a bug in rallocator."""


class RaceError(RallocatorError):
    """On a `SimulatedGpu`, two uses of the same memory by different allocations were not ordered."""


class UseAfterFreeError(RallocatorError):
    """On a `SimulatedGpu`, a program used an allocation that it had freed."""


class UnmappedAccessError(RallocatorError):
    """On a `SimulatedGpu`, a kernel touched memory that was not mapped when it ran."""
