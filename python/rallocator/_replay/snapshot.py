"""What a snapshot says, checked: its final segments, and its events device by device.

Every layout since torch 2.0 is read by the presence of its keys, never by a version number. Keys that a replay does not
need are not looked at, so that a damaged stack frame is no reason to refuse a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, cast

from rallocator._replay.container import DEFAULT_LIMIT_BYTES, chunks
from rallocator._replay.unpickle import load
from rallocator.errors import SnapshotError

MAX_SIZE_BYTES = 1 << 48
"""Bytes of one block or segment that are taken for real: 256 TiB, more than the address space of any GPU in use."""

MAX_DEVICES = 1024
"""Devices of one file; no machine has as many."""

PoolPair: TypeAlias = tuple[int, int]
"""A memory pool's name, as torch writes it. (0, 0) is the default pool."""

DEFAULT_POOL: PoolPair = (0, 0)

_ADDRESS_RANGE = range(-(1 << 63), 1 << 64)
"""Addresses and streams are 64-bit numbers; some writers give them a sign."""


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a segment that was in use when the snapshot was taken."""

    address: int
    size: int
    """Bytes that the program asked for."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory that torch held when the snapshot was taken."""

    device: int
    size: int
    stream: int
    pool: PoolPair
    active: tuple[Block, ...]
    addresses: tuple[int, ...]
    """Where each block begins, free ones too."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The events of one device, column by column, in the order in which they were recorded."""

    actions: list[str] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)
    pools: list[PoolPair | None] = field(default_factory=list)
    times_us: list[int] | None = field(default_factory=list)
    """None for files older than torch 2.2, which carry no times."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A recorded history, or a state without one."""

    segments: tuple[Segment, ...]
    traces: dict[int, Trace]
    """By device; only devices that have events."""

    def devices(self) -> list[int]:
        """Return every device that the file tells something of, in order."""
        return sorted({segment.device for segment in self.segments} | set(self.traces))


def read_snapshot(path: Path, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> Snapshot:
    """Read a memory snapshot of torch.

    Arguments:
        path: a pickle as `torch.cuda.memory._dump_snapshot` writes it, or of the list that
            `torch.cuda.memory_snapshot` returns; plain, gzip or xz.
        limit_bytes: unpacked bytes after which the file is refused.

    Raises:
        SnapshotError: the file is unreadable, damaged, or no snapshot; one line that says what is wrong with it.
    """
    top = load(chunks(path, limit_bytes))
    if isinstance(top, list):
        return Snapshot(_segments(top), {})
    if not isinstance(top, dict) or not ("segments" in top or "device_traces" in top):
        raise SnapshotError("not a memory snapshot: neither segments nor device_traces in it")
    segments = _segments(_list(top.get("segments", []), "segments"))
    return Snapshot(segments, _traces(_list(top.get("device_traces", []), "device_traces")))


def _segments(entries: Sequence[object]) -> tuple[Segment, ...]:
    _refuse_multiplied(entries, "blocks")
    return tuple(_segment(entry, f"segment {index}") for index, entry in enumerate(entries))


def _segment(entry: object, where: str) -> Segment:
    if not isinstance(entry, dict):
        raise SnapshotError(f"{where} is not a dictionary")
    device = _integer(entry.get("device", 0), range(MAX_DEVICES), f"{where}: device")
    base = _integer(entry.get("address", 0), _ADDRESS_RANGE, f"{where}: address")
    total = _integer(entry.get("total_size"), range(MAX_SIZE_BYTES + 1), f"{where}: total_size")
    stream = _integer(entry.get("stream", 0), _ADDRESS_RANGE, f"{where}: stream")
    pool = _pool(entry.get("segment_pool_id", DEFAULT_POOL), f"{where}: segment_pool_id")
    active: list[Block] = []
    addresses: list[int] = []
    next_address = base
    for index, block in enumerate(_list(entry.get("blocks", []), f"{where}: blocks")):
        if not isinstance(block, dict):
            raise SnapshotError(f"{where}: block {index} is not a dictionary")
        size = _integer(block.get("size"), range(MAX_SIZE_BYTES + 1), f"{where}: block {index}: size")
        # Blocks have no address of their own before torch 2.1: they follow each other without a gap.
        address = _integer(block.get("address", next_address), _ADDRESS_RANGE, f"{where}: block {index}: address")
        addresses.append(address)
        # "active_allocated", and "active_pending_free" while another stream may still use it.
        if str(block.get("state", "")).startswith("active"):
            active.append(Block(address, _requested_size(block, size)))
        next_address = address + size
    return Segment(device, total, stream, pool, tuple(active), tuple(addresses))


def _requested_size(block: dict[str, object], size: int) -> int:
    """Return the bytes that the program asked for, when the block tells (torch 2.0 has it in the block's history)."""
    requested = block.get("requested_size")
    history = block.get("history")
    if requested is None and isinstance(history, list) and history and isinstance(history[0], dict):
        requested = history[0].get("real_size")
    return requested if type(requested) is int and 0 < requested <= size else size


def _traces(lists: Sequence[object]) -> dict[int, Trace]:
    if len(lists) > MAX_DEVICES:
        raise SnapshotError(f"device_traces has {len(lists)} devices")
    seen: set[int] = set()
    traces = {}
    for device, entries in enumerate(lists):
        events = _list(entries, f"device_traces[{device}]")
        if not events:
            continue
        if id(events) in seen:
            raise SnapshotError(f"device_traces[{device}] is the list of another device")
        seen.add(id(events))
        traces[device] = _trace(events, device)
    return traces


def _trace(entries: Sequence[object], device: int) -> Trace:
    trace = Trace()
    times_us: list[int] | None = trace.times_us
    size_range, time_range = range(MAX_SIZE_BYTES + 1), range(1 << 63)
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise SnapshotError(f"{_event(device, index)} is not a dictionary")
        action, size = entry.get("action"), entry.get("size", 0)
        address, stream = entry.get("addr", 0), entry.get("stream", 0)
        if type(action) is not str:
            raise SnapshotError(f"{_event(device, index)}: action is not text")
        # `type() is int` and not isinstance: True is no size. An oom event may have asked for any amount.
        if type(size) is not int or (size not in size_range and not (action == "oom" and size > 0)):
            _integer(size, size_range, f"{_event(device, index)}: size")
        if type(address) is not int or address not in _ADDRESS_RANGE:
            _integer(address, _ADDRESS_RANGE, f"{_event(device, index)}: addr")
        if type(stream) is not int or stream not in _ADDRESS_RANGE:
            _integer(stream, _ADDRESS_RANGE, f"{_event(device, index)}: stream")
        pool = entry.get("pool_id")
        trace.actions.append(action)
        trace.addresses.append(cast("int", address))
        trace.sizes.append(min(size, MAX_SIZE_BYTES))
        trace.streams.append(cast("int", stream))
        trace.pools.append(None if pool is None else _pool(pool, f"{_event(device, index)}: pool_id"))
        if times_us is not None:
            time_us = entry.get("time_us")
            if time_us is None:
                times_us = None
                continue
            if type(time_us) is not int or time_us not in time_range:
                _integer(time_us, time_range, f"{_event(device, index)}: time_us")
            times_us.append(time_us)
    return Trace(trace.actions, trace.addresses, trace.sizes, trace.streams, trace.pools, times_us)


def _event(device: int, index: int) -> str:
    return f"device_traces[{device}][{index}]"


def _list(value: object, where: str) -> Sequence[object]:
    if not isinstance(value, list | tuple):
        raise SnapshotError(f"{where} is not a list")
    return value


def _integer(value: object, allowed: range, where: str) -> int:
    if type(value) is not int:
        raise SnapshotError(f"{where} is not a whole number")
    if value not in allowed:
        raise SnapshotError(f"{where} is out of range: {value}")
    return value


def _pool(value: object, where: str) -> PoolPair:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise SnapshotError(f"{where} is not a pair of numbers")
    allowed = range(1 << 64)
    return _integer(value[0], allowed, where), _integer(value[1], allowed, where)


def _refuse_multiplied(entries: Sequence[object], key: str) -> None:
    """Refuse a list that many entries share: a small file would unfold into endless work."""
    seen: set[int] = set()
    for entry in entries:
        shared = entry.get(key) if isinstance(entry, dict) else None
        if not isinstance(shared, list | tuple) or not shared:
            continue
        if id(shared) in seen:
            raise SnapshotError(f"two segments share one list of {key}")
        seen.add(id(shared))
