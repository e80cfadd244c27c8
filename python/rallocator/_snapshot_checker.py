"""Finding contradictions in a memory snapshot: in its state, and between its state and its events.

From the state at the end, the events are undone one by one, latest first. In a true snapshot each finds what it left
behind: an `alloc` its block, a `free_completed` room for what it freed, a `segment_alloc` its segment. torch's own
viewer walks the same way, and fails where this finds something.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from typing import Any

_STATES = ("active_allocated", "active_pending_free", "inactive")
# Events that change nothing.
_REMARKS = ("oom", "snapshot", "annotate")


class ContradictionError(ValueError):
    """Two things in a snapshot that cannot both be true."""


def check(snapshot: Mapping[str, Any]) -> int:
    """Check a snapshot of which no actions were skipped.

    Arguments:
        snapshot: as `torch.cuda.memory._snapshot()` returns it.

    Returns:
        How many events were undone.

    Raises:
        ContradictionError: the first thing found; the message says where.
    """
    for segment in snapshot["segments"]:
        _check_segment(segment)
    undone = 0
    for device, events in enumerate(snapshot["device_traces"]):
        memory = _Memory([segment for segment in snapshot["segments"] if segment["device"] == device])
        later = float("inf")
        for position in reversed(range(len(events))):
            event = events[position]
            try:
                time = event.get("time_us", 0)
                _ensure(time <= later, f"it is later than the next one, by {time - later} µs")
                later = time
                memory.undo(event)
            except ContradictionError as error:
                text = f"device {device}, event {position} ({event['action']} of {event['size']} bytes): {error}"
                raise ContradictionError(text) from None
            undone += 1
    return undone


def _check_segment(segment: Mapping[str, Any]) -> None:
    where = f"segment {segment['address']:#x}"
    end = segment["address"]
    sums = dict.fromkeys(("allocated_size", "active_size", "requested_size"), 0)
    for block in segment["blocks"]:
        _ensure(block["state"] in _STATES, f"{where}: a block has the state {block['state']!r}")
        address = _address(block, end)
        _ensure(address == end, f"{where}: a block begins at {address:#x}, the one before ends at {end:#x}")
        end += block["size"]
        if block["state"] != "inactive":
            _ensure(block["requested_size"] <= block["size"], f"{where}: a block is smaller than its request")
            sums["active_size"] += block["size"]
            sums["requested_size"] += block["requested_size"]
        if block["state"] == "active_allocated":
            sums["allocated_size"] += block["size"]
    _ensure(end - segment["address"] == segment["total_size"], f"{where}: its blocks do not fill it")
    for name, total in sums.items():
        _ensure(segment[name] == total, f"{where}: {name} is {segment[name]}, its blocks add up to {total}")


def _address(block: Mapping[str, Any], after_the_one_before: int) -> int:
    """Where a block begins: torch 2.0 does not say, since blocks follow each other."""
    address: int = block.get("address", after_the_one_before)
    return address


class _Memory:
    """What there is on a device: at first what the snapshot shows, then what was before each event."""

    def __init__(self, segments: list[dict[str, Any]]) -> None:
        self._mapped = _Spans("memory")
        self._held = _Spans("a block")
        self._pending: set[int] = set()
        for segment in segments:
            self._mapped.add(segment["address"], segment["total_size"])
            next_address = segment["address"]
            for block in segment["blocks"]:
                address = _address(block, next_address)
                next_address = address + block["size"]
                if block["state"] != "inactive":
                    self._held.add(address, block["requested_size"])
                if block["state"] == "active_pending_free":
                    self._pending.add(address)

    def undo(self, event: Mapping[str, Any]) -> None:
        """Go back to before an event."""
        action = event["action"]
        if action in _REMARKS:
            return
        address, size = event["addr"], event["size"]
        if action in {"alloc", "free_requested"}:
            _ensure(self._held.has(address, size), "it left no such block behind")
            _ensure((address in self._pending) == (action == "free_requested"), "its block is in another state")
        if action == "alloc":
            self._held.remove(address, size)
        elif action == "free_requested":
            self._pending.remove(address)
        elif action == "free_completed":
            _ensure(self._mapped.covers(address, size), "there was no memory at its address")
            self._held.add(address, size)
            self._pending.add(address)
        elif action in {"segment_alloc", "segment_map"}:
            _ensure(self._mapped.covers(address, size), "its memory is not there afterwards")
            _ensure(not self._held.overlaps(address, size), "a block was in its memory before")
            self._mapped.cut(address, size)
        elif action in {"segment_free", "segment_unmap"}:
            self._mapped.add(address, size)
        else:
            raise ContradictionError("there is no such action")


class _Spans:
    """Pieces of an address space that do not overlap."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._starts: list[int] = []
        self._ends: dict[int, int] = {}

    def has(self, start: int, size: int) -> bool:
        """Whether there is exactly this piece."""
        return self._ends.get(start) == start + size

    def add(self, start: int, size: int) -> None:
        """Add a piece where there must be none."""
        _ensure(not self.overlaps(start, size), f"{self._name} was at its address already")
        insort(self._starts, start)
        self._ends[start] = start + size

    def remove(self, start: int, size: int) -> None:
        """Take a piece away."""
        _ensure(self.has(start, size), f"{self._name} has another size")
        del self._starts[bisect_left(self._starts, start)]
        del self._ends[start]

    def cut(self, start: int, size: int) -> None:
        """Take a part away, of one piece or of several that touch; what is left of them stays."""
        for piece, end in list(self._between(start, start + size)):
            self.remove(piece, end - piece)
            if piece < start:
                self.add(piece, start - piece)
            if end > start + size:
                self.add(start + size, end - start - size)

    def covers(self, start: int, size: int) -> bool:
        """Whether pieces without a gap hold all of it."""
        reached = start
        for piece, end in self._between(start, start + size):
            if piece > reached:
                return False
            reached = end
        return reached >= start + size

    def overlaps(self, start: int, size: int) -> bool:
        """Whether any piece holds some of it."""
        return any(True for _ in self._between(start, start + size))

    def _between(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The pieces that have some of this, in order."""
        index = bisect_left(self._starts, start)
        if index > 0 and self._ends[self._starts[index - 1]] > start:
            index -= 1
        while index < len(self._starts) and self._starts[index] < end:
            piece = self._starts[index]
            yield piece, self._ends[piece]
            index += 1


def _ensure(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ContradictionError(otherwise)
