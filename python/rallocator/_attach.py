"""Attaching to torch: `enable` and what it has to check first."""

from __future__ import annotations

import os
import threading
import warnings
from dataclasses import dataclass
from types import ModuleType

from rallocator import _bridge, _config, _core, _gpu, _parity, _torch
from rallocator._sizes import parse_size
from rallocator.errors import (
    BridgeError,
    ConfigError,
    ForkError,
    NoGpuError,
    TooLateError,
    TorchNotSupportedError,
)

SIMULATE_VARIABLE = "RALLOCATOR_SIMULATE"
"""The environment variable that puts a simulated GPU under the hooks. For testing only: no kernel can use its memory.

Its value is the memory of each device, for instance "8GiB", or "2x8GiB" for two devices.
"""

_ROUTES = ("auto", "pluggable", "bridge")
# The reasons for which the program can go on with torch's own allocator.
_UNAVAILABLE = (TooLateError, ForkError, NoGpuError, TorchNotSupportedError, BridgeError)


@dataclass(frozen=True)
class _Attachment:
    """How this process is attached."""

    route: str
    """ "pluggable" or "bridge"."""
    why: str
    """Why this one, as a clause."""
    config: str
    """The settings in force, as the core reads them."""
    allocator: object
    """What torch calls. Kept alive for as long as the process lives, since torch frees tensors until its end."""


class _Process:
    """What this process has done so far."""

    lock = threading.Lock()
    """Held while attaching, so that of two threads the second sees what the first has done."""
    attachment: _Attachment | None = None


_process = _Process()


def enable(config: _config.Config | str | None = None, *, attach: str = "auto", required: bool = True) -> bool:
    """Install rallocator as torch's CUDA allocator.

    Call it right after `import torch`. It imports torch, but initialises neither CUDA nor the driver: a process that
    has called it may fork and use CUDA in the child. A second call with equal settings does nothing.

    Arguments:
        config: the settings, as a `Config` or as text in torch's grammar (`"key:value,key:value"`). They take
            precedence over the variable `RALLOCATOR_CONF`, and that over torch's variables, key by key. None: only
            the variables count.
        attach: the way into torch. "bridge" is torch's own interface for CUDA allocators: it is faster, and all of
            torch works through it, but it takes a small library that was compiled for exactly this torch, which the
            package brings for torch's releases or `rallocator build-bridge` makes. "pluggable" is torch's interface
            for allocators from outside, which every torch has. "auto" takes the bridge if there is one for this torch,
            else the other, and says so in one `UserWarning`.
        required: whether a process in which rallocator cannot be used is an error. With False such a process gets one
            `RuntimeWarning`, and torch's own allocator stays in use.

    Returns:
        True if rallocator is in use; False, only with `required=False`, if it cannot be.

    Raises:
        TooLateError: torch has initialised CUDA already, or uses another foreign allocator.
        ForkError: the process was forked from one that had initialised CUDA.
        NoGpuError: there is no NVIDIA GPU, or none that this process may see.
        TorchNotSupportedError: torch is missing, older than 2.9, or built without CUDA.
        BridgeError: the bridge was asked for, and there is none for this torch, or it cannot be loaded.
        ConfigError: a setting is wrong, or rallocator is already in use with other settings. Raised with
            `required=False` too.
        ValueError: `attach` is none of the three.
    """
    if attach not in _ROUTES:
        raise ValueError(f"attach must be one of {', '.join(map(repr, _ROUTES))}, not {attach!r}")
    settings = _config.resolve(config).text
    try:
        with _process.lock:
            _attach(settings, attach)
    except _UNAVAILABLE as error:
        if required:
            raise
        warnings.warn(str(error), RuntimeWarning, stacklevel=2)
        return False
    return True


def is_enabled() -> bool:
    """Whether rallocator is torch's CUDA allocator in this process.

    Returns:
        True from the first successful `enable` on.
    """
    return _process.attachment is not None


def attached() -> str | None:
    """The way in which rallocator is attached to torch.

    Returns:
        "pluggable", "bridge", or None if it is not enabled.
    """
    return None if _process.attachment is None else _process.attachment.route


def _attach(settings: str, attach: str) -> None:
    """Attach, or see that this was done already. Called under the lock; raises what `enable` raises."""
    if _process.attachment is not None:
        _check_equal(_process.attachment, settings, attach)
        return
    torch = _torch.import_supported()
    _torch.check_in_time(torch)
    simulated_devices, simulated_bytes = _simulated(os.environ.get(SIMULATE_VARIABLE))
    if simulated_bytes is None and (reason := _gpu.missing_gpu_reason()):
        raise NoGpuError(f"There is no GPU for rallocator to use: {reason}. {_torch.STAYS}")
    bridge, why = _choose_route(torch, attach)
    pluggable = None if bridge else _torch.make_pluggable_allocator(torch)
    # From here on the only thing that can fail is torch's refusal, and in a process where it has refused it always
    # will: so no other settings can ever be wanted for what is installed.
    _core._install(settings, simulated_bytes=simulated_bytes, simulated_devices=simulated_devices)
    if bridge is not None:
        bridge.install()
        _bridge.check_reached(torch)
    if pluggable is not None:
        _torch.change_allocator(torch, pluggable)
    _torch.verify_hooks(torch)
    _parity.install(torch, settings, is_bridge=bridge is not None)
    _process.attachment = _Attachment("bridge" if bridge else "pluggable", why, settings, bridge or pluggable)


def _choose_route(torch: ModuleType, attach: str) -> tuple[_bridge.Bridge | None, str]:
    """The bridge, loaded, or None for the pluggable route; and why, as a clause.

    Raises:
        BridgeError: the bridge was asked for and there is none, or none that fits.
    """
    if attach == "pluggable":
        return None, "it was asked for"
    if attach == "auto" and _torch.release(torch.__version__) > _bridge.NEWEST_TESTED:
        newest = ".".join(map(str, _bridge.NEWEST_TESTED))
        return None, _warn_of_pluggable(
            f"this torch ({torch.__version__}) is newer than {newest}, the newest that the bridge was tried with; "
            "attach='bridge' uses it all the same"
        )
    try:
        found = _bridge.find(torch)
        if isinstance(found, _bridge.Found):
            return _bridge.Bridge(found.path, torch), found.origin
        reason = found.reason
    except BridgeError as error:
        if attach == "bridge":
            raise
        return None, _warn_of_pluggable(str(error))
    if attach == "bridge":
        raise BridgeError(f"{reason[0].upper()}{reason[1:]}. {_torch.STAYS}")
    return None, _warn_of_pluggable(reason)


def _warn_of_pluggable(reason: str) -> str:
    """Say in one line that it is not the bridge; return why."""
    text = f"rallocator attaches through torch's interface for pluggable allocators, not through its bridge: {reason}"
    warnings.warn(text, UserWarning, stacklevel=5)
    return reason


def reason() -> str | None:
    """Why rallocator is attached in the way that it is, as a clause; None if it is not enabled."""
    return None if _process.attachment is None else _process.attachment.why


def _check_equal(attachment: _Attachment, settings: str, attach: str) -> None:
    if attach not in ("auto", attachment.route):
        raise ConfigError(
            f"rallocator is already attached through the route {attachment.route!r}, which cannot be changed to "
            f"{attach!r} while the process runs. Say so in the first call of rallocator.enable()."
        )
    if attachment.config != settings:
        raise ConfigError(
            f"rallocator is already enabled with the settings '{attachment.config}', and they cannot be changed to "
            f"'{settings}' while the process runs. Call rallocator.enable() once, or with the same settings each "
            "time; in a notebook, restart the kernel."
        )


def _simulated(value: str | None) -> tuple[int, int | None]:
    """The number of simulated devices and the memory of each in bytes; None for real ones."""
    if not value:
        return 1, None
    count, _, size = value.rpartition("x")
    try:
        return int(count or 1), parse_size(size)
    except ValueError as error:
        raise ConfigError(f"{SIMULATE_VARIABLE} must be a size, such as 8GiB or 2x8GiB: {error}") from error
