"""torch's memory history and snapshots, recorded by rallocator: the real torch on the simulated driver."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from rallocator._replay import ReplaySettings, replay_file
from rallocator._snapshot_checker import check
from tests.torch_programs import only_bridge, only_pluggable, play

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("route")]

RECORD = """
def actions(device=0):
    return [event["action"] for event in memory._snapshot()["device_traces"][device]]

def churn():
    release(allocate(MiB, 0))

def python(frames):
    return [frame for frame in frames if frame["filename"] == "<string>"]

churn()
"""


def test_history_has_torchs_events_times_and_stacks() -> None:
    printed = play(
        RECORD
        + """
import time
memory._record_memory_history()
before = time.time_ns() // 1000
churn()
held = allocate(3 * MiB, 0)
trace = memory._snapshot()["device_traces"][0]
print([event["action"] for event in trace])
times = [event["time_us"] for event in trace]
print(times == sorted(times), abs(times[0] - before) < 60_000_000)
first = python(trace[0]["frames"])
print([frame["name"] for frame in first], first[0]["filename"], first[0]["line"] > 0)
print([frame["name"] for frame in python(trace[2]["frames"])])
print({event["compile_context"] for event in trace}, {event["user_metadata"] for event in trace})
blocks = [block for segment in memory._snapshot()["segments"] for block in segment["blocks"]]
print([len(python(block["frames"])) for block in blocks if block["state"] == "active_allocated"])
"""
    )
    assert printed[0] == str(["alloc", "free_requested", "free_completed", "segment_alloc", "alloc"])
    assert printed[1:4] == ["True True", "['churn', '<module>'] <string> True", "['churn', '<module>']"]
    assert printed[4:] == ["{'N/A'} {''}", "[1]"]


def test_memory_that_is_freed_as_a_function_called_from_c_ends_has_a_stack() -> None:
    """At that moment no Python frame runs in Python 3.12: `sys._getframe` crashed."""
    printed = play(
        RECORD
        + """
import atexit, ctypes

# A capsule whose end calls the hook itself: no Python function runs in between, as none does for a tensor.
new = ctypes.pythonapi.PyCapsule_New
new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
hook = ctypes.cast(ctypes.CDLL(rallocator._core.__file__).rallocator_free, ctypes.c_void_p).value

def ends(_):
    capsule = new(1, None, hook)

memory._record_memory_history()
print(list(map(ends, range(3))))
churn()
print([frame["name"] for frame in python(memory._snapshot()["device_traces"][0][0]["frames"])])
"""
    )
    assert printed == ["[None, None, None]", "['churn', '<module>']"]


def test_snapshot_shows_the_marks_of_those_before_it_and_not_its_own() -> None:
    printed = play(
        RECORD
        + """
memory._record_memory_history()
memory._set_memory_metadata("a part")
churn()
memory._set_memory_metadata("")
first = memory._snapshot()["device_traces"][0]
print({event["user_metadata"] for event in first})
print([event["action"] for event in first], actions()[len(first):], actions()[len(first):])
"""
    )
    assert printed == [
        "{'a part'}",
        "['alloc', 'free_requested', 'free_completed'] ['snapshot'] ['snapshot', 'snapshot']",
    ]


@pytest.mark.parametrize("policy", ["native", "expandable", "rallocator"])
def test_memory_that_goes_back_names_who_asked_for_it(policy: str) -> None:
    printed = play(
        RECORD
        + """
def give_back():
    memory.empty_cache()

for context in ("all", "alloc", "state"):
    churn()
    memory._record_memory_history(context=context)
    give_back()
    (event,) = memory._snapshot()["device_traces"][0]
    print(event["action"], [frame["name"] for frame in python(event.get("frames", []))])
    memory._record_memory_history(None)
""",
        f"policy:{policy}",
    )
    action = "segment_free" if policy == "native" else "segment_unmap"
    assert printed == [f"{action} ['give_back', '<module>']", f"{action} []", f"{action} []"]


def test_recording_does_as_its_arguments_say() -> None:
    printed = play(
        RECORD
        + """
def stacks(device=0):
    # Where no stack was taken, torch leaves the key out.
    trace = memory._snapshot()["device_traces"][device]
    return [len(python(event.get("frames", []))) for event in trace]

memory._record_memory_history(context=None); churn()
print(stacks())
memory._record_memory_history(context="state", clear_history=True); churn()
held = allocate(MiB, 0)
print(stacks(), memory._snapshot()["segments"][0]["blocks"][0]["frames"] != [])
memory._record_memory_history(context="alloc", clear_history=True, stacks="python"); churn()
print(stacks())
memory._record_memory_history(max_entries=2); churn(); churn()
latest = memory._snapshot()["device_traces"][0]
print(len(latest), [event["action"] for event in latest])
memory._record_memory_history(enabled="state", clear_history=True); churn(); churn()
print(len(memory._snapshot()["device_traces"][0]))
memory._record_memory_history(False); churn()
print(memory._snapshot()["device_traces"], torch._C._cuda_isHistoryEnabled())
memory._record_memory_history(True, trace_alloc_max_entries=10, trace_alloc_record_context=True); churn()
print(actions(), torch._C._cuda_isHistoryEnabled())
memory._record_memory_history(None)
print(memory._snapshot()["device_traces"])
for arguments in ({"enabled": "some"}, {"context": "some"}, {"stacks": "some"}):
    try:
        memory._record_memory_history(**arguments)
    except RuntimeError as error:
        print(error)
"""
    )
    three = "['alloc', 'free_requested', 'free_completed']"
    assert printed[0] == "[0, 0, 0]"
    assert printed[1] == "[0, 0, 0, 0] True"
    assert printed[2] == "[2, 2, 2]"
    assert printed[3] == "2 ['free_requested', 'free_completed']"
    assert printed[4] == "1"
    assert printed[5] == "[[], []] False"
    assert printed[6] == f"{three} True"
    assert printed[7] == "[[], []]"
    assert len(printed[8:]) == 3, "each wrong argument is an error of torch's"


@only_pluggable
def test_what_is_not_recorded_is_said_once_and_the_rest_is_recorded() -> None:
    printed = play(
        RECORD
        + """
import inspect, warnings

form = inspect.signature(memory._record_memory_history_impl).parameters
wanted = [name for name in ("compile_context", "record_pinned_host_memory") if name in form]
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for _ in range(2):
        memory._record_memory_history(**dict.fromkeys(wanted, True), global_record_annotations=True)
print(len(wanted), sorted(str(warning.message).partition(":")[0] for warning in seen))
churn()
print(actions())
"""
    )
    pinned = ["record_pinned_host_memory"] * (int(printed[0][0]) - 1)
    assert printed[0][2:] == str(["compile_context and global_record_annotations", *pinned])
    assert printed[1] == "['alloc', 'free_requested', 'free_completed']"


def test_skipped_actions_are_not_recorded() -> None:
    printed = play(
        RECORD
        + """
from rallocator import _torch
if _torch.release(torch.__version__) >= (2, 11):
    memory._record_memory_history(skip_actions=["free_requested", "snapshot"])
    churn()
    print([event["action"] for event in memory._snapshot()["device_traces"][0]])
    try:
        memory._record_memory_history(skip_actions=["free"])
    except ValueError as error:
        print(error)
else:
    print(["alloc", "free_completed"])
    print("there is no action")
"""
    )
    assert printed[0] == "['alloc', 'free_completed']"
    assert printed[1].startswith("there is no action")


@pytest.mark.parametrize("policy", ["native", "expandable", "rallocator"])
def test_dumped_snapshot_is_free_of_contradictions_opens_in_torchs_tool_and_replays_in_ours(
    policy: str, tmp_path: Path
) -> None:
    path = tmp_path / "snapshot.pickle"
    printed = play(
        f"""
        import random, subprocess, sys
        memory._record_memory_history(max_entries=100_000)
        random.seed(1)
        held = [allocate(5 * MiB, 0)]
        for step in range(500):
            if held and random.random() < 0.5:
                release(held.pop(random.randrange(len(held))))
            else:
                held.append(allocate(random.randint(1, 8 * MiB), 0))
            if step == 250:
                torch._C._cuda_emptyCache()
        memory._dump_snapshot({str(path)!r})
        done = subprocess.run([sys.executable, "-m", "torch.cuda._memory_viz", "stats", {str(path)!r}],
                              capture_output=True, text=True)
        print(done.returncode, "allocated" in done.stdout, done.stderr[-300:].replace(chr(10), " "))
        """,
        settings=f"policy:{policy}",
    )
    assert printed[0].startswith("0 True"), printed
    snapshot = _replay_load(path)
    assert check(snapshot) > 700
    result = replay_file(path, ReplaySettings.check(["native", "expandable"]))
    assert [subject.history.recorded_policy for subject in result.subjects] == [policy]
    rows = result.rows
    assert [row.replayable for row in rows] == [True, True]
    assert all(row.ooms == 0 and (row.peak_allocated or 0) > 5 << 20 for row in rows)


def _replay_load(path: Path) -> dict[str, object]:
    content: dict[str, object] = pickle.loads(path.read_bytes())  # noqa: S301 — written by the test.
    return content


def test_labels_annotations_and_tracebacks_are_recorded() -> None:
    printed = play("""
        from rallocator import _torch
        import threading

        release_ = _torch.release(torch.__version__)
        if release_ < (2, 14):
            print("step 1"); print("['alloc', 'annotate'] ['step 1', 'a note']"); print("True None True")
            raise SystemExit
        allocate(MiB // 2, 0)
        memory._record_memory_history()
        memory._set_memory_metadata("step 1")
        print(memory._get_memory_metadata())
        held = allocate(MiB // 2, 0)
        torch._C._cuda_annotateMemory(held, "a note")
        trace = memory._snapshot()["device_traces"][0]
        print([event["action"] for event in trace], [event["user_metadata"] for event in trace])
        inner = any(frame["filename"] == "<string>" for frame in memory._allocation_traceback(held))
        print(inner, memory._allocation_traceback(0x1000), memory._memory_metadata_supported())
        other = []
        thread = threading.Thread(target=lambda: other.append(memory._get_memory_metadata()))
        thread.start(); thread.join()
        assert other == [""]
    """)
    assert printed == ["step 1", "['alloc', 'annotate'] ['step 1', 'a note']", "True None True"]


@only_pluggable
def test_threads_without_the_gil_record_while_others_take_snapshots() -> None:
    # Each thread that allocates holds no GIL when it enters the hook, and wants it for its stack.
    printed = play("""
        import ctypes, threading
        from rallocator import _core

        library = ctypes.CDLL(_core.__file__)
        malloc, free = library.rallocator_malloc, library.rallocator_free
        malloc.argtypes, malloc.restype = (ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        free.argtypes, free.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p), None
        memory._record_memory_history(max_entries=1000)

        def churn_in_a_thread():
            for size in range(1, 400):
                free(malloc(size * 997, 0, None), 0, 0, None)

        threads = [threading.Thread(target=churn_in_a_thread) for _ in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            picture = memory._snapshot()
        for thread in threads:
            thread.join()
        trace = memory._snapshot()["device_traces"][0]
        frames = [event["frames"][0]["name"] for event in trace if event.get("frames")]
        print(len(trace), set(frames))
    """)
    assert printed == ["1000 {'churn_in_a_thread'}"]


@only_bridge
def test_threads_record_while_others_take_snapshots_and_old_stacks_are_forgotten() -> None:
    printed = play("""
        import threading

        memory._record_memory_history(max_entries=500)

        def churn_in_a_thread():
            for size in range(1, 1500):
                release(allocate(size * 97, 0))

        threads = [threading.Thread(target=churn_in_a_thread) for _ in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            picture = memory._snapshot()
        for thread in threads:
            thread.join()
        trace = memory._snapshot()["device_traces"][0]
        of_events = [event for event in trace if event["action"] != "snapshot"]
        names = [{frame["name"] for frame in event["frames"]} for event in of_events]
        print(len(trace), all("churn_in_a_thread" in found for found in names))
    """)
    assert printed == ["500 True"]


def test_stacks_are_forgotten_when_recording_ends() -> None:
    printed = play("""
        import gc, weakref

        def churn_from_somewhere_new():
            names = {"allocate": allocate, "release": release}
            exec("def somewhere():\\n    release(allocate(1 << 20, 0))", names)
            names["somewhere"]()
            return weakref.ref(names["somewhere"].__code__)

        memory._record_memory_history()
        places = [churn_from_somewhere_new() for _ in range(100)]
        print(sum(place() is not None for place in places))
        memory._record_memory_history(None)
        torch._C._profiler.gather_traceback(python=True, script=False, cpp=False)  # torch lets go of dead stacks then.
        gc.collect()
        print(sum(place() is not None for place in places))
    """)
    assert printed == ["100", "0"]


@only_bridge
def test_ranges_and_what_the_compiler_says_are_recorded() -> None:
    printed = play("""
        memory._record_memory_history(global_record_annotations=True, compile_context=True)
        with torch.profiler.record_function("a range"):
            torch._C._cuda_cudaCachingAllocator_raw_delete(allocate(MiB, 0))
        snapshot = memory._snapshot()
        print([(entry["name"], entry["stage"], entry["device"]) for entry in snapshot["external_annotations"]])
        print({event["compile_context"] for event in snapshot["device_traces"][0]})
        times = [entry["time_us"] for entry in snapshot["external_annotations"]]
        first = snapshot["device_traces"][0][0]["time_us"]
        print(times[0] <= first <= times[1])
        memory._record_memory_history(None)
        print(memory._snapshot()["external_annotations"])
    """)
    assert printed == ["[('a range', 'START', 0), ('a range', 'END', 0)]", "{'N/A'}", "True", "[]"]


def test_stack_is_taken_while_an_exception_is_on_its_way() -> None:
    assert play("""
        memory._record_memory_history()

        class Holder:
            def __init__(self): self.address = allocate(MiB, 0)
            def __del__(self): release(self.address)

        def fail():
            holder = Holder()
            raise KeyError("mine")

        try:
            fail()
        except KeyError as error:
            print(repr(error))
        print(torch.cuda.memory_allocated(0))
    """) == ["KeyError('mine')", "0"]
