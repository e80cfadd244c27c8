"""Reads the `[memory]` events of a Chrome trace, as torch's profiler writes them with `profile_memory=True`.

They tell of every allocation and free of every device, but not of streams or pools: all is taken to be on one stream.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from rallocator import _core
from rallocator._replay.recording import Recording, Trace
from rallocator._replay.snapshot import MAX_DEVICES
from rallocator._sizes import MAX_SIZE_BYTES
from rallocator.errors import SnapshotError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_chrome_trace(chunks: Iterable[bytes]) -> Recording:
    """Read a trace from its unpacked content.

    Raises:
        SnapshotError: the content is no JSON, no trace, or holds no memory events of a GPU.
    """
    events = _events(chunks)
    if not events:
        raise SnapshotError("a Chrome trace without [memory] events of a GPU: record it with profile_memory=True")
    # Events stand thread by thread in the file; those of one moment stay as they are.
    events.sort(key=lambda event: event[0])
    traces: dict[int, Trace] = {}
    for time_us, device, address, change, size, reserved in events:
        if device >= MAX_DEVICES:
            raise SnapshotError(f"a memory event of device {device}")
        if size > MAX_SIZE_BYTES and change is not None:
            raise SnapshotError(f"a memory event of {size} bytes")
        trace = traces.setdefault(device, Trace())
        action = "oom" if change is None else "alloc" if change > 0 else "free"
        trace.add(action, address, min(size, MAX_SIZE_BYTES), 0, time_us)
        if reserved:
            trace.peak_reserved = max(trace.peak_reserved or 0, min(reserved, MAX_SIZE_BYTES))
    return Recording((), traces)


def _events(chunks: Iterable[bytes]) -> list[tuple[int, int, int, int | None, int, int]]:
    remaining = iter(chunks)
    first = next(remaining, b"").removeprefix(_BYTE_ORDER_MARK)
    content = (chunk for chunk in itertools.chain([first], remaining) if chunk)
    try:
        events = _core.read_chrome_trace(lambda: next(content, b""))
    except ValueError as error:
        raise SnapshotError(f"damaged Chrome trace: {' '.join(str(error).split())[:160]}") from error
    # The document has ended, but a checksum behind it is verified.
    for _ in content:
        pass
    return events
