"""Asking the allocator about memory: rallocator's own functions, which need no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from rallocator import _core, _torch
from rallocator.errors import NotEnabledError

if TYPE_CHECKING:
    from torch.cuda import MemPool


def stats(device: int | None = None) -> dict[str, int]:
    """The statistics of a device.

    Arguments:
        device: the device's index. None: torch's current device if torch has initialised CUDA, else 0.

    Returns:
        The statistics by their names in `torch.cuda.memory_stats()`, flat with dots, sorted by name: counts, and for
        names with "bytes" in them, bytes. For instance "allocated_bytes.all.peak" or "num_ooms". Empty in a forked
        child of a process that had used the GPU.

    Raises:
        NotEnabledError: `rallocator.enable()` has not been called.
    """
    _check_installed("stats")
    return _core._stats(_index(device))


def reset_peak_stats(device: int | None = None) -> None:
    """Set the peaks in the statistics of a device to the present values.

    Arguments:
        device: the device's index. None: torch's current device if torch has initialised CUDA, else 0.

    Raises:
        NotEnabledError: `rallocator.enable()` has not been called.
    """
    _check_installed("reset_peak_stats")
    _core._reset_peak_stats(_index(device))


def snapshot() -> dict[str, Any]:
    """A picture of all memory, in the layout of `torch.cuda.memory._snapshot()`.

    Returns:
        A dictionary with "segments" (one for each piece of memory obtained from the driver, with the list of its
        "blocks"), "device_traces" (for each device the list of recorded events) and "allocator_settings". Sizes are
        in bytes, times in microseconds. Pickled into a file it opens in https://pytorch.org/memory_viz and in
        `rallocator replay`.

    Raises:
        NotEnabledError: `rallocator.enable()` has not been called.
    """
    _check_installed("snapshot")
    return _core._snapshot()


def empty_cache() -> None:
    """Give cached memory back to the driver, so that other programs can use it.

    Raises:
        NotEnabledError: `rallocator.enable()` has not been called.
        RallocatorError: the driver refused.
    """
    _check_installed("empty_cache")
    _core._empty_cache()


def restrict_moves(
    pool: MemPool | tuple[int, int], moving: Literal["off", "contiguous"], device: int | None = None
) -> None:
    """Keep the memory of a private pool at its address, where the setting `move` lets all other memory change it.

    For what another library registers, with a network card or a communicator: that is the physical memory. Say it
    before the first allocation from the pool, and on each device that the pool is used on. It holds for as long as the
    pool lives. Pools that the program makes itself need the bridge.

    Arguments:
        pool: a `torch.cuda.MemPool`, or the pair of numbers that is its `id`.
        moving: "off": memory stays at its address until it goes back to the driver. "contiguous": nor is a block put
            together from several pieces of physical memory. The stricter of this and the setting counts.
        device: the index of the pool's device. None: torch's current device if torch has initialised CUDA, else 0.

    Raises:
        NotEnabledError: `rallocator.enable()` has not been called.
        RallocatorError: there is no such pool on the device; it has memory already; or it is to be contiguous under the
            policy "expandable", which puts blocks together.
        ValueError: `moving` is another word.
    """
    _check_installed("restrict_moves")
    first, second = pool if isinstance(pool, tuple) else pool.id
    _core._restrict_moves(_index(device), (first, second), moving)


def _check_installed(function: str) -> None:
    if not _core._is_installed():
        raise NotEnabledError(
            f"rallocator.{function}() needs an allocator, and none is in use: call rallocator.enable() first."
        )


def _index(device: int | None) -> int:
    return _torch.current_device() if device is None else device
