"""The command line. Typer and rich are loaded when a command runs, and nowhere else in the package."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from rallocator._run import Program

__all__ = ["main"]


def main() -> None:
    """Run the command that the process's arguments name, and exit with its code.

    What goes wrong and is no answer of the command's is one line and exit code 2, never 1, which is an answer.
    `python -X dev -m rallocator` also prints the traceback.
    """
    from rallocator._cli.app import ProgramToRun, app
    from rallocator._cli.console import flush

    program: Program | None = None
    try:
        try:
            app(prog_name="rallocator")
        finally:
            # What is still in the buffer would fail after the last line of Python, where the exit code is settled.
            flush()
    except ProgramToRun as request:
        program = request.program
    except Exception as error:  # noqa: BLE001 — whatever it is, the user gets a line and the code that means it.
        _fail(error)
    # The user's program runs outside of the command line's own error handling, so that its exceptions, its exit code
    # and its Ctrl-C are what they would be without us.
    if program is not None:
        program.run()


def _fail(error: Exception) -> NoReturn:
    from rallocator._cli.app import USAGE_ERROR
    from rallocator._cli.console import ReaderGoneError, warn
    from rallocator.errors import RallocatorError

    if sys.flags.dev_mode and not isinstance(error, ReaderGoneError):
        import traceback

        traceback.print_exception(error)
    if isinstance(error, OSError | RallocatorError):
        warn(error)
    elif isinstance(error, MemoryError):
        warn("this machine has too little memory for it")
    elif not isinstance(error, ReaderGoneError):
        warn(f"a defect of rallocator: {type(error).__name__}: {error}; `python -X dev -m rallocator` shows where")
    _discard_what_cannot_be_written()
    raise SystemExit(USAGE_ERROR)


def _discard_what_cannot_be_written() -> None:
    """Have Python not try again, as it exits, to write what could not be written."""
    from rallocator._cli.console import ReaderGoneError, flush

    try:
        flush()
    except (OSError, ReaderGoneError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
