"""Recordings of made-up programs, by the allocator itself over the simulated GPU: what it reserved is known exactly."""

from __future__ import annotations

import random
from typing import Any

from rallocator.testing import SimulatedGpu

KIB, MIB = 1 << 10, 1 << 20

Snapshot = dict[str, Any]


def recorded(seed: int, policy: str, *, empties: int = 0, steps: int = 600, streams: int = 1) -> Snapshot:
    """The snapshot of a made-up program under a policy of torch.

    It works in phases, each with sizes of its own, and frees in random order; of what it holds most goes at the end of
    a phase, as a training step's activations do.

    Arguments:
        seed: which program.
        policy: "native" or "expandable".
        empties: how many times it empties its cache, at any time.
        steps: allocations.
        streams: as many are used, one for each phase.
    """
    chance = random.Random(seed)
    gpu = SimulatedGpu(capacity="64GiB", config=f"policy:{policy},history_limit:1000000")
    held: list[int] = []
    emptied = set(chance.sample(range(steps), empties))
    sizes: list[int] = []
    stream = 0
    for step in range(steps):
        if step % 100 == 0:
            sizes = [_size(chance) for _ in range(12)]
            stream = chance.randrange(streams)
            for address in chance.sample(held, len(held) * 3 // 4):
                held.remove(address)
                gpu.free(address)
        if step in emptied:
            gpu.empty_cache()
        held.append(gpu.malloc(chance.choice(sizes), stream=stream))
        while held and chance.random() < 0.45:
            gpu.free(held.pop(chance.randrange(len(held))))
        gpu.advance(50)
    snapshot: Snapshot = gpu.snapshot()
    gpu.check()
    return snapshot


def _size(chance: random.Random) -> int:
    kind = chance.random()
    if kind < 0.3:
        return chance.randrange(1, 1 * MIB)
    if kind < 0.6:
        return chance.randrange(1 * MIB, 10 * MIB)
    return chance.randrange(10 * MIB, 200 * MIB)


def told_peak(snapshot: Snapshot, begin: int) -> int:
    """The most bytes reserved from an event on that a recording without events of segments can tell of.

    Of a segment that was there at that event and gone in the end, only what held blocks in between is told of: for all
    that the rest shows, it need not have been there.
    """
    (trace, *_) = snapshot["device_traces"]
    there = {one["address"]: one["total_size"] for one in snapshot["segments"]}
    for entry in reversed(trace[begin:]):
        if entry["action"] == "segment_alloc":
            there.pop(entry["addr"])
        elif entry["action"] == "segment_free":
            there[entry["addr"]] = entry["size"]
    untold = _untold(trace[begin:], there)
    reserved: int = sum(there.values()) - sum(untold.values())
    peak = reserved
    for entry in trace[begin:]:
        if entry["action"] == "segment_alloc":
            reserved += entry["size"]
        elif entry["action"] == "segment_free":
            reserved -= entry["size"] - untold.pop(entry["addr"], 0)
        peak = max(peak, reserved)
    return peak


def _untold(trace: list[dict[str, Any]], there: dict[int, int]) -> dict[int, int]:
    """The bytes of each segment that was there and went in which no block tells of it."""
    untold: dict[int, int] = {}
    held = dict.fromkeys(there, 0)
    for entry in trace:
        if entry["action"] == "segment_free" and entry["addr"] in held:
            untold[entry["addr"]] = entry["size"] - min(
                entry["size"], -(-held.pop(entry["addr"]) // (2 * MIB)) * 2 * MIB
            )
        elif entry["action"] in ("alloc", "free_requested"):
            base = max((base for base in held if base <= entry["addr"] < base + there[base]), default=None)
            if base is not None:
                held[base] = max(held[base], entry["addr"] + entry["size"] - base)
    return untold
