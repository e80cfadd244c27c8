"""Finds the memory that a recording began with, where it began in the middle of a run.

A history that lost its head, or was begun late, shows the segments at its end and the events since its beginning. A
segment of torch's default rules never changes its size and place, so one was there at the beginning if a block in it
is older than the recording, if nothing in it was ever allocated since, or if the first allocation in it, at its first
byte, is not one that a new segment would have been obtained for. What was free in it is what no older block covers.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rallocator import _core
from rallocator._replay.recording import Segment

MIB = 1 << 20

GRANULE_BYTES = 512
"""What the sizes of blocks are multiples of."""

SMALL_SEGMENT_BYTES = 2 * MIB
"""Segments of this size hold requests of at most 1 MiB, and none larger does."""

LEAST_LARGE_REMAINDER_BYTES = 1 * MIB
"""What remains of a large block is split off if it is more than this."""

Piece: TypeAlias = tuple[int, int | None]
"""Bytes, and the allocation that had them; None if they were free."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A segment that may have been there when the recording began."""

    segment: Segment
    pieces: list[Piece]
    """From its first byte to its last."""
    doubt: int | None
    """None if it surely was there; else the allocation that it may have been obtained for."""


@dataclass(frozen=True, slots=True)
class OldBlock:
    """A block that is older than the recording."""

    address: int
    size: int
    """Bytes of the block, or what was asked for if the block was freed."""
    allocation: int


def candidates(
    segments: Sequence[Segment],
    old: Sequence[OldBlock],
    first_allocations: Mapping[int, tuple[int, int]],
) -> list[Candidate]:
    """Return the segments that may have been there when the recording began, in the order of their addresses.

    Arguments:
        segments: those at its end, or those that may have been there at the beginning.
        old: the blocks that are older than the recording.
        first_allocations: for each address that was allocated in the recording, the bytes asked for at first and the
            allocation's number, in the order of time.

    Returns:
        Nothing if nothing is older than the first request: then the recording began with that.
    """
    ordered = sorted((segment for segment in segments if segment.size > 0), key=lambda segment: segment.address)
    if any(segment.is_expandable for segment in ordered) or overlap(ordered):
        return []
    bases = [segment.address for segment in ordered]
    older: dict[int, list[OldBlock]] = {}
    for block in old:
        if (index := _holder(ordered, bases, block.address)) is not None:
            older.setdefault(index, []).append(block)
    first: dict[int, tuple[int, int, int]] = {}
    for address, (size, allocation) in first_allocations.items():
        if (index := _holder(ordered, bases, address)) is not None:
            first.setdefault(index, (address, size, allocation))
    found = []
    is_cut = False
    for index, segment in enumerate(ordered):
        blocks = sorted(older.get(index, ()), key=lambda block: block.address)
        pieces = _pieces(segment, blocks)
        if pieces is None:
            continue
        if blocks or index not in first:
            is_cut = True
            found.append(Candidate(segment, pieces, None))
            continue
        address, size, allocation = first[index]
        if address != segment.address:
            # An idle segment is used from its first byte on. So what lies there now came later.
            continue
        is_doubtful = _core.native_segment_size(size) == segment.size
        found.append(Candidate(segment, pieces, allocation if is_doubtful else None))
    return found if is_cut else []


def overlap(segments: Sequence[Segment]) -> bool:
    """Return whether two segments share an address: then the file is damaged."""
    ordered = sorted(segments, key=lambda segment: segment.address)
    return any(segment.address + segment.size > later.address for segment, later in itertools.pairwise(ordered))


def _holder(ordered: Sequence[Segment], bases: Sequence[int], address: int) -> int | None:
    """Return the position of the segment that an address lies in."""
    index = bisect.bisect_right(bases, address) - 1
    return index if index >= 0 and address < ordered[index].address + ordered[index].size else None


def _pieces(segment: Segment, blocks: Sequence[OldBlock]) -> list[Piece] | None:
    """Return what a segment was cut into; None if it cannot have been like that."""
    is_small = segment.size <= SMALL_SEGMENT_BYTES
    least = GRANULE_BYTES if is_small else LEAST_LARGE_REMAINDER_BYTES + 1
    end = segment.address + segment.size
    pieces: list[Piece] = []
    at = segment.address
    ends = [*(later.address for later in blocks[1:]), end] if blocks else []
    for block, following in zip(blocks, ends, strict=True):
        gap = block.address - at
        size = _rounded(block.size)
        # What is too little to be a block of its own belongs to the block before it.
        if 0 < following - (block.address + size) < least:
            size = following - block.address
        if gap < 0 or 0 < gap < least or block.address + size > following or is_small != (size <= MIB):
            return None
        if gap:
            pieces.append((gap, None))
        pieces.append((size, block.allocation))
        at = block.address + size
    if at < end:
        pieces.append((end - at, None))
    return pieces


def _rounded(size: int) -> int:
    return -(-max(size, 1) // GRANULE_BYTES) * GRANULE_BYTES
