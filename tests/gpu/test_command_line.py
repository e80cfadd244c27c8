"""The command line where there is a GPU."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]

pytestmark = pytest.mark.drives_processes

SCRIPT = """
import json
import sys

import torch

x = torch.ones(1 << 20, device="cuda")
print(json.dumps([__name__, sys.argv[1:], torch.cuda.get_allocator_backend(), x.sum().item()]))
"""


def test_run_attaches_the_allocator_to_an_unchanged_script(run_python: RunPython, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    result = run_python(options=("-m", "rallocator", "run", str(script), "--epochs", "2"))
    assert json.loads(result.stdout) == ["__main__", ["--epochs", "2"], "pluggable", float(1 << 20)]


def test_run_attaches_the_allocator_to_an_unchanged_module(run_python: RunPython, tmp_path: Path) -> None:
    (tmp_path / "training.py").write_text(SCRIPT)
    result = run_python(options=("-m", "rallocator", "run", "-m", "training", "fast"))
    assert json.loads(result.stdout) == ["__main__", ["fast"], "pluggable", float(1 << 20)]


def test_doctor_finds_the_gpu(run_python: RunPython) -> None:
    assert "pluggable" in run_python(options=("-m", "rallocator", "doctor")).stdout


def test_doctors_json_is_one_document(run_python: RunPython) -> None:
    answer = json.loads(run_python(options=("-m", "rallocator", "doctor", "--json")).stdout)
    documents = answer if isinstance(answer, list) else [answer]
    assert documents
    assert all(document["schema"] == 1 for document in documents)


def test_demo_compares_the_allocators_on_the_gpu(run_python: RunPython) -> None:
    result = run_python(options=("-m", "rallocator", "demo", "--json"))
    answer = json.loads(result.stdout)
    documents = answer if isinstance(answer, list) else [answer]
    assert documents
    assert all(document["schema"] == 1 for document in documents)
