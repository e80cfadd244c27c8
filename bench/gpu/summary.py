"""The short table that a session prints last, for a reader who gets only the end of its output."""

from __future__ import annotations

from collections import Counter

from bench.gpu.comparison import (
    Ratio,
    Results,
    best_step_ratios,
    cap_ratios,
    checksums,
    count_outcomes,
    host_cost_ratios,
    reserved_ratios,
    rows_of,
    step_time_ratios,
)
from bench.gpu.torch_tests import comparison as torch_tests


def summarize(results: Results) -> str:
    """Lay the whole session out as plain text."""
    lines = ["==== summary", *_steps(results)]
    if results["tests"]:
        counts = count_outcomes(results)
        lines.append("tests: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
        lines += [
            f"  {test['outcome']:7s} {test['name']}: {test['message'][:160]}"
            for test in results["tests"]
            if test["outcome"] in {"failed", "error"}
        ]
        reasons = Counter(test["message"] for test in results["tests"] if test["outcome"] == "skipped")
        lines += [f"  {count} skipped: {reason}" for reason, count in reasons.items()]
    if results["contract"]:
        lines.append(f"contract: exit code {results['contract']['exit_code']}")
    lines += _torch_tests(results)
    for comparison in checksums(results):
        lines.append(
            f"checksum {comparison.workload:16s} native {' '.join(f'{value:.9g}' for value in comparison.native)}"
            f" spread {comparison.spread:.3g} ours {comparison.ours} distance {comparison.distance}"
            f" {comparison.verdict}"
        )
    for section in ("workloads", "caps"):
        for _, row in rows_of(results, section):
            if row["error"]:
                lines.append(f"error in {row['workload']} under {row['kind']}, {section}: {row['error']}")
    lines += _ratio_lines("ms/step", step_time_ratios(results))
    lines += _ratio_lines("ms/step at best", best_step_ratios(results))
    lines += _ratio_lines("reserved GiB", reserved_ratios(results), scale=1 / (1 << 30))
    lines += _ratio_lines("ms/step", cap_ratios(results))
    lines += _ratio_lines("host ns", host_cost_ratios(results))
    return "\n".join(lines)


def _steps(results: Results) -> list[str]:
    return [
        f"{step['outcome']:9s} {step['seconds']:6.1f} s  {step['name']}"
        + ("" if step["outcome"] == "done" else f" ({step['detail']})")
        for step in results["steps"]
    ]


def _torch_tests(results: Results) -> list[str]:
    rows = results.get("torch_tests", [])
    lines = [f"torch's tests: {count.route}: {count}" for count in torch_tests.counts(rows)]
    lines += [f"  {row['outcome']:8s} {row['name']}: {row['message'][:160]}" for row in rows if not row["route"]]
    return lines + [
        f"  {row['outcome']:8s} {row['name'].partition('::')[2]}: {row['message'][:120]}"
        for row in torch_tests.differences(rows, torch_tests.BRIDGE)
    ]


def _ratio_lines(unit: str, ratios: list[Ratio], scale: float = 1.0) -> list[str]:
    def listed(values: tuple[float, ...], factor: float = 1.0) -> str:
        return " ".join(f"{value * factor:.2f}" for value in values)

    return [
        f"{unit} {ratio.name:36s} native {listed(ratio.native, scale)} ours {listed(ratio.ours, scale)}"
        f" ratio {' '.join(f'{value:.3f}' for value in ratio.by_round)} of best {ratio.of_best:.3f}"
        for ratio in ratios
    ]
