"""What torch can do through the bridge alone: its own functions, unpatched, on pools, checkpoints and recordings.

The other tests of this folder run through it with GPU_TEST_ATTACH=bridge.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import types
from pathlib import Path
from typing import Any

import pytest

MIB = 1 << 20

pytestmark = pytest.mark.bridge


def reserved_by_pool(torch: Any, pool: Any) -> int:
    """The bytes of the segments that belong to a MemPool."""
    return sum(
        segment["total_size"] for segment in torch.cuda.memory_snapshot() if segment["segment_pool_id"] == pool.id
    )


def test_torchs_own_functions_are_in_place_and_tell_what_ours_tell(torch: Any, allocator: Any, floats: Any) -> None:
    names = ("_cuda_memoryStats", "_cuda_memorySnapshot", "_cuda_record_memory_history", "_accelerator_getDeviceStats")
    assert all(isinstance(getattr(torch._C, name), types.BuiltinFunctionType) for name in names)
    held = floats(30)
    ours = allocator.stats()
    theirs = torch.cuda.memory_stats()
    assert {key: value for key, value in theirs.items() if key in ours} == {
        key: ours[key] for key in theirs if key in ours
    }
    assert torch.cuda.memory_allocated() == torch.accelerator.memory_allocated() >= held.nbytes
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()
    torch.cuda.set_per_process_memory_fraction(0.5)
    assert torch.cuda.get_per_process_memory_fraction() == 0.5
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.cuda.get_allocator_backend() == "rallocator"


def test_observers_hear_of_a_failure_and_the_error_is_torchs(torch: Any, allocator: Any) -> None:
    seen = []
    torch._C._cuda_attach_out_of_memory_observer(lambda *figures: seen.append(figures))
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory\. Tried to allocate"):
        torch.empty(1 << 50, device="cuda", dtype=torch.uint8)
    total = torch.cuda.mem_get_info()[1]
    assert seen[0][:3] == (0, 1 << 50, total)
    assert 0 < seen[0][3] <= total
    assert torch.cuda.memory_stats()["num_ooms"] == 1


# --- pools ----------------------------------------------------------------------------------------------------------


def test_mem_pool_has_its_own_memory_counts_its_users_and_gives_all_back(
    torch: Any, allocator: Any, floats: Any
) -> None:
    pool = torch.cuda.MemPool()
    assert pool.use_count() == 1
    with torch.cuda.use_mem_pool(pool):
        assert pool.use_count() == 2
        inside = floats(50)
    outside = floats(50)
    assert pool.use_count() == 1
    addresses = range(0)
    for segment in pool.snapshot():
        assert segment["segment_pool_id"] == pool.id
        addresses = range(segment["address"], segment["address"] + segment["total_size"])
    assert inside.data_ptr() in addresses
    assert outside.data_ptr() not in addresses
    before = torch.cuda.memory_reserved()
    held = reserved_by_pool(torch, pool)
    assert held >= inside.nbytes
    del inside
    torch.cuda.empty_cache()
    assert reserved_by_pool(torch, pool) == held, "a pool in use keeps its memory"
    del pool
    gc.collect()
    assert torch.cuda.memory_reserved() <= before - held


def test_pools_may_be_used_one_inside_the_other(torch: Any, allocator: Any, floats: Any) -> None:
    outer, inner = torch.cuda.MemPool(), torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(outer):
        first = floats(30)
        with torch.cuda.use_mem_pool(inner):
            second = floats(30)
        third = floats(30)
    assert reserved_by_pool(torch, outer) >= first.nbytes + third.nbytes
    assert second.nbytes <= reserved_by_pool(torch, inner) < second.nbytes + third.nbytes
    del first, second, third, outer, inner
    gc.collect()


def test_pool_serves_others_when_memory_is_out_if_it_was_asked_to(torch: Any, allocator: Any, floats: Any) -> None:
    pool = torch.cuda.MemPool(use_on_oom=True)
    with torch.cuda.use_mem_pool(pool):
        floats(400)
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 100 * MIB) / total)
    served = floats(300, 7.0)
    assert reserved_by_pool(torch, pool) >= served.nbytes
    assert bool((served == 7.0).all())
    with pytest.raises(torch.OutOfMemoryError):
        floats(300)
    torch.cuda.set_per_process_memory_fraction(1.0)
    del served, pool
    gc.collect()


def test_pool_without_splits_hands_out_whole_blocks(torch: Any, allocator: Any, floats: Any) -> None:
    if "no_split" not in inspect.signature(torch.cuda.MemPool.__init__).parameters:
        pytest.skip("this torch has no such pools")
    pool = torch.cuda.MemPool(no_split=True)
    with torch.cuda.use_mem_pool(pool):
        first = floats(2)
        second = floats(3)
    for segment in pool.snapshot():
        assert all(block["state"] == "active_allocated" for block in segment["blocks"])
    del first, second, pool
    gc.collect()


@pytest.mark.parametrize("policy", ["rallocator"])
def test_pool_for_what_another_library_registers_has_each_block_in_one_handle(
    torch: Any, allocator: Any, floats: Any
) -> None:
    driver = ctypes.CDLL("libcuda.so.1")

    def handle_at(address: int) -> int:
        handle = ctypes.c_uint64()
        assert driver.cuMemRetainAllocationHandle(ctypes.byref(handle), ctypes.c_uint64(address)) == 0
        assert driver.cuMemRelease(handle) == 0
        return handle.value

    def is_in_one(tensor: Any) -> bool:
        return handle_at(tensor.data_ptr()) == handle_at(tensor.data_ptr() + tensor.nbytes - 1)

    outside = [floats(2) for _ in range(40)]
    del outside[::2]
    assert not is_in_one(floats(40)), "elsewhere it is put together"
    pool = torch.cuda.MemPool()
    allocator.restrict_moves(pool, "contiguous")
    with torch.cuda.use_mem_pool(pool):
        inside = [floats(mib, float(mib)) for mib in (40, 3, 70)]
        del inside[0]
        inside.append(floats(39, 39.0))
    assert all(is_in_one(tensor) for tensor in inside)
    assert all(bool((tensor == tensor.nbytes // MIB).all()) for tensor in inside)
    del inside, pool, outside
    gc.collect()


# --- graphs ---------------------------------------------------------------------------------------------------------


def test_graph_captured_in_a_pool_of_the_user_runs_again(torch: Any, allocator: Any, check_graph: Any) -> None:
    check_graph(torch.cuda.MemPool())
    gc.collect()


def test_pool_goes_back_to_a_checkpoint(torch: Any, allocator: Any, floats: Any) -> None:
    pool = torch.cuda.graph_pool_handle()
    device = torch.cuda.current_device()
    torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool)
    kept, dropped = floats(4), floats(6)
    torch._C._cuda_endAllocateToPool(device, pool)
    addresses = {kept.untyped_storage().data_ptr(), dropped.untyped_storage().data_ptr()}
    assert torch._C._cuda_checkPoolLiveAllocations(device, pool, addresses)
    state = torch._C._cuda_getCheckpointState(device, pool)
    address = dropped.untyped_storage().data_ptr()
    del dropped
    assert torch._C._cuda_checkPoolLiveAllocations(device, pool, addresses - {address})
    # The storage of what is kept no longer owns its memory: as outputs of graphs, it is freed by its address.
    torch._C._cuda_setCheckpointPoolState(device, state, [kept.untyped_storage()._cdata], [])
    assert torch._C._cuda_checkPoolLiveAllocations(device, pool, addresses)
    for held in addresses:
        torch._C._cuda_cudaCachingAllocator_raw_delete(held)
    assert torch._C._cuda_checkPoolLiveAllocations(device, pool, set())
    del kept
    torch._C._cuda_releasePool(device, pool)


@pytest.mark.keeps_memory(reason="the compiler keeps its graphs")
def test_compiled_model_with_graphs_trains_as_an_eager_one(torch: Any, allocator: Any) -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64), torch.nn.Tanh()]
    model = torch.nn.Sequential(*layers).cuda()
    compiled = torch.compile(model, mode="reduce-overhead", dynamic=False)
    for _ in range(4):
        # Each shape has graphs of its own, so that the tree of graphs branches and goes back.
        for batch in (8, 16, 32, 16, 8):
            x = torch.randn(batch, 64, device="cuda")
            results = []
            for candidate in (model, compiled):
                model.zero_grad(set_to_none=True)
                torch.compiler.cudagraph_mark_step_begin()
                loss = candidate(x).square().sum()
                loss.backward()
                results.append([loss.detach().clone(), *(weight.grad.clone() for weight in model.parameters())])
            for eager, ours in zip(*results, strict=True):
                torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-3)


# --- recordings -----------------------------------------------------------------------------------------------------


def test_snapshot_has_torchs_stacks_ranges_and_labels(torch: Any, allocator: Any, floats: Any) -> None:
    memory = torch.cuda.memory
    memory._record_memory_history(context="all", stacks="all", global_record_annotations=True)
    if hasattr(memory, "_set_memory_metadata"):
        memory._set_memory_metadata("a label")
    with torch.profiler.record_function("a range"):
        held = floats(3)
    snapshot = memory._snapshot()
    allocated = [event for event in snapshot["device_traces"][0] if event["action"] == "alloc"]
    assert any(event["addr"] == held.data_ptr() for event in allocated)
    frames = allocated[-1]["frames"]
    assert any(frame["name"] == "test_snapshot_has_torchs_stacks_ranges_and_labels" for frame in frames), "Python's"
    assert any(frame["name"].startswith(("at::", "c10::", "torch::")) for frame in frames), "and C++'s"
    if hasattr(memory, "_set_memory_metadata"):
        assert allocated[-1]["user_metadata"] == "a label"
    ranges = [(entry["name"], entry["stage"]) for entry in snapshot["external_annotations"]]
    assert ("a range", "START") in ranges
    assert ("a range", "END") in ranges
    times = [event["time_us"] for event in snapshot["device_traces"][0]]
    assert times == sorted(times)
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    (block,) = (block for block in blocks if block["address"] == held.data_ptr())
    assert block["state"] == "active_allocated"
    assert block["frames"]
    memory._record_memory_history(None)


def test_stacks_of_what_is_long_gone_are_not_kept(torch: Any, allocator: Any) -> None:
    torch.cuda.memory._record_memory_history(max_entries=100)
    for _ in range(5000):
        torch.empty(1000, device="cuda")
    held = torch.empty(1000, device="cuda")
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    assert len(trace) == 100
    assert all(event["frames"] for event in trace if event["action"] != "snapshot")
    torch.cuda.memory._record_memory_history(None)
    del held


# --- devices and processes ------------------------------------------------------------------------------------------


@pytest.mark.two_gpus
def test_memory_is_copied_between_devices(torch: Any, allocator: Any, floats: Any) -> None:
    source = floats(8, 3.0)
    there = source.to("cuda:1")
    strided = torch.empty(8 * MIB // 4, 2, device="cuda:1")[:, 0]
    strided.copy_(source)
    assert bool((there == 3.0).all())
    assert bool((strided == 3.0).all())
    assert bool((there.to("cuda:0") == source).all())


QUEUES = """
import sys
import torch
import torch.multiprocessing as multiprocessing
import rallocator

SETTINGS = "policy:" + sys.argv[1]


def work(inbox, outbox):
    rallocator.enable(SETTINGS, attach="bridge")
    whole = inbox.get()
    part = inbox.get()
    outbox.put((whole.sum().item(), part.sum().item(), part.is_contiguous()))
    whole.add_(1)
    torch.cuda.synchronize()
    mine = torch.full((3 << 20,), 5.0, device="cuda")
    outbox.put(mine)
    del whole, part
    inbox.get()


if __name__ == "__main__":
    rallocator.enable(SETTINGS, attach="bridge")
    context = multiprocessing.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=work, args=(inbox, outbox))
    process.start()
    filler = torch.ones(1000, device="cuda")
    whole = torch.ones(20 << 20, device="cuda")
    part = torch.arange(64.0, device="cuda").reshape(8, 8)[2:, ::2]
    inbox.put(whole)
    inbox.put(part)
    print(*outbox.get(), part.sum().item())
    theirs = outbox.get()
    print(whole.sum().item() == 2 * (20 << 20), theirs.sum().item() == 5.0 * (3 << 20), rallocator.attached())
    del theirs
    inbox.put("end")
    process.join()
    print(process.exitcode)
"""


@pytest.mark.drives_processes
@pytest.mark.parametrize("chosen", ["native", "expandable", "rallocator"])
def test_tensors_go_through_queues_between_processes(run_python: Any, tmp_path: Path, chosen: str) -> None:
    program = tmp_path / "queues.py"
    program.write_text(QUEUES, encoding="utf-8")
    lines = run_python(options=[str(program), chosen]).stdout.splitlines()
    assert lines == [f"{float(20 << 20)} 936.0 False 936.0", "True True bridge", "0"]


@pytest.mark.drives_processes
def test_program_takes_the_bridge_by_itself_and_ends_well(run_python: Any) -> None:
    done = run_python("""
        import torch
        import rallocator

        rallocator.enable()
        x = torch.ones(1 << 20, device="cuda")
        print(rallocator.attached(), (x + x).sum().item())
    """)
    assert done.stdout.split() == ["bridge", "2097152.0"]
    assert "Warning" not in done.stderr
