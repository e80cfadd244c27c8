"""The checker of snapshots: real ones pass, damaged ones do not, and ours pass whatever the program did."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallocator._snapshot_checker import ContradictionError, check
from rallocator.testing import SimulatedGpu
from tests import histories

MIB = 1 << 20
POLICIES = ("native", "expandable", "rallocator")


@pytest.mark.parametrize("name", sorted(path.name.partition(".")[0] for path in histories.TRACES.glob("*.xz")))
def test_recorded_history_holds_no_contradiction(name: str) -> None:
    snapshot = histories.load(name)
    assert check(snapshot) == sum(len(events) for events in snapshot["device_traces"])


# --- damaged snapshots ----------------------------------------------------------------------------------------------

Damage = Callable[[list[dict[str, Any]], list[dict[str, Any]]], None]


def position(events: list[dict[str, Any]], action: str) -> int:
    """Where the latest event of a kind is."""
    return max(index for index, event in enumerate(events) if event["action"] == action)


def live_alloc(segments: list[dict[str, Any]], events: list[dict[str, Any]]) -> int:
    """Where the latest allocation is that the program still holds."""
    held = {
        block["address"] for segment in segments for block in segment["blocks"] if block["state"] == "active_allocated"
    }
    return max(index for index, event in enumerate(events) if event["action"] == "alloc" and event["addr"] in held)


def split_segment(segments: list[dict[str, Any]]) -> dict[str, Any]:
    """A segment of several blocks."""
    return next(segment for segment in segments if len(segment["blocks"]) > 1)


def lose_a_block(segments: list[dict[str, Any]], _events: list[dict[str, Any]]) -> None:
    del split_segment(segments)["blocks"][0]


def grow_a_block(segments: list[dict[str, Any]], _events: list[dict[str, Any]]) -> None:
    split_segment(segments)["blocks"][0]["size"] += 512


def invent_a_state(segments: list[dict[str, Any]], _events: list[dict[str, Any]]) -> None:
    split_segment(segments)["blocks"][0]["state"] = "active_awaiting_free"


def miscount_a_segment(segments: list[dict[str, Any]], _events: list[dict[str, Any]]) -> None:
    segments[0]["allocated_size"] += 512


def list_a_segment_twice(segments: list[dict[str, Any]], _events: list[dict[str, Any]]) -> None:
    segments.append(copy.deepcopy(segments[0]))


def lose_a_segment(segments: list[dict[str, Any]], events: list[dict[str, Any]]) -> None:
    address = events[live_alloc(segments, events)]["addr"]
    segments[:] = [
        segment
        for segment in segments
        if address not in range(segment["address"], segment["address"] + segment["total_size"])
    ]


def repeat_an_allocation(segments: list[dict[str, Any]], events: list[dict[str, Any]]) -> None:
    index = live_alloc(segments, events)
    events.insert(index, events[index])


def swap_the_halves_of_a_free(_segments: list[dict[str, Any]], events: list[dict[str, Any]]) -> None:
    index = position(events, "free_completed")
    assert events[index - 1]["action"] == "free_requested"
    events[index - 1], events[index] = events[index], events[index - 1]


def round_a_size(segments: list[dict[str, Any]], events: list[dict[str, Any]]) -> None:
    events[live_alloc(segments, events)]["size"] += 1


def turn_the_clock_back(_segments: list[dict[str, Any]], events: list[dict[str, Any]]) -> None:
    events[-1]["time_us"] = events[0]["time_us"] - 1


def allocate_before_the_segment(segments: list[dict[str, Any]], events: list[dict[str, Any]]) -> None:
    index = next(
        index
        for index in range(len(events))
        if events[index]["action"] == "segment_alloc" and events[index + 1]["addr"] == events[index]["addr"]
    )
    events[index], events[index + 1] = events[index + 1], events[index]


def free_what_was_never_held(_segments: list[dict[str, Any]], events: list[dict[str, Any]]) -> None:
    events.append({**events[position(events, "free_requested")], "addr": 512})


DAMAGES = (
    lose_a_block,
    grow_a_block,
    invent_a_state,
    miscount_a_segment,
    list_a_segment_twice,
    lose_a_segment,
    repeat_an_allocation,
    swap_the_halves_of_a_free,
    round_a_size,
    turn_the_clock_back,
    allocate_before_the_segment,
    free_what_was_never_held,
)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged_history_is_a_contradiction(damage: Damage) -> None:
    snapshot = histories.load("frames")
    check(snapshot)
    damage(snapshot["segments"], snapshot["device_traces"][0])
    with pytest.raises(ContradictionError):
        check(snapshot)


# --- our own --------------------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["malloc"] * 6 + ["free"] * 4 + ["record", "complete", "empty", "pool"]),
        st.integers(1, 24 * MIB),
        st.integers(0, 2),
        st.integers(0, 1),
    ),
    max_size=60,
)


class Program:
    """A program on two simulated devices, whose streams are 1, 2 and 3 on the one and 4, 5 and 6 on the other."""

    def __init__(self, policy: str, limit: int) -> None:
        self.gpu = SimulatedGpu(capacity="128MiB", devices=2, config=f"policy:{policy},history_limit:{limit}")
        self.held: list[int] = []
        self.pools = 0

    def step(self, kind: str, number: int, stream: int, device: int) -> None:
        """Do one thing; one that is impossible is left out."""
        if kind == "malloc":
            self.malloc(number, 1 + stream + 3 * device, device)
        elif kind == "free" and self.held:
            self.gpu.free(self.held.pop(number % len(self.held)))
        elif kind == "record" and self.held:
            self.gpu.record_stream(self.held[number % len(self.held)], 10 + stream)
        elif kind == "complete":
            self.gpu.complete()
        elif kind == "empty":
            self.gpu.empty_cache()
        elif kind == "pool":
            self.use_a_pool(number % MIB + 1)

    def malloc(self, size: int, stream: int, device: int) -> None:
        """Obtain memory while at most half of the device's is in use, and write it."""
        if self.gpu.stats(device)["active_bytes.all.current"] + size < 64 * MIB:
            self.gpu.set_current_device(device)
            self.held.append(self.gpu.malloc(size, stream=stream, device=device))
            self.gpu.launch(stream, writes=self.held[-1:], us=size % 50)

    def use_a_pool(self, size: int) -> None:
        """Obtain memory from a private pool, free it, and release the pool."""
        self.pools += 1
        self.gpu.set_current_device(0)
        self.gpu.begin_pool((0, self.pools), 7)
        address = self.gpu.malloc(size, stream=7)
        self.gpu.end_pool((0, self.pools))
        self.gpu.free(address)
        self.gpu.release_pool((0, self.pools))


@settings(max_examples=60, deadline=None)
@given(policy=st.sampled_from(POLICIES), limit=st.sampled_from([7, 10_000]), steps=STEPS)
def test_snapshot_of_any_program_holds_no_contradiction_and_adds_up_to_the_statistics(
    policy: str, limit: int, steps: list[tuple[str, int, int, int]]
) -> None:
    program = Program(policy, limit)
    for step in steps:
        program.step(*step)
    snapshot = program.gpu.snapshot()
    check(snapshot)
    assert len(snapshot["device_traces"]) == 2
    assert all(len(events) <= limit for events in snapshot["device_traces"])
    for device in (0, 1):
        segments = [segment for segment in snapshot["segments"] if segment["device"] == device]
        stats = program.gpu.stats(device)
        for key, family in (
            ("total_size", "reserved_bytes"),
            ("allocated_size", "allocated_bytes"),
            ("active_size", "active_bytes"),
            ("requested_size", "requested_bytes"),
        ):
            assert sum(segment[key] for segment in segments) == stats[f"{family}.all.current"], key
    for address in program.held:
        program.gpu.free(address)
    program.gpu.close()
