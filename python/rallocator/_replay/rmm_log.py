"""Reads the CSV log of RMM's `LoggingResourceAdaptor`: one row for each allocation and free of one device.

A free is ordered by its stream and done with at once, and nothing tells of pools.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from rallocator._replay.recording import Recording, Trace
from rallocator._sizes import MAX_SIZE_BYTES
from rallocator.errors import SnapshotError

HEADER = b"Thread,Time,Action,Pointer,Size,Stream"

MAX_LINE_BYTES = 4096
"""A row has some eighty."""

MAX_ROWS = 10_000_000
"""Rows of one log: each takes some 300 bytes of memory."""

_ACTIONS = {"allocate": "alloc", "free": "free", "deallocate": "free", "allocate failure": "oom"}

_CLOCK = re.compile(r"(\d{1,2}):(\d{2}):(\d{2})[.:](\d{1,9})")
_SECONDS = re.compile(r"(\d{1,12})(?:\.(\d{1,9}))?")
_NUMBER = re.compile(r"0[xX][0-9a-fA-F]{1,16}|\d{1,20}")
_NO_POINTER = ("(nil)", "nullptr", "")

_DAY_US = 24 * 3600 * 1_000_000


def read_rmm_log(chunks: Iterable[bytes]) -> Recording:
    """Read a log from its unpacked content.

    Raises:
        SnapshotError: a row is damaged; the message names its line.
    """
    trace = Trace()
    day_us = latest_us = 0
    for number, line in enumerate(_lines(chunks), 1):
        if number == 1 or not line.strip():
            continue
        if number > MAX_ROWS:
            raise SnapshotError(f"more than {MAX_ROWS} lines")
        fields = [field.strip() for field in line.decode("ascii", "replace").split(",")]
        if len(fields) != HEADER.count(b",") + 1:
            raise SnapshotError(f"line {number} has {len(fields)} fields, and not those of RMM's log")
        _, time, kind, pointer, size, stream = fields
        action = _ACTIONS.get(kind.lower())
        if action is None:
            raise SnapshotError(f"line {number}: {kind[:40]!a} is no action of RMM's log")
        # A clock's times begin anew at midnight.
        time_us = _time_us(time, number)
        if time_us + day_us < latest_us - _DAY_US // 2:
            day_us += _DAY_US
        latest_us = max(latest_us, time_us + day_us)
        address = 0 if pointer in _NO_POINTER else _number(pointer, "pointer", number)
        size_bytes = _number(size, "size", number)
        if size_bytes > MAX_SIZE_BYTES and action != "oom":
            raise SnapshotError(f"line {number}: size is out of range: {size_bytes}")
        if action == "alloc" and size_bytes == 0:
            # RMM hands out no memory for it, and its free names no address.
            continue
        trace.add(action, address, min(size_bytes, MAX_SIZE_BYTES), _number(stream, "stream", number), latest_us)
    return Recording((), {0: trace} if trace.actions else {})


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        lines = (rest + chunk).split(b"\n")
        rest = lines.pop()
        for line in (*lines, rest):
            if len(line) > MAX_LINE_BYTES:
                raise SnapshotError(f"a line of more than {MAX_LINE_BYTES} bytes, and not one of RMM's log")
        yield from lines
    if rest.strip(b"\x00"):
        yield rest


def _time_us(text: str, line: int) -> int:
    if clock := _CLOCK.fullmatch(text):
        hours, minutes, seconds = (int(clock[group]) for group in (1, 2, 3))
        return (hours * 3600 + minutes * 60 + seconds) * 1_000_000 + _microseconds(clock[4])
    if seconds_only := _SECONDS.fullmatch(text):
        return int(seconds_only[1]) * 1_000_000 + _microseconds(seconds_only[2] or "0")
    raise SnapshotError(f"line {line}: {text[:40]!a} is no time")


def _microseconds(fraction: str) -> int:
    return int(fraction[:6].ljust(6, "0"))


def _number(text: str, what: str, line: int) -> int:
    if not _NUMBER.fullmatch(text):
        raise SnapshotError(f"line {line}: {text[:40]!a} is no {what}")
    number = int(text, 16 if text[:2].lower() == "0x" else 10)
    if number >= 1 << 64:
        raise SnapshotError(f"line {line}: {what} is out of range: {number}")
    return number
