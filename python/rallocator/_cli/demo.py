"""`rallocator demo`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from rallocator import _demo
from rallocator._cli.console import print_json, print_table, print_text, progress, warn
from rallocator._cli.replay import print_rows
from rallocator._replay import ReplayRow
from rallocator._sizes import format_size
from rallocator.errors import SnapshotError


def run(history: Path | None, *, as_json: bool) -> None:
    """Show a training on the GPU; without one, or with a history given, its replay."""
    if history is None:
        try:
            with progress("Training", len(_demo.ALLOCATORS)) as step_done:
                trainings = _demo.train(step_done)
        except _demo.NoTrainingError as reason:
            warn(f"no training on a GPU, since {reason}; a recorded history on a simulated GPU instead")
        else:
            _show_training(trainings, as_json=as_json)
            return
    _show_replay(history, as_json=as_json)


def _show_training(trainings: Sequence[_demo.Training], *, as_json: bool) -> None:
    if as_json:
        print_json([training.to_json() for training in trainings])
        return
    figures = ("allocated", "reserved", "utilization", "time")
    columns = [("allocator", "name"), *((heading, "figure") for heading in figures)]
    rows = [
        (
            training.allocator,
            format_size(training.peak_allocated),
            format_size(training.peak_reserved),
            f"{training.peak_allocated / training.peak_reserved:.1%}",
            f"{training.seconds:.1f} s",
        )
        for training in trainings
    ]
    print_table(columns, rows, "A short training on this GPU, once under each allocator:")


def _show_replay(history: Path | None, *, as_json: bool) -> None:
    try:
        with progress("Replaying", 1):
            rows: Sequence[ReplayRow] = _demo.replay_history(history).rows
    except SnapshotError as error:
        raise SnapshotError(f"{os.fspath(history or _demo.HISTORY)}: {error}") from error
    if history is None:
        rows = [dataclasses.replace(row, file=_demo.HISTORY.name) for row in rows]
    if as_json:
        print_json([{"kind": "replay", **row.to_json()} for row in rows])
        return
    if history is None:
        print_text(
            "A language model being fine-tuned, recorded on an H200 under torch's default",
            "allocator, and replayed on a simulated GPU. What a policy reserves it takes",
            "from the GPU:",
            "",
        )
    print_rows(rows)
    for device in dict.fromkeys(row.device for row in rows):
        print_saving([row for row in rows if row.device == device])


def print_saving(rows: Sequence[ReplayRow]) -> None:
    """Print a sentence about the policy that takes least, if it takes less than was recorded."""
    best = min(rows, key=lambda row: row.peak_reserved or 0)
    recorded, reserved = best.recorded_peak_reserved, best.peak_reserved
    if recorded and reserved and reserved < recorded:
        text = (
            f"Under {best.policy} the same program takes {format_size(reserved)} in place of {format_size(recorded)}."
        )
        print_text("", text)
