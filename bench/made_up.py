"""Programs that allocate as real ones do, made up from a seed: their histories, as a snapshot of torch has them.

What the recordings at hand lack: queues, blocks that live for random times, servers, trainings on batches of every
size, and programs that go through phases. Each block has an address of its own: a history says when what lived, and
not where.
"""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

Size: TypeAlias = Callable[[random.Random], int]
Block: TypeAlias = tuple[int, int, int]
"""A block's address, size and stream."""


class Program:
    """A program's history."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._blocks = 0
        self._time_us = 0

    def malloc(self, size: int, stream: int = 0) -> Block:
        """Allocate."""
        self._blocks += 1
        block = self._blocks * KIB, size, stream
        self._note("alloc", block)
        return block

    def free(self, *blocks: Block) -> None:
        """Free blocks, one after the other."""
        for block in blocks:
            self._note("free_requested", block)
            self._note("free_completed", block)

    def use(self, size: int) -> None:
        """Allocate, and free at once."""
        self.free(self.malloc(size))

    def work(self, time_us: int) -> None:
        """Do something else for a while."""
        self._time_us += time_us

    def _note(self, action: str, block: Block) -> None:
        address, size, stream = block
        event = {"action": action, "addr": address, "size": size, "stream": stream, "time_us": self._time_us}
        self.events.append(event)
        self._time_us += 50

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
            program.use(length * length * 8)
        gradients: list[Block] = []
        for size in reversed(weights):
            scratch = [program.malloc(length * hidden * factor) for factor in (8, 2)]
            gradients.append(program.malloc(size))
            program.free(*[activations.pop() for _ in range(3)], *scratch)
        program.free(*gradients)
    return program


def serving(seed: int, steps: int, held_bytes: int) -> Program:
    """Return a server whose requests come and go, each with a cache that is copied to a larger one in every step."""
    program, chance = Program(), random.Random(seed)
    caches: list[list[Block]] = []
    for _ in range(steps):
        if not caches or chance.random() < 0.05:
            caches.append([program.malloc(chance.randrange(MIB // 8, 8 * MIB)) for _ in range(8)])
        grown = chance.choice(caches)
        larger = [program.malloc(size + chance.randrange(1, 8) * 64 * KIB) for _, size, _ in grown]
        program.free(*grown)
        grown[:] = larger
        while sum(size for cache in caches for _, size, _ in cache) > held_bytes:
            program.free(*caches.pop(chance.randrange(len(caches))))
    return program


def detection(seed: int, steps: int) -> Program:
    """Return the training of a detector on images of every size, with workspaces between activations."""
    program, chance = Program(), random.Random(seed)
    kinds = [64 * 64 * 36, 256 * 64 * 4, 512 * 512 * 36, 2048 * 512 * 4, 256 * 256 * 36, 1024 * 12544 * 4]
    weights = [chance.choice(kinds) for _ in range(90)]
    for size in weights:
        program.malloc(size)
    for step in range(steps):
        short = [chance.randrange(480, 801, 32) for _ in range(4)]
        long = [min(1333, int(side / chance.uniform(0.5, 1.0))) for side in short]
        pixels = 4 * (max(short) + 31 & ~31) * (max(long) + 31 & ~31)
        held = [program.malloc(pixels * 12)]
        for stage, (blocks, channels) in enumerate(((3, 256), (4, 512), (6, 1024), (3, 2048))):
            place = pixels // (16 * 4**stage) * channels
            for factor in (4, 4, 1) * blocks:
                held.append(program.malloc(place * 4 // factor))
                program.use(chance.choice((0, 0, 4, 18, 64)) * MIB + 512)
                if factor == 4:
                    held.append(program.malloc(place))
        held += [program.malloc(pixels // (16 * 4**level) * KIB + 512) for level in range(5)]
        proposals = [program.malloc(chance.randrange(1, 9000) * 16) for _ in range(84)]
        program.use(chance.randrange(200, 1100) ** 2 // 2)
        found = chance.randrange(600, 2049)
        held += [program.malloc(found * size) for size in (50_176, 4096, 4096, 1820)]
        flowing = program.malloc(found * 50_176)
        chance.shuffle(proposals)
        program.free(*proposals)
        gradients: list[Block] = []
        for number in range(len(held)):
            block = held.pop()
            flowing, done = program.malloc(block[1]), flowing
            program.free(done, block)
            if number % 2 == 0 and len(gradients) < len(weights):
                gradients.append(program.malloc(weights[-1 - len(gradients)]))
        program.free(flowing)
        if step == 0:
            for size in weights:
                program.malloc(size)
        program.free(*gradients)
        program.work(60_000)
    return program


def second_order(seed: int, steps: int) -> Program:
    """Return a training with matrices for its gradients, which come in the first step and are renewed at times."""
    program, chance = Program(), random.Random(seed)
    sides = [(chance.choice((512, 1024, 2048, 4096)), chance.choice((512, 1024, 2048, 4096))) for _ in range(110)]
    for rows, columns in sides:
        program.malloc(rows * columns * 4)
    matrices: list[Block] = []
    for step in range(steps):
        batch = chance.randrange(500, 6000)
        activations = []
        for rows, columns in sides:
            activations.append(program.malloc(batch * columns * 2))
            program.use(batch * rows * 2)
        gradients = []
        for rows, columns in reversed(sides):
            flowing = program.malloc(batch * rows * 2)
            gradients.append(program.malloc(rows * columns * 4))
            program.free(activations.pop(), flowing)
        if step == 0:
            for rows, columns in sides:
                program.malloc(rows * columns * 4)
                matrices += [program.malloc(side * side * 4) for side in (rows, columns)]
        if step % 10 == 0:
            for number, side in enumerate(side for pair in sides for side in pair):
                product, scratch = program.malloc(side * side * 4), program.malloc(side * side * 12 + 1000)
                program.free(scratch, product)
                renewed = program.malloc(side * side * 4)
                program.free(matrices[number])
                matrices[number] = renewed
        for rows, columns in sides:
            program.free(*[program.malloc(rows * columns * 4) for _ in range(2)])
        program.free(*gradients)
        program.work(30_000)
    return program


def cameras(seed: int, frames: int) -> Program:
    """Return an analysis of videos: frames and features of the last while, of resolutions that change."""
    program, chance = Program(), random.Random(seed)
    heights = (480, 720, 1080, 1440, 2160)
    for _ in range(80):
        program.malloc(chance.randrange(1, 40) * MIB)
    kept: list[deque[list[Block]]] = [deque() for _ in range(10)]
    settings = [(chance.choice(heights), chance.randrange(20, 90)) for _ in kept]
    for number in range(1, frames + 1):
        camera = chance.randrange(len(kept))
        height, most = settings[camera]
        frame, scaled = (
            program.malloc(height * (height * 16 // 9) * chance.choice((3, 3, 6))),
            program.malloc(4_915_200),
        )
        features = program.malloc(chance.randrange(50, 900) * 4096)
        program.use(chance.randrange(1, 60) * MIB)
        program.free(scaled)
        kept[camera].append([frame, features])
        while len(kept[camera]) > most:
            program.free(*kept[camera].popleft())
        if number % 700 == 0:
            settings[chance.randrange(len(kept))] = chance.choice(heights), chance.randrange(20, 90)
        program.work(4000)
    return program


def beams(seed: int, sentences: int) -> Program:
    """Return a translation: in every step all caches grow, and are copied in the beams' new order."""
    program, chance = Program(), random.Random(seed)
    for size in (1 * GIB, *[16 * MIB, 16 * MIB, 48 * MIB] * 24):
        program.malloc(size)
    for _ in range(sentences):
        rows, source = 5 * chance.randrange(8, 96), chance.randrange(10, 400)
        held = [program.malloc(rows * source * 2048) for _ in range(25)]
        caches: list[Block] = []
        for length in range(1, chance.randrange(15, 60)):
            for _ in range(2):
                grown = [program.malloc(rows * length * 4096) for _ in range(24)] if not caches else []
                for number, cache in enumerate(caches):
                    caches[number] = program.malloc(rows * length * 4096)
                    program.free(cache)
                caches += grown
                logits = program.malloc(rows * 1_000_000)
                program.free(logits)
            program.work(10_000)
        program.free(*caches, *held)
    return program


def quantising(seed: int, layers: int) -> Program:
    """Return the quantisation of a model, layer by layer: what it makes stays, in small pieces among temporaries."""
    program, chance = Program(), random.Random(seed)
    wide, narrow = 11_008, 4096
    states = [program.malloc(chance.randrange(512, 2049) * narrow * 2) for _ in range(96)]
    for _ in range(layers):
        shapes = [(narrow, narrow)] * 4 + [(wide, narrow)] * 2 + [(narrow, wide)]
        held = [(program.malloc(rows * columns * 2), program.malloc(columns * columns * 4)) for rows, columns in shapes]
        for state in states:
            inner = program.malloc(state[1] * wide // narrow)
            program.use(state[1] * 2)
            program.free(inner)
        for (rows, columns), blocks in zip(shapes, held, strict=True):
            scratch = [program.malloc(size * 4) for size in (rows * columns, columns * columns, rows * columns)]
            for _ in range(0, columns, 512):
                program.free(*[program.malloc(rows * 2048) for _ in range(2)])
            for size in (rows * columns // 2, rows * columns // 64, rows * columns // 256):
                program.malloc(size)
            program.free(*scratch, *blocks)
        for number, state in enumerate(states):
            states[number] = program.malloc(state[1])
            program.free(state)
        program.work(100_000)
    return program


def sharded(seed: int, steps: int) -> Program:
    """Return a training of sharded layers, each gathered on a stream of its own before it is used, as FSDP2 does."""
    program, chance = Program(), random.Random(seed)
    gathering, reducing, layers, hidden = 0x1001, 0x1002, 24, 4096
    layer = 12 * hidden * hidden * 2
    for _ in range(layers):
        program.malloc(layer // 4)
    gathered: deque[list[Block]] = deque()

    def gather() -> None:
        whole = [program.malloc(layer // 8, gathering), program.malloc(layer, gathering)]
        gathered.append([program.malloc(layer * part // 12) for part in (3, 1, 4, 4)])
        program.free(*whole)

    for _ in range(steps):
        state = chance.randrange(1024, 4224, 128) * hidden * 2
        saved = []
        for _ in range(layers):
            gather()
            inner = [program.malloc(state * factor) for factor in (1, 3, 1, 1, 1, 4, 4)]
            saved.append(program.malloc(state))
            program.free(*inner, *(gathered.popleft() if len(gathered) > 1 else ()))
            program.work(3000)
        for _ in range(layers):
            gather()
            inner = [program.malloc(state * factor) for factor in (1, 3, 1, 1, 1, 4, 4, 4, 3)]
            gradients = [program.malloc(layer * part // 12) for part in (3, 1, 4, 4)]
            program.free(*inner, saved.pop(), *gathered.popleft())
            reduced = program.malloc(layer * 2, reducing)
            program.free(*gradients, reduced)
            program.work(6000)
        while gathered:
            program.free(*gathered.popleft())
        program.work(30_000)
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
    yield "detection", detection(21, 70)
    yield "detection, longer", detection(21, 280)
    yield "second order", second_order(2, 45)
    yield "cameras", cameras(4, 5_000)
    yield "beams", beams(1, 10)
    yield "quantising", quantising(6, 32)
    yield "sharded", sharded(1, 12)
