"""Replays recorded histories of torch's allocator under other policies and budgets, without a GPU.

`snapshot` reads a file, `history` turns it into steps, the core (`crates/alloc-core/src/replay.rs`) takes them, and
`result` is what comes back.
"""

from __future__ import annotations

from rallocator._replay.history import Streams
from rallocator._replay.result import ReplayResult, ReplayRow
from rallocator._replay.runner import DEFAULT_LAG_MS, POLICIES, ReplayJob, ReplaySettings, jobs, replay

__all__ = [
    "DEFAULT_LAG_MS",
    "POLICIES",
    "ReplayJob",
    "ReplayResult",
    "ReplayRow",
    "ReplaySettings",
    "Streams",
    "jobs",
    "replay",
]
