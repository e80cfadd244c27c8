"""Loads a pickle that may come from anybody: numbers, text and containers, and nothing that could run."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from typing import NoReturn

from rallocator import _core
from rallocator.errors import SnapshotError

_FIRST_BYTES = b"\x80(]})"
"""How a pickle of a dictionary or list can begin: PROTO, or protocol 0 or 1 without it."""


class _RefusingUnpickler(pickle.Unpickler):
    """Python's own unpickler, with every way out of plain data closed."""

    def find_class(self, module: str, name: str) -> NoReturn:  # noqa: ARG002 — whatever the name, it is refused.
        raise SnapshotError("names a Python object, which a memory snapshot never does")

    def persistent_load(self, pid: object) -> NoReturn:  # noqa: ARG002 — as above.
        raise SnapshotError("names an outside object, which a memory snapshot never does")


def load(chunks: Iterable[bytes]) -> object:
    """Load the pickle that the chunks begin with; what follows its end is ignored.

    Arguments:
        chunks: the file's unpacked content. All of it is consumed, so that a checksum at its end is verified.

    Returns:
        Dictionaries, lists, tuples, text, numbers, booleans and None. Containers may be shared or contain themselves.

    Raises:
        SnapshotError: not a pickle, damaged, or one that holds anything else.
    """
    scanner = _core.PickleScanner()
    content = bytearray()
    length: int | None = None
    for chunk in chunks:
        if length is not None:
            continue
        if not content and chunk and chunk[0] not in _FIRST_BYTES:
            raise SnapshotError("not a pickle")
        content += chunk
        try:
            length = scanner.feed(chunk)
        except ValueError as error:
            raise SnapshotError(str(error)) from error
    if not content:
        raise SnapshotError("empty")
    if length is None:
        raise SnapshotError("truncated: the pickle has no end")
    return _load_checked(content[:length])


def _load_checked(content: bytearray) -> object:
    try:
        return _RefusingUnpickler(io.BytesIO(content)).load()
    except SnapshotError:
        raise
    except MemoryError as error:
        raise SnapshotError("holds more than fits in this machine's memory") from error
    except Exception as error:
        # The unpickler reports damage as whatever its opcodes ran into: ValueError, IndexError, AttributeError, ….
        raise SnapshotError(f"damaged pickle: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 120 else text[:117] + "..."
