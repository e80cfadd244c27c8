"""Replays the histories of a file, policy by policy."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from rallocator import _core
from rallocator._replay.emptied import NEVER_EMPTIED, Emptied, find_emptied
from rallocator._replay.history import History, histories
from rallocator._replay.reader import read_recording
from rallocator._replay.row import ReplayRow
from rallocator._replay.settings import ReplaySettings
from rallocator._replay.steps import Kind
from rallocator.errors import RallocatorError

MOST_GUESSES = 16
"""Replays that are spent on finding out what a recording began with; most take two or three …"""

MOST_GUESSED_STEPS = 3_000_000
"""… and steps of all of them together, so that a large recording is not kept waiting for seconds. As many again may be
spent on finding out when its cache was emptied, if anything shows that it was."""

Placed: TypeAlias = tuple[int, int, int, int, bool | None, list[tuple[int, int | None, bool]]]
"""A segment or range as `_core.ReplaySteps.after` takes it."""

_FIGURES = {field.name for field in dataclasses.fields(ReplayRow)}


@dataclass(frozen=True, slots=True)
class Subject:
    """One device's history, with its steps packed for the core, and how it is to be replayed."""

    file: str
    history: History
    settings: ReplaySettings
    steps: _core.ReplaySteps | None
    """None where there is nothing to replay."""
    emptied: Emptied = NEVER_EMPTIED
    """When the recorded program emptied its cache."""

    def asked(self, policy: str, **changes: int | str | list[int] | None) -> dict[str, Any]:
        """Return how to replay under a policy, as the core takes it, with some of it changed.

        Where the cache may have been emptied by the allocator itself, at a limit, only a replay of the recorded policy
        without a limit repeats it: within one the allocator does so by itself, and other policies at other times. When
        expandable segments gave memory back is not found out, so without a limit a replay of theirs would keep all
        holes that a limit left in the memory of the beginning, and add to them; it begins with the blocks alone.
        """
        settings = self.settings
        budget_bytes = changes.get("budget_bytes", settings.budget_bytes)
        is_recorded = policy == self.history.recorded_policy and not settings.config.strip()
        repeats = is_recorded and budget_bytes is None
        is_beyond = budget_bytes is None and self.history.gives_back
        return {
            "policy": policy,
            "config": settings.config,
            "budget_bytes": settings.budget_bytes,
            "lag_us": settings.lag_us,
            "handle_granularity_bytes": settings.handle_bytes,
            "empty_cache_before": list(self.emptied.by_anyone if repeats else self.emptied.by_program),
            "late_from": None,
            # What there was in the beginning is known of the recorded policy only, and under its own settings.
            "with_layout": is_recorded and not is_beyond,
            **changes,
        }

    def figures(
        self, policy: str, steps: _core.ReplaySteps | None = None, **changes: int | str | list[int] | None
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
    if history.begins_midway:
        subject = dataclasses.replace(subject, steps=_after_beginning(subject))
    return dataclasses.replace(subject, emptied=_emptied(subject))


def _most_runs(subject: Subject) -> int:
    steps = 0 if subject.steps is None else len(subject.steps)
    return max(2, min(MOST_GUESSES, MOST_GUESSED_STEPS // max(steps, 1)))


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
    extents = (extent for one, _, _ in history.ranges for extent in one.extents)
    maybe = itertools.chain((one.doubt for one, _, _ in history.layout), (extent.doubt for extent in extents))
    doubts = {doubt for doubt in maybe if doubt is not None}
    old: set[int] = set()
    asked = subject.asked(history.recorded_policy, budget_bytes=None, with_layout=True)
    for _ in range(_most_runs(subject)):
        steps = steps.after(_layout(history, old))
        grown = set(steps.growth(asked))
        doubts -= old
        there = {doubt for doubt in doubts if step_of[doubt] not in grown}
        if not there:
            break
        old |= there
    return _landing(subject, steps)


def _landing(subject: Subject, steps: _core.ReplaySteps) -> _core.ReplaySteps:
    """Return the steps after what lands better on the end, where expandable segments gave nothing back on the way.

    Then nothing more was ever reserved than in the end, as far as blocks tell. If with what surely was there a replay
    comes to something else, it may be that all was.
    """
    history = subject.history
    if not history.ranges or history.state is None or history.gives_back:
        return steps
    reserved = history.state.reserved
    asked = subject.asked(history.recorded_policy, budget_bytes=None)
    extents = (extent for one, _, _ in history.ranges for extent in one.extents)
    every = {extent.doubt for extent in extents if extent.doubt is not None}
    both = (steps, steps.after(_layout(history, every)))
    return min(both, key=lambda one: abs(one.replay(asked)["peak_reserved"] - reserved))


def _layout(history: History, old: Container[int]) -> list[Placed]:
    """Return the memory that the recording began with, as the core takes it.

    Arguments:
        history: the recording.
        old: of what is in doubt, the allocations whose memory was there.
    """
    segments: list[Placed] = [
        (one.segment.address, one.segment.size, stream, pool, None, [(*piece, True) for piece in one.pieces])
        for one, stream, pool in history.layout
        if one.doubt is None or one.doubt in old
    ]
    for one, stream, pool in history.ranges:
        if pieces := one.pieces(old):
            size = sum(size for size, _, _ in pieces)
            # Where a range lay is not asked for.
            segments.append((0, size, stream, pool, one.is_small, pieces))
    return segments


def _emptied(subject: Subject) -> Emptied:
    """Return when the recorded program emptied its cache."""
    history, steps = subject.history, subject.steps
    if steps is None or (history.places is None and not history.captures):
        return NEVER_EMPTIED
    asked = subject.asked(history.recorded_policy, budget_bytes=None)
    # Under other settings than the recorded ones blocks lie elsewhere.
    places = None if subject.settings.config.strip() else history.places
    return find_emptied(steps, asked, places, history.captures, MOST_GUESSED_STEPS)


def replay_subjects(found: Sequence[Subject]) -> list[ReplayRow]:
    """Replay each history under each policy, as many at a time as there are processors."""
    jobs = [(subject, policy) for subject in found for policy in subject.settings.policies]
    with ThreadPoolExecutor(max_workers=max(1, min(len(jobs), os.cpu_count() or 1))) as pool:
        return list(pool.map(lambda job: job[0].row(job[1]), jobs))
