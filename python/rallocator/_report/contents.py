"""What a report shows of one device's history, worked out."""

from __future__ import annotations

import array
import base64
import enum
import json
import os
import sys
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from rallocator._replay import Advice, ReplayResult, ReplayRow, Subject
from rallocator._replay.steps import Kind, Steps
from rallocator._text import printable

MOST_HOLDERS = 20
"""Places that hold memory at the peak which are listed."""

MOST_FRAMES = 12
"""Frames of one stack that are shown, the innermost."""

MOST_NAME_CHARACTERS = 200

MOST_PATH_CHARACTERS = 4096
"""The longest path on Linux. Many stacks of a hostile file may share a name that takes long to split."""

SAMPLES = 24
"""Moments of the timeline that its table lists."""


class Frames(enum.Enum):
    """How much of the recorded stacks a report shows."""

    BASE = "base"
    """The names of files without their folders."""
    FULL = "full"
    """All that was recorded."""
    NONE = "none"
    """Nothing."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Memory that is held at the peak by one place of the program."""

    size: int
    count: int
    stack: tuple[str, ...]
    """Innermost first; empty where no stack was recorded."""


@dataclass(frozen=True, slots=True)
class Bin:
    """Requests of one range of sizes."""

    at_least: int
    below: int
    count: int
    size: int


@dataclass(frozen=True, slots=True)
class Sample:
    """How much there was after a step, under one policy."""

    step: int
    time_us: int
    allocated: int
    active: int
    reserved: int


@dataclass(frozen=True, slots=True)
class Contents:
    """All that is shown of one device's history."""

    rows: tuple[ReplayRow, ...]
    advice: tuple[Advice, ...]
    steps: int
    peak_step: int
    """After which the program holds most."""
    holders: tuple[Holder, ...]
    histogram: tuple[Bin, ...]
    samples: dict[str, list[Sample]]
    """By policy, at the same moments."""
    meta: str
    """For the script: JSON that says how the data are laid out."""
    data: str
    """Columns of numbers: compressed with zlib, as base64."""


def contents(result: ReplayResult, frames: Frames) -> list[Contents]:
    """Work out what is shown of each device of a file."""
    found = []
    for subject in result.subjects:
        rows = tuple(row for row in result.rows if row.device == subject.history.device)
        found.append(_contents(subject, rows, result.advice[subject.history.device], frames))
    return found


def _contents(subject: Subject, rows: tuple[ReplayRow, ...], advice: tuple[Advice, ...], frames: Frames) -> Contents:
    packed, steps = subject.steps, subject.history.steps
    if packed is None:
        return Contents(rows, advice, 0, 0, (), (), {}, "", "")
    policies = [row.policy for row in rows]
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        timelines = list(pool.map(lambda policy: packed.timeline(subject.asked(policy)), policies))
    held = array.array("Q", packed.held())
    peak_step = max(range(len(held)), key=held.__getitem__) if held else 0
    samples = {policy: _samples(timeline, steps) for policy, timeline in zip(policies, timelines, strict=True)}
    meta, data = _packed(policies, timelines, steps, peak_step)
    return Contents(
        rows,
        advice,
        len(held),
        peak_step,
        tuple(_holders(steps, peak_step, subject.history.frames, frames)),
        tuple(_histogram(steps)),
        samples,
        meta,
        data,
    )


def _samples(timeline: dict[str, bytes], steps: Steps) -> list[Sample]:
    level_steps = array.array("I", timeline["level_step"])
    levels = [array.array("Q", timeline[f"level_{name}"]) for name in ("allocated", "active", "reserved")]
    count = len(steps.kinds)
    found: list[Sample] = []
    at = -1
    for step in sorted({round(number * (count - 1) / (SAMPLES - 1)) for number in range(SAMPLES)} if count else ()):
        while at + 1 < len(level_steps) and level_steps[at + 1] <= step:
            at += 1
        allocated, active, reserved = (level[at] if at >= 0 else 0 for level in levels)
        found.append(Sample(step, steps.times_us[step], allocated, active, reserved))
    return found


def _histogram(steps: Steps) -> Iterable[Bin]:
    counts: dict[int, list[int]] = {}
    for kind, size in zip(steps.kinds, steps.sizes, strict=True):
        if kind == Kind.ALLOCATE and size > 0:
            entry = counts.setdefault(size.bit_length() - 1, [0, 0])
            entry[0] += 1
            entry[1] += size
    for power in range(min(counts, default=0), max(counts, default=-1) + 1):
        count, size = counts.get(power, (0, 0))
        yield Bin(1 << power, 2 << power, count, size)


def _holders(steps: Steps, peak_step: int, stacks: Sequence[object], frames: Frames) -> Iterable[Holder]:
    """Return who holds memory after the peak's step, the largest first."""
    live: dict[int, int] = {}
    for kind, allocation, size in zip(
        steps.kinds[: peak_step + 1], steps.allocations[: peak_step + 1], steps.sizes[: peak_step + 1], strict=True
    ):
        if kind == Kind.ALLOCATE:
            live[allocation] = size
        elif kind != Kind.TRY:
            live.pop(allocation, None)
    # Blocks of which nobody knows by whom they were allocated are told apart by their size.
    groups: dict[tuple[tuple[str, ...], int], list[int]] = {}
    for allocation, size in live.items():
        stack = _stack(stacks[allocation], frames) if stacks and frames is not Frames.NONE else ()
        groups.setdefault((stack, 0 if stack else size), []).append(size)
    holders = [Holder(sum(sizes), len(sizes), stack) for (stack, _), sizes in groups.items()]
    return sorted(holders, key=lambda holder: (-holder.size, holder.stack))[:MOST_HOLDERS]


def _stack(recorded: object, frames: Frames) -> tuple[str, ...]:
    """Return a stack as lines of text. What a damaged file has in its place is left out."""
    if not isinstance(recorded, list | tuple):
        return ()
    lines = []
    for frame in recorded[:MOST_FRAMES]:
        if isinstance(frame, dict):
            name, file, line = frame.get("name"), frame.get("filename"), frame.get("line")
            if isinstance(name, str) and isinstance(file, str):
                end = file[-MOST_PATH_CHARACTERS:]
                place = file if frames is Frames.FULL else PurePosixPath(PureWindowsPath(end).name).name
                number = f":{line}" if type(line) is int and 0 < line < 1 << 31 else ""
                lines.append(f"{_short(name)} at {_short(place)}{number}")
    return tuple(lines)


def _short(text: str) -> str:
    shown = printable(text[:MOST_NAME_CHARACTERS])
    return shown + "…" if len(text) > MOST_NAME_CHARACTERS else shown


_WIDE = (
    "block_address",
    "block_size",
    "segment_address",
    "segment_size",
    "level_active",
    "level_allocated",
    "level_reserved",
)
"""Columns that have 64 bits in the core, and are floating-point numbers for the script: exact below 2⁵³."""

_NARROW = ("block_begin", "block_end", "block_freed", "level_step", "segment_begin", "segment_end")


def _packed(
    policies: Sequence[str], timelines: Sequence[dict[str, bytes]], steps: Steps, peak_step: int
) -> tuple[str, str]:
    """Lay all columns out one after another: the wide ones first, so that each begins where its width asks for."""
    parts: list[bytes] = []
    length = 0

    def add(numbers: array.array[Any]) -> tuple[int, int]:
        nonlocal length
        if sys.byteorder == "big":
            numbers.byteswap()
        parts.append(numbers.tobytes())
        place = length, len(numbers)
        length += len(parts[-1])
        return place

    layout: list[dict[str, Any]] = [{"name": policy} for policy in policies]
    times = add(array.array("d", steps.times_us))
    for entry, timeline in zip(layout, timelines, strict=True):
        for name in _WIDE:
            entry[name] = add(array.array("d", array.array("Q", timeline[name])))
    for entry, timeline in zip(layout, timelines, strict=True):
        for name in _NARROW:
            entry[name] = add(array.array("I", timeline[name]))
    meta = {"steps": len(steps.kinds), "peak": peak_step, "times": times, "policies": layout}
    compressed = zlib.compress(b"".join(parts), 6)
    return json.dumps(meta, separators=(",", ":")), base64.b64encode(compressed).decode("ascii")
