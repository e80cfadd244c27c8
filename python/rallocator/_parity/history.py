"""Recording what happens to memory, and pictures of it, with the arguments that torch's C++ side takes."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from rallocator import _core
from rallocator._parity import state

_WITH_HOST_MEMORY = (2, 14)
_CONTEXTS = (None, "state", "alloc", "all")
_STACKS = ("python", "all")
_warned: set[str] = set()


def record(*args: Any) -> None:
    """`torch._C._cuda_record_memory_history(enabled, context, stacks, max_entries, clear_history, ...)`.

    Raises:
        RuntimeError: an argument has none of the values that torch documents.
    """
    enabled, context, stacks, max_entries, forget = args[:5]
    _expect("enabled", enabled, (None, "state", "all"))
    _expect("context", context, _CONTEXTS)
    _expect("stacks", stacks, _STACKS)
    _record(enabled is not None, context, 1 if enabled == "state" else max_entries, forget, args[5:])


def record_legacy(*args: Any) -> None:
    """`torch._C._cuda_record_memory_history_legacy(enabled, record_context, max_entries, ...)`."""
    enabled, record_context, max_entries, alloc_context, _with_cpp, forget = args[:6]
    context = "alloc" if alloc_context else "state" if record_context else None
    _record(bool(enabled), context, max_entries, forget, args[6:])


def is_enabled(*_args: Any) -> bool:
    """`torch._C._cuda_isHistoryEnabled()`."""
    return _core._is_recording()


def snapshot(*args: Any) -> dict[str, Any]:
    """`torch._C._cuda_memorySnapshot(which)`.

    Of everything for None and (0, 0), else of the pool with this id. From torch 2.11 on the id may be followed by
    whether the events are wanted too.
    """
    which = args[0] if args else None
    pool = None if which is None or tuple(which[:2]) == (0, 0) else (int(which[0]), int(which[1]))
    with_events = which is None or len(which) < 3 or bool(which[2])
    picture = _core._snapshot(pool=pool, events=with_events)
    if not with_events:
        picture["device_traces"] = []
    if state.release() >= _WITH_HOST_MEMORY:
        picture.update(host_segments=[], host_traces=[])
    return picture


def allocation_traceback(*args: Any) -> list[dict[str, Any]] | None:
    """`torch._C._cuda_allocationTraceback(address)`."""
    return _core._allocation_stack(int(args[0]))


def set_metadata(*args: Any) -> None:
    """`torch._C._cuda_setMemoryMetadata(text)`: a label for the events of the calling thread."""
    _core._set_label(args[0])


def get_metadata(*_args: Any) -> str:
    """`torch._C._cuda_getMemoryMetadata()`."""
    return _core._label()


def is_metadata_supported(*_args: Any) -> bool:
    """`torch._C._cuda_memoryMetadataSupported()`."""
    return True


def annotate(*args: Any) -> None:
    """`torch._C._cuda_annotateMemory(address, text)`: an event of its own."""
    _core._annotate(int(args[0]), args[1])


def attach_out_of_memory_observer(*args: Any) -> None:
    """`torch._C._cuda_attach_out_of_memory_observer(observer)`.

    The observer is called with the device's index and three numbers of bytes: what was asked for, what the device has
    (or what this process may reserve of it), and what the driver has free. It runs before the error is raised, under
    no lock. What it raises is printed, and the error for the request stays the same.
    """
    observer: Callable[[int, int, int, int], object] = args[0]
    if not callable(observer):
        raise TypeError(f"an observer has to be callable, and {observer!r} is not")
    _core._attach_out_of_memory_observer(observer)


def _record(enabled: bool, context: str | None, max_entries: int, forget: bool, rest: Sequence[Any]) -> None:
    """Record as told; `rest` begins with the two options that both forms have."""
    compile_context, annotations, skipped, with_host, with_cuda = (*rest, *_DEFAULTS[len(rest) :])
    if enabled and with_host:
        _warn_once("record_pinned_host_memory: pinned host memory is not in rallocator's snapshots")
    if enabled and (compile_context or annotations):
        _warn_once("compile_context and global_record_annotations: rallocator's snapshots have neither")
    if not with_cuda:
        return
    _core._record_history(
        limit=max(1, min(int(max_entries), sys.maxsize)) if enabled else None,
        stacks=context or "none",
        skipped=list(skipped or ()),
        forget=bool(forget),
    )


_DEFAULTS: tuple[Any, ...] = (False, False, (), False, True)
"""Of compile_context, global_record_annotations, skip_actions, record_pinned_host_memory and record_cuda."""


def _expect(name: str, value: object, accepted: tuple[str | None, ...]) -> None:
    if value not in accepted:
        listed = ", ".join(map(repr, accepted))
        raise RuntimeError(f"{name} must be one of {listed}, not {value!r}")


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, UserWarning, stacklevel=6)
