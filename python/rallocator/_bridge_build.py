"""Compiling the bridge for one torch: needs a C++ compiler, torch's headers and CUDA's, and takes seconds."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from rallocator import _bridge
from rallocator.errors import BridgeError

_COMPILERS = ("c++", "g++", "clang++")
_LIBRARIES = ("libc10.so", "libc10_cuda.so")
# Torch 2.14's headers need C++20; its first name is for compilers from before the standard was out.
_STANDARD = "-std=c++2a"
_OPTIONS = (_STANDARD, "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-Wl,--no-as-needed")
_LIMIT_SECONDS = 300


@dataclass(frozen=True)
class Target:
    """The torch that a bridge is built for."""

    version: str
    """Its version, for messages."""
    git_version: str
    """Its commit."""
    headers: Path
    """The folder with `c10`."""
    libraries: Path | None
    """The folder with its libraries. None: they are named, but not looked at."""
    cuda: str
    """The version of CUDA that it is built for."""
    is_new_abi: bool = True
    """Whether it uses the C++ ABI of GCC 5 and newer, as every torch from 2.7 on does."""


def installed(torch: ModuleType) -> Target:
    """The torch that is installed.

    Arguments:
        torch: the imported module.

    Returns:
        What a bridge for it needs.

    Raises:
        BridgeError: it has no headers.
    """
    folder = Path(str(torch.__file__)).parent
    target = Target(
        version=torch.__version__,
        git_version=torch.version.git_version,
        headers=folder / "include",
        libraries=folder / "lib",
        cuda=torch.version.cuda,
        is_new_abi=bool(torch._C._GLIBCXX_USE_CXX11_ABI),
    )
    if not (target.headers / "c10/cuda/CUDACachingAllocator.h").is_file():
        raise BridgeError(
            f"torch's headers are missing ({target.headers}): somebody has removed them. Install torch "
            f"{torch.__version__} anew, for instance with `pip install --force-reinstall --no-deps torch`."
        )
    return target


def build(target: Target, folder: Path | None = None, more: Sequence[str] = ()) -> Path:
    """Compile a bridge. Of several that are made at once each is whole, and the last one stays.

    Arguments:
        target: the torch to build for.
        folder: where to put it. None: into this user's cache, where `rallocator.enable()` looks.
        more: further arguments for the compiler.

    Returns:
        The file.

    Raises:
        BridgeError: a compiler or a header is missing, the folder cannot be written to, or the compiler failed.
    """
    compiler = find_compiler()
    cuda = find_cuda_headers(target.cuda)
    folder = _own_cache() if folder is None else _made(folder)
    result = folder / _bridge.file_name(target.git_version)
    try:
        with tempfile.TemporaryDirectory(prefix=".building-", dir=folder) as scratch:
            compiled = Path(scratch) / result.name
            _compile(compiler, target, cuda, compiled, more)
            compiled.chmod(0o700)
            compiled.replace(result)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return result


def find_compiler() -> str:
    """The C++ compiler to use: the one that `CXX` names, or the first that is there.

    Raises:
        BridgeError: there is none.
    """
    named = os.environ.get("CXX")
    for name in [named] if named else _COMPILERS:
        if (path := shutil.which(name)) is not None:
            return path
    missing = f"CXX names {named!r}, which was not found" if named else "no C++ compiler was found"
    raise BridgeError(
        f"The bridge cannot be compiled: {missing}. On Debian and Ubuntu: apt-get install g++; on Fedora: "
        "dnf install gcc-c++. It is needed to build only: elsewhere, copy the file and name it in the variable "
        f"{_bridge.VARIABLE}."
    )


def find_cuda_headers(version: str) -> Path:
    """The folder with CUDA's headers: of a toolkit, or of a package that torch's wheels bring along.

    Arguments:
        version: the version of CUDA that torch is built for, for instance "13.0".

    Returns:
        A folder that is complete; the version may differ a little, which makes no difference to the bridge.

    Raises:
        BridgeError: there is none.
    """
    looked = list(_cuda_folders(version))
    for folder in looked:
        # NVIDIA's package of the runtime alone lacks the folder crt, without which nothing compiles.
        if (folder / "cuda_runtime_api.h").is_file() and (folder / "crt/host_defines.h").is_file():
            return folder
    major = version.partition(".")[0]
    package = f"nvidia-cuda-crt~={version}" if major == "13" else f"triton or nvidia-cuda-nvcc-cu{major}"
    raise BridgeError(
        f"The bridge cannot be compiled: CUDA's headers were not found. `pip install {package}` brings them; or set "
        f"CUDA_HOME to a CUDA toolkit. Looked in: {', '.join(map(str, looked))}."
    )


def _cuda_folders(version: str) -> Iterator[Path]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if value := os.environ.get(variable):
            yield Path(value) / "include"
    yield Path("/usr/local/cuda/include")
    for package in ("triton", "nvidia"):
        found = importlib.util.find_spec(package)
        for root in (found.submodule_search_locations or ()) if found else ():
            if package == "triton":
                yield Path(root) / "backends/nvidia/include"
            else:
                yield Path(root) / f"cu{version.partition('.')[0]}/include"
                yield Path(root) / "cuda_nvcc/include"


def _own_cache() -> Path:
    folder = _bridge.cache_folder()
    if folder is None:
        raise BridgeError(f"This user has no home folder to keep the bridge in: use `{_bridge.COMMAND} --out DIR`.")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    _bridge.check_private(folder)
    return folder


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return folder.resolve()


def _unwritable(folder: Path, error: OSError) -> BridgeError:
    return BridgeError(
        f"The bridge cannot be written to {folder} ({error.strerror or error}). Write it elsewhere, with "
        f"`{_bridge.COMMAND} --out DIR`, and name the file in the variable {_bridge.VARIABLE}."
    )


def _compile(compiler: str, target: Target, cuda: Path, result: Path, more: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="rallocator-") as scratch:
        libraries = target.libraries or _make_stand_ins(compiler, Path(scratch))
        command = [
            *(compiler, *_OPTIONS),
            f"-D_GLIBCXX_USE_CXX11_ABI={int(target.is_new_abi)}",
            f'-DRALLOCATOR_TORCH_GIT_VERSION="{target.git_version}"',
            # System headers: what their authors' compilers did not warn of is not ours to show.
            *("-isystem", str(target.headers), "-isystem", str(cuda)),
            *(str(_bridge.SOURCES / "bridge.cpp"), *more),
            *("-o", str(result), f"-L{libraries}", *(f"-l:{name}" for name in _LIBRARIES)),
        ]
        done = _run(command)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}, without a word"]
        first = next((line for line in lines if "error" in line), lines[-1])
        raise BridgeError(
            f"The bridge for torch {target.version} could not be compiled with {compiler}: {first}. rallocator works "
            "without it, with attach='pluggable'."
        )


def _make_stand_ins(compiler: str, folder: Path) -> Path:
    """Empty libraries with the names of torch's: all that linking takes from those is their names."""
    for name in _LIBRARIES:
        done = _run([compiler, "-shared", f"-Wl,-soname,{name}", "-o", str(folder / name), "-x", "c++", os.devnull])
        if done.returncode != 0:
            raise BridgeError(f"{compiler} cannot make a shared library: {done.stderr.strip()}")
    return folder


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise BridgeError(f"{command[0]} took more than {_LIMIT_SECONDS} s over the bridge.") from error
