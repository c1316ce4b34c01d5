"""ByteStream: the decompressed bytes of a log in blocks, with lookahead."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, Literal

from tito_audit.storage import lazy_pyarrow as pa

Compression = Literal["gzip", "zstd"] | None

_BLOCK = 1 << 20
_ZSTD_BLOCK = 1 << 16  # a damaged frame loses what was decompressed of the same read
_MAGIC: dict[bytes, Compression] = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}


class Damaged(Exception):
    """The file cannot be read further; the message says where. Caught within this room."""


def compression_of(head: bytes) -> Compression:
    """How a file is compressed, by its first four bytes; None if it is not."""
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)


class ByteStream:
    """Blocks of decompressed bytes; what `peek` showed is still read afterwards.

    Damage is reported only once everything before it was read, so `peek` never raises.
    """

    def __init__(self, raw: BinaryIO, compression: Compression) -> None:
        self._compression = compression
        self._reader, self._size = _reader(raw, compression)
        self._ahead: list[bytes] = []
        self._damage: Damaged | None = None
        self._taken = 0

    def __iter__(self) -> Iterator[bytes]:
        """The remaining blocks; raises Damaged where the file is damaged."""
        while True:
            if self._ahead:
                yield self._ahead.pop(0)
            elif self._damage is not None:
                raise self._damage
            elif block := self._pull():
                yield block
            elif self._damage is None:
                return

    def peek(self, size: int) -> bytes:
        """The next `size` bytes without consuming them; fewer only at the end of the file."""
        have = sum(map(len, self._ahead))
        while have < size and (block := self._pull()):
            self._ahead.append(block)
            have += len(block)
        # The blocks stay apart: a joined one would be held until its last row is read.
        parts, left = [], size
        for block in self._ahead:
            parts.append(block[:left])
            left -= len(block)
            if left <= 0:
                break
        return b"".join(parts)

    def unread(self, blocks: list[bytes]) -> None:
        """Put blocks back to be read again."""
        self._ahead[:0] = blocks

    def skip(self, size: int) -> None:
        """Consume bytes that `peek` showed."""
        head = b"".join(self._ahead)[size:]
        self._ahead = [head] if head else []

    def close(self) -> None:
        """Close the decompressor; the file itself stays open."""
        if self._compression is not None:
            self._reader.close()

    def _pull(self) -> bytes:
        """The next block of the file; b"" at its end and at damage, which is kept for later."""
        if self._damage is not None:
            return b""
        try:
            block: bytes = self._reader.read1(self._size)
        except (OSError, EOFError, zlib.error) as error:
            what = f"the {self._compression} data" if self._compression else "the file"
            self._damage = Damaged(f"{what} cannot be read past byte {self._taken:,} ({error})")
            return b""
        self._taken += len(block)
        return block


def _reader(raw: BinaryIO, compression: Compression) -> tuple[Any, int]:
    """An object with `read1`, and how many bytes to read at once."""
    if compression == "gzip":
        return gzip.GzipFile(fileobj=raw), _BLOCK
    if compression == "zstd":
        return pa.input_stream(raw, compression="zstd"), _ZSTD_BLOCK
    return raw, _BLOCK
