"""What-if questions: budgets, the smallest budget, handles, limits; the JSON's schema; and the exit codes."""

from __future__ import annotations

import copy
import gzip
import json
import lzma
import pickle
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

import rallocator
from rallocator._cli.app import app
from rallocator._replay import POLICIES
from rallocator.errors import ConfigError
from tests.histories import GIB, MIB, TRACES, event, free, segment, write, write_history

SCHEMA = json.loads((Path(__file__).parents[1] / "docs" / "replay.schema.json").read_text(encoding="utf-8"))


def invoke(*words: object) -> Result:
    """Run `rallocator replay` in this process, as a narrow terminal would show it."""
    return CliRunner().invoke(app, ["replay", *map(str, words)], env={"COLUMNS": "80"})


def rows_of(result: Result) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(result.stdout)
    jsonschema.validate(rows, SCHEMA)
    return rows


def history(path: Path) -> Path:
    """Holds 100 MiB at once, in two blocks of which the second is freed first."""
    return write_history(
        path, [event("alloc", 64, 60 * MIB), event("alloc", 128, 40 * MIB), *free(128, 40 * MIB), *free(64, 60 * MIB)]
    )


# Budgets and the smallest one.


def test_the_exit_code_says_whether_a_history_fits_under_any_policy(tmp_path: Path) -> None:
    path = history(tmp_path / "history")
    assert invoke(path, "--budget", "100MiB").exit_code == 0
    assert invoke(path, "--budget", "98MiB").exit_code == 1
    assert "Does not fit in 98.00 MiB." in invoke(path, "--budget", "98MiB").stdout
    fragmented = TRACES / "oom_fragmented.pickle.xz"
    result = invoke(fragmented, "--budget", "15.8GiB")
    assert result.exit_code == 0
    assert "Fits in 15.80 GiB under expandable, rallocator." in result.stdout
    assert invoke(fragmented, "--budget", "15.8GiB", "--policy", "native").exit_code == 1
    assert invoke(fragmented, "--budget", "15.8GiB", "--policy", "rallocator").exit_code == 0


def test_one_history_that_fits_nowhere_is_a_no_and_an_unreadable_file_comes_before_it(tmp_path: Path) -> None:
    good, bad = history(tmp_path / "good"), tmp_path / "bad"
    small = write_history(tmp_path / "small", [event("alloc", 64, MIB)])
    bad.write_bytes(b"nothing")
    assert invoke(small, good, "--budget", "90MiB").exit_code == 1
    result = invoke(small, bad, good, "--budget", "90MiB", "--json")
    assert result.exit_code == 2
    assert len(rows_of(result)) == 6
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["kv_decode", "oom_fragmented", "fsdp1_streams", "graphs"])
def test_the_minimum_budget_suffices_and_a_little_less_does_not(name: str) -> None:
    path = TRACES / f"{name}.pickle.xz"
    for row in rallocator.replay(path, minimum=True).rows:
        minimum = row.minimum_budget
        assert minimum is not None
        assert row.peak_allocated is not None
        assert minimum >= row.peak_allocated
        (enough,) = rallocator.replay(path, [row.policy], minimum).rows
        (less,) = rallocator.replay(path, [row.policy], minimum - 2 * MIB).rows
        assert (enough.ooms, (less.ooms or 0) > 0) == (0, True)


def test_the_minimum_budget_serves_what_the_recorded_program_was_refused(tmp_path: Path) -> None:
    refusal = {"action": "oom", "size": 3 * GIB, "stream": 0, "device_free": 0, "time_us": 1}
    path = write_history(tmp_path / "oom", [event("alloc", 64, GIB), refusal])
    rows = rallocator.replay(path, ["native", "rallocator"], minimum=True).rows
    assert [row.minimum_budget for row in rows] == [4 * GIB] * 2


def test_no_budget_is_enough_for_more_than_any_card_has(tmp_path: Path) -> None:
    path = write_history(tmp_path / "huge", [event("alloc", 64 * index, 1 << 48) for index in range(3)])
    result = invoke(path, "--minimum", "--json")
    assert [row["minimum_budget"] for row in rows_of(result)] == [None] * 3
    assert result.exit_code == 1


def test_the_minimum_is_shown_in_80_columns() -> None:
    result = invoke(TRACES / "kv_decode.pickle.xz", "--minimum")
    assert "fits in" in result.stdout
    assert max(len(line) for line in result.stdout.splitlines() if "/" not in line) <= 80


# Other settings.


def test_larger_handles_reserve_more(tmp_path: Path) -> None:
    path = write_history(tmp_path / "small", [event("alloc", 64, 3 * MIB)])
    reserved = {size: rallocator.replay(path, ["rallocator"], handle_size=size).rows[0] for size in ("2MiB", "64MiB")}
    assert reserved["2MiB"].peak_reserved == 4 * MIB
    assert reserved["64MiB"].peak_reserved == 64 * MIB
    (native,) = rallocator.replay(path, ["native"], handle_size="64MiB").rows
    assert native.peak_reserved == 20 * MIB


@pytest.mark.parametrize("size", ["3MiB", "1KiB", "2GiB", "0", "many"])
def test_a_handle_size_that_no_gpu_has_is_refused(tmp_path: Path, size: str) -> None:
    with pytest.raises(ConfigError, match="handle-size"):
        rallocator.replay(history(tmp_path / "history"), handle_size=size)
    result = invoke(tmp_path / "history", "--handle-size", size)
    assert (result.exit_code, result.stdout) == (2, "")


def test_any_setting_can_be_tried(tmp_path: Path) -> None:
    path = write_history(tmp_path / "history", [event("alloc", 64, 33 * MIB)])
    rows = rows_of(invoke(path, "--json", "--policy", "native", "--config", "roundup_power2_divisions:2"))
    assert rows[0]["peak_reserved"] == 48 * MIB


def test_several_files_are_answered_in_order(tmp_path: Path) -> None:
    paths = [write_history(tmp_path / f"{size}", [event("alloc", 64, size * MIB)]) for size in (40, 20, 60)]
    rows = rows_of(invoke(*paths, "--json", "--policy", "native"))
    assert [row["peak_reserved"] // MIB for row in rows] == [40, 20, 60]


# The JSON.


@pytest.mark.parametrize("name", ["frames", "graphs", "fsdp1_streams"])
def test_the_json_has_its_schema_and_tells_nothing_of_the_program(name: str) -> None:
    result = invoke(TRACES / f"{name}.pickle.xz", "--json", "--minimum", "--budget", "40GiB")
    assert len(rows_of(result)) == 3
    for secret in ("frames", "filename", ".py", "user_metadata"):
        assert secret not in result.stdout.replace(f"{name}.pickle", "")


def test_a_state_has_the_schema_too(tmp_path: Path) -> None:
    path = write(tmp_path / "state", [segment(0, (2 * MIB, "active_allocated"), (MIB, "inactive"))])
    (row, *_) = rows_of(invoke(path, "--json"))
    assert (row["replayable"], row["state"]["free"]) == (False, MIB)


def test_the_schema_names_every_field_and_no_other() -> None:
    result = rallocator.replay(TRACES / "graphs.pickle.xz")
    assert set(SCHEMA["items"]["properties"]) == set(result.to_json()[0])
    assert set(SCHEMA["items"]["required"]) == set(result.to_json()[0])
    assert all("description" in field for field in SCHEMA["items"]["properties"].values())


def test_the_schema_refuses_what_is_no_row() -> None:
    rows = rallocator.replay(TRACES / "graphs.pickle.xz").to_json()
    jsonschema.validate(rows, SCHEMA)
    for change in ({"schema": 2}, {"peak_reserved": 1.5}, {"peak_reserved": -1}, {"policy": "torch"}, {"ooms": None}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate([{**rows[0], **change}], SCHEMA)


def test_a_large_history_takes_seconds(tmp_path: Path) -> None:
    """400,000 events, three policies: under 10 s on two cores (here: of one processor's time, whatever else runs)."""
    events = []
    for number in range(100_000):
        address, size = 4096 * (number % 997 + 1), 512 * (number * 7919 % 65_000 + 1)
        if number >= 997:
            events += free(address, 512 * ((number - 997) * 7919 % 65_000 + 1), number)
        events.append(event("alloc", address, size, number))
    events += [event("alloc", 1 << 30, 512, 200_000), *free(1 << 30, 512, 200_000)] * 34_000
    path = write_history(tmp_path / "large", events)
    begin = time.process_time()
    result = rallocator.replay(path)
    assert result.advice is not None
    seconds = time.process_time() - begin
    assert result.rows[0].events >= 395_000
    assert seconds < 15, seconds


# Damaged and hostile files.


def answered(result: Result, path: Path) -> None:
    """A right answer, or one clear line and exit code 2; never a traceback."""
    assert result.exit_code in (0, 1, 2), result.exception
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    if result.exit_code == 2:
        (line,) = result.stderr.splitlines()
        assert line.startswith(f"rallocator: {path}: ")
        assert line.isprintable()
    else:
        rows_of(result)


MUTATIONS: list[Any] = [
    None, True, -1, 0, 1 << 63, 1 << 64, -(1 << 63), 1 << 200, 0.5, float("nan"), "text", "", b"", [], {}, (), [[]],
    (0, 0), "alloc", "free_requested", "\x1b[31m[bold]</script>",
]  # fmt: skip


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_wrong_values_anywhere_in_a_snapshot_are_answered_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    frame = {"filename": "a.py", "line": 1, "name": "f"}
    events = [
        event("alloc", 512, 700, 5, frames=[frame]),
        *free(512, 700, 9),
        event("alloc", 64 << 20, 1 << 25, 10, stream=3, pool_id=(0, 1)),
        {"action": "oom", "size": 1 << 40, "stream": 0, "device_free": 5, "time_us": 12},
        event("segment_alloc", 512, 2 << 20, 13),
    ]
    segments = [segment(0, (512, "active_allocated"), (512, "inactive"), (1024, "active_pending_free"))]
    snapshot: dict[str, Any] = {"segments": segments, "device_traces": [events, []], "external_annotations": []}
    for _ in range(data.draw(st.integers(1, 3))):
        place: Any = snapshot
        while True:
            key = data.draw(st.sampled_from(list(place) if isinstance(place, dict) else list(range(len(place)))))
            inner = place[key]
            if not (isinstance(inner, dict | list) and inner) or data.draw(st.integers(0, 9)) == 0:
                break
            place = inner
        change = data.draw(st.sampled_from(["replace", "delete", "cycle", "repeat"]))
        if change == "replace":
            # A copy, since a later change may go into it, and the next example is to begin with the same.
            place[key] = copy.deepcopy(data.draw(st.sampled_from(MUTATIONS)))
        elif change == "delete":
            del place[key]
        elif change == "cycle":
            place[key] = data.draw(st.sampled_from([snapshot, place]))
        elif isinstance(place, list):
            place += [place[key]] * data.draw(st.integers(1, 20))
        if not snapshot:
            break
    path = write(tmp_path / "mutated", snapshot)
    answered(invoke(path, "--json", "--budget", "1GiB"), path)


def test_addresses_with_a_sign_are_read(tmp_path: Path) -> None:
    segments = [segment(-(1 << 63), (2 * MIB, "active_allocated"))]
    path = write_history(tmp_path / "signed", [event("alloc", -(1 << 62)), *free(-(1 << 62))], segments)
    result = invoke(path, "--json")
    assert (result.exit_code, rows_of(result)[0]["peak_allocated"]) == (0, 2 * MIB + 512)


def test_a_corpus_of_damaged_files_is_answered(tmp_path: Path) -> None:
    graphs = lzma.decompress((TRACES / "graphs.pickle.xz").read_bytes())
    corpus = {
        "cut": graphs[: len(graphs) // 2],
        "cut xz": lzma.compress(graphs)[:-20],
        "cut gzip": gzip.compress(graphs)[:-9],
        "wrong checksum": gzip.compress(graphs)[:-8] + b"\0" * 8,
        "xz of a gzip": lzma.compress(gzip.compress(graphs)),
        "zeros": b"\0" * 1000,
        "a directory's worth of zeros": lzma.compress(b"\0" * (16 * MIB)),
        "shell": b"\x80\x04cos\nsystem\n(X\x02\x00\x00\x00lstR.",
        "python object": pickle.dumps({"segments": [Path("x")]}),
        "deep": b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".",
        "sizes of 2**63": pickle.dumps({"segments": [], "device_traces": [[event("alloc", 0, 1 << 63)]]}),
        "negative": pickle.dumps({"segments": [], "device_traces": [[event("alloc", 0, -5)]]}),
        "html": b"<!doctype html><script>alert(1)</script>",
        "png": b"\x89PNG\r\n\x1a\n",
    }
    for name, content in corpus.items():
        path = tmp_path / name
        path.write_bytes(content)
        result = invoke(path, "--json")
        answered(result, path)
        assert result.exit_code == 2, name


def test_max_size_bounds_what_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb"
    path.write_bytes(lzma.compress(b"\x80\x04" + b"\0" * (8 * MIB)))
    result = invoke(history(tmp_path / "good"), "--max-size", "1MiB", "--json")
    assert result.exit_code == 0
    result = invoke(TRACES / "graphs.pickle.xz", "--max-size", "10KiB")
    assert result.exit_code == 2
    assert "unpacks to more than 10240 bytes; `rallocator replay --max-size`" in result.stderr
    assert invoke(TRACES / "graphs.pickle.xz", "--max-size", "much").exit_code == 2


def test_all_policies_are_in_the_schema() -> None:
    assert tuple(SCHEMA["items"]["properties"]["policy"]["enum"]) == POLICIES
