"""Replays recorded histories of allocations under other policies and budgets, without a GPU.

`reader` reads a file of any known format into a `recording`, `history` turns it into steps, the core
(`crates/alloc-core/src/replay.rs`) takes them, and `result` is what comes back.
"""

from __future__ import annotations

from rallocator._replay.history import Streams
from rallocator._replay.result import ReplayResult, ReplayRow
from rallocator._replay.runner import Subject, replay, replay_subjects, subjects
from rallocator._replay.settings import DEFAULT_LAG_MS, POLICIES, ReplaySettings
from rallocator._replay.state import MemoryState, PoolState

__all__ = [
    "DEFAULT_LAG_MS",
    "POLICIES",
    "MemoryState",
    "PoolState",
    "ReplayResult",
    "ReplayRow",
    "ReplaySettings",
    "Streams",
    "Subject",
    "replay",
    "replay_subjects",
    "subjects",
]
