"""Reading recorded histories: what torch writes, and what nobody should be able to do with a file."""

from __future__ import annotations

import gzip
import io
import lzma
import pickle
import pickletools
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rallocator import _core
from rallocator._replay.history import NO_ALLOCATIONS, NO_FREES, STATE_ONLY, History, Streams, histories
from rallocator._replay.reader import read_recording
from rallocator._replay.steps import Kind
from rallocator.errors import SnapshotError
from tests.histories import MIB, TRACES, event, free, segment, write, write_history
from tests.processes import read_recordings_within

ONE_BLOCK = {"segments": [], "device_traces": [[event("alloc", 4096, 700), *free(4096, 700)]]}


def read(path: Path, streams: Streams = Streams.KEEP) -> History:
    """The only history of a file."""
    (history,) = histories(read_recording(path), streams)
    return history


def kinds(history: History) -> list[Kind]:
    return [Kind(kind) for kind in history.steps.kinds]


# Containers and layouts.


@pytest.mark.parametrize("protocol", range(6))
def test_every_pickle_protocol_is_read(tmp_path: Path, protocol: int) -> None:
    history = read(write(tmp_path / "snapshot.pickle", ONE_BLOCK, protocol))
    assert kinds(history) == [Kind.ALLOCATE, Kind.FREE]
    assert history.steps.sizes == [700, 0]
    assert history.events == 3


@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress], ids=["gzip", "xz"])
def test_compression_is_told_by_content_and_not_by_name(tmp_path: Path, compress: Any) -> None:
    path = tmp_path / "snapshot.bin"
    packed = compress(pickle.dumps(ONE_BLOCK))
    path.write_bytes(packed)
    assert read(path).events == 3
    path.write_bytes(packed + compress(b"\0" * 8) + b"\0" * 4)
    assert read(path).events == 3, "a second member, and zero bytes at the end"


def test_zero_bytes_after_the_pickle_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(ONE_BLOCK) + b"\0\0\0")
    assert read(path).events == 3


def test_a_bare_list_of_segments_is_a_state(tmp_path: Path) -> None:
    path = write(tmp_path / "segments.pickle", [segment(0, (2 * MIB, "active_allocated"))])
    history = read(path)
    assert history.reason == STATE_ONLY
    assert history.recorded_peak_reserved == 2 * MIB


def test_the_layout_of_torch_2_0_is_read(tmp_path: Path) -> None:
    old_blocks = [
        {"size": 1024, "state": "inactive"},
        {"size": 2048, "state": "active_allocated", "history": [{"addr": 1, "real_size": 2000, "frames": []}]},
    ]
    old = {"device": 0, "address": 4096, "total_size": 3072, "stream": 0, "blocks": old_blocks}
    events = [event("alloc", 64, 100, None), *free(64, 100, None)]
    history = read(write_history(tmp_path / "old.pickle", events, [old]))
    assert history.steps.sizes == [2000, 100, 0], "the older block comes first, with the size that was asked for"
    assert history.steps.times_us == [0, 0, 10], "events without times are taken to be 10 microseconds apart"


def test_a_file_without_traces_is_a_state_of_each_device(tmp_path: Path) -> None:
    segments = [segment(0, (512, "inactive"), device=3), segment(4096, (512, "inactive"), device=1)]
    found = histories(read_recording(write(tmp_path / "state.pickle", {"segments": segments})))
    assert [history.device for history in found] == [1, 3]
    assert all(history.reason == STATE_ONLY for history in found)


def test_devices_are_told_apart(tmp_path: Path) -> None:
    traces = [[], [event("alloc", 64, 100)], [event("alloc", 64, 200), *free(64, 200)]]
    found = histories(read_recording(write(tmp_path / "two.pickle", {"segments": [], "device_traces": traces})))
    assert [(history.device, history.steps.sizes) for history in found] == [(1, [100]), (2, [200, 0])]


# From events to steps.


def test_a_single_event_beside_older_blocks_is_a_state(tmp_path: Path) -> None:
    segments = [segment(0, (512, "active_allocated"), (512, "active_allocated"))]
    assert read(write_history(tmp_path / "one.pickle", [event("alloc", 512)], segments)).reason == STATE_ONLY
    assert read(write_history(tmp_path / "one.pickle", [event("alloc", 0)], [])).reason is None


def test_blocks_older_than_the_recording_are_placed_first(tmp_path: Path) -> None:
    segments = [segment(0, (1024, "active_allocated"), (512, "inactive"), (512, "active_allocated"), stream=7)]
    events = [*free(9000, 300, 5), event("alloc", 1536, 512, 6, stream=7)]
    history = read(write_history(tmp_path / "older.pickle", events, segments))
    assert kinds(history) == [Kind.ALLOCATE, Kind.ALLOCATE, Kind.FREE, Kind.ALLOCATE]
    assert history.steps.sizes == [1024, 300, 0, 512]
    assert history.steps.streams[0] == history.steps.streams[3] != 0, "the older block keeps its stream"
    assert history.steps.allocations[1] == history.steps.allocations[2]
    assert history.steps.times_us == [0, 0, 0, 1]


def test_a_free_whose_completion_comes_later_waits_for_another_stream(tmp_path: Path) -> None:
    requested, completed = free(64, 100)
    events = [event("alloc", 64, 100), requested, event("alloc", 4096, 100), completed]
    path = write_history(tmp_path / "deferred.pickle", events)
    assert kinds(read(path)) == [Kind.ALLOCATE, Kind.FREE_USED_ELSEWHERE, Kind.ALLOCATE]
    assert kinds(read(path, Streams.MERGE)) == [Kind.ALLOCATE, Kind.FREE, Kind.ALLOCATE]


def test_a_free_that_never_completed_waits_for_another_stream(tmp_path: Path) -> None:
    events = [event("alloc", 64), *free(64), event("alloc", 64), event("free_requested", 64)]
    segments = [segment(64, (512, "active_pending_free"))]
    history = read(write_history(tmp_path / "pending.pickle", events, segments))
    assert kinds(history)[-1] is Kind.FREE_USED_ELSEWHERE
    assert len(history.steps.kinds) == 4, "the pending block is that of the events, not an older one"


@pytest.mark.parametrize("half", ["free_requested", "free_completed"])
def test_one_half_of_each_free_is_enough(tmp_path: Path, half: str) -> None:
    events = [event("alloc", 64), event(half, 64), event("alloc", 64), event(half, 64)]
    assert kinds(read(write_history(tmp_path / "half.pickle", events))) == [Kind.ALLOCATE, Kind.FREE] * 2


def test_a_second_allocation_at_a_live_address_ends_the_first(tmp_path: Path) -> None:
    events = [event("alloc", 64), event("alloc", 64), *free(64), event("alloc", 64), *free(64)]
    history = read(write_history(tmp_path / "lost.pickle", events))
    assert kinds(history) == [Kind.ALLOCATE, Kind.FREE] * 3


def test_recordings_without_a_kind_of_event_say_so(tmp_path: Path) -> None:
    no_frees = [event("alloc", 64), event("alloc", 64)]
    assert read(write_history(tmp_path / "a.pickle", no_frees)).reason == NO_FREES
    no_allocations = [*free(64), *free(64)]
    assert read(write_history(tmp_path / "b.pickle", no_allocations)).reason == NO_ALLOCATIONS


def test_a_failed_allocation_is_tried_again(tmp_path: Path) -> None:
    events = [event("alloc", 64), {"action": "oom", "size": 1 << 60, "stream": 0, "device_free": 0, "time_us": 1}]
    history = read(write_history(tmp_path / "oom.pickle", events))
    assert kinds(history) == [Kind.ALLOCATE, Kind.TRY]


def test_pools_come_from_events_or_from_the_final_segments(tmp_path: Path) -> None:
    named = [event("alloc", 64, pool_id=(0, 5)), *free(64, pool_id=(0, 5)), event("alloc", 128, pool_id=(0, 0))]
    assert read(write_history(tmp_path / "named.pickle", named)).steps.pools == [1, 0, 0]
    private = segment(4096, (512, "active_allocated"), (512, "active_allocated"), segment_pool_id=(1, 0))
    events = [
        event("alloc", 64),
        event("alloc", 4096),
        event("alloc", 9999, stream=3),
        event("alloc", 8192),
        *free(8192),
        event("alloc", 4608),
        event("alloc", 128),
    ]
    history = read(write_history(tmp_path / "inferred.pickle", events, [private]))
    pools = [pool for pool, kind in zip(history.steps.pools, history.steps.kinds, strict=True) if kind == Kind.ALLOCATE]
    assert pools == [0, 1, 0, 1, 1, 0], "what lies between two allocations of a pool, on their stream, is of it too"


def test_times_never_fall(tmp_path: Path) -> None:
    events = [event("alloc", 64, 512, 50), event("alloc", 128, 512, 20), event("alloc", 192, 512, 60)]
    assert read(write_history(tmp_path / "times.pickle", events)).steps.times_us == [0, 0, 10]


def test_segment_events_give_the_recorded_peak_and_nothing_else(tmp_path: Path) -> None:
    blocks = [event("alloc", 64), *free(64)]
    segments = [segment(0, (2 * MIB, "inactive"))]
    bare = read(write_history(tmp_path / "bare.pickle", blocks, segments))
    returned = [event("segment_alloc", 0, 6 * MIB), *blocks, event("segment_free", 0, 6 * MIB)]
    full = read(write_history(tmp_path / "full.pickle", returned, segments))
    assert (bare.recorded_peak_reserved, full.recorded_peak_reserved) == (2 * MIB, 8 * MIB)
    assert full.steps == bare.steps
    assert full.events == bare.events


def test_real_files_show_the_reserved_bytes_that_were_measured() -> None:
    measured = {"gpt_varlen": 17.67, "kv_decode": 48.53, "expandable_capped": 23.55, "oom_fragmented": 15.75}
    for name, gib in measured.items():
        peak = read(TRACES / f"{name}.pickle.xz").recorded_peak_reserved
        assert peak is not None
        assert round(peak / (1 << 30), 2) == gib, name


# Damaged and hostile files: one clear line, in bounded time and memory.


def refused(path: Path, content: bytes) -> str:
    """The line that says what is wrong with a file."""
    path.write_bytes(content)
    with pytest.raises(SnapshotError) as caught:
        histories(read_recording(path))
    line = str(caught.value)
    assert line
    assert line.isprintable()
    return line


def test_what_is_no_snapshot_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert refused(path, b"") == "empty"
    assert refused(path, b"PK\3\4 a zip file").startswith("neither a memory snapshot (a pickle), nor")
    assert "neither segments nor device_traces" in refused(path, pickle.dumps({"weights": [1, 2]}))
    assert "neither segments nor device_traces" in refused(path, pickle.dumps("segments"))
    with pytest.raises(SnapshotError, match="No such file"):
        read_recording(tmp_path / "missing")
    with pytest.raises(SnapshotError, match="directory"):
        read_recording(tmp_path)


@pytest.mark.parametrize("value", [range(3), print, Path("x"), complex(1), {1, 2}, b"bytes", OSError("x")])
def test_objects_are_refused_before_they_are_made(tmp_path: Path, value: object) -> None:
    assert "pickle opcode" in refused(tmp_path / "file", pickle.dumps({"segments": [value]}))


HOSTILE = {
    "global": b"\x80\x04cos\nsystem\n(X\x02\x00\x00\x00lstR.",
    "memo index": b"\x80\x04]r\xff\xff\xff\xff.",
    "memo index as text": b"]p99999999999\n.",
    "text of 2**60 bytes": b"\x80\x04\x8d" + (1 << 60).to_bytes(8, "little") + b"x.",
    "byte array of 2**40 bytes": b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".",
    "number of 255 bytes": b"\x80\x04\x8a\xff" + b"\x7f" * 255 + b".",
    "number of 2**31 bytes": b"\x80\x04\x8b\xff\xff\xff\x7f.",
    "frame of 2**62 bytes": b"\x80\x04\x95" + (1 << 62).to_bytes(8, "little") + b"].",
    "persistent id": b"\x80\x04X\x01\x00\x00\x00aQ.",
    "extension": b"\x80\x04\x82\x01.",
    "protocol 77": b"\x80\x4d].",
    "pop from nothing": b"\x80\x040.",
    "stop with nothing": b"\x80\x04.",
    "append to text": b"\x80\x04X\x01\x00\x00\x00aK\x01a.",
    "key that cannot be hashed": b"\x80\x04}]]s.",
    "key that is a deep tuple": b"\x80\x02})" + b"\x85" * 400_000 + b"Ns.",
    "key that holds itself twice at each level": b"\x80\x02})" + b"2\x86" * 60 + b"Ns.",
    "key that comes from the memo": b"\x80\x04}(])q\x010h\x01Nu.",
    "key that takes long to compare": b"\x80\x04}X" + (5000).to_bytes(4, "little") + b"x" * 5000 + b"Ns.",
    "key that is a number": b"\x80\x04(K\x01Nd.",
    "place in the memo that was not written": b"\x80\x04}h\x07Ns.",
    "item from below a mark": b"\x80\x04]K\x01(K\x02a.",
    "no end": b"\x80\x04" + b"]" * 1000,
    "number of many digits": b"L" + b"9" * 5000 + b"L\n.",
}


def test_keys_are_looked_at_before_they_are_hashed(tmp_path: Path) -> None:
    for name, content in HOSTILE.items():
        if name.startswith("key that"):
            line = refused(tmp_path / "file", content)
            assert "a dictionary's key" in line or "unhashable" in line, name
    # Multiples of this prime all have the hash 0, so that a dictionary of them takes quadratic time.
    colliding = {number * ((1 << 61) - 1): None for number in range(1, 200)}
    assert "a dictionary's key" in refused(tmp_path / "file", pickle.dumps({"segments": [colliding]}))


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_opcodes_are_refused(tmp_path: Path, name: str) -> None:
    refused(tmp_path / "file", HOSTILE[name])


def cyclic() -> dict[str, Any]:
    snapshot: dict[str, Any] = {"segments": []}
    snapshot["device_traces"] = snapshot["segments"]
    snapshot["segments"].append(snapshot)
    return snapshot


MALFORMED: dict[str, Any] = {
    "negative size": {"segments": [], "device_traces": [[event("alloc", 0, -1)]]},
    "size of 2**63": {"segments": [], "device_traces": [[event("alloc", 0, 1 << 63)]]},
    "size of 2**100": {"segments": [], "device_traces": [[event("alloc", 0, 1 << 100)]]},
    "size that is text": {"segments": [], "device_traces": [[event("alloc", 0, "1")]]},  # type: ignore[arg-type]
    "size that is true": {"segments": [], "device_traces": [[event("alloc", 0, True)]]},
    "failed size below 0": {"segments": [], "device_traces": [[event("oom", 0, -1)]]},
    "address of 2**70": {"segments": [], "device_traces": [[event("alloc", 1 << 70)]]},
    "stream that is a list": {"segments": [], "device_traces": [[event("alloc", stream=[])]]},
    "time before 1970": {"segments": [], "device_traces": [[event("alloc", time_us=-1)]]},
    "time that is a fraction": {"segments": [], "device_traces": [[event("alloc", time_us=0.5)]]},  # type: ignore[arg-type]
    "action that is a number": {"segments": [], "device_traces": [[event(3)]]},  # type: ignore[arg-type]
    "event that is a list": {"segments": [], "device_traces": [[[]]]},
    "trace that is a dictionary": {"segments": [], "device_traces": [{}]},
    "traces that are a number": {"segments": [], "device_traces": 3},
    "too many devices": {"segments": [], "device_traces": [[]] * 5000},
    "pool of one part": {"segments": [], "device_traces": [[event("alloc", pool_id=(1,))]]},
    "segment that is a number": {"segments": [7]},
    "segment without a size": {"segments": [{"blocks": []}]},
    "segment on device -1": {"segments": [segment(0, (512, "inactive"), device=-1)]},
    "block that is None": {"segments": [{**segment(0), "blocks": [None]}]},
    "block whose state is a number": {"segments": [{**segment(0), "blocks": [{"size": 512, "state": 1}]}]},
    "block of 2**63 bytes": {"segments": [{**segment(0), "blocks": [{"size": 1 << 63}]}]},
    "segments that are text": {"segments": "abc"},
    "snapshot within itself": cyclic(),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_contents_are_refused(tmp_path: Path, name: str) -> None:
    refused(tmp_path / "file", pickle.dumps(MALFORMED[name]))


def test_lists_that_unfold_into_endless_work_are_refused(tmp_path: Path) -> None:
    trace = [event("alloc", 64) for _ in range(1000)]
    shared = {"segments": [], "device_traces": [trace, trace]}
    assert "list of another device" in refused(tmp_path / "file", pickle.dumps(shared))
    blocks = [{"size": 512, "state": "inactive"} for _ in range(1000)]
    segments = [{**segment(0), "blocks": blocks} for _ in range(2)]
    assert "share one list" in refused(tmp_path / "file", pickle.dumps({"segments": segments}))


def test_a_state_that_is_no_text_is_refused_and_never_written_out(tmp_path: Path) -> None:
    wide: Any = ["x" * 10]
    for _ in range(24):
        wide = [wide, wide]
    # Python's own pickler does not go so deep, so the lists are nested by hand.
    deep = b"]" * 5000 + b"a" * 4999
    block = b"}(\x8c\x04sizeM\x00\x02\x8c\x05state%bu" % deep
    nested = b"}(\x8c\x08segments]}(\x8c\x0atotal_sizeM\x00\x02\x8c\x06blocks]%bauau." % block
    assert "state is not text" in refused(tmp_path / "file", nested)
    snapshot = {"segments": [{**segment(0), "blocks": [{"size": 512, "state": wide}]}]}
    assert "state is not text" in refused(tmp_path / "file", pickle.dumps(snapshot))


def test_what_is_listed_twice_is_refused(tmp_path: Path) -> None:
    """A pickle names it again in two bytes, so that a small file would unfold into a long list."""
    one = event("alloc", 64)
    twice = {"segments": [], "device_traces": [[one, one]]}
    assert refused(tmp_path / "file", pickle.dumps(twice)) == "device_traces[0] lists an entry twice"
    block = {"size": 512, "state": "inactive"}
    blocks = {"segments": [{**segment(0), "blocks": [block, block]}]}
    assert refused(tmp_path / "file", pickle.dumps(blocks)) == "segment 0: blocks lists an entry twice"
    same = segment(0)
    assert refused(tmp_path / "file", pickle.dumps({"segments": [same, same]})) == "segments lists an entry twice"


def test_more_streams_than_any_program_has_are_refused(tmp_path: Path) -> None:
    events = [event("alloc", 64 * index, stream=index) for index in range(5000)]
    assert "streams" in refused(tmp_path / "file", pickle.dumps({"segments": [], "device_traces": [events]}))


def test_unpacking_stops_at_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "bomb"
    path.write_bytes(lzma.compress(pickle.dumps(ONE_BLOCK) + b"\0" * (64 * MIB)))
    with pytest.raises(SnapshotError, match="more than 1048576 bytes"):
        read_recording(path, limit_bytes=MIB)


@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress, bytes], ids=["gzip", "xz", "plain"])
def test_a_truncated_file_is_refused(tmp_path: Path, compress: Any) -> None:
    whole = compress(pickle.dumps(ONE_BLOCK))
    for length in range(1, len(whole)):
        refused(tmp_path / "file", whole[:length])


def test_an_xz_file_that_asks_for_a_huge_dictionary_is_refused(tmp_path: Path) -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 30}]
    # Only the header says how much memory the reader has to set aside, so the writer need not have that much.
    small = bytearray(lzma.compress(pickle.dumps(ONE_BLOCK), filters=[{**filters[0], "dict_size": 4096}]))
    dictionary_byte = small.index(b"\x21\x01") + 2
    small[dictionary_byte] = 40
    refused(tmp_path / "file", bytes(small))


def test_hostile_files_take_little_memory(tmp_path: Path) -> None:
    """Each is read in a process that may not have more than 2 GiB of addresses."""
    bombs = {
        "memo": HOSTILE["memo index"],
        "zeros": lzma.compress(b"\0" * (32 * MIB)),
        "text": b"\x80\x04X\xff\xff\xff\x7fx",
        "one": gzip.compress(b"\x80\x04" + b"]" * (70 * MIB)),
    }
    lines = read_recordings_within(2 << 30, bombs, tmp_path)
    assert len(lines) == len(bombs)
    assert "read" not in lines
    assert resource.getrlimit(resource.RLIMIT_AS)[0] != 2 << 30, "only the other process was limited"


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused_with_one_line(tmp_path: Path, data: st.DataObject) -> None:
    snapshot = {
        "segments": [segment(0, (512, "active_allocated"), (512, "inactive"))],
        "device_traces": [[event("alloc", 1024, 700, 5), *free(1024, 700, 9), event("alloc", 64, 1 << 40, 10)]],
    }
    whole = bytearray(pickle.dumps(snapshot, protocol=data.draw(st.sampled_from([0, 2, 4]))))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        change = data.draw(st.sampled_from(["replace", "delete", "insert", "cut"]))
        if change == "replace":
            whole[at] = data.draw(st.integers(0, 255))
        elif change == "delete":
            del whole[at]
        elif change == "insert":
            whole.insert(at, data.draw(st.integers(0, 255)))
        else:
            del whole[at:]
        if not whole:
            break
    path = tmp_path / "damaged"
    path.write_bytes(whole)
    line = "read"
    try:
        histories(read_recording(path))
    except SnapshotError as error:
        line = str(error)
    assert line.isprintable()


plain_data = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
)


@given(value=plain_data, protocol=st.integers(0, 5), chunk=st.integers(1, 50))
def test_the_scanner_passes_plain_data_and_finds_its_end(value: object, protocol: int, chunk: int) -> None:
    content = pickle.dumps(value, protocol)
    scanner = _core.PickleScanner()
    given_bytes = content + b"trailing"
    answers = [scanner.feed(given_bytes[at : at + chunk]) for at in range(0, len(given_bytes), chunk)]
    assert answers[-1] == len(content)


@given(content=st.binary(max_size=60))
def test_what_the_scanner_passes_has_only_known_opcodes(content: bytes) -> None:
    try:
        length = _core.PickleScanner().feed(b"\x80\x04" + content)
    except ValueError:
        return
    if length is None:
        return
    try:
        names = {opcode.name for opcode, _, _ in pickletools.genops(io.BytesIO(b"\x80\x04" + content[: length - 2]))}
    except (ValueError, UnicodeDecodeError):
        return
    assert names.isdisjoint({"GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX"})
    assert names.isdisjoint({"PERSID", "BINPERSID", "EXT1", "EXT2", "EXT4", "BYTEARRAY8", "NEXT_BUFFER"})


def all_keys(value: object, seen: set[int]) -> Iterator[object]:
    """The keys of every dictionary within a value, which may be shared or contain itself."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            yield from all_keys(one, seen)


pieces = st.sampled_from(
    b"( } ] ) N K\x05 \x8c\x01a \x8c\x01b Vc\n 0 1 2 \x85 \x86 l t d a e s u \x94 q\0 q\1 p2\n h\0 h\1 g2\n".split(b" ")
)


@settings(max_examples=1000, deadline=None)
@given(program=st.lists(pieces, max_size=25))
def test_what_the_scanner_passes_has_only_text_as_keys(program: list[bytes]) -> None:
    # What is on the stack before lets more of the programs run to their end.
    content = b"\x80\x04" + b"(\x8c\x01k](\x8c\x01k}(\x8c\x01kN" + b"".join(program) + b"."
    try:
        assert _core.PickleScanner().feed(content) == len(content)
        loaded = pickle.loads(content)  # noqa: S301 — the scanner has passed it.
    except (ValueError, TypeError, AttributeError, pickle.UnpicklingError):
        return
    assert all(type(key) is str for key in all_keys(loaded, set()))
