"""Finds out when a recorded program emptied its cache, which no event of a block shows.

Two things tell of it. `torch.cuda.graph` empties the cache right before it begins a capture, so that a private pool
which a capture began by itself was preceded by an emptied cache. And under torch's default rules, where blocks lay
tells what memory there was: the core follows a recording and finds the requests that were served from elsewhere
although cached memory would have served them. Neither is believed if it leaves more unexplained than it explains.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rallocator import _core
from rallocator._replay.layout import MIB, SMALL_SEGMENT_BYTES
from rallocator._replay.recording import PoolPair, Segment
from rallocator._replay.steps import Kind, Steps


@dataclass(frozen=True, slots=True)
class Emptied:
    """The steps before which the cache was emptied."""

    by_program: tuple[int, ...] = ()
    """Surely not by the allocator itself at a limit, since more was reserved at some other time."""
    by_anyone: tuple[int, ...] = ()
    """Those, and those that may have been."""


NEVER_EMPTIED = Emptied()


def left_segments(
    segments: Sequence[Segment], addresses: Sequence[int], sizes: Sequence[int], streams: Sequence[int]
) -> bool:
    """Return whether one of these allocations lay elsewhere than in a final segment of its kind.

    If none did, then no memory went that did not come back in the same place, and nothing is to be found out.
    """
    ordered = sorted(segments, key=lambda segment: segment.address)
    bases = [segment.address for segment in ordered]
    for address, size, stream in zip(addresses, sizes, streams, strict=True):
        index = bisect.bisect_right(bases, address) - 1
        if index < 0:
            return True
        holder = ordered[index]
        is_small = holder.size == SMALL_SEGMENT_BYTES
        if address + size > holder.address + holder.size or stream != holder.stream or is_small != (size <= MIB):
            return True
    return False


def captures(steps: Steps, pools: Sequence[PoolPair], older_pools: frozenset[int]) -> tuple[int, ...]:
    """Return the steps with the first request of each private pool that a capture began.

    Torch numbers those in the first place of the pair, and those of `torch.cuda.MemPool` and
    `torch.cuda.graph_pool_handle`, which may be used long before a capture, in the second.

    Arguments:
        steps: the history.
        pools: the names of its pools, by their numbers.
        older_pools: the numbers of those that are older than it.
    """
    begun = {number for number, (by_capture, _) in enumerate(pools) if by_capture} - older_pools
    first: dict[int, int] = {}
    for step, (kind, pool) in enumerate(zip(steps.kinds, steps.pools, strict=True)):
        if pool in begun and kind == Kind.ALLOCATE:
            first.setdefault(pool, step)
    return tuple(sorted(set(first.values())))


def find_emptied(
    steps: _core.ReplaySteps,
    asked: dict[str, Any],
    places: Sequence[int | None] | None,
    captures: Sequence[int],
    most_steps: int,
) -> Emptied:
    """Return when the cache was emptied.

    Arguments:
        steps: the history, after the memory that it began with.
        asked: how to replay it under the policy that it was recorded under.
        places: for each step the address of the block that it allocates, or None if that is unknown; None if all of
            them tell nothing.
        captures: steps before which captures began.
        most_steps: how many may be replayed for it, beyond a few runs.
    """
    if places is None:
        return Emptied(tuple(captures), tuple(captures))

    blocks = list(places)

    def follow(given: Sequence[int], most_steps: int) -> tuple[list[tuple[int, int]], int, int]:
        return steps.follow({**asked, "empty_cache_before": list(given)}, places=blocks, most_steps=most_steps)

    tried = {given: follow(given, most_steps) for given in dict.fromkeys((tuple(captures), ()))}
    given = min(tried, key=lambda given: tried[given][2])
    emptied, peak, _ = tried[given]
    by_program = [step for step, wanted in emptied if step in given or wanted <= peak]
    return Emptied(tuple(by_program), tuple(step for step, _ in emptied))
