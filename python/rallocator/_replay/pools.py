"""Finds the pool of each allocation. Events name it only since torch 2.12; before, only the final segments do."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from rallocator._replay.recording import DEFAULT_POOL, PoolPair, Segment


def infer_pools(
    segments: Sequence[Segment],
    actions: Sequence[str],
    addresses: Sequence[int],
    streams: Sequence[int],
    recorded: Sequence[PoolPair | None],
) -> list[PoolPair]:
    """Return the pool of each event.

    What the event says counts. Else an allocation at an address where a block of a private pool's final segment begins,
    on that segment's stream, is taken to be of that pool. What lies between two such allocations of one pool, with none
    of another pool between them on that stream, is taken to be of it too: a capture sends all that its stream asks for
    to one pool. A block that is older than the recording is of the pool of the final segment that it lies in, since a
    private pool keeps its memory. Everything else, a pool that was gone in the end among it, is the default pool's.
    """
    pools = [DEFAULT_POOL if pool is None else pool for pool in recorded]
    places = {
        (segment.stream, block.address): segment.pool
        for segment in segments
        for block in segment.blocks
        if segment.pool != DEFAULT_POOL
    }
    ends = {(segment.stream, block.address): segment.pool for segment in segments for block in segment.active}
    places.update(ends)
    if all(pool == DEFAULT_POOL for pool in places.values()):
        return pools
    latest: dict[int, PoolPair] = {}
    unknown: dict[int, list[int]] = {}
    holders = _Holders(segments)
    seen: set[int] = set()
    for index, action in enumerate(actions):
        is_older = action == "free_requested" and addresses[index] not in seen
        seen.add(addresses[index])
        if is_older and recorded[index] is None and (pool := holders.find(addresses[index], streams[index])):
            latest[streams[index]] = pools[index] = pool
        if action not in ("alloc", "oom") or recorded[index] is not None:
            continue
        stream = streams[index]
        known = places.get((stream, addresses[index])) if action == "alloc" else None
        if known is None:
            unknown.setdefault(stream, []).append(index)
            continue
        pools[index] = known
        between = unknown.pop(stream, [])
        if latest.get(stream) == known:
            for earlier in between:
                pools[earlier] = known
        latest[stream] = known
    return pools


class _Holders:
    """The final segments of private pools, by their addresses."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        private = (segment for segment in segments if segment.pool != DEFAULT_POOL)
        self._segments = sorted(private, key=lambda segment: segment.address)
        self._bases = [segment.address for segment in self._segments]

    def find(self, address: int, stream: int) -> PoolPair | None:
        """Return the pool of the segment that an address lies in, if it is of this stream."""
        index = bisect.bisect_right(self._bases, address) - 1
        if index < 0:
            return None
        segment = self._segments[index]
        return segment.pool if segment.stream == stream and address < segment.address + segment.size else None
