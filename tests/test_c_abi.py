"""The C functions, without torch: the header, the table of functions, and what is raised to C++."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from rallocator import _core
from tests.processes import INCLUDE, build_library, succeed

HEADER = INCLUDE / "rallocator.h"

CLIENT_TESTS = [
    "table_is_as_long_as_the_header_says",
    "memory_is_given_and_taken_back",
    "failures_are_statuses_with_a_text",
    "size_zero_and_pointers_that_are_not_ours_do_nothing",
    "memory_fraction_is_kept",
    "pool_asks_the_filter_and_releases_it_once",
    "statistics_and_pictures_agree",
    "pool_goes_back_to_a_checkpoint",
    "failure_for_want_of_memory_has_details",
    "pool_has_its_segments_from_a_source",
    "tracker_is_told_of_what_comes_and_goes",
]


def declared_functions() -> set[str]:
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    return set(re.findall(r"^[\w *]*?\b(rallocator_\w+)\(", text, flags=re.MULTILINE))


def test_header_declares_exactly_what_the_library_exports() -> None:
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("no nm")
    symbols = subprocess.run([nm, "-D", "--defined-only", _core.__file__], check=True, capture_output=True, text=True)
    exported = set(re.findall(r" T (rallocator_\w+)", symbols.stdout))
    assert "rallocator_malloc" in exported
    assert declared_functions() == exported


@pytest.mark.parametrize(("compiler", "standard"), [("cc", "c11"), ("c++", "c++17")])
def test_header_compiles_without_a_warning(compiler: str, standard: str) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    language = "c" if compiler == "cc" else "c++"
    options = [f"-std={standard}", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only", "-x", language]
    subprocess.run([compiler, *options, str(HEADER)], check=True)


@pytest.mark.parametrize("name", CLIENT_TESTS)
def test_client_in_c(name: str) -> None:
    client = build_library("api_client.c", link_core=True)
    printed = succeed(f"""
        import ctypes
        from rallocator import _core

        _core._install("", simulated_bytes=1 << 30)
        check = ctypes.CDLL({str(client)!r}).{name}
        check.restype = ctypes.c_char_p
        print(check())
    """)
    assert printed == "None"


def test_cxx_program_without_torch_catches_a_runtime_error_with_the_same_text() -> None:
    client = build_library("catches_exceptions.cpp", link_core=True)
    printed = succeed(f"""
        import ctypes
        from rallocator import _core

        failure = ctypes.CDLL({str(client)!r}).malloc_failure
        failure.restype, failure.argtypes = ctypes.c_char_p, (ctypes.c_size_t, ctypes.c_int)
        print(failure(1, 0).decode())
        _core._install("", simulated_bytes=1 << 30)
        print(failure(20 << 30, 0).decode().splitlines()[0])
        print(failure(1 << 20, -1).decode())
        print(repr(failure(1 << 20, 0).decode()))
    """).splitlines()
    assert printed[0] == "rallocator is loaded but not enabled: call rallocator.enable() right after `import torch`."
    assert printed[1].startswith("CUDA out of memory. Tried to allocate 20.00 GiB.")
    assert printed[2] == "rallocator: -1 is not the index of a device."
    assert printed[3] == "''"


def test_filter_of_a_pool_is_a_copy_and_its_exceptions_pass_through() -> None:
    client = build_library("catches_exceptions.cpp", link_core=True)
    printed = succeed(f"""
        import ctypes
        from rallocator import _core

        _core._install("", simulated_bytes=1 << 30)
        client = ctypes.CDLL({str(client)!r})
        print(client.filter_is_copied_and_destroyed() > 0)
        client.exception_of_a_filter_passes_through.restype = ctypes.c_bool
        print(client.exception_of_a_filter_passes_through())
        client.empty_filter_accepts_every_stream.restype = ctypes.c_bool
        print(client.empty_filter_accepts_every_stream())
        print(_core._stats(0)["allocated_bytes.all.current"])
    """)
    assert printed.splitlines() == ["True", "True", "True", "0"]


def test_second_installation_with_other_settings_is_refused() -> None:
    printed = succeed("""
        from rallocator import _core
        from rallocator.errors import ConfigError

        print(_core._install("", simulated_bytes=1 << 30), _core._install("", simulated_bytes=1 << 30))
        try:
            _core._install("", simulated_bytes=1 << 31)
        except ConfigError as error:
            print(error)
    """).splitlines()
    assert printed[0] == "True False"
    assert "cannot be changed" in printed[1]
