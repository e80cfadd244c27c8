"""Opens a recorded history: plain, gzip or xz, told apart by content and never unpacked beyond a limit."""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from rallocator.errors import SnapshotError

CHUNK_BYTES = 1 << 20
"""Bytes read, and bytes unpacked, at a time: a bomb is noticed after this many."""

DEFAULT_LIMIT_BYTES = 4 << 30
"""Unpacked bytes that are accepted unless the caller says otherwise: a history of fifty million events."""

XZ_MEMORY_BYTES = 512 << 20
"""Memory that an xz dictionary may ask for; ``xz -9`` asks for 65 MiB."""

_GZIP_MAGIC = b"\x1f\x8b"
_XZ_MAGIC = b"\xfd7zXZ\x00"

Unpack = Callable[[bytes, int], bytes]


def chunks(path: Path, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> Iterator[bytes]:
    """Yield the unpacked content of a file in chunks of at most `CHUNK_BYTES`.

    Arguments:
        path: the file. What it is named does not matter.
        limit_bytes: unpacked bytes after which the file is refused.

    Raises:
        SnapshotError: the file cannot be read, is damaged, or unpacks to more than the limit.
    """
    total = 0
    try:
        for chunk in _unpacked(path):
            total += len(chunk)
            if total > limit_bytes:
                raise SnapshotError(
                    f"unpacks to more than {limit_bytes} bytes; `rallocator replay --max-size`, or max_size in Python, "
                    "accepts more"
                )
            yield chunk
    except (lzma.LZMAError, zlib.error) as error:
        raise SnapshotError(f"damaged compressed data: {error}") from error
    except OSError as error:
        raise SnapshotError(error.strerror or str(error)) from error


def _unpacked(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        first = file.read(CHUNK_BYTES)
        packed = _prepend(first, iter(lambda: file.read(CHUNK_BYTES), b""))
        if first.startswith(_GZIP_MAGIC):
            yield from _members(packed, _Gzip)
        elif first.startswith(_XZ_MAGIC):
            yield from _members(packed, _Xz)
        else:
            yield from packed


def _prepend(first: bytes, others: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from others


class _Gzip:
    """One gzip member."""

    def __init__(self) -> None:
        self._decoder = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)

    def unpack(self, packed: bytes) -> tuple[bytes, bytes]:
        """Return the next unpacked bytes, and the packed ones that are still to be given again."""
        out = self._decoder.decompress(packed, CHUNK_BYTES)
        return out, self._decoder.unused_data if self._decoder.eof else self._decoder.unconsumed_tail

    @property
    def ended(self) -> bool:
        return self._decoder.eof

    @property
    def holds_more(self) -> bool:
        """Whether unpacked bytes may be waiting although no packed ones are."""
        return False


class _Xz:
    """One xz stream."""

    def __init__(self) -> None:
        self._decoder = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=XZ_MEMORY_BYTES)

    def unpack(self, packed: bytes) -> tuple[bytes, bytes]:
        """Return the next unpacked bytes, and the packed ones that are still to be given again."""
        out = self._decoder.decompress(packed, CHUNK_BYTES)
        return out, self._decoder.unused_data if self._decoder.eof else b""

    @property
    def ended(self) -> bool:
        return self._decoder.eof

    @property
    def holds_more(self) -> bool:
        """Whether unpacked bytes may be waiting although no packed ones are."""
        return not self._decoder.eof and not self._decoder.needs_input


def _members(packed: Iterator[bytes], decoder_type: type[_Gzip | _Xz]) -> Iterator[bytes]:
    """Unpack one member after another: both formats allow several, and zero bytes after the last."""
    decoder = decoder_type()
    begun = False
    for piece in packed:
        rest = piece
        while rest or decoder.holds_more:
            if decoder.ended:
                rest = rest.lstrip(b"\x00")
                if not rest:
                    break
                decoder, begun = decoder_type(), False
            out, rest = decoder.unpack(rest)
            begun = True
            if out:
                yield out
    if begun and not decoder.ended:
        raise SnapshotError("truncated: the compressed data ends too early")
