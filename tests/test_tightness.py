"""The programs of `bench.made_up`, and what the policies make of them in `bench.tightness`."""

from __future__ import annotations

from pathlib import Path

import pytest

import rallocator
from bench import made_up, tightness
from tests.histories import MIB, TRACES


def test_a_queue_of_a_thousand_blocks_keeps_the_promise_and_is_no_looser_than_expandable(tmp_path: Path) -> None:
    program = made_up.queue(9, 20_000, 1_000, made_up.up_to(32 * MIB))
    expandable, ours = rallocator.replay(program.write(tmp_path / "queue"), tightness.POLICIES).rows
    assert ours.peak_active
    assert ours.peak_reserved
    assert ours.peak_reserved <= ours.peak_active / 0.99 + 64 * MIB
    assert ours.utilization
    assert expandable.utilization
    assert ours.utilization >= expandable.utilization - 0.002


def test_every_program_frees_only_what_it_holds_and_is_the_same_each_time() -> None:
    for (name, program), (_, again) in zip(made_up.programs(), made_up.programs(), strict=True):
        assert program.events == again.events, name
        held: set[int] = set()
        for event in program.events:
            if event["action"] == "alloc":
                assert event["addr"] not in held, name
                held.add(event["addr"])
            elif event["action"] == "free_completed":
                held.remove(event["addr"])


def test_a_row_says_what_a_replay_does(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = TRACES / "oom_fragmented.pickle.xz"
    monkeypatch.setattr("sys.argv", ["bench.tightness", str(path)])
    tightness.main()
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["program", "policy", "active", "above", "driver", "moved"]
    for line, row in zip(rows, rallocator.replay(path, tightness.POLICIES, lag_ms=0).rows, strict=True):
        assert row.peak_active
        assert row.peak_reserved
        name, policy, active, _, above, *_, moved = line.split()
        assert (name, policy, int(active)) == ("oom_fragmented", row.policy, round(row.peak_active / MIB))
        assert float(above) == pytest.approx(100 * (row.peak_reserved / row.peak_active - 1), abs=0.01)
        assert int(moved.replace(",", "")) == row.handles_moved
