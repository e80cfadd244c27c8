"""Build rawbench.cpp into a module that `host_cost.py` loads: about a minute, with CUDA headers and a C++ compiler.

usage: python -m bench.gpu.rawbench_build DIR
"""

from __future__ import annotations

import argparse
from pathlib import Path


def build(folder: Path) -> None:
    """Compile against the installed torch and leave the module in `folder`."""
    from torch.utils import cpp_extension

    folder.mkdir(parents=True, exist_ok=True)
    cpp_extension.load(
        name="rawbench",
        sources=[str(Path(__file__).with_name("rawbench.cpp"))],
        build_directory=str(folder),
        with_cuda=True,
        extra_cflags=["-O2"],
        verbose=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the module that host_cost.py loads.")
    parser.add_argument("folder", type=Path)
    build(parser.parse_args().folder)
