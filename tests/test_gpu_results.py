"""The tools around the GPU: the results page, the session's plan, and the tests that wait for a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.report import read_sessions
from bench.gpu.torch_tests.comparison import BRIDGE, read_reasons, unexplained
from bench.gpu.torch_tests.page import BEGIN, END
from bench.gpu.turns import Runner, command_for, run_in_turns
from bench.gpu.workloads import parse_arguments as parse_workload_arguments

ROOT = Path(__file__).resolve().parent.parent
GIB = 1 << 30


def run_module(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a module of the repository as its documentation says, from the root."""
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def bench_run(section: str, kind: str, number: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One run as `session.py` keeps it."""
    return {"section": section, "kind": kind, "round": number, "most_steps": 12, "rows": rows}


def workload_row(kind: str, checksum: float, digest: str, ms: float, reserved_gib: float) -> dict[str, Any]:
    """One workload's raw row."""
    peaks = {"allocated_bytes": 2 * GIB, "active_bytes": 2 * GIB, "reserved_bytes": int(reserved_gib * GIB)}
    peaks["allocation_retries"] = 0
    return {
        "workload": "moe",
        "kind": kind,
        "cap_gib": None,
        "peaks": peaks,
        "ms_per_step": ms,
        "last_value": checksum,
        "checksum": checksum,
        "digest": digest,
        "error": "",
    }


@pytest.fixture
def results() -> dict[str, Any]:
    """Return a small session with one of everything."""
    ours = "rallocator-pluggable"
    return {
        "schema": 1,
        "command": "session.py --out out",
        "commit": "0123abc",
        "machine": {"date": "2026-11-29T12:00:00+00:00", "gpu": "NVIDIA H200", "gpu_count": 1, "driver": "580.1"},
        "steps": [
            {"section": "tests", "name": "tests", "outcome": "timed out", "seconds": 240.0, "detail": "code 124"}
        ],
        "tests": [
            {"name": "test_exit::test_exit_is_clean[x]", "outcome": "passed", "seconds": 7.1, "message": ""},
            {"name": "test_exit::test_y", "outcome": "failed", "seconds": 7.1, "message": "a | b\nmore"},
        ],
        "contract": {"exit_code": 0, "output": ["83 clauses hold"]},
        "runs": [
            bench_run("checksums", "native", 1, [workload_row("native", 1.0, "aa", 5.0, 3.0)]),
            bench_run("checksums", ours, 1, [workload_row(ours, 1.25, "bb", 5.0, 3.0)]),
            bench_run("checksums", "native", 2, [workload_row("native", 1.5, "cc", 5.0, 3.0)]),
            bench_run("workloads", "native", 1, [workload_row("native", 1.0, "aa", 8.0, 4.0)]),
            bench_run("workloads", ours, 1, [workload_row(ours, 1.0, "aa", 4.0, 3.0)]),
            bench_run("host_cost", "native", 1, [{"measure": "pair", "kind": "native", "nanoseconds": 400.0}]),
            bench_run("host_cost", ours, 1, [{"measure": "pair", "kind": ours, "nanoseconds": 100.0}]),
        ],
    }


def write_page(results: dict[str, Any], folder: Path) -> tuple[str, list[str]]:
    """Write the page for one session. Returns it, and the options that name its files."""
    (folder / "one.json").write_text(json.dumps(results))
    compatibility = folder / "compatibility.md"
    compatibility.write_text(f"before\n{BEGIN}{END}after\n")
    options = ["--results", str(folder), "--page", str(folder / "page.md"), "--compatibility", str(compatibility)]
    answer = run_module("bench.gpu.report", *options)
    assert answer.returncode == 0, answer.stderr
    return (folder / "page.md").read_text(), options


def test_results_page_follows_from_the_raw_results() -> None:
    answer = run_module("bench.gpu.report", "--check")
    assert answer.returncode == 0, answer.stderr


def test_edited_page_is_found_out_of_step(results: dict[str, Any], tmp_path: Path) -> None:
    page, options = write_page(results, tmp_path)
    assert run_module("bench.gpu.report", "--check", *options).returncode == 0
    (tmp_path / "page.md").write_text(page.replace("0.250", "0.240"))
    assert run_module("bench.gpu.report", "--check", *options).returncode == 1


def test_page_sets_ours_beside_torchs(results: dict[str, Any], tmp_path: Path) -> None:
    page, _ = write_page(results, tmp_path)
    assert "| commit | `0123abc` |" in page
    assert "| moe | 1 and 1.5 | 0.5 | 1.25 | 0.25 | within the spread |" in page
    assert "| ms per step | moe | 8.0 | 4.0 | 0.500 | 0.500 | 0.500 |" in page
    assert "| reserved GiB | moe | 4.00 | 3.00 | 0.750 | 0.750 | 0.750 |" in page
    assert "| pair | 400 | 100 | 0.250 | 0.250 | 0.250 |" in page
    assert "| exit is clean (x) | passed | 7.1 |  |" in page
    assert "1 passed, 1 failed." in page
    assert "timed out" in page


def test_steps_compare_at_their_best_rounds(results: dict[str, Any], tmp_path: Path) -> None:
    runs = [run for run in results["runs"] if run["section"] == "workloads"]
    for run, step_ms in zip(runs, ([9.0, 4.0], [4.0, 4.0]), strict=True):
        run["rows"][0]["step_ms"] = step_ms
    for kind, step_ms in (("native", [5.0, 7.0]), (runs[1]["kind"], [8.0, 3.0])):
        row = {**workload_row(kind, 1.0, "aa", 6.0, 3.0), "step_ms": step_ms}
        results["runs"].append(bench_run("workloads", kind, 2, [row]))
    alone = {**workload_row("native", 1.0, "aa", 1.0, 3.0), "step_ms": [1.0, 1.0]}
    results["runs"].append(bench_run("workloads", "native", 3, [alone]))
    page, _ = write_page(results, tmp_path)
    assert "| ms per step at best | moe | 4.50 | 3.50 | 0.778 | 0.778 | 0.778 |" in page
    assert "| ms per step | moe | 8.0, 6.0 | 4.0, 6.0 | 0.500, 1.000 | 0.750 | 0.667 |" in page


def test_what_a_limit_costs_is_told_by_the_same_workload_without_one(results: dict[str, Any], tmp_path: Path) -> None:
    ours = "rallocator-bridge"
    rows = [workload_row("native", 1.0, "aa", 8.0, 4.0)]
    rows += [{**workload_row(ours, 1.0, "aa", ms, 2.5), "cap_gib": cap} for cap, ms in ((2.04, 9.0), (2.1, 8.4))]
    rows.append({**workload_row(ours, 1.0, "aa", 0.0, 2.5), "cap_gib": 1.0, "error": "OutOfMemoryError: 1 | 2"})
    results["runs"].append(bench_run("caps", "native", 1, rows))
    page, _ = write_page(results, tmp_path)
    assert "| moe in 2.04 GiB | 8.0 | 9.0 | 1.125 | 1.125 | 1.125 |" in page
    assert "| moe in 2.10 GiB | 8.0 | 8.4 | 1.050 | 1.050 | 1.050 |" in page
    assert "| moe | rallocator-bridge | 1.00 | 2.50 | 0.0 | 0 | OutOfMemoryError: 1 \\| 2 |" in page
    assert "in 1.00 GiB" not in page


def test_what_of_torchs_tests_does_not_pass_is_listed(results: dict[str, Any], tmp_path: Path) -> None:
    results["torch_tests"] = [
        {"route": route, "name": name, "outcome": outcome, "seconds": 1.0, "message": "1 | 2"}
        for route, name, outcome in (
            ("native", "a", "passed"),
            ("native", "b", "passed"),
            ("native", "c", "failed"),
            (BRIDGE, "a", "passed"),
            (BRIDGE, "b", "hung"),
            (BRIDGE, "c", "failed"),
        )
    ]
    page, options = write_page(results, tmp_path)
    assert "| rallocator, bridge | 1 | 1 | 0 | 0 | 1 | 0 | 0 | 1 of 2 |" in page
    listed = (tmp_path / "compatibility.md").read_text()
    assert listed.startswith("before\n")
    assert listed.endswith("after\n")
    assert "### Bridge: 1 that do not pass" in listed
    assert "| `b` | hung | ? | 1 \\| 2 |" in listed
    assert run_module("bench.gpu.report", "--check", *options).returncode == 0
    (tmp_path / "compatibility.md").write_text(listed.replace("| hung |", "| passed |"))
    assert run_module("bench.gpu.report", "--check", *options).returncode == 1


def test_everything_of_torchs_tests_that_does_not_pass_has_its_reason() -> None:
    files = sorted((ROOT / "docs" / "gpu-results").glob("*.json"))
    rows: list[dict[str, Any]] = next(
        (session["torch_tests"] for _, session in read_sessions(files) if session.get("torch_tests")), []
    )
    assert [(row["route"], row["name"]) for row in unexplained(rows, read_reasons())] == []


@pytest.mark.parametrize(
    ("ours", "digest", "verdict"),
    [(1.0, "aa", "same bits"), (1.9, "bb", "within the spread"), (2.1, "bb", "outside the spread")],
)
def test_checksum_is_judged_by_the_spread_of_torchs_own_runs(
    results: dict[str, Any], tmp_path: Path, ours: float, digest: str, verdict: str
) -> None:
    results["runs"][1]["rows"][0].update(checksum=ours, digest=digest)
    page, _ = write_page(results, tmp_path)
    assert f"{verdict} |" in page


def test_plan_alternates_the_allocators() -> None:
    answer = run_module("bench.gpu.session", "--out", "unused", "--sections", "workloads", "--rounds", "2", "--plan")
    kinds = re.findall(r"bench\.gpu\.turns workloads (\S+)", answer.stdout)
    assert kinds == ["native,rallocator-pluggable,expandable", "native,rallocator-pluggable"]


STEPS = """
import sys
from bench.gpu.turns import Turn
name, steps, path, _, *descriptors = sys.argv[1:]
turn = Turn(*map(int, descriptors))
turn.take()
for _ in range(int(steps)):
    with open(path, "a") as file:
        file.write(name)
    turn.pass_on()
sys.exit(int(steps))
"""


def test_processes_make_their_steps_in_turn_and_each_ends_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    runners = [
        Runner((sys.executable, "-c", STEPS, name, str(steps), str(path)))
        for name, steps in (("a", 2), ("b", 4), ("c", 3))
    ]
    assert run_in_turns(runners) == [2, 4, 3]
    assert path.read_text() == "abcabcbcb"


def test_commands_of_turns_are_understood_by_the_workloads() -> None:
    kind, *arguments = command_for("workloads", "rallocator-bridge@14.6", ["moe", "--steps", "3"])[3:]
    options = parse_workload_arguments([kind, *arguments])
    assert (options.kind, options.names, options.steps, options.cap_gib) == ("rallocator-bridge", ["moe"], 3, 14.6)
    assert parse_workload_arguments(command_for("workloads", "native", ["moe"])[3:]).cap_gib is None


def test_gpu_tests_are_skipped_with_a_count_and_a_reason_where_there_is_no_gpu() -> None:
    answer = run_module("pytest", "tests/gpu", "-q", "-rs", "-p", "no:cacheprovider", CUDA_VISIBLE_DEVICES="")
    assert answer.returncode == 0, answer.stdout
    assert re.search(r"^\d+ skipped in", answer.stdout.splitlines()[-1]), answer.stdout
    assert "needs 1 NVIDIA GPU, this machine has 0" in answer.stdout
    assert "needs 2 NVIDIA GPUs, this machine has 0" in answer.stdout
