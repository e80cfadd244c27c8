"""The allocators that the benches compare: how each is chosen, and where its statistics are read.

An allocator is chosen for a whole process, before torch has touched CUDA; torch reads its own settings while it is
imported. So `install` comes before the first `import torch`, and this module imports torch only inside functions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Kind(str, Enum):
    """One allocator under test. The values are what the command lines take."""

    NATIVE = "native"
    EXPANDABLE = "expandable"
    ASYNC = "async"
    RALLOCATOR = "rallocator"
    RALLOCATOR_PLUGGABLE = "rallocator-pluggable"
    RALLOCATOR_BRIDGE = "rallocator-bridge"

    @property
    def is_rallocator(self) -> bool:
        """Whether the process runs on this project's allocator rather than on one of torch's."""
        return self.value.startswith("rallocator")


_ROUTES = {
    Kind.RALLOCATOR: "auto",
    Kind.RALLOCATOR_PLUGGABLE: "pluggable",
    Kind.RALLOCATOR_BRIDGE: "bridge",
}
"""The way into torch, by kind."""


@dataclass(frozen=True)
class Peaks:
    """Highest byte counts since the last reset, and two event counts since the process began."""

    allocated_bytes: int
    reserved_bytes: int
    active_bytes: int
    requested_bytes: int
    allocation_retries: int
    device_allocations: int

    @classmethod
    def from_statistics(cls, statistics: Mapping[str, int]) -> Peaks:
        """Pick the peaks out of flat statistics with torch's keys. cudaMallocAsync lacks some: they read 0."""
        return cls(
            allocated_bytes=statistics["allocated_bytes.all.peak"],
            reserved_bytes=statistics["reserved_bytes.all.peak"],
            active_bytes=statistics.get("active_bytes.all.peak", 0),
            requested_bytes=statistics.get("requested_bytes.all.peak", 0),
            allocation_retries=statistics.get("num_alloc_retries", 0),
            device_allocations=statistics.get("num_device_alloc", 0),
        )


@dataclass(frozen=True)
class Subject:
    """The allocator that this process runs on."""

    kind: Kind
    _statistics: Any
    """A module with torch's statistics functions, or ours."""

    def reset_peaks(self) -> None:
        """Start the peaks afresh from what is in use now."""
        if self.kind.is_rallocator:
            self._statistics.reset_peak_stats()
        else:
            self._statistics.reset_peak_memory_stats()

    def peaks(self) -> Peaks:
        """Read the peaks since the last reset."""
        if self.kind.is_rallocator:
            return Peaks.from_statistics(self._statistics.stats())
        return Peaks.from_statistics(self._statistics.memory_stats())


def install(kind: Kind) -> Subject:
    """Make `kind` this process's allocator. Call it before anything imports torch.

    Raises whatever `rallocator.enable` raises where the allocator cannot be attached.
    """
    if kind is Kind.EXPANDABLE:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    elif kind is Kind.ASYNC:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "backend:cudaMallocAsync"
    import torch

    if not kind.is_rallocator:
        return Subject(kind, torch.cuda)
    import rallocator

    rallocator.enable(attach=_ROUTES[kind])
    return Subject(kind, rallocator)
