"""`rallocator replay`: every file, every device, every policy."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rallocator._cli import report_file
from rallocator._cli.console import print_json, print_table, print_text, progress, warn
from rallocator._replay import Advice, MemoryState, ReplayResult, ReplayRow, ReplaySettings, replay_file
from rallocator._report import Frames, write_page
from rallocator._sizes import format_size
from rallocator.errors import RallocatorError, SnapshotError

LINE_WIDTH = 79
"""Columns of running text, so that it fits a terminal of 80."""

MOST_POOLS = 8
"""Pools of a state that are listed; the JSON has all."""


@dataclass(slots=True)
class Answer:
    """What came of all files."""

    results: list[ReplayResult] = field(default_factory=list)
    unreadable: int = 0
    """Files that could not be read. The others are answered all the same."""

    @property
    def fits(self) -> bool:
        """Whether each history runs to its end without a failed allocation under one of its policies at least."""
        return all(result.fits for result in self.results if result.replayable)

    @property
    def unproven(self) -> list[ReplayResult]:
        """The results that hold no history, so that nothing tells whether it fits."""
        return [result for result in self.results if not result.replayable]


def run(
    files: Sequence[Path], settings: ReplaySettings, *, as_json: bool, page: Path | None = None, frames: str = "base"
) -> Answer:
    """Replay files and print what came of it.

    Arguments:
        files: the recordings.
        settings: how to replay them.
        as_json: whether to print JSON.
        page: where to write a report, if one is wanted.
        frames: how much of recorded stacks the report shows.

    Raises:
        RallocatorError: the report cannot be written. Unless that is known before the replays, the figures are printed.
    """
    if page is not None:
        report_file.check(page, files)
    for key in settings.without_effect:
        warn(f"the setting {key} has no effect on a replay")
    answer = Answer()
    with progress("Replaying", len(files)) as file_done:
        for file in files:
            try:
                keep_frames = page is not None and frames != "none"
                result = replay_file(file, settings, keep_frames=keep_frames)
                answer.results.append(result if page else result.without_steps())
            except SnapshotError as error:
                answer.unreadable += 1
                warn(f"{os.fspath(file)}: {error}")
            file_done()
    failure: RallocatorError | None = None
    if page is not None and answer.results:
        try:
            report_file.write(page, write_page(answer.results, Frames(frames)))
            warn(f"wrote {os.fspath(page)}")
        except RallocatorError as error:
            failure = error
    _print(answer, settings, as_json=as_json)
    if settings.budget_bytes is not None:
        for result in answer.unproven:
            row, budget = result.rows[0], format_size(settings.budget_bytes)
            warn(f"{row.file}: nothing tells whether it fits in {budget}: {row.reason} (docs/guard-memory-in-ci.md)")
    if failure is not None:
        raise failure
    return answer


def _print(answer: Answer, settings: ReplaySettings, *, as_json: bool) -> None:
    if as_json:
        print_json([row for result in answer.results for row in result.to_json()])
        return
    for number, result in enumerate(answer.results):
        if number:
            print_text("")
        print_rows(result.rows, settings, result.advice)


def groups(rows: Sequence[ReplayRow]) -> dict[tuple[str, int], list[ReplayRow]]:
    """Return the rows of each device of each file."""
    found: dict[tuple[str, int], list[ReplayRow]] = {}
    for row in rows:
        found.setdefault((row.file, row.device), []).append(row)
    return found


def print_rows(
    rows: Sequence[ReplayRow],
    settings: ReplaySettings | None = None,
    advice: Mapping[int, Sequence[Advice]] | None = None,
) -> None:
    """Print a table for each device of each file.

    Arguments:
        rows: what to print.
        settings: what was asked for, if more than the figures of a plain replay.
        advice: what is to be said about each device.
    """
    tables = groups(rows)
    several_devices = {file for file, device in tables if device > 0}
    for number, ((file, device), group) in enumerate(tables.items()):
        if number:
            print_text("")
        name = f"{file}, device {device}" if file in several_devices else file
        if group[0].replayable:
            _print_figures(name, group, settings)
            for one in (advice or {}).get(device, ()):
                _print_advice(one)
        else:
            print_text(f"{name}: cannot be replayed: {group[0].reason}")
            if group[0].state is not None:
                _print_state(group[0].state)


def _print_figures(name: str, rows: Sequence[ReplayRow], settings: ReplaySettings | None) -> None:
    first = rows[0]
    with_minimum = settings is not None and settings.minimum
    most = max(row.peak_allocated or 0 for row in rows)
    print_text(f"{name}: {first.events:,} events, peak allocated {_size(most)}")
    figures = ("reserved", "utilization", "failed", "retries", "waits", "fits in" if with_minimum else "driver time")
    recorded = [_recorded(first)] if first.recorded_peak_reserved else []
    columns = [("policy", "name"), *((heading, "figure") for heading in figures)]
    print_table(columns, [*recorded, *(_cells(row, with_minimum=with_minimum) for row in rows)])
    if settings is not None and settings.budget_bytes is not None:
        fitting = [row.policy for row in rows if row.ooms == 0]
        budget = format_size(settings.budget_bytes)
        print_text(f"Fits in {budget} under {', '.join(fitting)}." if fitting else f"Does not fit in {budget}.")


def _print_advice(advice: Advice) -> None:
    finding, *remedies = advice.lines()
    print_text("")
    print_text(*textwrap.wrap(finding, LINE_WIDTH))
    for remedy in remedies:
        print_text(*textwrap.wrap(remedy, LINE_WIDTH, initial_indent="- ", subsequent_indent="  "))


def _print_state(state: MemoryState) -> None:
    print_text(
        f"In the end {format_size(state.reserved)} were reserved and {format_size(state.allocated)} allocated;",
        f"{format_size(state.pending)} were pending on other streams, and {format_size(state.free)} free.",
    )
    if state.free:
        print_text(
            f"The largest free block has {format_size(state.largest_free)}: "
            f"{state.fragmentation or 0:.1%} of the free memory is elsewhere."
        )
    figures = ("reserved", "allocated", "pending", "free", "largest free")
    columns = [("pool", "name"), ("stream", "figure"), *((heading, "figure") for heading in figures)]
    shown = state.pools[:MOST_POOLS]
    print_table(
        columns,
        [
            (
                "default" if pool.pool == (0, 0) else f"{pool.pool[0]},{pool.pool[1]}",
                pool.stream,
                *(_size(size) for size in (pool.reserved, pool.allocated, pool.pending, pool.free, pool.largest_free)),
            )
            for pool in shown
        ],
    )
    if len(state.pools) > len(shown):
        print_text(f"… and {len(state.pools) - len(shown)} smaller pools.")


def _cells(row: ReplayRow, *, with_minimum: bool) -> list[str]:
    last = _size(row.minimum_budget) or "nothing" if with_minimum else f"{(row.driver_time_us or 0) / 1000:,.0f} ms"
    return [
        row.policy,
        _size(row.peak_reserved),
        _percent(row.utilization),
        f"{row.ooms:,}",
        f"{row.retries:,}",
        f"{row.host_waits:,}",
        last,
    ]


def _recorded(row: ReplayRow) -> list[str]:
    """Return the line of what the recording itself shows, which is less than a replay does."""
    utilization = (row.peak_allocated or 0) / (row.recorded_peak_reserved or 1)
    return ["(recorded)", _size(row.recorded_peak_reserved), _percent(utilization), "", "", "", ""]


def _size(size_bytes: int | None) -> str:
    return "" if size_bytes is None else format_size(size_bytes)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
