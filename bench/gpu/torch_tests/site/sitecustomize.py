"""Enables rallocator in every Python process that imports torch, right after the import.

Python imports this by its name where this folder is on `PYTHONPATH`. That reaches what torch's tests start as well: the
processes of its multiprocessing, and scripts that they run with `python -c`.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

ROUTE_VARIABLE = "TORCH_TESTS_ATTACH"


class EnableAfterTorch:
    """Finds torch as the others do, and has its loader call `enable` at the end."""

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Stand aside for all but the first import of torch."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_enable(module: ModuleType) -> None:
                execute(module)
                _enable()

            spec.loader.exec_module = execute_and_enable  # type: ignore[method-assign]
        return spec


def _enable() -> None:
    import rallocator

    with warnings.catch_warnings():
        # A process of the tests that hides the GPUs goes on without; the one that runs the tests checks that it has it.
        warnings.simplefilter("ignore", RuntimeWarning)
        rallocator.enable(attach=os.environ[ROUTE_VARIABLE], required=False)


if os.environ.get(ROUTE_VARIABLE):
    sys.meta_path.insert(0, EnableAfterTorch())
