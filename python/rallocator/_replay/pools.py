"""Finds the pool of each allocation. Events name it only since torch 2.12; before, only the final segments do."""

from __future__ import annotations

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
    to one pool. Everything else, a pool that was gone in the end among it, is the default pool's.
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
    for index, action in enumerate(actions):
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
