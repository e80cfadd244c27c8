"""Sending CUDA tensors to other processes."""

from __future__ import annotations

from typing import Any, NoReturn


def share_storage(*_args: Any) -> NoReturn:
    """`torch.UntypedStorage._share_cuda_()`, which makes the handle that goes to the other process.

    Raises:
        RuntimeError: always, in the process that sends.
    """
    raise RuntimeError(
        "A CUDA tensor cannot be sent to another process while rallocator is in use: torch has no hook for it. Send "
        "tensor.cpu() and copy it to the GPU there, or start the sending process without rallocator; the receiving "
        "one may use it."
    )
