"""Caches that a recorded program emptied, which no event of a block shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rallocator
from rallocator._replay import POLICIES, ReplaySettings, replay_file
from rallocator._replay.advice import WITHOUT_BEGINNING
from rallocator._replay.runner import Subject
from rallocator.testing import SimulatedGpu
from tests.histories import MIB, TRACES, event, free, load, segment, write, write_history
from tests.synthetic import recorded, told_peak
from tests.test_layout import recorded_peak, without_head

GRAPH, USERS = (1, 0), (0, 1)
"""A private pool that a capture began by itself, and one that was made before."""


def subject_of(path: Path, **options: Any) -> Subject:
    (subject,) = replay_file(path, ReplaySettings.check(POLICIES, **options)).subjects
    return subject


def reserved(path: Path, policy: str = "native", **options: Any) -> int | None:
    (row,) = rallocator.replay(path, [policy], **options).rows
    return row.peak_reserved


def at(address: int, mib: int, time_us: int = 0, **more: Any) -> dict[str, Any]:
    return event("alloc", address, mib * MIB, time_us, **more)


# A graph's capture.


def captured(pool: tuple[int, int]) -> list[dict[str, Any]]:
    """40 MiB are cached when a private pool is first used."""
    return [at(1 << 40, 40), *free(1 << 40, 40 * MIB), at(1 << 41, 30, pool_id=pool)]


def test_a_capture_was_preceded_by_an_emptied_cache(tmp_path: Path) -> None:
    path = write_history(tmp_path / "graph", captured(GRAPH))
    assert {policy: reserved(path, policy) for policy in POLICIES} == dict.fromkeys(POLICIES, 40 * MIB)


def test_a_pool_of_the_users_was_not(tmp_path: Path) -> None:
    assert reserved(write_history(tmp_path / "pool", captured(USERS))) == 70 * MIB


def test_a_capture_into_a_pool_that_is_older_than_the_recording_was_not(tmp_path: Path) -> None:
    old = segment(1 << 42, (20 * MIB, "active_allocated"), segment_pool_id=GRAPH)
    assert reserved(write_history(tmp_path / "old", captured(GRAPH), [old])) == 90 * MIB


def test_a_capture_is_not_believed_to_have_emptied_what_was_used_again_as_it_was(tmp_path: Path) -> None:
    events = [*captured(GRAPH), at(1 << 40, 24), at((1 << 40) + 24 * MIB, 16)]
    last = segment(1 << 41, (30 * MIB, "active_allocated"), segment_pool_id=GRAPH)
    assert reserved(write_history(tmp_path / "kept", events, [last])) == 70 * MIB


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 1 / 3, 0.5, 0.6, 0.75, 0.9])
def test_recorded_graphs_land_on_the_recorded_peak(share: float, tmp_path: Path) -> None:
    path, peak = without_head(load("graphs"), share, tmp_path / "graphs")
    assert reserved(path) == peak


# Anything else.


def test_a_block_where_cached_memory_would_not_have_put_it_tells_of_it(tmp_path: Path) -> None:
    events = [at(1 << 40, 40), *free(1 << 40, 40 * MIB), at(1 << 41, 30), at(1 << 42, 30)]
    path = write_history(tmp_path / "h", events, [segment(1 << 41, (30 * MIB, "active_allocated"))])
    assert reserved(path) == 60 * MIB
    same = [at(1 << 40, 40), *free(1 << 40, 40 * MIB), at(1 << 40, 30), at(1 << 42, 30)]
    last = segment(1 << 42, (30 * MIB, "active_allocated"))
    assert reserved(write_history(tmp_path / "same", same, [last])) == 70 * MIB
    assert reserved(write_history(tmp_path / "unknown", events)) == 70 * MIB, "the file shows no segment"


def test_a_limit_may_have_been_the_cause_and_is_not_repeated_where_there_is_another(tmp_path: Path) -> None:
    events = [at(1 << 40, 40), *free(1 << 40, 40 * MIB), at(1 << 41, 30)]
    path = write_history(tmp_path / "limit", events, [segment(1 << 41, (30 * MIB, "active_allocated"))])
    subject = subject_of(path)
    assert (subject.emptied.by_program, subject.emptied.by_anyone) == ((), (2,))
    assert subject.asked("native")["empty_cache_before"] == [2]
    assert subject.asked("native", budget_bytes=1 << 30)["empty_cache_before"] == []
    assert subject.asked("rallocator")["empty_cache_before"] == []


def test_other_settings_and_merged_streams_tell_nothing_of_it(tmp_path: Path) -> None:
    events = [at(1 << 40, 40), *free(1 << 40, 40 * MIB), at(1 << 41, 30), at(1 << 42, 30)]
    path = write_history(tmp_path / "h", events, [segment(1 << 41, (30 * MIB, "active_allocated"))])
    assert subject_of(path, config="max_split_size_mb:100").emptied.by_anyone == ()
    assert subject_of(path, streams="merge").emptied.by_anyone == ()


def test_advice_says_that_it_is_without_what_was_cached_at_the_beginning(tmp_path: Path) -> None:
    path, _ = without_head(load("frames"), 0.5, tmp_path / "cut")
    whole = rallocator.replay(TRACES / "frames.pickle.xz").advice[0]
    found = rallocator.replay(path).advice[0]
    assert found
    assert all(WITHOUT_BEGINNING in one.text for one in found)
    assert not any(WITHOUT_BEGINNING in one.text for one in whole)


# Programs that nobody wrote by hand.


@pytest.mark.parametrize("seed", range(16))
def test_native_lands_on_what_made_up_programs_reserved(seed: int, tmp_path: Path) -> None:
    snapshot = recorded(seed, "native", empties=seed % 4, streams=1 + seed % 3)
    path, peak = without_head(snapshot, 0, tmp_path / "h")
    assert reserved(path) == pytest.approx(peak, rel=0.005)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.75, 0.9])
@pytest.mark.parametrize("policy", ["native", "expandable"])
@pytest.mark.parametrize("seed", range(6))
def test_and_from_the_middle_of_their_run(seed: int, policy: str, share: float, tmp_path: Path) -> None:
    path, peak = without_head(recorded(seed, policy, streams=1 + seed % 3), share, tmp_path / "h")
    assert reserved(path, policy) == pytest.approx(peak, rel=0.005)


# What a file does not tell.


@pytest.mark.parametrize("policy", ["native", "expandable"])
def test_memory_that_was_idle_and_went_leaves_nothing_in_a_recording(policy: str, tmp_path: Path) -> None:
    """Two programs that reserved 900 and 100 MiB, and recordings of theirs that are the same but for segments."""
    files, peaks = [], []
    for idle in (0, 800):
        gpu = SimulatedGpu(capacity="8GiB", config=f"policy:{policy},history_limit:1000")
        kept = gpu.malloc(100 * MIB)
        if idle:
            gpu.free(gpu.malloc(idle * MIB))
        begin = len(gpu.snapshot()["device_traces"][0])
        gpu.empty_cache()
        gpu.free(gpu.malloc(4096))
        snapshot = gpu.snapshot()
        (trace, *_) = snapshot["device_traces"]
        for entry in trace:
            entry["time_us"] = 0
        rest = trace[begin:]
        peaks.append(recorded_peak(snapshot["segments"], rest))
        blocks = [entry for entry in rest if not entry["action"].startswith("segment_")]
        path = write(tmp_path / str(idle), {"segments": snapshot["segments"], "device_traces": [blocks]})
        files.append(path.read_bytes())
        gpu.free(kept)
        gpu.close()
    assert peaks[1] >= peaks[0] + 700 * MIB
    assert files[0] == files[1]


@pytest.mark.parametrize("share", [0.75, 0.9])
def test_a_recording_that_begins_after_the_last_use_of_what_went_shows_what_it_tells(
    share: float, tmp_path: Path
) -> None:
    snapshot = load("oom_fragmented")
    path, peak = without_head(snapshot, share, tmp_path / "h")
    told = told_peak(snapshot, int(share * len(snapshot["device_traces"][0])))
    assert reserved(path, budget="15.8GiB") == pytest.approx(told, rel=0.005)
    assert (told == peak) == (share == 0.75)
