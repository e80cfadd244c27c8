"""Random programs over several streams and threads, with every byte checked."""

from __future__ import annotations

import queue
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("allocator")

STREAMS = 4
OPERATIONS = 6000
MOST_ALIVE = 96
MOST_BYTES = 64 << 20


def random_size(choices: random.Random) -> int:
    """Bytes, with a uniform logarithm, so that the small and the large pool both see many requests."""
    return max(1, int(MOST_BYTES ** choices.random()))


def test_no_byte_is_wrong_in_a_random_program_over_four_streams(torch: Any) -> None:
    choices = random.Random(20)
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in streams]
    torch.cuda.synchronize()
    alive: list[tuple[Any, int, int]] = []  # Tensor, the value in its every byte, the index of its stream.
    checks = 0
    for operation in range(OPERATIONS):
        index = choices.randrange(STREAMS)
        stream = streams[index]
        action = choices.random()
        if action < 0.45 and len(alive) < MOST_ALIVE:
            with torch.cuda.stream(stream):
                value = operation % 251
                alive.append(
                    (torch.full((random_size(choices),), value, dtype=torch.uint8, device="cuda"), value, index)
                )
        elif action < 0.75 and alive:
            # Read on any stream, ordered after the write, and recorded, since the tensor may be freed before the read.
            tensor, value, owner = choices.choice(alive)
            stream.wait_stream(streams[owner])
            with torch.cuda.stream(stream):
                wrong[index] += (tensor != value).sum()
            tensor.record_stream(stream)
            checks += 1
        elif action < 0.94 and alive:
            alive.pop(choices.randrange(len(alive)))
        elif action < 0.995:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(choices.randrange(2_000_000))  # Up to a millisecond, so that frees stay pending.
        else:
            torch.cuda.empty_cache()
    torch.cuda.synchronize()
    assert checks > OPERATIONS // 10
    assert sum(int(count.item()) for count in wrong) == 0


def test_tensors_made_in_some_threads_and_freed_in_others_keep_their_bytes(torch: Any) -> None:
    pairs, tensors_each = 4, 400
    handed_over: queue.Queue[tuple[Any, int, Any] | None] = queue.Queue(maxsize=64)

    def make(seed: int) -> None:
        choices = random.Random(seed)
        stream = torch.cuda.Stream()
        try:
            with torch.cuda.stream(stream):
                for _ in range(tensors_each):
                    value = choices.randrange(256)
                    tensor = torch.full((random_size(choices),), value, dtype=torch.uint8, device="cuda")
                    handed_over.put((tensor, value, stream.record_event()))
        finally:
            handed_over.put(None)  # One for each checker, so that none waits for a maker that failed.

    def check_and_free() -> int:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            wrong = torch.zeros((), dtype=torch.int64, device="cuda")
            while (item := handed_over.get()) is not None:
                tensor, value, written = item
                stream.wait_event(written)
                wrong += (tensor != value).sum()
                tensor.record_stream(stream)
            return int(wrong.item())

    with ThreadPoolExecutor(2 * pairs) as threads:
        makers = [threads.submit(make, seed) for seed in range(pairs)]
        checkers = [threads.submit(check_and_free) for _ in range(pairs)]
        for maker in makers:
            maker.result(timeout=100)
        assert [checker.result(timeout=100) for checker in checkers] == [0] * pairs


def test_raw_blocks_pass_between_threads_without_loss(torch: Any, allocator: Any) -> None:
    threads_count, operations = 8, 3000
    torch.cuda.init()
    blocks: list[int] = []
    lock = threading.Lock()

    def exchange(seed: int) -> int:
        choices = random.Random(seed)
        made = 0
        for _ in range(operations):
            if choices.random() < 0.5:
                block = torch.cuda.caching_allocator_alloc(random_size(choices) >> 4 or 1)
                made += 1
                with lock:
                    blocks.append(block)
            else:
                with lock:
                    block = blocks.pop(choices.randrange(len(blocks))) if blocks else 0
                if block:
                    torch.cuda.caching_allocator_delete(block)
        return made

    with ThreadPoolExecutor(threads_count) as threads:
        made = sum(threads.map(exchange, range(threads_count)))
    assert len(set(blocks)) == len(blocks), "one block is out twice"
    statistics = allocator.stats()
    assert statistics["allocation.all.allocated"] == made
    assert statistics["allocation.all.current"] == len(blocks)
    for block in blocks:
        torch.cuda.caching_allocator_delete(block)
