"""Recorded files that are no snapshots of torch: Chrome traces and RMM's logs; and states without a history."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rallocator
from rallocator._replay.history import STATE_ONLY, History, histories
from rallocator._replay.reader import read_recording
from rallocator._replay.steps import Kind
from rallocator.errors import SnapshotError
from tests.histories import (
    MIB,
    PUBLIC,
    TRACES,
    event,
    free,
    load,
    needs_public_histories,
    segment,
    write,
    write_history,
)
from tests.processes import read_recordings_within


def read(path: Path) -> History:
    (history,) = histories(read_recording(path))
    return history


def refused(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(SnapshotError) as caught:
        histories(read_recording(path))
    assert str(caught.value).isprintable()
    return str(caught.value)


# Chrome traces.


def memory(change: int, addr: int, ts: float, reserved: int = 0, device: int = 0, **more: Any) -> dict[str, Any]:
    """An event as torch's profiler writes it."""
    args = {"Total Reserved": reserved, "Total Allocated": 0, "Bytes": change, "Addr": addr}
    args |= {"Device Id": device, "Device Type": 1, "Ev Idx": 5, **more}
    return {
        "ph": "i",
        "cat": "cpu_instant_event",
        "s": "t",
        "name": "[memory]",
        "pid": 1,
        "tid": 1,
        "ts": ts,
        "args": args,
    }


KERNEL = {"ph": "X", "name": "void gemm", "ts": 1.5, "dur": 2, "args": {"grid": [1, 2, {"x": None}], "stream": 7}}


def test_memory_events_of_a_chrome_trace_are_replayed(tmp_path: Path) -> None:
    events = [
        KERNEL,
        memory(-30 * MIB, 64, 20.25, 60 * MIB),
        memory(30 * MIB, 64, 10.75, 60 * MIB),
        memory(20, 4096, 5, 0, -1, **{"Device Type": 0}),
        {"name": "[memory]", "args": "none"} | {"name": "other"},
        memory(30 * MIB, 128, 30, 60 * MIB),
    ]
    document = {"schemaVersion": 1, "deviceProperties": [{"id": 0}], "traceEvents": events, "traceName": "x.json"}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(document))
    history = read(path)
    assert [Kind(kind) for kind in history.steps.kinds] == [Kind.ALLOCATE, Kind.FREE, Kind.ALLOCATE]
    assert history.steps.times_us == [0, 10, 20], "in the order of their times, not of the file"
    assert history.recorded_peak_reserved == 60 * MIB
    (row,) = rallocator.replay(path, ["native"]).rows
    assert (row.peak_reserved, row.events) == (30 * MIB, 3)


def test_a_chrome_trace_may_be_a_list_compressed_and_of_several_devices(tmp_path: Path) -> None:
    events = [memory(100, 64, 1), memory(200, 64, 2, device=3), memory(300, 128, 3), memory(5 * MIB, 0, 4, name="x")]
    events[3]["name"] = "[OutOfMemory]"
    del events[3]["args"]["Addr"]
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf\n " + json.dumps(events).encode()))
    found = histories(read_recording(path))
    assert [(history.device, history.steps.sizes) for history in found] == [(0, [100, 300, 5 * MIB]), (3, [200])]
    assert found[0].steps.kinds[-1] == Kind.TRY


def test_a_chrome_trace_of_a_real_history_gives_its_figures(tmp_path: Path) -> None:
    sizes: dict[int, int] = {}
    events = []
    for entry in load("frames")["device_traces"][0]:
        if entry["action"] == "alloc":
            sizes[entry["addr"]] = -(-entry["size"] // 512) * 512
            events.append(memory(sizes[entry["addr"]], entry["addr"], entry["time_us"]))
        elif entry["action"] == "free_completed":
            events.append(memory(-sizes[entry["addr"]], entry["addr"], entry["time_us"]))
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    for ours, theirs in zip(
        rallocator.replay(path).rows, rallocator.replay(TRACES / "frames.pickle.xz").rows, strict=True
    ):
        assert (ours.peak_reserved, ours.peak_allocated) == (theirs.peak_reserved, theirs.peak_allocated)


DAMAGED_TRACES = {
    "empty object": b"{}",
    "no memory events": json.dumps({"traceEvents": [KERNEL]}).encode(),
    "events that are a number": b'{"traceEvents": 3}',
    "event that is a list": b'{"traceEvents": [[]]}',
    "cut": json.dumps({"traceEvents": [memory(1, 1, 1)]}).encode()[:-9],
    "text behind it": json.dumps([memory(1, 1, 1)]).encode() + b"x",
    "no time": json.dumps([memory(1, 1, None)]).encode(),  # type: ignore[arg-type]
    "negative time": json.dumps([memory(1, 1, -5)]).encode(),
    "size that is text": json.dumps([memory("1", 1, 1)]).encode(),  # type: ignore[arg-type]
    "size of 2**63": json.dumps([memory(1 << 63, 1, 1)]).encode(),
    "size of 2**62": json.dumps([memory(1 << 62, 1, 1)]).encode(),
    "fraction of a byte": json.dumps([memory(0.5, 1, 1)]).encode(),  # type: ignore[arg-type]
    "address below zero": json.dumps([memory(1, -1, 1)]).encode(),
    "device 10**9": json.dumps([memory(1, 1, 1, device=10**9)]).encode(),
    "not utf-8": b'[{"name": "\xff"}]',
    "deep": b"[" * 100_000,
    "deep arguments": b'[{"args":' + b"[" * 100_000 + b"]" * 100_000 + b"}]",
    "deep object": b'{"a":' * 100_000,
}


@pytest.mark.parametrize("name", DAMAGED_TRACES)
def test_damaged_chrome_traces_are_refused(tmp_path: Path, name: str) -> None:
    refused(tmp_path / "trace", DAMAGED_TRACES[name])


# RMM's logs.


HEADER = "Thread,Time,Action,Pointer,Size,Stream\n"


def test_a_log_of_rmm_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "rmm.dev0.csv"
    path.write_text(
        HEADER + "1,23:59:59.999000,allocate,0x7f0000000000,31457280,0x2\n"
        "1,00:00:00.000500,free,0x7f0000000000,31457280,0x2\r\n"
        "2,00:00:01:000000,allocate failure,(nil),99999999999,0\n"
        "2,00:00:02.5,allocate,0x10,700,0x2\n"
    )
    history = read(path)
    assert [Kind(kind) for kind in history.steps.kinds] == [Kind.ALLOCATE, Kind.FREE, Kind.TRY, Kind.ALLOCATE]
    assert history.steps.times_us == [0, 1500, 1_001_000, 2_501_000], "through midnight"
    assert history.steps.streams == [1, 0, 0, 1]
    assert history.recorded_peak_reserved is None
    assert [row.peak_reserved for row in rallocator.replay(path, ["native"]).rows] == [32 * MIB]


def test_times_may_be_seconds_and_sizes_none(tmp_path: Path) -> None:
    path = tmp_path / "rmm.csv"
    rows = (
        "1,1634567890.123456,allocate,0x0,0,0",
        "1,1634567890.123457,allocate,0x40,512,0",
        "1,1634567891,deallocate,0x40,512,0",
    )
    path.write_text(HEADER + "\n".join(rows))
    assert read(path).steps.times_us == [0, 876_543]


DAMAGED_LOGS = {
    "five fields": "1,00:00:00.0,allocate,0x10,1\n",
    "seven fields": "1,00:00:00.0,allocate,0x10,1,0,0\n",
    "unknown action": "1,00:00:00.0,[bold]resize\x1b[31m,0x10,1,0\n",
    "negative size": "1,00:00:00.0,allocate,0x10,-1,0\n",
    "size of 2**63": f"1,00:00:00.0,allocate,0x10,{1 << 63},0\n",
    "endless size": "1,00:00:00.0,allocate,0x10," + "9" * 4000 + ",0\n",
    "pointer that is text": "1,00:00:00.0,allocate,here,1,0\n",
    "no time": "1,yesterday,allocate,0x10,1,0\n",
    "endless line": "x" * 100_000,
    "nothing": "",
}


@pytest.mark.parametrize("name", DAMAGED_LOGS)
def test_damaged_logs_are_refused_by_the_line(tmp_path: Path, name: str) -> None:
    content = (HEADER + DAMAGED_LOGS[name]).encode()
    if name == "nothing":
        (tmp_path / "log").write_bytes(content)
        assert read(tmp_path / "log").reason == STATE_ONLY
    else:
        line = refused(tmp_path / "log", content)
        assert "line" in line


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_a_damaged_text_file_is_read_or_refused_with_one_line(tmp_path: Path, data: st.DataObject) -> None:
    row = "1,00:00:00.5,allocate,0x40,700,0x2\n1,00:00:01.5,free,0x40,700,0x2\n"
    trace = json.dumps({"traceEvents": [KERNEL, memory(700, 64, 1.5), memory(-700, 64, 2)]})
    whole = bytearray(data.draw(st.sampled_from([HEADER + row, trace])).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(1, len(whole) - 1))
        change = data.draw(st.sampled_from(["replace", "delete", "insert", "cut"]))
        if change == "replace":
            whole[at] = data.draw(st.integers(0, 255))
        elif change == "insert":
            whole[at:at] = data.draw(
                st.sampled_from([b"[", b"{", b'"', b",", b"-", b"9" * 30, b"\x00", b"\xff", b"1e999"])
            )
        else:
            del whole[at : at + 1 if change == "delete" else None]
            if len(whole) < 2:
                whole += b"  "
    path = tmp_path / "damaged"
    path.write_bytes(whole)
    line = "read"
    try:
        histories(read_recording(path))
    except SnapshotError as error:
        line = str(error)
    assert line.isprintable()


def test_hostile_text_files_take_little_memory(tmp_path: Path) -> None:
    """Each is read in a process that may not have more than 1 GiB of addresses, and unpacks to more."""
    bombs = {
        "name": b'[{"name":"' + b"x" * (40 * MIB),
        "key": b'{"' + b"x" * (40 * MIB),
        "escapes": b'[{"name":"' + b'\\"' * (20 * MIB),
        "number": b"[" + b"9" * (40 * MIB),
        "lists": b"[" * (40 * MIB),
        "line": HEADER.encode() + b"x" * (40 * MIB),
    }
    packed = {f"{name}.gz": gzip.compress(content, 1) for name, content in bombs.items()}
    lines = read_recordings_within(1 << 30, packed, tmp_path)
    assert len(lines) == len(bombs)
    assert "read" not in lines


def test_long_texts_that_are_no_bombs_are_passed_over(tmp_path: Path) -> None:
    events = [{"name": "x" * MIB, "args": {"stack": ['\\"' * MIB]}}, memory(700, 64, 1)]
    path = tmp_path / "trace"
    path.write_text(json.dumps(events))
    assert read(path).steps.sizes == [700]


def test_a_trace_is_unpacked_up_to_the_limit_only(tmp_path: Path) -> None:
    path = tmp_path / "bomb"
    path.write_bytes(gzip.compress(b"[" + b" " * (8 * MIB) + b"]"))
    with pytest.raises(SnapshotError, match="more than 1048576 bytes"):
        read_recording(path, MIB)
    with pytest.raises(SnapshotError, match="more than 1048576 bytes"):
        rallocator.replay(path, max_size="1MiB")


# States.


def test_a_state_tells_of_pools_pending_memory_and_fragmentation(tmp_path: Path) -> None:
    segments = [
        segment(0, (3 * MIB, "active_allocated"), (4 * MIB, "inactive"), (MIB, "active_pending_free")),
        segment(64 * MIB, (6 * MIB, "inactive"), (2 * MIB, "active_allocated"), stream=77, segment_pool_id=(0, 5)),
        segment(128 * MIB, (2 * MIB, "inactive")),
    ]
    (row,) = rallocator.replay(write(tmp_path / "state", segments), ["native"]).rows
    state = row.state
    assert state is not None
    assert (row.replayable, row.peak_reserved) == (False, None)
    assert (state.reserved, state.allocated, state.pending, state.free) == (18 * MIB, 5 * MIB, MIB, 12 * MIB)
    assert (state.largest_free, state.fragmentation, state.requested) == (6 * MIB, 0.5, 6 * MIB)
    assert [(pool.pool, pool.stream, pool.reserved, pool.largest_free) for pool in state.pools] == [
        ((0, 0), 0, 10 * MIB, 4 * MIB),
        ((0, 5), 1, 8 * MIB, 6 * MIB),
    ]
    assert row.to_json()["state"]["pools"][0]["pending"] == MIB


def test_a_history_has_the_state_at_its_end_too(tmp_path: Path) -> None:
    events = [event("alloc", 64, 512), *free(64), event("alloc", 0, 512)]
    path = write_history(tmp_path / "history", events, [segment(0, (512, "active_allocated"), (1536, "inactive"))])
    (row,) = rallocator.replay(path, ["native"]).rows
    assert row.replayable
    assert row.state is not None
    assert (row.state.allocated, row.state.free) == (512, 1536)
    (row,) = rallocator.replay(write_history(tmp_path / "bare", events), ["native"]).rows
    assert row.state is None


@needs_public_histories
@pytest.mark.parametrize(
    ("name", "reserved_mib", "pools"),
    [
        ("verl_state_three_pools", 24976, 3),
        ("sketchkv_state_only", 16340, 1),
        ("llm_inference_torch20_state", 11296, 1),
    ],
)
def test_public_states_are_described(name: str, reserved_mib: int, pools: int) -> None:
    row = rallocator.replay(PUBLIC / f"{name}.pickle.xz").rows[0]
    assert row.state is not None
    assert row.state.reserved == reserved_mib * MIB
    assert row.state.reserved == row.state.allocated + row.state.pending + row.state.free
    assert len({pool.pool for pool in row.state.pools}) == pools
    assert (row.state.pending > 0) == (name == "verl_state_three_pools")
