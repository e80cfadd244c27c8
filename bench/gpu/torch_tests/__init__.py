"""Runs torch's own tests of its allocator under torch's allocator and under both of our routes, and compares.

`selection` says which tests, `supervisor` runs them in processes that may crash or hang, `reporter` is the plugin of
pytest in those processes, `site` makes every Python process among them use rallocator, and `comparison` sets the routes
side by side. The tests are torch's and no part of this repository: `tools/torch_tests.py` fetches them.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent.parent

FETCHED = ROOT / ".scratch" / "torch-tests"
"""Where torch's tests are put. Git ignores it."""

EVENTS_VARIABLE = "TORCH_TESTS_EVENTS"
"""The environment variable that names the file for what happens to the tests of a process."""

ROUTE_VARIABLE = "TORCH_TESTS_ATTACH"
"""The one that says by which way rallocator is attached; empty for torch's own allocator. `site` reads it too."""
