"""A buffer that a side stream still reads: safe to free with record_stream, and only with it."""

from __future__ import annotations

from typing import Any

import pytest

# 16 Mi integers: one block of 64 MiB, far from the small pool and from any other block in these programs.
COUNT = 16 << 20

# About a third of a second on an H200 (1.98 GHz): long against a few launches, short against the test's limit.
SLEEP_CYCLES = 600_000_000


def read_late_on_side_stream(torch: Any, allocator: Any, cycles: int, record: bool) -> tuple[bool, bool]:
    """Free a buffer whose side-stream read is still queued, and allocate and overwrite as much on the main stream.

    Returns whether the new buffer lies where the old one lay, and whether the read saw the old content.
    """
    torch.cuda.synchronize()
    allocator.empty_cache()  # So that the freed block is the only one that fits.
    side = torch.cuda.Stream()
    target = torch.zeros(COUNT, dtype=torch.int32, device="cuda")
    source = torch.ones(COUNT, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(cycles)
        target.copy_(source)
        if record:
            source.record_stream(side)
    address = source.data_ptr()
    del source
    overwriting = torch.full((COUNT,), 7, dtype=torch.int32, device="cuda")
    reused = overwriting.data_ptr() == address
    torch.cuda.synchronize()
    return reused, bool((target == 1).all())


@pytest.fixture
def late_read(torch: Any, allocator: Any) -> Any:
    """Return the program above, after one short round that loads every kernel it uses."""

    def run(record: bool) -> tuple[bool, bool]:
        read_late_on_side_stream(torch, allocator, cycles=1000, record=True)
        return read_late_on_side_stream(torch, allocator, SLEEP_CYCLES, record)

    return run


def test_side_stream_read_is_corrupted_without_record_stream(late_read: Any) -> None:
    reused, intact = late_read(record=False)
    assert reused, "the freed block was not handed out again, so this test shows nothing"
    assert not intact


def test_side_stream_read_is_intact_with_record_stream(late_read: Any) -> None:
    reused, intact = late_read(record=True)
    assert not reused
    assert intact


def test_recorded_block_is_reused_once_its_reader_has_finished(torch: Any, allocator: Any) -> None:
    side = torch.cuda.Stream()
    source = torch.ones(COUNT, dtype=torch.int32, device="cuda")
    address = source.data_ptr()
    source.record_stream(side)
    del source
    torch.cuda.synchronize()
    again = torch.ones(COUNT, dtype=torch.int32, device="cuda")
    assert again.data_ptr() == address
    del again
    allocator.empty_cache()
    assert allocator.stats()["reserved_bytes.all.current"] == 0
