"""Column chunks of Parquet files copied from one file to another as they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import BinaryIO

from tito_audit.storage._thrift import I32, I64, Reader, Several, Struct, written

_BLOCK = 1 << 20
_HEADER = 1 << 16
# Fields of a column chunk.
_FILE, _FILE_OFFSET, _ABOUT, _OFFSETS, _OFFSETS_SIZE, _BOUNDS, _BOUNDS_SIZE = range(1, 8)
# Fields of what it says about its pages.
_ENCODINGS, PATH, _VALUES, _PLAIN_SIZE, _SIZE, _DATA, _INDEX, _DICTIONARY = 2, 3, 5, 6, 7, 9, 10, 11
_STATISTICS, _ENCODING_STATS, _BLOOM, _BLOOM_SIZE, _SIZES = 12, 13, 14, 15, 16
_DICTIONARY_PAGE = 2


class Sink:
    """A file that is written from its start to its end."""

    def __init__(self, out: BinaryIO) -> None:
        self.at = 0
        """How many bytes were written."""
        self._out = out

    def write(self, data: bytes) -> None:
        """Write bytes."""
        self._out.write(data)
        self.at += len(data)

    def copy(self, source: BinaryIO, start: int, size: int) -> None:
        """Write a part of another file; OSError if it is not there."""
        source.seek(start)
        while size:
            block = source.read(min(size, _BLOCK))
            if not block:
                raise OSError("the file ends early")
            self.write(block)
            size -= len(block)


def sizes(chunk: Struct) -> tuple[int, int]:
    """The bytes of a column chunk's pages, uncompressed and as stored."""
    about = chunk.get(_ABOUT)
    return about.get(_PLAIN_SIZE), about.get(_SIZE)


def copied(source: BinaryIO, chunk: Struct, out: Sink, path: Several | None = None) -> Struct:
    """Write a column chunk of another file with its indexes; returns what the footer says of it.

    `path`: what it is called there. OSError or ValueError if the chunk is not where the footer says.
    """
    about: Struct = chunk.get(_ABOUT)
    start = _start(about)
    moved = out.at - start
    out.copy(source, start, about.get(_SIZE))
    new = Struct(dict(about.fields))
    for number in (_DATA, _INDEX, _DICTIONARY):
        if about.get(number):
            new.put(number, I64, about.get(number) + moved)
    if path is not None:
        new.put(PATH, 9, path)
    _copy_filter(source, about, new, out)
    whole = Struct({2: (I64, chunk.get(_FILE_OFFSET, 0) + moved if chunk.get(_FILE_OFFSET) else 0)})
    whole.put(_ABOUT, 12, new)
    if chunk.get(_BOUNDS) and chunk.get(_BOUNDS_SIZE):
        _put(whole, _BOUNDS, out.at, chunk.get(_BOUNDS_SIZE))
        out.copy(source, chunk.get(_BOUNDS), chunk.get(_BOUNDS_SIZE))
    if chunk.get(_OFFSETS) and chunk.get(_OFFSETS_SIZE):
        offsets = _moved_offsets(source, chunk.get(_OFFSETS), chunk.get(_OFFSETS_SIZE), moved)
        _put(whole, _OFFSETS, out.at, len(offsets))
        out.write(offsets)
    return whole


def joined(parts: Sequence[tuple[BinaryIO, Struct]], out: Sink, path: Several) -> Struct:
    """Write the pages of several column chunks as one; all but the first have no dictionary.

    Statistics and indexes, which say something of all pages, are left out.
    """
    first: Struct = parts[0][1].get(_ABOUT)
    new = Struct(dict(first.fields))
    for number in (_STATISTICS, _ENCODING_STATS, _SIZES, _BLOOM, _BLOOM_SIZE, _INDEX):
        new.drop(number)
    moved = out.at - _start(first)
    for number in (_DATA, _DICTIONARY):
        if first.get(number):
            new.put(number, I64, first.get(number) + moved)
    encodings: list[int] = []
    for source, chunk in parts:
        about: Struct = chunk.get(_ABOUT)
        if chunk is not parts[0][1] and about.get(_DICTIONARY):
            raise ValueError("a part has a dictionary")
        out.copy(source, _start(about), about.get(_SIZE))
        encodings += [one for one in about.get(_ENCODINGS).values if one not in encodings]
    new.put(_ENCODINGS, 9, Several(I32, encodings))
    new.put(PATH, 9, path)
    for number in (_VALUES, _PLAIN_SIZE, _SIZE):
        new.put(number, I64, sum(chunk.get(_ABOUT).get(number) for _, chunk in parts))
    return Struct({_FILE_OFFSET: (I64, 0), _ABOUT: (12, new)})


def path_of(chunk: Struct) -> Several:
    """The names on the way to a column chunk's values."""
    found: Several = chunk.get(_ABOUT).get(PATH)
    return found


def is_external(chunk: Struct) -> bool:
    """Whether the pages are in another file, or are not described."""
    return chunk.get(_FILE) is not None or chunk.get(_ABOUT) is None


def _start(about: Struct) -> int:
    start, dictionary = about.get(_DATA), about.get(_DICTIONARY)
    return int(min(start, dictionary) if dictionary else start)


def _copy_filter(source: BinaryIO, about: Struct, new: Struct, out: Sink) -> None:
    """Write the bloom filter, if its size is known; else the footer no longer names one."""
    if about.get(_BLOOM) and about.get(_BLOOM_SIZE):
        new.put(_BLOOM, I64, out.at)
        out.copy(source, about.get(_BLOOM), about.get(_BLOOM_SIZE))
    else:
        new.drop(_BLOOM)
        new.drop(_BLOOM_SIZE)


def _put(whole: Struct, number: int, at: int, size: int) -> None:
    whole.put(number, I64, at)
    whole.put(number + 1, I32, size)


def _moved_offsets(source: BinaryIO, at: int, size: int, moved: int) -> bytes:
    """An index of page offsets for pages that were moved."""
    source.seek(at)
    index = Reader(source.read(size)).struct()
    for page in index.get(1).values:
        page.put(1, I64, page.get(1) + moved)
    return written(index)
