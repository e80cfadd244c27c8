"""Replaying recorded histories: the figures that torch itself had, and what must not change them."""

from __future__ import annotations

import bisect
import collections
import copy
import dataclasses
import functools
import itertools
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rallocator
from rallocator._replay import ReplayResult, ReplayRow, Streams
from rallocator._replay.history import STATE_ONLY, histories
from rallocator._replay.reader import read_recording
from rallocator._replay.steps import Kind
from rallocator.errors import ConfigError, SnapshotError
from tests.histories import (
    GIB,
    MIB,
    PUBLIC,
    PUBLIC_NAMES,
    TRACES,
    event,
    free,
    load,
    needs_public_histories,
    segment,
    write,
    write_history,
)

HISTORIES = (
    "gpt_varlen",
    "lora_checkpoint",
    "kv_decode",
    "moe",
    "unet_varsize",
    "frames",
    "fsdp1_streams",
    "graphs",
    "oom_fragmented",
    "expandable_capped",
)

FIELDS = {
    "schema",
    "file",
    "device",
    "policy",
    "replayable",
    "reason",
    "events",
    "peak_requested",
    "peak_allocated",
    "peak_active",
    "peak_reserved",
    "peak_device",
    "utilization",
    "ooms",
    "retries",
    "host_waits",
    "host_wait_us",
    "gpu_waits",
    "driver_calls",
    "driver_time_us",
    "handles_moved",
    "peak_address_bytes",
    "minimum_budget",
    "recorded_peak_reserved",
}


@functools.cache
def replayed(name: str, **options: Any) -> dict[str, ReplayRow]:
    """The rows of a real history, by policy."""
    rows = rallocator.replay(TRACES / f"{name}.pickle.xz", **options).rows
    return {row.policy: row for row in rows}


def only_row(path: Path, policy: str = "native", **options: Any) -> ReplayRow:
    (row,) = rallocator.replay(path, [policy], **options).rows
    return row


def number(value: float | None) -> int | float:
    assert value is not None
    return value


# What torch itself had.


@pytest.mark.parametrize(
    "name", ["gpt_varlen", "lora_checkpoint", "kv_decode", "moe", "unet_varsize", "frames", "fsdp1_streams"]
)
def test_native_reserves_what_torch_reserved_when_it_recorded(name: str) -> None:
    row = replayed(name)["native"]
    assert number(row.peak_reserved) == pytest.approx(row.recorded_peak_reserved, rel=0.005)


@pytest.mark.parametrize(
    ("name", "measured_gib"), [("gpt_varlen", 15.43), ("lora_checkpoint", 28.09), ("kv_decode", 20.69), ("moe", 3.04)]
)
def test_expandable_reserves_what_was_measured_on_a_gpu(name: str, measured_gib: float) -> None:
    assert number(replayed(name)["expandable"].peak_reserved) / GIB == pytest.approx(measured_gib, rel=0.01)


def test_expandable_under_a_budget_does_what_torch_did() -> None:
    row = replayed("expandable_capped", budget="23.9GiB")["expandable"]
    recorded = load("expandable_capped")["device_traces"][0]
    maps, unmaps = (sum(entry["action"] == f"segment_{kind}" for entry in recorded) for kind in ("map", "unmap"))
    assert number(row.peak_reserved) == pytest.approx(23.55 * GIB, rel=0.005)
    assert row.ooms == 0
    assert row.retries == 28
    assert row.driver_calls is not None
    assert row.driver_calls["cuMemSetAccess"] == pytest.approx(maps, rel=0.05)
    assert row.driver_calls["cuMemUnmap"] == pytest.approx(unmaps, rel=0.05)


def test_a_fragmentation_failure_is_native_only() -> None:
    rows = replayed("oom_fragmented", budget="15.8GiB")
    assert rows["native"].ooms == 1
    assert rows["expandable"].ooms == 0
    assert replayed("oom_fragmented")["native"].ooms == 0, "without a budget, what failed is not tried"


@pytest.mark.parametrize("name", HISTORIES)
def test_the_allocator_and_the_simulated_gpu_count_the_same(name: str) -> None:
    for budget in (None, "1GiB"):
        for row in replayed(name, budget=budget).values():
            assert row.peak_device == row.peak_reserved
            assert number(row.peak_requested) <= number(row.peak_active) <= number(row.peak_reserved)
            assert row.utilization == number(row.peak_allocated) / number(row.peak_reserved)


@pytest.mark.parametrize("name", HISTORIES)
def test_peak_allocated_is_the_same_for_every_policy_and_counted_by_hand(name: str) -> None:
    assert len({row.peak_allocated for row in replayed(name).values()}) == 1
    if replayed(name)["native"].recorded_peak_reserved and name in ("gpt_varlen", "frames"):
        live: dict[int, int] = {}
        held = peak = 0
        for entry in load(name)["device_traces"][0]:
            if entry["action"] == "alloc":
                live[entry["addr"]] = math.ceil(entry["size"] / 512) * 512
                held += live[entry["addr"]]
                peak = max(peak, held)
            elif entry["action"] == "free_requested":
                held -= live.pop(entry["addr"])
        assert replayed(name)["native"].peak_allocated == peak


# What our own policy is for.


@pytest.mark.parametrize("lag_ms", [0.0, 20.0, 200.0])
@pytest.mark.parametrize(
    ("name", "least_utilization", "most_driver_time"),
    [
        ("gpt_varlen", 0.99, 0.01),
        ("lora_checkpoint", 0.99, 0.01),
        ("kv_decode", 0.99, 0.01),
        ("moe", 0.965, 0.035),
        ("unet_varsize", 0.984, 0.012),  # What moves without a limit was not chosen by this one: it came later.
    ],
)
def test_rallocator_wastes_little_memory_and_time_whatever_the_lag(
    name: str, lag_ms: float, least_utilization: float, most_driver_time: float
) -> None:
    row = only_row(TRACES / f"{name}.pickle.xz", "rallocator", lag_ms=lag_ms)
    times = [entry["time_us"] for entry in load(name)["device_traces"][0]]
    assert number(row.utilization) >= least_utilization
    assert number(row.driver_time_us) <= most_driver_time * (times[-1] - times[0])
    assert row.host_waits == 0


@pytest.mark.parametrize("lag_ms", [0.0, 20.0, 200.0])
@pytest.mark.parametrize("name", ["gpt_varlen", "lora_checkpoint", "kv_decode", "moe", "unet_varsize"])
def test_rallocator_completes_with_two_hundredths_more_than_the_program_holds(name: str, lag_ms: float) -> None:
    path = TRACES / f"{name}.pickle.xz"
    budget = number(only_row(path, "rallocator", lag_ms=lag_ms).peak_allocated) * 102 // 100
    row = only_row(path, "rallocator", lag_ms=lag_ms, budget=budget)
    assert row.ooms == 0
    assert number(row.peak_reserved) <= budget
    times = [entry["time_us"] for entry in load(name)["device_traces"][0]]
    assert number(row.host_wait_us) <= 0.01 * (times[-1] - times[0])


def hardly_worse_than_expandable(path: Path, lag_ms: float) -> bool:
    ours, theirs = rallocator.replay(path, ["rallocator", "expandable"], lag_ms=lag_ms).rows
    return number(ours.utilization) >= number(theirs.utilization) - 0.002


@pytest.mark.parametrize("lag_ms", [0.0, 20.0, 200.0])
@pytest.mark.parametrize("name", HISTORIES)
def test_rallocator_is_never_more_than_a_fifth_of_a_point_below_expandable(name: str, lag_ms: float) -> None:
    assert hardly_worse_than_expandable(TRACES / f"{name}.pickle.xz", lag_ms)


def least_without_a_wait(name: str, lag_ms: float) -> int:
    """The bytes that a history with private pools needs at least if the host never waits.

    A graph runs again, so its pool gives nothing back while it lives, and gets from other pools only what the host
    knows to be over: not what was in use within the lag.
    """
    (history,) = histories(read_recording(TRACES / f"{name}.pickle.xz"), Streams.KEEP)
    steps, lag_us = history.steps, lag_ms * 1000
    live: dict[int, tuple[tuple[int, int], int]] = {}
    in_use: dict[tuple[int, int], list[tuple[int, int]]] = collections.defaultdict(lambda: [(0, 0)])
    least = 0
    columns = zip(steps.kinds, steps.allocations, steps.sizes, steps.streams, steps.pools, steps.times_us, strict=True)
    for kind, allocation, size, stream, pool, time_us in columns:
        if kind == Kind.ALLOCATE:
            live[allocation] = ((stream, pool), math.ceil(size / 512) * 512)
        elif kind == Kind.TRY:
            continue
        key, size_of = live[allocation] if kind == Kind.ALLOCATE else live.pop(allocation)
        uses = in_use[key]
        uses.append((time_us, uses[-1][1] + (size_of if kind == Kind.ALLOCATE else -size_of)))
        if kind == Kind.ALLOCATE and pool:
            needed = 0
            for (_, of), uses in in_use.items():
                recent = bisect.bisect_right(uses, time_us - lag_us, key=lambda use: use[0])
                needed += max(held for _, held in (uses if of else uses[max(recent - 1, 0) :]))
            least = max(least, needed)
    return least


def least_for_the_refused(name: str) -> int:
    """The bytes that the program held when it was refused a request, and that request."""
    (history,) = histories(read_recording(TRACES / f"{name}.pickle.xz"), Streams.KEEP)
    steps = history.steps
    live: dict[int, int] = {}
    for kind, allocation, size in zip(steps.kinds, steps.allocations, steps.sizes, strict=True):
        if kind == Kind.TRY:
            return sum(live.values()) + size
        if kind == Kind.ALLOCATE:
            live[allocation] = size
        else:
            del live[allocation]
    raise AssertionError("nothing was refused")


@pytest.mark.parametrize("lag_ms", [0.0, 20.0, 200.0])
@pytest.mark.parametrize("name", HISTORIES)
def test_rallocator_needs_hardly_more_than_the_program_has_in_use(name: str, lag_ms: float) -> None:
    path = TRACES / f"{name}.pickle.xz"
    free = only_row(path, "rallocator", lag_ms=lag_ms)
    budget = number(free.peak_active) * 102 // 100 + 32 * MIB
    row = only_row(path, "rallocator", lag_ms=lag_ms, budget=budget)
    assert number(row.peak_reserved) <= budget
    if name == "oom_fragmented":
        # What the recorded program was refused with 15.8 GiB is tried here too: it does not fit beside what is held.
        assert least_for_the_refused(name) > budget
        assert row.ooms == 1
    else:
        assert row.ooms == 0
    times = [entry["time_us"] for entry in load(name)["device_traces"][0]]
    if number(row.host_wait_us) > 0.01 * (times[-1] - times[0]):
        assert name == "graphs"
        assert least_without_a_wait(name, lag_ms) > budget


# What must not change the figures.


def without_segment_events(snapshot: dict[str, Any]) -> dict[str, Any]:
    """The snapshot without what torch did to serve the blocks."""
    traces = [
        [entry for entry in trace if not entry["action"].startswith("segment_")] for trace in snapshot["device_traces"]
    ]
    return {"segments": copy.deepcopy(snapshot["segments"]), "device_traces": traces}


def moved(snapshot: dict[str, Any], by: int) -> dict[str, Any]:
    """The snapshot with all addresses moved: where the driver happened to put memory makes no difference."""
    for entry in itertools.chain.from_iterable(snapshot["device_traces"]):
        if "addr" in entry:
            entry["addr"] += by
    for entry in snapshot["segments"]:
        entry["address"] += by
        for block in entry["blocks"]:
            block["address"] += by
    return snapshot


@pytest.mark.parametrize("name", HISTORIES)
def test_the_figures_come_from_events_of_blocks_alone(name: str, tmp_path: Path) -> None:
    bare = moved(without_segment_events(load(name)), by=5 << 30)
    budget = "1.5GiB" if name == "fsdp1_streams" else None
    for row in rallocator.replay(write(tmp_path / name, bare), budget=budget).rows:
        full = replayed(name, budget=budget)[row.policy]
        same = dataclasses.replace(row, file=full.file, recorded_peak_reserved=full.recorded_peak_reserved)
        assert same == full


def test_a_replay_gives_the_same_figures_every_time() -> None:
    path = TRACES / "fsdp1_streams.pickle.xz"
    assert rallocator.replay(path, budget="0.9GiB") == rallocator.replay(path, budget="0.9GiB")


def processor_seconds(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def test_a_large_history_costs_a_few_times_what_unpacking_it_costs() -> None:
    """The promise is two seconds; but what a second does depends on the machine, and on what else runs there.

    So both are measured by turns, and the least of each counts. Unpacking took a seventh of a second on the machine
    of the promise, of which two seconds are fourteen times; the replay took seven when this was written.
    """
    path = TRACES / "lora_checkpoint.pickle.xz"
    rounds = [
        (processor_seconds(lambda: load("lora_checkpoint")), processor_seconds(lambda: only_row(path)))
        for _ in range(4)
    ]
    unpacking, whole = map(min, zip(*rounds, strict=True))
    assert only_row(path).events > 130_000
    assert whole < 14 * unpacking


# What a replay answers.


def test_rows_have_the_documented_fields() -> None:
    result = rallocator.replay(TRACES / "graphs.pickle.xz")
    for row in json.loads(json.dumps(result.to_json(), allow_nan=False)):
        assert set(row) >= FIELDS, "fields may be added, never taken away"
        assert row["schema"] == 1
        assert row["handles_moved"] == 0 or row["policy"] == "rallocator"
        assert row["minimum_budget"] is None
        assert all(isinstance(row[field], int) for field in FIELDS if field.endswith(("_us", "reserved", "_bytes")))


def test_a_state_has_a_reason_and_no_figures(tmp_path: Path) -> None:
    path = write(tmp_path / "state", [segment(0, (2 * MIB, "active_allocated"), device=1)])
    result = rallocator.replay(path, ["expandable"])
    assert result == ReplayResult((dataclasses.replace(result.rows[0], file=str(path)),))
    row = result.rows[0]
    assert (row.device, row.policy, row.replayable) == (1, "expandable", False)
    assert row.reason == STATE_ONLY
    assert row.recorded_peak_reserved == 2 * MIB
    assert (row.peak_reserved, row.utilization, row.driver_calls, row.ooms) == (None, None, None, None)


def test_every_device_is_replayed_by_itself(tmp_path: Path) -> None:
    traces = [[event("alloc", 64, 3 * MIB), *free(64, 3 * MIB)], [event("alloc", 64, 100), event("alloc", 512, 200)]]
    rows = rallocator.replay(write(tmp_path / "two", {"segments": [], "device_traces": traces}), ["native"]).rows
    assert [(row.device, row.peak_reserved) for row in rows] == [(0, 20 * MIB), (1, 2 * MIB)]


def test_merged_streams_share_their_memory(tmp_path: Path) -> None:
    size = 30 * MIB
    events = [event("alloc", 64, size), *free(64, size), event("alloc", 128, size, stream=9)]
    path = write_history(tmp_path / "streams", events)
    assert only_row(path).peak_reserved == 2 * size
    assert only_row(path, streams="merge").peak_reserved == size


def test_a_block_in_use_by_another_stream_is_reusable_from_its_recorded_completion_on(tmp_path: Path) -> None:
    size = 30 * MIB
    requested, completed = event("free_requested", 64, size, 10), event("free_completed", 64, size, 900)
    second = event("alloc", 4096, size, 500)
    early = [event("alloc", 64, size), requested, second, completed]
    assert only_row(write_history(tmp_path / "early", early)).peak_reserved == 2 * size
    late = [event("alloc", 64, size), requested, completed, {**second, "time_us": 950}]
    assert only_row(write_history(tmp_path / "late", late)).peak_reserved == size


def test_private_pools_use_their_own_memory(tmp_path: Path) -> None:
    size = 30 * MIB
    events = [event("alloc", 64, size), *free(64, size), event("alloc", 128, size, pool_id=(0, 1))]
    assert only_row(write_history(tmp_path / "pools", events)).peak_reserved == 2 * size


def test_the_lag_is_what_returning_memory_waits_for(tmp_path: Path) -> None:
    events = [event("alloc", 64, 60 * MIB), *free(64, 60 * MIB, 100), event("alloc", 128, 80 * MIB, 200)]
    path = write_history(tmp_path / "lag", events)
    row = only_row(path, budget="100MiB", lag_ms=1.5)
    assert (row.host_waits, row.host_wait_us) == (1, 1400)
    assert only_row(path, budget="100MiB", lag_ms=0).host_waits == 0


def test_settings_change_the_figures(tmp_path: Path) -> None:
    path = write_history(tmp_path / "settings", [event("alloc", 64, 33 * MIB)])
    assert only_row(path).peak_reserved == 34 * MIB
    assert only_row(path, config="roundup_power2_divisions:2").peak_reserved == 48 * MIB


def test_policies_are_answered_in_the_order_asked_for_and_once() -> None:
    rows = rallocator.replay(TRACES / "graphs.pickle.xz", ["expandable", "native", "expandable"]).rows
    assert [row.policy for row in rows] == ["expandable", "native"]


def test_a_budget_may_be_text_or_bytes(tmp_path: Path) -> None:
    path = write_history(tmp_path / "budget", [event("alloc", 64, 3 * GIB)])
    for budget in ("2GiB", "2.0 gib", 2 * GIB, str(2 * GIB), "2048MiB", "2GB"):
        assert only_row(path, budget=budget).ooms == 1, budget
    assert only_row(path, budget="3GiB").ooms == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policies": ["torch"]}, "choose from native, expandable, rallocator"),
        ({"policies": []}, "choose from native, expandable, rallocator"),
        ({"budget": "24 apples"}, "24GiB"),
        ({"budget": "24G"}, "24GiB"),
        ({"budget": 0}, "at least 1 B"),
        ({"budget": -1}, "at least 1 B"),
        ({"budget": "-1GiB"}, "not a size"),
        ({"budget": "1" * 19 + "TiB"}, "at most 256 TiB"),
        ({"budget": True}, "bool"),
        ({"config": "no_such_key:1"}, "no_such_key"),
        ({"streams": "split"}, "keep or merge"),
        ({"lag_ms": -1.0}, "lag"),
        ({"lag_ms": math.nan}, "lag"),
        ({"lag_ms": math.inf}, "lag"),
    ],
)
def test_wrong_options_say_what_is_accepted(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rallocator.replay(TRACES / "graphs.pickle.xz", **options)


def test_hostile_figures_come_to_an_end(tmp_path: Path) -> None:
    huge = [event("alloc", 64 * index, 1 << 48, time_us=(1 << 63) - 1, stream=-index) for index in range(50)]
    row = only_row(write_history(tmp_path / "huge", huge))
    assert row.ooms == 50
    row = only_row(write_history(tmp_path / "none", [event("alloc", 64, 0), *free(64, 0)]))
    assert row.peak_reserved == 0
    assert row.utilization is None


def test_unreadable_files_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError):
        rallocator.replay(tmp_path / "missing")


def test_a_replay_loads_neither_torch_nor_the_command_line() -> None:
    script = (
        "import sys, rallocator\n"
        "rallocator.replay(sys.argv[1])\n"
        "loaded = {'torch', 'typer', 'rich', 'plotly'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", script, str(TRACES / "graphs.pickle.xz")], check=True, timeout=60)


@needs_public_histories
@pytest.mark.parametrize("lag_ms", [0.0, 20.0, 200.0])
@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_on_public_histories_too_rallocator_is_never_far_below_expandable(name: str, lag_ms: float) -> None:
    assert hardly_worse_than_expandable(PUBLIC / f"{name}.pickle.xz", lag_ms)


@needs_public_histories
@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_public_histories_reserve_what_torch_reserved(name: str) -> None:
    row = only_row(PUBLIC / f"{name}.pickle.xz")
    assert number(row.peak_reserved) == pytest.approx(row.recorded_peak_reserved, rel=0.005)
