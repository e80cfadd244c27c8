"""A replay's result as a notebook shows it."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from rallocator._replay.advice import Advice
from rallocator._replay.row import ReplayRow
from rallocator._sizes import format_size

_HEADINGS = (
    "device",
    "policy",
    "peak allocated",
    "peak reserved",
    "utilization",
    "failed",
    "retries",
    "waits",
    "fits in",
)


def result_as_html(rows: Sequence[ReplayRow], advice: Mapping[int, Sequence[Advice]]) -> str:
    """Return a table of the rows, and the advice below it. Text from outside is escaped."""
    parts = []
    for file in dict.fromkeys(row.file for row in rows):
        body = "".join(_line(row) for row in rows if row.file == file)
        head = "".join(f"<th scope='col'>{heading}</th>" for heading in _HEADINGS)
        caption = f"<caption>{html.escape(file)}</caption>"
        parts.append(f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
    for device, found in advice.items():
        for one in found:
            finding, *remedies = one.lines()
            items = "".join(f"<li>{html.escape(remedy)}</li>" for remedy in remedies)
            parts.append(f"<p>Device {device}: {html.escape(finding)}</p><ul>{items}</ul>")
    return "".join(parts)


def _line(row: ReplayRow) -> str:
    if not row.replayable:
        cells = [str(row.device), row.policy, f"cannot be replayed: {row.reason}"]
        spans = ["", "", f" colspan='{len(_HEADINGS) - 2}'"]
    else:
        cells = [
            str(row.device),
            row.policy,
            _size(row.peak_allocated),
            _size(row.peak_reserved),
            "" if row.utilization is None else f"{row.utilization:.1%}",
            f"{row.ooms:,}",
            f"{row.retries:,}",
            f"{row.host_waits:,}",
            _size(row.minimum_budget),
        ]
        spans = [""] * len(cells)
    joined = "".join(f"<td{span}>{html.escape(cell)}</td>" for cell, span in zip(cells, spans, strict=True))
    return f"<tr>{joined}</tr>"


def _size(size_bytes: int | None) -> str:
    return "" if size_bytes is None else format_size(size_bytes)
