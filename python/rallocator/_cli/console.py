"""How commands print: results on stdout, all else on stderr, and no text from outside as markup or control codes."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from rich.console import Console, JustifyMethod
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from rallocator._text import printable

PROGRESS_AFTER_SECONDS = 2.0
"""Work that takes less shows no progress bar."""

GAP_WIDTH = 2
"""Columns of the terminal that rich leaves empty beside each of a table."""

TEXT_WIDTH = 10
"""Columns of the terminal that text in a table has at least."""

STDOUT = "<stdout>"
"""What an error names where printing failed."""


class ReaderGoneError(Exception):
    """Whoever read stdout has read enough, as `head` does. No `OSError`: to that Click gives an answer's exit code."""


def cell(text: object) -> Text:
    """Return text from outside as a cell of a table: never read as rich's markup."""
    return Text(printable(text))


def print_json(value: object) -> None:
    """Print a value as JSON on stdout."""
    _print(json.dumps(value, indent=2, allow_nan=False) + "\n")


def print_text(*lines: object) -> None:
    """Print lines on stdout as they are, but for control characters."""
    for line in lines:
        _print(printable(line) + "\n")


def print_table(columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[object]], title: str | None = None) -> None:
    """Print a table on stdout.

    Arguments:
        columns: for each its heading, if any has one, and what it holds: "text", which may be wrapped, a "name" or a
            "figure", which are never cut short; where the terminal is too narrow for them, the table is wider.
        rows: the cells, as text from anywhere.
        title: a line above the table.
    """
    if title:
        print_text(title)
    has_headings = any(heading for heading, _ in columns)
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=has_headings)
    lines = [[cell(value) for value in row] for row in rows]
    least_width = GAP_WIDTH * len(columns)
    for number, (heading, kind) in enumerate(columns):
        justify: JustifyMethod = "right" if kind == "figure" else "left"
        width = max((line[number].cell_len for line in lines), default=0)
        if kind == "text":
            width = min(width, TEXT_WIDTH)
        least_width += width
        table.add_column(cell(heading), justify=justify, no_wrap=kind != "text", overflow="fold", min_width=width)
    for line in lines:
        table.add_row(*line)
    console = Console(file=sys.stdout, highlight=False)
    # A figure without its unit, or half of it, would be another one. Rich shares out the width by what headings want,
    # and would crop the last columns for that.
    console.width = max(console.width, least_width)
    with console.capture() as written:
        console.print(table, crop=False)
    _print(written.get())


def warn(message: object) -> None:
    """Print a line on stderr. Where that fails there is nowhere to say so, and the exit code has to do."""
    with suppress(OSError, AttributeError):
        sys.stderr.write(f"rallocator: {printable(message)}\n")


def _print(text: str) -> None:
    """Print on stdout; characters that its encoding lacks are written out, as Python does on stderr.

    Raises:
        OSError: it was closed before the program began, or cannot be written to.
        ReaderGoneError: nobody reads it any more.
    """
    if sys.stdout is None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF), STDOUT)
    encoding = sys.stdout.encoding or "utf-8"
    with _named():
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))


def flush() -> None:
    """Write what was printed on stdout and is still in its buffer.

    Raises:
        OSError: it cannot be written.
        ReaderGoneError: nobody reads it any more.
    """
    if sys.stdout is not None:
        with _named():
            sys.stdout.flush()


@contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise ReaderGoneError from error
    except OSError as error:
        raise OSError(error.errno, error.strerror, STDOUT) from error


@contextmanager
def progress(description: str, steps: int) -> Iterator[Callable[[], None]]:
    """Show a bar on stderr if it is a terminal and the work takes a while.

    Arguments:
        description: what is being done.
        steps: how many times the function that is yielded will be called.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda: None
        return
    bar = Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console, transient=True)
    task = bar.add_task(description, total=steps)
    timer = threading.Timer(PROGRESS_AFTER_SECONDS, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda: bar.advance(task)
    finally:
        timer.cancel()
        timer.join()
        bar.stop()
