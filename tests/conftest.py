"""What the tests of several files share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.torch_programs import ROUTES, Playing


@pytest.fixture(params=ROUTES)
def route(request: pytest.FixtureRequest) -> Iterator[str]:
    """Have programs that `torch_programs.play` plays attach through this route."""
    Playing.route = request.param
    yield request.param
    Playing.route = "pluggable"
