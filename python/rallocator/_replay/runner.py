"""Replays the histories of a file, policy by policy."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rallocator import _core
from rallocator._replay.history import History, Streams, histories
from rallocator._replay.result import ReplayResult, ReplayRow
from rallocator._replay.snapshot import read_snapshot
from rallocator._sizes import parse_size
from rallocator.errors import ConfigError, RallocatorError

POLICIES = ("native", "expandable", "rallocator")
"""The policies that a history can be replayed under."""

DEFAULT_LAG_MS = 20.0
"""How long after it was queued work is taken to end: a training step's worth of kernels in front of the GPU."""

DECIDED_ELSEWHERE = frozenset({"policy", "per_process_memory_fraction", "history_limit", "peers"})
"""Settings that are the replay's own business: the policy is named for each, and a budget is its memory limit."""

MAX_LAG_MS = 1e9
"""The longest lag that is accepted, about eleven days."""


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """How histories are replayed, checked."""

    policies: tuple[str, ...]
    budget_bytes: int | None
    config: str
    streams: Streams
    lag_us: int
    without_effect: tuple[str, ...]
    """Keys of `config` that a replay does not look at."""

    @staticmethod
    def check(
        policies: Sequence[str],
        budget: int | str | None,
        config: str | None,
        streams: str,
        lag_ms: float,
    ) -> ReplaySettings:
        """Check what a user asked for; see `replay` for the arguments and errors."""
        names = [policies] if isinstance(policies, str) else list(policies)
        unknown = [name for name in names if name not in POLICIES]
        if unknown or not names:
            named = repr(unknown[0]) if unknown else "none"
            raise ConfigError(f"policy {named} cannot be replayed; choose from {', '.join(POLICIES)}")
        if streams not in {choice.value for choice in Streams}:
            raise ConfigError(f"streams is keep or merge, not {streams!r}")
        if not (math.isfinite(lag_ms) and 0 <= lag_ms <= MAX_LAG_MS):
            raise ConfigError(f"the lag is between 0 and {MAX_LAG_MS:.0f} ms, not {lag_ms}")
        try:
            budget_bytes = None if budget is None else parse_size(budget)
        except ValueError as error:
            raise ConfigError(f"budget: {error}") from error
        parsed = _core.parse_config(config or "")
        without_effect = (*parsed.inert, *(key for key, _ in parsed.given if key in DECIDED_ELSEWHERE))
        unique = tuple(dict.fromkeys(names))
        lag_us = round(lag_ms * 1000)
        return ReplaySettings(unique, budget_bytes, config or "", Streams(streams), lag_us, without_effect)


@dataclass(frozen=True, slots=True)
class ReplayJob:
    """One device's history to be replayed under one policy."""

    file: str
    history: History
    policy: str
    settings: ReplaySettings

    def run(self) -> ReplayRow:
        """Replay it. Other Python threads run meanwhile."""
        history = self.history
        row = ReplayRow(
            self.file,
            history.device,
            self.policy,
            replayable=history.reason is None,
            reason=history.reason,
            events=history.events,
            recorded_peak_reserved=history.recorded_peak_reserved,
        )
        if history.reason is not None:
            return row
        steps = history.steps
        try:
            figures = _core.replay(
                kinds=steps.kinds,
                allocations=steps.allocations,
                sizes=steps.sizes,
                streams=steps.streams,
                pools=steps.pools,
                times_us=steps.times_us,
                uses_end_us=steps.uses_end_us,
                policy=self.policy,
                config=self.settings.config,
                budget_bytes=self.settings.budget_bytes,
                lag_us=self.settings.lag_us,
            )
        except RuntimeError as error:
            raise RallocatorError(
                f"a defect of rallocator: replaying {self.file}, device {history.device}, under {self.policy}: {error}"
            ) from error
        return dataclasses.replace(row, **figures)


def jobs(path: str | os.PathLike[str], settings: ReplaySettings) -> list[ReplayJob]:
    """Read a file and return what there is to replay: each device's history under each policy.

    Raises:
        SnapshotError: the file is unreadable, damaged, or no snapshot.
    """
    found = histories(read_snapshot(Path(path)), settings.streams)
    return [ReplayJob(os.fspath(path), history, policy, settings) for history in found for policy in settings.policies]


def replay(
    path: str | os.PathLike[str],
    policies: Sequence[str] = POLICIES,
    budget: int | str | None = None,
    *,
    config: str | None = None,
    streams: str = "keep",
    lag_ms: float = DEFAULT_LAG_MS,
) -> ReplayResult:
    """Replay a recorded history on a simulated GPU, with the allocator's own code.

    Only the recorded allocations and frees count, not what torch's allocator did to serve them. Blocks that are older
    than the recording are placed first. Needs no GPU and no torch.

    Arguments:
        path: a memory snapshot of torch (`torch.cuda.memory._dump_snapshot`), plain, gzip or xz.
        policies: the policies to replay under: "native" (torch's default rules), "expandable" (torch's rules for
            expandable segments), "rallocator" (our own, the default).
        budget: bytes that may be reserved, as a number or as text such as "24GiB"; what goes beyond is out of memory.
            Like torch's own limit, "expandable" may exceed it by less than a handle of 20 MiB. None: as much as it
            takes. Allocations that failed in the recording are tried only under a budget.
        config: more settings, in the grammar of `PYTORCH_CUDA_ALLOC_CONF`; its policy does not count.
        streams: "keep" the recorded streams, or "merge" them into one.
        lag_ms: milliseconds after it was queued that work is taken to end. A block that another stream used too is
            reusable from the recorded completion of its free on, whatever the lag.

    Returns:
        A row of figures for each device of the file under each policy. A file that holds a state but no history gives
        rows with `replayable` False and the reason.

    Raises:
        SnapshotError: the file is unreadable, damaged, or no snapshot.
        ConfigError: a policy, budget, setting or option that there is not.
    """
    settings = ReplaySettings.check(policies, budget, config, streams, lag_ms)
    return ReplayResult(tuple(job.run() for job in jobs(path, settings)))
