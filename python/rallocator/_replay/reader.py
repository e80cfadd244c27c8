"""Reads a recorded file of any known format, told apart by content."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rallocator._replay.chrome_trace import read_chrome_trace
from rallocator._replay.container import DEFAULT_LIMIT_BYTES, chunks
from rallocator._replay.recording import Recording
from rallocator._replay.rmm_log import HEADER, read_rmm_log
from rallocator._replay.snapshot import read_snapshot
from rallocator.errors import SnapshotError

_PICKLE_STARTS = (b"\x80", b"(", b"]", b"}")
"""How a pickle of a dictionary or list can begin: PROTO, or protocol 0 or 1 without it."""

_JSON_STARTS = (b"{", b"[")


def read_recording(path: Path, limit_bytes: int = DEFAULT_LIMIT_BYTES, *, keep_frames: bool = False) -> Recording:
    """Read a memory snapshot of torch, a Chrome trace of its profiler, or a log of RMM; plain, gzip or xz.

    Arguments:
        path: the file. What it is named does not matter.
        limit_bytes: unpacked bytes after which the file is refused.
        keep_frames: whether to keep the stacks of a snapshot's events and blocks.

    Raises:
        SnapshotError: the file is unreadable, damaged, or of another kind; one line that says what is wrong with it.
    """
    content = chunks(path, limit_bytes)
    first = next((chunk for chunk in content if chunk), b"")
    everything = _after(first, content)
    if first.startswith(_PICKLE_STARTS):
        return read_snapshot(everything, keep_frames=keep_frames)
    text = first.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(_JSON_STARTS):
        return read_chrome_trace(everything)
    if text[: len(HEADER)].lower() == HEADER.lower():
        return read_rmm_log(everything)
    if not first:
        raise SnapshotError("empty")
    raise SnapshotError("neither a memory snapshot (a pickle), nor a Chrome trace (JSON), nor a log of RMM (CSV)")


def _after(first: bytes, others: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from others
