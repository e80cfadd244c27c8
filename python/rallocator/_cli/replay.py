"""`rallocator replay`: every file, every device, every policy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rallocator._cli.console import print_json, print_table, print_text, progress, warn
from rallocator._replay import ReplayJob, ReplayRow, ReplaySettings, jobs
from rallocator._sizes import format_size
from rallocator.errors import SnapshotError


def run(
    files: Sequence[Path],
    *,
    policies: Sequence[str],
    budget: str | None,
    config: str | None,
    streams: str,
    lag_ms: float,
    as_json: bool,
) -> int:
    """Replay files and print what came of it.

    Returns:
        How many files could not be read. The others are answered all the same.
    """
    settings = ReplaySettings.check(policies, budget, config, streams, lag_ms)
    for key in settings.without_effect:
        warn(f"the setting {key} has no effect on a replay")
    rows: list[ReplayRow] = []
    unreadable = 0
    with progress("Replaying", len(files)) as file_done:
        for file in files:
            try:
                found: list[ReplayJob] = jobs(file, settings)
                rows += [job.run() for job in found]
            except SnapshotError as error:
                unreadable += 1
                warn(f"{os.fspath(file)}: {error}")
            file_done()
    if as_json:
        print_json([row.to_json() for row in rows])
    else:
        print_rows(rows)
    return unreadable


def print_rows(rows: Sequence[ReplayRow]) -> None:
    """Print a table for each device of each file."""
    tables: dict[tuple[str, int], list[ReplayRow]] = {}
    for row in rows:
        tables.setdefault((row.file, row.device), []).append(row)
    several_devices = {file for file, device in tables if device > 0}
    for number, ((file, device), group) in enumerate(tables.items()):
        if number:
            print_text("")
        first = group[0]
        name = f"{file}, device {device}" if file in several_devices else file
        if not first.replayable:
            print_text(f"{name}: cannot be replayed: {first.reason}")
            continue
        print_text(f"{name}: {first.events:,} events, peak allocated {_size(first.peak_allocated)}")
        figures = ("reserved", "utilization", "failed", "retries", "waits", "driver time")
        recorded = [_recorded(first)] if first.recorded_peak_reserved else []
        columns = [("policy", "name"), *((heading, "figure") for heading in figures)]
        print_table(columns, [*recorded, *map(_cells, group)])


def _cells(row: ReplayRow) -> list[str]:
    return [
        row.policy,
        _size(row.peak_reserved),
        _percent(row.utilization),
        f"{row.ooms:,}",
        f"{row.retries:,}",
        f"{row.host_waits:,}",
        f"{(row.driver_time_us or 0) / 1000:,.0f} ms",
    ]


def _recorded(row: ReplayRow) -> list[str]:
    """Return the line of what the recording itself shows, which is less than a replay does."""
    utilization = (row.peak_allocated or 0) / (row.recorded_peak_reserved or 1)
    return ["(recorded)", _size(row.recorded_peak_reserved), _percent(utilization), "", "", "", ""]


def _size(size_bytes: int | None) -> str:
    return "" if size_bytes is None else format_size(size_bytes)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
