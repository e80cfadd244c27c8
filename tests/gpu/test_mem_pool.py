"""torch.cuda.MemPool with an allocator of the program's own, through the bridge: the memory of another library.

What needs no GPU is in tests/test_torch_mem_pool.py. The library here is the driver, called from Python, or NCCL.
"""

from __future__ import annotations

import ctypes
import gc
import socket
from typing import Any

import pytest

MIB = 1 << 20

pytestmark = pytest.mark.bridge


ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)


class OwnAllocator:
    """An allocator of the program's own, which keeps what it gave by address."""

    def __init__(self, torch: Any) -> None:
        self.held: dict[int, int] = {}
        self.given = self.given_back = self.mistakes = 0
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._functions = (ALLOCATE(self._allocate), FREE(self._free))
        addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in self._functions]
        self.allocator = torch._C._cuda_customAllocator(*addresses)

    def _allocate(self, size: int, _device: int, _stream: int | None) -> int | None:
        address = ctypes.c_uint64()
        if self._driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)) != 0:
            return None
        self.given += 1
        self.held[address.value] = size
        return address.value

    def _free(self, address: int, size: int, _device: int, _stream: int | None) -> None:
        self.given_back += 1
        self.mistakes += self.held.pop(address, None) != size
        self.mistakes += self._driver.cuMemFree_v2(ctypes.c_uint64(address)) != 0

    def holds(self, tensor: Any) -> bool:
        """Whether a tensor lies in what was given."""
        first = tensor.data_ptr()
        return any(base <= first and first + tensor.nbytes <= base + size for base, size in self.held.items())

    def check_empty(self) -> None:
        """All that was given came back, and nothing else."""
        assert (self.held, self.given_back, self.mistakes) == ({}, self.given, 0)


def test_tensors_of_a_pool_lie_in_its_allocators_memory_and_kernels_compute_there(
    torch: Any, allocator: Any, floats: Any
) -> None:
    torch.cuda.init()
    own = OwnAllocator(torch)
    pool = torch.cuda.MemPool(own.allocator)
    side = torch.cuda.Stream()
    with torch.cuda.use_mem_pool(pool):
        small, large = floats(1, 2.0), floats(30, 3.0)
    outside = floats(30, 5.0)
    assert own.holds(small)
    assert own.holds(large)
    assert not own.holds(outside)
    with pytest.raises(RuntimeError, match="it has an allocator of its own"):
        large.untyped_storage()._share_cuda_()
    assert sorted(own.held.values()) == [2 * MIB, 30 * MIB]
    assert sorted(segment["total_size"] for segment in pool.snapshot()) == [2 * MIB, 30 * MIB]
    total = torch.zeros((), device="cuda")
    for _ in range(20):
        with torch.cuda.use_mem_pool(pool):
            result = large * 2 + outside
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            total = total + (result == 11.0).all()
        result.record_stream(side)
        del result
    torch.cuda.current_stream().wait_stream(side)
    assert total.item() == 20
    assert bool((small == 2.0).all())
    del pool
    gc.collect()
    assert own.holds(small), "it is in use"
    del small, large
    torch.cuda.empty_cache()
    own.check_empty()
    assert bool((outside == 5.0).all())


def test_work_is_over_before_memory_goes_back_to_its_allocator(torch: Any, allocator: Any, floats: Any) -> None:
    torch.cuda.init()
    own = OwnAllocator(torch)
    pool = torch.cuda.MemPool(own.allocator)
    with torch.cuda.use_mem_pool(pool):
        x = floats(200)
    del pool
    gc.collect()
    y = torch.zeros_like(x)
    for _ in range(200):
        y += x
    del x
    torch.cuda.empty_cache()
    own.check_empty()
    assert bool((y == 200.0).all())


def test_graph_is_captured_into_an_allocators_memory_and_runs_again(
    torch: Any, allocator: Any, check_graph: Any
) -> None:
    torch.cuda.init()
    own = OwnAllocator(torch)
    check_graph(torch.cuda.MemPool(own.allocator), own.holds)
    gc.collect()
    torch.cuda.empty_cache()
    own.check_empty()


def test_pool_of_an_allocator_serves_others_when_memory_is_out_if_it_was_asked_to(
    torch: Any, allocator: Any, floats: Any
) -> None:
    torch.cuda.init()
    own = OwnAllocator(torch)
    spared, used = torch.cuda.MemPool(own.allocator), torch.cuda.MemPool(own.allocator, use_on_oom=True)
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 80 * MIB) / total)
    for pool in (spared, used):
        with torch.cuda.use_mem_pool(pool):
            floats(40)
    served = floats(30, 7.0)
    assert own.holds(served)
    with pytest.raises(torch.OutOfMemoryError):
        floats(30)
    torch.cuda.set_per_process_memory_fraction(1.0)  # Even the comparison needs some.
    assert bool((served == 7.0).all())
    del served, pool, spared, used
    gc.collect()
    torch.cuda.empty_cache()
    own.check_empty()


def test_allocator_that_has_no_memory_is_torchs_error(torch: Any, allocator: Any) -> None:
    torch.cuda.init()
    own = OwnAllocator(torch)
    pool = torch.cuda.MemPool(own.allocator)
    total = torch.cuda.mem_get_info()[1]
    outside = torch.empty(total // 3, device="cuda", dtype=torch.uint8)
    with torch.cuda.use_mem_pool(pool), pytest.raises(torch.OutOfMemoryError, match="gave no memory"):
        torch.empty(total // 10 * 9, device="cuda", dtype=torch.uint8)
    del pool, outside
    gc.collect()
    own.check_empty()


def test_collective_runs_on_memory_that_its_communicator_obtained(torch: Any, allocator: Any, floats: Any) -> None:
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    distributed.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    backend = distributed.group.WORLD._get_backend(torch.device("cuda", 0))
    if not getattr(backend, "supports_tensor_alloc", lambda _: True)(torch.device("cuda", 0)):
        distributed.destroy_process_group()
        pytest.skip("NCCL cannot allocate here")
    warm = floats(1)
    distributed.all_reduce(warm)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        x = floats(32, 4.0)
    assert [segment["total_size"] for segment in pool.snapshot()] == [32 * MIB]
    distributed.all_reduce(x)
    y = x + 1
    torch.cuda.synchronize()
    assert bool((y == 5.0).all())
    del x, y, warm, pool
    gc.collect()
    torch.cuda.empty_cache()
    distributed.destroy_process_group()
