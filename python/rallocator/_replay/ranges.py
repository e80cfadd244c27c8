"""Finds the memory of expandable segments that a recording began with, where it began in the middle of a run.

A range of addresses holds memory in handles of one size, mapped where it is needed. Of the handles that there were in
the end one was there at the beginning if a block older than the recording lies in it, or none was ever allocated in
it since: memory is mapped for a request, and part of the request then lies in it. Of all others it is not clear. A
handle that was gone in the end was there at the beginning if an older block lay in it; if no block did, nothing is
left of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rallocator._replay.gone import Owner, Touch
from rallocator._replay.layout import GRANULE_BYTES, OldBlock
from rallocator._replay.recording import PoolPair, Segment

SMALL_HANDLE_BYTES = 2 << 20
LARGE_HANDLE_BYTES = 20 << 20

MOST_HANDLES = 1 << 20
"""A range with more is damaged."""

RangePiece: TypeAlias = tuple[int, int | None, bool]
"""Bytes, the allocation that had them or None, and whether there was memory."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Handles side by side that may have been there when the recording began."""

    address: int
    size: int
    doubt: int | None
    """None if they surely were there; else the allocation that they may have been mapped for."""


@dataclass(frozen=True, slots=True)
class OldRange:
    """The memory of one stream, pool and size class."""

    stream: int
    pool: PoolPair
    is_small: bool
    extents: tuple[Extent, ...]
    """By address."""
    blocks: tuple[OldBlock, ...]
    """Those that are older than the recording, by address."""
    gives_back: bool
    """Whether a block lay in a handle that was gone in the end."""

    def pieces(self, old: Container[int]) -> list[RangePiece]:
        """Return what the range was cut into, from the first memory to the last.

        Arguments:
            old: the doubts that were there.
        """
        pieces: list[RangePiece] = []
        blocks = iter(self.blocks)
        block = next(blocks, None)
        at: int | None = None
        for address, end in _joined(one for one in self.extents if one.doubt is None or one.doubt in old):
            if at is not None:
                pieces.append((address - at, None, False))
            at = address
            while block is not None and block.address < end:
                if block.address > at:
                    pieces.append((block.address - at, None, True))
                pieces.append((_rounded(block.size), block.allocation, True))
                at = block.address + _rounded(block.size)
                block = next(blocks, None)
            if at < end:
                pieces.append((end - at, None, True))
            at = end
        return pieces


def ranges_at_beginning(
    segments: Sequence[Segment],
    old: Sequence[OldBlock],
    touches: Sequence[Touch],
    allocations: Sequence[int],
) -> list[OldRange]:
    """Return the memory that a recording under torch's rules for expandable segments may have begun with.

    Arguments:
        segments: the runs of mapped memory at its end.
        old: the blocks that are older than the recording, in the order of their touches.
        touches: all blocks of the recording; first those that are older, then the others in the order of time.
        allocations: the allocations that those others are.

    Returns:
        Nothing if nothing is older than the first request: then the recording began with that.
    """
    handles = _final_handles(segments)
    if handles is None:
        return []
    blocks: dict[Owner, list[OldBlock]] = {}
    for touch, block in zip(touches, old, strict=False):
        if touch.owner in handles:
            handles[touch.owner].touch(block.address, block.address + _rounded(block.size), None)
            blocks.setdefault(touch.owner, []).append(block)
    for touch, allocation in zip(touches[len(old) :], allocations, strict=True):
        if touch.owner in handles:
            handles[touch.owner].touch(touch.address, touch.end, allocation)
    found = []
    for owner, known in handles.items():
        held = tuple(sorted(blocks.get(owner, ()), key=lambda block: block.address))
        if any(one.address + _rounded(one.size) > two.address for one, two in itertools.pairwise(held)):
            return []
        found.append(OldRange(*owner, known.extents(), held, known.gives_back))
    return found if any(extent.doubt is None for one in found for extent in one.extents) else []


def _final_handles(segments: Sequence[Segment]) -> dict[Owner, _Handles] | None:
    """Return the handles that there were in the end; None if they cannot have been such."""
    handles: dict[Owner, _Handles] = {}
    for segment in segments:
        owner = (segment.stream, segment.pool, segment.is_small)
        known = handles.setdefault(owner, _Handles(SMALL_HANDLE_BYTES if segment.is_small else LARGE_HANDLE_BYTES))
        if not segment.is_expandable or not known.add_run(segment):
            return None
    return handles


class _Handles:
    """The handles of one range, by their number from an address that is as good as any."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._phase: int | None = None
        self.doubts: dict[int, int | None] = {}
        """For each handle that there may have been, the first allocation in it; None where that is no doubt."""
        self._touched: set[int] = set()
        self.gives_back = False

    def add_run(self, segment: Segment) -> bool:
        """Note handles of the recording's end; returns whether they can be such."""
        if self._phase is None:
            self._phase = segment.address % self._size
        if segment.size % self._size or segment.address % self._size != self._phase:
            return False
        first = (segment.address - self._phase) // self._size
        if len(self.doubts) + segment.size // self._size > MOST_HANDLES:
            return False
        self.doubts.update(dict.fromkeys(range(first, first + segment.size // self._size)))
        return True

    def touch(self, address: int, end: int, allocation: int | None) -> None:
        """Note a block, in the order of time."""
        phase = self._phase or 0
        if end - address > MOST_HANDLES * self._size:
            return
        for handle in range((address - phase) // self._size, -((phase - end) // self._size)):
            if handle in self._touched:
                continue
            self._touched.add(handle)
            is_gone = handle not in self.doubts
            self.gives_back |= is_gone
            # Of what went, only an older block shows that it was there at the beginning.
            if not is_gone or allocation is None:
                self.doubts[handle] = allocation

    def extents(self) -> tuple[Extent, ...]:
        """Return the handles, those side by side of one kind together."""
        found: list[Extent] = []
        for handle in sorted(self.doubts):
            doubt, address = self.doubts[handle], handle * self._size + (self._phase or 0)
            if found and found[-1].doubt == doubt and found[-1].address + found[-1].size == address:
                found[-1] = Extent(found[-1].address, found[-1].size + self._size, doubt)
            else:
                found.append(Extent(address, self._size, doubt))
        return tuple(found)


def _joined(extents: Iterable[Extent]) -> Iterator[tuple[int, int]]:
    """Yield begin and end of extents, those that touch as one."""
    begin = end = None
    for extent in extents:
        if end != extent.address:
            if begin is not None and end is not None:
                yield begin, end
            begin = extent.address
        end = extent.address + extent.size
    if begin is not None and end is not None:
        yield begin, end


def _rounded(size: int) -> int:
    return -(-max(size, 1) // GRANULE_BYTES) * GRANULE_BYTES
