"""Memory goes back to the driver when it is asked for, and the statistics say what is really in use."""

from __future__ import annotations

from typing import Any

import pytest

MIB = 1 << 20
GIB = 1 << 30

# The driver's own use moves by a little when modules are loaded.
DRIVER_SLACK = 64 * MIB


@pytest.mark.exclusive
def test_empty_cache_gives_memory_back_to_the_driver(torch: Any, allocator: Any) -> None:
    torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free_at_first, _ = torch.cuda.mem_get_info()
    tensors = [torch.zeros(GIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
    tensors.clear()
    torch.cuda.synchronize()
    free_while_cached, _ = torch.cuda.mem_get_info()
    assert free_while_cached <= free_at_first - 4 * GIB + DRIVER_SLACK
    torch.cuda.empty_cache()
    free_at_last, _ = torch.cuda.mem_get_info()
    assert free_at_last >= free_at_first - DRIVER_SLACK
    assert allocator.stats()["reserved_bytes.all.current"] == 0


@pytest.mark.exclusive
def test_reserved_bytes_are_what_the_device_lost(torch: Any, allocator: Any) -> None:
    torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free_before, _ = torch.cuda.mem_get_info()
    tensors = [torch.zeros(count * 37 * MIB + 1000, dtype=torch.uint8, device="cuda") for count in range(1, 20)]
    torch.cuda.synchronize()
    free_after, _ = torch.cuda.mem_get_info()
    reserved = allocator.stats()["reserved_bytes.all.current"]
    assert abs((free_before - free_after) - reserved) <= DRIVER_SLACK
    assert reserved >= sum(tensor.nbytes for tensor in tensors)


def test_statistics_add_up_to_the_tensors_alive(torch: Any, allocator: Any) -> None:
    sizes = [1, 511, 512, 513, 100_000, MIB, MIB + 1, 5 * MIB + 3, 10 * MIB, 64 * MIB + 7]
    tensors = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
    statistics = allocator.stats()
    rounded = sum(-(-size // 512) * 512 for size in sizes)
    assert statistics["allocation.all.current"] == len(sizes)
    assert statistics["requested_bytes.all.current"] == sum(sizes)
    assert rounded <= statistics["allocated_bytes.all.current"] <= statistics["active_bytes.all.current"]
    assert statistics["active_bytes.all.current"] <= statistics["reserved_bytes.all.current"]
    for family in ("allocated_bytes", "active_bytes", "reserved_bytes", "requested_bytes", "allocation"):
        total = statistics[f"{family}.all.current"]
        assert total == statistics[f"{family}.small_pool.current"] + statistics[f"{family}.large_pool.current"]
    del tensors[::2]
    statistics = allocator.stats()
    assert statistics["allocation.all.current"] == len(sizes) // 2
    assert statistics["allocation.all.allocated"] == len(sizes)
    assert statistics["requested_bytes.all.current"] == sum(sizes[1::2])
    assert statistics["requested_bytes.all.peak"] == sum(sizes)


def test_tensors_without_elements_take_no_memory(torch: Any, allocator: Any) -> None:
    torch.cuda.init()
    empty = [torch.empty(shape, device="cuda") for shape in ((0,), (0, 7), (3, 0))]
    assert [tensor.data_ptr() for tensor in empty] == [0, 0, 0]
    statistics = allocator.stats()
    assert statistics["allocation.all.allocated"] == 0
    assert statistics["reserved_bytes.all.peak"] == 0


def test_peaks_start_again_from_what_is_in_use(torch: Any, allocator: Any) -> None:
    kept = torch.empty(16 * MIB, dtype=torch.uint8, device="cuda")
    torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    assert allocator.stats()["requested_bytes.all.peak"] == 272 * MIB
    allocator.reset_peak_stats()
    assert allocator.stats()["requested_bytes.all.peak"] == kept.nbytes
