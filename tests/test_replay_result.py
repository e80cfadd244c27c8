"""What `rallocator.replay` returns: for notebooks, and for tests of other people's."""

from __future__ import annotations

import pickle
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import rallocator
from rallocator._sizes import format_size
from tests.histories import MIB, TRACES, event, free, segment, write, write_history

EXAMPLES = Path(__file__).parents[1] / "examples"


class Text(HTMLParser):
    """Collects the tags and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002 — the base class's.
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_result_is_found_by_policy_and_device(tmp_path: Path) -> None:
    traces = [[event("alloc", 64, 3 * MIB), *free(64, 3 * MIB)], [event("alloc", 64, 100), event("alloc", 512, 200)]]
    result = rallocator.replay(write(tmp_path / "two", {"segments": [], "device_traces": traces}))
    assert result.row("native", device=1).peak_reserved == 2 * MIB
    with pytest.raises(KeyError, match="2 rows of policy native"):
        result.row("native")
    with pytest.raises(KeyError, match="0 rows of policy native, device 5"):
        result.row("native", device=5)


def test_whether_it_fits_counts_every_device_and_the_best_policy(tmp_path: Path) -> None:
    traces = [[event("alloc", 64, 30 * MIB), *free(64, 30 * MIB)], [event("alloc", 64, 3 * MIB), *free(64, 3 * MIB)]]
    path = write(tmp_path / "two", {"segments": [], "device_traces": traces})
    assert rallocator.replay(path).fits
    assert rallocator.replay(path, budget="30MiB").fits
    assert not rallocator.replay(path, budget="28MiB").fits
    assert not rallocator.replay(path, ["native"], budget="15MiB").fits, "even the small one takes 20 MiB"
    state = write(tmp_path / "state", [segment(0, (512, "inactive"))])
    result = rallocator.replay(state, budget="1MiB")
    assert not result.fits, "a guard that was given no history must not pass"
    assert not result.replayable


def test_a_notebook_shows_a_table_and_the_advice() -> None:
    result = rallocator.replay(TRACES / "oom_fragmented.pickle.xz", minimum=True)
    page = Text(result._repr_html_())
    assert page.tags.count("tr") == 4
    minimum = format_size(result.row("rallocator").minimum_budget or 0)
    for text in ("rallocator", "15.75 GiB", "85.0%", minimum, "fragmentation: an allocation fails"):
        assert text in page.text


def test_names_from_outside_are_text_in_a_notebook(tmp_path: Path) -> None:
    name = "<script>alert(1)<", "<b>&amp;"
    path = write_history(tmp_path / name[0], [event("alloc", 64)])
    page = Text(rallocator.replay(path)._repr_html_())
    assert "script" not in page.tags
    assert name[0] in page.text


def test_a_state_is_shown_with_its_reason(tmp_path: Path) -> None:
    page = Text(rallocator.replay(write(tmp_path / "state", [segment(0, (512, "inactive"))]))._repr_html_())
    assert "cannot be replayed: a state without a history" in page.text


def test_advice_is_worked_out_when_it_is_asked_for() -> None:
    result = rallocator.replay(TRACES / "graphs.pickle.xz")
    assert "advice" not in vars(result)
    assert result.advice == {0: ()}
    assert result.without_steps() == result
    assert result.without_steps().subjects == ()
    assert pickle.loads(pickle.dumps(result.without_steps())).rows == result.rows  # noqa: S301 — our own.


def test_the_example_of_a_memory_regression_test_passes_and_can_fail() -> None:
    example = EXAMPLES / "test_memory_regression.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(example)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout
    source = example.read_text(encoding="utf-8")
    assert source.count('budget="12GiB"') == 1
    assert not rallocator.replay(TRACES / "frames.pickle.xz", ["native", "rallocator"], budget="8GiB").fits
