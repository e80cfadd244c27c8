"""`rallocator build-bridge`."""

from __future__ import annotations

import time
from pathlib import Path

from rallocator import _bridge, _bridge_build, _torch
from rallocator._cli.console import print_json, print_text


def run(out: Path | None, *, as_json: bool) -> None:
    """Compile the bridge for the installed torch, prove that it loads, and print where it is."""
    torch = _torch.import_supported()
    start = time.monotonic()
    path = _bridge_build.build(_bridge_build.installed(torch), out)
    seconds = time.monotonic() - start
    _bridge.Bridge(path, torch)
    if as_json:
        entry = {"schema": 1, "path": str(path), "torch": torch.__version__, "seconds": round(seconds, 1)}
        print_json([entry])
        return
    print_text(f"The bridge for torch {torch.__version__} is {path}, made in {seconds:.1f} s.")
    if out is None:
        print_text("rallocator takes it from now on.")
    else:
        print_text(f"To have rallocator take it, set {_bridge.VARIABLE}={path}")
