"""The exceptions: one family, and each where handlers written for the standard ones find it."""

from __future__ import annotations

import pytest

from rallocator import errors


@pytest.mark.parametrize("name", errors.__all__)
def test_each_exception_belongs_to_the_family_and_is_explained(name: str) -> None:
    exception = getattr(errors, name)
    assert issubclass(exception, errors.RallocatorError)
    assert exception.__doc__


def test_all_exceptions_are_listed() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert defined == set(errors.__all__)


def test_wrong_settings_are_caught_as_a_value_error() -> None:
    assert issubclass(errors.ConfigError, ValueError)


def test_running_out_of_memory_is_caught_as_a_memory_error() -> None:
    assert issubclass(errors.OutOfMemoryError, MemoryError)
