"""Whether there is a GPU to use, without initialising its driver.

A process that has initialised the driver can no longer fork children that use the GPU. So nothing here asks the driver:
only whether its library is there, whether the system shows a device, and whether the environment hides it. When in
doubt the answer is that there is a GPU; torch then gives its own message.
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

_LIBRARY = "libcuda.so.1"
_NVIDIA_PCI_VENDOR = "0x10de"
_PCI_DISPLAY_CLASS = "0x03"
# An entry that CUDA accepts: a position, or the beginning of a GPU's or MIG device's name. It ignores all that follow
# the first one that it does not accept:
# https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#cuda-environment-variables
_VISIBLE_ENTRY = re.compile(r"\s*(\d+|GPU-.*|MIG-.*)\s*", re.IGNORECASE)


def missing_gpu_reason() -> str | None:
    """Why this process has no GPU to use; None if it seems to have one.

    Returns:
        A clause that can follow "because", with what to do about it; None if nothing speaks against a GPU.
    """
    return _hidden_reason(os.environ.get("CUDA_VISIBLE_DEVICES")) or _library_reason() or _device_reason()


def _hidden_reason(visible_devices: str | None) -> str | None:
    if visible_devices is None or _VISIBLE_ENTRY.fullmatch(visible_devices.split(",")[0]):
        return None
    return (
        f"CUDA_VISIBLE_DEVICES is {visible_devices!r}, which hides every GPU from this process; "
        "unset it, or name a device, for instance 0"
    )


def _library_reason() -> str | None:
    try:
        # Loading the library initialises nothing: that takes a call of cuInit.
        ctypes.CDLL(_LIBRARY)
    except OSError:
        return (
            f"the driver's library {_LIBRARY} cannot be loaded; install NVIDIA's driver, "
            "or start the container with access to the GPU (docker run --gpus all)"
        )
    return None


def _device_reason(root: Path = Path("/")) -> str | None:
    if any(_device_traces(root)):
        return None
    return (
        "NVIDIA's driver is installed, but the system shows no NVIDIA device; "
        "start the container with access to the GPU (docker run --gpus all)"
    )


def _device_traces(root: Path) -> list[Path]:
    """What a GPU leaves in the file system of Linux, of WSL (dxg) and of Jetson (nvgpu, nvhost)."""
    dev = root / "dev"
    traces = [path for path in dev.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    traces += [dev / name for name in ("dxg", "nvgpu", "nvhost-gpu", "nvhost-ctrl-gpu") if (dev / name).exists()]
    # Device nodes may be made only when the first program needs them, so a card on the bus counts as well.
    traces += (root / "proc/driver/nvidia/gpus").glob("*")
    traces += [path for path in (root / "sys/bus/pci/devices").glob("*") if _is_nvidia_display(path)]
    return traces


def _is_nvidia_display(device: Path) -> bool:
    try:
        vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text()
    except OSError:
        return False
    return vendor == _NVIDIA_PCI_VENDOR and kind.startswith(_PCI_DISPLAY_CLASS)
