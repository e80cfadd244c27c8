"""What the C table of functions costs the host on a simulated GPU: needs a C++ compiler, and neither a GPU nor torch.

usage: python -m bench.table [--policy POLICY] [--threads N ...]

Figures of one thread are processor time, so that other programs take no part of it. They still compare only where
`machine` agrees before and after: another thread on the same core halves the speed of everything.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
from pathlib import Path

from rallocator import _core

SOURCE = Path(__file__).with_name("pairs.cpp")
INCLUDE = Path(__file__).parents[2] / "include"
KIB = 1 << 10
MIB = 1 << 20
# More than the largest workload ever holds, so that nothing but the first steps reaches the driver.
CAPACITY_BYTES = 80 << 30


def load(folder: Path) -> ctypes.CDLL:
    """Compile the workloads against the extension that is installed here."""
    library = folder / "libpairs.so"
    command = ["c++", "-O2", "-std=c++17", "-shared", "-fPIC", "-pthread", f"-I{INCLUDE}", "-o", str(library)]
    extension = Path(_core.__file__)
    subprocess.run([*command, str(SOURCE), str(extension), f"-Wl,-rpath,{extension.parent}"], check=True)
    workloads = ctypes.CDLL(str(library))
    for name, arguments in (("pair_ns", 2), ("replacement_ns", 3), ("threads_ns", 3), ("machine_ns", 0)):
        function = getattr(workloads, name)
        function.restype, function.argtypes = ctypes.c_double, [ctypes.c_uint64] * arguments
    return workloads


def main() -> None:
    """Measure and print a line for each figure."""
    parser = argparse.ArgumentParser(description="Measure the C table of functions on a simulated GPU.")
    parser.add_argument("--policy", default="rallocator", choices=("native", "expandable", "rallocator"))
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2, 4, 16], metavar="N")
    options = parser.parse_args()

    def show(measure: str, nanoseconds: float) -> None:
        print(f"{options.policy:12s} {measure:36s} {nanoseconds:8.1f} ns", flush=True)

    _core._install(f"policy:{options.policy}", simulated_bytes=CAPACITY_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        workloads = load(Path(folder))
    show("machine", workloads.machine_ns())
    for size, label in ((512, "512 B"), (4 * KIB, "4 KiB"), (MIB, "1 MiB"), (2 * MIB, "2 MiB"), (64 * MIB, "64 MiB")):
        show(f"hot pair {label}", workloads.pair_ns(size, 20000))
    show("replacement, 1k live up to 8 MiB", workloads.replacement_ns(1000, 20000, 8 * MIB))
    show("replacement, 10k live up to 1 MiB", workloads.replacement_ns(10000, 20000, MIB))
    for count in options.threads:
        show(f"4 KiB pair, {count} thread{'s' if count > 1 else ''}", workloads.threads_ns(count, 4 * KIB, 20000))
    show("machine", workloads.machine_ns())


if __name__ == "__main__":
    main()
