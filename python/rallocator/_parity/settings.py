"""Changing settings while the program runs, through torch's functions for that."""

from __future__ import annotations

from typing import Any

from rallocator import _config, _core
from rallocator._parity import state
from rallocator.errors import ConfigError

_FRACTION = "per_process_memory_fraction"


def set_cuda_settings(*args: Any) -> None:
    """`torch._C._cuda_cudaCachingAllocator_set_allocator_settings(text)`, up to torch 2.9."""
    _set(str(args[0]), "_cuda_cudaCachingAllocator_set_allocator_settings")


def set_accelerator_settings(*args: Any) -> None:
    """`torch._C._accelerator_setAllocatorSettings(text)`, from torch 2.10 on."""
    _set(str(args[0]), "_accelerator_setAllocatorSettings")


def _set(text: str, name: str) -> None:
    """Honour what can be honoured now, and refuse what cannot. Nothing is changed if anything is refused.

    Raises:
        ConfigError: the text is wrong, or asks for another value of a setting that is fixed since `enable`.
    """
    parsed = _core.parse_config(text)
    asked, present = dict(parsed.effective), dict(_core.parse_config(state.config()).effective)
    given = dict(parsed.given)
    fixed = [key for key in given if key in asked and key != _FRACTION and asked[key] != present[key]]
    if fixed:
        changes = ", ".join(f"{key} is {present[key]} and cannot become {asked[key]}" for key in fixed)
        raise ConfigError(
            f"rallocator's settings are fixed once it is enabled: {changes}. Set them before, in "
            f"{_config.OWN_VARIABLE}, torch's variables, or rallocator.enable(...)."
        )
    # The memory of the host stays with torch's own allocator for it.
    if host := {key: value for key, value in given.items() if key.startswith(_config.HOST_PREFIX)}:
        state.originals[name](",".join(f"{key}:{value}" for key, value in host.items()))
    _config.warn_of_inert([key for key in parsed.inert if key not in host], stacklevel=5)
    if _FRACTION in given:
        torch = state.torch_module()
        for device in range(torch.cuda.device_count()):
            torch._C._cuda_setMemoryFraction(float(given[_FRACTION]), device)
