"""The file that `rallocator replay --html` writes: never a recording, and either the old report or a whole new one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from rallocator.errors import RallocatorError

_BEGINNING = b"<!doctype html"
"""How a report begins. What begins otherwise is something that its owner may miss."""


def check(page: Path, recordings: Sequence[Path]) -> None:
    """Refuse a place where a report cannot or must not be written, before minutes are spent on replays.

    Arguments:
        page: where the report is to be written.
        recordings: what is to be replayed.

    Raises:
        RallocatorError: the file is one of the recordings or no report, or it cannot be written there.
    """
    try:
        reason = _reason_against(page, {file.resolve() for file in recordings})
    except OSError as error:
        reason = error.strerror or str(error)
    if reason is not None:
        raise RallocatorError(f"--html {os.fspath(page)}: {reason}")


def write(page: Path, text: str) -> None:
    """Write a report in place of the one that may be there, which stays if that fails.

    Raises:
        RallocatorError: it cannot be written, for instance because the disk is full.
    """
    # A link is followed, as it is where a file is simply opened.
    target = page.resolve()
    partial = target.with_name(f".rallocator-{os.getpid()}.html")
    try:
        try:
            with partial.open("x", encoding="utf-8") as file:
                file.write(text)
            if target.exists():
                shutil.copymode(target, partial)
            partial.replace(target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise RallocatorError(f"--html {os.fspath(page)}: {error.strerror or error}") from error


def _reason_against(page: Path, recordings: set[Path]) -> str | None:
    target = page.resolve()
    if target in recordings:
        return "that is a recording to replay, and a report would overwrite it; name another file for the report"
    if target.is_dir():
        return "that is a folder; name a file in it"
    if not target.parent.is_dir():
        return "its folder does not exist; make it first, or name another"
    if not os.access(target.parent, os.W_OK | os.X_OK) or (target.exists() and not os.access(target, os.W_OK)):
        return "it may not be written; name another file for the report"
    if target.exists() and not _may_be_replaced(target):
        return "it exists and is no report, so it is not overwritten; name another file for the report"
    return None


def _may_be_replaced(file: Path) -> bool:
    """Whether a file is a report, or empty, as those are that somebody made to reserve a name."""
    if not file.is_file():
        return False
    with file.open("rb") as content:
        beginning = content.read(len(_BEGINNING))
    return not beginning or beginning.lower() == _BEGINNING
