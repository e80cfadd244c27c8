"""Tests of rallocator under a real torch on a real GPU: skipped, with a count and a reason, where there is none.

torch takes its allocator once in a process, and what a test leaves behind stays in it. So every test here runs in a
Python process of its own: the pytest that collects them starts one more pytest for each, by its node id, and that child
runs the body. A child that dies of a signal, or whose exit is not clean, fails its test too. A test marked
`drives_processes` runs where it is collected and starts what it needs through `run_python`.

A test that takes the fixture `allocator` also proves, at its end, that all memory can be given back to the driver.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
CHILD = "RALLOCATOR_GPU_TEST_CHILD"
IN_CHILD = CHILD in os.environ

# The way into torch of every test that does not name one: "pluggable" or "bridge".
ATTACH = os.environ.get("GPU_TEST_ATTACH", "pluggable")

# Seconds after which a process is taken for hung. The slowest, the demo, may take two minutes.
PROCESS_LIMIT_S = 150

# Counts devices in a process of its own, since a process that has initialised CUDA must not fork.
COUNT_GPUS = """
import ctypes
count = ctypes.c_int(0)
try:
    driver = ctypes.CDLL("libcuda.so.1")
    ready = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
except OSError:
    ready = False
print(count.value if ready else 0)
"""

# Prints why there is no bridge for the installed torch; nothing if there is one.
FIND_BRIDGE = """
import torch
from rallocator import _bridge
print(getattr(_bridge.find(torch), "reason", ""))
"""

# Prints whether the installed torch is one that `enable()` takes a bridge for by itself.
IS_TESTED = """
import torch
from rallocator import _bridge, _torch
print(_torch.release(torch.__version__) <= _bridge.NEWEST_TESTED)
"""

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers of this folder."""
    for marker in (
        "gpu: needs an NVIDIA GPU; skipped, with a count, where there is none",
        "drives_processes: runs in the collecting process and starts its own (tests/gpu)",
        "exclusive: watches the GPU's free memory or its timing, so nothing else may run there (tests/gpu)",
        "two_gpus: needs two GPUs (tests/gpu)",
        "bridge: attaches through the bridge, which has to be there (tests/gpu)",
        "pluggable: is about what the pluggable route alone cannot do (tests/gpu)",
        "keeps_memory(reason): torch itself never gives all memory back after this test (tests/gpu)",
    ):
        config.addinivalue_line("markers", marker)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, and give every test of this folder the time that its processes may take."""
    if IN_CHILD:
        return  # The parent has looked already, and a child that forks must not have touched the driver.
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        reason = _reason_to_skip(2 if item.get_closest_marker("two_gpus") else 1)
        if not reason and (ATTACH == "bridge" or item.get_closest_marker("bridge")):
            reason = _reason_without_bridge()
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
        if config.pluginmanager.hasplugin("timeout"):
            item.add_marker(pytest.mark.timeout(2 * PROCESS_LIMIT_S))


@cache
def _reason_to_skip(gpus_needed: int) -> str | None:
    gpus = _count_gpus()
    if gpus < gpus_needed:
        return f"needs {gpus_needed} NVIDIA GPU{'s' if gpus_needed > 1 else ''}, this machine has {gpus}"
    for package in ("torch", "rallocator"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    return None


@cache
def _reason_without_bridge() -> str | None:
    return _ask(FIND_BRIDGE) or None


def _ask(program: str) -> str:
    """Ask in a process of its own, since that imports torch."""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.strip()


@cache
def _count_gpus() -> int:
    answer = subprocess.run([sys.executable, "-c", COUNT_GPUS], capture_output=True, text=True, timeout=60, check=True)
    return int(answer.stdout)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the test in a process of its own, unless this is that process or the test starts its own."""
    if IN_CHILD or pyfuncitem.get_closest_marker("drives_processes"):
        return None
    _run_in_child(pyfuncitem)
    return True


def _run_in_child(item: pytest.Function) -> None:
    """Run one test by its node id, under this folder's settings whatever those of the outer run are."""
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "--capture=no", "-p", "no:cacheprovider"]
    command.append(f"{item.path.name}::{item.name}")
    kept = ("RALLOCATOR_BRIDGE",)
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in kept or not name.startswith(("PYTEST_", "RALLOCATOR_"))
    }
    environment[CHILD] = "1"
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # Other packages' plugins import much, on some machines jax.
    result = _run(command, environment, HERE)
    skipped = re.search(r"^SKIPPED \[1\] \S+ (.*)$", result.stdout, re.MULTILINE)
    if result.returncode == 0 and skipped:
        pytest.skip(skipped[1])
    if result.returncode != 0 or "1 passed" not in result.stdout:
        pytest.fail(_describe(result), pytrace=False)


def _run(command: Sequence[str], environment: Mapping[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROCESS_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        said = "\n".join(_as_text(output)[-4000:] for output in (expired.stdout, expired.stderr))
        pytest.fail(f"no end after {PROCESS_LIMIT_S} s: {' '.join(command)}\n{said}", pytrace=False)


def _as_text(output: str | bytes | None) -> str:
    """What an expired process had said: subprocess gives bytes here even when asked for text."""
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _describe(result: subprocess.CompletedProcess[str]) -> str:
    """How a process ended and the end of what it said."""
    end = f"exit code {result.returncode}"
    if result.returncode < 0:
        end = f"killed by {signal.Signals(-result.returncode).name}"
    return f"{end}\n---- stdout\n{result.stdout[-4000:]}\n---- stderr\n{result.stderr[-4000:]}"


@pytest.fixture
def run_python(tmp_path: Path) -> RunPython:
    """Return a function that runs a program in a fresh Python and returns the CompletedProcess, its output as text.

    Arguments: the program's text (indented as its caller is), or the interpreter's `options` instead of one; variables
    to add to its `environment`; the exit code it must have (`code`, default 0; None for any).
    """

    def run(
        program: str | None = None,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        code: int | None = 0,
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *options]
        if program is not None:
            file = tmp_path / "program.py"
            file.write_text(textwrap.dedent(program), encoding="utf-8")
            command.append(str(file))
        # Where there is no bridge, rallocator says so; what these tests read is what else there is to say.
        quiet = {"PYTHONWARNINGS": "ignore:rallocator attaches through"}
        result = _run(command, {**os.environ, **quiet, **(environment or {})}, tmp_path)
        sys.stdout.write(_describe(result))  # pytest shows it where the test fails.
        if code is not None and result.returncode != code:
            pytest.fail(_describe(result), pytrace=False)
        return result

    return run


@pytest.fixture
def route_of_itself() -> str:
    """Return the way in that a program gets which names none: the bridge, where there is one for this torch."""
    return "bridge" if _reason_without_bridge() is None and _ask(IS_TESTED) == "True" else "pluggable"


@pytest.fixture
def torch() -> Any:
    """Return torch in the child. The collecting process, which must stay cheap, gets None."""
    return importlib.import_module("torch") if IN_CHILD else None


@pytest.fixture(params=["native", "expandable", "rallocator"])
def policy(request: pytest.FixtureRequest) -> str:
    """Run the test under each policy of the allocator."""
    name: str = request.param
    return name


@pytest.fixture
def floats(torch: Any) -> Callable[..., Any]:
    """Makes a tensor of so many MiB, full of a value."""

    def make(mib: int, value: float = 1.0) -> Any:
        return torch.full((mib * (1 << 20) // 4,), value, device="cuda")

    return make


@pytest.fixture
def check_graph(torch: Any, floats: Callable[..., Any]) -> Callable[..., None]:
    """Captures a graph into a MemPool. Proves where its result lies, if asked to, and that replays make it anew."""

    def check(pool: Any, is_in_place: Callable[[Any], bool] = lambda _: True) -> None:
        x = floats(8)
        graph = torch.cuda.CUDAGraph()
        (x * 2 + 1).sum()
        with torch.cuda.graph(graph, pool=pool.id):
            y = x * 2 + 1
        assert is_in_place(y)
        for value in (3.0, 5.0):
            x.fill_(value)
            graph.replay()
            torch.cuda.synchronize()
            assert bool((y == 2 * value + 1).all())
        graph.reset()

    return check


@pytest.fixture
def allocator(policy: str, torch: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Yield rallocator, attached to torch in the child with the test's policy; then prove that nothing leaks."""
    if not IN_CHILD:
        yield None
        return
    rallocator = importlib.import_module("rallocator")
    named = [route for route in ("bridge", "pluggable") if request.node.get_closest_marker(route)]
    attach = named[0] if named else ATTACH
    rallocator.enable(rallocator.Config.parse(f"policy:{policy}"), attach=attach)
    yield rallocator
    if request.node.get_closest_marker("keeps_memory"):
        return
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # torch keeps one for each stream that multiplied matrices.
    devices = range(2 if request.node.get_closest_marker("two_gpus") else 1)
    for device in devices:
        torch.cuda.synchronize(device)
    rallocator.empty_cache()
    for device in devices:
        statistics = rallocator.stats(device)
        left = {
            name: statistics[f"{name}.all.current"] for name in ("allocated_bytes", "active_bytes", "reserved_bytes")
        }
        assert not any(left.values()), f"device {device} still holds {left}"
