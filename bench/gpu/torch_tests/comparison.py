"""Sets the routes side by side: what of torch's tests passes under torch's own allocator, and what of that under ours.

A difference is a test that passes with torch's allocator and does not, for whatever reason, with ours. Each has its
reason in `reasons.json`, the first entry that fits: `tests` is a pattern for the whole name, `routes` those that it
speaks of (all of ours if it names none), `says` a pattern that the failure's text must hold, `verdict` one of
`VERDICTS`, `why` a sentence. So an entry cannot explain away a failure of another kind than the one it was written for.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]

NATIVE, PLUGGABLE, BRIDGE = "native", "rallocator-pluggable", "rallocator-bridge"

VERDICTS = ("native-only expectation", "limit of the route", "ours to fix", "differs by run", "not run yet")

REASONS = Path(__file__).resolve().parent / "reasons.json"


@dataclass(frozen=True)
class Count:
    """How the tests ended on one route."""

    route: str
    outcomes: Counter[str]
    of_native: int
    """Passed here and with torch's allocator."""
    native: int
    """Passed with torch's allocator."""

    def __str__(self) -> str:
        ended = ", ".join(f"{number} {outcome}" for outcome, number in self.outcomes.most_common())
        return ended if self.route == NATIVE else f"{ended}; {self.of_native} of the {self.native} that pass natively"


@dataclass(frozen=True)
class Reason:
    """Why a test does not pass."""

    tests: str
    routes: tuple[str, ...]
    says: str
    verdict: str
    why: str

    def explains(self, row: Row) -> bool:
        """Whether this is about that failure of that test on that route."""
        return row["route"] in (self.routes or (PLUGGABLE, BRIDGE)) and bool(
            re.fullmatch(self.tests, row["name"]) and re.search(self.says, row["message"])
        )


def read_reasons(path: Path = REASONS) -> list[Reason]:
    """The reasons, in the order in which they are tried."""
    return [
        Reason(entry["tests"], tuple(entry.get("routes", ())), entry["says"], entry["verdict"], entry["why"])
        for entry in json.loads(path.read_text(encoding="utf-8"))
    ]


def counts(rows: Sequence[Row]) -> list[Count]:
    """One count for each route that was run."""
    native = _passed(rows, NATIVE)
    found = []
    for route in dict.fromkeys(row["route"] for row in rows if row["route"]):
        outcomes = Counter(row["outcome"] for row in rows if row["route"] == route)
        found.append(Count(route, outcomes, len(native & _passed(rows, route)), len(native)))
    return sorted(found, key=lambda count: (NATIVE, PLUGGABLE, BRIDGE).index(count.route))


def differences(rows: Sequence[Row], route: str) -> list[Row]:
    """The tests that pass with torch's allocator and not on this route, by name."""
    native = _passed(rows, NATIVE)
    found = [row for row in rows if row["route"] == route and row["name"] in native and row["outcome"] != "passed"]
    return sorted(found, key=lambda row: str(row["name"]))


def unexplained(rows: Sequence[Row], reasons: Sequence[Reason]) -> Iterator[Row]:
    """The differences without a reason."""
    for route in (PLUGGABLE, BRIDGE):
        for row in differences(rows, route):
            if reason_of(row, reasons) is None:
                yield row


def reason_of(row: Row, reasons: Sequence[Reason]) -> Reason | None:
    """The first reason that fits."""
    return next((reason for reason in reasons if reason.explains(row)), None)


def _passed(rows: Sequence[Row], route: str) -> set[str]:
    return {row["name"] for row in rows if row["route"] == route and row["outcome"] == "passed"}
