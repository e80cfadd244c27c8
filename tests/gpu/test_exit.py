"""A process ends with its own exit code and says nothing more, whatever it still holds."""

from __future__ import annotations

import subprocess
import textwrap
from collections.abc import Callable

import pytest

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]

pytestmark = pytest.mark.drives_processes

ENABLE = """
import torch
import rallocator

rallocator.enable(attach="pluggable")
"""

ENDINGS = {
    "with_live_globals": """
        tensors = [torch.ones(1 << size, device="cuda") for size in range(24)]
    """,
    "with_a_live_model_and_optimizer": """
        model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)]).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(64, 512, device="cuda")).square().sum().backward()
        optimizer.step()
    """,
    "with_live_tensors_in_a_waiting_thread": """
        import threading

        ready, never = threading.Event(), threading.Event()

        def hold():
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                tensor = torch.ones(1 << 24, device="cuda")
            ready.set()
            never.wait()

        threading.Thread(target=hold, daemon=True).start()
        ready.wait()
    """,
    "with_a_tensor_in_a_reference_cycle": """
        class Node:
            pass

        node = Node()
        node.itself, node.tensor = node, torch.ones(1 << 24, device="cuda")
        del node
    """,
    "with_work_still_queued_on_two_streams": """
        side = torch.cuda.Stream()
        tensor = torch.ones(1 << 24, device="cuda")
        with torch.cuda.stream(side):
            torch.cuda._sleep(600_000_000)
            doubled = tensor * 2
        tensor.record_stream(side)
        del tensor
    """,
    "with_tensors_freed_by_an_atexit_handler": """
        import atexit

        tensors = [torch.ones(1 << 20, device="cuda") for _ in range(8)]
        atexit.register(tensors.clear)
    """,
    "with_a_live_graph": """
        x = torch.ones(1 << 20, device="cuda")
        y = x * 2
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * 2
        graph.replay()
    """,
    "without_having_used_cuda": "",
}


@pytest.mark.parametrize("policy", ["native", "expandable", "rallocator"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_exit_is_clean(run_python: RunPython, ending: str, policy: str) -> None:
    result = run_python(ENABLE + textwrap.dedent(ENDINGS[ending]), environment={"RALLOCATOR_CONF": f"policy:{policy}"})
    assert result.stderr == ""
    assert result.stdout == ""


def test_exit_after_an_exception_shows_that_exception_and_nothing_else(run_python: RunPython) -> None:
    result = run_python(
        ENABLE
        + """
def fail():
    tensor = torch.ones(1 << 24, device="cuda")
    raise ValueError("on purpose")

fail()
""",
        code=1,
    )
    lines = result.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: on purpose"


def test_exit_code_given_to_sys_exit_is_the_processs(run_python: RunPython) -> None:
    result = run_python(ENABLE + 'import sys\ntensor = torch.ones(1 << 24, device="cuda")\nsys.exit(7)\n', code=7)
    assert result.stderr == ""
