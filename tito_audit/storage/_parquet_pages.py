"""Column chunks of Parquet files copied from one file to another as they are stored."""

from __future__ import annotations

from typing import BinaryIO

from tito_audit.storage._thrift import I32, I64, Reader, Several, Struct, written

_BLOCK = 1 << 20
_HEADER = 1 << 16
# Fields of a column chunk.
_FILE, _FILE_OFFSET, ABOUT, OFFSETS, _OFFSETS_SIZE, BOUNDS, _BOUNDS_SIZE = range(1, 8)
# Fields of what it says about its pages.
ENCODINGS, PATH, CODEC, VALUES, _PLAIN_SIZE, _SIZE, DATA, _INDEX, DICTIONARY = 2, 3, 4, 5, 6, 7, 9, 10, 11
STATISTICS, ENCODING_STATS, BLOOM, _BLOOM_SIZE = 12, 13, 14, 15


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
    about = chunk.get(ABOUT)
    return about.get(_PLAIN_SIZE), about.get(_SIZE)


def copied(source: BinaryIO, chunk: Struct, out: Sink, path: Several | None = None) -> Struct:
    """Write a column chunk of another file with its indexes; returns what the footer says of it.

    `path`: what it is called there. OSError or ValueError if the chunk is not where the footer says.
    """
    about: Struct = chunk.get(ABOUT)
    start = start_of(about)
    moved = out.at - start
    out.copy(source, start, about.get(_SIZE))
    new = Struct(dict(about.fields))
    for number in (DATA, _INDEX, DICTIONARY):
        if about.get(number):
            new.put(number, I64, about.get(number) + moved)
    if path is not None:
        new.put(PATH, 9, path)
    _copy_filter(source, about, new, out)
    whole = Struct({2: (I64, chunk.get(_FILE_OFFSET, 0) + moved if chunk.get(_FILE_OFFSET) else 0)})
    whole.put(ABOUT, 12, new)
    bounds, offsets = (read_index(source, chunk, number) for number in (BOUNDS, OFFSETS))
    if bounds is not None:
        write_index(whole, BOUNDS, bounds, out)
    if offsets is not None:
        for page in offsets.get(1).values:
            page.put(1, I64, page.get(1) + moved)
        write_index(whole, OFFSETS, offsets, out)
    return whole


def path_of(chunk: Struct) -> Several:
    """The names on the way to a column chunk's values."""
    found: Several = chunk.get(ABOUT).get(PATH)
    return found


def is_external(chunk: Struct) -> bool:
    """Whether the pages are in another file, or are not described."""
    return chunk.get(_FILE) is not None or chunk.get(ABOUT) is None


def start_of(about: Struct) -> int:
    """Where the pages of a column chunk begin."""
    start, dictionary = about.get(DATA), about.get(DICTIONARY)
    return int(min(start, dictionary) if dictionary else start)


def _copy_filter(source: BinaryIO, about: Struct, new: Struct, out: Sink) -> None:
    """Write the bloom filter, if its size is known; else the footer no longer names one."""
    if about.get(BLOOM) and about.get(_BLOOM_SIZE):
        new.put(BLOOM, I64, out.at)
        out.copy(source, about.get(BLOOM), about.get(_BLOOM_SIZE))
    else:
        new.drop(BLOOM)
        new.drop(_BLOOM_SIZE)


def read_index(source: BinaryIO, chunk: Struct, number: int) -> Struct | None:
    """The index of a column chunk's pages, `BOUNDS` or `OFFSETS`; None if it has none."""
    at, size = chunk.get(number), chunk.get(number + 1)
    if not at or not size:
        return None
    source.seek(at)
    return Reader(source.read(size)).struct()


def write_index(chunk: Struct, number: int, index: Struct, out: Sink) -> None:
    """Write an index of pages, and note in the column chunk where it is."""
    data = written(index)
    chunk.put(number, I64, out.at)
    chunk.put(number + 1, I32, len(data))
    out.write(data)
