"""The bridge: where one is looked for, how one is made, and what goes wrong with a word of help."""

from __future__ import annotations

import os
import shutil
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rallocator import _bridge, _bridge_build, _torch
from rallocator.errors import BridgeError
from tests.processes import run_python, succeed
from tests.torch_programs import SIMULATED, built_bridge, cuda_home
from tools import torch_headers

TORCH: Any = SimpleNamespace(
    __version__="2.11.0+cu130",
    version=SimpleNamespace(git_version="0123abc", cuda="13.0"),
    __file__="/torch/__init__.py",
)
"""What is asked of a torch before anything of it is used."""


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have the user's cache be a new folder, which does not exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(_bridge.VARIABLE, raising=False)
    monkeypatch.setattr(_bridge, "BUNDLED", tmp_path / "bundled")
    return tmp_path / "cache" / "rallocator"


def put(folder: Path) -> Path:
    """Put a file of the right name into a folder, as a build would."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = folder / _bridge.file_name("0123abc")
    file.write_bytes(b"a library")
    file.chmod(0o700)
    return file


# --- finding one ----------------------------------------------------------------------------------------------------


def test_variable_comes_before_the_package_and_the_package_before_the_cache(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = _bridge.find(TORCH)
    assert isinstance(missing, _bridge.Missing)
    assert "rallocator build-bridge" in missing.reason
    cached = put(own_cache)
    assert _bridge.find(TORCH) == _bridge.Found(cached, "rallocator build-bridge made it")
    bundled = put(tmp_path / "bundled")
    assert _bridge.find(TORCH) == _bridge.Found(bundled, "the package brings it")
    named = put(tmp_path / "named")
    for value in (named, named.parent):
        monkeypatch.setenv(_bridge.VARIABLE, str(value))
        assert _bridge.find(TORCH) == _bridge.Found(named, "RALLOCATOR_BRIDGE names it")


def test_variable_may_name_a_file_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = put(tmp_path)
    monkeypatch.chdir(tmp_path)
    for value in (named.name, "."):
        monkeypatch.setenv(_bridge.VARIABLE, value)
        assert _bridge.find(TORCH) == _bridge.Found(named, "RALLOCATOR_BRIDGE names it")


def test_variable_that_names_nothing_is_an_error_that_says_how_to_make_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(_bridge.VARIABLE, str(tmp_path))
    with pytest.raises(BridgeError, match=r"RALLOCATOR_BRIDGE names no bridge .* build-bridge --out DIR"):
        _bridge.find(TORCH)


def test_name_tells_the_torch_the_processor_and_the_source_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    name = _bridge.file_name("0123abc")
    assert os.uname().machine in name
    assert name != _bridge.file_name("0123abd")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert name != _bridge.file_name("0123abc")


def test_cache_that_others_may_change_is_refused(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = put(own_cache)
    own_cache.chmod(0o750)
    with pytest.raises(BridgeError, match="others than you may change"):
        _bridge.find(TORCH)
    with pytest.raises(BridgeError, match="others than you may change"):
        _bridge_build._own_cache()
    own_cache.chmod(0o700)
    file.chmod(0o720)
    with pytest.raises(BridgeError, match="others than you may change"):
        _bridge.find(TORCH)
    file.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: own_cache.stat().st_uid + 1)
    with pytest.raises(BridgeError, match="belongs to another user"):
        _bridge.find(TORCH)


def test_cache_that_is_a_link_is_refused(own_cache: Path, tmp_path: Path) -> None:
    put(tmp_path / "elsewhere")
    own_cache.parent.mkdir()
    own_cache.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BridgeError, match="is a link"):
        _bridge.find(TORCH)


# --- making one -----------------------------------------------------------------------------------------------------


@pytest.fixture
def headers(tmp_path: Path) -> Path:
    """A folder that looks like CUDA's headers."""
    for name in ("cuda_runtime_api.h", "crt/host_defines.h"):
        file = tmp_path / "cuda/include" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return tmp_path / "cuda"


TARGET = _bridge_build.Target("2.11.0", "0123abc", Path("/torch/include"), Path("/torch/lib"), "13.0")


def stand_in_compiler(folder: Path, script: str) -> str:
    """A compiler that does what the script says; `$out` is the file that it is to write."""
    file = folder / "stand-in-c++"
    find_out = 'while [ "$1" != -o ]; do shift; done; out="$2"\n'
    file.write_text(f"#!/bin/sh\n{find_out}{script}\n")
    file.chmod(0o755)
    return str(file)


def test_bridge_is_made_in_a_private_folder_and_found_there(
    own_cache: Path, headers: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(headers))
    monkeypatch.setenv("CXX", stand_in_compiler(tmp_path, 'echo compiled > "$out"'))
    path = _bridge_build.build(TARGET)
    assert _bridge.find(TORCH) == _bridge.Found(path, "rallocator build-bridge made it")
    assert stat.S_IMODE(own_cache.stat().st_mode) == 0o700
    assert [file.name for file in own_cache.iterdir()] == [path.name], "nothing else stays"


def test_compiler_that_fails_leaves_nothing_and_its_first_error_is_shown(
    own_cache: Path, headers: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(headers))
    monkeypatch.setenv("CXX", stand_in_compiler(tmp_path, "echo 'note: x\nx.h:3: error: marked override' >&2; exit 1"))
    with pytest.raises(BridgeError, match=r"x\.h:3: error: marked override.*attach='pluggable'"):
        _bridge_build.build(TARGET)
    assert list(own_cache.iterdir()) == []


def test_missing_compiler_is_one_error_that_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BridgeError, match=r"no C\+\+ compiler was found.*apt-get install g\+\+"):
        _bridge_build.find_compiler()
    monkeypatch.setenv("CXX", "icpx")
    with pytest.raises(BridgeError, match="CXX names 'icpx'"):
        _bridge_build.find_compiler()


@pytest.mark.parametrize(("version", "package"), [("13.0", "nvidia-cuda-crt~=13.0"), ("12.8", "nvidia-cuda-nvcc-cu12")])
def test_missing_cuda_headers_are_one_error_that_names_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, package: str
) -> None:
    # The runtime's package alone has this file, and not the folder crt that it includes.
    (tmp_path / "include").mkdir()
    (tmp_path / "include/cuda_runtime_api.h").touch()
    monkeypatch.setattr(_bridge_build, "_cuda_folders", lambda _: iter([tmp_path / "include"]))
    with pytest.raises(BridgeError) as caught:
        _bridge_build.find_cuda_headers(version)
    assert package in str(caught.value)
    assert str(tmp_path / "include") in str(caught.value)


def test_missing_headers_of_torch_are_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TORCH, "_C", SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=True), raising=False)
    with pytest.raises(BridgeError, match="torch's headers are missing"):
        _bridge_build.installed(TORCH)


@pytest.mark.parametrize("home", ["/proc", "/dev/null"])
def test_home_that_cannot_be_written_to_is_one_error_that_names_the_way_out(
    headers: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: str
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv(_bridge.VARIABLE, raising=False)
    monkeypatch.setenv("HOME", home)
    monkeypatch.setenv("CUDA_HOME", str(headers))
    monkeypatch.setenv("CXX", stand_in_compiler(tmp_path, 'echo compiled > "$out"'))
    assert isinstance(_bridge.find(TORCH), _bridge.Missing)
    with pytest.raises(
        BridgeError, match=r"build-bridge --out DIR`, and name the file in the variable RALLOCATOR_BRIDGE"
    ):
        _bridge_build.build(TARGET)
    assert _bridge_build.build(TARGET, tmp_path / "out").parent == tmp_path / "out"


# --- with the installed torch ---------------------------------------------------------------------------------------


@pytest.mark.torch
@pytest.mark.parametrize("version", torch_headers.TESTED)
def test_source_compiles_against_the_headers_of_a_release(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = next((headers for headers in torch_headers.at_hand() if headers.version.startswith(version)), None)
    if headers is None:
        pytest.skip(f"no headers of torch {version}: `make headers` fetches them")
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setenv("CUDA_HOME", str(torch_headers.cuda_include().parent))
    target = _bridge_build.Target(headers.version, headers.git_version, headers.include, None, headers.cuda)
    start = time.monotonic()
    assert _bridge_build.build(target, tmp_path).stat().st_size > 10_000
    assert time.monotonic() - start < 60


@pytest.mark.torch
def test_bridge_is_taken_where_there_is_one_and_torch_calls_it() -> None:
    printed = succeed(
        """
        import torch, rallocator
        from rallocator import _attach
        print(rallocator.enable(), rallocator.enable(attach="bridge"))
        print(rallocator.attached(), torch.cuda.get_allocator_backend(), torch.cuda.is_initialized())
        print(_attach.reason())
        try:
            rallocator.enable(attach="pluggable")
        except rallocator.errors.ConfigError as error:
            print(error)
        """,
        environment=SIMULATED | {"RALLOCATOR_BRIDGE": built_bridge()},
    ).splitlines()
    assert printed[:3] == ["True True", "bridge rallocator False", "RALLOCATOR_BRIDGE names it"]
    assert "already attached through the route 'bridge'" in printed[3]


NO_BRIDGE = """
from pathlib import Path
from rallocator import _bridge
_bridge.BUNDLED = Path("/nowhere")
"""


@pytest.mark.torch
def test_without_a_bridge_one_line_says_how_to_make_one_and_the_other_route_is_taken(tmp_path: Path) -> None:
    printed = succeed(
        f"""
        import warnings
        import rallocator
        {"".join(NO_BRIDGE.replace(chr(10), chr(10) + "        "))}
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            rallocator.enable()
            rallocator.enable()
        print(len(seen), seen[0].category.__name__, seen[0].filename)
        print(seen[0].message)
        print(rallocator.attached())
        """,
        environment=SIMULATED | {"XDG_CACHE_HOME": str(tmp_path)},
    ).splitlines()
    assert printed[0] == "1 UserWarning <string>"
    assert "`rallocator build-bridge` makes one in seconds" in printed[1]
    assert printed[2] == "pluggable"


@pytest.mark.torch
def test_bridge_that_was_asked_for_and_is_not_there_is_an_error(tmp_path: Path) -> None:
    printed = succeed(
        f"""
        import torch, rallocator
        {"".join(NO_BRIDGE.replace(chr(10), chr(10) + "        "))}
        try:
            rallocator.enable(attach="bridge")
        except rallocator.errors.BridgeError as error:
            print(error)
        print(rallocator.attached(), torch.cuda.get_allocator_backend())
        """,
        environment=SIMULATED | {"XDG_CACHE_HOME": str(tmp_path)},
    ).splitlines()
    assert "rallocator build-bridge" in printed[0]
    assert printed[1] == "None native"


@pytest.mark.torch
def test_bridge_of_another_torch_is_refused_before_torch_calls_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in cuda_home().items():
        monkeypatch.setenv(name, value)
    torch = _torch.import_supported()
    installed = _bridge_build.installed(torch)
    other = _bridge_build.build(
        _bridge_build.Target("2.15.9", "f" * 40, installed.headers, installed.libraries, installed.cuda), tmp_path
    )
    program = """
        import warnings
        import torch, rallocator
        try:
            rallocator.enable(attach="bridge")
        except rallocator.errors.BridgeError as error:
            print(error)
        print(rallocator.attached(), torch.cuda.get_allocator_backend())
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            rallocator.enable()
        print(rallocator.attached(), len(seen))
        """
    printed = succeed(program, environment=SIMULATED | {"RALLOCATOR_BRIDGE": str(other)}).splitlines()
    assert f"commit {'f' * 40}" in printed[0]
    assert torch.version.git_version in printed[0]
    assert printed[1:] == ["None native", "pluggable 1"]
    other.write_bytes(b"no library")
    printed = succeed(program, environment=SIMULATED | {"RALLOCATOR_BRIDGE": str(other)}).splitlines()
    assert "cannot be loaded into torch" in printed[0]
    assert printed[1:] == ["None native", "pluggable 1"]


@pytest.mark.torch
def test_torch_newer_than_tested_gets_one_warning_and_the_other_route() -> None:
    printed = succeed(
        """
        import warnings
        import rallocator
        from rallocator import _bridge
        _bridge.NEWEST_TESTED = (2, 8)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            rallocator.enable()
        print(len(seen), rallocator.attached(), "newer than 2.8" in str(seen[0].message))
        """,
        environment=SIMULATED | {"RALLOCATOR_BRIDGE": built_bridge()},
    )
    assert printed == "1 pluggable True"


@pytest.mark.timeout(300)  # Each process imports torch, and some compile.
@pytest.mark.torch
def test_eight_processes_that_start_at_once_make_and_take_it_without_harm(tmp_path: Path, headers: Path) -> None:
    # The compiler writes in two steps, so that a file that is not whole would be seen.
    script = f'head -c 5000 {built_bridge()} > "$out"; sleep 0.2; tail -c +5001 {built_bridge()} >> "$out"'
    compiler = stand_in_compiler(tmp_path, script)
    environment = {"CXX": compiler, "CUDA_HOME": str(headers), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    program = """
        import torch, rallocator
        from rallocator import _bridge, _bridge_build
        from pathlib import Path
        _bridge.BUNDLED = Path("/nowhere")
        _bridge_build.build(_bridge_build.installed(torch))
        print(rallocator.enable(attach="bridge"), rallocator.attached())
        """
    with ThreadPoolExecutor(8) as threads:
        ends = list(threads.map(lambda _: run_python(program, environment=SIMULATED | environment), range(8)))
    assert [(end.stdout, end.stderr, end.returncode) for end in ends] == [("True bridge\n", "", 0)] * 8
    assert len(list((tmp_path / "cache/rallocator").iterdir())) == 1


@pytest.mark.timeout(300)  # Each process imports torch, and some compile.
@pytest.mark.torch
def test_command_makes_a_bridge_and_says_where_it_is(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path)} | cuda_home()
    program = """
        import sys
        from rallocator._cli import main
        sys.argv = ["rallocator", "build-bridge", *{arguments!r}]
        main()
        """
    done = run_python(program.format(arguments=[]), environment=environment | {"PATH": "/nowhere", "CXX": ""})
    assert (done.returncode, done.stdout) == (1, "")
    assert "no C++ compiler was found" in done.stderr
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    done = run_python(program.format(arguments=[]), environment=environment)
    assert done.returncode == 0, done.stderr
    (made,) = (tmp_path / "rallocator").iterdir()
    assert made.name in done.stdout.replace("\n", "")
    assert "takes it from now on" in done.stdout
