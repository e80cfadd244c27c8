"""torch's memory functions on a GPU: with rallocator behind them, they say what they say of torch's own allocator.

What needs no GPU is in tests/test_torch_parity.py. docs/torch-compatibility.md names the test of each function.
"""

from __future__ import annotations

import copy
import importlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MIB = 1 << 20

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]

# --- equal to torch's own, to the byte ------------------------------------------------------------------------------

# What one stream does, so that nothing depends on timing; then what torch says of it, as JSON.
PROGRAM = """
import json, random, sys
import torch

if sys.argv[1:] == ["rallocator"]:
    import rallocator
    rallocator.enable("policy:native")

torch.cuda.init()
choices = random.Random(5)
held = []

def churn(steps, largest):
    for _ in range(steps):
        if held and choices.random() < 0.48:
            held.pop(choices.randrange(len(held)))
        else:
            size = int(largest ** choices.random()) + 1
            held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))

churn(400, 96 << 20)
torch.cuda.empty_cache()
churn(200, 8 << 20)
torch.cuda.reset_peak_memory_stats()
churn(200, 48 << 20)
del held[::2]
torch.cuda.empty_cache()
total = torch.cuda.mem_get_info()[1]
torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (64 << 20)) / total)
try:
    torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    pass
torch.cuda.set_per_process_memory_fraction(1.0)
churn(100, 30 << 20)

def block(block):
    # torch leaves in an inactive block what its last tenant had asked for.
    asked = block["requested_size"] if block["state"] != "inactive" else None
    return [block["size"], asked, block["state"]]

def segment(segment):
    keys = ("device", "total_size", "allocated_size", "active_size", "requested_size", "stream", "segment_type",
            "segment_pool_id", "is_expandable")
    return [segment[key] for key in keys] + [[block(entry) for entry in segment["blocks"]]]

segments = sorted(json.dumps(segment(entry)) for entry in torch.cuda.memory_snapshot())
print(json.dumps({"stats": torch.cuda.memory_stats(), "segments": segments}))
"""

# Keys whose values may differ, each with its reason.
EXCEPTIONS: dict[str, str] = {}


@pytest.mark.drives_processes
@pytest.mark.exclusive
def test_native_policy_gives_every_statistic_and_every_block_that_torch_gives(
    run_python: RunPython, tmp_path: Path
) -> None:
    program = tmp_path / "parity.py"
    program.write_text(PROGRAM, encoding="utf-8")
    theirs, ours = (
        json.loads(run_python(options=[str(program), name]).stdout.splitlines()[-1]) for name in ("torch", "rallocator")
    )
    assert list(ours["stats"]) == list(theirs["stats"])
    differing = {
        key: (value, ours["stats"][key])
        for key, value in theirs["stats"].items()
        if key not in EXCEPTIONS and ours["stats"][key] != value
    }
    assert not differing, "torch's and ours"
    assert ours["segments"] == theirs["segments"]


# --- state and statistics ---------------------------------------------------------------------------------------------


def check_sums(torch: Any) -> None:
    """Check that the blocks of a snapshot add up to the statistics."""
    stats, segments = torch.cuda.memory_stats(), torch.cuda.memory_snapshot()
    for key, family in (
        ("total_size", "reserved_bytes"),
        ("allocated_size", "allocated_bytes"),
        ("active_size", "active_bytes"),
        ("requested_size", "requested_bytes"),
    ):
        for pool, name in ((None, "all"), ("small", "small_pool"), ("large", "large_pool")):
            found = sum(segment[key] for segment in segments if pool in {None, segment["segment_type"]})
            assert found == stats[f"{family}.{name}.current"], (family, name)


@pytest.mark.usefixtures("allocator")
def test_blocks_of_a_snapshot_add_up_to_the_statistics(torch: Any) -> None:
    choices = random.Random(9)
    streams = [torch.cuda.Stream() for _ in range(3)]
    held: list[Any] = []
    for step in range(600):
        with torch.cuda.stream(streams[step % 3]):
            if held and choices.random() < 0.5:
                held.pop(choices.randrange(len(held)))
            else:
                held.append(torch.zeros(int((24 * MIB) ** choices.random()) + 1, dtype=torch.uint8, device="cuda"))
            if held and choices.random() < 0.3:
                choices.choice(held).record_stream(streams[(step + 1) % 3])
        if step % 150 == 149:
            check_sums(torch)
            torch.cuda.empty_cache()
    check_sums(torch)


# --- history ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("allocator")
def test_history_of_a_training_step_has_stacks_and_holds_no_contradiction(torch: Any, tmp_path: Path) -> None:
    checker = importlib.import_module("rallocator._snapshot_checker")
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))).cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def train_a_step() -> None:
        optimizer.zero_grad()
        model(torch.randn(64, 256, device="cuda")).square().mean().backward()
        optimizer.step()

    train_a_step()
    torch.cuda.memory._record_memory_history()
    train_a_step()
    side = torch.cuda.Stream()
    tensor = torch.randn(MIB, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        tensor.mul_(2)
        tensor.record_stream(side)
    del tensor  # Its free completes only once the other stream is done.
    picture = torch.cuda.memory._snapshot()
    assert checker.check(picture) > 50
    trace = picture["device_traces"][0]
    names = {frame["name"] for event in trace for frame in event.get("frames", ())}
    assert {"train_a_step", "forward", "step"} <= names
    assert trace[-1]["action"] == "free_requested"
    torch.cuda.synchronize()
    path = tmp_path / "snapshot.pickle"
    torch.cuda.memory._dump_snapshot(str(path))
    viz = [sys.executable, "-m", "torch.cuda._memory_viz", "stats", str(path)]
    assert subprocess.run(viz, capture_output=True, check=False).returncode == 0
    rallocator = importlib.import_module("rallocator")
    assert all(row.replayable for row in rallocator.replay(path, policies=["native"]).rows)
    torch.cuda.memory._record_memory_history(None)


@pytest.mark.exclusive
@pytest.mark.usefixtures("allocator")
def test_recording_without_stacks_costs_at_most_two_microseconds_an_event(torch: Any) -> None:
    def microseconds_a_pair() -> float:
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(20_000):
                torch.empty(1000, device="cuda")
            best = min(best, (time.perf_counter() - start) / 20_000 * 1e6)
        return best

    microseconds_a_pair()
    without = microseconds_a_pair()
    torch.cuda.memory._record_memory_history(context=None, max_entries=100_000)
    recording = microseconds_a_pair()
    torch.cuda.memory._record_memory_history(None)
    events_in_a_pair = 3
    cost = (recording - without) / events_in_a_pair
    sys.stdout.write(f"{without:.2f} µs a pair without, {recording:.2f} with: {cost:.2f} µs an event\n")
    assert cost <= 2


# --- every byte under a cap -------------------------------------------------------------------------------------------


def test_no_byte_is_wrong_in_ten_thousand_steps_under_a_cap(torch: Any, allocator: Any) -> None:
    cap, choices = 100 * MIB, random.Random(11)
    streams = [torch.cuda.Stream() for _ in range(4)]
    wrong, scratch = [], []
    for stream in streams:
        with torch.cuda.stream(stream):
            # What stays of this stream's small memory leaves room, whatever the cap, for what counting needs.
            wrong.append(torch.zeros((), dtype=torch.int64, device="cuda"))
            scratch.append(torch.empty(20 * MIB // 4, dtype=torch.bool, device="cuda"))
    torch.cuda.synchronize()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + cap) / total)
    limit = torch.cuda.memory_reserved() + cap
    held: list[tuple[Any, int, int]] = []  # Tensor, the number in it, the index of its stream.

    def check_one() -> None:
        """Read a tensor on another stream than its own, and free it before the reading is over."""
        tensor, number, owner = held.pop(choices.randrange(len(held)))
        reader = choices.randrange(len(streams))
        streams[reader].wait_stream(streams[owner])
        with torch.cuda.stream(streams[reader]):
            differs = torch.ne(tensor, number, out=scratch[reader][: tensor.numel()])
            wrong[reader] += differs.any()
        tensor.record_stream(streams[reader])

    failures = 0
    for step in range(10_000):
        if held and (choices.random() < 0.5 or len(held) > 8):
            check_one()
            continue
        owner = choices.randrange(len(streams))
        with torch.cuda.stream(streams[owner]):
            try:
                count = choices.randrange(2 * MIB, 20 * MIB) // 4
                held.append((torch.full((count,), step, dtype=torch.int32, device="cuda"), step, owner))
            except torch.OutOfMemoryError:
                failures += 1
                torch.cuda.empty_cache()
        if step % 1000 == 999:
            torch.cuda.empty_cache()
    while held:
        check_one()
    torch.cuda.synchronize()
    assert sum(int(count.item()) for count in wrong) == 0
    assert allocator.stats()["reserved_bytes.all.peak"] <= limit + 20 * MIB
    sys.stdout.write(f"{failures} requests failed under the cap\n")
    torch.cuda.set_per_process_memory_fraction(1.0)


# --- graphs -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("allocator")
def test_graphed_callables_compute_what_eager_ones_do(torch: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8)).cuda()
    sample = torch.randn(32, 64, device="cuda")
    data = torch.randn(32, 64, device="cuda")

    def results(function: Any, parameters: Any) -> list[Any]:
        output = function(data)
        output.sum().backward()
        return [output.detach(), *(parameter.grad for parameter in parameters)]

    # A copy, since a parameter that has had a gradient on the default stream can have none in a capture.
    eager = copy.deepcopy(model)
    wanted = results(eager, list(eager.parameters()))
    found = results(torch.cuda.make_graphed_callables(model, (sample,)), list(model.parameters()))
    assert all(torch.allclose(left, right, atol=1e-5) for left, right in zip(wanted, found, strict=True))


@pytest.mark.pluggable
@pytest.mark.usefixtures("allocator")
def test_memory_pools_are_refused_by_name_and_work_goes_on(torch: Any) -> None:
    with pytest.raises(RuntimeError, match="createOrIncrefPool"):
        torch.cuda.MemPool()
    assert torch.ones(MIB, device="cuda").sum().item() == MIB


@pytest.mark.pluggable
@pytest.mark.keeps_memory(reason="the compiler's graph keeps its pool")
@pytest.mark.usefixtures("allocator")
def test_compiler_with_graphs_is_refused_by_name_and_work_goes_on(torch: Any) -> None:
    function = torch.compile(lambda x: (x * 2).sin() + 1, mode="reduce-overhead")
    x = torch.ones(MIB, device="cuda")

    def call_until_it_is_captured_and_replayed() -> None:
        for _ in range(4):
            function(x)

    with pytest.raises(RuntimeError, match=r"getCheckpointState|setCheckpointPoolState|checkPoolLiveAllocations"):
        call_until_it_is_captured_and_replayed()
    assert torch.ones(MIB, device="cuda").sum().item() == MIB


@pytest.mark.exclusive
@pytest.mark.usefixtures("allocator")
def test_a_hundred_captures_do_not_grow_the_devices_use(torch: Any) -> None:
    x = torch.zeros(4 * MIB, device="cuda")

    def capture_and_drop() -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = (x * 2).add_(1)
        graph.replay()
        torch.cuda.synchronize()
        del graph, y

    def used() -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return int(total - free)

    for _ in range(10):
        capture_and_drop()
    before = used()
    for _ in range(100):
        capture_and_drop()
    assert used() - before < 5_000_000


@pytest.mark.usefixtures("allocator")
def test_private_pool_of_a_graph_shows_in_the_statistics(torch: Any) -> None:
    x = torch.zeros(16 * MIB, device="cuda")
    x.mul_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
    pool = tuple(graph.pool())
    assert {segment["segment_pool_id"] for segment in torch.cuda.memory_snapshot(pool)} == {pool}
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13):
        key = f"reserved_bytes_by_private_pools.{pool[0]}_{pool[1]}.all.current"
        reserved = sum(segment["total_size"] for segment in torch.cuda.memory_snapshot(pool))
        assert torch.cuda.memory_stats()[key] == reserved > 0
    del y
    graph.reset()


# --- other things that ask the allocator ------------------------------------------------------------------------------


@pytest.mark.usefixtures("allocator")
def test_observer_is_told_on_a_gpu(torch: Any) -> None:
    seen: list[tuple[int, ...]] = []
    torch._C._cuda_attach_out_of_memory_observer(lambda *figures: seen.append(figures))
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
    free, total = torch.cuda.mem_get_info()
    [(device, asked, all_there_is, was_free)] = seen
    assert (device, asked, all_there_is) == (0, 1 << 40, total)
    assert abs(was_free - free) < 1 << 30


@pytest.mark.keeps_memory(reason="cuDNN keeps its own")
@pytest.mark.usefixtures("allocator")
def test_cudnn_benchmark_finds_an_algorithm(torch: Any) -> None:
    torch.backends.cudnn.benchmark = True
    convolution = torch.nn.Conv2d(16, 32, 3, padding=1).cuda()
    data = torch.randn(8, 16, 64, 64, device="cuda")
    found = convolution(data)
    torch.backends.cudnn.benchmark = False
    assert torch.allclose(found, convolution(data), atol=1e-2)
    convolution(data).sum().backward()


@pytest.mark.usefixtures("allocator")
def test_allocation_by_address_works_on_the_stream_that_is_named(torch: Any) -> None:
    stream = torch.cuda.Stream()
    before = torch.cuda.memory_allocated()
    address = torch.cuda.caching_allocator_alloc(3 * MIB, stream=stream)
    assert torch.cuda.memory_allocated() - before == 3 * MIB
    held = [segment for segment in torch.cuda.memory_snapshot() if segment["stream"] == stream.cuda_stream]
    assert any(block["address"] == address for segment in held for block in segment["blocks"])
    torch.cuda.caching_allocator_delete(address)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.pluggable
@pytest.mark.usefixtures("allocator")
def test_sending_a_cuda_tensor_to_another_process_names_the_way_out(torch: Any) -> None:
    reductions = importlib.import_module("torch.multiprocessing.reductions")
    tensor = torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError, match=r"tensor\.cpu\(\)"):
        reductions.reduce_tensor(tensor)


@pytest.mark.usefixtures("allocator")
def test_profiler_shows_memory(torch: Any) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        held = torch.ones(8 * MIB, dtype=torch.uint8, device="cuda")
        del held
    sizes = [event.device_memory_usage for event in profiler.key_averages()]
    assert max(sizes) >= 8 * MIB
