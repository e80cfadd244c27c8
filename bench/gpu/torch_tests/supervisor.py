"""Runs torch's tests of its allocator in processes of their own, route by route, and survives what they do.

usage: python -m bench.gpu.torch_tests.supervisor --json FILE [--tests DIR] [--routes native,rallocator-bridge,...]

Tests run in batches, a process each, several side by side; those that torch marks as serial run alone, at the end. A
test that fails ends its process, since it may leave anything behind: the rest of the batch goes on in a new one. A
test that crashes does the same against its will. One that takes too long is killed. What no longer fits into the time
is `not run`, which is an outcome like the others: no test is ever missing in the answer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.gpu.torch_tests import EVENTS_VARIABLE, FETCHED, ROOT, ROUTE_VARIABLE
from bench.gpu.torch_tests.selection import FILES

HERE = Path(__file__).resolve().parent

ROUTES = {"native": None, "rallocator-pluggable": "pluggable", "rallocator-bridge": "bridge"}
"""The argument `attach` of each kind of allocator; None where rallocator is not enabled."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """Seconds, and how much goes on at once."""

    test_s: float = 90.0
    """Longer than torch's slowest tests here take beside others: those compile an extension first."""
    start_s: float = 120.0
    """For the imports before the first test."""
    workers: int = 12
    batch: int = 16
    """Tests in a process: few lose little when one of them crashes, many share the imports."""


@dataclass
class Run:
    """The tests of one or several routes against one deadline."""

    tests: Path
    limits: Limits
    deadline: float
    """By `time.monotonic`."""
    log: Path
    result: Path
    """The file for the rows. It is written whenever a process has ended, so that whoever is killed leaves it."""
    scratch: Path
    rows: list[Row] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _count: int = 0

    def collect(self, files: Sequence[str] = FILES) -> tuple[list[str], list[str]]:
        """Ask pytest for the selected tests: those that may share the GPU, and those that may not.

        Each file in a process of its own, since some of torch's end theirs. A file that cannot be imported gives a row
        of its own, for no route.
        """
        with ThreadPoolExecutor(self.limits.workers) as pool:
            collected = [event for found in pool.map(self._collect_file, files) for event in found]
        if not collected:
            self._add("", "collection", "error", "found no test")
        return (
            [event["id"] for event in collected if not event["serial"]],
            [event["id"] for event in collected if event["serial"]],
        )

    def _collect_file(self, file: str) -> list[dict[str, Any]]:
        events, process = self._start("native", [str(self.tests / file)], "--collect-only", "-qq")
        try:
            process.wait(timeout=max(1.0, min(self.limits.start_s, self.deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            self._add("", file, "error", "cannot be imported in time")
        kill(process)
        found = list(read_events(events))
        for event in found:
            if event["event"] == "uncollected":
                self._add("", event["id"], "error", f"cannot be imported: {event['message']}")
        self._keep_log(f"collecting {file}: {end_of(process.returncode)}", events)
        return [event for event in found if event["event"] == "collected"]

    def run(self, routes: Sequence[str], shared: Sequence[str], alone: Sequence[str]) -> None:
        """Run all tests under each route. Routes alternate, so that all of them have got equally far at any moment."""
        size = self.limits.batch
        batches = [shared[first : first + size] for first in range(0, len(shared), size)]
        with ThreadPoolExecutor(self.limits.workers) as pool:
            for future in [pool.submit(self.run_batch, route, batch) for batch in batches for route in routes]:
                future.result()
        for route in routes:
            self.run_batch(route, alone)

    def run_batch(self, route: str, ids: Sequence[str]) -> None:
        """Run tests in as many processes, one after another, as it takes."""
        left = list(ids)
        while left:
            if time.monotonic() >= self.deadline:
                for test in left:
                    self._add(route, test, "not run", "the time was up")
                return
            ended = self._run_process(route, left)
            left = [test for test in left if test not in ended]

    def _run_process(self, route: str, ids: Sequence[str]) -> set[str]:
        """Run tests until all are done or one is not well. Returns those that have their row."""
        events, process = self._start(route, [str(self.tests / test) for test in ids], "--exitfirst")
        killed = self._watch(process, events)
        kill(process)  # What a test has started and left belongs to its process group.
        ended: set[str] = set()
        running = None
        for event in read_events(events):
            if event["event"] == "start":
                running = event["id"]
            elif event["event"] == "end":
                self._add(route, event["id"], event["outcome"], event["message"], event["seconds"])
                ended.add(event["id"])
                running = None
        end = end_of(process.returncode)
        if running is not None:
            outcome = {"": "crashed", "deadline": "not run"}.get(killed, "hung")
            self._add(route, running, outcome, killed or f"{end}: {last_line(output_of(events))}")
            ended.add(running)
        elif not ended and killed != "deadline":
            # Not even a first test: the next process would fare no better.
            for test in ids:
                self._add(route, test, "error", f"did not start: {killed or end}: {last_line(output_of(events))}")
            ended.update(ids)
        self._keep_log(f"{route}, {len(ids)} tests from {ids[0]} on: {killed or end}", events)
        return ended

    def _watch(self, process: subprocess.Popen[bytes], events: Path) -> str:
        """Wait for a process and kill it if it takes too long. Returns why it was killed, if it was."""
        lines, since = 0, time.monotonic()
        while process.poll() is None:
            time.sleep(0.1)
            now = time.monotonic()
            seen = events.read_bytes().count(b"\n") if events.exists() else 0
            if seen > lines:
                lines, since = seen, now
            limit = self.limits.test_s if lines else self.limits.start_s
            if now >= self.deadline:
                kill(process)
                return "deadline"
            if now - since > limit:
                kill(process)
                return f"nothing happened for {limit:.0f} s"
        return ""

    def _start(self, route: str, arguments: Sequence[str], *options: str) -> tuple[Path, subprocess.Popen[bytes]]:
        """Start pytest in a session of its own, in an empty folder."""
        with self._lock:
            self._count += 1
            place = self.scratch / str(self._count)
        place.mkdir()
        events = place / "events"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        path = [str(HERE / "site"), str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
        environment.update(
            {
                EVENTS_VARIABLE: str(events),
                ROUTE_VARIABLE: ROUTES[route] or "",
                "PYTHONPATH": os.pathsep.join(path),
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # Other packages' plugins import much.
                "TORCHINDUCTOR_COMPILE_THREADS": "1",  # Else each process starts one compiler for each core.
                # Who is killed while it builds leaves a lock behind, for which others of its route alone shall wait.
                "TORCH_EXTENSIONS_DIR": str(self.scratch / f"extensions-{route}"),
            }
        )
        command = [sys.executable, "-m", "pytest", "-p", "bench.gpu.torch_tests.reporter", "-p", "no:cacheprovider"]
        command += ["-c", str(HERE / "pytest.ini"), f"--rootdir={self.tests}", "--tb=short", *options, *arguments]
        with (place / "output").open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=place,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return events, process

    def _add(self, route: str, test: str, outcome: str, message: str, seconds: float = 0.0) -> None:
        row = {"route": route, "name": test, "outcome": outcome, "seconds": seconds, "message": message}
        with self._lock:
            self.rows.append(row)

    def _keep_log(self, title: str, events: Path) -> None:
        with self._lock, self.log.open("ab") as log:
            log.write(f"\n==== {title}\n".encode() + output_of(events)[-100_000:])
            self.write()

    def write(self) -> None:
        """Write the rows, whole: a reader never sees half of them."""
        part = self.result.with_suffix(".part")
        part.write_text(json.dumps({"rows": self.rows}, indent=1) + "\n")
        part.replace(self.result)


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events that a process wrote; the last line may be cut off."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return


def output_of(events: Path) -> bytes:
    """What the process printed that wrote these events."""
    return (events.parent / "output").read_bytes()


def last_line(output: bytes) -> str:
    """The last line that says anything."""
    lines = [line.strip() for line in output.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"


def end_of(code: int) -> str:
    """How a process ended, in words."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and what it started, and wait for it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main() -> int:
    """Run them. Returns 0 if each has an outcome, whatever it is, and 1 if the time was up before."""
    parser = argparse.ArgumentParser(description="Run torch's tests of its allocator under several allocators.")
    parser.add_argument("--json", type=Path, required=True, help="file for the rows")
    parser.add_argument("--tests", type=Path, default=FETCHED / "test", help="torch's folder of tests")
    parser.add_argument("--routes", default=",".join(ROUTES), help=f"some of {','.join(ROUTES)}")
    parser.add_argument("--workers", type=int, default=Limits.workers, help="processes side by side")
    parser.add_argument("--limit-s", type=float, default=330.0, help="end within so many seconds")
    parser.add_argument("--log", type=Path, help="file for what the tests print (default: beside the rows)")
    options = parser.parse_args()
    deadline = time.monotonic() + options.limit_s
    with tempfile.TemporaryDirectory() as folder:
        log = options.log or options.json.with_suffix(".log")
        limits = Limits(workers=options.workers)
        run = Run(options.tests.resolve(), limits, deadline, log, options.json, Path(folder))
        shared, alone = run.collect()
        print(f"{len(shared)} tests side by side, {len(alone)} alone, for each of {options.routes}", flush=True)
        run.run(options.routes.split(","), shared, alone)
        run.write()
    complete = all(row["outcome"] != "not run" for row in run.rows) and bool(shared or alone)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
