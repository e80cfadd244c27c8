"""Proves what the name of the wheel in `dist/` claims: any Linux with glibc 2.28, any Python from 3.10.

It also proves what no name says: that the extension unwinds with the system's libgcc (see `tools/build_wheel`), and
that the package is complete.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.sections import SymbolTableSection

GLIBC = (2, 28)
GLIBCXX = (3, 4, 24)
CXXABI = (1, 3, 11)
"""What manylinux_2_28 promises: GCC 8's."""
NAME = re.compile(r"rallocator-[^-]+-cp310-abi3-manylinux_2_28_(x86_64|aarch64)\.whl")
PREBUILT = "/bridge/prebuilt/"
CONTENTS = (
    "rallocator/_core.abi3.so",
    "rallocator/_core.pyi",
    "rallocator/py.typed",
    "rallocator/data/",
    "rallocator/bridge/bridge.cpp",
    "rallocator/bridge/rallocator.h",
)


def main() -> None:
    """Exit with a message if a claim does not hold."""
    wheels = list(Path("dist").glob("*.whl"))
    if len(wheels) != 1:
        sys.exit(f"expected one wheel in dist, found {len(wheels)}")
    wheel = wheels[0]
    check_name(wheel)
    with tempfile.TemporaryDirectory() as scratch:
        rest = take_bridges_out(wheel, Path(scratch))
        check_linkage(rest)
        bridges = sorted(Path(scratch).glob("bridge-*.so"))
        for bridge in bridges:
            check_bridge(bridge)
    check_contents(wheel)
    subprocess.run(["abi3audit", "--strict", "--verbose", wheel], check=True)
    print(f"{len(bridges)} bridges")
    print(f"{wheel}: {wheel.stat().st_size:,} bytes, good for glibc {GLIBC[0]}.{GLIBC[1]} and Python 3.10 or newer")


def check_name(wheel: Path) -> None:
    """The tags say what every other check proves."""
    if not NAME.fullmatch(wheel.name):
        sys.exit(f"{wheel.name}: the name does not have the tags cp310-abi3-manylinux_2_28")


def take_bridges_out(wheel: Path, folder: Path) -> Path:
    """Put the bridges into a folder, and the rest there too, as a wheel: auditwheel knows no torch to link with."""
    rest = folder / wheel.name
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(rest, "w") as kept:
        for name in whole.namelist():
            content = whole.read(name)
            if PREBUILT in name:
                (folder / Path(name).name).write_bytes(content)
                continue
            if name.endswith(".dist-info/RECORD"):
                lines = content.decode().splitlines(keepends=True)
                content = "".join(line for line in lines if PREBUILT not in line).encode()
            kept.writestr(name, content)
    return rest


def check_bridge(bridge: Path) -> None:
    """A bridge asks for torch's two libraries, for old symbols of the system's, and shows nothing but its own three."""
    with bridge.open("rb") as file:
        sections = list(ELFFile(file).iter_sections())
        dynamic = [section for section in sections if isinstance(section, DynamicSection)]
        tags = [tag for section in dynamic for tag in section.iter_tags("DT_NEEDED")]
        libraries = {tag.needed for tag in tags}  # type: ignore[attr-defined]  # Tags of this kind have it.
        needs = [section for section in sections if isinstance(section, GNUVerNeedSection)]
        versions = [version.name for section in needs for _, used in section.iter_versions() for version in used]
        tables = [table for table in sections if isinstance(table, SymbolTableSection) and table.name == ".dynsym"]
        symbols = [symbol for table in tables for symbol in table.iter_symbols()]
        shown = {symbol.name for symbol in symbols if symbol.name and symbol["st_shndx"] != "SHN_UNDEF"}
    missing = {"libc10.so", "libc10_cuda.so"} - libraries
    strange = libraries - {"libc10.so", "libc10_cuda.so", "libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6"}
    strange -= {name for name in strange if name.startswith("ld-linux")}
    if missing or strange:
        sys.exit(f"{bridge.name}: missing libraries {missing}, unexpected {strange}")
    limits = {"GLIBC": GLIBC, "GLIBCXX": GLIBCXX, "CXXABI": CXXABI}
    for version in versions:
        kind, _, number = version.partition("_")
        if kind in limits and tuple(map(int, number.split("."))) > limits[kind]:
            sys.exit(f"{bridge.name}: asks for {version}, which systems that torch runs on may lack")
    if any(not name.startswith("rallocator_bridge_") for name in shown) or len(shown) != 3:
        sys.exit(f"{bridge.name}: shows {sorted(shown)}")


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
