"""Sets a session's raw rows side by side: checksums against their spread, ratios of ours to torch's round by round.

Works on the plain values of `results.json`; `summary.py` and `report.py` only lay out what is computed here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Results = dict[str, Any]

NATIVE = "native"


def is_ours(kind: str) -> bool:
    """Whether a kind is this project's allocator. A session compares one of its routes into torch with torch's own."""
    return kind.startswith("rallocator")


@dataclass(frozen=True)
class Checksum:
    """One workload's last result under torch's allocator, twice, and under ours."""

    workload: str
    native: tuple[float, ...]
    ours: float | None
    same_bits: bool
    """Whether our result is bit for bit one of torch's."""

    @property
    def spread(self) -> float:
        """How far torch's own runs lie apart."""
        return max(self.native) - min(self.native) if self.native else 0.0

    @property
    def distance(self) -> float | None:
        """How far ours lies from the nearest of torch's."""
        if self.ours is None or not self.native:
            return None
        return min(abs(self.ours - value) for value in self.native)

    @property
    def verdict(self) -> str:
        """What the figures say, in words."""
        if self.distance is None or len(self.native) < 2:
            return "incomplete"
        if self.same_bits:
            return "same bits"
        return "within the spread" if self.distance <= self.spread else "outside the spread"


@dataclass(frozen=True)
class Ratio:
    """One figure of ours over torch's, for each round of the session that has both."""

    name: str
    native: tuple[float, ...]
    ours: tuple[float, ...]

    @property
    def by_round(self) -> tuple[float, ...]:
        """Ours over torch's, round by round; below one is better for every figure that uses this class."""
        return tuple(mine / theirs for theirs, mine in zip(self.native, self.ours, strict=True) if theirs)

    @property
    def of_best(self) -> float:
        """Our best round over torch's best: what else runs on the machine only ever makes a round worse."""
        return min(self.ours) / min(self.native) if min(self.native) else math.nan


def rows_of(results: Results, section: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every raw row of a section with its round, in the order in which they were measured."""
    for run in results["runs"]:
        if run["section"] == section:
            for row in run["rows"]:
                yield run["round"], row


def checksums(results: Results) -> list[Checksum]:
    """One comparison for each workload that the checksum section ran."""
    rows = [row for _, row in rows_of(results, "checksums")]
    comparisons = []
    for workload in dict.fromkeys(row["workload"] for row in rows):
        good = [row for row in rows if row["workload"] == workload and row["checksum"] is not None]
        native = [row for row in good if row["kind"] == NATIVE]
        ours = [row for row in good if is_ours(row["kind"])]
        comparisons.append(
            Checksum(
                workload,
                tuple(row["checksum"] for row in native),
                ours[0]["checksum"] if ours else None,
                bool(ours) and ours[0]["digest"] in {row["digest"] for row in native},
            )
        )
    return comparisons


def step_time_ratios(results: Results) -> list[Ratio]:
    """Milliseconds per step, workload by workload."""
    rows = [(number, row) for number, row in rows_of(results, "workloads") if not row["error"]]
    return _ratios([(number, row["workload"], row["kind"], row["ms_per_step"]) for number, row in rows])


def best_step_ratios(results: Results) -> list[Ratio]:
    """Milliseconds per step, each step in the round in which it was quickest, as one round.

    What an allocator costs comes again in every round, at the same step; what else runs on the machine does not. Only
    rounds that both have count: the least of more rounds is less.
    """
    rows = [(number, row) for number, row in rows_of(results, "workloads") if not row["error"] and row.get("step_ms")]
    ratios = []
    for name in dict.fromkeys(row["workload"] for _, row in rows):
        of_name = [(number, row) for number, row in rows if row["workload"] == name]
        native = {number: row["step_ms"] for number, row in of_name if row["kind"] == NATIVE}
        ours = {number: row["step_ms"] for number, row in of_name if is_ours(row["kind"])}
        common = native.keys() & ours.keys()
        if common:
            best = [_mean_of_best([steps[number] for number in common]) for steps in (native, ours)]
            ratios.append(Ratio(name, (best[0],), (best[1],)))
    return ratios


def _mean_of_best(rounds: list[list[float]]) -> float:
    best: list[float] = [min(step) for step in zip(*rounds, strict=True)]
    return sum(best) / len(best)


def reserved_ratios(results: Results) -> list[Ratio]:
    """Peak reserved bytes, workload by workload."""
    rows = [(number, row) for number, row in rows_of(results, "workloads") if not row["error"]]
    return _ratios([(number, row["workload"], row["kind"], row["peaks"]["reserved_bytes"]) for number, row in rows])


def cap_ratios(results: Results) -> list[Ratio]:
    """Milliseconds per step of ours under each limit over torch's own without one, workload by workload."""
    rows = [row for _, row in rows_of(results, "caps") if not row["error"]]
    native = {row["workload"]: row["ms_per_step"] for row in rows if row["kind"] == NATIVE}
    return [
        Ratio(f"{row['workload']} in {row['cap_gib']:.2f} GiB", (native[row["workload"]],), (row["ms_per_step"],))
        for row in rows
        if is_ours(row["kind"]) and row["workload"] in native
    ]


def host_cost_ratios(results: Results) -> list[Ratio]:
    """Nanoseconds per pair, measure by measure."""
    rows = rows_of(results, "host_cost")
    return _ratios([(number, row["measure"], row["kind"], row["nanoseconds"]) for number, row in rows])


def _ratios(figures: list[tuple[int, str, str, float]]) -> list[Ratio]:
    """Pair (round, name, kind, value) up by name and round, and drop rounds that lack one of the two."""
    ratios = []
    for name in dict.fromkeys(name for _, name, _, _ in figures):
        native = {number: value for number, other, kind, value in figures if other == name and kind == NATIVE}
        ours = {number: value for number, other, kind, value in figures if other == name and is_ours(kind)}
        rounds = sorted(native.keys() & ours.keys())
        if rounds:
            ratios.append(
                Ratio(name, tuple(native[number] for number in rounds), tuple(ours[number] for number in rounds))
            )
    return ratios


def count_outcomes(results: Results) -> dict[str, int]:
    """How many tests ended in which way."""
    counts = dict.fromkeys(("passed", "failed", "error", "skipped"), 0)
    for test in results["tests"]:
        counts[test["outcome"]] += 1
    return counts
