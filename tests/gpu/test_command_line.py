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


# What torch calls the allocator of each way in.
BACKENDS = {"bridge": "rallocator", "pluggable": "pluggable"}


def test_run_attaches_the_allocator_to_an_unchanged_script(
    run_python: RunPython, tmp_path: Path, route_of_itself: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    result = run_python(options=("-m", "rallocator", "run", str(script), "--epochs", "2"))
    assert json.loads(result.stdout) == ["__main__", ["--epochs", "2"], BACKENDS[route_of_itself], float(1 << 20)]


def test_run_attaches_the_allocator_to_an_unchanged_module(
    run_python: RunPython, tmp_path: Path, route_of_itself: str
) -> None:
    (tmp_path / "training.py").write_text(SCRIPT)
    result = run_python(options=("-m", "rallocator", "run", "-m", "training", "fast"))
    assert json.loads(result.stdout) == ["__main__", ["fast"], BACKENDS[route_of_itself], float(1 << 20)]


def test_doctor_says_that_it_works_and_names_the_gpus_and_the_way_in(
    run_python: RunPython, route_of_itself: str
) -> None:
    run_python(options=("-m", "rallocator", "doctor"))  # Exits with 0 only if it would work.
    (report,) = json.loads(run_python(options=("-m", "rallocator", "doctor", "--json")).stdout)
    assert report["schema"] == 1
    assert report["works"] is True
    assert report["attach"] == route_of_itself
    assert all(device["total_bytes"] > 1 << 30 for device in report["devices"])
    assert report["devices"]


def test_demo_trains_under_both_allocators_and_reaches_the_same_loss(run_python: RunPython) -> None:
    result = run_python(options=("-m", "rallocator", "demo", "--json"))
    theirs, ours = json.loads(result.stdout)
    assert [theirs["schema"], ours["schema"]] == [1, 1]
    assert [theirs["allocator"], ours["allocator"]] == ["torch", "rallocator"]
    assert 0 < ours["peak_allocated"] <= ours["peak_reserved"] < 8 << 30
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.01)
