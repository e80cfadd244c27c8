"""What rallocator needs to know of torch and to do to it. torch is imported only by the functions that say so."""

from __future__ import annotations

import ctypes
import importlib
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Protocol

from rallocator import _core
from rallocator.errors import ForkError, RallocatorError, TooLateError, TorchNotSupportedError

OLDEST_SUPPORTED = (2, 9)
"""The oldest release of torch that has the interfaces used here (major, minor)."""

STAYS = "torch's own allocator stays in use."
"""The end of each message that explains why rallocator was not enabled."""

HOW_TO_BE_IN_TIME = (
    "Call rallocator.enable() right after `import torch`, before anything that reaches the GPU "
    "(torch.cuda.set_device is enough); in a notebook, restart the kernel and put the call into the first cell; "
    "or leave the program as it is and start it with `rallocator run`."
)


class PluggableAllocator(Protocol):
    """A `torch.cuda.memory.CUDAPluggableAllocator`."""

    def allocator(self) -> object:
        """The object of torch's C++ side, which has the setters of the hooks."""


def import_supported() -> ModuleType:
    """Import torch and check that it is one that rallocator can attach to.

    Returns:
        The module `torch`.

    Raises:
        TorchNotSupportedError: torch cannot be imported, has no CUDA (also ROCm), or is older than 2.9.
    """
    try:
        torch = importlib.import_module("torch")
        version, cuda = torch.__version__, torch.version.cuda
    # A broken installation fails in any way: a library that is missing is an OSError, and a folder that happens to be
    # called torch is a module without a version. The program may not need torch at all.
    except Exception as error:
        raise TorchNotSupportedError(
            f"torch cannot be imported ({type(error).__name__}: {_first_line(error)}). Install a CUDA build of torch "
            "2.9 or newer into this environment: https://pytorch.org/get-started/locally/"
        ) from error
    check_build(version, cuda, getattr(torch.version, "hip", None))
    return torch


def check_build(version: str, cuda: str | None, hip: str | None) -> None:
    """Check that a build of torch is one that rallocator can attach to.

    Arguments:
        version: `torch.__version__`, for instance "2.11.0+cu130".
        cuda: `torch.version.cuda`; None for a build without CUDA.
        hip: `torch.version.hip`; None for a build without ROCm.

    Raises:
        TorchNotSupportedError: it is not.
    """
    if hip is not None:
        raise TorchNotSupportedError(
            f"This torch ({version}) is built for ROCm {hip}, and rallocator works with NVIDIA GPUs only. {STAYS}"
        )
    if cuda is None:
        raise TorchNotSupportedError(
            f"This torch ({version}) is built without CUDA. Install a CUDA build: "
            f"https://pytorch.org/get-started/locally/. {STAYS}"
        )
    if release(version) < OLDEST_SUPPORTED:
        oldest = ".".join(map(str, OLDEST_SUPPORTED))
        raise TorchNotSupportedError(
            f"This torch ({version}) is older than {oldest}, the oldest supported. Upgrade torch. {STAYS}"
        )
    if not sys.platform.startswith("linux"):
        raise TorchNotSupportedError(
            f"torch takes other allocators on Linux only, and this system is {sys.platform}. {STAYS}"
        )


def release(version: str) -> tuple[int, int]:
    """The release that a version belongs to.

    Arguments:
        version: `torch.__version__`, for instance "2.11.0+cu130".

    Returns:
        Its first two numbers; (0, 0) for a version that has none.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    return (0, 0) if found is None else (int(found[1]), int(found[2]))


def check_in_time(torch: ModuleType) -> None:
    """Check that torch would still take an allocator. Initialises nothing.

    Arguments:
        torch: the imported module.

    Raises:
        ForkError: this process was forked from one that had initialised CUDA.
        TooLateError: torch has initialised CUDA, or already uses another allocator than its own.
    """
    if torch.cuda._is_in_bad_fork():
        raise ForkError(
            "This process was forked from one that had already initialised CUDA, so it cannot use the GPU, with any "
            "allocator. Start it with the 'spawn' or 'forkserver' method "
            "(torch.multiprocessing.get_context('spawn')), or fork before CUDA is first used; rallocator.enable() "
            f"alone does not initialise it. {STAYS}"
        )
    if torch.cuda.is_initialized():
        raise too_late("torch has already initialised CUDA")
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        raise TooLateError(
            f"torch already uses another allocator than its own ({backend}). Only one can be in use: take the call "
            f"that installs it out of the program, or do not enable rallocator. That allocator stays in use."
        )


def too_late(what_happened: str) -> TooLateError:
    """The error for a call of `enable` that came too late.

    Arguments:
        what_happened: what came first, as a clause.

    Returns:
        The exception, to be raised.
    """
    return TooLateError(f"rallocator.enable() came too late: {what_happened}. {HOW_TO_BE_IN_TIME} {STAYS}")


def make_pluggable_allocator(torch: ModuleType) -> PluggableAllocator:
    """Make the object that stands for rallocator in torch, with all hooks set.

    Arguments:
        torch: the imported module.

    Returns:
        The allocator, not yet in use.

    Raises:
        TorchNotSupportedError: this torch lacks a hook.
        RallocatorError: torch would load another copy of rallocator than this process runs.
    """
    path = _core.__file__
    allocator: PluggableAllocator = torch.cuda.memory.CUDAPluggableAllocator(
        path, "rallocator_malloc", "rallocator_free"
    )
    loaded = ctypes.cast(ctypes.CDLL(path).rallocator_malloc, ctypes.c_void_p).value
    if loaded != _core._malloc_address():
        raise RallocatorError(
            f"torch would load a second copy of rallocator from {path}, which knows nothing of this one. "
            f"Was rallocator reinstalled while this program ran? Restart it. {STAYS}"
        )
    for setter, address in _core._hook_addresses().items():
        set_hook: Callable[[int], None] | None = getattr(allocator.allocator(), setter, None)
        if set_hook is None:
            # An unset hook is silently skipped by torch; without record_stream that corrupts tensors.
            raise TorchNotSupportedError(
                f"This torch ({torch.__version__}) has no {setter}, without which rallocator would not be safe. "
                f"Please report it. {STAYS}"
            )
        set_hook(address)
    return allocator


def change_allocator(torch: ModuleType, allocator: PluggableAllocator) -> None:
    """Make torch use the allocator.

    Arguments:
        torch: the imported module.
        allocator: from `make_pluggable_allocator`.

    Raises:
        TooLateError: torch's own allocator is in use already; C++ code can cause that without Python's knowing.
    """
    try:
        torch.cuda.memory.change_current_allocator(allocator)
    except RuntimeError as error:
        raise too_late(f"torch's own allocator is already in use ({_first_line(error)})") from error


def verify_hooks(torch: ModuleType) -> None:
    """Check that torch's calls reach the hooks of this library, with their arguments in the right places.

    The hooks only note these calls. No GPU is needed, and CUDA is not initialised. Of the eight hooks those five are
    called that torch lets Python reach without a GPU; all take the same way through torch.

    Arguments:
        torch: the imported module, with the allocator in use.

    Raises:
        RallocatorError: a call did not arrive as it should.
    """
    device, fraction = 0, 0.5
    # Two numbers that no pool of torch has: it counts pools from 1 on, with the other number 0.
    pool = (0x72616C6C, 0x6F636174)

    def call_all() -> None:
        torch._C._cuda_emptyCache()
        torch._C._cuda_setMemoryFraction(fraction, device)
        torch._C._cuda_beginAllocateToPool(device, pool)
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)

    arguments = f"{device} {pool[0]} {pool[1]}"
    expected = [
        "empty_cache",
        f"set_memory_fraction {fraction} {device}",
        f"begin_pool {arguments}",
        f"end_pool {arguments}",
        f"release_pool {arguments}",
    ]
    seen = _core._probe_hooks(call_all)
    if seen != expected:
        raise RallocatorError(
            f"This torch ({torch.__version__}) does not call rallocator as expected (expected {expected}, saw {seen}). "
            "Do not use the GPU in this process: restart it without rallocator, and please report this."
        )


def current_device() -> int:
    """Torch's current CUDA device, if torch is imported and has initialised CUDA; else 0. Imports nothing."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.current_device())


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
