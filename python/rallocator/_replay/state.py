"""What the memory that a recording ends with tells by itself, without a history."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rallocator._replay.recording import PoolPair, Segment


@dataclass(frozen=True, slots=True)
class PoolState:
    """The memory of one pool for one stream. Bytes."""

    pool: PoolPair
    """The pool's name as torch writes it; (0, 0) is the default pool."""
    stream: int
    """The number of the stream: 0 is the default stream, others count from 1 in the order of the file."""
    reserved: int
    """Obtained from the driver."""
    allocated: int
    """Held by the program."""
    pending: int
    """Freed, but another stream may still use it."""
    free: int
    """Cached."""
    largest_free: int
    """The largest free block: what can be had from this pool without the driver."""


@dataclass(frozen=True, slots=True)
class MemoryState:
    """The memory of a device when the recording ended. Bytes."""

    reserved: int
    allocated: int
    pending: int
    free: int
    largest_free: int
    fragmentation: float | None
    """The share of the free memory that is outside the largest free block; None where none is free."""
    requested: int
    """What the program had asked for of the blocks in use, before rounding."""
    pools: tuple[PoolState, ...]
    """Largest first."""

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON has it."""
        pools = [{**dataclasses.asdict(pool), "pool": list(pool.pool)} for pool in self.pools]
        return {**dataclasses.asdict(self), "pools": pools}


def memory_state(segments: Iterable[Segment]) -> MemoryState | None:
    """Sum up the final segments of one device; None if there is none."""
    groups: dict[tuple[PoolPair, int], list[Segment]] = {}
    streams: dict[int, int] = {0: 0}
    for segment in segments:
        stream = streams.setdefault(segment.stream, len(streams))
        groups.setdefault((segment.pool, stream), []).append(segment)
    if not groups:
        return None
    pools = [_pool_state(pool, stream, members) for (pool, stream), members in groups.items()]
    pools.sort(key=lambda state: (-state.reserved, state.pool, state.stream))
    free = sum(state.free for state in pools)
    largest = max(state.largest_free for state in pools)
    return MemoryState(
        reserved=sum(state.reserved for state in pools),
        allocated=sum(state.allocated for state in pools),
        pending=sum(state.pending for state in pools),
        free=free,
        largest_free=largest,
        fragmentation=1 - largest / free if free else None,
        requested=sum(block.requested for members in groups.values() for one in members for block in one.active),
        pools=tuple(pools),
    )


def _pool_state(pool: PoolPair, stream: int, segments: list[Segment]) -> PoolState:
    reserved = sum(segment.size for segment in segments)
    blocks = [block for segment in segments for block in segment.blocks]
    pending = sum(block.size for block in blocks if block.is_pending)
    allocated = sum(block.size for block in blocks if block.is_active) - pending
    free = [block.size for block in blocks if not block.is_active]
    return PoolState(pool, stream, reserved, allocated, pending, sum(free), max(free, default=0))
