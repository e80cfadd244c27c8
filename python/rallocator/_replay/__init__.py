"""Replays recorded histories of allocations under other policies and budgets, without a GPU.

`reader` reads a file of any known format into a `recording`, `history` turns it into steps, the core
(`crates/alloc-core/src/replay.rs`) takes them, `advice` says what is to be learned, and `result` is what comes back.
"""

from __future__ import annotations

from rallocator._replay.advice import Advice, Remedy
from rallocator._replay.history import Streams
from rallocator._replay.result import ReplayResult, replay, replay_file
from rallocator._replay.row import ReplayRow
from rallocator._replay.runner import Subject
from rallocator._replay.settings import DEFAULT_LAG_MS, POLICIES, ReplaySettings
from rallocator._replay.state import MemoryState, PoolState

__all__ = [
    "DEFAULT_LAG_MS",
    "POLICIES",
    "Advice",
    "MemoryState",
    "PoolState",
    "Remedy",
    "ReplayResult",
    "ReplayRow",
    "ReplaySettings",
    "Streams",
    "Subject",
    "replay",
    "replay_file",
]
