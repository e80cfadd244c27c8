"""What a replay does, step by step: the form in which a history goes to the core."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from rallocator import _core


class Kind(enum.IntEnum):
    """What a step does. The numbers are those that `crates/pybind/src/replay.rs` reads."""

    ALLOCATE = 0
    FREE = 1
    FREE_USED_ELSEWHERE = 2
    """The free of a block that another stream uses too: it is reusable only once that stream's work has ended."""
    TRY = 3
    """An allocation that failed when it was recorded: tried where memory is limited, and given back at once."""


@dataclass(slots=True)
class Steps:
    """Steps in the order in which they happen, column by column."""

    kinds: list[int] = field(default_factory=list)
    allocations: list[int] = field(default_factory=list)
    """A number that only this allocation and its free have; 0 for a `Kind.TRY`."""
    sizes: list[int] = field(default_factory=list)
    """Bytes asked for; 0 for a free."""
    streams: list[int] = field(default_factory=list)
    """The stream's number: 0 is the default stream, others count from 1 in order of appearance."""
    pools: list[int] = field(default_factory=list)
    """The private pool's number, from 1 in order of appearance; 0 is the default pool."""
    times_us: list[int] = field(default_factory=list)
    """Microseconds since the first event; never falling."""
    uses_end_us: list[int] = field(default_factory=list)
    """When the other stream's work ends, on the same clock; 0 for all but `Kind.FREE_USED_ELSEWHERE`."""

    def add(self, kind: Kind, allocation: int, size: int, stream: int, pool: int, time_us: int) -> None:
        """Append one step."""
        self.kinds.append(kind)
        self.allocations.append(allocation)
        self.sizes.append(size)
        self.streams.append(stream)
        self.pools.append(pool)
        self.times_us.append(time_us)
        self.uses_end_us.append(0)

    def followed_by(self, later: Steps) -> Steps:
        """Return these steps and then the later ones."""
        return Steps(
            self.kinds + later.kinds,
            self.allocations + later.allocations,
            self.sizes + later.sizes,
            self.streams + later.streams,
            self.pools + later.pools,
            self.times_us + later.times_us,
            self.uses_end_us + later.uses_end_us,
        )

    def packed(self) -> _core.ReplaySteps:
        """Return the steps as the core takes them: packed once, and replayed as often as need be."""
        return _core.ReplaySteps(
            kinds=self.kinds,
            allocations=self.allocations,
            sizes=self.sizes,
            streams=self.streams,
            pools=self.pools,
            times_us=self.times_us,
            uses_end_us=self.uses_end_us,
        )
