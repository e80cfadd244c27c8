"""The command line. Typer and rich are loaded when a command runs, and nowhere else in the package."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rallocator._run import Program

__all__ = ["main"]


def main() -> None:
    """Run the command that the process's arguments name, and exit with its code."""
    from rallocator._cli.app import ProgramToRun, app

    program: Program | None = None
    try:
        app(prog_name="rallocator")
    except ProgramToRun as request:
        program = request.program
    # The user's program runs outside of the command line's own error handling, so that its exceptions, its exit code
    # and its Ctrl-C are what they would be without us.
    if program is not None:
        program.run()
