"""Recordings that begin in the middle of a run: what was there is found out, and replays land on what was recorded."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

import rallocator
from rallocator._replay import POLICIES, ReplaySettings, replay_file
from rallocator._replay.history import histories
from rallocator._replay.layout import Piece
from rallocator._replay.reader import read_recording
from rallocator.testing import SimulatedGpu
from tests.histories import (
    GIB,
    MIB,
    PUBLIC,
    PUBLIC_NAMES,
    event,
    free,
    load,
    needs_public_histories,
    segment,
    write,
    write_history,
)


def recorded_peak(segments: list[dict[str, Any]], trace: list[dict[str, Any]]) -> int:
    """Bytes reserved at most, walked back from the final segments."""
    changes = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
    reserved: int = sum(one["total_size"] for one in segments)
    peak = reserved
    for entry in reversed(trace):
        reserved -= changes.get(entry["action"], 0) * entry["size"]
        peak = max(peak, reserved)
    return peak


def without_head(snapshot: dict[str, Any], share: float, path: Path) -> tuple[Path, int]:
    """The snapshot without the first events and without any of segments, and the peak that it really had since."""
    (trace, *_) = snapshot["device_traces"]
    rest = trace[int(share * len(trace)) :]
    blocks = [entry for entry in rest if not entry["action"].startswith("segment_")]
    bare = {"segments": copy.deepcopy(snapshot["segments"]), "device_traces": [blocks]}
    return write(path, bare), recorded_peak(snapshot["segments"], rest)


@pytest.mark.parametrize("share", [0.0, 1 / 3, 1 / 2, 3 / 4, 0.9])
@pytest.mark.parametrize("name", ["gpt_varlen", "lora_checkpoint", "kv_decode", "moe", "frames", "fsdp1_streams"])
def test_native_lands_on_the_recorded_peak_wherever_the_recording_begins(
    name: str, share: float, tmp_path: Path
) -> None:
    path, peak = without_head(load(name), share, tmp_path / "history")
    (row,) = rallocator.replay(path, ["native"]).rows
    assert row.peak_reserved == pytest.approx(peak, rel=0.005)


@pytest.mark.parametrize("share", [0.0, 1 / 3, 1 / 2, 3 / 4])
def test_expandable_lands_on_it_within_the_recorded_limit(share: float, tmp_path: Path) -> None:
    path, peak = without_head(load("expandable_capped"), share, tmp_path / "history")
    (row,) = rallocator.replay(path, ["expandable"], "23.9GiB").rows
    assert row.peak_reserved == pytest.approx(peak, rel=0.005)


@pytest.mark.parametrize("budget", [None, "15.8GiB"])
@pytest.mark.parametrize("share", [0.0, 0.1, 1 / 3, 1 / 2, 3 / 4, 0.95])
def test_so_does_what_ran_into_a_limit(share: float, budget: str | None, tmp_path: Path) -> None:
    path, peak = without_head(load("oom_fragmented"), share, tmp_path / "history")
    (row,) = rallocator.replay(path, ["native"], budget).rows
    assert row.peak_reserved == pytest.approx(peak, rel=0.005)


def test_a_range_begins_with_the_memory_that_there_was(tmp_path: Path) -> None:
    # 60 MiB are mapped in the end: nobody used the middle, and the last third is first used in the recording.
    base = 1 << 41
    run = segment(
        base,
        (16 * MIB, "active_allocated"),
        (24 * MIB, "inactive"),
        (20 * MIB, "active_allocated"),
        is_expandable=True,
        segment_type="large",
    )
    events = [event("alloc", base + 40 * MIB, 20 * MIB, 1), event("alloc", 1 << 20, 512), *free(1 << 20, 512)]
    path = write_history(tmp_path / "range", events, [run])
    (history,) = histories(read_recording(path))
    ((found, _, _),) = history.ranges
    assert [(extent.size, extent.doubt is None) for extent in found.extents] == [(40 * MIB, True), (20 * MIB, False)]
    assert found.pieces(()) == [(16 * MIB, 2, True), (24 * MIB, None, True)]
    (row,) = rallocator.replay(path, ["expandable"]).rows
    assert row.peak_reserved == 62 * MIB


@needs_public_histories
@pytest.mark.parametrize("share", [0.0, 1 / 3, 1 / 2, 3 / 4])
@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_public_recordings_land_on_it_too(name: str, share: float, tmp_path: Path) -> None:
    import lzma

    snapshot = pickle.loads(lzma.decompress((PUBLIC / f"{name}.pickle.xz").read_bytes()))  # noqa: S301 — known files.
    path, peak = without_head(snapshot, share, tmp_path / "history")
    (row,) = rallocator.replay(path, ["native"]).rows
    assert row.peak_reserved == pytest.approx(peak, rel=0.005)


# What is found out.


def layout_of(path: Path) -> list[tuple[int, list[Piece], bool]]:
    """Segments that may have been there: bytes, pieces, whether it is certain."""
    (history,) = histories(read_recording(path))
    return [(one.segment.size, one.pieces, one.doubt is None) for one, _, _ in history.layout]


OLD = segment(1 << 40, (30 * MIB, "active_allocated"), (10 * MIB, "inactive"), (24 * MIB, "active_allocated"))


def test_older_blocks_lie_where_they_lay(tmp_path: Path) -> None:
    events = [*free((1 << 40) + 40 * MIB, 24 * MIB - 700, 5), event("alloc", 1 << 20, 512, 6), *free(1 << 20, 512, 7)]
    blocks = segment(1 << 40, (30 * MIB, "active_allocated"), (34 * MIB, "inactive"))
    ((size, pieces, certain),) = layout_of(write_history(tmp_path / "h", events, [blocks]))
    assert (size, certain) == (64 * MIB, True)
    # The 188 bytes beyond the rounded request are too few to be a block of their own.
    assert [(piece, allocation is None) for piece, allocation in pieces] == [
        (30 * MIB, False),
        (10 * MIB, True),
        (24 * MIB, False),
    ]


def test_a_segment_without_an_event_was_there(tmp_path: Path) -> None:
    events = [event("alloc", 1 << 20, 512), *free(1 << 20, 512)]
    idle = segment(1 << 41, (40 * MIB, "inactive"), stream=7)
    assert layout_of(write_history(tmp_path / "h", events, [OLD, idle]))[1] == (40 * MIB, [(40 * MIB, None)], True)
    result = rallocator.replay(tmp_path / "h")
    assert result.row("native").peak_reserved == 106 * MIB
    assert result.row("rallocator").peak_reserved == 56 * MIB, "other policies begin with what is in use"


def test_a_segment_that_its_first_allocation_may_have_asked_for_is_in_doubt(tmp_path: Path) -> None:
    fresh = segment(1 << 41, (40 * MIB, "inactive"))
    others = segment(1 << 42, (60 * MIB, "inactive"))
    events = [event("alloc", 1 << 41, 39 * MIB, 1), *free(1 << 41, 39 * MIB, 2)]
    events += [event("alloc", 1 << 42, 20 * MIB, 3), *free(1 << 42, 20 * MIB, 4)]
    path = write_history(tmp_path / "h", events, [OLD, fresh, others])
    assert [certain for _, _, certain in layout_of(path)] == [True, False, True]


def test_a_recording_that_begins_with_the_program_begins_with_nothing(tmp_path: Path) -> None:
    events = [event("alloc", 1 << 41, 40 * MIB, 1), *free(1 << 41, 40 * MIB, 2)]
    assert layout_of(write_history(tmp_path / "h", events, [segment(1 << 41, (40 * MIB, "inactive"))])) == []


def test_what_cannot_have_been_is_left_to_the_requests(tmp_path: Path) -> None:
    overlapping = segment((1 << 40) + MIB, (40 * MIB, "inactive"))
    events = [event("alloc", 1 << 20, 512), *free(1 << 20, 512)]
    path = write_history(tmp_path / "h", events, [OLD, overlapping])
    assert layout_of(path) == []
    expandable = segment(1 << 41, (40 * MIB, "active_allocated"), is_expandable=True)
    assert layout_of(write_history(tmp_path / "e", events, [OLD, expandable])) == []


def test_an_older_block_that_no_final_segment_can_have_held_lay_in_one_that_went(tmp_path: Path) -> None:
    wide = [*free(1 << 40, GIB, 1), event("alloc", 1 << 20, 512), *free(1 << 20, 512)]
    path = write_history(tmp_path / "w", wide, [segment(1 << 40, (30 * MIB, "inactive"))])
    assert layout_of(path) == [(GIB, [(GIB, 0)], True)]
    (row, *_) = rallocator.replay(path).rows
    assert row.peak_reserved == 1026 * MIB


def test_it_counts_under_the_recorded_policy_and_its_own_settings_only(tmp_path: Path) -> None:
    events = [event("alloc", 1 << 20, 512), *free(1 << 20, 512)]
    idle = segment(1 << 41, (400 * MIB, "inactive"))
    path = write_history(tmp_path / "h", events, [OLD, idle])
    reserved = {row.policy: row.peak_reserved for row in rallocator.replay(path).rows}
    assert reserved["native"] == 466 * MIB
    assert max(reserved["expandable"] or 0, reserved["rallocator"] or 0) <= 100 * MIB
    for options in ({"config": "max_split_size_mb:100"}, {"streams": "merge"}, {"budget": "200MiB"}):
        (row,) = rallocator.replay(path, ["native"], **options).rows  # type: ignore[arg-type]
        assert row.peak_reserved == 56 * MIB, options
        assert row.ooms == 0


def test_a_report_shows_what_there_was_in_the_beginning(tmp_path: Path) -> None:
    path, _ = without_head(load("frames"), 0.5, tmp_path / "history")
    (subject,) = replay_file(path, ReplaySettings.check(POLICIES)).subjects
    assert subject.steps is not None
    for policy in POLICIES:
        asked = subject.asked(policy)
        timeline = subject.steps.timeline(asked)
        picture = subject.steps.state_after(1, asked)
        reserved = sum(size for _, size, _ in picture)
        (first, *_) = memoryview(timeline["level_reserved"]).cast("Q")
        assert first == reserved
        assert (reserved > 7 * GIB) == (policy == "native")


# Who recorded it.


@pytest.mark.parametrize("policy", POLICIES)
def test_our_own_recordings_are_judged_by_the_policy_that_they_name(policy: str, tmp_path: Path) -> None:
    gpu = SimulatedGpu(capacity="8GiB", config=f"policy:{policy},history_limit:100")
    kept = gpu.malloc(30 * MIB)
    gpu.free(gpu.malloc(50 * MIB))
    result = replay_file(write(tmp_path / "own", gpu.snapshot()), ReplaySettings.check(POLICIES))
    assert result.subjects[0].history.recorded_policy == policy
    row = result.row(policy)
    assert row.replayable
    assert row.peak_reserved == row.recorded_peak_reserved
    gpu.free(kept)
    gpu.close()


@pytest.mark.parametrize(
    ("settings", "policy"),
    [
        ({"expandable_segments": True}, "expandable"),
        ({"expandable_segments": False}, "native"),
        ({"expandable_segments": "yes"}, "native"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "policy:rallocator", "expandable_segments": True}, "rallocator"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,policy:native", "expandable_segments": True}, "native"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "policy:expandable,move:off"}, "expandable"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "policy:new", "expandable_segments": True}, "expandable"),
        ({"PYTORCH_CUDA_ALLOC_CONF": ["policy:rallocator"]}, "native"),
        ([], "native"),
    ],
)
def test_settings_of_the_recording_tell_its_policy(settings: Any, policy: str, tmp_path: Path) -> None:
    traces = [[event("alloc", 64), *free(64)]]
    path = write(tmp_path / "h", {"segments": [], "device_traces": traces, "allocator_settings": settings})
    (history,) = histories(read_recording(path))
    assert history.recorded_policy == policy
