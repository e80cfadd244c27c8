"""Lays out what torch's tests say: a count for a session, and the list of all differences with their reasons."""

from __future__ import annotations

from collections.abc import Sequence

from bench.gpu.torch_tests.comparison import (
    BRIDGE,
    NATIVE,
    PLUGGABLE,
    VERDICTS,
    Count,
    Reason,
    Row,
    counts,
    differences,
    reason_of,
)

BEGIN = (
    "<!-- torch's tests: written by `make pages` from docs/gpu-results and bench/gpu/torch_tests/reasons.json. -->\n"
)
END = "<!-- End of torch's tests. -->\n"

NAMES = {NATIVE: "torch's own allocator", PLUGGABLE: "rallocator, pluggable", BRIDGE: "rallocator, bridge"}

OUTCOMES = ("passed", "failed", "error", "crashed", "hung", "skipped", "not run")


def count_table(rows: Sequence[Row]) -> str:
    """How many tests ended in which way, by route."""
    table = [_cells(count) for count in counts(rows)]
    return _table(["route", *OUTCOMES, "passed of what passes with torch's own"], table)


def listing(rows: Sequence[Row], reasons: Sequence[Reason], source: str) -> str:
    """The whole list for `docs/torch-compatibility.md`. `source` says where the rows are from."""
    if not rows:
        return "\nNo session has run them yet.\n"
    parts = [f"\nFrom {source}.\n", count_table(rows)]
    for route in (PLUGGABLE, BRIDGE):
        found = [(row, reason_of(row, reasons)) for row in differences(rows, route)]
        by_verdict = ", ".join(
            f"{number} {verdict}"
            for verdict in VERDICTS
            if (number := sum(reason is not None and reason.verdict == verdict for _, reason in found))
        )
        parts.append(f"### {NAMES[route].partition(', ')[2].capitalize()}: {len(found)} that do not pass\n")
        if not found:
            continue
        parts.append(f"{by_verdict or 'Not looked at yet'}.\n")
        lines = [
            [f"`{row['name']}`", row["outcome"], reason.verdict if reason else "?", _text(reason, row)]
            for row, reason in found
        ]
        parts.append(_table(["test", "outcome", "verdict", "why"], lines))
    return "\n".join(parts)


def replace_listing(page: str, text: str) -> str:
    """The page with this list in the place of the one that it has.

    Raises:
        ValueError: the page has no such place.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"there is no place for torch's tests between {BEGIN.strip()} and {END.strip()}")
    return f"{before}{BEGIN}{text}\n{END}{after}"


def _cells(count: Count) -> list[str]:
    of_native = "" if count.route == NATIVE else f"{count.of_native} of {count.native}"
    return [NAMES[count.route], *(str(count.outcomes[outcome]) for outcome in OUTCOMES), of_native]


def _text(reason: Reason | None, row: Row) -> str:
    """The reason; where there is none yet, what the test said."""
    return " ".join((reason.why if reason else row["message"]).split()).replace("|", "\\|")[:300]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"
