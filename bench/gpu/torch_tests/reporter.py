"""The pytest plugin inside the processes that run torch's tests: it selects, and writes down each event as it happens.

What was written is on disk when the process dies, so the supervisor knows in which test. One JSON object a line:

- `{"event": "collected", "id", "serial"}` when collecting only;
- `{"event": "uncollected", "id", "message"}` for a file that cannot be imported;
- `{"event": "start", "id"}` and `{"event": "end", "id", "outcome", "seconds", "message"}`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.torch_tests import EVENTS_VARIABLE, ROUTE_VARIABLE
from bench.gpu.torch_tests.selection import is_selected

_RANK = {"passed": 0, "skipped": 1, "failed": 2, "error": 3}
# What torch's tests add to every failure.
_ADVICE = ("To execute this test", "This message can be suppressed", "python test/", "PYTORCH_TEST_WITH")

_seen: dict[str, dict[str, Any]] = {}


def pytest_configure(config: pytest.Config) -> None:
    """Declare torch's marker, and make sure that the process runs on the allocator that it is to run on."""
    config.addinivalue_line("markers", "serial: torch's own, for tests that need the GPU for themselves")
    import torch

    route = os.environ.get(ROUTE_VARIABLE)
    if route:
        import rallocator

        if rallocator.attached() != route:
            pytest.exit(f"rallocator is attached through {rallocator.attached()}, not {route}", returncode=3)
    _supply_missing_names(torch)


def _supply_missing_names(torch: Any) -> None:
    """Give torch's helpers the names that tests of the next release import from them."""
    common_cuda = importlib.import_module("torch.testing._internal.common_cuda")

    @contextlib.contextmanager
    def blas_library_context(name: str) -> Iterator[None]:
        before = torch.backends.cuda.preferred_blas_library()
        torch.backends.cuda.preferred_blas_library(name)
        try:
            yield
        finally:
            torch.backends.cuda.preferred_blas_library(before)

    for name, value in (("blas_library_context", blas_library_context), ("PLATFORM_SUPPORTS_WORKQUEUE_CONFIG", False)):
        if not hasattr(common_cuda, name):
            setattr(common_cuda, name, value)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave what the rule selects."""
    config.hook.pytest_deselected(items=[item for item in items if not _is_chosen(item)])
    items[:] = filter(_is_chosen, items)


def _is_chosen(item: pytest.Item) -> bool:
    file, *classes, test = item.nodeid.split("::")
    return len(classes) == 1 and is_selected(file, classes[0], test)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Write down what there is to run. Where a file ends the process, pytest calls this without having selected."""
    if session.config.option.collectonly:
        for item in filter(_is_chosen, session.items):
            _write(event="collected", id=item.nodeid, serial=item.get_closest_marker("serial") is not None)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write down a file that cannot be imported."""
    if report.failed:
        _write(event="uncollected", id=report.nodeid, message=gist(report.longreprtext, report.nodeid))


def pytest_runtest_logstart(nodeid: str) -> None:
    """Write down that a test begins."""
    _seen[nodeid] = {"outcome": "passed", "seconds": 0.0, "message": ""}
    _write(event="start", id=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the worst of what is reported of a test: of its set-up, its call, its parts and its end."""
    seen = _seen[report.nodeid]
    seen["seconds"] += report.duration
    outcome = "error" if report.failed and report.when != "call" else report.outcome
    if _RANK[outcome] > _RANK[seen["outcome"]]:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        seen.update(outcome=outcome, message=gist(reason, report.nodeid))


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Write down how a test ended."""
    seen = _seen[nodeid]
    _write(event="end", id=nodeid, **{**seen, "seconds": round(seen["seconds"], 2)})


def gist(text: str, nodeid: str) -> str:
    """Say in a line what a failure's text says: where in the test's file, and what pytest marks with an E."""
    name = re.escape(Path(nodeid.partition("::")[0]).name)
    places = re.findall(rf"^(?:\S*/)?{name}:(\d+): ", text, re.MULTILINE)
    marked = [line[1:].strip() for line in text.splitlines() if line.startswith("E  ")]
    said = " ".join(line for line in marked if line and not line.startswith(_ADVICE)) or " ".join(text.split())
    return (f"line {places[0]}: " if places else "") + said[:300]


def _write(**event: Any) -> None:
    with open(os.environ[EVENTS_VARIABLE], "a", encoding="utf-8") as file:  # noqa: PTH123
        file.write(json.dumps(event) + "\n")
