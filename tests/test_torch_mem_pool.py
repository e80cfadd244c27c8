"""torch.cuda.MemPool with an allocator of the program's own, through the bridge, on a machine without a GPU.

The allocator is tests/c/own_allocator.cpp, or a pair of Python functions. What a kernel does with such memory is tested
in tests/gpu/test_mem_pool.py.
"""

from __future__ import annotations

import textwrap

import pytest

from tests import torch_programs
from tests.processes import build_library
from tests.torch_programs import only_bridge

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("route"), only_bridge]

BEGIN = """
import contextlib, gc
@contextlib.contextmanager
def use_mem_pool(pool, device=0):
    # torch's own asks the driver besides, in some releases, whether a stream is capturing.
    torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool.id)
    try:
        yield
    finally:
        torch._C._cuda_endAllocateToPool(device, pool.id)
        torch._C._cuda_releasePool(device, pool.id)
own_path = {path!r}
own = ctypes.CDLL(own_path)
count = lambda name: ctypes.c_int.in_dll(own, name).value
def mode(value):
    ctypes.c_int.in_dll(own, "own_mode").value = value
def own_allocator():
    return memory.CUDAPluggableAllocator(own_path, "own_alloc", "own_free").allocator()
def sizes(pool):
    return sorted(segment["total_size"] // MiB for segment in pool.snapshot())
def counts():
    return count("own_asked"), count("own_given_back"), own.own_held(), count("own_mistakes")
"""

POLICIES = ["policy:native", "policy:expandable", "policy:rallocator"]


def play(code: str, settings: str = "policy:rallocator") -> list[str]:
    """Run a program that has an allocator of its own."""
    own = str(build_library("own_allocator.cpp"))
    return torch_programs.play(BEGIN.format(path=own) + textwrap.dedent(code), settings)


@pytest.mark.parametrize("settings", POLICIES)
def test_pool_asks_its_allocator_for_torchs_segments_and_gives_them_back_when_it_is_dropped(settings: str) -> None:
    assert play(
        """
        pool = torch.cuda.MemPool(own_allocator())
        print(pool.use_count(), counts())
        with use_mem_pool(pool):
            held = [allocate(MiB, 0) for _ in range(3)] + [allocate(3 * MiB, 0), allocate(4 * MiB, 0)]
            print(pool.use_count(), sizes(pool), counts())
        outside = allocate(MiB, 0)
        print(pool.use_count(), sizes(pool), counts())
        print({segment["is_expandable"] for segment in pool.snapshot()})
        print({segment["segment_pool_id"] == pool.id for segment in pool.snapshot()})
        reserved = torch.cuda.memory_reserved()
        for address in held:
            release(address)
        torch.cuda.empty_cache()
        print(counts(), torch.cuda.memory_reserved() == reserved)
        del pool
        gc.collect()
        print(counts(), (reserved - torch.cuda.memory_reserved()) // MiB)
        release(outside)
        """,
        settings,
    ) == [
        "1 (0, 0, 0, 0)",
        "2 [2, 2, 20] (3, 0, 3, 0)",
        "1 [2, 2, 20] (3, 0, 3, 0)",
        "{False}",
        "{True}",
        "(3, 0, 3, 0) True",
        "(3, 3, 0, 0) 24",
    ]


def test_memory_outlives_its_pool_and_the_allocator_outlives_both() -> None:
    assert play("""
        pool = torch.cuda.MemPool(own_allocator())
        with use_mem_pool(pool):
            held = allocate(3 * MiB, 0)
        del pool
        gc.collect()
        torch.cuda.empty_cache()
        print(counts())
        release(held)
        torch.cuda.empty_cache()
        print(counts(), torch.cuda.memory_reserved())
    """) == ["(1, 0, 1, 0)", "(1, 1, 0, 0) 0"]


def test_allocator_is_told_the_device_and_the_stream_of_the_request() -> None:
    assert play("""
        def last():
            return count("own_asked"), count("own_last_device"), ctypes.c_void_p.in_dll(own, "own_last_stream").value
        pool = torch.cuda.MemPool(own_allocator())
        with use_mem_pool(pool):
            held = [allocate(MiB, 0x1230)]
        print(last() == (1, 0, 0x1230))
        torch.cuda.set_device(1)
        other = torch.cuda.MemPool(own_allocator())
        with use_mem_pool(other, device=1):
            held.append(allocate(MiB, 0))
            print(last() == (2, 1, None))
            torch.cuda.set_device(0)
            held.append(allocate(MiB, 0))
            print(last() == (2, 1, None))
            torch.cuda.set_device(1)
        release(held[1])
        del other
        gc.collect()
        torch.cuda.set_device(0)
        print(counts())
        release(held[0])
        release(held[2])
        del pool
        gc.collect()
        print(counts())
    """) == ["True", "True", "True", "(2, 1, 1, 0)", "(2, 2, 0, 0)"]


def test_allocator_without_memory_is_torchs_error_and_is_asked_again_after_the_cache_was_emptied() -> None:
    printed = play("""
        pool = torch.cuda.MemPool(own_allocator())
        mode(1)
        with use_mem_pool(pool):
            try:
                allocate(3 * MiB, 0)
            except torch.OutOfMemoryError as error:
                print(str(error).splitlines()[0][:55])
                print(str(error).splitlines()[-1].replace(str(pool.id), "ID"))
            print(count("own_asked") > 1, torch.cuda.memory_stats()["num_ooms"], torch.cuda.memory_reserved())
            mode(0)
            release(allocate(3 * MiB, 0))
        print(counts()[1:])
    """)
    assert printed == [
        "CUDA out of memory. Tried to allocate 3.00 MiB. GPU 0 h",
        "The allocator of the private pool ID gave no memory, and no other serves that pool.",
        "True 1 0",
        "(0, 1, 0)",
    ]


def test_what_the_allocator_raises_reaches_the_program_as_it_is() -> None:
    assert play("""
        pool = torch.cuda.MemPool(own_allocator())
        for number in (2, 0, 2):
            mode(number)
            with use_mem_pool(pool):
                try:
                    held = allocate((3 if number == 0 else 30) * MiB, 0)
                except IndexError as error:
                    print(str(error).splitlines()[0])
        print(torch.cuda.memory_reserved() // MiB, torch.cuda.memory_stats()["num_ooms"])
        del pool
        gc.collect()
        release(held)
        mode(3)
        try:
            torch.cuda.empty_cache()
        except IndexError as error:
            print(str(error).splitlines()[0])
        print(torch.cuda.memory_reserved() // MiB, own.own_held())
        try:
            allocate(2 << 30, 0)
        except torch.OutOfMemoryError:
            print("out of memory")
        release(allocate(3 * MiB, 0))
    """) == [
        "the other library is full of eels",
        "the other library is full of eels",
        "20 0",
        "the other library keeps its eels",
        "20 1",
        "out of memory",
    ]


def test_allocator_that_gives_what_it_gave_is_refused_and_nothing_is_harmed() -> None:
    assert play("""
        pool = torch.cuda.MemPool(own_allocator())
        with use_mem_pool(pool):
            first = allocate(3 * MiB, 0)
            mode(4)
            try:
                allocate(30 * MiB, 0)
            except RuntimeError as error:
                print("where memory lies already" in str(error))
            mode(0)
            second = allocate(30 * MiB, 0)
        print(sizes(pool))
        release(first)
        release(second)
        del pool
        gc.collect()
        print(torch.cuda.memory_reserved(), own.own_held(), count("own_mistakes"))
    """) == ["True", "[20, 30]", "0 0 0"]


def test_rallocator_as_the_allocator_of_its_own_pool_is_refused_and_asks_for_nothing_twice() -> None:
    assert play("""
        ours = memory.CUDAPluggableAllocator(_core.__file__, "rallocator_malloc", "rallocator_free").allocator()
        pool = torch.cuda.MemPool(ours)
        with use_mem_pool(pool):
            try:
                allocate(3 * MiB, 0)
            except RuntimeError as error:
                print("where memory lies already" in str(error))
        print(torch.cuda.memory_allocated())
        release(allocate(3 * MiB, 0))
    """) == ["True", "0"]


def test_pools_share_one_allocator_and_one_serves_others_when_memory_is_out() -> None:
    assert play("""
        torch._C._cuda_setMemoryFraction(80 / 1024, 0)
        allocator = own_allocator()
        spared, used = torch.cuda.MemPool(allocator), torch.cuda.MemPool(allocator, use_on_oom=True)
        addresses = []
        for pool in (spared, used):
            with use_mem_pool(pool):
                addresses.append(allocate(40 * MiB, 0))
        for address in addresses:
            release(address)
        served = allocate(30 * MiB, 0)
        print(served == addresses[1])
        try:
            allocate(30 * MiB, 0)
        except torch.OutOfMemoryError:
            print("out of memory")
        release(served)
        with use_mem_pool(used):
            again = allocate(20 * MiB, 0)
        print(again == addresses[1])
        release(again)
        del pool, spared, used
        gc.collect()
        print(counts(), torch.cuda.memory_reserved())
    """) == ["True", "out of memory", "True", "(2, 2, 0, 0) 0"]


def test_functions_of_python_may_be_the_allocator_and_may_use_torch_meanwhile() -> None:
    assert play("""
        import threading
        class State:
            head, freed, inner = 1 << 45, [], []
        @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        def alloc(size, device, stream):
            State.inner.append(allocate(MiB, 0))
            torch.cuda.memory_stats()
            # Another thread allocates, in no pool, while this one is inside its allocator.
            other = threading.Thread(target=lambda: State.inner.append(allocate(50 * MiB, 0)))
            other.start()
            other.join()
            State.head += size
            return State.head - size
        @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        def free(address, size, device, stream):
            torch.cuda.empty_cache()
            State.freed.append(address)
        addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in (alloc, free)]
        memory._record_memory_history("all", stacks="python")
        pool = torch.cuda.MemPool(torch._C._cuda_customAllocator(*addresses))
        with use_mem_pool(pool):
            held = allocate(3 * MiB, 0)
        print(held == 1 << 45, sizes(pool), len(State.inner))
        events = [event for event in memory._snapshot()["device_traces"][0] if event["addr"] == held]
        print([(event["action"], len(event["frames"]) > 0) for event in events])
        memory._record_memory_history(None)
        for address in (held, *State.inner):
            release(address)
        del pool
        gc.collect()
        print(State.freed == [1 << 45], torch.cuda.memory_allocated())
        torch.cuda.empty_cache()
        print(torch.cuda.memory_reserved())
    """) == ["True [20] 2", "[('segment_alloc', True), ('alloc', True)]", "True 0", "0"]


def test_pool_that_another_library_registers_stays_in_place_and_has_blocks_of_one_piece() -> None:
    assert play("""
        import rallocator
        held = [allocate(2 * MiB, 0) for _ in range(10)]
        for address in held[::2]:
            release(address)
        pool, other = torch.cuda.MemPool(), torch.cuda.MemPool()
        rallocator.restrict_moves(pool, "contiguous")
        before = torch.cuda.memory_reserved()
        with use_mem_pool(pool):
            held = [allocate(10 * MiB, 0), allocate(3 * MiB, 0)]
        print(sizes(pool), torch.cuda.memory_reserved() - before == 14 * MiB)
        release(held[0])
        with use_mem_pool(pool):
            print(allocate(10 * MiB, 0) == held[0])
        with use_mem_pool(other):
            allocate(10 * MiB, 0)
        print(torch.cuda.memory_reserved() - before == 14 * MiB)
        for asked, moving in ((other, "off"), ((0, 99), "off"), (pool, "never")):
            try:
                rallocator.restrict_moves(asked, moving)
            except Exception as error:
                print(type(error).__name__, str(error).partition(") ")[2] or error)
        rallocator.restrict_moves(pool.id, "off")
    """) == [
        "[4, 10] True",
        "True",
        "True",
        "RallocatorError has memory already: say it before the first request",
        "RallocatorError device 0 has no private pool (0, 99): make it first, or name the device that it is on",
        'ValueError moving must be "off" or "contiguous", not "never"',
    ]
