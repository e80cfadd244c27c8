"""Two GPUs in one process: what one of them allocated, the other can read, also while both are busy."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.two_gpus

GIB = 1 << 30

# About half a second on an H200 (1.98 GHz).
SLEEP_CYCLES = 1_000_000_000


def keep_both_busy(torch: Any) -> None:
    """Leave a kernel running on a side stream of each GPU."""
    for device in ("cuda:0", "cuda:1"):
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            torch.cuda._sleep(SLEEP_CYCLES)


@pytest.mark.usefixtures("allocator")
def test_copies_to_the_other_gpu_are_right_after_ten_gibibytes_and_beside_kernels(torch: Any) -> None:
    large = torch.arange(10 * GIB // 8, device="cuda:0")
    torch.ones(8, device="cuda:1")
    keep_both_busy(torch)

    copied = large.to("cuda:1")
    strided = torch.empty((1024, 512), dtype=torch.int64, device="cuda:1")
    strided.copy_(large[: 1024 * 1024].view(1024, 1024)[:, ::2])
    transposed = large[: 1024 * 1024].view(1024, 1024).t().to("cuda:1")

    expected = torch.arange(1024 * 1024).view(1024, 1024)
    assert torch.equal(copied, torch.arange(10 * GIB // 8, device="cuda:1"))
    assert torch.equal(strided.cpu(), expected[:, ::2])
    assert torch.equal(transposed.cpu(), expected.t())


@pytest.mark.usefixtures("allocator")
def test_memory_made_before_the_other_gpu_was_used_can_be_copied_both_ways(torch: Any) -> None:
    before = torch.full((64 << 20,), 7, dtype=torch.uint8, device="cuda:0")
    there = before.to("cuda:1")
    after = torch.full((64 << 20,), 9, dtype=torch.uint8, device="cuda:0")
    keep_both_busy(torch)
    there_strided = torch.zeros((8192, 4096), dtype=torch.uint8, device="cuda:1")
    there_strided.copy_(after.view(8192, 8192)[:, ::2])
    back = torch.zeros((8192, 8192), dtype=torch.uint8, device="cuda:0")
    back[:, ::2].copy_(there_strided)
    assert bool((there == 7).all())
    assert bool((there_strided == 9).all())
    assert int(back.sum(dtype=torch.int64).item()) == 9 * 8192 * 4096


def test_each_gpu_has_its_own_statistics(torch: Any, allocator: Any) -> None:
    first = torch.empty(3 << 20, dtype=torch.uint8, device="cuda:0")
    second = torch.empty(5 << 20, dtype=torch.uint8, device="cuda:1")
    assert allocator.stats(0)["requested_bytes.all.current"] == first.nbytes
    assert allocator.stats(1)["requested_bytes.all.current"] == second.nbytes


@pytest.mark.usefixtures("allocator")
def test_tensor_freed_while_another_gpu_is_current_is_reused_on_its_own(torch: Any) -> None:
    tensor = torch.empty(64 << 20, dtype=torch.uint8, device="cuda:0")
    address = tensor.data_ptr()
    with torch.cuda.device("cuda:1"):
        del tensor
        assert torch.cuda.current_device() == 1
        other = torch.empty(64 << 20, dtype=torch.uint8, device="cuda:1")
        assert other.data_ptr() != address
    assert torch.empty(64 << 20, dtype=torch.uint8, device="cuda:0").data_ptr() == address
