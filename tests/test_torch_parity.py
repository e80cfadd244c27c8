"""torch's own memory functions, with rallocator behind them: the real torch on the simulated driver.

What needs a GPU is in tests/gpu/test_torch_parity.py. docs/torch-compatibility.md names the test of each function.
"""

from __future__ import annotations

import json

import pytest

from rallocator import _parity, _torch
from tests.processes import succeed
from tests.torch_programs import SIMULATED, only_bridge, only_pluggable, play

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("route")]


# --- the table ------------------------------------------------------------------------------------------------------


@only_pluggable
def test_every_name_that_this_torch_has_is_replaced_by_a_function_of_its_own() -> None:
    printed = play("""
        from rallocator import _parity, _torch

        release = _torch.release(torch.__version__)
        expected = [entry for entry in _parity.TABLE if entry.belongs_to(release)]
        print(all(getattr(getattr(torch, entry.owner), entry.name) is entry.function for entry in expected))
        print(len({id(entry.function) for entry in expected}) == len(expected) > 15)
    """)
    assert printed == ["True", "True"]


@only_pluggable
def test_table_gives_each_name_once_and_a_reason_for_it() -> None:
    names = [(entry.owner, entry.name) for entry in _parity.TABLE]
    assert len(set(names)) == len(names)
    assert all(entry.why and entry.since >= _torch.OLDEST_SUPPORTED for entry in _parity.TABLE)


@only_pluggable
def test_torch_that_lacks_a_name_is_told_so_once_and_the_rest_works() -> None:
    printed = succeed(
        """
        import warnings
        import torch, rallocator

        del torch._C._cuda_resetPeakMemoryStats
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            rallocator.enable(attach="pluggable")
        print(len(seen), seen[0].category.__name__, str(seen[0].message))
        torch.cuda._initialized = True
        print(torch.cuda.memory_stats(0)["num_ooms"])
        """,
        environment=SIMULATED,
    ).splitlines()
    assert printed[0].startswith("1 RuntimeWarning")
    assert "_cuda_resetPeakMemoryStats (raises RuntimeError: reset_peak_memory_stats)" in printed[0]
    assert printed[1] == "0"


@only_pluggable
@pytest.mark.parametrize("compiler", ["before", "after"])
def test_compiler_of_torch_knows_the_replacements_whenever_it_is_imported(compiler: str) -> None:
    # Two names with one function between them, or one that it cannot look up, would stop every `torch.compile`.
    import_it = "from torch._dynamo import trace_rules; trace_rules.get_torch_obj_rule_map()\n"
    enable_it = "import rallocator; rallocator.enable(attach='pluggable')\n"
    program = import_it + enable_it if compiler == "before" else enable_it + import_it
    ask = "print(torch._C._cuda_memoryStats in trace_rules.get_torch_obj_rule_map())"
    assert succeed(f"import torch\n{program}{ask}", environment=SIMULATED) == "True"


# --- statistics -----------------------------------------------------------------------------------------------------


def test_memory_stats_have_torchs_keys_and_shape() -> None:
    printed = play("""
        import json
        from rallocator import _torch

        held, freed = allocate(3 * MiB, 0), allocate(2 * MiB, 0)
        release(freed)
        stats, nested = torch.cuda.memory_stats(0), torch.cuda.memory_stats_as_nested_dict(0)
        newer = _torch.release(torch.__version__) >= (2, 12)
        print(len(stats) == (123 if newer else 122), ("num_oom_rejections" in stats) == newer)
        print(nested["allocated_bytes"]["large_pool"], stats["allocated_bytes.large_pool.peak"] // MiB)
        print(sorted(stats) == list(stats), all(type(value) is int for value in stats.values()))
        print(torch.cuda.memory_allocated(0) // MiB, torch.cuda.max_memory_allocated(0) // MiB,
              torch.cuda.memory_reserved(0) // MiB, torch.cuda.max_memory_reserved(0) // MiB)
        print("Allocated memory" in torch.cuda.memory_summary(0), "20480 KiB" in torch.cuda.memory_summary(0, True))
    """)
    assert printed[0] == "True True"
    expected = {"current": 3 << 20, "peak": 5 << 20, "allocated": 5 << 20, "freed": 2 << 20}
    assert json.loads(printed[1].rpartition(" ")[0].replace("'", '"')) == expected
    assert printed[2:4] == ["True True", "3 5 20 20"]
    assert printed[4] == "True True"


def test_resets_start_peaks_and_totals_anew() -> None:
    assert play("""
        release(allocate(3 * MiB, 0))
        held = allocate(2 * MiB, 0)
        torch.cuda.reset_peak_memory_stats(0)
        print(torch.cuda.max_memory_allocated(0) // MiB)
        torch.cuda.reset_accumulated_memory_stats(0)
        stats = torch.cuda.memory_stats(0)
        print(stats["allocated_bytes.all.allocated"], stats["allocated_bytes.all.freed"], stats["num_device_alloc"])
    """) == ["2", "0 0 0"]


def test_private_pools_are_told_apart_where_torch_tells_them_apart() -> None:
    printed = play("""
        from rallocator import _torch

        pool = torch.cuda.graph_pool_handle()
        torch._C._cuda_beginAllocateCurrentThreadToPool(0, pool)
        inside = allocate(3 * MiB, 0)
        torch._C._cuda_endAllocateToPool(0, pool)
        outside = allocate(3 * MiB, 0)
        key = f"reserved_bytes_by_private_pools.{pool[0]}_{pool[1]}.large_pool.current"
        newer = _torch.release(torch.__version__) >= (2, 13)
        print(torch.cuda.memory_stats(0).get(key) == (20 * MiB if newer else None))
        of_pool = torch.cuda.memory_snapshot(tuple(pool))
        print([segment["segment_pool_id"] == tuple(pool) for segment in of_pool], of_pool[0]["allocated_size"] // MiB)
        print(len(torch.cuda.memory_snapshot()), len(torch._C._cuda_memorySnapshot((0, 0))["segments"]))
        part = torch._C._cuda_memorySnapshot((*pool, False))
        print(len(part["segments"]), part["device_traces"])
        release(inside)
        torch._C._cuda_releasePool(0, pool)
    """)
    assert printed == ["True", "[True] 3", "2 2", "1 []"]


def test_accelerator_functions_answer_for_rallocator() -> None:
    assert play("""
        accelerator = torch.accelerator
        held = allocate(3 * MiB, 0)
        release(allocate(4 * MiB, 0))
        print(accelerator.memory_allocated(0) // MiB, accelerator.max_memory_allocated(0) // MiB,
              accelerator.memory_reserved(0) // MiB, accelerator.max_memory_reserved(0) // MiB)
        accelerator.reset_peak_memory_stats(0)
        accelerator.reset_accumulated_memory_stats(0)
        stats = accelerator.memory_stats(0)
        print(stats["allocated_bytes.all.peak"] // MiB, stats["allocated_bytes.all.allocated"], len(stats))
        release(held)
        accelerator.empty_cache()
        print(accelerator.memory_reserved(0))
    """) == ["3 7 20 20", "3 0 122", "0"]


@only_pluggable
def test_statistics_are_empty_before_cuda_is_initialised() -> None:
    assert play("""
        torch.cuda._initialized = False
        print(torch.accelerator.memory_stats(0), torch.cuda.memory_stats(0))
    """) == ["OrderedDict() OrderedDict()"]


def test_child_of_a_process_that_used_the_gpu_still_gets_answers() -> None:
    assert play("""
        import os

        allocate(MiB, 0)
        memory._record_memory_history()
        child = os.fork()
        if child == 0:
            memory._record_memory_history(None)
            torch.cuda.reset_peak_memory_stats(0)
            stats = torch._C._cuda_memoryStats(0)
            print(stats.get("reserved_bytes", {}).get("all", {}).get("current", 0), memory._snapshot()["segments"],
                  flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    """) == ["0 []"]


# --- out of memory --------------------------------------------------------------------------------------------------


def test_observers_hear_of_each_failure_before_its_error_and_may_do_anything() -> None:
    printed = play("""
        seen = []

        def observe(device, asked, total, free):
            seen.append((device, asked >> 30, total >> 20, free >> 20))
            seen.append([event["action"] for event in memory._snapshot()["device_traces"][0]][-1:])
            release(allocate(MiB, 0))

        memory._record_memory_history(context=None)
        allocate(MiB, 0)
        torch._C._cuda_attach_out_of_memory_observer(observe)
        try:
            allocate(20 << 30, 0)
        except torch.OutOfMemoryError:
            print(seen)
        stats = torch.cuda.memory_stats(0)
        print(stats["num_ooms"], stats["num_alloc_retries"])
        trace = memory._snapshot()["device_traces"][0]
        oom = next(event for event in trace if event["action"] == "oom")
        print(oom["size"] >> 30, oom["device_free"] >> 20, "addr" in oom)
    """)
    assert printed[0] in {"[(0, 20, 1024, 1022), ['oom']]", "[(0, 20, 1024, 1024), ['oom']]"}
    assert printed[1] in {"1 1", "1 0"}
    assert printed[2] in {"20 1022 False", "20 1024 False"}


@only_pluggable
def test_observer_that_cannot_be_called_is_refused() -> None:
    assert play("""
        try:
            torch._C._cuda_attach_out_of_memory_observer(3)
        except TypeError as error:
            print(error)
    """) == ["an observer has to be callable, and 3 is not"]


@only_pluggable
def test_observer_that_raises_is_printed_and_the_request_fails_as_before() -> None:
    assert play("""
        import sys

        sys.unraisablehook = lambda unraisable: print(type(unraisable.exc_value).__name__, unraisable.exc_value)
        torch._C._cuda_attach_out_of_memory_observer(lambda *figures: 1 / 0)
        try:
            allocate(20 << 30, 0)
        except torch.OutOfMemoryError as error:
            print(str(error)[:20])
    """) == ["ZeroDivisionError division by zero", "CUDA out of memory. "]


@only_bridge
def test_observer_that_raises_does_so_in_place_of_the_error_as_with_torchs_own_allocator() -> None:
    assert play("""
        torch._C._cuda_attach_out_of_memory_observer(lambda *figures: 1 / 0)
        try:
            allocate(20 << 30, 0)
        except ZeroDivisionError as error:
            print(error)
        print(torch.cuda.memory_stats(0)["num_ooms"], torch.cuda.memory_allocated(0))
        release(allocate(3 * MiB, 0))
    """) == ["division by zero", "1 0"]


@only_bridge
@pytest.mark.parametrize(("count", "questions"), [(1, 0), (2, 100)])
def test_cuda_is_asked_for_the_current_device_only_where_there_are_several(count: int, questions: int) -> None:
    printed = play(f"""
        import contextlib

        fake = ctypes.CDLL(None)
        ctypes.c_int.in_dll(fake, "fake_device_count").value = {count}
        with contextlib.suppress(RuntimeError):  # It looks for the driver, after it has told the allocator.
            torch._C._cuda_init()
        asked = ctypes.c_int.in_dll(fake, "fake_device_questions")
        before = asked.value
        held = [allocate(MiB, 0) for _ in range(100)]
        print(asked.value - before, torch.cuda.memory_stats(0)["allocation.all.current"])
        for address in held:
            release(address)
        print(asked.value - before)
    """)
    assert printed == [f"{questions} 100", f"{questions}"]


# --- what the bridge cannot do ----------------------------------------------------------------------------------------


@only_bridge
def test_what_the_bridge_cannot_do_is_said_once_and_work_goes_on() -> None:
    assert play("""
        import warnings

        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(2):
                memory.caching_allocator_enable(False)
        print([str(warning.message).partition(":")[0] for warning in seen])
        release(allocate(MiB, 0))
        print(torch.cuda.memory_stats(0)["allocation.all.allocated"])
    """) == ["['rallocator always caches memory']", "1"]


# --- settings -------------------------------------------------------------------------------------------------------


def test_memory_fraction_is_set_asked_for_and_obeyed() -> None:
    assert play("""
        print(torch.cuda.get_per_process_memory_fraction(0))
        torch._C._cuda_setMemoryFraction(0.25, 0)
        print(torch.cuda.get_per_process_memory_fraction(0), torch.cuda.get_per_process_memory_fraction(1))
        held = allocate(200 * MiB, 0)
        try:
            allocate(100 * MiB, 0)
        except torch.OutOfMemoryError as error:
            print("It may reserve 256.00 MiB." in str(error))
    """) == ["1.0", "0.25 1.0", "True"]


def test_settings_changed_at_run_time_are_honoured_or_refused_and_never_ignored() -> None:
    printed = play(
        """
        import warnings
        from rallocator import _torch

        new = _torch.release(torch.__version__) >= (2, 10)
        name = "_accelerator_setAllocatorSettings" if new else "_cuda_cudaCachingAllocator_set_allocator_settings"
        change = getattr(torch._C, name)
        change("max_split_size_mb:64")
        try:
            change("max_split_size_mb:128")
        except ValueError as error:
            print(type(error).__name__, error)
        try:
            change("max_split_size_mb:0")
        except ValueError as error:
            print(type(error).__name__, error)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            change("release_lock_on_cudamalloc:True")
            change("release_lock_on_cudamalloc:True")
        print(len(seen))
        change("pinned_num_register_threads:2")
        """,
        settings="policy:native,max_split_size_mb:64",
    )
    assert printed[0].startswith("ConfigError ")
    assert "RALLOCATOR_CONF" in printed[0]
    assert printed[1].startswith("ConfigError ")
    assert "max_split_size_mb" in printed[1]
    assert printed[2] == "1"


# --- other things that ask the allocator ----------------------------------------------------------------------------


def test_backend_has_its_name_and_memory_of_the_host_its_statistics(route: str) -> None:
    name = {"pluggable": "pluggable", "bridge": "rallocator"}[route]
    assert play("""
        print(torch.cuda.get_allocator_backend(), torch._C._cuda_cudaCachingAllocator_is_enabled()
              if hasattr(torch._C, "_cuda_cudaCachingAllocator_is_enabled") else True)
        print("_parity" in (getattr(torch._C._cuda_hostMemoryStats, "__module__", None) or ""))
        print(torch.cuda.list_gpu_processes.__globals__["__name__"])
    """) == [f"{name} True", "False", "torch.cuda.memory"]


@only_pluggable
def test_cudnn_benchmark_is_told_the_largest_block_to_be_had() -> None:
    # What cuDNN's benchmark asks cannot be asked from Python, so the call is made as C++ makes it: through the table of
    # virtual functions of the object that torch uses.
    printed = play("""
        import ctypes
        from pathlib import Path

        libraries = Path(torch.__file__).parent / "lib"
        c10 = ctypes.CDLL(str(libraries / "libc10_cuda.so"))
        cuda = ctypes.CDLL(str(libraries / "libtorch_cuda.so"))
        scope = "_ZN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator"
        original = ctypes.cast(getattr(cuda, scope + "9cacheInfoEaPm"), ctypes.c_void_p).value
        table = ctypes.addressof(ctypes.c_void_p.in_dll(cuda, scope.replace("_ZN", "_ZTVN") + "E")) + 16
        words = (ctypes.c_size_t * 50).from_address(table)
        slot = list(words).index(original)
        current = ctypes.c_size_t.in_dll(c10, "_ZN3c104cuda20CUDACachingAllocator9allocatorE").value
        own = (ctypes.c_size_t * 50).from_address(ctypes.c_size_t.from_address(current).value)
        print([index for index in range(45) if own[index] != words[index]] == [slot])
        ask = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int8, ctypes.POINTER(ctypes.c_size_t))(own[slot])
        largest = ctypes.c_size_t(0)
        held = allocate(600 * MiB, 0)
        ask(current, 0, largest)
        print(largest.value // MiB)
        release(held)
        ask(current, 0, largest)
        print(largest.value // MiB)
    """)
    assert printed == ["True", "424", "600"]


def test_profiler_is_told_of_memory() -> None:
    printed = play("""
        import os

        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # The profiler logs there that it has no GPU.
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
            release(allocate(3 * MiB, 0))
        profile = profiler.profiler.kineto_results
        memory_events = [event for event in profile.events() if event.name() == "[memory]"]
        print([event.nbytes() // MiB for event in memory_events], {str(event.device_type()) for event in memory_events})
        release(allocate(3 * MiB, 0))
    """)
    assert printed == ["[3, -3] {'DeviceType.CUDA'}"]


def test_profiler_is_told_of_a_free_for_the_device_of_the_memory() -> None:
    printed = play("""
        import json, os, pathlib, tempfile

        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # The profiler logs there that it has no GPU.
        cuda = ctypes.CDLL(None)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            cuda.cudaSetDevice(1)
            large = allocate(64 * MiB, 0)
            cuda.cudaSetDevice(0)
            small = allocate(2 * MiB, 0)
            release(large)
            release(small)
        file = pathlib.Path(tempfile.mkdtemp()) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = [event["args"] for event in json.loads(file.read_text())["traceEvents"] if event["name"] == "[memory]"]
        for event in events:
            print([event["Device Id"], *(event[key] // MiB for key in ("Bytes", "Total Allocated"))])
    """)
    assert printed == ["[1, 64, 64]", "[0, 2, 2]", "[1, -64, 0]", "[0, -2, 0]"]


@only_pluggable
def test_sharing_a_cuda_tensor_fails_at_the_sender_with_a_way_out() -> None:
    printed = play("""
        storage = torch.UntypedStorage(8)
        try:
            storage._share_cuda_()
        except RuntimeError as error:
            print(error)
    """)
    assert "tensor.cpu()" in printed[0]


def test_allocation_by_address_works_and_a_wrong_address_is_an_error_of_torchs() -> None:
    assert play("""
        address = allocate(3 * MiB, 0)
        print(torch.cuda.memory_allocated(0) // MiB)
        release(address)
        print(torch.cuda.memory_allocated(0))
        try:
            release(address)
        except RuntimeError as error:
            print("not allocated here" in str(error) or "invalid device pointer" in str(error))
    """) == ["3", "0", "True"]
