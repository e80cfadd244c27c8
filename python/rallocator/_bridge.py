"""The bridge: torch's own interface for CUDA allocators, compiled for one torch.

It is a small C++ library (`bridge/bridge.cpp`) that stands between torch and the functions of `_core`. The interface
changes from release to release, and a bridge of another release loads without an error and then calls through a wrong
table. So a bridge is used only if it was built for exactly this torch, by its commit. Where to find one, in this order:
the variable `RALLOCATOR_BRIDGE`, the package itself, the user's cache, which `rallocator build-bridge` fills. Nothing
is compiled unless that command is asked to.

At import it needs no compiled part of the package: what builds wheels uses it before there is one.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import stat
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from rallocator.errors import BridgeError, RallocatorError

VARIABLE = "RALLOCATOR_BRIDGE"
"""The environment variable that names a bridge, or a folder of bridges."""

NEWEST_TESTED = (2, 15)
"""The newest release of torch (major, minor) that the bridge was compiled for and tried with."""

SOURCES = Path(__file__).parent / "bridge"
"""Where the source is."""

BUNDLED = SOURCES / "prebuilt"
"""Where a wheel carries bridges."""

COMMAND = "rallocator build-bridge"
"""What makes one."""


@dataclass(frozen=True)
class Found:
    """A bridge for the torch that is installed."""

    path: Path
    origin: str
    """Where it comes from, as a clause."""


@dataclass(frozen=True)
class Missing:
    """There is none."""

    reason: str
    """Why, and how to get one."""


def find(torch: ModuleType) -> Found | Missing:
    """Look for a bridge for this torch. Loads nothing.

    Arguments:
        torch: the imported module.

    Returns:
        The bridge, or why there is none.

    Raises:
        BridgeError: the variable `RALLOCATOR_BRIDGE` names something that is not there, or the cache folder is not
            this user's alone.
    """
    name = file_name(torch.version.git_version)
    if named := os.environ.get(VARIABLE):
        # Absolute, for `dlopen` would look for a name without a slash where libraries are.
        return Found(_named(Path(named).absolute(), name), f"{VARIABLE} names it")
    if (bundled := BUNDLED / name).is_file():
        return Found(bundled, "the package brings it")
    if (cached := _cached(name)) is not None:
        return Found(cached, f"{COMMAND} made it")
    return Missing(f"there is no bridge for this torch ({torch.__version__}); `{COMMAND}` makes one in seconds")


def file_name(git_version: str) -> str:
    """The name of the file of a bridge.

    Arguments:
        git_version: `torch.version.git_version` of the torch that it is built for.

    Returns:
        The name; it also tells the processor's architecture and the bridge's own source.
    """
    return f"bridge-{git_version}-{platform.machine()}-{_source_digest()}.so"


@cache
def _source_digest() -> str:
    digest = hashlib.sha256()
    for source in sorted(path for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _cached(name: str) -> Path | None:
    folder = cache_folder()
    try:
        if folder is None or not (folder / name).exists():
            return None
    except OSError:  # Not even to be looked into.
        return None
    check_private(folder)
    check_private(folder / name)
    return folder / name


def _named(path: Path, name: str) -> Path:
    """The bridge that the variable names: a file, or a folder that holds the right one."""
    if path.is_dir():
        path /= name
    if not path.is_file():
        raise BridgeError(
            f"{VARIABLE} names no bridge for this torch: {path} is not there. Make it with `{COMMAND} --out DIR`, in "
            "the environment in which it will be used, or unset the variable."
        )
    return path


def cache_folder() -> Path | None:
    """Where this user's bridges are kept; None without a home. It need not exist."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "rallocator"
    try:
        return Path.home() / ".cache" / "rallocator"
    except RuntimeError:
        return None


def check_private(path: Path) -> None:
    """Check that nobody but this user could have put something there: it is going to be run.

    Arguments:
        path: a folder or a file that exists.

    Raises:
        BridgeError: it belongs to somebody else, others may write to it, or it is a link.
    """
    found = path.lstat()
    is_folder = stat.S_ISDIR(found.st_mode)
    if stat.S_ISLNK(found.st_mode):
        raise BridgeError(f"{path} is a link, and bridges are not looked for behind one: remove it.")
    if found.st_uid != os.geteuid():
        raise BridgeError(
            f"{path} belongs to another user (id {found.st_uid}), so nothing is loaded from there: remove it, or set "
            "XDG_CACHE_HOME to a folder of your own."
        )
    if stat.S_IMODE(found.st_mode) & (0o077 if is_folder else 0o022):
        mode = "700" if is_folder else "600"
        raise BridgeError(
            f"others than you may change {path}, so nothing is loaded from there: `chmod {mode} {path}`, if you trust "
            "what is in it, else remove it."
        )


class Bridge:
    """A loaded bridge, not yet in use."""

    def __init__(self, path: Path, torch: ModuleType) -> None:
        """Load a bridge and check that it was built for this torch.

        Arguments:
            path: the file.
            torch: the imported module, whose libraries the bridge needs.

        Raises:
            BridgeError: it was built for another torch, or cannot be loaded.
        """
        self.path = path
        wanted = torch.version.git_version
        try:
            self._library = ctypes.CDLL(str(path))
            built_for = ctypes.c_char.in_dll(self._library, "rallocator_bridge_git_version")
            version = ctypes.c_char.in_dll(self._library, "rallocator_bridge_torch_version")
        except (OSError, ValueError) as error:
            raise BridgeError(f"The bridge {path} cannot be loaded into torch {torch.__version__}: {error}.") from error
        commit, release = (ctypes.string_at(ctypes.addressof(text)).decode() for text in (built_for, version))
        if commit != wanted:
            raise BridgeError(
                f"The bridge {path} was built for torch {release} (commit {commit}), and this is {torch.__version__} "
                f"(commit {wanted}). Make one for it with `{COMMAND}`."
            )

    def install(self) -> None:
        """Make it torch's allocator.

        Raises:
            TooLateError: torch's own allocator is in use already.
            BridgeError: it was built for another rallocator.
        """
        from rallocator import _core, _torch

        install = self._library.rallocator_bridge_install
        install.argtypes, install.restype = [ctypes.c_void_p], ctypes.c_char_p
        reason: bytes | None = install(_core._api_address())
        if reason is None:
            return
        if b"already in use" in reason:
            raise _torch.too_late(reason.decode())
        raise BridgeError(f"The bridge {self.path} cannot be used: {reason.decode()}. Make it anew with `{COMMAND}`.")


def check_reached(torch: ModuleType) -> None:
    """Check that torch now calls the bridge.

    Arguments:
        torch: the imported module.

    Raises:
        RallocatorError: it does not.
    """
    name = torch.cuda.get_allocator_backend()
    if name != "rallocator":
        raise RallocatorError(
            f"torch calls {name!r} in place of rallocator's bridge. Do not use the GPU in this process: restart it "
            "without rallocator, and please report this."
        )
