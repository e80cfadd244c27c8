"""Statistics, in the shape that torch's C++ side answers them in."""

from __future__ import annotations

from functools import cache
from typing import Any

from rallocator import _core
from rallocator._parity import state

_WITH_REJECTIONS = (2, 12)
_WITH_PRIVATE_POOLS = (2, 13)


def memory_stats(*args: Any) -> dict[str, Any]:
    """`torch._C._cuda_memoryStats(device)`: a dictionary for each family, in it one for each pool, in it the kinds."""
    device = int(args[0])
    stats = _nest(_core._stats(device))
    if state.release() < _WITH_REJECTIONS:
        stats.pop("num_oom_rejections", None)
    if stats and state.release() >= _WITH_PRIVATE_POOLS:
        pools = _core._private_reserved(device)
        stats["reserved_bytes_by_private_pools"] = {pool: _nest(reserved) for pool, reserved in pools.items()}
    return stats


def reset_peak(*args: Any) -> None:
    """`torch._C._cuda_resetPeakMemoryStats(device)`."""
    _core._reset_peak_stats(int(args[0]))


def reset_accumulated(*args: Any) -> None:
    """`torch._C._cuda_resetAccumulatedMemoryStats(device)`."""
    _core._reset_accumulated_stats(int(args[0]))


def memory_fraction(*args: Any) -> float:
    """`torch._C._cuda_getMemoryFraction(device)`."""
    return _core._memory_fraction(int(args[0]))


def accelerator_is_initialized(*_args: Any) -> bool:
    """`torch._C._accelerator_isAllocatorInitialized()`: whether there may be statistics of a device."""
    return bool(state.torch_module().cuda.is_initialized())


def accelerator_stats(*args: Any) -> dict[str, Any]:
    """`torch._C._accelerator_getDeviceStats(device)`: without what only CUDA's allocator counts, in every release."""
    stats = _nest(_core._stats(int(args[0])))
    stats.pop("num_oom_rejections", None)
    return stats


def accelerator_reset_peak(*args: Any) -> None:
    """`torch._C._accelerator_resetPeakStats(device)`."""
    _core._reset_peak_stats(int(args[0]))


def accelerator_reset_accumulated(*args: Any) -> None:
    """`torch._C._accelerator_resetAccumulatedStats(device)`."""
    _core._reset_accumulated_stats(int(args[0]))


def accelerator_empty_cache(*_args: Any) -> None:
    """`torch._C._accelerator_emptyCache()`."""
    _core._empty_cache()


def _nest(flat: dict[str, int]) -> dict[str, Any]:
    """Turn keys with dots into dictionaries in dictionaries."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *path, last = _parts(key)
        inner = nested
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return nested


@cache
def _parts(key: str) -> tuple[str, ...]:
    return tuple(key.split("."))
