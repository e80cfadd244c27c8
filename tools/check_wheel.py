"""Proves what the name of the wheel in `dist/` claims: any Linux with glibc 2.28, any Python from 3.10.

It also proves what no name says: that the extension unwinds with the system's libgcc (see `tools/build_wheel`), and
that the package is complete.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

GLIBC = (2, 28)
NAME = re.compile(r"rallocator-[^-]+-cp310-abi3-manylinux_2_28_(x86_64|aarch64)\.whl")
CONTENTS = ("rallocator/_core.abi3.so", "rallocator/_core.pyi", "rallocator/py.typed", "rallocator/data/")


def main() -> None:
    """Exit with a message if a claim does not hold."""
    wheels = list(Path("dist").glob("*.whl"))
    if len(wheels) != 1:
        sys.exit(f"expected one wheel in dist, found {len(wheels)}")
    wheel = wheels[0]
    check_name(wheel)
    check_linkage(wheel)
    check_contents(wheel)
    subprocess.run(["abi3audit", "--strict", "--verbose", wheel], check=True)
    print(f"{wheel}: {wheel.stat().st_size:,} bytes, good for glibc {GLIBC[0]}.{GLIBC[1]} and Python 3.10 or newer")


def check_name(wheel: Path) -> None:
    """The tags say what every other check proves."""
    if not NAME.fullmatch(wheel.name):
        sys.exit(f"{wheel.name}: the name does not have the tags cp310-abi3-manylinux_2_28")


def check_linkage(wheel: Path) -> None:
    """No symbol is newer than glibc 2.28, and the unwinder is the system's."""
    answer = subprocess.run(["auditwheel", "show", "--json", wheel], check=True, capture_output=True, text=True)
    audit = json.loads(answer.stdout)
    needed = re.match(r"manylinux_(\d+)_(\d+)_", audit["overall_tag"])
    if needed is None or (int(needed[1]), int(needed[2])) > GLIBC:
        sys.exit(f"{wheel.name}: fit only for {audit['overall_tag']}; symbols: {audit['versioned_symbols']}")
    if "libgcc_s.so.1" not in audit["versioned_symbols"]:
        sys.exit(f"{wheel.name}: the extension brings an unwinder of its own, on which a C++ exception would crash")


def check_contents(wheel: Path) -> None:
    """All that the package needs is inside, and nothing but the package."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    missing = [part for part in CONTENTS if not any(name.startswith(part) for name in names)]
    strange = [name for name in names if not re.match(r"rallocator(-[^/]+\.dist-info)?/", name)]
    if missing or strange:
        sys.exit(f"{wheel.name}: missing {missing}, unexpected {strange}")


if __name__ == "__main__":
    main()
