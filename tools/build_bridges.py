"""Compiles a bridge for each torch whose headers are at hand, into the package, for a wheel to carry.

usage: python tools/build_bridges.py [--all]

The headers are those that `tools/torch_headers.py` has fetched, and those of the torch that is installed here. Bridges
that are there and of the present source are left alone, others are removed. With --all it is an error if one is lacking
of a release that a wheel is to serve; else a wheel may do with less, also without any where there is no C++ compiler.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
# The package without its compiled part, which is built after this.
package = ModuleType("rallocator")
package.__path__ = [str(ROOT / "python/rallocator")]
sys.modules["rallocator"] = package
sys.path.insert(0, str(ROOT))

from rallocator import _bridge, _bridge_build  # noqa: E402
from rallocator.errors import BridgeError  # noqa: E402
from tools import torch_headers  # noqa: E402

PORTABLE = Path(__file__).with_name("bridge_portable.cpp")
EXPORTS = "{ global: rallocator_bridge_*; local: *; };\n"


def main() -> None:
    """Compile what is missing."""
    targets = {target.git_version: target for target in [*fetched(), *installed()]}
    folder = _bridge.BUNDLED
    folder.mkdir(exist_ok=True)
    wanted = {_bridge.file_name(commit): target for commit, target in targets.items()}
    for old in folder.iterdir():
        if old.name not in wanted:
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    missing = [target for name, target in wanted.items() if not (folder / name).exists()]
    try:
        with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(os.cpu_count()) as threads:
            exports = Path(scratch) / "exports"
            exports.write_text(EXPORTS)
            more = (str(PORTABLE), f"-Wl,--version-script={exports}")
            for path in threads.map(lambda target: _bridge_build.build(target, folder, more), missing):
                path.chmod(0o755)
    except BridgeError as error:
        print(f"rallocator: {error}", file=sys.stderr)
    there = {file.name for file in folder.iterdir()}
    versions = sorted(target.version for name, target in wanted.items() if name in there)
    print(f"bridges for torch: {', '.join(versions) or 'none'}")
    served = {version.partition("+")[0] for version in versions}
    if sys.argv[1:] == ["--all"] and (lacking := [version for version in torch_headers.ALL if version not in served]):
        sys.exit(f"rallocator: no bridge for torch {', '.join(lacking)}")


def fetched() -> list[_bridge_build.Target]:
    """The releases whose headers were fetched."""
    if torch_headers.cuda_include().is_dir():
        os.environ.setdefault("CUDA_HOME", str(torch_headers.cuda_include().parent))
    return [
        _bridge_build.Target(headers.version, headers.git_version, headers.include, None, headers.cuda)
        for headers in torch_headers.at_hand()
    ]


def installed() -> list[_bridge_build.Target]:
    """The torch that is installed here, if there is one with CUDA. It is not imported: that takes seconds."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return []
    folder = Path(found.origin).parent
    text = (folder / "version.py").read_text()
    if "\ncuda: Optional[str] = None" in text:
        return []
    version, commit, cuda = (torch_headers.constant(text, name) for name in ("__version__", "git_version", "cuda"))
    return [_bridge_build.Target(version, commit, folder / "include", None, cuda)]


if __name__ == "__main__":
    main()
