"""A full device is an ordinary torch.OutOfMemoryError, after which work goes on."""

from __future__ import annotations

from typing import Any

import pytest

GIB = 1 << 30


def limit_memory(torch: Any, limit_bytes: int) -> None:
    """Let this process hold no more than so many bytes of the first GPU."""
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(limit_bytes / total_bytes, 0)


def test_one_tebibyte_raises_torchs_error_and_the_next_allocation_works(torch: Any, allocator: Any) -> None:
    kept = torch.full((1 << 20,), 3, dtype=torch.int32, device="cuda")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
    message = str(caught.value)
    assert message.startswith("CUDA out of memory. Tried to allocate 1024.00 GiB."), message
    assert len(message.splitlines()) <= 9, message
    assert torch.ones(1 << 20, device="cuda").sum().item() == 1 << 20
    assert bool((kept == 3).all())
    assert allocator.stats()["num_ooms"] == 1


def test_many_failed_requests_cost_no_device_memory(torch: Any, allocator: Any) -> None:
    def fail() -> None:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 40, dtype=torch.uint8, device="cuda")

    torch.ones(8, device="cuda")
    fail()
    reserved = allocator.stats()["reserved_bytes.all.current"]
    for _ in range(50):
        fail()
    statistics = allocator.stats()
    assert statistics["num_ooms"] == 51
    assert statistics["reserved_bytes.all.current"] <= reserved


def test_memory_fraction_is_honoured_and_a_freed_block_fits_again(torch: Any, allocator: Any) -> None:
    limit_memory(torch, 8 * GIB + GIB // 2)
    held = [torch.empty(GIB, dtype=torch.uint8, device="cuda") for _ in range(8)]
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(GIB, dtype=torch.uint8, device="cuda")
    assert allocator.stats()["reserved_bytes.all.peak"] <= 8 * GIB + GIB // 2
    held.pop()
    held.append(torch.empty(GIB, dtype=torch.uint8, device="cuda"))


def test_cached_memory_gives_way_before_an_error(torch: Any, allocator: Any) -> None:
    limit_memory(torch, 4 * GIB)
    small = [torch.empty(GIB // 2, dtype=torch.uint8, device="cuda") for _ in range(7)]
    small.clear()
    large = torch.empty(3 * GIB, dtype=torch.uint8, device="cuda")
    assert large.numel() == 3 * GIB
    assert allocator.stats()["num_ooms"] == 0


def test_accelerate_halves_the_batch_until_it_fits(torch: Any, allocator: Any) -> None:
    utils = pytest.importorskip("accelerate.utils", reason="accelerate is not installed")
    limit_memory(torch, 10 * GIB)
    tried: list[int] = []

    @utils.find_executable_batch_size(  # type: ignore[untyped-decorator]
        starting_batch_size=32, reduce_batch_size_fn=lambda: tried[-1] // 2
    )
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        batch = torch.ones((batch_size, GIB), dtype=torch.uint8, device="cuda")
        return int(batch[:, 0].sum().item())

    assert train() == 8
    assert tried == [32, 16, 8]
    assert allocator.stats()["num_ooms"] == 2
