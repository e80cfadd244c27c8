"""`rallocator run` reaches every process that the program starts with `multiprocessing`, by whatever method."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.test_cli import WITHOUT_GPU, command
from tests.torch_programs import SIMULATED

pytestmark = pytest.mark.torch

BEGIN = """
import multiprocessing
import os
import sys

def state():
    import rallocator
    from rallocator import _attach
    attachment = _attach._process.attachment
    return rallocator.attached() and f"{rallocator.attached()} {attachment.config}"
"""

# Lines that say which way into torch was taken are wanted here: they must not come once for every process.
QUIET = {"PYTHONWARNINGS": "ignore:Failed to initialize NumPy"}


def run_program(
    folder: Path, code: str, *words: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program that is attached to torch over the simulated driver, as a module."""
    (folder / "program.py").write_text(BEGIN + textwrap.dedent(code))
    variables = {**WITHOUT_GPU, **SIMULATED, **QUIET, **(environment or {})}
    words = ("--attach", "pluggable", "--config", "policy:native", *words)
    return command("run", *words, "-m", "program", "argument", cwd=folder, env=variables)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_that_begin_anew_and_those_that_they_start_have_the_allocator(tmp_path: Path, method: str) -> None:
    code = f"""
        def nested(queue):
            queue.put(state())
            process = multiprocessing.get_context("spawn").Process(target=inner)
            process.start()
            process.join()

        def inner():
            print(state(), sys.argv[1], flush=True)

        if __name__ == "__main__":
            context = multiprocessing.get_context("{method}")
            queue = context.SimpleQueue()
            process = context.Process(target=nested, args=(queue,))
            process.start()
            process.join(100)
            print(queue.get(), process.exitcode)
    """
    done = run_program(tmp_path, code)
    assert done.stdout == "pluggable policy:native argument\npluggable policy:native 0\n", done.stderr
    assert done.stderr == ""


def test_torchs_own_ways_to_start_processes_and_other_interpreters_are_reached(tmp_path: Path) -> None:
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(f'#!/bin/sh\nTHROUGH=wrapper exec "{sys.executable}" "$@"\n')
    wrapper.chmod(0o755)
    code = f"""
        import torch

        class Numbers(torch.utils.data.Dataset):
            def __len__(self):
                return 1
            def __getitem__(self, index):
                return state()

        def rank(index):
            print(index, state(), os.environ["THROUGH"], flush=True)

        if __name__ == "__main__":
            loader = torch.utils.data.DataLoader(
                Numbers(), num_workers=1, multiprocessing_context="spawn", collate_fn=str
            )
            print(list(loader))
            multiprocessing.set_executable({str(wrapper)!r})
            torch.multiprocessing.spawn(rank, nprocs=1)
    """
    done = run_program(tmp_path, code)
    assert done.stdout == "[\"['pluggable policy:native']\"]\n0 pluggable policy:native wrapper\n", done.stderr
    assert done.stderr == ""


def test_a_line_that_was_said_is_not_said_again_by_every_process(tmp_path: Path) -> None:
    code = """
        def child():
            print(state(), flush=True)

        if __name__ == "__main__":
            process = multiprocessing.get_context("spawn").Process(target=child)
            process.start()
            process.join(100)
    """
    # Of two, the later option counts.
    done = run_program(
        tmp_path, code, "--config", "policy:native,cross_stream_reuse:all", environment={"PYTHONWARNINGS": "error"}
    )
    assert done.stdout == "pluggable policy:native,cross_stream_reuse:all\n", done.stderr
    assert done.stderr == "rallocator: cross_stream_reuse changes nothing under policy:native, only under rallocator.\n"


def test_a_process_in_which_enabling_fails_starts_all_the_same_and_says_why(tmp_path: Path) -> None:
    code = """
        def child():
            print("the child ran", flush=True)

        def start():
            process = multiprocessing.get_context("spawn").Process(target=child)
            process.start()
            process.join(100)
            print(process.exitcode, flush=True)

        if __name__ == "__main__":
            os.environ["RALLOCATOR_CONF"] = "policy:fast"
            start()
            # No rallocator there.
            del os.environ["RALLOCATOR_CONF"]
            standard = [path for path in sys.path if path.startswith(sys.base_prefix)]
            sys.path[:] = [os.getcwd(), *(path for path in standard if not path.endswith("-packages"))]
            start()
    """
    done = run_program(tmp_path, code)
    assert done.stdout == "the child ran\n0\n" * 2, done.stderr
    prefix = "rallocator: not enabled in a process that the program started: "
    wrong, missing = done.stderr.splitlines()
    assert wrong.startswith(f"{prefix}RALLOCATOR_CONF: ")
    assert missing == f"{prefix}No module named 'rallocator'"
