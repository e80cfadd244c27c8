"""The harness that runs torch's own tests: what it makes of tests that pass, fail, crash, hang, or cannot begin."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.torch_tests import comparison
from bench.gpu.torch_tests.selection import FILES, is_selected
from bench.gpu.torch_tests.supervisor import Limits, Run, main

Rows = dict[tuple[str, str], dict[str, Any]]

TESTS = """
import os, subprocess, sys, time, unittest
import pytest, torch
from torch.testing._internal.common_cuda import blas_library_context

class TestOutcomes(unittest.TestCase):
    def test_a_passes(self): pass
    def test_b_fails(self): self.assertEqual(2, 1)
    def test_c_is_skipped(self): self.skipTest("no such GPU")
    def test_d_dies(self): os.abort()
    def test_e_leaves(self): os._exit(7)
    def test_f_hangs(self):
        subprocess.Popen(["sleep", "1000"]); open(os.environ["MARK"], "w").close(); time.sleep(1000)
    def test_g_has_parts(self):
        for number in range(3):
            with self.subTest(number=number): self.assertEqual(number, 0)
    @unittest.expectedFailure
    def test_h_is_expected_to_fail(self): self.fail()
    @pytest.mark.serial
    def test_i_is_alone(self): pass
    def test_j_sees_the_route(self):
        program = "import torch; print(torch.attached)"
        child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip()
        self.assertEqual((str(torch.attached), child), (os.environ["EXPECTED"],) * 2)

class TestOfAClass(unittest.TestCase):
    @classmethod
    def tearDownClass(cls): raise ValueError("left over")
    def test_of_it(self): pass
"""


@pytest.fixture
def tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of tests, beside a torch and a rallocator that only say how the one is attached to the other."""
    folder = tmp_path / "test"
    packages = tmp_path / "packages"
    for name, text in {
        packages / "torch/__init__.py": "attached = None",
        packages / "torch/testing/_internal/common_cuda.py": "",
        packages / "rallocator.py": """
            import torch
            def enable(attach, required): torch.attached = attach
            def attached(): return torch.attached
        """,
        folder / "test_cuda_trace.py": TESTS,
        folder / "test_accelerator.py": "import missing_module",
        folder / "test_cuda_primary_ctx.py": "raise SystemExit",
    }.items():
        name.parent.mkdir(parents=True, exist_ok=True)
        name.write_text(textwrap.dedent(text))
    monkeypatch.setenv("PYTHONPATH", str(packages))
    monkeypatch.setenv("MARK", str(tmp_path / "mark"))
    return folder


def new_run(tests: Path, **limits: Any) -> Run:
    """A run with limits for tests that last no time."""
    chosen = Limits(**{"test_s": 3.0, "start_s": 30.0, "workers": 2, "batch": 20, **limits})
    scratch = tests.parent / "scratch"
    scratch.mkdir()
    return Run(tests, chosen, time.monotonic() + 60, tests.parent / "log", tests.parent / "rows.json", scratch)


def rows_of(run: Run) -> Rows:
    """The rows by route and name of test, which must be there once."""
    rows = {(row["route"], row["name"].rpartition("::")[2]): row for row in run.rows}
    assert len(rows) == len(run.rows)
    return rows


def test_every_end_of_a_test_is_told_apart_and_loses_no_other(tests: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPECTED", "None")
    run = new_run(tests)
    shared, alone = run.collect(["test_cuda_trace.py"])
    assert [name.rpartition("::")[2] for name in alone] == ["test_i_is_alone"]
    run.run(["native"], shared, alone)
    found = {name: (row["outcome"], row["message"]) for (_, name), row in rows_of(run).items()}
    assert found == {
        "test_a_passes": ("passed", ""),
        "test_b_fails": ("failed", "line 8: AssertionError: 2 != 1"),
        "test_c_is_skipped": ("skipped", "Skipped: no such GPU"),
        "test_d_dies": ("crashed", found["test_d_dies"][1]),
        "test_e_leaves": ("crashed", found["test_e_leaves"][1]),
        "test_f_hangs": ("hung", "nothing happened for 3 s"),
        "test_g_has_parts": ("failed", "line 16: AssertionError: 1 != 0"),
        "test_h_is_expected_to_fail": ("skipped", found["test_h_is_expected_to_fail"][1]),
        "test_i_is_alone": ("passed", ""),
        "test_j_sees_the_route": ("passed", ""),
        "test_of_it": ("error", "line 28: ValueError: left over"),
    }
    assert found["test_d_dies"][1].startswith("killed by SIGABRT: ")
    assert found["test_e_leaves"][1].startswith("exit code 7: ")
    assert "AssertionError: 2 != 1" in run.log.read_text()
    assert json.loads(run.result.read_text()) == {"rows": run.rows}


def test_processes_that_a_hung_test_has_started_are_killed_too(tests: Path) -> None:
    run = new_run(tests, test_s=1.0)
    before = processes("sleep 1000")
    run.run_batch("native", ["test_cuda_trace.py::TestOutcomes::test_f_hangs"])
    assert (tests.parent / "mark").exists()
    assert processes("sleep 1000") == before


def processes(command: str) -> set[str]:
    """The ids of the processes that run a command."""
    listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines() if line.split(None, 1)[1] == command}


@pytest.mark.parametrize(("route", "attach"), [("rallocator-bridge", "bridge"), ("rallocator-pluggable", "pluggable")])
def test_processes_of_a_route_and_their_children_use_rallocator(
    tests: Path, monkeypatch: pytest.MonkeyPatch, route: str, attach: str
) -> None:
    monkeypatch.setenv("EXPECTED", attach)
    run = new_run(tests)
    run.run_batch(route, ["test_cuda_trace.py::TestOutcomes::test_j_sees_the_route"])
    assert rows_of(run)[route, "test_j_sees_the_route"]["outcome"] == "passed"


def test_process_that_does_not_use_rallocator_runs_no_test(tests: Path) -> None:
    (tests.parent / "packages/rallocator.py").write_text(
        "def enable(attach, required): pass\ndef attached(): return None"
    )
    run = new_run(tests)
    run.run_batch("rallocator-bridge", ["test_cuda_trace.py::TestOutcomes::test_a_passes"])
    row = rows_of(run)["rallocator-bridge", "test_a_passes"]
    assert (row["outcome"], "attached through None, not bridge" in row["message"]) == ("error", True)


def test_file_that_cannot_be_imported_is_said_and_loses_no_other(tests: Path) -> None:
    run = new_run(tests)
    shared, _ = run.collect(["test_accelerator.py", "test_cuda_primary_ctx.py", "test_cuda_trace.py"])
    assert len(shared) == 10
    (row,) = run.rows
    assert (row["route"], row["name"], row["outcome"]) == ("", "test_accelerator.py", "error")
    assert "ModuleNotFoundError: No module named 'missing_module'" in row["message"]


def test_what_no_longer_fits_into_the_time_is_said(tests: Path) -> None:
    run = new_run(tests)
    run.deadline = time.monotonic()
    run.run_batch("native", ["test_cuda_trace.py::TestOutcomes::test_a_passes"])
    assert rows_of(run)["native", "test_a_passes"]["outcome"] == "not run"


def test_command_says_that_there_are_no_tests(tests: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tests.parent / "rows.json"
    monkeypatch.setattr(sys, "argv", ["supervisor", "--json", str(rows), "--tests", str(tests.parent / "nothing")])
    assert main() == 1
    assert "found no test" in rows.read_text()


@pytest.mark.parametrize(
    ("name", "is_chosen"),
    [
        ("test_cuda.py::TestCuda::test_out_of_memory_retry", True),
        ("test_cuda.py::TestCuda::test_cublas_allow_tf32_get_set", False),
        ("test_cuda.py::TestCudaAllocator::test_memory_snapshot", True),
        ("test_cuda.py::TestCudaAllocator::test_temperature", False),
        ("test_cuda.py::TestCudaAutocast::test_autocast_cache_leak", False),
        ("test_multiprocessing.py::TestMultiprocessing::test_cuda_simple", True),
        ("test_multiprocessing.py::TestMultiprocessing::test_fs_pool", False),
    ],
)
def test_selection_is_about_memory(name: str, is_chosen: bool) -> None:
    assert is_selected(*name.split("::")) is is_chosen


def row(route: str, name: str, outcome: str) -> dict[str, Any]:
    """A row with nothing but what is compared."""
    return {"route": route, "name": name, "outcome": outcome, "seconds": 0.0, "message": ""}


def test_only_what_passes_natively_and_not_with_us_is_a_difference() -> None:
    rows = [
        *(row("native", name, outcome) for name, outcome in zip("abcd", ["passed"] * 3 + ["failed"], strict=True)),
        *(
            row(comparison.BRIDGE, name, outcome)
            for name, outcome in zip("abcd", ["passed", "skipped", "hung", "passed"], strict=True)
        ),
    ]
    assert [found["name"] for found in comparison.differences(rows, comparison.BRIDGE)] == ["b", "c"]
    native, bridge = comparison.counts(rows)
    assert (native.native, bridge.of_native, bridge.outcomes["passed"]) == (3, 1, 2)
    reasons = [
        comparison.Reason("b|x", (comparison.BRIDGE,), "", "ours to fix", "Because."),
        comparison.Reason(".*", (), "another text", "ours to fix", "Of something else."),
        comparison.Reason(".*", (comparison.PLUGGABLE,), "", "ours to fix", "Elsewhere."),
    ]
    assert [found["name"] for found in comparison.unexplained(rows, reasons)] == ["c"]


def test_reasons_can_be_read_and_have_a_verdict_each() -> None:
    for reason in comparison.read_reasons():
        assert reason.verdict in comparison.VERDICTS
        assert reason.why.endswith(".")
        assert set(reason.routes) <= {comparison.PLUGGABLE, comparison.BRIDGE}


def test_files_that_are_fetched_are_those_that_are_run() -> None:
    assert "test_cuda.py" in FILES
    assert len(set(FILES)) == len(FILES)
