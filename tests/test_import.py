"""What `import rallocator` loads, and what the package offers."""

from __future__ import annotations

import rallocator
from tests.processes import succeed

HEAVY = ("torch", "numpy", "typer", "rich", "plotly")


def test_import_loads_no_torch_no_cuda_and_no_command_line() -> None:
    printed = succeed(f"""
        import sys
        import rallocator

        print([name for name in {HEAVY!r} if name in sys.modules])
        print([line for line in open("/proc/self/maps") if "cuda" in line.lower() or "libnv" in line])
    """)
    assert printed.splitlines() == ["[]", "[]"]


def test_public_names_are_listed_and_there() -> None:
    assert dir(rallocator) == sorted(rallocator.__all__)
    assert rallocator.testing.__name__ == "rallocator.testing"
    for name in rallocator.__all__:
        assert getattr(rallocator, name) is not None


def test_unknown_name_is_an_attribute_error() -> None:
    printed = succeed("""
        import rallocator

        try:
            rallocator.enabel
        except AttributeError as error:
            print(error)
    """)
    assert printed == "module 'rallocator' has no attribute 'enabel'"


def test_public_functions_say_what_they_take_and_give() -> None:
    for function in (rallocator.enable, rallocator.stats, rallocator.reset_peak_stats):
        assert function.__doc__ is not None
        assert "Arguments:" in function.__doc__
        assert "Raises:" in function.__doc__


def test_statistics_need_an_allocator() -> None:
    printed = succeed("""
        import rallocator

        keep = lambda: rallocator.restrict_moves((0, 1), "off")
        calls = rallocator.stats, rallocator.reset_peak_stats, rallocator.snapshot, rallocator.empty_cache, keep
        for call in calls:
            try:
                call()
            except rallocator.errors.NotEnabledError as error:
                print(error)
        print(rallocator.is_enabled(), rallocator.attached())
    """).splitlines()
    assert printed[0].startswith("rallocator.stats() needs an allocator")
    assert len(printed) == 6
    assert printed[-1] == "False None"
