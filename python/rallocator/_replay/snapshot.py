"""Reads torch's memory snapshots, checked.

Every layout since torch 2.0 is read by the presence of its keys, never by a version number. Keys that a replay does not
need are not looked at, so that a damaged stack frame is no reason to refuse a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import cast

from rallocator._replay.recording import DEFAULT_POOL, Block, PoolPair, Recording, Segment, Trace
from rallocator._replay.unpickle import load
from rallocator._sizes import MAX_SIZE_BYTES
from rallocator.errors import SnapshotError

MAX_DEVICES = 1024
"""Devices of one file; no machine has as many."""

_POLICY = re.compile(r"(?:^|,)policy:(native|expandable|rallocator)(?:,|$)")

_ADDRESS_RANGE = range(-(1 << 63), 1 << 64)
"""Addresses and streams are 64-bit numbers; some writers give them a sign."""

_ADDRESSES = 1 << 64
"""How many addresses there are: what has a sign is read as what it was without."""


def read_snapshot(chunks: Iterable[bytes], *, keep_frames: bool = False) -> Recording:
    """Read a memory snapshot of torch.

    Arguments:
        chunks: the content of a pickle as `torch.cuda.memory._dump_snapshot` writes it, or of the list that
            `torch.cuda.memory_snapshot` returns.
        keep_frames: whether to keep the stacks of events and blocks, unchecked.

    Raises:
        SnapshotError: the content is damaged, or no snapshot; one line that says what is wrong with it.
    """
    top = load(chunks)
    if isinstance(top, list):
        return Recording(_segments(_entries(top, "segments"), keep_frames=keep_frames), {})
    if not isinstance(top, dict) or not ("segments" in top or "device_traces" in top):
        raise SnapshotError("not a memory snapshot: neither segments nor device_traces in it")
    segments = _segments(_entries(top.get("segments", []), "segments"), keep_frames=keep_frames)
    traces = _traces(_list(top.get("device_traces", []), "device_traces"), keep_frames=keep_frames)
    return Recording(segments, traces, _policy(top.get("allocator_settings")), tells_places=True)


def _policy(settings: object) -> str | None:
    """Return the recorded allocator's policy. Torch's settings tell of expandable segments, and ours name it.

    A snapshot that torch wrote through the bridge has our settings as text only, among torch's own.
    """
    if not isinstance(settings, dict):
        return None
    text = settings.get("PYTORCH_CUDA_ALLOC_CONF")
    named = _POLICY.search(text) if isinstance(text, str) else None
    if named:
        return named[1]
    return "expandable" if settings.get("expandable_segments") is True else None


def _segments(entries: Sequence[object], *, keep_frames: bool) -> tuple[Segment, ...]:
    _refuse_multiplied(entries, "blocks")
    return tuple(_segment(entry, f"segment {index}", keep_frames) for index, entry in enumerate(entries))


def _segment(entry: object, where: str, keep_frames: bool) -> Segment:
    if not isinstance(entry, dict):
        raise SnapshotError(f"{where} is not a dictionary")
    device = _integer(entry.get("device", 0), range(MAX_DEVICES), f"{where}: device")
    base = _integer(entry.get("address", 0), _ADDRESS_RANGE, f"{where}: address") % _ADDRESSES
    total = _integer(entry.get("total_size"), range(MAX_SIZE_BYTES + 1), f"{where}: total_size")
    stream = _integer(entry.get("stream", 0), _ADDRESS_RANGE, f"{where}: stream")
    pool = _pool(entry.get("segment_pool_id", DEFAULT_POOL), f"{where}: segment_pool_id")
    blocks: list[Block] = []
    next_address = base
    for index, block in enumerate(_entries(entry.get("blocks", []), f"{where}: blocks")):
        if not isinstance(block, dict):
            raise SnapshotError(f"{where}: block {index} is not a dictionary")
        size = _integer(block.get("size"), range(MAX_SIZE_BYTES + 1), f"{where}: block {index}: size")
        # Blocks have no address of their own before torch 2.1: they follow each other without a gap.
        named = block.get("address", next_address)
        address = _integer(named, _ADDRESS_RANGE, f"{where}: block {index}: address") % _ADDRESSES
        # "active_allocated", and "active_pending_free" while another stream may still use it.
        state = block.get("state", "")
        if not isinstance(state, str):
            raise SnapshotError(f"{where}: block {index}: state is not text")
        is_active, is_pending = state.startswith("active"), state.startswith("active") and state != "active_allocated"
        requested = _requested_size(block, size) if is_active else size
        frames = _block_frames(block) if keep_frames and is_active else None
        blocks.append(Block(address, size, requested, is_active, is_pending, frames))
        next_address = address + size
    is_expandable, is_small = entry.get("is_expandable") is True, entry.get("segment_type") == "small"
    return Segment(device, base, total, stream, pool, is_expandable, tuple(blocks), is_small)


def _block_frames(block: dict[str, object]) -> object:
    """Return a block's stack; torch 2.0 has it in the block's history."""
    history = block.get("history")
    if "frames" not in block and isinstance(history, list) and history and isinstance(history[0], dict):
        return history[0].get("frames")
    return block.get("frames")


def _requested_size(block: dict[str, object], size: int) -> int:
    """Return the bytes that the program asked for, when the block tells (torch 2.0 has it in the block's history)."""
    requested = block.get("requested_size")
    history = block.get("history")
    if requested is None and isinstance(history, list) and history and isinstance(history[0], dict):
        requested = history[0].get("real_size")
    return requested if type(requested) is int and 0 < requested <= size else size


def _traces(lists: Sequence[object], *, keep_frames: bool) -> dict[int, Trace]:
    if len(lists) > MAX_DEVICES:
        raise SnapshotError(f"device_traces has {len(lists)} devices")
    seen: set[int] = set()
    traces = {}
    for device, entries in enumerate(lists):
        events = _entries(entries, f"device_traces[{device}]")
        if not events:
            continue
        if id(events) in seen:
            raise SnapshotError(f"device_traces[{device}] is the list of another device")
        seen.add(id(events))
        traces[device] = _trace(events, device)
        traces[device].times_us = _times_us(events, device)
        traces[device].device_free = [_device_free(entry) for entry in events]
        if keep_frames:
            traces[device].frames = _frames(events)
    return traces


def _trace(entries: Sequence[object], device: int) -> Trace:
    trace = Trace()
    size_range = range(MAX_SIZE_BYTES + 1)
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
        trace.addresses.append(cast("int", address) % _ADDRESSES)
        trace.sizes.append(min(size, MAX_SIZE_BYTES))
        trace.streams.append(cast("int", stream))
        trace.pools.append(None if pool is None else _pool(pool, f"{_event(device, index)}: pool_id"))
    return trace


def _times_us(entries: Sequence[object], device: int) -> list[int] | None:
    """Return the time of each event; None if one has none, as before torch 2.2."""
    times = [entry.get("time_us") if isinstance(entry, dict) else None for entry in entries]
    time_range = range(1 << 63)
    for index, time_us in enumerate(times):
        if time_us is None:
            return None
        if type(time_us) is not int or time_us not in time_range:
            _integer(time_us, time_range, f"{_event(device, index)}: time_us")
    return cast("list[int]", times)


def _frames(entries: Sequence[object]) -> list[object]:
    return [entry.get("frames") if isinstance(entry, dict) else None for entry in entries]


def _device_free(entry: object) -> int | None:
    """Return the bytes that the driver had free when memory ran out, if the event is one of that and tells."""
    free = entry.get("device_free") if isinstance(entry, dict) else None
    return free if type(free) is int and 0 <= free <= MAX_SIZE_BYTES else None


def _event(device: int, index: int) -> str:
    return f"device_traces[{device}][{index}]"


def _list(value: object, where: str) -> Sequence[object]:
    if not isinstance(value, list | tuple):
        raise SnapshotError(f"{where} is not a list")
    return value


def _entries(value: object, where: str) -> Sequence[object]:
    """Return a list whose entries are each listed once.

    A pickle names an object again in two bytes, so that a small file would unfold into a list that fills the memory.
    """
    entries = _list(value, where)
    if len(set(map(id, entries))) < len(entries):
        raise SnapshotError(f"{where} lists an entry twice")
    return entries


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
