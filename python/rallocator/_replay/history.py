"""Turns a recorded history into the steps of a replay.

Only events of blocks count. What torch's allocator did to serve them (`segment_*`) is what a replay is to find out, so
those events could as well be absent. Addresses are names: a free is of the block whose address it bears, and nothing
else is read out of them.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rallocator._replay.emptied import captures, left_segments
from rallocator._replay.gone import Touch, segments_at_beginning
from rallocator._replay.layout import Candidate, OldBlock, candidates, overlap
from rallocator._replay.pools import infer_pools
from rallocator._replay.ranges import OldRange, ranges_at_beginning
from rallocator._replay.recording import DEFAULT_POOL, PoolPair, Recording, Segment, Trace
from rallocator._replay.state import MemoryState, memory_state
from rallocator._replay.steps import Kind, Steps
from rallocator.errors import SnapshotError

EVENT_SPACING_US = 10
"""Time between two events of a file without times (before torch 2.2): what a small operation takes to be queued."""

MAX_STREAMS = 4096
"""Streams of one device. Torch hands out 32 of each priority, so a file with more than this many is damaged."""

BLOCK_ACTIONS = frozenset({"alloc", "free_requested", "free_completed", "free", "oom"})
"""Events of blocks. `free` is what torch's viewer makes of a pair; `oom` is an allocation that failed."""

STATE_ONLY = (
    "a state without a history of allocations and frees; "
    "to record one, call torch.cuda.memory._record_memory_history() before the program allocates"
)
NO_FREES = (
    "recorded without events of frees, so that nothing tells when a block ended; record again without skip_actions"
)
NO_ALLOCATIONS = (
    "recorded without events of allocations, so that nothing tells when a block began; "
    "record again without skip_actions"
)


class Streams(enum.Enum):
    """What becomes of the recorded streams."""

    KEEP = "keep"
    """Each stays what it was."""
    MERGE = "merge"
    """All become one, as if the program had used a single stream: no free waits for another one any more."""


@dataclass(frozen=True, slots=True)
class History:
    """One device's history, ready to be replayed, or the reason why it cannot be."""

    device: int
    reason: str | None
    """Why it cannot be replayed; None when it can."""
    events: int
    """Recorded events of blocks."""
    steps: Steps
    recorded_peak_reserved: int | None
    """Bytes that torch's allocator had reserved at most, as far as the file shows; None if it shows no segment."""
    recorded_policy: str = "native"
    """The policy whose rules the recorded allocator followed."""
    recorded_limit: int | None = None
    """The bytes that were to be had, as far as failed allocations show; None where none failed, or nothing shows it."""
    state: MemoryState | None = None
    """The memory when the recording ended; None if the file shows no segment."""
    layout: tuple[tuple[Candidate, int, int], ...] = ()
    """The segments that may have been there when the recording began, with the numbers of their streams and pools."""
    ranges: tuple[tuple[OldRange, int, int], ...] = ()
    """The memory of expandable segments that may have been there then, with the numbers of its streams and pools."""
    places: tuple[int | None, ...] | None = None
    """For each step the address of the block that it allocates, if those tell of memory that was given back."""
    captures: tuple[int, ...] = ()
    """The steps before which a graph's capture began, as far as its private pool shows."""
    frames: tuple[object, ...] = ()
    """By whom each allocation was made, by its number, as the file has it. Empty where frames are not kept."""

    @property
    def begins_midway(self) -> bool:
        """Whether it is known with what memory it began, since it began in the middle of a run."""
        return bool(self.layout or self.ranges)

    @property
    def gives_back(self) -> bool:
        """Whether expandable segments gave memory back that a block of the recording had lain in."""
        return any(one.gives_back for one, _, _ in self.ranges)

    @property
    def cached_at_beginning(self) -> int:
        """Bytes that surely were cached when it began."""
        pieces = [piece for one, _, _ in self.layout if one.doubt is None for piece in one.pieces]
        of_ranges = [(size, held) for one, _, _ in self.ranges for size, held, is_memory in one.pieces(()) if is_memory]
        return sum(size for size, allocation in [*pieces, *of_ranges] if allocation is None)


def histories(recording: Recording, streams: Streams = Streams.KEEP) -> list[History]:
    """Return the history of every device that a file tells of; one that cannot be replayed if it tells of none."""
    recorded = any(_is_recording(trace, recording.segments, device) for device, trace in recording.traces.items())
    return [_history(recording, device, streams, recorded=recorded) for device in recording.devices() or [0]]


def _is_recording(trace: Trace, segments: Iterable[Segment], device: int) -> bool:
    """Tell a history from a state: recording with `enabled="state"` keeps the latest event and nothing before it."""
    events = [index for index, action in enumerate(trace.actions) if action in BLOCK_ACTIONS]
    if len(events) != 1:
        return len(events) > 1
    # A single allocation that explains all there is in the end is a short history, and its replay is exact.
    active = [block.address for segment in segments if segment.device == device for block in segment.active]
    return trace.actions[events[0]] == "alloc" and active in ([], [trace.addresses[events[0]]])


def _history(recording: Recording, device: int, streams: Streams, *, recorded: bool) -> History:
    segments = [segment for segment in recording.segments if segment.device == device]
    trace = recording.traces.get(device, Trace())
    levels = _reserved_levels(segments, trace)
    peak = trace.peak_reserved if levels is None else max(levels)
    walk = _Walk(segments, trace, streams)
    steps, reason = Steps(), None
    if recorded and walk.events:
        steps = walk.run()
        reason = walk.missing_kinds()
    else:
        reason = STATE_ONLY
    is_expandable = "segment_map" in trace.actions or any(segment.is_expandable for segment in segments)
    policy = recording.policy or ("expandable" if is_expandable else "native")
    history = History(
        device,
        reason,
        walk.events,
        Steps() if reason else steps,
        peak,
        policy,
        _recorded_limit(trace, levels),
        memory_state(segments),
        frames=tuple(walk.frames),
    )
    if reason is not None:
        return history
    follows = recording.tells_places and policy == "native" and not is_expandable
    places = walk.places(steps) if follows else None
    return dataclasses.replace(
        history,
        layout=walk.layout(device, finds_gone=follows),
        ranges=walk.ranges() if recording.tells_places and policy == "expandable" else (),
        places=places,
        captures=walk.captures(steps),
    )


def _reserved_levels(segments: Sequence[Segment], trace: Trace) -> list[int] | None:
    """Walk back from the final segments and return the bytes reserved before each event, and those in the end.

    Without events of segments that is what was reserved in the end. None if the file shows no segment at all.
    """
    changes = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
    if not segments and changes.keys().isdisjoint(trace.actions):
        return None
    levels = [sum(segment.size for segment in segments)]
    for action, size in zip(reversed(trace.actions), reversed(trace.sizes), strict=True):
        levels.append(levels[-1] - changes.get(action, 0) * size)
    levels.reverse()
    return levels


def _recorded_limit(trace: Trace, levels: Sequence[int] | None) -> int | None:
    """Return what could be reserved when allocations failed.

    What the driver had free counts only if it was too little for the request: else a limit of the program's own was
    met, and all that is known of it is that it was not below what had been reserved.
    """
    limits = []
    for index, action in enumerate(trace.actions):
        if action == "oom" and levels is not None:
            free = trace.device_free[index]
            is_full = free is not None and free < trace.sizes[index]
            limits.append(levels[index] + (free if is_full and free is not None else 0))
    return max(*limits, *(levels or ())) if limits and max(limits) > 0 else None


class _Walk:
    """One walk through a device's events of blocks, forwards."""

    def __init__(self, segments: Sequence[Segment], trace: Trace, streams: Streams) -> None:
        chosen = [index for index, action in enumerate(trace.actions) if action in BLOCK_ACTIONS]
        self.events = len(chosen)
        self._segments = segments
        self._merged = streams is Streams.MERGE
        self._actions = [trace.actions[index] for index in chosen]
        self._addresses = [trace.addresses[index] for index in chosen]
        self._sizes = [trace.sizes[index] for index in chosen]
        self._raw_streams = [trace.streams[index] for index in chosen]
        self._times_us = _times_us(
            None if trace.times_us is None else [trace.times_us[index] for index in chosen], chosen
        )
        self._event_frames = [trace.frames[index] for index in chosen] if trace.frames else []
        self.frames: list[object] = []
        """By allocation, where frames are kept."""
        pools = [trace.pools[index] for index in chosen]
        self._pools = infer_pools(segments, self._actions, self._addresses, self._raw_streams, pools)

        self._stream_numbers: dict[int, int] = {0: 0}
        self._pool_numbers: dict[PoolPair, int] = {DEFAULT_POOL: 0}
        self._allocations = 0
        self._steps = Steps()
        self._older = Steps()
        """Blocks that were there before the first event, and were freed in the recording."""
        self._live: dict[int, int] = {}
        """Allocations by address."""
        self._waiting: dict[int, int | None] = {}
        """Addresses whose free was requested and has not completed: the step that is to know when it does, if any."""
        self._freed_older: set[int] = set()
        self._old_blocks: list[OldBlock] = []
        """Older than the recording: those that were freed in it, and then those that outlived it."""
        self._old_touches: list[Touch] = []
        self._allocated: list[int] = []
        """The allocations of the recording, in the order of time."""
        self._first_allocations: dict[int, tuple[int, int]] = {}
        """The bytes asked for at first and the allocation, by address, in the order of time."""
        self._frees_without_block = 0
        self._replaced = 0

    def run(self) -> Steps:
        """Return the steps of the whole recording.

        Blocks that are older than it come first: those that outlived it, as the final segments list them, then the
        others in the order in which they were freed. This order does not depend on addresses.
        """
        completions_recorded = "free_completed" in self._actions
        for index, (action, address) in enumerate(zip(self._actions, self._addresses, strict=True)):
            if action == "alloc":
                self._allocate(index, address)
            elif action == "oom":
                self._steps.add(Kind.TRY, 0, *self._request(index))
            elif action == "free_completed" and address in self._waiting:
                self._complete(address, self._times_us[index])
            elif action == "free_requested" and completions_recorded:
                # The completion follows at once unless the block waits for another stream.
                elsewhere = not self._merged and not self._completes_next(index, address)
                self._free(index, address, Kind.FREE_USED_ELSEWHERE if elsewhere else Kind.FREE)
                self._waiting[address] = len(self._steps.kinds) - 1 if elsewhere else None
            else:
                self._free(index, address, Kind.FREE)
        outlived = self._outlived()
        for address in list(self._waiting):
            # Torch had not seen the other stream's work end when the recording did.
            self._complete(address, self._times_us[-1] + 1)
        return outlived.followed_by(self._older).followed_by(self._steps)

    def missing_kinds(self) -> str | None:
        """Return why the events are no history, if whole kinds of them were left out (`skip_actions`, torch 2.11)."""
        kinds = set(self._actions)
        if kinds.isdisjoint({"free_requested", "free_completed", "free"}):
            final = {block.address for segment in self._segments for block in segment.active}
            if self._replaced or (self._segments and not final.issuperset(self._live)):
                return NO_FREES
        if "alloc" not in kinds and self._frees_without_block:
            return NO_ALLOCATIONS
        return None

    def _allocate(self, index: int, address: int) -> None:
        if address in self._live:
            # Its free is not in the recording, but nothing else can have happened to it.
            self._replaced += 1
            self._free(index, address, Kind.FREE)
        self._complete(address, self._times_us[index])
        self._freed_older.discard(address)
        self._live[address] = self._number(self._event_frames[index] if self._event_frames else None)
        self._allocated.append(self._live[address])
        self._first_allocations.setdefault(address, (self._sizes[index], self._live[address]))
        self._steps.add(Kind.ALLOCATE, self._live[address], *self._request(index))

    def _complete(self, address: int, time_us: int) -> None:
        """Note that a block is no longer in use by other streams."""
        step = self._waiting.pop(address, None)
        if step is not None:
            self._steps.uses_end_us[step] = time_us

    def _free(self, index: int, address: int, kind: Kind) -> None:
        allocation = self._live.pop(address, None)
        if allocation is None:
            if address in self._freed_older:
                self._frees_without_block += 1
                return
            allocation = self._number(None)
            size, stream, pool, _ = self._request(index)
            if address not in self._first_allocations:
                self._old_blocks.append(OldBlock(address, size, allocation))
                self._old_touches.append(
                    Touch(address, size, self._raw_streams[index], self._pools[index], is_old=True)
                )
            self._freed_older.add(address)
            self._older.add(Kind.ALLOCATE, allocation, size, stream, pool, 0)
        self._steps.add(kind, allocation, 0, 0, 0, self._times_us[index])

    def _completes_next(self, index: int, address: int) -> bool:
        following = index + 1
        return (
            following < self.events
            and self._actions[following] == "free_completed"
            and self._addresses[following] == address
        )

    def _outlived(self) -> Steps:
        """Return the allocations of blocks that are in the final segments and in no event."""
        outlived = Steps()
        for segment in self._segments:
            for block in segment.active:
                if block.address not in self._live and block.address not in self._waiting:
                    stream, pool = self._stream(segment.stream), self._pool(segment.pool)
                    outlived.add(Kind.ALLOCATE, self._number(block.frames), block.requested, stream, pool, 0)
                    self._old_blocks.append(OldBlock(block.address, block.size, self._allocations - 1))
                    self._old_touches.append(
                        Touch(block.address, block.requested, segment.stream, segment.pool, is_old=True, outlived=True)
                    )
        return outlived

    def layout(self, device: int, *, finds_gone: bool) -> tuple[tuple[Candidate, int, int], ...]:
        """Return what the recording may have begun with; to be asked for after the walk."""
        if self._merged:
            return ()
        segments, gone = self._segments, list[Segment]()
        if self._old_blocks and finds_gone and not overlap(segments):
            segments, gone = segments_at_beginning(device, segments, list(self._touches()))
        found = candidates([*segments, *gone], self._old_blocks, self._first_allocations)
        return tuple((one, self._stream(one.segment.stream), self._pool(one.segment.pool)) for one in found)

    def ranges(self) -> tuple[tuple[OldRange, int, int], ...]:
        """Return the memory of expandable segments that the recording may have begun with; after the walk."""
        if self._merged:
            return ()
        found = ranges_at_beginning(self._segments, self._old_blocks, list(self._touches()), self._allocated)
        return tuple((one, self._stream(one.stream), self._pool(one.pool)) for one in found)

    def _touches(self) -> Iterator[Touch]:
        """Yield every block of the recording, those first that are older."""
        yield from self._old_touches
        columns = zip(self._actions, self._addresses, self._sizes, self._raw_streams, self._pools, strict=True)
        for action, address, size, stream, pool in columns:
            if action == "alloc":
                yield Touch(address, size, stream, pool)

    def places(self, steps: Steps) -> tuple[int | None, ...] | None:
        """Return where blocks lay, if that tells of memory that was given back; to be asked for after the walk."""
        indices = [index for index, action in enumerate(self._actions) if action == "alloc"]
        addresses, sizes, streams = (
            [column[index] for index in indices] for column in (self._addresses, self._sizes, self._raw_streams)
        )
        if self._merged or not self._segments or not left_segments(self._segments, addresses, sizes, streams):
            return None
        blocks: list[int | None] = [None] * len(steps.kinds)
        of_recording = [step for step, kind in enumerate(steps.kinds) if kind == Kind.ALLOCATE][-len(addresses) :]
        for step, address in zip(of_recording, addresses, strict=True):
            blocks[step] = address
        return tuple(blocks)

    def captures(self, steps: Steps) -> tuple[int, ...]:
        """Return the steps before which captures began; to be asked for after the walk."""
        older = len(steps.kinds) - len(self._steps.kinds)
        return captures(steps, list(self._pool_numbers), frozenset(steps.pools[:older]))

    def _request(self, index: int) -> tuple[int, int, int, int]:
        """Return size, stream, pool and time of an event, as a step has them."""
        stream, pool = self._stream(self._raw_streams[index]), self._pool(self._pools[index])
        return self._sizes[index], stream, pool, self._times_us[index]

    def _number(self, frames: object) -> int:
        if self._event_frames:
            self.frames.append(frames)
        self._allocations += 1
        return self._allocations - 1

    def _stream(self, raw: int) -> int:
        if self._merged:
            return 0
        number = self._stream_numbers.setdefault(raw, len(self._stream_numbers))
        if number > MAX_STREAMS:
            raise SnapshotError(f"more than {MAX_STREAMS} streams on one device")
        return number

    def _pool(self, pair: PoolPair) -> int:
        return self._pool_numbers.setdefault(pair, len(self._pool_numbers))


def _times_us(recorded: Sequence[int] | None, chosen: Sequence[int]) -> list[int]:
    """Return times since the first event, never falling."""
    if recorded is None:
        return [number * EVENT_SPACING_US for number in range(len(chosen))]
    times: list[int] = []
    latest = recorded[0] if recorded else 0
    begin = latest
    for time_us in recorded:
        latest = max(latest, time_us)
        times.append(latest - begin)
    return times
