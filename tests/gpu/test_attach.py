"""When the allocator can be attached, and what happens when it cannot."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]

pytestmark = pytest.mark.drives_processes


def test_cuda_starts_in_a_child_forked_after_enable(run_python: RunPython) -> None:
    result = run_python("""
        import os
        import torch
        import rallocator

        def works():
            total = torch.ones(1 << 20, device="cuda").sum().item()
            return total == 1 << 20 and rallocator.stats()["allocation.all.allocated"] > 0

        rallocator.enable(attach="pluggable")
        child = os.fork()
        if child == 0:
            os._exit(0 if works() else 3)
        _, status = os.waitpid(child, 0)
        print("child", os.waitstatus_to_exitcode(status), "parent", works())
    """)
    assert result.stdout.split() == ["child", "0", "parent", "True"]


def test_enable_after_set_device_is_too_late_and_leaves_torch_as_it_was(run_python: RunPython) -> None:
    result = run_python("""
        import json
        import warnings
        import torch
        import rallocator

        torch.cuda.set_device(0)
        try:
            rallocator.enable(attach="pluggable")
            message = None
        except rallocator.errors.TooLateError as error:
            message = str(error)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            answer = rallocator.enable(attach="pluggable", required=False)
        print(json.dumps({
            "message": message,
            "answer": answer,
            "warnings": len(caught),
            "enabled": rallocator.is_enabled(),
            "backend": torch.cuda.get_allocator_backend(),
            "sum": torch.ones(8, device="cuda").sum().item(),
        }))
    """)
    answer = json.loads(result.stdout)
    assert answer["message"] is not None, "enable raised no TooLateError"
    assert "import torch" in answer["message"]
    assert "rallocator run" in answer["message"]
    assert {name: answer[name] for name in ("answer", "warnings", "enabled", "backend", "sum")} == {
        "answer": False,
        "warnings": 1,
        "enabled": False,
        "backend": "native",
        "sum": 8.0,
    }


def test_enable_in_a_child_of_a_parent_that_used_cuda_says_fork(run_python: RunPython) -> None:
    result = run_python("""
        import os
        import traceback
        import torch
        import rallocator

        torch.ones(8, device="cuda")
        child = os.fork()
        if child == 0:
            try:
                rallocator.enable(attach="pluggable")
            except rallocator.errors.ForkError:
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            os._exit(3)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status))
    """)
    assert result.stdout.split() == ["0"]


def test_second_enable_is_a_no_op_with_equal_settings_and_an_error_with_others(run_python: RunPython) -> None:
    result = run_python("""
        import torch
        import rallocator

        native = rallocator.Config.parse("policy:native")
        rallocator.enable(native, attach="pluggable")
        tensor = torch.ones(8, device="cuda")
        rallocator.enable(native, attach="pluggable")
        try:
            rallocator.enable(rallocator.Config.parse("policy:expandable"), attach="pluggable")
        except rallocator.errors.RallocatorError:
            print("refused")
        print(rallocator.attached(), torch.cuda.get_allocator_backend(), tensor.sum().item())
    """)
    assert result.stdout.split() == ["refused", "pluggable", "pluggable", "8.0"]


def test_notebook_cell_that_enables_can_run_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "nbclient or ipykernel is not installed; tools/gpu_wheels.sh fetches them for a machine without a network"
    nbclient = pytest.importorskip("nbclient", reason=reason)
    pytest.importorskip("ipykernel", reason=reason)
    nbformat = pytest.importorskip("nbformat", reason=reason)
    for variable in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    enable = nbformat.v4.new_code_cell('import torch, rallocator\nrallocator.enable(attach="pluggable")')
    use = nbformat.v4.new_code_cell('print(rallocator.attached(), torch.ones(8, device="cuda").sum().item())')
    notebook = nbformat.v4.new_notebook(cells=[enable, use])
    client = nbclient.NotebookClient(notebook, timeout=120, startup_timeout=120, kernel_name="python3")

    with client.setup_kernel():
        for index, cell in ((0, enable), (1, use), (0, enable), (1, use)):
            client.execute_cell(cell, index)  # Raises CellExecutionError with the traceback if the cell does.

    assert [output["text"] for output in use["outputs"]] == ["pluggable 8.0\n"]
