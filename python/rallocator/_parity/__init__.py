"""What torch's own memory functions need to work with rallocator.

torch's interface for allocators from outside has no hook for statistics, history, snapshots and some more: there its
functions raise, or quietly answer nothing. (Through the bridge torch asks rallocator itself, so next to nothing is
replaced there.) But torch's Python functions look up what they call on `torch._C` each time,
so replacing those few names there makes every public function above them work. All that is replaced is in `TABLE`.

Two things are between C++ and C++, out of Python's reach: cuDNN's benchmark asks for the largest free block, and the
profiler wants to be told of memory. For those see `_core._answer_cache_info` and `_core._tell_profiler`.

A replacement takes `*args`, so that it survives the next argument that torch adds, and is a function object of its own:
`torch.compile` tells functions apart by their identity.
"""

from __future__ import annotations

import atexit
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from rallocator import _core, _torch
from rallocator._parity import history, sharing, state, statistics
from rallocator._parity import settings as settings_module
from rallocator.errors import RallocatorError


@dataclass(frozen=True)
class Replacement:
    """One name of torch's that is replaced, and why."""

    name: str
    """The name on its owner."""
    function: Callable[..., object]
    """What takes its place."""
    why: str
    """What happens without, and what needs it."""
    since: tuple[int, int] = _torch.OLDEST_SUPPORTED
    """The first release of torch that has the name."""
    until: tuple[int, int] | None = None
    """The first release that no longer has it; None if all do."""
    owner: str = "_C"
    """Where the name is looked up: an attribute of the module `torch`."""
    is_for_bridge: bool = False
    """Whether torch's own function does not work through the bridge either."""

    def belongs_to(self, release: tuple[int, int]) -> bool:
        """Whether a release of torch should have the name."""
        return self.since <= release and (self.until is None or release < self.until)


_RAISES = "raises RuntimeError: "
_ASKS_NATIVE = "asks torch's own allocator, which is not in use: "

TABLE = (
    Replacement("_cuda_memoryStats", statistics.memory_stats, _RAISES + "all statistics of torch.cuda"),
    Replacement("_cuda_resetPeakMemoryStats", statistics.reset_peak, _RAISES + "reset_peak_memory_stats"),
    Replacement(
        "_cuda_resetAccumulatedMemoryStats",
        statistics.reset_accumulated,
        _RAISES + "reset_accumulated_memory_stats",
    ),
    Replacement("_cuda_getMemoryFraction", statistics.memory_fraction, _RAISES + "get_per_process_memory_fraction"),
    Replacement(
        "_accelerator_isAllocatorInitialized",
        statistics.accelerator_is_initialized,
        _ASKS_NATIVE + "everything of torch.accelerator.memory",
    ),
    Replacement(
        "_accelerator_getDeviceStats",
        statistics.accelerator_stats,
        _ASKS_NATIVE + "all statistics of torch.accelerator",
    ),
    Replacement(
        "_accelerator_resetPeakStats",
        statistics.accelerator_reset_peak,
        _ASKS_NATIVE + "torch.accelerator.reset_peak_memory_stats",
    ),
    Replacement(
        "_accelerator_resetAccumulatedStats",
        statistics.accelerator_reset_accumulated,
        _ASKS_NATIVE + "torch.accelerator.reset_accumulated_memory_stats",
    ),
    Replacement(
        "_accelerator_emptyCache", statistics.accelerator_empty_cache, _ASKS_NATIVE + "torch.accelerator.empty_cache"
    ),
    Replacement("_cuda_record_memory_history", history.record, _RAISES + "memory._record_memory_history"),
    Replacement(
        "_cuda_record_memory_history_legacy", history.record_legacy, _RAISES + "the same with a bool as first argument"
    ),
    Replacement("_cuda_isHistoryEnabled", history.is_enabled, _RAISES + "recordings of torch.compile's graph trees"),
    Replacement("_cuda_memorySnapshot", history.snapshot, _RAISES + "memory_snapshot, _snapshot, _dump_snapshot"),
    Replacement(
        "_cuda_attach_out_of_memory_observer",
        history.attach_out_of_memory_observer,
        _RAISES + "programs that dump a snapshot when memory runs out",
    ),
    Replacement(
        "_cuda_setMemoryMetadata",
        history.set_metadata,
        "does nothing: memory._set_memory_metadata",
        since=(2, 10),
    ),
    Replacement(
        "_cuda_getMemoryMetadata",
        history.get_metadata,
        "is always empty: memory._get_memory_metadata",
        since=(2, 10),
    ),
    Replacement(
        "_cuda_allocationTraceback",
        history.allocation_traceback,
        "answers None: memory._allocation_traceback",
        since=(2, 12),
    ),
    Replacement(
        "_cuda_memoryMetadataSupported",
        history.is_metadata_supported,
        "answers False: memory._memory_metadata_supported",
        since=(2, 14),
    ),
    Replacement(
        "_cuda_annotateMemory",
        history.annotate,
        "does nothing: memory._annotate_tensor",
        since=(2, 14),
    ),
    Replacement(
        "_cuda_cudaCachingAllocator_set_allocator_settings",
        settings_module.set_cuda_settings,
        "changes torch's own allocator, which is not in use: memory._set_allocator_settings",
        until=(2, 10),
        is_for_bridge=True,
    ),
    Replacement(
        "_accelerator_setAllocatorSettings",
        settings_module.set_accelerator_settings,
        "changes torch's own allocator, which is not in use: memory._set_allocator_settings",
        since=(2, 10),
        is_for_bridge=True,
    ),
    Replacement(
        "_share_cuda_",
        sharing.share_storage,
        _RAISES + "sending CUDA tensors to other processes, without a way out",
        owner="UntypedStorage",
    ),
)
"""Every name that is replaced."""


@dataclass(frozen=True)
class Installed:
    """What `install` came to."""

    replaced: tuple[str, ...]
    """The names that are replaced, in the order of the table."""
    lacking: tuple[Replacement, ...]
    """What this release of torch should have and does not."""


def install(torch: ModuleType, config: str, *, is_bridge: bool = False) -> Installed:
    """Replace the names, check each, and say what this torch lacks.

    Arguments:
        torch: the imported module, with rallocator as its allocator.
        config: the settings in force, as the core reads them.
        is_bridge: whether torch calls rallocator through the bridge, where nearly all of its own functions work.

    Returns:
        What was replaced. For what is lacking there was one warning.

    Raises:
        RallocatorError: torch did not take a replacement.
    """
    release = _torch.release(torch.__version__)
    expected = [
        replacement
        for replacement in TABLE
        if replacement.belongs_to(release) and (replacement.is_for_bridge or not is_bridge)
    ]
    state.begin(torch, release, config)
    replaced, lacking = [], []
    for replacement in expected:
        owner = getattr(torch, replacement.owner, None)
        if owner is None or not hasattr(owner, replacement.name):
            lacking.append(replacement)
            continue
        _replace(owner, replacement)
        replaced.append(replacement.name)
    _forget_compilers_rules()
    # Python's threads must not be waited for once it is ending, and taking a call stack would.
    atexit.register(_core._stop_taking_stacks)
    missing = [f"{replacement.name} ({replacement.why})" for replacement in lacking]
    if not is_bridge and not _core._answer_cache_info():
        missing.append(f"CUDAPluggableAllocator::cacheInfo ({_RAISES}torch.backends.cudnn.benchmark)")
    if not is_bridge and not _core._tell_profiler():
        missing.append("c10::reportMemoryUsageToProfiler (shows no memory: torch.profiler with profile_memory=True)")
    if missing:
        warnings.warn(
            f"This torch ({torch.__version__}) is built in a way that rallocator does not know, so some of torch's "
            f"functions may not work with it: {'; '.join(missing)}. Please report it.",
            RuntimeWarning,
            stacklevel=5,
        )
    return Installed(tuple(replaced), tuple(lacking))


def _forget_compilers_rules() -> None:
    """Have `torch.compile` look the names up anew, if it was imported before and so has found what torch had there."""
    rules = getattr(sys.modules.get("torch._dynamo.trace_rules"), "get_torch_obj_rule_map", None)
    if (forget := getattr(rules, "cache_clear", None)) is not None:
        forget()


def _replace(owner: Any, replacement: Replacement) -> None:
    state.originals[replacement.name] = getattr(owner, replacement.name)
    setattr(owner, replacement.name, replacement.function)
    if getattr(owner, replacement.name) is not replacement.function:
        raise RallocatorError(
            f"torch did not take rallocator's {replacement.name}, without which {replacement.why}. "
            "Restart this process without rallocator, and please report this."
        )
