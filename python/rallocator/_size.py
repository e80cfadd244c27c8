"""Sizes as people write them."""

from __future__ import annotations

import re

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str | int) -> int:
    """Read a size such as "8GiB", "1.5 GB" or "4096".

    Arguments:
        text: a number with an optional unit (B, KB, MB, GB, TB in powers of 1000; KiB, MiB, GiB, TiB in powers of
            1024; upper or lower case), or a number of bytes.

    Returns:
        The size in bytes, rounded down to a whole byte.

    Raises:
        ValueError: the text is not a size, or is negative.
    """
    if isinstance(text, int):
        if text < 0:
            raise ValueError(f"a size cannot be negative: {text}")
        return text
    match = _PATTERN.fullmatch(text)
    unit = _UNITS.get(match.group(2).upper()) if match else None
    if match is None or unit is None:
        raise ValueError(f"not a size: {text!r} (write for instance 8GiB, 512MiB or 4096)")
    return int(float(match.group(1)) * unit) if "." in match.group(1) else int(match.group(1)) * unit
