"""Fetches torch's own tests of its allocator, to be run on a GPU machine by `bench.gpu.torch_tests`.

usage: python tools/torch_tests.py

torch's wheels come without its tests, and PyPI has no source of it. Debian's pool has, of the release named below. It
is fetched once; the files that are run, and torch's licence, are kept in the user's cache and copied to the folder
.scratch/torch-tests, which git ignores and which a GPU machine can be sent. They are read and run under torch's licence
and are no part of this repository.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.gpu.torch_tests import FETCHED
from bench.gpu.torch_tests.selection import FILES
from tools.torch_headers import folder as headers_folder

VERSION = "2.12.1"
"""The release nearest to 2.11, which the GPU machines have. What 2.11 itself does not pass is no measure of ours."""

URL = f"https://deb.debian.org/debian/pool/main/p/pytorch/pytorch_{VERSION}+dfsg.orig.tar.xz"
SHA256 = "95b6f85e1da2776f0cb0e5a635c4430b4e3f05b6ccb9e00237f3cecd15572875"

WANTED = ("LICENSE", *(f"test/{file}" for file in FILES))


def main() -> None:
    """Fetch what is missing and copy it."""
    kept = headers_folder().parent / f"torch-tests-{VERSION}"
    if not all((kept / name).is_file() for name in WANTED):
        fetch(kept)
    shutil.rmtree(FETCHED, ignore_errors=True)
    for name in WANTED:
        target = FETCHED / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(kept / name, target)
    size = sum(file.stat().st_size for file in FETCHED.rglob("*") if file.is_file())
    print(f"{len(FILES)} files of tests of torch {VERSION}, {size / (1 << 20):.1f} MiB in {FETCHED}")


def fetch(kept: Path) -> None:
    """Fetch the source and keep the wanted files of it."""
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
        archive = Path(scratch) / "source.tar.xz"
        print(f"fetching {URL}", flush=True)
        with urllib.request.urlopen(URL) as answer, archive.open("wb") as file:
            shutil.copyfileobj(answer, file)
        extract(archive, kept)


def extract(archive: Path, kept: Path) -> None:
    """Take the wanted files out of the archive, by their names alone: no path of the archive's is followed."""
    if (found := digest(archive)) != SHA256:
        sys.exit(f"the source of torch {VERSION} has another checksum than expected: {found}")
    missing = set(WANTED)
    with tarfile.open(archive) as source:
        for member in source:
            name = member.name.partition("/")[2]
            if name in missing and (content := source.extractfile(member)) is not None:
                target = kept / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content.read())
                missing.remove(name)
                if not missing:
                    return
    sys.exit(f"the source of torch {VERSION} lacks {', '.join(sorted(missing))}")


def digest(file: Path) -> str:
    """The SHA-256 of a file."""
    state = hashlib.sha256()
    with file.open("rb") as content:
        while piece := content.read(1 << 20):
            state.update(piece)
    return state.hexdigest()


if __name__ == "__main__":
    main()
