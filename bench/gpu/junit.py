"""Reads the JUnit XML that pytest writes into plain values."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree


def read_junit(path: Path) -> list[dict[str, object]]:
    """One entry for each test: `name`, `outcome` (passed, failed, error, skipped), `seconds`, `message`.

    The file is one that this session's own pytest wrote. A file that a killed pytest left unfinished gives one entry
    with the outcome error.
    """
    try:
        root = ElementTree.parse(path).getroot()  # noqa: S314 - this session's own pytest wrote the file.
    except ElementTree.ParseError as error:
        return [{"name": path.name, "outcome": "error", "seconds": 0.0, "message": f"unreadable: {error}"}]
    return [_entry(case) for case in root.iter("testcase")]


def _entry(case: ElementTree.Element) -> dict[str, object]:
    outcome, message = "passed", ""
    for tag, meaning in (("failure", "failed"), ("error", "error"), ("skipped", "skipped")):
        found = case.find(tag)
        if found is not None:
            outcome, message = meaning, _gist(f"{found.get('message', '')}\n{found.text or ''}")
            break
    return {
        "name": f"{case.get('classname', '')}::{case.get('name', '')}".removeprefix("tests.gpu."),
        "outcome": outcome,
        "seconds": round(float(case.get("time", "0")), 1),
        "message": message,
    }


def _gist(text: str) -> str:
    """Pick the line that says most: the first error that pytest marks with an E, of a child process too."""
    lines = text.splitlines()
    marked = [line.removeprefix("E").strip() for line in lines if line.startswith("E  ")]
    return (marked or [line for line in lines if line.strip()] or [""])[0][:300]
