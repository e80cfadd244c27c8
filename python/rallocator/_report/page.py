"""Writes a report's page. All text from outside goes through `_escaped`; figures and our own words need not."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence
from pathlib import Path

from rallocator import __version__
from rallocator._replay import Advice, ReplayResult
from rallocator._report.contents import Bin, Contents, Frames, contents
from rallocator._sizes import format_size
from rallocator._text import printable

_HERE = Path(__file__).parent


def write_page(results: Sequence[ReplayResult], frames: Frames) -> str:
    """Return the page that shows the histories of all results."""
    script = (_HERE / "report.js").read_text(encoding="utf-8")
    style = (_HERE / "report.css").read_text(encoding="utf-8")
    shown = [one for result in results for one in contents(result, frames)]
    sections = "\n".join(_section(number, one) for number, one in enumerate(shown))
    # Nothing may be loaded from anywhere, and nothing run but our own script: whatever a name in the file says.
    policy = f"default-src 'none'; img-src data:; script-src {_hash(script)}; style-src {_hash(style)}"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Memory report: {_title(shown)}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<header>
<h1>Memory report</h1>
<p>Recorded requests for GPU memory, replayed on a simulated GPU by rallocator {__version__}. “Reserved” is what is
taken from the GPU; what the program holds is “allocated”, and with what other streams may still use “active”.</p>
</header>
<main>
{sections}
</main>
<script>{script}</script>
</body>
</html>
"""


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _title(shown: Sequence[Contents]) -> str:
    files = list(dict.fromkeys(_name(one) for one in shown))
    return _escaped(files[0]) + (f" and {len(files) - 1} more" if len(files) > 1 else "")


def _name(shown: Contents) -> str:
    # The folders are not the page's business: it may be handed on.
    return printable(Path(shown.rows[0].file).name)


def _section(number: int, shown: Contents) -> str:
    first = shown.rows[0]
    device = f", device {first.device}" if first.device else ""
    heading = f'<h2 id="history-{number}">{_escaped(_name(shown))}{device}</h2>'
    if not first.replayable:
        state = _state(shown)
        return f"<section>{heading}<p>It cannot be replayed: {_escaped(first.reason)}.</p>{state}</section>"
    most = max(row.peak_allocated or 0 for row in shown.rows)
    return f"""<section class="history" aria-labelledby="history-{number}" data-number="{number}">
{heading}
<p>{first.events:,} recorded events; at most {_size(most)} allocated at once.</p>
{_summary(shown)}
{_advice(shown.advice)}
{_charts(number, shown)}
{_holders(shown)}
{_histogram(shown.histogram)}
<script type="application/json" class="meta">{shown.meta}</script>
<script type="text/plain" class="data">{shown.data}</script>
</section>"""


def _summary(shown: Contents) -> str:
    first = shown.rows[0]
    rows = []
    if first.recorded_peak_reserved:
        share = (first.peak_allocated or 0) / first.recorded_peak_reserved
        rows.append(["(recorded)", _size(first.recorded_peak_reserved), f"{share:.1%}", "", "", "", "", ""])
    rows += [
        [
            row.policy,
            _size(row.peak_reserved),
            "" if row.utilization is None else f"{row.utilization:.1%}",
            f"{row.ooms or 0:,}",
            f"{row.retries or 0:,}",
            f"{row.host_waits or 0:,}",
            f"{(row.driver_time_us or 0) / 1000:,.0f} ms",
            _size(row.minimum_budget),
        ]
        for row in shown.rows
    ]
    headings = ["policy", "reserved", "utilization", "failed", "retries", "waits", "driver time", "fits in"]
    if all(row.minimum_budget is None for row in shown.rows):
        headings, rows = headings[:-1], [row[:-1] for row in rows]
    return _table("What each policy would have reserved", headings, rows)


def _advice(advice: Sequence[Advice]) -> str:
    if not advice:
        return "<h3>Advice</h3><p>Nothing to be said: no change that was tried would save memory worth mentioning.</p>"
    items = []
    for one in advice:
        finding, *remedies = one.lines()
        listed = "".join(f"<li>{_escaped(remedy)}</li>" for remedy in remedies)
        items.append(f"<li><p>{_escaped(finding)}</p><ul>{listed}</ul></li>")
    return f'<h3>Advice</h3><ul class="advice">{"".join(items)}</ul>'


def _charts(number: int, shown: Contents) -> str:
    options = "".join(
        f'<option value="{index}"{" selected" if row is shown.rows[-1] else ""}>{row.policy}</option>'
        for index, row in enumerate(shown.rows)
    )
    last = max(0, shown.steps - 1)
    return f"""<h3>Timeline</h3>
<div class="controls">
<label for="policy-{number}">Details of policy</label> <select id="policy-{number}" class="policy">{options}</select>
<button type="button" class="zoom-in">Zoom in</button>
<button type="button" class="zoom-out">Zoom out</button>
<button type="button" class="earlier">Earlier</button>
<button type="button" class="later">Later</button>
<button type="button" class="whole">Whole history</button>
</div>
<div class="stack">
<canvas class="timeline" role="img" aria-label="Bytes allocated, active and reserved over the steps of the history; the
table below has figures"></canvas>
<canvas class="cursor" aria-hidden="true"></canvas>
</div>
<ul class="legend timeline-legend"></ul>
{_samples(shown)}
<h3>Address map</h3>
<div class="controls">
<label for="moment-{number}">Moment, in requests and frees</label>
<input type="range" id="moment-{number}" class="moment" min="0" max="{last}" step="1" value="{shown.peak_step}">
</div>
<p class="readout"></p>
<canvas class="map" role="img" aria-label="Memory by address at the chosen moment; the table below has its
blocks"></canvas>
<ul class="legend map-legend"></ul>
<p class="pointed">Point at the map to see what is there.</p>
<details class="map-table"><summary>The largest blocks at this moment, as a table</summary>
<div class="wide" role="region" tabindex="0" aria-label="Blocks"><table><caption>Blocks, largest first</caption>
<thead><tr><th scope="col">address</th><th scope="col">size</th><th scope="col">state</th>
<th scope="col">since step</th></tr></thead><tbody></tbody></table></div></details>"""


def _samples(shown: Contents) -> str:
    policies = [row.policy for row in shown.rows]
    headings = ["step", "seconds", "allocated", *(f"active, {one}" for one in policies)]
    headings += [f"reserved, {one}" for one in policies]
    rows = []
    for moment in zip(*(shown.samples[policy] for policy in policies), strict=True):
        first = moment[0]
        active, reserved = [_size(one.active) for one in moment], [_size(one.reserved) for one in moment]
        rows.append([f"{first.step:,}", f"{first.time_us / 1e6:.3f}", _size(first.allocated), *active, *reserved])
    table = _table(f"Levels at {len(rows)} moments", headings, rows)
    return f"<details><summary>The timeline as a table</summary>{table}</details>"


def _holders(shown: Contents) -> str:
    rows = []
    for holder in shown.holders:
        stack = "<br>".join(_escaped(line) for line in holder.stack) or "not recorded"
        rows.append([_size(holder.size), f"{holder.count:,}", stack])
    table = _table("The largest holders when the program holds most", ["size", "blocks", "by whom"], rows, escape=False)
    return f"<h3>At the peak</h3><p>After step {shown.peak_step:,}.</p>{table}"


def _histogram(bins: Sequence[Bin]) -> str:
    rows = [[_range(one), f"{one.count:,}", _size(one.size)] for one in bins]
    table = _table("Requests by size", ["size", "requests", "together"], rows)
    most = max((one.count for one in bins), default=0) or 1
    height, width, bar = 160, max(1, len(bins)) * 24, 18
    bars = "".join(
        f'<rect x="{24 * index + 3}" y="{height - height * one.count / most:.1f}" width="{bar}" '
        f'height="{height * one.count / most:.1f}"><title>{_range(one)}: {one.count:,}</title></rect>'
        for index, one in enumerate(bins)
    )
    chart = (
        f'<svg class="histogram" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="Number of requests by size, smallest left; the table below has figures">{bars}</svg>'
    )
    if not bins:
        return ""
    return (
        f"<h3>Sizes of requests</h3><p>From {format_size(bins[0].at_least)} to {format_size(bins[-1].below)}: each bar "
        f"stands for sizes twice those of the one before. The highest is {most:,} requests.</p>{chart}"
        f"<details><summary>The sizes as a table</summary>{table}</details>"
    )


def _range(one: Bin) -> str:
    return f"{format_size(one.at_least)} up to {format_size(one.below)}"


def _state(shown: Contents) -> str:
    state = shown.rows[0].state
    if state is None:
        return ""
    rows = [
        [
            "default" if pool.pool == (0, 0) else f"{pool.pool[0]},{pool.pool[1]}",
            f"{pool.stream}",
            *map(_size, (pool.reserved, pool.allocated, pool.pending, pool.free, pool.largest_free)),
        ]
        for pool in state.pools
    ]
    headings = ["pool", "stream", "reserved", "allocated", "pending", "free", "largest free"]
    share = "" if state.fragmentation is None else f" {state.fragmentation:.1%} of the free memory is outside of it."
    text = (
        f"In the end {_size(state.reserved)} were reserved, {_size(state.allocated)} allocated, {_size(state.pending)} "
        f"pending on other streams and {_size(state.free)} free; the largest free block has "
        f"{_size(state.largest_free)}.{share}"
    )
    return f"<p>{text}</p>" + _table("The memory by pool and stream", headings, rows)


def _table(caption: str, headings: Sequence[str], rows: Iterable[Sequence[str]], *, escape: bool = True) -> str:
    """Return a table that scrolls by itself where it is too wide. Cells are text unless `escape` is off."""
    head = "".join(f'<th scope="col">{html.escape(heading)}</th>' for heading in headings)
    body = "".join(
        "<tr>"
        + "".join(
            f'<th scope="row">{cell}</th>' if column == 0 else f"<td>{cell}</td>"
            for column, cell in enumerate(map(html.escape, row) if escape else row)
        )
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="wide" role="region" tabindex="0" aria-label="{html.escape(caption)}"><table>'
        f"<caption>{html.escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _escaped(text: object) -> str:
    return html.escape(printable(text))


def _size(size_bytes: int | None) -> str:
    return "" if size_bytes is None else format_size(size_bytes)
