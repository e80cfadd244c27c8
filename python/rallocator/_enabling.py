"""Enables the allocator for `rallocator run`, and says what there is to say of it."""

from __future__ import annotations

import contextlib
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Request:
    """What `rallocator run` was asked for."""

    config: str | None
    attach: str

    def enable(self) -> None:
        """Enable the allocator and, if it cannot be, say why.

        Raises:
            ConfigError: a setting is wrong.
            ValueError: there is no such way into torch.
        """
        # Imported here: the command line reads the program's words without loading any of it.
        from rallocator import enable

        with warnings.catch_warnings(record=True) as caught:
            # A filter that makes errors of warnings is meant for the program, which runs whatever is to be said here.
            warnings.simplefilter("always")
            enable(self.config, attach=self.attach, required=False)
        for warning in filter(_is_wanted, caught):
            if Path(warning.filename).parent == Path(__file__).parent:
                # The program's author can do nothing about a line of ours: what it says is enough.
                say(warning.message)
            else:
                warnings.showwarning(warning.message, warning.category, warning.filename, warning.lineno)


def _is_wanted(warning: warnings.WarningMessage) -> bool:
    """Whether the filters in force would show a warning, or make an error of it."""
    with warnings.catch_warnings(record=True) as shown:
        try:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        except Warning:
            return True
    return bool(shown)


def say(message: object) -> None:
    """Write a line on stderr. There may be none (`2>&-`), or nobody who reads it: neither is a failure."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"rallocator: {message}\n")
