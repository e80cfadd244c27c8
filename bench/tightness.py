"""How tight the policies are on made-up programs, and on recordings if any are named: needs neither a GPU nor torch.

usage: python -m bench.tightness [--lag-ms MS] [RECORDING ...]

The programs are queues, blocks that live for random times, trainings on batches of every length, and a server: what the
recordings at hand lack. Each row says how far reserved lies above active, the driver time by the simulator's cost
model, and how many handles moved.
"""

from __future__ import annotations

import argparse
import pickle
import random
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import rallocator

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
POLICIES = ("expandable", "rallocator")

Size: TypeAlias = Callable[[random.Random], int]
Block: TypeAlias = tuple[int, int]
"""A block's address and size."""


class Program:
    """A program's history, as a snapshot of torch has it."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._blocks = 0

    def malloc(self, size: int) -> Block:
        """Allocate at an address of its own: the recording says when what lived, and not where."""
        self._blocks += 1
        block = self._blocks * KIB, size
        self._note("alloc", block)
        return block

    def free(self, block: Block) -> None:
        """Free a block."""
        self._note("free_requested", block)
        self._note("free_completed", block)

    def _note(self, action: str, block: Block) -> None:
        address, size = block
        time_us = len(self.events) * 50
        self.events.append({"action": action, "addr": address, "size": size, "stream": 0, "time_us": time_us})

    def write(self, path: Path) -> Path:
        """Write the snapshot."""
        path.write_bytes(pickle.dumps({"segments": [], "device_traces": [self.events]}))
        return path


def up_to(most: int) -> Size:
    """Return sizes of which each is as likely as the next."""
    return lambda chance: chance.randrange(1, most)


def of_every_order(least: int, most: int) -> Size:
    """Return sizes of which each order of magnitude is as likely as the next."""
    return lambda chance: int(least * (most / least) ** chance.random())


def queue(seed: int, blocks: int, live: int, size: Size) -> Program:
    """Return a program that frees blocks in the order in which they came."""
    program, chance = Program(), random.Random(seed)
    held: deque[Block] = deque()
    for _ in range(blocks):
        if len(held) == live:
            program.free(held.popleft())
        held.append(program.malloc(size(chance)))
    return program


def lifetimes(seed: int, blocks: int, held_bytes: int, size: Size) -> Program:
    """Return a program whose blocks live for random times, and that holds so many bytes."""
    program, chance = Program(), random.Random(seed)
    held: list[Block] = []
    total = 0
    for _ in range(blocks):
        wanted = size(chance)
        while held and total + wanted > held_bytes:
            victim = chance.randrange(len(held))
            held[victim], held[-1] = held[-1], held[victim]
            total -= held[-1][1]
            program.free(held.pop())
        held.append(program.malloc(wanted))
        total += wanted
    return program


def training(seed: int, steps: int, layers: int, hidden: int) -> Program:
    """Return a training on batches of every length."""
    program, chance = Program(), random.Random(seed)
    weights = [hidden * hidden * 2 * chance.choice((1, 1, 3, 4)) for _ in range(layers)]
    for size in weights:
        program.malloc(size)
        program.malloc(size * 2)
    for _ in range(steps):
        length = chance.randrange(128, 2048)
        activations: list[Block] = []
        for _ in range(layers):
            activations += [program.malloc(length * hidden * factor) for factor in (2, 2, 8)]
            program.free(program.malloc(length * length * 8))
        gradients: list[Block] = []
        for size in reversed(weights):
            scratch = [program.malloc(length * hidden * factor) for factor in (8, 2)]
            gradients.append(program.malloc(size))
            for block in [activations.pop() for _ in range(3)] + scratch:
                program.free(block)
        for block in gradients:
            program.free(block)
    return program


def serving(seed: int, steps: int, held_bytes: int) -> Program:
    """Return a server whose requests come and go, each with a cache that is copied to a larger one in every step."""
    program, chance = Program(), random.Random(seed)
    caches: list[list[Block]] = []
    for _ in range(steps):
        if not caches or chance.random() < 0.05:
            caches.append([program.malloc(chance.randrange(MIB // 8, 8 * MIB)) for _ in range(8)])
        grown = chance.choice(caches)
        larger = [program.malloc(size + chance.randrange(1, 8) * 64 * KIB) for _, size in grown]
        for block in grown:
            program.free(block)
        grown[:] = larger
        while sum(size for cache in caches for _, size in cache) > held_bytes:
            for block in caches.pop(chance.randrange(len(caches))):
                program.free(block)
    return program


def programs() -> Iterator[tuple[str, Program]]:
    """Yield the programs with their names."""
    for number in (1, 2, 3):
        yield f"queue of 400, {number}", queue(number, 30_000, 400, up_to(32 * MIB))
    yield "queue of 100", queue(9, 30_000, 100, up_to(32 * MIB))
    yield "queue of 1,000", queue(9, 60_000, 1_000, up_to(32 * MIB))
    yield "lifetimes, 1 GiB", lifetimes(6, 10_000, 1 * GIB, up_to(8 * MIB))
    yield "lifetimes, 2 GiB", lifetimes(5, 10_000, 2 * GIB, up_to(64 * MIB))
    yield "lifetimes, 24 GiB", lifetimes(4, 15_000, 24 * GIB, of_every_order(KIB, 512 * MIB))
    yield "training", training(8, 30, 12, 4096)
    yield "small training", training(9, 40, 8, 1024)
    yield "serving", serving(10, 1_500, 8 * GIB)


def main() -> None:
    """Print one row for each program or recording and policy."""
    parser = argparse.ArgumentParser(prog="bench.tightness", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--lag-ms", type=float, default=0.0, help="how long work takes to end after it was queued")
    parser.add_argument("recordings", type=Path, nargs="*", help="snapshots to replay in place of the programs")
    arguments = parser.parse_args()
    print(f"{'program':24}{'policy':12}{'active':>10}{'above':>9}{'driver':>10}{'moved':>9}")
    with tempfile.TemporaryDirectory() as folder:
        made_up = ((name, program.write(Path(folder) / "program.pickle")) for name, program in programs())
        named = [(path.name.split(".")[0], path) for path in arguments.recordings]
        for name, path in named or made_up:
            for row in rallocator.replay(path, POLICIES, lag_ms=arguments.lag_ms).rows:
                active, reserved = row.peak_active or 0, row.peak_reserved or 0
                above = f"{100 * (reserved / active - 1):.2f} %" if active else "-"
                driver, moved = f"{(row.driver_time_us or 0) / 1000:.0f} ms", row.handles_moved or 0
                print(f"{name:24}{row.policy:12}{active / MIB:>6.0f} MiB{above:>9}{driver:>10}{moved:>9,}")


if __name__ == "__main__":
    main()
