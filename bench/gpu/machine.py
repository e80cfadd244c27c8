"""What a measurement was taken on: printed as JSON when run, `describe()` when imported.

usage: python -m bench.gpu.machine
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from typing import Any


def describe() -> dict[str, Any]:
    """The software and hardware of this process, as plain JSON values. Initialises CUDA."""
    import torch

    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": os.environ.get("RALLOCATOR_COMMIT", "unknown"),
        "rallocator": _package_version("rallocator"),
        "torch": torch.__version__,
        "torch_git_version": torch.version.git_version,
        "cuda": torch.version.cuda,
        "driver": _driver_version(),
        "gpu": torch.cuda.get_device_name(0),
        "gpu_count": torch.cuda.device_count(),
        "gpu_memory_bytes": torch.cuda.get_device_properties(0).total_memory,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpu_count": os.cpu_count(),
    }


def _package_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _driver_version() -> str:
    """Ask nvidia-smi, since torch reports only the CUDA version that the driver supports."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    lines = answer.stdout.split()
    return lines[0] if lines else "unknown"


if __name__ == "__main__":
    print(json.dumps(describe(), indent=1))
