"""Replays the histories of a file, policy by policy."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rallocator import _core
from rallocator._replay.history import History, histories
from rallocator._replay.reader import read_recording
from rallocator._replay.row import ReplayRow
from rallocator._replay.settings import ReplaySettings
from rallocator._replay.steps import Kind
from rallocator.errors import RallocatorError

MOST_GUESSES = 16
"""Replays that are spent on finding out what a recording began with; most take two or three …"""

MOST_GUESSED_STEPS = 3_000_000
"""… and steps of all of them together, so that a large recording is not kept waiting for seconds."""

_FIGURES = {field.name for field in dataclasses.fields(ReplayRow)}


@dataclass(frozen=True, slots=True)
class Subject:
    """One device's history, with its steps packed for the core, and how it is to be replayed."""

    file: str
    history: History
    settings: ReplaySettings
    steps: _core.ReplaySteps | None
    """None where there is nothing to replay."""

    def asked(self, policy: str, **changes: int | str | None) -> dict[str, Any]:
        """Return how to replay under a policy, as the core takes it, with some of it changed."""
        settings = self.settings
        return {
            "policy": policy,
            "config": settings.config,
            "budget_bytes": settings.budget_bytes,
            "lag_us": settings.lag_us,
            "handle_granularity_bytes": settings.handle_bytes,
            "empty_cache_before": None,
            "late_from": None,
            # What there was in the beginning is known of the recorded policy only, and under its own settings.
            "with_layout": policy == self.history.recorded_policy and not settings.config.strip(),
            **changes,
        }

    def figures(
        self, policy: str, steps: _core.ReplaySteps | None = None, **changes: int | str | None
    ) -> dict[str, Any]:
        """Replay under a policy, and return the core's figures. Other Python threads run meanwhile.

        Arguments:
            policy: which.
            steps: other steps than those of the history.
            changes: what is to differ from the settings, by the core's names.
        """
        steps = steps or self.steps
        if steps is None:
            raise ValueError(f"{self.file}, device {self.history.device}, cannot be replayed")
        try:
            return steps.replay(self.asked(policy, **changes))
        except RuntimeError as error:
            raise self._defect(policy, error) from error

    def row(self, policy: str) -> ReplayRow:
        """Replay under a policy, and look for the smallest budget if that is asked for."""
        history = self.history
        row = ReplayRow(
            self.file,
            history.device,
            policy,
            replayable=history.reason is None,
            reason=history.reason,
            events=history.events,
            recorded_peak_reserved=history.recorded_peak_reserved,
            state=history.state,
        )
        if self.steps is None:
            return row
        figures = {name: figure for name, figure in self.figures(policy).items() if name in _FIGURES}
        if self.settings.minimum:
            figures["minimum_budget"] = self.minimum_budget(policy)
        return dataclasses.replace(row, **figures)

    def minimum_budget(self, policy: str) -> int | None:
        """Return the smallest budget under which no allocation fails; None if there is none."""
        if self.steps is None:
            return None
        try:
            return self.steps.minimum_budget(self.asked(policy))
        except RuntimeError as error:
            raise self._defect(policy, error) from error

    def _defect(self, policy: str, error: RuntimeError) -> RallocatorError:
        place = f"{self.file}, device {self.history.device}, under {policy}"
        return RallocatorError(f"a defect of rallocator: replaying {place}: {error}")


def subjects(path: str | os.PathLike[str], settings: ReplaySettings, *, keep_frames: bool = False) -> list[Subject]:
    """Read a file and return what there is to replay, device by device.

    Raises:
        SnapshotError: the file is unreadable, damaged, or of no known kind.
    """
    recording = read_recording(Path(path), settings.max_size_bytes, keep_frames=keep_frames)
    found = histories(recording, settings.streams)
    # What was read may be large, and is needed no more.
    del recording
    return [_subject(os.fspath(path), history, settings) for history in found]


def _subject(file: str, history: History, settings: ReplaySettings) -> Subject:
    if history.reason is not None:
        return Subject(file, history, settings, None)
    subject = Subject(file, history, settings, history.steps.packed())
    return dataclasses.replace(subject, steps=_after_beginning(subject)) if history.layout else subject


def _after_beginning(subject: Subject) -> _core.ReplaySteps | None:
    """Return the steps after the memory that the recording began with.

    Of some segments it is not clear whether they were there, or were obtained for the first allocation in them. So they
    are taken to be new; where a replay needs no new memory for that allocation, the segment must have been there.
    """
    history, steps = subject.history, subject.steps
    if steps is None:
        return None
    places = enumerate(zip(history.steps.kinds, history.steps.allocations, strict=True))
    step_of = {allocation: step for step, (kind, allocation) in places if kind == Kind.ALLOCATE}
    old: set[int] = set()
    for _ in range(max(2, min(MOST_GUESSES, MOST_GUESSED_STEPS // len(steps)))):
        layout = [
            (one.segment.size, stream, pool, one.pieces)
            for one, stream, pool in history.layout
            if one.doubt is None or one.doubt in old
        ]
        steps = steps.after(layout)
        grown = set(steps.growth(subject.asked(history.recorded_policy, budget_bytes=None)))
        doubts = {one.doubt for one, _, _ in history.layout if one.doubt is not None} - old
        there = {doubt for doubt in doubts if step_of[doubt] not in grown}
        if not there:
            break
        old |= there
    return steps


def replay_subjects(found: Sequence[Subject]) -> list[ReplayRow]:
    """Replay each history under each policy, as many at a time as there are processors."""
    jobs = [(subject, policy) for subject in found for policy in subject.settings.policies]
    with ThreadPoolExecutor(max_workers=max(1, min(len(jobs), os.cpu_count() or 1))) as pool:
        return list(pool.map(lambda job: job[0].row(job[1]), jobs))
