"""Running Python in processes of its own, and building the small C libraries that some of them need.

What a test does to torch's allocator lasts until the process ends, so each such test has one to itself.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from rallocator import _core

TESTS = Path(__file__).parent
INCLUDE = TESTS.parent / "include"
SOURCES = TESTS / "c"


def run_python(
    code: str, *, environment: dict[str, str] | None = None, preload: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program and wait for its end.

    Arguments:
        code: the program, indented as the test is.
        environment: variables to set besides those of the test. rallocator's and torch's own are always unset first.
        preload: a library to load before all others. None: none.

    Returns:
        The finished process, with its exit code and output as text.
    """
    ours = ("RALLOCATOR_", "PYTORCH_", "CUDA_VISIBLE_DEVICES")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    # torch says on stderr that numpy is missing where it is; that is not what these tests are about.
    # And rallocator says that it found no bridge: tests that are about that ask for it.
    variables["PYTHONWARNINGS"] = "ignore:Failed to initialize NumPy,ignore:rallocator attaches through"
    variables["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    variables.update(environment or {})
    if preload is not None:
        variables["LD_PRELOAD"] = str(preload)
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def succeed(code: str, *, environment: dict[str, str] | None = None, preload: Path | None = None) -> str:
    """Run a program that has to end with code 0 and an empty stderr, and return its stdout without the last newline."""
    done = run_python(code, environment=environment, preload=preload)
    assert done.stderr == "", done.stderr
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}"
    return done.stdout.rstrip("\n")


def read_recordings_within(limit_bytes: int, files: dict[str, bytes], folder: Path) -> list[str]:
    """Read hostile recordings in a process that may not have more than so many bytes of addresses.

    Arguments:
        limit_bytes: the limit.
        files: what is in each, by the name that it gets.
        folder: where they are written.

    Returns:
        For each, in order, why it was refused; "read" if it was not.
    """
    script = """
import resource, sys
from pathlib import Path

limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
from rallocator._replay.reader import read_recording
from rallocator.errors import SnapshotError

for name in sys.argv[2:]:
    try:
        read_recording(Path(name))
        print("read")
    except SnapshotError as error:
        print(error)
"""
    for name, content in files.items():
        (folder / name).write_bytes(content)
    command = [sys.executable, "-c", script, str(limit_bytes), *(str(folder / name) for name in files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    return done.stdout.splitlines()


def build_library(source: str, *options: str, link_core: bool = False) -> Path:
    """Compile a file of tests/c into a shared library; skips the test where there is no compiler for it.

    Arguments:
        source: the name of the file.
        options: further options of the compiler.
        link_core: whether the library uses rallocator's functions.

    Returns:
        The path of the library, which is built once for each run of the tests.
    """
    compiler = shutil.which("c++" if source.endswith(".cpp") else "cc")
    if compiler is None:
        pytest.skip(f"no compiler for {source}")
    return _build(compiler, source, options, link_core)


@functools.cache
def _build(compiler: str, source: str, options: tuple[str, ...], link_core: bool) -> Path:
    library = _build_folder() / f"lib{Path(source).stem}.so"
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-I{INCLUDE}", "-o", str(library)]
    command += [str(SOURCES / source), *options]
    if link_core:
        command.append(_core.__file__)
    subprocess.run(command, check=True)
    return library


@functools.cache
def _build_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="rallocator-tests-"))
