"""Runs somebody's Python program as `python` would, with the allocator enabled before its first line.

`runpy` is not enough: it puts its own `__main__` back when the program's main module ends, while threads, exit handlers
and the pickling of `__main__`'s classes may still need the program's. Here the program's stays, as under `python`.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import NoReturn

from rallocator._enabling import Request, say


@dataclass(frozen=True, slots=True)
class Program:
    """A program and how it is to be run."""

    target: str
    """A file, a directory or zip file with a `__main__.py`, or a module's name."""
    is_module: bool
    arguments: tuple[str, ...]
    config: str | None = None
    attach: str = "auto"

    @staticmethod
    def parse(words: Sequence[str], *, config: str | None = None, attach: str = "auto") -> Program:
        """Read `SCRIPT.py ARGS…` or `-m MODULE ARGS…`.

        Raises:
            ValueError: there is no program in it; the message says what is expected.
        """
        first, rest = (words[0], words[1:]) if words else ("", ())
        is_module = first.startswith("-m")
        if is_module and first != "-m":
            first, rest = first[2:], words[1:]
        elif is_module:
            first, rest = (rest[0], rest[1:]) if rest else ("", ())
        if not first:
            raise ValueError("name a program: SCRIPT.py, or -m MODULE")
        if first.startswith("-") and not is_module:
            raise ValueError(
                f"there is no option {first}; options come before the program and are --config and --attach"
            )
        return Program(first, is_module, tuple(rest), config, attach)

    def run(self) -> None:
        """Enable the allocator and run the program; its exceptions and `SystemExit` pass through.

        Exits with 2 if a setting is wrong or there is no such program.
        """
        # As `python` does it: `__file__` is absolute, and `sys.argv[0]` as it was given.
        path = os.path.join(os.getcwd(), self.target)
        if not self.is_module and not os.path.exists(path):
            _refuse(f"there is no file {self.target}")
        self._enable()
        # `-P` keeps the program's folder out of the path, and then ours is not there to be replaced.
        is_ours_first = not getattr(sys.flags, "safe_path", False)
        if self.is_module:
            sys.path[:is_ours_first] = [os.getcwd()] if is_ours_first else []
            self._run_module(self.target)
        elif os.path.isdir(path) or _is_archive(path):
            sys.path[:is_ours_first] = [path]
            self._run_module("__main__", path)
        else:
            sys.path[:is_ours_first] = [os.path.dirname(os.path.realpath(path))] if is_ours_first else []
            self._run_file(path)

    def _enable(self) -> None:
        from rallocator.errors import ConfigError

        try:
            Request(self.config, self.attach).enable()
        except (ConfigError, ValueError) as error:
            _refuse(error)

    def _run_file(self, path: str) -> None:
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        main = _new_main(path, None, importlib.machinery.SourceFileLoader("__main__", path))
        main.__package__ = None
        self._execute(code, main, self.target)

    def _run_module(self, name: str, folder: str | None = None) -> None:
        spec = _find(name, folder)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = _find(f"{name}.__main__")
        get_code = getattr(spec and spec.loader, "get_code", None)
        if spec is None or get_code is None or (code := get_code(spec.name)) is None:
            _refuse(f"there is no module {name} to run")
        path = spec.origin or name
        main = _new_main(path, spec, spec.loader)
        main.__package__ = spec.parent
        self._execute(code, main, path if folder is None else self.target)

    def _execute(self, code: CodeType, module: ModuleType, name: str) -> None:
        sys.argv[:] = [name, *self.arguments]
        sys.modules["__main__"] = module
        exec(code, module.__dict__)


def _find(name: str, folder: str | None = None) -> importlib.machinery.ModuleSpec | None:
    """Find a module, in one folder or archive only if one is given."""
    try:
        if folder is not None:
            return importlib.machinery.PathFinder.find_spec(name, [folder])
        return importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        _refuse(f"there is no module {name} to run: {error}")


def _refuse(reason: object) -> NoReturn:
    say(reason)
    raise SystemExit(2)


def _new_main(file: str, spec: importlib.machinery.ModuleSpec | None, loader: object) -> ModuleType:
    module = ModuleType("__main__")
    module.__file__ = file
    module.__spec__ = spec
    module.__loader__ = loader  # type: ignore[assignment]
    module.__dict__["__builtins__"] = builtins
    module.__dict__["__cached__"] = None if spec is None else spec.cached
    return module


def _is_archive(path: str) -> bool:
    """Whether a file is a zip file with a program in it, as `python` runs too."""
    import zipimport

    try:
        return zipimport.zipimporter(path).find_spec("__main__") is not None
    except zipimport.ZipImportError:
        return False
