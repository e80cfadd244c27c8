"""Finds segments that a recording began with, or had for a while, and that were gone before its end.

A block that lies in no segment of the recording's end lay in one that was given back. Under torch's default rules a
segment starts at a multiple of 2 MiB and has the size that its first request asked for, so the blocks that lay in it
tell at least what it must have been. Of a segment that was gone before the end and held no block since the beginning
nothing is left in a recording without events of segments, and none is invented.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from rallocator import _core
from rallocator._replay.layout import GRANULE_BYTES, MIB, SMALL_SEGMENT_BYTES
from rallocator._replay.recording import PoolPair, Segment

SEGMENT_ALIGNMENT_BYTES = 2 * MIB
SHARED_SEGMENT_BYTES = 20 * MIB
SHARED_REQUEST_LIMIT_BYTES = 10 * MIB
"""Requests of less than this share segments of 20 MiB."""


class Touch(NamedTuple):
    """A block that lay somewhere at some time of the recording."""

    address: int
    size: int
    """Bytes that were asked for."""
    stream: int
    pool: PoolPair
    is_old: bool = False
    """Whether it is older than the recording."""
    outlived: bool = False
    """Whether it outlived it too."""

    @property
    def end(self) -> int:
        """The first byte behind the block."""
        return self.address + max(-(-self.size // GRANULE_BYTES) * GRANULE_BYTES, GRANULE_BYTES)

    @property
    def owner(self) -> Owner:
        """Whose requests its segment serves."""
        return self.stream, self.pool, self.size <= MIB


Owner: TypeAlias = tuple[int, PoolPair, bool]
"""Stream, pool, and whether for small requests: blocks of different owners never share a segment."""


def segments_at_beginning(
    device: int, segments: Sequence[Segment], touches: Sequence[Touch]
) -> tuple[list[Segment], list[Segment]]:
    """Return the final segments that may have been there when the recording began, and those that were and went.

    Arguments:
        device: whose segments they are.
        segments: those that there were in the end; none overlaps another.
        touches: all blocks of the recording; first those that are older, then the others in the order of time.
    """
    ordered = sorted(segments, key=lambda segment: segment.address)
    overlapped = _overlapped(ordered, touches)
    came_after = _came_after(ordered, overlapped, touches)
    before = [
        touch
        for number, (touch, lies_in) in enumerate(zip(touches, overlapped, strict=True))
        if not lies_in or any(number <= came_after[index] for index in lies_in)
    ]
    outside: dict[Owner, dict[int, Touch]] = {}
    for touch in _until_reused(before):
        known = outside.setdefault(touch.owner, {})
        if touch.address not in known or known[touch.address].size < touch.size:
            known[touch.address] = touch
    gone: list[Segment] = []
    for (stream, pool, is_small), by_address in outside.items():
        blocks = sorted(by_address.values(), key=lambda touch: touch.address)
        spans = _small(blocks) if is_small else _large(blocks)
        gone += [Segment(device, base, size, stream, pool, is_expandable=False, blocks=()) for base, size in spans]
    return [segment for segment, after in zip(ordered, came_after, strict=True) if after < 0], gone


def _overlapped(ordered: Sequence[Segment], touches: Iterable[Touch]) -> list[range]:
    """Return the positions of the segments that each block overlaps."""
    bases = [segment.address for segment in ordered]
    ends = [segment.address + segment.size for segment in ordered]
    return [range(bisect.bisect_right(ends, touch.address), bisect.bisect_left(bases, touch.end)) for touch in touches]


def _came_after(ordered: Sequence[Segment], overlapped: Sequence[range], touches: Sequence[Touch]) -> list[int]:
    """Return for each segment the latest block that lay there before it did; -1 if there is no sign of one.

    That is one of another owner, or across its bounds, or the first one if that is not at the first byte.
    """
    came_after = [-1] * len(ordered)
    stays = [False] * len(ordered)
    for number, (touch, lies_in) in enumerate(zip(touches, overlapped, strict=True)):
        for index in lies_in:
            stays[index] |= touch.outlived
            if not _may_hold(ordered[index], touch):
                came_after[index] = number
    settled = [after < 0 and stay for after, stay in zip(came_after, stays, strict=True)]
    for number, (touch, lies_in) in enumerate(zip(touches, overlapped, strict=True)):
        for index in lies_in:
            if settled[index] or number <= came_after[index]:
                continue
            if touch.is_old or touch.address == ordered[index].address:
                settled[index] = True
            else:
                came_after[index] = number
    return [-1 if stay else after for after, stay in zip(came_after, stays, strict=True)]


def _until_reused(touches: Iterable[Touch]) -> Iterator[Touch]:
    """Yield blocks until one lies where another owner's lay: from then on memory came and went."""
    starts: list[int] = []
    spans: list[tuple[int, Owner]] = []
    for touch in touches:
        start, end = touch.address, touch.end
        first = max(bisect.bisect_right(starts, start) - 1, 0)
        if first < len(starts) and spans[first][0] <= start:
            first += 1
        last = bisect.bisect_left(starts, end)
        if any(owner != touch.owner for _, owner in spans[first:last]):
            return
        if first < last:
            start, end = min(start, starts[first]), max(end, spans[last - 1][0])
        starts[first:last] = [start]
        spans[first:last] = [(end, touch.owner)]
        yield touch


def _may_hold(segment: Segment, touch: Touch) -> bool:
    return (
        segment.address <= touch.address
        and touch.end <= segment.address + segment.size
        and (segment.stream, segment.pool, segment.size <= SMALL_SEGMENT_BYTES) == touch.owner
    )


def _aligned(address: int) -> int:
    return address // SEGMENT_ALIGNMENT_BYTES * SEGMENT_ALIGNMENT_BYTES


def _small(blocks: Sequence[Touch]) -> list[tuple[int, int]]:
    return [(base, SMALL_SEGMENT_BYTES) for base in sorted({_aligned(block.address) for block in blocks})]


def _large(blocks: Sequence[Touch]) -> list[tuple[int, int]]:
    """Cut the addresses of large blocks into segments."""
    spans: list[tuple[int, int]] = []
    base = end = 0
    is_shared = False
    for block in blocks:
        is_within = _is_open(base, end) and (
            block.address < end
            or (is_shared and block.end <= base + SHARED_SEGMENT_BYTES)
            # No segment starts here, so it is the rest of the one before.
            or (block.address == end and _aligned(block.address) != block.address)
        )
        if not is_within:
            if _is_open(base, end):
                spans.append((base, _size(base, end, is_shared=is_shared)))
            base, end, is_shared = _aligned(block.address), block.end, True
        end = max(end, block.end)
        is_shared = is_shared and block.size < SHARED_REQUEST_LIMIT_BYTES and end <= base + SHARED_SEGMENT_BYTES
    if _is_open(base, end):
        spans.append((base, _size(base, end, is_shared=is_shared)))
    return spans


def _is_open(base: int, end: int) -> bool:
    """Return whether a segment has been begun."""
    return end > base


def _size(base: int, end: int, *, is_shared: bool) -> int:
    return SHARED_SEGMENT_BYTES if is_shared else _core.native_segment_size(end - base)
