"""A caching allocator for GPU memory, written in Rust, that PyTorch loads in place of its own.

    import torch
    import rallocator

    rallocator.enable()

Importing this package loads neither torch nor CUDA.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from rallocator import errors
from rallocator._attach import attached, enable, is_enabled
from rallocator._config import Config
from rallocator._core import __version__
from rallocator._memory import empty_cache, reset_peak_stats, restrict_moves, snapshot, stats

if TYPE_CHECKING:
    from rallocator import testing
    from rallocator._replay import ReplayResult, replay

__all__ = [
    "Config",
    "ReplayResult",
    "__version__",
    "attached",
    "empty_cache",
    "enable",
    "errors",
    "is_enabled",
    "replay",
    "reset_peak_stats",
    "restrict_moves",
    "snapshot",
    "stats",
    "testing",
]


def __getattr__(name: str) -> object:
    # Loaded at their first use: a training script needs neither, and should not pay for them at its start.
    if name == "testing":
        return importlib.import_module("rallocator.testing")
    if name in ("replay", "ReplayResult"):
        return getattr(importlib.import_module("rallocator._replay"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
