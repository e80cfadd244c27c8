"""Fetches the headers that the bridge is compiled against: those of torch's releases, and CUDA's.

usage: python tools/torch_headers.py [--all]

Without an option: the releases that the tests compile against. With it: every release that a wheel brings a bridge for.
A release's headers are a few MB of a wheel of half a GB, so each is fetched once and kept in the user's cache; nothing
is fetched that is there.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

TESTED = ("2.9.1", "2.11.0", "2.13.0", "2.15.0")
"""The first that is supported, each that made a large step, and the newest."""

ALL = ("2.9.0", "2.9.1", "2.10.0", "2.11.0", "2.12.0", "2.12.1", "2.13.0", "2.14.0", "2.14.1", "2.15.0")
"""Every release on PyPI from the first that is supported on."""

CUDA = {"nvidia-cuda-runtime": "13.0.96", "nvidia-cuda-crt": "13.0.88"}
"""The packages that hold the headers of CUDA that a bridge needs, for whichever CUDA torch was built with."""

_CUDA_PREFIX = "nvidia/cu13/include/"
_TORCH_PREFIX = "torch/include/"
_TORCH_PARTS = ("c10/", "torch/headeronly/", "torch/csrc/api/include/torch/version.h")
# Any build of a release has the same headers. pip matches each tag of a platform exactly.
_TAGS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")
_PLATFORMS = tuple(word for tag in _TAGS for word in ("--platform", f"{tag}_{platform.machine()}"))
_PYTHON = ("--python-version", "3.12", "--implementation", "cp", *_PLATFORMS)


@dataclass(frozen=True)
class Headers:
    """The headers of one release."""

    version: str
    """For instance "2.11.0+cu130"."""
    git_version: str
    """The commit that it was built from."""
    cuda: str
    """The version of CUDA that it was built for."""
    include: Path


def folder() -> Path:
    """Where the headers are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "rallocator-development" / "headers"


def at_hand() -> list[Headers]:
    """The releases whose headers have been fetched, oldest first."""
    found = []
    for version in ALL:
        place = folder() / f"torch-{version}"
        if (place / "about.json").is_file():
            about = json.loads((place / "about.json").read_text())
            found.append(Headers(**about, include=place / "include"))
    return found


def cuda_include() -> Path:
    """The folder of CUDA's headers; it exists once anything was fetched."""
    return folder() / "cuda" / "include"


def main() -> None:
    """Fetch what is missing."""
    versions = ALL if sys.argv[1:] == ["--all"] else TESTED
    folder().mkdir(parents=True, exist_ok=True)
    if not cuda_include().is_dir():
        fetch_cuda()
    for version in versions:
        if not (folder() / f"torch-{version}").is_dir():
            fetch_torch(version)
    print(f"headers of torch {', '.join(headers.version for headers in at_hand())} are in {folder()}")


def fetch_cuda() -> None:
    """Fetch CUDA's headers."""
    with tempfile.TemporaryDirectory(dir=folder()) as scratch:
        for package, version in CUDA.items():
            with zipfile.ZipFile(_download(f"{package}=={version}", Path(scratch))) as wheel:
                _extract(wheel, _CUDA_PREFIX, ("",), Path(scratch) / "kept/include")
        _keep(Path(scratch) / "kept", "cuda")


def fetch_torch(version: str) -> None:
    """Fetch the headers of a release."""
    with tempfile.TemporaryDirectory(dir=folder()) as scratch:
        kept = Path(scratch) / "kept"
        with zipfile.ZipFile(_download(f"torch=={version}", Path(scratch))) as wheel:
            _extract(wheel, _TORCH_PREFIX, _TORCH_PARTS, kept / "include")
            text = wheel.read("torch/version.py").decode()
        names = {"version": "__version__", "git_version": "git_version", "cuda": "cuda"}
        about = {key: constant(text, name) for key, name in names.items()}
        (kept / "about.json").write_text(json.dumps(about))
        _keep(kept, f"torch-{version}")


def _download(requirement: str, scratch: Path) -> Path:
    print(f"fetching {requirement}", flush=True)
    place = scratch / "wheel"
    shutil.rmtree(place, ignore_errors=True)
    options = ("--quiet", "--no-deps", "--no-cache-dir", "--only-binary=:all:", "--dest", str(place))
    subprocess.run([sys.executable, "-m", "pip", "download", *options, *_PYTHON, requirement], check=True)
    (wheel,) = place.glob("*.whl")
    return wheel


def _extract(wheel: zipfile.ZipFile, prefix: str, parts: tuple[str, ...], target: Path) -> None:
    for name in wheel.namelist():
        inside = name.removeprefix(prefix)
        if inside != name and inside.startswith(parts) and not name.endswith("/"):
            file = target / inside
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(wheel.read(name))


def constant(text: str, name: str) -> str:
    """Read a constant of `torch/version.py`."""
    found = re.search(rf"^{name}(?:: \S+)? = '([^']+)'$", text, re.MULTILINE)
    if found is None:
        sys.exit(f"torch/version.py has no {name}")
    return found[1]


def _keep(made: Path, name: str) -> None:
    """Put what was made in its place, whole; whoever was first stays."""
    try:
        made.rename(folder() / name)
    except OSError:
        if not (folder() / name).is_dir():
            raise


if __name__ == "__main__":
    main()
