"""Advice: each history with one known cause gets that advice and no other, and the advice holds when it is followed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rallocator
from rallocator import _core
from rallocator._replay import POLICIES, Advice, ReplayResult
from tests.histories import GIB, MIB, TRACES, event, free, segment, write_history


class History:
    """A history under construction: a request and a free at a time, a hundred microseconds apart."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.now_us = 0

    def alloc(self, address: int, size: int, **more: Any) -> None:
        self.now_us += 100
        self.events.append(event("alloc", address << 40, size, self.now_us, **more))

    def free(self, address: int, size: int, **more: Any) -> None:
        self.now_us += 100
        self.events += free(address << 40, size, self.now_us, **more)

    def phase(self, first: int, count: int, size: int, *, keep: bool = False, **more: Any) -> None:
        """Hold so many blocks at once, and free them unless they are to be kept."""
        for address in range(first, first + count):
            self.alloc(address, size, **more)
        if not keep:
            for address in range(first, first + count):
                self.free(address, size, **more)


def exhaustion() -> History:
    history = History()
    history.phase(1, 45, 100 * MIB)
    return history


def fragmentation() -> History:
    """A buffer that grows, as a cache of keys and values does: each piece that was freed is too small for the next."""
    history = History()
    for size in range(40, 120, 2):
        history.alloc(1, size * MIB)
        history.free(1, size * MIB)
    return history


def idle_stream() -> History:
    history = History()
    history.phase(1, 10, 100 * MIB, stream=7)
    history.phase(20, 10, 100 * MIB)
    return history


def idle_pool() -> History:
    history = History()
    history.phase(1, 10, 100 * MIB, pool_id=(0, 1))
    history.phase(20, 10, 100 * MIB, pool_id=(0, 0))
    return history


def pending_frees() -> History:
    """Each block is freed soon, and another stream is done with it twenty blocks later."""
    history = History()
    waiting: list[int] = []
    for address in range(1, 200):
        history.alloc(address, 50 * MIB)
        history.now_us += 100
        history.events.append(event("free_requested", address << 40, 50 * MIB, history.now_us))
        waiting.append(address)
        if len(waiting) > 20:
            history.now_us += 100
            history.events.append(event("free_completed", waiting.pop(0) << 40, 50 * MIB, history.now_us))
    return history


def unused_cache() -> History:
    history = History()
    history.phase(1, 20, 100 * MIB)
    for _ in range(60):
        history.phase(1, 2, 100 * MIB)
    return history


def healthy() -> History:
    """A training: weights that stay, and activations that come and go."""
    history = History()
    history.phase(1, 10, 64 * MIB, keep=True)
    for _ in range(20):
        history.phase(100, 20, 30 * MIB)
        history.phase(200, 5, 2 * MIB)
    return history


BUDGETS = {exhaustion: "4GiB"}


def replayed(history: History, path: Path, **options: Any) -> ReplayResult:
    return rallocator.replay(write_history(path, history.events), **options)


def advice_of(result: ReplayResult) -> tuple[Advice, ...]:
    (found,) = result.advice.values()
    return found


def follow(result: ReplayResult, advice: Advice, change: dict[str, str | int]) -> dict[str, Any]:
    """Replay with the change, by the core's own means; for the unused cache also without it."""
    (subject,) = result.subjects
    steps = subject.steps
    assert isinstance(steps, _core.ReplaySteps)
    if change.get("streams") == "merge":
        steps = steps.changed(merge_streams=True)
    if change.get("pools") == "merge":
        steps = steps.changed(merge_pools=True)
    if change.get("frees") == "at_once":
        steps = steps.changed(free_at_once=True)
    emptied = change.get("empty_cache_before")
    asked = subject.asked(
        str(change.get("policy", advice.policy)),
        budget_bytes=change.get("budget", advice.budget),
        empty_cache_before=[] if emptied is None else [int(emptied)],
        late_from=emptied,
        with_layout=False,
    )
    return steps.replay(asked)


def assert_borne_out(result: ReplayResult, advice: Advice) -> None:
    """What the advice says was gained is gained."""
    (subject,) = result.subjects
    assert subject.steps is not None
    before = subject.steps.replay(subject.asked(advice.policy, budget_bytes=advice.budget, with_layout=False))
    assert (before["ooms"] > 0) == (advice.budget is not None)
    for remedy in advice.remedies:
        after = follow(result, advice, dict(remedy.change))
        assert after["ooms"] == 0
        if advice.cause == "unused cache":
            kept = subject.asked(advice.policy, late_from=remedy.change["empty_cache_before"], with_layout=False)
            assert subject.steps.replay(kept)["peak_reserved_late"] == advice.peak_reserved
            assert after["peak_reserved_late"] == remedy.peak_reserved == advice.peak_reserved - advice.saved
            assert after["retries"] == before["retries"], "the memory that was given back is not missed"
        elif advice.cause != "exhaustion":
            assert before["peak_reserved"] == advice.peak_reserved
            assert after["peak_reserved"] == remedy.peak_reserved
        if advice.budget is None:
            assert remedy.peak_reserved <= 0.95 * advice.peak_reserved
    if advice.budget is None:
        assert advice.saved == advice.peak_reserved - advice.remedies[0].peak_reserved > 0


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (exhaustion, "exhaustion"),
        (fragmentation, "fragmentation"),
        (idle_stream, "idle stream"),
        (idle_pool, "idle pool"),
        (pending_frees, "pending frees"),
        (unused_cache, "unused cache"),
    ],
)
def test_a_history_with_one_cause_gets_that_advice_and_no_other(make: Any, cause: str, tmp_path: Path) -> None:
    result = replayed(make(), tmp_path / cause, budget=BUDGETS.get(make))
    (advice,) = advice_of(result)
    assert advice.cause == cause
    assert_borne_out(result, advice)


def test_a_healthy_history_gets_no_advice(tmp_path: Path) -> None:
    for budget in (None, "4GiB"):
        assert advice_of(replayed(healthy(), tmp_path / "healthy", budget=budget)) == ()


@pytest.mark.parametrize("make", [idle_stream, idle_pool, pending_frees, fragmentation])
def test_the_same_causes_are_found_where_memory_runs_out(make: Any, tmp_path: Path) -> None:
    """Within a budget that the cause's own cost exceeds, though not always: native gives cached segments back first."""
    free_of_limits = replayed(make(), tmp_path / "free")
    (known,) = advice_of(free_of_limits)
    budget = min(remedy.peak_reserved for remedy in known.remedies)
    result = replayed(make(), tmp_path / "limited", budget=budget)
    for advice in advice_of(result):
        if advice.budget is not None:
            assert advice.cause == known.cause
            assert_borne_out(result, advice)


def test_exhaustion_says_what_would_be_enough(tmp_path: Path) -> None:
    result = replayed(exhaustion(), tmp_path / "exhausted", budget="4GiB")
    (advice,) = advice_of(result)
    assert "needs 4.39 GiB at once, and 4.00 GiB are to be had" in advice.text
    assert advice.remedies[0].change["budget"] == 4500 * MIB


def test_a_failure_in_the_recording_is_judged_without_a_budget(tmp_path: Path) -> None:
    history = exhaustion()
    refusal = {"action": "oom", "size": GIB, "stream": 0, "device_free": 100 * MIB, "time_us": history.now_us}
    events = [*history.events[:45], event("segment_alloc", 1 << 40, 4500 * MIB), refusal, *history.events[45:]]
    path = write_history(tmp_path / "oom", events, [segment(1 << 40, (4500 * MIB, "inactive"))])
    result = rallocator.replay(path)
    (advice,) = advice_of(result)
    assert (advice.cause, advice.budget) == ("exhaustion", 4600 * MIB), (
        "what was reserved, and what the driver had free"
    )
    assert_borne_out(result, advice)


def test_the_recorded_fragmentation_is_called_that_and_other_policies_pass_it() -> None:
    result = rallocator.replay(TRACES / "oom_fragmented.pickle.xz")
    (advice,) = advice_of(result)
    assert advice.cause == "fragmentation"
    assert advice.budget is not None
    assert advice.budget <= 15.8 * GIB
    assert [remedy.change["policy"] for remedy in advice.remedies] == ["rallocator", "expandable"]
    assert_borne_out(result, advice)


@pytest.mark.parametrize("name", ["gpt_varlen", "lora_checkpoint", "kv_decode", "moe", "fsdp1_streams", "graphs"])
def test_the_advice_on_real_histories_is_borne_out(name: str) -> None:
    result = rallocator.replay(TRACES / f"{name}.pickle.xz")
    found = advice_of(result)
    assert [advice.cause for advice in found][:1] == ([] if name == "graphs" else ["fragmentation"])
    for advice in found:
        assert_borne_out(result, advice)


def test_what_is_recorded_under_expandable_segments_is_judged_by_its_rules() -> None:
    (advice,) = advice_of(rallocator.replay(TRACES / "expandable_capped.pickle.xz"))
    assert advice.policy == "expandable"
    assert [remedy.change["policy"] for remedy in advice.remedies] == ["rallocator"]


def test_a_state_gets_no_advice(tmp_path: Path) -> None:
    path = write_history(tmp_path / "state", [], [segment(0, (100 * MIB, "inactive"), (MIB, "active_allocated"))])
    assert advice_of(rallocator.replay(path)) == ()


def test_advice_is_the_same_for_any_policies_asked_for(tmp_path: Path) -> None:
    for policy in POLICIES:
        (advice,) = advice_of(replayed(fragmentation(), tmp_path / policy, policies=[policy]))
        assert advice.cause == "fragmentation"
