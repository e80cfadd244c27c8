"""Amounts of memory as people write them: `"24GiB"` to bytes, and back."""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = {
    "": 1,
    "B": 1,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}

_SIZE = re.compile(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]*)\s*", re.ASCII)

MAX_SIZE_BYTES = 1 << 48
"""The largest size that is accepted: 256 TiB, more than the address space of any GPU in use."""


def parse_size(size: int | str, *, minimum: int = 1) -> int:
    """Return a size in bytes.

    Arguments:
        size: bytes as a whole number, or a number and a unit: B, KiB, MiB, GiB, TiB (powers of 1024) or KB, MB, GB, TB
            (powers of 1000). Case does not matter, and a fraction of a byte is dropped.
        minimum: the smallest number of bytes that is accepted.

    Raises:
        ValueError: anything else, and sizes below the minimum or above 256 TiB; the message says what is accepted.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        # A caller's text or number from outside is wrong in one way only: it is not a size.
        raise ValueError(f"a size is a number of bytes, or text such as 24GiB, not {type(size).__name__}")  # noqa: TRY004
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        unit = match and _UNITS.get(match[2].upper())
        if not match or not unit:
            raise ValueError(
                f"{size!r} is not a size: write a number and B, KiB, MiB, GiB, TiB, KB, MB, GB or TB, as 24GiB"
            )
        size = int(Fraction(match[1]) * unit)
    if not minimum <= size <= MAX_SIZE_BYTES:
        raise ValueError(f"a size must be at least {minimum} B and at most 256 TiB, not {size} bytes")
    return size


def format_size(size_bytes: int) -> str:
    """Return a size as people read it, as `17.67 GiB`: GiB and MiB with two places, KiB and bytes as they are."""
    for unit, length in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if abs(size_bytes) >= length:
            return f"{size_bytes / length:.2f} {unit}"
    return f"{size_bytes / 1024:.1f} KiB" if abs(size_bytes) >= 1024 else f"{size_bytes} B"
