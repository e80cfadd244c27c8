"""Attaching to the real torch, without a GPU: the simulated driver stands behind the hooks.

Each test runs in a process of its own, because torch takes an allocator once in its life. torch asks CUDA for the
current device before it calls the malloc hook; `fake_cudart.c` answers that.
"""

from __future__ import annotations

import textwrap

import pytest

from rallocator import _torch
from tests.processes import build_library, succeed

pytestmark = pytest.mark.torch

SIMULATED = {"RALLOCATOR_SIMULATE": "2x1GiB"}

ATTACH = """
import torch
import rallocator

rallocator.enable(attach="pluggable")
allocate = torch._C._cuda_cudaCachingAllocator_raw_alloc
release = torch._C._cuda_cudaCachingAllocator_raw_delete
MiB = 1 << 20

def allocated(device=0):
    return rallocator.stats(device)["allocated_bytes.all.current"]
"""


def attached(code: str) -> list[str]:
    """Run a program that is attached to torch over the simulated driver; return the lines that it printed."""
    fake = build_library("fake_cudart.c")
    return succeed(ATTACH + textwrap.dedent(code), environment=SIMULATED, preload=fake).splitlines()


def enabling_fails(
    before: str, *, environment: dict[str, str] | None = None, arguments: str = "attach='pluggable'"
) -> str:
    """Run `before` and then `enable`; return the class and the message of what it raised.

    In the same process it is checked that torch's own allocator stays in use, and that with `required=False` the same
    message comes as one warning.
    """
    code = f"""
import warnings
import rallocator
{textwrap.dedent(before)}
try:
    rallocator.enable({arguments})
except rallocator.errors.RallocatorError as error:
    print(f"{{type(error).__name__}}: {{error}}")
    raised = str(error)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    assert rallocator.enable({arguments}, required=False) is False
assert [(warning.category, str(warning.message)) for warning in seen] == [(RuntimeWarning, raised)]
assert not rallocator.is_enabled() and rallocator.attached() is None
"""
    return succeed(code, environment=SIMULATED if environment is None else environment)


# --- attaching ------------------------------------------------------------------------------------------------------


def test_enable_makes_torch_use_rallocator() -> None:
    assert attached("""
        print(rallocator.is_enabled(), rallocator.attached(), torch.cuda.get_allocator_backend())
        print(torch.cuda.is_initialized())
    """) == ["True pluggable pluggable", "False"]


def test_second_call_with_equal_settings_does_nothing_and_with_others_is_an_error() -> None:
    printed = attached("""
        print(rallocator.enable(), rallocator.enable(attach="pluggable"))
        try:
            rallocator.enable("policy:native")
        except rallocator.errors.ConfigError as error:
            print(error)
        try:
            rallocator.enable("policy:native", required=False)
        except rallocator.errors.ConfigError:
            print("an error with required=False too")
    """)
    assert printed[0] == "True True"
    assert "already enabled" in printed[1]
    assert printed[2] == "an error with required=False too"


def test_enable_does_not_initialise_the_driver() -> None:
    library = build_library("fake_libcuda.c", "-Wl,-soname,libcuda.so.1")
    named = library.with_name("libcuda.so.1")
    named.unlink(missing_ok=True)
    named.symlink_to(library)
    printed = succeed(
        """
        import ctypes, os
        import rallocator
        from rallocator import _gpu

        _gpu._device_traces = lambda root: ["a device"]
        os.dup2(1, 2)
        assert rallocator.enable(attach="pluggable")
        rallocator.stats(), rallocator.snapshot(), rallocator.reset_peak_stats(), rallocator.empty_cache()
        print("enabled", flush=True)
        ctypes.CDLL("libcuda.so.1").cuInit(0)
        """,
        environment={"LD_LIBRARY_PATH": str(named.parent)},
    )
    # The second line shows that a call of the driver would have been seen.
    assert printed.splitlines() == ["enabled", "cuInit was called"]


def test_hook_that_torch_does_not_reach_is_found_out() -> None:
    printed = succeed(
        """
        import rallocator
        from rallocator import _core

        addresses = _core._hook_addresses()
        addresses["set_end_allocate_to_pool_fn"] = addresses["set_release_pool"]
        _core._hook_addresses = lambda: addresses
        try:
            rallocator.enable(attach="pluggable", required=False)
        except rallocator.errors.RallocatorError as error:
            print(error)
        """,
        environment=SIMULATED,
    )
    assert "does not call rallocator as expected" in printed


def test_torch_without_one_of_the_hooks_is_refused() -> None:
    message = enabling_fails("""
        from rallocator import _core

        addresses = _core._hook_addresses() | {"set_a_hook_that_is_gone": 1}
        _core._hook_addresses = lambda: addresses
    """)
    assert message.startswith("TorchNotSupportedError: ")
    assert "set_a_hook_that_is_gone" in message


# --- reasons not to attach ------------------------------------------------------------------------------------------


def test_enable_after_cuda_was_initialised_is_too_late() -> None:
    message = enabling_fails("""
        import torch
        torch.cuda._initialized = True
    """)
    assert message.startswith("TooLateError: ")
    for advice in ("right after `import torch`", "restart the kernel", "rallocator run", _torch.STAYS):
        assert advice in message


def test_enable_after_torch_used_its_allocator_from_cxx_is_too_late() -> None:
    # What torch answers once C++ code has initialised the allocator behind Python's back.
    message = enabling_fails("""
        import torch
        def refuse(allocator):
            raise RuntimeError("Can't swap an already initialized allocator")
        torch.cuda.memory.change_current_allocator = refuse
    """)
    assert message.startswith("TooLateError: ")
    assert "already initialized allocator" in message


def test_enable_beside_another_foreign_allocator_is_refused() -> None:
    message = enabling_fails("""
        import torch
        from rallocator import _core
        other = torch.cuda.memory.CUDAPluggableAllocator(_core.__file__, "rallocator_malloc", "rallocator_free")
        torch.cuda.memory.change_current_allocator(other)
    """)
    assert message.startswith("TooLateError: ")
    assert "pluggable" in message


def test_enable_in_the_child_of_a_process_with_cuda_is_a_fork_error() -> None:
    message = enabling_fails("""
        import torch
        torch.cuda._is_in_bad_fork = lambda: True
    """)
    assert message.startswith("ForkError: ")
    assert "spawn" in message


def test_machine_without_a_driver_has_no_gpu() -> None:
    message = enabling_fails("from rallocator import _gpu; _gpu._LIBRARY = 'libcuda-is-not-here.so'", environment={})
    assert message.startswith("NoGpuError: ")
    assert message.endswith(_torch.STAYS)


def test_bridge_that_is_not_there_is_refused_and_the_way_to_make_one_named() -> None:
    message = enabling_fails(
        "", arguments="attach='bridge'", environment=SIMULATED | {"RALLOCATOR_BRIDGE": "/nowhere.so"}
    )
    assert message.startswith("BridgeError: ")
    assert "rallocator build-bridge" in message


def test_missing_torch_is_told_how_to_get_it() -> None:
    message = enabling_fails("import sys; sys.modules['torch'] = None")
    assert message.startswith("TorchNotSupportedError: ")
    assert "Install a CUDA build" in message


# --- memory through torch -------------------------------------------------------------------------------------------


def test_memory_that_torch_obtains_shows_in_our_statistics() -> None:
    assert attached("""
        address = allocate(3 * MiB, 0)
        print(address != 0, allocated() == 3 * MiB)
        release(address)
        print(allocated())
    """) == ["True True", "0"]


def test_out_of_memory_is_torchs_own_exception_and_the_next_request_works() -> None:
    printed = attached("""
        try:
            allocate(20 << 30, 0)
        except torch.OutOfMemoryError as error:
            print(str(error).splitlines()[0])
            print(isinstance(error, RuntimeError), type(error) is torch.cuda.OutOfMemoryError)
        print(allocate(MiB, 0) != 0, rallocator.stats()["num_ooms"])
    """)
    assert printed[0].startswith("CUDA out of memory. Tried to allocate 20.00 GiB.")
    assert printed[1:] == ["True True", "True 1"]


def test_exceptions_leak_no_memory() -> None:
    # Without its destructor each exception would leave 1 KB behind: 20 MB here.
    printed = attached("""
        import resource

        def fail(times):
            for _ in range(times):
                try:
                    allocate(20 << 30, 0)
                except torch.OutOfMemoryError:
                    pass
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        warm = fail(2_000)
        print(fail(20_000) - warm)
    """)
    assert int(printed[0]) < 4_000, "KiB of growth"


def test_any_other_failure_is_a_runtime_error_with_a_reason() -> None:
    printed = attached("""
        for fraction, device in ((1.5, 0), (0.5, -1)):
            try:
                torch._C._cuda_setMemoryFraction(fraction, device)
            except RuntimeError as error:
                print(type(error) is RuntimeError, error)
    """)
    assert [line.split()[0] for line in printed] == ["True", "True"]
    assert "1.5" in printed[0]
    assert "-1" in printed[1]


def test_size_zero_is_null_and_counts_nothing() -> None:
    assert attached("""
        print(allocate(0, 0), rallocator.stats()["allocation.all.allocated"])
    """) == ["0 0"]


def test_memory_belongs_to_the_device_of_the_request() -> None:
    assert attached("""
        import ctypes

        ctypes.CDLL(None).cudaSetDevice(1)
        address = allocate(MiB, 0)
        print(allocated(0), allocated(1) > 0)
        release(address)
        print(allocated(1))
    """) == ["0 True", "0"]


FREE = """
import ctypes
from rallocator import _core

free = ctypes.CDLL(_core.__file__).rallocator_free
free.argtypes, free.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p), None
"""


def test_free_of_null_foreign_and_repeated_pointers_is_quiet_and_counted() -> None:
    assert attached(
        FREE
        + """
address = allocate(MiB, 0)
free(None, 0, 0, None)
free(0x1234, 8, 0, None)
free(address + 512, 8, 0, None)
free(address, MiB, 0, None)
free(address, MiB, 0, None)
counters = _core._quiet_counters()
print(allocated(), counters["foreign_pointers"], counters["repeated_frees"], counters["caught_panics"])
"""
    ) == ["0 2 1 0"]


def test_wrong_size_device_and_stream_in_free_are_not_trusted() -> None:
    assert attached(
        FREE
        + """
addresses = [allocate(MiB, 0) for _ in range(4)]
for address, size, device, stream in zip(addresses, (0, 1 << 60, 7, MiB), (1, 0, -1, 99), (5, 0, None, 1 << 40)):
    free(address, size, device, stream)
print(allocated(), sum(_core._quiet_counters().values()))
"""
    ) == ["0 0"]


def test_memory_may_be_freed_by_any_thread() -> None:
    assert attached("""
        import threading

        addresses = [allocate(MiB, 0) for _ in range(64)]
        threads = [threading.Thread(target=lambda part=part: [release(a) for a in part])
                   for part in (addresses[0::4], addresses[1::4], addresses[2::4], addresses[3::4])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(allocated())
    """) == ["0"]


def test_pool_filter_of_torch_is_kept_and_asked_later() -> None:
    assert attached("""
        import threading

        pool = torch.cuda.graph_pool_handle()
        torch._C._cuda_beginAllocateCurrentThreadToPool(0, pool)
        inside = allocate(MiB, 0)
        thread = threading.Thread(target=lambda: addresses.append(allocate(MiB, 0)))
        addresses = []
        thread.start()
        thread.join()
        torch._C._cuda_endAllocateToPool(0, pool)
        pools = {}
        for segment in rallocator.snapshot()["segments"]:
            for block in segment["blocks"]:
                pools[block["address"]] = segment["segment_pool_id"]
        print(pools[inside] == tuple(pool), pools[addresses[0]])
        release(inside)
        torch._C._cuda_releasePool(0, pool)
    """) == ["True (0, 0)"]


# --- forks and the end of the process -------------------------------------------------------------------------------

IN_CHILD = """
import os

def in_child(work):
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_child_forked_before_the_gpu_was_used_may_use_it() -> None:
    assert attached(
        IN_CHILD
        + """
in_child(lambda: print(allocate(MiB, 0) != 0, flush=True))
print(rallocator.stats()["allocation.all.allocated"])
"""
    ) == ["True", "0"]


def test_child_of_a_process_that_used_the_gpu_gets_a_clear_error_and_frees_nothing() -> None:
    printed = attached(
        IN_CHILD
        + FREE
        + """
address = allocate(MiB, 0)

def work():
    free(address, MiB, 0, None)
    torch._C._cuda_emptyCache()
    print(rallocator.stats(), flush=True)
    try:
        allocate(MiB, 0)
    except RuntimeError as error:
        print(error, flush=True)

in_child(work)
print(allocated() >= MiB)
release(address)
print(allocated())
"""
    )
    assert printed[0] == "{}"
    assert "'spawn'" in printed[1]
    assert printed[2:] == ["True", "0"]


def test_child_forked_while_another_thread_allocates_does_not_hang() -> None:
    # In the child our own function is called: torch's way to it has a lock of torch's own.
    assert attached(
        IN_CHILD
        + FREE
        + """
import threading

running = True

def churn():
    while running:
        release(allocate(MiB, 0))

thread = threading.Thread(target=churn)
address = allocate(MiB, 0)
thread.start()
for _ in range(50):
    in_child(lambda: free(address, MiB, 0, None))
running = False
thread.join()
release(address)
print(allocated())
"""
    ) == ["0"]


def test_process_with_live_memory_ends_quietly() -> None:
    assert attached("allocate(MiB, 0); allocate(64 * MiB, 1 << 20)") == []


def test_free_after_the_end_has_begun_does_nothing() -> None:
    client = build_library("api_client.c", link_core=True)
    assert (
        attached(f"""
        import ctypes
        ctypes.CDLL({str(client)!r}).free_at_exit(ctypes.c_void_p(0x1234))
        allocate(MiB, 0)
    """)
        == []
    )
