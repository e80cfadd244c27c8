"""The report: one page that opens offline, driven in a real Chromium where there is one."""

from __future__ import annotations

import array
import json
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner, Result

from rallocator._cli.app import app
from rallocator._replay import POLICIES, ReplayResult, ReplaySettings, replay_file
from rallocator._report import Frames, write_page
from rallocator._report.contents import contents
from tests.histories import GIB, MIB, TRACES, event, free, segment, write, write_history

if TYPE_CHECKING:
    from typing_extensions import Self

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

LIMIT_FILES = "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
"""Has a program run out of room for a report, as on a full disk."""

HOSTILE = "</script><img src=x onerror=alert(1)>\x1b[31m[bold]&amp;"


def invoke(*words: object) -> Result:
    return CliRunner().invoke(app, ["replay", *map(str, words)], env={"COLUMNS": "80"})


def replayed(path: Path, **options: Any) -> ReplayResult:
    return replay_file(path, ReplaySettings.check(POLICIES, **options), keep_frames=True)


def with_frames(path: Path, *places: str) -> Path:
    """A history whose blocks were allocated at these places."""
    events = []
    for number, place in enumerate(places, 1):
        frames = [{"name": place, "filename": f"/home/me/{place}/model.py", "line": 7}]
        events.append(event("alloc", number << 30, number * 40 * MIB, number, frames=frames, user_metadata="my secret"))
    return write_history(path, [*events, event("alloc", 1 << 20, MIB, 50), *free(1 << 20, MIB, 60)])


# What is worked out.


def test_holders_are_those_of_the_peak_by_their_stacks(tmp_path: Path) -> None:
    (shown,) = contents(replayed(with_frames(tmp_path / "h", "embed", "attention", "embed")), Frames.BASE)
    assert [(holder.size // MIB, holder.count, holder.stack) for holder in shown.holders] == [
        (160, 2, ("embed at model.py:7",)),
        (80, 1, ("attention at model.py:7",)),
        (1, 1, ()),
    ]
    assert shown.peak_step == 3


@pytest.mark.parametrize("frames", [None, 5, [None], [{"name": 1}], [{"name": "f", "filename": "g", "line": "x"}], {}])
def test_damaged_stacks_are_left_out(tmp_path: Path, frames: Any) -> None:
    path = write_history(tmp_path / "h", [event("alloc", 64, MIB, frames=frames), *free(64, MIB)])
    (shown,) = contents(replayed(path), Frames.FULL)
    assert shown.holders[0].stack in {(), ("f at g",)}


def test_the_histogram_counts_every_request_once(tmp_path: Path) -> None:
    events = [event("alloc", 64 * size, size) for size in (512, 513, 1023, 1024, 1 << 40)]
    (shown,) = contents(replayed(write_history(tmp_path / "h", events)), Frames.NONE)
    assert [(one.at_least, one.count, one.size) for one in shown.histogram if one.count] == [
        (512, 3, 2048),
        (1024, 1, 1024),
        (1 << 40, 1, 1 << 40),
    ]
    assert len(shown.histogram) == 32, "empty ones between are shown too"


def test_samples_are_what_the_figures_say() -> None:
    result = replayed(TRACES / "fsdp1_streams.pickle.xz")
    (shown,) = contents(result, Frames.NONE)
    for row in shown.rows:
        samples = shown.samples[row.policy]
        assert len(samples) == 24
        assert samples[-1].step == shown.steps - 1
        for sample in samples:
            assert sample.allocated <= sample.active <= sample.reserved <= (row.peak_reserved or 0)


# The page as text.


class Page(HTMLParser):
    """Collects what elements a page has, and what it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.urls: list[str] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.urls += [value or "" for name, value in attrs if name in ("src", "href", "action", "data", "srcset")]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_stands_alone(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    result = invoke(TRACES / "graphs.pickle.xz", "--html", page)
    assert (result.exit_code, result.stderr) == (0, f"rallocator: wrote {page}\n")
    text = page.read_text(encoding="utf-8")
    assert Page(text).urls == ["data:,"]
    assert not re.search(r"https?://|@import|url\(", text)


@pytest.mark.parametrize(
    ("frames", "seen", "unseen"),
    [
        ("base", "embed at model.py:7", "/home/me"),
        ("full", "/home/me/embed/model.py:7", "secret"),
        ("none", "", "model.py"),
    ],
)
def test_frames_are_shown_as_asked(tmp_path: Path, frames: str, seen: str, unseen: str) -> None:
    page = tmp_path / "report.html"
    invoke(with_frames(tmp_path / "h", "embed"), "--html", page, "--frames", frames)
    text = page.read_text(encoding="utf-8")
    assert seen in text
    assert unseen not in text
    assert "secret" not in text


def test_hostile_names_are_text(tmp_path: Path) -> None:
    path = with_frames(tmp_path / "<script>alert(1)<b>\x1b[31m.pickle", HOSTILE)
    for frames in Frames:
        page = Page(write_page([replayed(path)], frames))
        assert "img" not in page.tags
        assert page.tags.count("script") == 3, "the data, how they are laid out, and our own"
        assert not any("\x1b" in text for text in page.text)
        assert any("<script>alert(1)<b>\\x1b[31m.pickle" in text for text in page.text)


def test_a_state_is_described_in_the_page(tmp_path: Path) -> None:
    path = write(tmp_path / "state", [segment(0, (3 * MIB, "active_allocated"), (MIB, "inactive"))])
    text = write_page([replayed(path)], Frames.BASE)
    assert "cannot be replayed: a state without a history" in text
    assert "the largest free block has 1.00 MiB" in text


def refused(page: Path, *files: Path) -> str:
    """The line that says why no report is written there; nothing is replayed before."""
    result = invoke(*files, "--html", page)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"rallocator: --html {page}: ")
    assert len(result.stderr.splitlines()) == 1
    return result.stderr


def test_a_page_that_cannot_be_written_is_one_line_before_the_replay(tmp_path: Path) -> None:
    history = with_frames(tmp_path / "h", "embed")
    assert "folder does not exist" in refused(tmp_path / "missing" / "report.html", history)
    assert "that is a folder" in refused(tmp_path, history)
    assert "is no report" in refused(Path("/dev/null"), history)
    assert invoke(TRACES / "graphs.pickle.xz", "--frames", "some").exit_code == 2


def test_json_and_a_page_can_be_had_at_once(tmp_path: Path) -> None:
    files = [TRACES / "graphs.pickle.xz", TRACES / "fsdp1_streams.pickle.xz"]
    result = invoke(*files, "--json", "--html", tmp_path / "report.html")
    assert len(json.loads(result.stdout)) == 6
    assert (tmp_path / "report.html").read_text(encoding="utf-8").count('<section class="history"') == 2


def test_a_recording_is_never_overwritten_with_a_report(tmp_path: Path) -> None:
    first, second = with_frames(tmp_path / "a.pickle", "embed"), with_frames(tmp_path / "b.pickle", "head")
    before = first.read_bytes()
    (tmp_path / "link").symlink_to(first)
    assert "is no report" in refused(first, second), "`--html a.pickle b.pickle` takes the first file as OUT"
    assert "a recording to replay" in refused(first, first)
    assert "a recording to replay" in refused(tmp_path / "link", second, first)
    assert "a recording to replay" in refused(tmp_path / "none.html", tmp_path / "none.html")
    assert first.read_bytes() == before
    assert not first.is_symlink()


def test_a_report_may_be_replaced_and_so_may_an_empty_file(tmp_path: Path) -> None:
    page, link, history = tmp_path / "report.html", tmp_path / "link.html", with_frames(tmp_path / "h", "embed")
    page.touch(mode=0o640)
    link.symlink_to(page)
    for _ in range(2):
        assert invoke(history, "--html", link).exit_code == 0
        assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
        assert page.stat().st_mode & 0o777 == 0o640
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["h", "link.html", "report.html"]


def test_a_full_disk_leaves_the_old_report_and_the_figures_are_printed(tmp_path: Path) -> None:
    page, history = tmp_path / "report.html", with_frames(tmp_path / "h", "embed")
    page.write_text("<!doctype html>the old one", encoding="utf-8")
    limit = f"import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); {LIMIT_FILES}"
    program = f"{limit}; from rallocator._cli import main; main()"
    line = [sys.executable, "-c", program, "replay", str(history), "--html", str(page)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (2, f"rallocator: --html {page}: File too large\n")
    assert "peak allocated" in done.stdout
    assert page.read_text(encoding="utf-8") == "<!doctype html>the old one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["h", "report.html"]


# The page in a browser.


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here; on Debian: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


LARGE = TRACES / "lora_checkpoint.pickle.xz"
"""135,000 events."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[ReplayResult, Path]:
    """The replay of a large history, and its report."""
    result = replayed(LARGE)
    page = tmp_path_factory.mktemp("report") / "large.html"
    page.write_text(write_page([result], Frames.BASE), encoding="utf-8")
    return result, page


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> tuple[ReplayResult, Path]:
    """The replay of a history with two streams and pending frees, and its report."""
    result = replayed(TRACES / "fsdp1_streams.pickle.xz")
    page = tmp_path_factory.mktemp("report") / "streams.html"
    page.write_text(write_page([result], Frames.BASE), encoding="utf-8")
    return result, page


class Opened:
    """A page in the browser, which must not complain or ask for anything."""

    def __init__(self, browser: Any, path: Path, scheme: str = "light", width: int = 1280) -> None:
        self.page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready]", state="attached", timeout=20_000)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        complaints, requests = self.complaints, self.requests
        self.page.close()
        assert complaints == []
        assert len(requests) == 1, "the page itself and nothing else"

    def wait_until(self, expression: str, arg: object = None) -> None:
        """Wait until it is true. The browser's own way to wait is forbidden by the page's policy: it evaluates text."""
        deadline = time.monotonic() + 20
        while not self.page.evaluate(expression, arg):
            assert time.monotonic() < deadline, expression
            self.page.wait_for_timeout(20)

    def move_to(self, step: int, policy: str) -> dict[str, Any]:
        """Move the slider and return the rectangles that are then drawn."""
        self.page.select_option("select.policy", label=policy)
        drawn: dict[str, Any] = self.page.evaluate(
            """async (step) => {
                const slider = document.querySelector(".moment");
                slider.value = step;
                slider.dispatchEvent(new Event("input"));
                await new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
                return rallocatorReport.sections[0].rectangles();
            }""",
            step,
        )
        return drawn


def runs(pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Pieces of memory that touch, as one."""
    joined: list[tuple[int, int]] = []
    for address, size in sorted(pieces):
        if joined and sum(joined[-1]) == address:
            joined[-1] = joined[-1][0], joined[-1][1] + size
        else:
            joined.append((address, size))
    return joined


def assert_draws_the_state(opened: Opened, result: ReplayResult, step: int, policy: str) -> int:
    """What is drawn is what the allocator itself says of the moment. Returns the number of pending blocks."""
    (subject,) = result.subjects
    assert subject.steps is not None
    picture = subject.steps.state_after(step + 1, subject.asked(policy))
    drawn = opened.move_to(step, policy)
    assert (drawn["step"], drawn["policy"]) == (step, policy)
    active = [block for _, _, blocks in picture for block in blocks if block[2] != "inactive"]
    assert sorted(map(tuple, drawn["blocks"])) == sorted(active)
    assert runs([tuple(one) for one in drawn["segments"]]) == runs([(address, size) for address, size, _ in picture])
    return sum(state == "active_pending_free" for _, _, state in active)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_map_shows_what_the_allocator_has_at_random_moments(
    browser: Any, large: tuple[ReplayResult, Path], policy: str
) -> None:
    result, path = large
    random_moments = random.Random(policy).sample(range(90_000), 5)
    with Opened(browser, path) as opened:
        for step in random_moments:
            assert_draws_the_state(opened, result, step, policy)


def test_the_map_shows_pending_blocks(browser: Any, streams: tuple[ReplayResult, Path]) -> None:
    result, path = streams
    with Opened(browser, path) as opened:
        pending = [assert_draws_the_state(opened, result, step, "native") for step in range(500, 3000, 250)]
    assert any(pending)


def test_the_map_is_painted_where_it_says(browser: Any, streams: tuple[ReplayResult, Path]) -> None:
    _, path = streams
    with Opened(browser, path) as opened:
        drawn = opened.move_to(1500, "native")
        largest = sorted(drawn["blocks"], key=lambda block: -block[1])[:8]
        colors = opened.page.evaluate(
            """(addresses) => {
                const history = rallocatorReport.sections[0], map = history.find(".map");
                const image = map.getContext("2d").getImageData(0, 0, map.width, map.height).data;
                const style = getComputedStyle(document.documentElement);
                const two = (part) => part.toString(16).padStart(2, "0");
                const part = ([x, y], which) => two(image[4 * (y * map.width + x) + which]);
                const colorAt = (pixel) => "#" + [0, 1, 2].map((which) => part(pixel, which)).join("");
                const named = {};
                for (const name of ["block", "pending", "free"]) named[style.getPropertyValue("--" + name)] = name;
                return addresses.map((address) => named[colorAt(history.pixelOf(address))]);
            }""",
            [address + size / 2 for address, size, _ in largest],
        )
        names = {"active_allocated": "block", "active_pending_free": "pending"}
        assert colors == [names[state] for _, _, state in largest]


def test_a_large_history_opens_quickly_and_stays_smooth(browser: Any, large: tuple[ReplayResult, Path]) -> None:
    result, path = large
    assert result.rows[0].events >= 130_000
    assert path.stat().st_size <= 10e6
    with Opened(browser, path) as opened:
        assert opened.page.evaluate("rallocatorReport.readyMs") <= 3000
        durations = opened.page.evaluate(
            """async () => {
                const slider = document.querySelector(".moment"), durations = [];
                for (let number = 0; number < 100; number += 1) {
                    const begin = performance.now();
                    slider.value = Math.floor(slider.max * (number * 37 % 100) / 100);
                    slider.dispatchEvent(new Event("input"));
                    await new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
                    durations.push(performance.now() - begin);
                }
                return durations.sort((a, b) => a - b);
            }"""
        )
        assert durations[94] <= 100


def test_the_slider_is_moved_by_the_keyboard(browser: Any, streams: tuple[ReplayResult, Path]) -> None:
    _, path = streams
    with Opened(browser, path) as opened:
        slider = opened.page.get_by_label("Moment, in requests and frees")
        assert slider.get_attribute("type") == "range"
        slider.focus()
        start = int(slider.input_value())
        for key, moved in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1)):
            opened.page.keyboard.press(key)
            assert int(slider.input_value()) == start + moved
        opened.page.keyboard.press("Home")
        opened.wait_until("rallocatorReport.sections[0].rectangles().blocks.length < 5")
        assert "After step 0 of 3,027" in opened.page.locator(".readout").inner_text()
        assert "After step 0 of 3,027" in (slider.get_attribute("aria-valuetext") or "")
        opened.page.keyboard.press("End")
        assert slider.input_value() == "3026"


def test_zooming_changes_what_the_timeline_shows(browser: Any, streams: tuple[ReplayResult, Path]) -> None:
    _, path = streams
    window = "[rallocatorReport.sections[0].from, rallocatorReport.sections[0].to]"
    with Opened(browser, path) as opened:
        picture = opened.page.evaluate("document.querySelector('.timeline').toDataURL()")
        opened.page.get_by_role("button", name="Zoom in").click()
        opened.wait_until("(before) => document.querySelector('.timeline').toDataURL() !== before", arg=picture)
        start, end = opened.page.evaluate(window)
        assert 1500 <= end - start <= 1530
        opened.page.get_by_role("button", name="Later").click()
        assert opened.page.evaluate(window)[0] > start
        opened.page.get_by_role("button", name="Whole history").click()
        assert opened.page.evaluate(window) == [0, 3026]
        opened.page.get_by_role("button", name="Zoom out").click()
        assert opened.page.evaluate(window) == [0, 3026]


def test_every_chart_has_a_table(browser: Any, streams: tuple[ReplayResult, Path]) -> None:
    _, path = streams
    with Opened(browser, path) as opened:
        charts = opened.page.locator("canvas[role=img], svg[role=img]")
        assert charts.count() == 3
        tables = opened.page.locator("details:has(table)")
        assert tables.count() == 3
        for index in range(3):
            tables.nth(index).locator("summary").click()
            rows = tables.nth(index).locator("tbody tr")
            rows.nth(9).wait_for(state="visible")
        opened.move_to(1500, "native")
        drawn = opened.page.evaluate("rallocatorReport.sections[0].rectangles().blocks")
        listed = opened.page.locator(".map-table tbody th").all_inner_texts()
        largest = max(drawn, key=lambda block: block[1])
        assert {address for address, size, _ in drawn if size == largest[1]} >= {int(listed[0], 16)}
        assert len(listed) == min(50, len(drawn))


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 360), ("dark", 360)])
def test_the_page_is_accessible(browser: Any, tmp_path: Path, scheme: str, width: int) -> None:
    from axe_playwright_python.sync_playwright import Axe

    path = tmp_path / "report.html"
    state = write(tmp_path / "state", [segment(0, (3 * MIB, "active_allocated"), (MIB, "inactive"))])
    results = [replayed(TRACES / "frames.pickle.xz", minimum=True), replayed(state)]
    path.write_text(write_page(results, Frames.BASE), encoding="utf-8")
    with Opened(browser, path, scheme, width) as opened:
        for details in opened.page.locator("details summary").all():
            details.click()
        violations = Axe().run(opened.page).response["violations"]
        assert [(one["id"], one["impact"], one["nodes"][0]["target"]) for one in violations] == []
        assert opened.page.evaluate("document.scrollingElement.scrollWidth") <= width, "nothing sticks out"


def test_hostile_names_do_nothing_in_a_browser(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    history = with_frames(tmp_path / "<img src=x onerror=alert(1)>", HOSTILE)
    path.write_text(write_page([replayed(history)], Frames.FULL), encoding="utf-8")
    with Opened(browser, path) as opened:
        assert opened.page.locator("img").count() == 0
        assert "<img src=x onerror=alert(1)>" in opened.page.locator("h2").inner_text()
        assert (
            "</script><img src=x onerror=alert(1)>\\x1b[31m[bold]&amp; at" in opened.page.locator("main").inner_text()
        )


def test_addresses_and_sizes_are_exact_in_the_page(large: tuple[ReplayResult, Path]) -> None:
    (subject,) = large[0].subjects
    assert subject.steps is not None
    for policy in POLICIES:
        timeline = subject.steps.timeline(subject.asked(policy))
        for name in ("block_address", "segment_address", "level_reserved"):
            assert max(array.array("Q", timeline[name]), default=0) < 1 << 53, name


def test_an_empty_history_has_a_page(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    history = write_history(tmp_path / "h", [event("alloc", 64, 0), *free(64, 0), event("alloc", 128, 20 * GIB)])
    path.write_text(write_page([replayed(history, budget="1GiB")], Frames.BASE), encoding="utf-8")
    with Opened(browser, path) as opened:
        assert "in 0 blocks" in opened.page.locator(".readout").inner_text()
