"""Run a bench on several allocators at once, each making one step in turn, so that they meet the same machine.

usage: python -m bench.gpu.turns workloads KIND[@CAP_GIB],KIND[@CAP_GIB][,...] --json OUT [NAME ...] [--steps N]
       python -m bench.gpu.turns host_cost KIND,KIND[,...] --json OUT --extension DIR

What is not understood here is for the bench. With @CAP_GIB that process alone is limited to so many GiB.

A machine that others use too changes its speed by half within a minute. Runs that follow one another compare such
minutes; steps that follow one another share them. Every step follows one of another process, whose caches and whose
turn on the GPU it takes over. A process that fails in one workload ends there, or it would begin the next while the
others finish theirs. All processes hold their memory at once, so the GPU must have room for the sum.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TOKEN = b"."


class Turn:
    """A process's right to work, which it hands over between its steps. It ends with the process."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd

    def take(self) -> None:
        """Wait until it is this process's turn. Raises EOFError if nobody is left who could give it."""
        if os.read(self._read_fd, 1) != TOKEN:
            raise EOFError("the process that gives the turns has ended")

    def pass_on(self) -> None:
        """Let the others make their step, and wait for the next turn."""
        os.write(self._write_fd, TOKEN)
        self.take()


class Runner:
    """One process that waits for its turns, on the two descriptors that its last option names."""

    def __init__(self, command: Sequence[str]) -> None:
        theirs_read, self._write_fd = os.pipe()
        self._read_fd, theirs_write = os.pipe()
        self._process = subprocess.Popen(
            (*command, "--turn-fds", str(theirs_read), str(theirs_write)), pass_fds=(theirs_read, theirs_write)
        )
        os.close(theirs_read)
        os.close(theirs_write)

    def step(self) -> bool:
        """Let it make one step. Returns whether it may have another."""
        try:
            os.write(self._write_fd, TOKEN)
        except BrokenPipeError:
            return False
        return os.read(self._read_fd, 1) == TOKEN

    def wait(self) -> int:
        """Wait for its end. Returns its exit code."""
        return self._process.wait()


def run_in_turns(runners: Sequence[Runner]) -> list[int]:
    """Give turns until every process has ended. Returns their exit codes."""
    running = list(runners)
    while running:
        running = [runner for runner in running if runner.step()]
    return [runner.wait() for runner in runners]


def main() -> int:
    """Run all kinds and write one document with the rows of all. Returns 1 if any of them failed."""
    parser = argparse.ArgumentParser(description="Run a bench on several allocators, one step each in turn.")
    parser.add_argument("bench", choices=("workloads", "host_cost"), help="the bench to run")
    parser.add_argument("kinds", help="two or more of KIND or KIND@CAP_GIB, by commas")
    parser.add_argument("--json", type=Path, required=True, help="write the raw rows of all kinds to this file")
    options, arguments = parser.parse_known_args()
    kinds = options.kinds.split(",")
    with tempfile.TemporaryDirectory() as folder:
        results = [Path(folder) / f"{number}.json" for number in range(len(kinds))]
        runners = [
            Runner((*command_for(options.bench, kind, arguments), "--json", str(result)))
            for kind, result in zip(kinds, results, strict=True)
        ]
        codes = run_in_turns(runners)
        documents = [json.loads(result.read_text()) for result in results if result.exists()]
    if documents:
        options.json.write_text(json.dumps(united(documents), indent=1))
    return 1 if any(codes) else 0


def command_for(bench: str, entrant: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """The command for KIND or KIND@CAP_GIB, with what else it is to be told."""
    kind, _, cap_gib = entrant.partition("@")
    limit = ("--cap-gib", cap_gib) if cap_gib else ()
    return (sys.executable, "-m", f"bench.gpu.{bench}", kind, *arguments, *limit)


def united(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One document with the rows of all."""
    return {
        **documents[0],
        "kind": ",".join(document["kind"] for document in documents),
        "command": " ".join(["python -m bench.gpu.turns", *sys.argv[1:]]),
        "rows": [row for document in documents for row in document["rows"]],
    }


if __name__ == "__main__":
    sys.exit(main())
