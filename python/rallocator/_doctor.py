"""Finds out what is installed, what the GPU can do, and how rallocator would attach to torch here."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import rallocator
from rallocator import _config, _core, _gpu
from rallocator._own_python import python_command
from rallocator.errors import ConfigError

PROBE_TIMEOUT_SECONDS = 120
"""For importing torch from a cold disk and attaching to it."""

_PROBE = """
import json, warnings
warnings.simplefilter("ignore")
found = {"version": None, "cuda": None, "route": None, "reason": None}
try:
    import torch
    found["version"], found["cuda"] = torch.__version__, torch.version.cuda
except Exception as error:
    found["reason"] = f"torch cannot be imported: {type(error).__name__}: {error}"
if found["version"]:
    import rallocator
    try:
        rallocator.enable()
        from rallocator import _attach
        found["route"], found["reason"] = rallocator.attached(), _attach.reason()
    except Exception as error:
        found["reason"] = str(error)
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU as the driver describes it."""

    index: int
    total_bytes: int
    virtual_memory: bool
    virtual_memory_missing: str | None
    """Why memory cannot be mapped, so that the policy is `native`; None where it can."""


@dataclass(frozen=True, slots=True)
class Report:
    """What `rallocator doctor` prints."""

    works: bool
    """Whether `rallocator.enable()` succeeds here."""
    rallocator: str
    python: str
    torch: str | None
    """torch's version; None if it is not installed."""
    torch_cuda: str | None
    """The CUDA version that torch was built for; None for a build without CUDA."""
    driver: str | None
    """The version of NVIDIA's driver; None if the system does not tell."""
    devices: tuple[Device, ...]
    devices_reason: str | None
    """Why no GPU can be used; None where one can."""
    attach: str | None
    """The way in which rallocator attaches to torch here; None if it cannot."""
    attach_reason: str
    """Why this way, or why none."""
    settings: tuple[_config.Setting, ...]
    """Each setting in force, and the variable that it came from, or "default"."""
    inert: tuple[_config.Setting, ...]
    """Settings of torch's that were given but change nothing here."""
    host: tuple[_config.Setting, ...]
    """Settings that torch's own allocator for pinned host memory reads."""
    caching_note: str | None
    """That torch was asked not to cache memory, in vain; None if it was not."""
    settings_reason: str | None
    """What is wrong with the settings; None if nothing is."""

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON has it."""
        return {"schema": 1, **asdict(self)}


def examine() -> Report:
    """Look at this machine. Attaching is tried in a process of its own, since it cannot be undone."""
    probe = _probe()
    devices, devices_reason = _devices()
    settings_reason = None
    settings: tuple[_config.Setting, ...] = ()
    inert: tuple[_config.Setting, ...] = ()
    host: tuple[_config.Setting, ...] = ()
    try:
        resolved = _config.resolve(None, warn=False)
        settings, inert, host = resolved.settings, resolved.inert, resolved.host
    except ConfigError as error:
        settings_reason = str(error)
    route = probe["route"]
    return Report(
        works=route is not None and bool(devices) and settings_reason is None,
        rallocator=rallocator.__version__,
        python=platform.python_version(),
        torch=probe["version"],
        torch_cuda=probe["cuda"],
        driver=_driver_version(),
        devices=devices,
        devices_reason=devices_reason,
        attach=route,
        attach_reason=probe["reason"],
        settings=settings,
        inert=inert,
        host=host,
        caching_note=_config.caching_note(os.environ),
        settings_reason=settings_reason,
    )


def _probe() -> dict[str, Any]:
    found: dict[str, Any] = {"version": None, "cuda": None, "route": None, "reason": "it is not known why"}
    command = python_command(_PROBE)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return found | {"reason": f"attaching to torch took more than {PROBE_TIMEOUT_SECONDS} s"}
    try:
        found.update(json.loads(done.stdout.strip().splitlines()[-1]))
    except (ValueError, IndexError, TypeError):
        last = (done.stderr.strip().splitlines() or ["without a word"])[-1]
        found["reason"] = f"attaching to torch ended with code {done.returncode}: {last}"
    return found


def _devices() -> tuple[tuple[Device, ...], str | None]:
    if reason := _gpu.missing_gpu_reason():
        return (), reason
    try:
        found = _core.devices()
    except RuntimeError as error:
        return (), str(error)
    devices = [Device(index, total, not missing, missing or None) for index, (total, missing) in enumerate(found)]
    return tuple(devices), None if devices else "the driver sees no GPU"


def _driver_version() -> str | None:
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return None
    # "NVRM version: NVIDIA UNIX … Kernel Module  580.65.06  Release Build …": the first word of dotted numbers.
    return next((word for word in words if word.replace(".", "").isdigit() and "." in word), None)
