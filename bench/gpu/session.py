"""One session on a GPU machine: tests, the driver's contract, checksums and timings, in one bounded call.

usage: python -m bench.gpu.session --out DIR [--sections contract,tests,checksums,workloads,host_cost,caps,torch_tests]
                                   [--budget-s 540] [--commit HASH] ...

Every step is a process of its own with a time limit, so that none can take the session down; steps that no longer fit
into the budget are skipped, and the answer says so. What is compared alternates within the session, step by step
(`turns.py`), because two sessions, and two minutes, may land on machines of different speed. DIR receives
`results.json` (all raw rows, what `report.py` reads) and one log for each section; a short table is printed last.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu.junit import read_junit
from bench.gpu.plan import DEFAULT_SECTIONS, OURS, PEAK_GIB, SECTIONS, Step, plan, rawbench_folder
from bench.gpu.summary import summarize

ROOT = Path(__file__).resolve().parent.parent.parent

# Seconds kept back at the end of the budget for writing results and printing the table.
RESERVE_S = 10

# pytest's exit code where its options leave no test to run, as they may for one of the two runs.
NO_TEST_SELECTED = 5


class Session:
    """Runs steps against one deadline and keeps what they answer."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self._out: Path = options.out
        self._scratch = scratch
        self._started = time.monotonic()
        self._deadline = self._started + options.budget_s - RESERVE_S
        self._environment = dict(os.environ, PYTHONUNBUFFERED="1", RALLOCATOR_COMMIT=options.commit)
        # numpy's idle threads spin for a while, on the very cores that are measured.
        self._environment.setdefault("OPENBLAS_NUM_THREADS", "1")
        self.results: dict[str, Any] = {
            "schema": 1,
            "command": _command(),
            "commit": options.commit,
            "machine": None,
            "steps": [],
            "runs": [],
            "tests": [],
            "contract": None,
            "torch_tests": [],
        }

    def elapsed_s(self) -> float:
        """Seconds since the session began."""
        return time.monotonic() - self._started

    def say(self, text: str) -> None:
        """Print a line of progress."""
        print(f"[{self.elapsed_s():4.0f} s] {text}", flush=True)

    def describe_machine(self) -> None:
        """Ask a process for what this machine is. It is also the first, slow import of torch."""
        command = (sys.executable, "-m", "bench.gpu.machine")
        answer = subprocess.run(
            _limited(command, 180), cwd=ROOT, env=self._environment, capture_output=True, text=True, check=False
        )
        if answer.returncode == 0:
            self.results["machine"] = json.loads(answer.stdout)
            self.say(f"machine: {answer.stdout}")
        else:
            self.say(f"machine: {answer.stdout}{answer.stderr}")

    def start_build(self) -> subprocess.Popen[bytes]:
        """Build rawbench beside the first sections: it takes a minute of one core."""
        command = (sys.executable, "-m", "bench.gpu.rawbench_build", str(rawbench_folder(self._scratch)))
        with (self._out / "rawbench.log").open("wb") as log:
            return subprocess.Popen(
                _limited(command, 240), cwd=ROOT, env=self._environment, stdout=log, stderr=subprocess.STDOUT
            )

    def run(self, step: Step) -> None:
        """Run one step, or say why it was skipped."""
        left_s = int(self._deadline - time.monotonic())
        if left_s < step.least_s:
            self._note(step, "skipped", 0.0, f"{left_s} s of the budget were left and it needs {step.least_s} s")
            return
        started = time.monotonic()
        with (self._out / f"{step.section}.log").open("ab") as log:
            log.write(f"\n==== {step.name}: {' '.join(step.command)}\n".encode())
            log.flush()
            try:
                code = subprocess.run(
                    _limited(step.command, min(step.limit_s, left_s)),
                    cwd=ROOT,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    check=False,
                ).returncode
            except OSError as error:
                log.write(f"{error}\n".encode())
                code = 127
        outcome = {0: "done", 124: "timed out", 137: "timed out"}.get(code, "failed")
        if step.section == "tests" and code == NO_TEST_SELECTED:
            outcome = "done"
        self._keep(step, code)
        self._note(step, outcome, time.monotonic() - started, f"exit code {code}")
        if outcome != "done":
            self.print_log_end(step.section, 600)

    def _keep(self, step: Step, code: int) -> None:
        """Take in what the step wrote, also if it failed half-way."""
        if step.section == "contract":
            lines = (self._out / "contract.log").read_text(errors="replace").splitlines()
            self.results["contract"] = {"exit_code": code, "output": lines[-60:]}
        if step.result is None or not step.result.exists():
            return
        if step.section == "tests":
            self.results["tests"] += read_junit(step.result)
            return
        document = json.loads(step.result.read_text())
        if step.section == "torch_tests":
            self.results["torch_tests"] = document["rows"]
            return
        document.update(section=step.section, round=step.round)
        self.results["runs"].append(document)

    def _note(self, step: Step, outcome: str, seconds: float, detail: str) -> None:
        self.say(f"{step.name}: {outcome}, {seconds:.0f} s, {detail}")
        self.results["steps"].append(
            {
                "section": step.section,
                "name": step.name,
                "outcome": outcome,
                "seconds": round(seconds, 1),
                "detail": detail,
            }
        )
        self.write()

    def write(self) -> None:
        """Write what there is, so that a session that is cut short leaves its results."""
        (self._out / "results.json").write_text(json.dumps(self.results, indent=1) + "\n")

    def print_log_end(self, section: str, characters: int) -> None:
        """Print the end of a section's log, for a reader who gets only this process's output."""
        path = self._out / f"{section}.log"
        if path.exists():
            print(f"---- end of {section}.log\n{path.read_text(errors='replace')[-characters:]}", flush=True)


def _command() -> str:
    """The command that was typed, with what of the environment decides what the tests test."""
    attach = os.environ.get("GPU_TEST_ATTACH")
    words = [*([f"GPU_TEST_ATTACH={attach}"] if attach else []), "python -m bench.gpu.session", *sys.argv[1:]]
    return " ".join(words)


def _limited(command: Sequence[str], seconds: int) -> list[str]:
    """Put the command under coreutils' timeout, which ends its whole process group."""
    return ["timeout", "--kill-after=10", str(max(1, seconds)), *command]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Run tests and benches on a GPU machine within a time budget.")
    parser.add_argument("--out", type=Path, required=True, help="folder for results.json and the logs")
    parser.add_argument(
        "--sections",
        default=",".join(DEFAULT_SECTIONS),
        help=f"some of {','.join(SECTIONS)}, in any order; without this option all but the last two",
    )
    parser.add_argument("--budget-s", type=int, default=540, help="end within so many seconds (default 540)")
    parser.add_argument("--commit", default=os.environ.get("RALLOCATOR_COMMIT", "unknown"), help="recorded in results")
    parser.add_argument("--rounds", type=int, default=2, help="how often each pair of allocators is timed")
    parser.add_argument("--ours", choices=OURS, default=OURS[0], help="the route into torch to time")
    parser.add_argument("--also", default="expandable", help="further kinds to time once, separated by commas")
    parser.add_argument("--checksum-steps", type=int, default=12, help="steps of each workload; 0 means all of them")
    parser.add_argument("--workload", action="append", default=[], choices=PEAK_GIB, help="only this one (repeatable)")
    parser.add_argument("--workers", type=int, default=8, help="test processes side by side (needs pytest-xdist)")
    parser.add_argument("--tests-limit-s", type=int, default=240, help="limit for each of the two runs of pytest")
    parser.add_argument("--torch-tests-limit-s", type=int, default=345, help="limit for torch's own tests")
    parser.add_argument("--torch-tests-workers", type=int, default=14, help="processes of torch's tests side by side")
    parser.add_argument("--pytest", action="append", default=[], help="a further argument for pytest (repeatable)")
    parser.add_argument("--contract", type=Path, default=ROOT / "dist" / "contract_cuda", help="the contract program")
    parser.add_argument("--contract-arg", action="append", default=[], help="an argument for it (repeatable)")
    parser.add_argument("--plan", action="store_true", help="print the steps and run none")
    options = parser.parse_args(arguments)
    options.sections = [section for section in options.sections.split(",") if section]
    options.also = [kind for kind in options.also.split(",") if kind]
    unknown = sorted(set(options.sections) - set(SECTIONS))
    if unknown:
        parser.error(f"no such section: {', '.join(unknown)}")
    return options


def main() -> int:
    """Run the session. Returns 0 if every step ran and succeeded."""
    options = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        steps = plan(options, scratch)
        if options.plan:
            for step in steps:
                print(f"{step.limit_s:4d} s  {' '.join(step.command)}")
            return 0
        options.out.mkdir(parents=True, exist_ok=True)
        session = Session(options, scratch)
        build = session.start_build() if "host_cost" in options.sections else None
        session.describe_machine()
        if options.contract.exists():
            options.contract.chmod(0o755)  # A copy may have lost the permission on its way.
        for step in steps:
            if step.section == "host_cost" and build is not None:
                session.say(f"rawbench: exit code {build.wait()}")
                build = None
            session.run(step)
        if build is not None:
            build.wait()
        session.results["seconds"] = round(session.elapsed_s(), 1)
        session.write()
    session.print_log_end("tests", 5000)
    session.print_log_end("contract", 1500)
    print(summarize(session.results), flush=True)
    return 0 if all(step["outcome"] == "done" for step in session.results["steps"]) else 1


if __name__ == "__main__":
    sys.exit(main())
