"""The few findings that matter about a recorded history, each with the replay that bears it out.

A cause is looked for by taking it away: the history is replayed under the rules that it was recorded under, with every
free done at once, or without private pools, or with one stream. What is saved is what that cause costs. What is left
with all of them taken away, and is gone under another policy, is fragmentation. Nothing is advised that such a replay
did not gain by, and a gain that nobody would notice is not worth a line.
"""

from __future__ import annotations

import array
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rallocator import _core
from rallocator._replay.row import ReplayRow
from rallocator._replay.runner import Subject
from rallocator._replay.steps import Kind
from rallocator._sizes import format_size

EXHAUSTION = "exhaustion"
FRAGMENTATION = "fragmentation"
IDLE_STREAM = "idle stream"
IDLE_POOL = "idle pool"
PENDING = "pending frees"
UNUSED_CACHE = "unused cache"

LEAST_SHARE = 0.05
"""Savings below this share of what is reserved are not worth a line …"""

LEAST_BYTES = 32 << 20
"""… and neither are those below this: segments and handles of 20 MiB make a small program look wasteful."""

LEAST_TAIL = 0.25
"""Cached memory counts as unused if nothing used it for at least this share of the steps, to the very end."""

WITHOUT_BEGINNING = (
    "The recording begins in the middle of a run: these figures are without the memory that was cached then, so that "
    "all policies begin alike."
)
"""What is said with each finding about such a recording. Only the recorded policy could begin with that memory."""

AMPLE_BYTES = 4 << 40
"""A budget that no program exceeds: under one, what the recorded program was refused is asked for too."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """One thing to change, and what the replay with it gave."""

    action: str
    """What to do, as a sentence without its full stop."""
    change: Mapping[str, str | int]
    """What the replay changed: "policy", "streams", "pools" or "frees", or the "budget", or the step that the cache was
    emptied before ("empty_cache_before")."""
    peak_reserved: int
    """Bytes reserved at most with it; for the unused cache, from that step on."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One finding."""

    cause: str
    """What it is: "exhaustion", "fragmentation", "idle stream", "idle pool", "pending frees" or "unused cache"."""
    text: str
    """The finding with its figure, as a sentence."""
    policy: str
    """The policy of the replay that shows it: the one that the recorded allocator followed."""
    budget: int | None
    """Bytes to which that replay was limited, if an allocation fails within them; None otherwise."""
    peak_reserved: int
    """Bytes reserved at most in that replay; for the unused cache, from the remedy's step on."""
    saved: int
    """Bytes by which the best remedy lowers that; 0 where what matters is that no allocation fails."""
    remedies: tuple[Remedy, ...]
    """The best first. Where there is a budget, no allocation fails with any of them within it."""

    def to_json(self) -> dict[str, Any]:
        """Return the finding as JSON has it."""
        return {
            "cause": self.cause,
            "text": self.text,
            "policy": self.policy,
            "budget": self.budget,
            "peak_reserved": self.peak_reserved,
            "saved": self.saved,
            "remedies": [
                {"action": one.action, "change": dict(one.change), "peak_reserved": one.peak_reserved}
                for one in self.remedies
            ],
        }

    def lines(self) -> list[str]:
        """Return the finding and its remedies as lines of text."""
        shown = [f"{one.action}: {format_size(one.peak_reserved)}." for one in self.remedies]
        return [f"{self.cause}: {self.text}", *shown]


def advise(subject: Subject, rows: Sequence[ReplayRow] = ()) -> tuple[Advice, ...]:
    """Return what is to be said about a history; nothing for one that cannot be replayed.

    Arguments:
        subject: the history.
        rows: what its replays gave so far, so that none is made twice.
    """
    if subject.steps is None:
        return ()
    return tuple(_Examination(subject, subject.steps, rows).findings())


class _Examination:
    """One history under examination. Replays are made once each."""

    def __init__(self, subject: Subject, steps: _core.ReplaySteps, rows: Sequence[ReplayRow]) -> None:
        self._subject = subject
        self._steps = steps
        self._policy = subject.history.recorded_policy
        self._replays: dict[tuple[str, str, int | None], dict[str, Any]] = {}
        for row in rows:
            # The recorded policy's row may have begun with memory that the replays here begin without.
            if row.policy != self._policy or not subject.history.begins_midway:
                self._replays[row.policy, "", subject.settings.budget_bytes] = row.to_json()
        self._changed = {"": steps}
        columns = subject.history.steps
        if Kind.FREE_USED_ELSEWHERE in columns.kinds:
            self._changed["frees"] = steps.changed(free_at_once=True)
        if any(columns.pools):
            self._changed["pools"] = steps.changed(merge_pools=True)
        if len(set(_shared_streams(columns.kinds, columns.streams, columns.pools))) > 1:
            self._changed["streams"] = steps.changed(merge_streams=True)
        if len(self._changed) > 1:
            self._changed["all"] = steps.changed(merge_streams=True, merge_pools=True, free_at_once=True)
        limit = subject.settings.budget_bytes or subject.history.recorded_limit
        self._limit = limit if limit is not None and self._fails(self._policy, "", limit) else None

    def findings(self) -> list[Advice]:
        if self._limit is not None:
            return self._of_failure(self._limit)
        found = [self._structure(kind) for kind in _STRUCTURES if kind in self._changed]
        return [one for one in (self._fragmentation(), *found, self._unused_cache()) if one is not None]

    # A history in which an allocation fails.

    def _of_failure(self, limit: int) -> list[Advice]:
        policies = [policy for policy in self._other_policies() if not self._fails(policy, "", limit)]
        found = [
            self._structure_of_failure(kind, policies, limit)
            for kind in _STRUCTURES
            if kind in self._changed and not self._fails(self._policy, kind, limit)
        ]
        if policies and (not found or self._fails(self._policy, "all", limit)):
            found.insert(0, self._fragmentation_of_failure(policies, limit))
        return found or [self._exhaustion(limit)]

    def _exhaustion(self, limit: int) -> Advice:
        ample = self._replay("rallocator", "", AMPLE_BYTES)
        budget = ample["peak_reserved"]
        if self._fails("rallocator", "", budget):
            asked = self._subject.asked("rallocator", budget_bytes=None)
            budget = self._steps.minimum_budget(asked) or budget
        held = format_size(ample["peak_allocated"])
        if ample["peak_allocated"] > limit:
            text = f"the program needs {held} at once, and {format_size(limit)} are to be had. No allocator can help"
        else:
            text = f"the program needs {held} of {format_size(limit)} at once, which is too close for any policy"
        remedy = Remedy(
            "It completes under the policy rallocator with a budget of",
            {"policy": "rallocator", "budget": budget},
            budget,
        )
        return self._advice(EXHAUSTION, text + ".", (remedy,), saved=0)

    def _fragmentation_of_failure(self, policies: list[str], limit: int) -> Advice:
        held = self._replay("rallocator", "", AMPLE_BYTES)["peak_allocated"]
        text = (
            f"an allocation fails within {format_size(limit)} although the program needs no more than "
            f"{format_size(held)} at once: what is free lies in pieces too small."
        )
        return self._advice(FRAGMENTATION, text, self._policies(policies, limit), saved=0)

    def _structure_of_failure(self, kind: str, policies: list[str], limit: int) -> Advice:
        cause, what, action = _STRUCTURES[kind]
        text = f"an allocation fails within {format_size(limit)}, and would not without {what}."
        first = Remedy(action, {kind: _CHANGE_OF[kind]}, self._replay(self._policy, kind, limit)["peak_reserved"])
        return self._advice(cause, text, (first, *self._policies(policies, limit)), saved=0)

    # A history in which none does.

    def _structure(self, kind: str) -> Advice | None:
        cause, what, action = _STRUCTURES[kind]
        before = self._reserved(self._policy)
        after = self._reserved(self._policy, kind)
        if not _matters(before - after, before):
            return None
        others = [one for one in self._policies(self._other_policies()) if _matters(before - one.peak_reserved, before)]
        remedies = sorted([Remedy(action, {kind: _CHANGE_OF[kind]}, after), *others], key=lambda one: one.peak_reserved)
        text = f"{format_size(before - after)} of the {format_size(before)} reserved are due to {what}."
        return self._advice(cause, text, tuple(remedies), saved=before - remedies[0].peak_reserved)

    def _fragmentation(self) -> Advice | None:
        before, plain = self._reserved(self._policy), self._reserved(self._policy, "all")
        others = self._other_policies()
        least = min(self._reserved(policy, "all") for policy in others)
        remedies = [one for one in self._policies(others) if _matters(before - one.peak_reserved, before)]
        if not remedies or not _matters(plain - least, plain):
            return None
        held = self._replay(self._policy)["peak_active"]
        saved = before - remedies[0].peak_reserved
        text = (
            f"{format_size(before)} were reserved for {format_size(held)} in use: free memory lies in pieces too small "
            f"for what is asked for. {format_size(saved)} of that can be saved."
        )
        return self._advice(FRAGMENTATION, text, tuple(remedies), saved=saved)

    def _unused_cache(self) -> Advice | None:
        step, unused = _lasting_fall(array.array("Q", self._steps.held()))
        if not _matters(unused, self._reserved(self._policy)):
            return None
        known: list[int] = self._subject.asked(self._policy, budget_bytes=None)["empty_cache_before"]
        before, after = (
            self._subject.figures(
                self._policy, budget_bytes=None, late_from=step, empty_cache_before=emptied, with_layout=False
            )["peak_reserved_late"]
            for emptied in (known, [*known, step])
        )
        if not _matters(before - after, before):
            return None
        share = step / len(self._steps)
        text = (
            f"{format_size(before - after)} of the {format_size(before)} reserved are cached and not used again after "
            f"{share:.0%} of the history. Other programs on the GPU could have them."
        )
        action = f"Call torch.cuda.empty_cache() there, once (step {step:,} of {len(self._steps):,})"
        return self._advice(
            UNUSED_CACHE,
            text,
            (Remedy(action, {"empty_cache_before": step}, after),),
            saved=before - after,
            peak_reserved=before,
        )

    # Replays.

    def _advice(
        self, cause: str, text: str, remedies: tuple[Remedy, ...], *, saved: int, peak_reserved: int | None = None
    ) -> Advice:
        if self._subject.history.cached_at_beginning >= LEAST_BYTES:
            text = f"{text} {WITHOUT_BEGINNING}"
        if peak_reserved is None:
            peak_reserved = self._replay(self._policy, "", self._limit)["peak_reserved"]
        return Advice(cause, text, self._policy, self._limit, peak_reserved, saved, remedies)

    def _other_policies(self) -> list[str]:
        return [policy for policy in _ACTIONS if policy != self._policy]

    def _policies(self, policies: list[str], limit: int | None = None) -> tuple[Remedy, ...]:
        remedies = [
            Remedy(_ACTIONS[policy], {"policy": policy}, self._replay(policy, "", limit)["peak_reserved"])
            for policy in policies
        ]
        return tuple(sorted(remedies, key=lambda one: one.peak_reserved))

    def _reserved(self, policy: str, kind: str = "") -> int:
        reserved: int = self._replay(policy, kind)["peak_reserved"]
        return reserved

    def _fails(self, policy: str, kind: str, limit: int) -> bool:
        return bool(self._replay(policy, kind, limit)["ooms"] > 0)

    def _replay(self, policy: str, kind: str = "", limit: int | None = None) -> dict[str, Any]:
        if kind == "all" and kind not in self._changed:
            # There is nothing to be taken away.
            kind = ""
        key = (policy, kind, limit)
        if key not in self._replays:
            # All begin alike, without what was cached before the recording: else only some of them could.
            self._replays[key] = self._subject.figures(
                policy, self._changed[kind], budget_bytes=limit, with_layout=False
            )
        return self._replays[key]


_ACTIONS = {
    "rallocator": "Use this package's policy rallocator",
    "expandable": "Use PyTorch's expandable_segments:True, or the policy expandable",
}
"""What to do to get each policy that is worth changing to."""

_STRUCTURES = {
    "frees": (
        PENDING,
        "blocks that were freed while another stream still used them (record_stream)",
        "Free such blocks only when the other stream is done, so that none is pending",
    ),
    "pools": (
        IDLE_POOL,
        "private pools, whose idle memory nobody else can have",
        "Have graphs share a pool with each other, or capture before memory is needed elsewhere",
    ),
    "streams": (
        IDLE_STREAM,
        "memory that is idle in the cache of another stream",
        "Allocate on one stream",
    ),
}
"""For what can be taken away from a history: the cause, what it is, and what to do about it."""

_CHANGE_OF = {"frees": "at_once", "pools": "merge", "streams": "merge"}


def _matters(saved: int, reserved: int) -> bool:
    return saved >= LEAST_BYTES and saved >= LEAST_SHARE * reserved


def _shared_streams(kinds: list[int], streams: list[int], pools: list[int]) -> list[int]:
    """Return the stream of each request for memory of the default pool."""
    requests = zip(kinds, streams, pools, strict=True)
    return [stream for kind, stream, pool in requests if kind == Kind.ALLOCATE and pool == 0]


def _lasting_fall(held: array.array[int]) -> tuple[int, int]:
    """Return the step before which what the program holds has fallen most for good, and by how many bytes."""
    later = array.array("Q", itertools.accumulate(reversed(held), max))
    later.reverse()
    best, fall = 0, 0
    peak = 0
    for step in range(1, int(len(held) * (1 - LEAST_TAIL))):
        peak = max(peak, held[step - 1])
        if peak - later[step] > fall:
            best, fall = step, peak - later[step]
    return best, fall
