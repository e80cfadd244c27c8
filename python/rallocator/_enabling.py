"""Enables the allocator for `rallocator run`, and says what there is to say of it.

A program is more than its first process. What it forks has the allocator as it is, but what `multiprocessing` starts by
the methods "spawn" and "forkserver" begins anew, as a new Python: there the program's main module is imported, and no
line of it enables anything. So each such process is handed the request along with what `multiprocessing` hands it.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# Source and not a function's name, for pickle would import that function's module while it reads: where rallocator is
# not found, as under another Python that the program names by `multiprocessing.set_executable`, that would end the
# process before its first line. The path is the one that the process gets a moment later.
_IN_NEW_PROCESS = """
import sys
sys.path = path
try:
    from rallocator._enabling import Request
    Request(**request).enable()
except Exception as error:
    if sys.stderr is not None:
        sys.stderr.write(f"rallocator: not enabled in a process that the program started: {error}\\n")
"""


@dataclass(frozen=True, slots=True)
class Request:
    """What `rallocator run` was asked for."""

    config: str | None
    attach: str
    said: tuple[str, ...] = ()
    """What the processes before this one have said, and this one need not say again."""

    def enable(self) -> None:
        """Enable the allocator here and in every process that `multiprocessing` starts anew; if it cannot be, say why.

        Raises:
            ConfigError: a setting is wrong.
            ValueError: there is no such way into torch.
        """
        # Imported here: the command line reads the program's words without loading any of it.
        from rallocator import enable

        with warnings.catch_warnings(record=True) as caught:
            # A filter that makes errors of warnings is meant for the program, which runs whatever is to be said here.
            warnings.simplefilter("always")
            is_enabled = enable(self.config, attach=self.attach, required=False)
        news = [warning for warning in caught if str(warning.message) not in self.said and _is_wanted(warning)]
        for warning in news:
            if Path(warning.filename).parent == Path(__file__).parent:
                # The program's author can do nothing about a line of ours: what it says is enough.
                say(warning.message)
            else:
                warnings.showwarning(warning.message, warning.category, warning.filename, warning.lineno)
        if is_enabled:
            _hand_on(replace(self, said=(*self.said, *(str(warning.message) for warning in news))))


class _Enabler:
    """Enables the allocator in the process in which it is unpickled, where nothing remains of it."""

    def __init__(self, path: list[str], request: Request) -> None:
        self._path = path
        self._request = request

    def __reduce__(self) -> tuple[Any, ...]:
        request = {"config": self._request.config, "attach": self._request.attach, "said": self._request.said}
        return exec, (_IN_NEW_PROCESS, {"path": self._path, "request": request})


def _hand_on(request: Request) -> None:
    """Have every process that `multiprocessing` starts anew from this one enable the allocator too.

    Both of its methods send what this function returns ahead of everything else, and a new process reads it before it
    imports the main module, which may use the GPU in its first line. Nothing that comes earlier is as small: a variable
    would need a file in `site-packages` that every Python on the machine reads at its start, and would reach programs
    that are not the user's.
    """
    import multiprocessing.spawn

    get_preparation_data = multiprocessing.spawn.get_preparation_data

    def get_data_and_request(name: str) -> dict[str, Any]:
        data = get_preparation_data(name)
        # A key that `multiprocessing` does not know is one that it does not look at.
        data["rallocator"] = _Enabler(data["sys_path"], request)
        return data

    multiprocessing.spawn.get_preparation_data = get_data_and_request


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
