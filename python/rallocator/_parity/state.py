"""What the replacements know of the torch that they are in."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

originals: dict[str, Callable[..., Any]] = {}
"""What torch had under the names that are replaced."""


class _Known:
    torch: ModuleType
    release: tuple[int, int]
    config: str


def begin(torch: ModuleType, release: tuple[int, int], config: str) -> None:
    """Note which torch it is, its release (major, minor), and the settings in force as the core reads them."""
    _Known.torch, _Known.release, _Known.config = torch, release, config


def torch_module() -> Any:
    """Return the module `torch`."""
    return _Known.torch


def release() -> tuple[int, int]:
    """Return torch's release (major, minor)."""
    return _Known.release


def config() -> str:
    """Return the settings in force, as the core reads them."""
    return _Known.config
