"""Starts Python processes of our own, for what cannot be undone in this one."""

from __future__ import annotations

import sys

# `python -c` and `-m` put the current folder first, and people ask these commands for help in the folder of their
# program: a `json.py` or `torch` there would be run. Option -P, which says so, is younger than the oldest Python
# supported, and -I would also drop PYTHONPATH, by which torch or rallocator may be found.
_BEGIN = "import sys; sys.path[:] = [folder for folder in sys.path if folder]\n"


def python_command(code: str, *arguments: str) -> list[str]:
    """Return the command that runs code of ours in a new Python, which finds no modules in the current folder.

    Arguments:
        code: the program.
        arguments: what it finds in `sys.argv` from 1 on.
    """
    return [sys.executable, "-c", _BEGIN + code, *arguments]
