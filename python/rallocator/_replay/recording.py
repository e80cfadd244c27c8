"""What a recorded file says, whatever its format: the memory there was in the end, and events device by device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

PoolPair: TypeAlias = tuple[int, int]
"""A memory pool's name, as torch writes it. (0, 0) is the default pool."""

DEFAULT_POOL: PoolPair = (0, 0)


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a segment."""

    address: int
    size: int
    """Bytes."""
    requested: int
    """Bytes that the program asked for; `size` for a free block."""
    is_active: bool
    """Whether the program holds it, or another stream may still use it."""
    is_pending: bool
    """Whether it was freed and another stream may still use it."""
    frames: object = None
    """By whom it was allocated, as the file has it, unchecked. None where frames are not kept."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory that the allocator held when the recording ended."""

    device: int
    address: int
    size: int
    stream: int
    pool: PoolPair
    is_expandable: bool
    blocks: tuple[Block, ...]
    """In the order of their addresses."""
    is_small: bool = False
    """Whether it serves requests of at most 1 MiB, where the file says so."""

    @property
    def active(self) -> tuple[Block, ...]:
        """The blocks that were in use."""
        return tuple(block for block in self.blocks if block.is_active)


@dataclass(slots=True)
class Trace:
    """The events of one device, column by column, in the order in which they were recorded."""

    actions: list[str] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Bytes, never negative."""
    streams: list[int] = field(default_factory=list)
    pools: list[PoolPair | None] = field(default_factory=list)
    """None where the event does not tell."""
    device_free: list[int | None] = field(default_factory=list)
    """For an `oom`, the bytes that the driver had free, if that is known."""
    times_us: list[int] | None = field(default_factory=list)
    """None for files without times (before torch 2.2)."""
    frames: list[object] = field(default_factory=list)
    """By whom each event was caused, as the file has it, unchecked. Empty where frames are not kept."""
    peak_reserved: int | None = None
    """The most bytes reserved, where the events say it themselves."""

    def add(self, action: str, address: int, size: int, stream: int, time_us: int) -> None:
        """Append an event of a format that has no pools."""
        self.actions.append(action)
        self.addresses.append(address)
        self.sizes.append(size)
        self.streams.append(stream)
        self.pools.append(None)
        self.device_free.append(None)
        if self.times_us is not None:
            self.times_us.append(time_us)


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded history, or a state without one."""

    segments: tuple[Segment, ...]
    traces: dict[int, Trace]
    """By device; only devices that have events."""
    policy: str | None = None
    """The policy that the recorded allocator followed, if the file says it."""
    tells_places: bool = False
    """Whether it tells of all that torch's allocator was asked for, on which stream, and where it was had."""

    def devices(self) -> list[int]:
        """Return every device that the file tells something of, in order."""
        return sorted({segment.device for segment in self.segments} | set(self.traces))
