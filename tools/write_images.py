"""Writes docs/images: what the report of a recorded history looks like, taken from Debian's Chromium.

python tools/write_images.py
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from rallocator._replay import POLICIES, ReplaySettings, replay_file
from rallocator._report import Frames, write_page

ROOT = Path(__file__).parents[1]
HISTORY = ROOT / "tests" / "traces" / "frames.pickle.xz"
IMAGES = ROOT / "docs" / "images"


def main() -> None:
    """Write all images."""
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("rallocator: chromium was not found. On Debian: apt-get install chromium")
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = Path(folder) / "report.html"
        result = replay_file(HISTORY, ReplaySettings.check(POLICIES, minimum=True), keep_frames=True)
        page.write_text(write_page([result], Frames.BASE), encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        take(browser, page, "light", 1000, "report.png", ("h2", ".map-legend"))
        take(browser, page, "dark", 400, "report-phone.png", (".timeline", ".map-legend"))
        browser.close()


def take(browser: Browser, path: Path, scheme: str, width: int, name: str, part: tuple[str, str]) -> None:
    """Take a picture from the top of one element to the bottom of another."""
    tab = browser.new_page(
        color_scheme="dark" if scheme == "dark" else "light", viewport={"width": width, "height": 900}
    )
    tab.goto(path.as_uri())
    tab.wait_for_selector("html[data-ready]", state="attached")
    first, last = (tab.locator(selector).first.bounding_box() for selector in part)
    if first is None or last is None:
        sys.exit(f"rallocator: {part} are not in the page")
    top, bottom = first["y"] - 12, last["y"] + last["height"] + 12
    clip = {"x": 0, "y": top, "width": width, "height": bottom - top}
    tab.screenshot(path=IMAGES / name, full_page=True, clip=clip)  # type: ignore[arg-type]
    tab.close()


if __name__ == "__main__":
    main()
