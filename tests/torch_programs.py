"""Programs that are attached to the real torch over the simulated driver, each in a process of its own.

`fake_cudart.c` answers what torch asks of CUDA before it calls the hooks. Only tensors need a GPU: memory is obtained
by the two functions of torch's that take a number of bytes and an address.

A test that takes the fixture `route` plays its programs through both ways into torch, unless it is marked otherwise.
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

from tests.processes import build_library, succeed
from tools import torch_headers

ROUTES = ("pluggable", "bridge")

SIMULATED = {"RALLOCATOR_SIMULATE": "2x1GiB"}

_BEGIN = """
import ctypes
import torch
import rallocator
from rallocator import _core

rallocator.enable({settings!r}, attach={route!r})
torch.cuda._initialized = True  # What torch's Python side asks before it asks the allocator.
ctypes.CDLL(_core.__file__).rallocator_init(2)  # What its C++ side does when it initialises CUDA.
memory = torch.cuda.memory
allocate = torch._C._cuda_cudaCachingAllocator_raw_alloc
release = torch._C._cuda_cudaCachingAllocator_raw_delete
MiB = 1 << 20
"""


only_pluggable = pytest.mark.parametrize("route", ["pluggable"], indirect=True)
"""Marks a test of what the pluggable route alone needs."""

only_bridge = pytest.mark.parametrize("route", ["bridge"], indirect=True)
"""Marks a test of what the bridge alone can do."""


class Playing:
    """How programs attach now; set by the fixture `route`."""

    route = "pluggable"


def cuda_home() -> dict[str, str]:
    """Say where CUDA's headers are, in variables: those that `make headers` has fetched, unless others are named."""
    fetched = torch_headers.cuda_include()
    return {"CUDA_HOME": os.environ.get("CUDA_HOME") or str(fetched.parent)} if fetched.is_dir() else {}


@functools.cache
def built_bridge() -> str:
    """The path of a bridge for the installed torch, compiled once for each run of the tests."""
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("no C++ compiler")
    folder = tempfile.mkdtemp(prefix="rallocator-bridge-")
    command = [sys.executable, "-m", "rallocator", "build-bridge", "--out", folder]
    environment = os.environ | cuda_home()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (file,) = Path(folder).iterdir()
    return str(file)


def play(code: str, settings: str = "policy:native") -> list[str]:
    """Run a program with rallocator enabled; it must end well and without a word on stderr.

    Arguments:
        code: the program, indented as the test is.
        settings: for `rallocator.enable`.

    Returns:
        The lines that it printed.
    """
    fake = build_library("fake_cudart.c")
    program = _BEGIN.format(settings=settings, route=Playing.route) + textwrap.dedent(code)
    environment = dict(SIMULATED)
    if Playing.route == "bridge":
        environment["RALLOCATOR_BRIDGE"] = built_bridge()
    return succeed(program, environment=environment, preload=fake).splitlines()
