"""RemoteFile: a file in a bucket, on the hub or on a web server as a path. RangedFile: its bytes."""

from __future__ import annotations

import io
import os
import re
import sys
import tempfile
import weakref
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast
from urllib.parse import urlsplit, urlunsplit

from tito_audit.errors import StorageError
from tito_audit.storage._store import (
    TRIES,
    AzureStore,
    GoogleStore,
    Missing,
    Refusal,
    RemoteStatus,
    S3Store,
    Store,
    Transient,
    driver_settings,
    dropped_connection,
    wait_before_retry,
    with_retries,
)

T = TypeVar("T")

_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_STORES: dict[str, type[Store] | str] = {
    "s3": S3Store,
    "s3a": S3Store,
    "gs": GoogleStore,
    "gcs": GoogleStore,
    "az": AzureStore,
    "abfs": AzureStore,
    "hf": "HubStore",
    "https": "WebStore",
    "http": "WebStore",
}
"""By scheme; those of `_store_web` by name, as importing HTTP takes an eighth of a small scan of local files."""
_HIDDEN = "…"
"""Shown in place of a URL's query, which may be a signature."""
FIRST_BLOCK = 1 << 16
"""Bytes that a sequential read fetches first; each further fetch doubles."""
_LARGEST_BLOCK = 8 << 20
"""Bytes of one request at most."""
_SMALLEST_BLOCK = 1 << 16
"""Bytes of one request at least, after connections were dropped."""
_READ_AHEAD = 64 << 20
"""Bytes that are read ahead, over all places of a file from which somebody reads."""
_KEPT_PER_FILE = 16 << 20
"""Bytes of a file that are kept, of those that were fetched first."""
_KEPT_IN_ALL = 64 << 20
"""Bytes of all files that are kept."""

ReadRange = Callable[[int, int], bytes]
"""Reads the bytes `[start, stop)`, or the first of them if the connection drops."""


def is_url(name: str) -> bool:
    """Whether a name is a URL rather than a path."""
    return _URL.match(name) is not None


class RemoteFile(type(Path())):  # type: ignore[misc]
    """A path that is shown as a URL and read over the network.

    The URL is shown without user, password and query, which may be secret. Joins (`folder / name`), `parent`,
    `name` and suffixes work as for any path. The first status that the store gives is kept, also by pickles, and
    any other version of the file is refused. Errors of the store are StorageErrors in one line; `stat` raises
    FileNotFoundError.
    """

    files_below: list[RemoteFile] | None = None
    """The files below a folder that was listed; None for anything else."""
    similar: RemoteFile | None = None
    """For one of many shards, the shard that shows what kind of file all of them are."""

    def __new__(cls, *parts: Any) -> RemoteFile:
        """A path from a URL, or from the parts of one."""
        file: RemoteFile = super().__new__(cls, *map(_path_part, parts))
        if len(parts) == 1 and not isinstance(parts[0], RemoteFile):
            file._exact = str(parts[0])
            if (shown := str(file)) != file._exact:
                _by_name[shown] = file
        return file

    if sys.version_info >= (3, 12):

        def __init__(self, *parts: Any) -> None:
            super().__init__(*map(_path_part, parts))

    @property
    def url(self) -> str:
        """The URL with user, password and query, as the store needs it."""
        return getattr(self, "_exact", None) or str(self)

    def __str__(self) -> str:
        exact: str | None = getattr(self, "_exact", None)
        return redact_url(exact) if exact is not None else super().__str__().replace(":/", "://", 1)

    def __fspath__(self) -> str:
        return str(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteFile) and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteFile, (self.url,), getattr(self, "_status", None)

    def __setstate__(self, status: RemoteStatus) -> None:
        # `_copies` finds the copy of a file by the identity of its status.
        own = getattr(_by_name.get(str(self)), "_status", None)
        self._status = own if own == status else status

    @property
    def store(self) -> Store:
        """The store that holds it, one for each process and environment; StorageError if its driver is missing."""
        scheme = self.url.partition("://")[0].lower()
        kind = _STORES.get(scheme)
        if kind is None:
            schemes = ", ".join(f"{name}://" for name in _STORES)
            raise StorageError(f"{self}: {scheme}:// is not read. Logs are read from {schemes} and from disk.")
        if isinstance(kind, str):
            from tito_audit.storage import _store_web

            kind = cast("type[Store]", getattr(_store_web, kind))
        which = (os.getpid(), kind, driver_settings())
        if which not in _stores:
            try:
                _stores[which] = kind()
            except (StorageError, Refusal) as error:
                raise StorageError(f"{self}: {error}") from None
        return _stores[which]

    def stat(self, *, follow_symlinks: bool = True) -> RemoteStatus:
        """Size, time and etag, as the store first gave them; FileNotFoundError if there is no such file."""
        status: RemoteStatus | None = getattr(self, "_status", None)
        if status is None and (listed := _by_name.get(str(self))) is not None and listed.url == self.url:
            status = self._status = getattr(listed, "_status", None)
        if status is None:
            try:
                status = self._status = self.ask(lambda store: store.status(self.url))
            except Missing as error:
                raise FileNotFoundError(2, str(error), str(self)) from None
        return status

    def refresh_status(self) -> RemoteStatus:
        """Ask the store for its status once more; FileNotFoundError if there is no such file."""
        self.__dict__.pop("_status", None)
        _by_name.pop(str(self), None)
        return self.stat()

    def exists(self, **_: Any) -> bool:
        return self.is_file() or self.is_dir()

    def is_file(self, **_: Any) -> bool:
        try:
            self.stat()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self, **_: Any) -> bool:
        if self.files_below is not None or getattr(self, "_status", None) is not None:
            return bool(self.files_below)
        try:
            return self.ask(lambda store: store.is_folder(self.url))
        except Missing:
            return False

    def files(self) -> Iterator[RemoteFile]:
        """The files below a folder at any depth, with their status."""
        try:
            files = self.ask(lambda store: list(store.files(self.url)))
        except Missing:
            return
        for url, status in files:
            file = RemoteFile(url)
            file._status = status
            yield file

    def entries(self) -> list[str]:
        """Names of what is directly in a folder, the first thousand or so; [] if it cannot be listed."""
        try:
            urls = self.ask(lambda store: store.entries(self.url))
        except (Missing, StorageError):
            return []
        return [url.rstrip("/").rpartition("/")[2] for url in urls]

    def ask(self, request: Callable[[Store], T]) -> T:
        """What the store answers, asked again where that may help; StorageError or Missing if it refuses."""
        try:
            return with_retries(lambda: self._ask_once(request))
        except Missing:
            raise
        except Refusal as error:
            raise StorageError(f"{self}: {error}") from None

    def _ask_once(self, request: Callable[[Store], T]) -> T:
        """What the store answers to one try; a Refusal for whatever it raises."""
        store = self.store
        try:
            return request(store)
        except (StorageError, Refusal):
            raise
        except Exception as error:  # drivers raise exceptions of many kinds
            raise store.refusal(error, self.url) from None

    def open(self, mode: str = "rb", buffering: int = -1, *_: Any, **__: Any) -> BinaryIO:
        """The bytes of the file, which can be read from any position; FileNotFoundError if there is none."""
        if mode != "rb":
            raise StorageError(f"{self}: a remote file is written whole, by new_file.")
        status = self.stat()
        raw = RangedFile(str(self), status, self._read if status.serves_ranges else _read_through_copy(self))
        return cast(BinaryIO, raw if buffering == 0 else io.BufferedReader(raw, FIRST_BLOCK))

    def _read(self, start: int, stop: int) -> bytes:
        """One try to read a range; Transient where another may help."""
        status = self.stat()
        try:
            return self._ask_once(lambda store: store.read(self.url, start, stop, status))
        except Transient:
            raise
        except Refusal as error:
            raise StorageError(f"{self}: {error}") from None

    def read_bytes(self) -> bytes:
        with self.open() as file:
            return file.read()


def remote_file(name: str) -> RemoteFile:
    """The remote file for a URL, also for one that was shown without its secrets."""
    return _by_name.get(name) or RemoteFile(name)


def remember(file: RemoteFile) -> RemoteFile:
    """Remember a file with its status, which `remote_file` then returns in this process."""
    _by_name[str(file)] = file
    return file


_stores: dict[tuple[Any, ...], Store] = {}
_by_name: dict[str, RemoteFile] = {}
"""Files by the URL that is shown."""
_copies: dict[str, tuple[RemoteStatus, ReadRange]] = {}


def _read_through_copy(path: RemoteFile) -> ReadRange:
    """Reads a file of a server without ranges from a temporary copy, which has no name and which forked processes
    share."""
    status, (of, copied) = path.stat(), _copies.get(path.url, (None, None))
    if copied is not None and of is status:
        return copied
    data = path.ask(lambda store: store.read(path.url, 0, status.st_size, status))
    if len(data) < status.st_size:
        raise StorageError(
            f"{path}: the connection was dropped, and the server sends no ranges to go on from there. "
            "Download the file and pass it."
        )
    file = tempfile.TemporaryFile(prefix="tito-audit-")  # noqa: SIM115 - lives as long as `read`
    file.write(data)
    file.flush()

    def read(start: int, stop: int) -> bytes:
        return os.pread(file.fileno(), stop - start, start)

    weakref.finalize(read, file.close)
    _copies[path.url] = status, read
    return read


def _path_part(part: Any) -> Any:
    """A part of a path as text; a URL without its secrets."""
    text = part if isinstance(part, str) else os.fspath(part)
    return redact_url(text).removesuffix(f"?{_HIDDEN}") if is_web_url(text) else text


def redact_url(url: str) -> str:
    """The URL of a web server without user, password and query; other URLs as they are."""
    if not is_web_url(url):
        return url
    try:
        parts = urlsplit(url)
    except ValueError:  # it is none, which the store will say
        return url.partition("?")[0].rpartition("@")[2]
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, _HIDDEN if parts.query else "", ""))


def is_web_url(text: str) -> bool:
    """Whether a URL is one of a web server."""
    return text[:8].lower().startswith(("http://", "https://"))


class RangedFile(io.RawIOBase):
    """The bytes of a remote file, read from any position and fetched range by range, rarely twice.

    The first read at a position fetches exactly what it asks for. Reads that go on from there fetch larger and
    larger blocks, at several positions independently. `read` waits for all the bytes, `readinto` for one block.

    Tried instead: the caches of fsspec, whose blocks all have one size. With 64 KiB they make 490 requests for
    30 MB of JSONL, where 9 suffice; with 1 MiB they fetch 8 MB of a table of which 71 KB are read.
    """

    name: str
    """The URL that is shown."""

    def __init__(self, name: str, status: RemoteStatus, read: ReadRange) -> None:
        super().__init__()
        self.name = name
        self._size = status.st_size
        self._read = read
        first = _first_blocks.pop((name, status), None)
        self._first = first or _FirstBlocks()
        if status.etag is not None:
            _first_blocks[name, status] = self._first
            size = sum(blocks.size for blocks in _first_blocks.values())
            while size > _KEPT_IN_ALL and len(_first_blocks) > 1:  # forget what was not opened for longest
                size -= _first_blocks.popitem(last=False)[1].size
        self._at = 0
        self._sequences: OrderedDict[int, _SequentialRead] = OrderedDict()
        """By position where the next read goes on."""
        self._expected_ranges: list[tuple[int, int]] = []

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position; fetches nothing."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(start + offset, 0)
        return self._at

    def size(self) -> int:
        """Bytes of the file; pyarrow calls it."""
        return self._size

    def expect_ranges(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Announce ranges `[start, stop)`, each of which will be read from start to end; replaces earlier ones.

        Small ranges are fetched whole, and no read within a range fetches bytes past its end.
        """
        self._expected_ranges = sorted(ranges)

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes, at least one; 0 at the end."""
        view = memoryview(buffer).cast("B")
        data = self._next_bytes(len(view), exact=False)
        view[: len(data)] = data
        return len(data)

    def read(self, size: int = -1) -> bytes:
        """The next `size` bytes, fewer only at the end; -1 reads all."""
        stop = self._size if size is None or size < 0 else min(self._at + size, self._size)
        parts = []
        while self._at < stop:
            parts.append(self._next_bytes(stop - self._at, exact=True))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def readall(self) -> bytes:
        return self.read()

    def _next_bytes(self, wanted: int, *, exact: bool) -> bytes:
        """The next bytes, at least one and at most `wanted`; b"" at the end of the file."""
        wanted = min(wanted, self._size - self._at)
        if wanted <= 0:
            return b""
        data = self._first.get(self._at, wanted)
        for sequence in () if data else reversed(self._sequences.values()):
            if sequence.start <= self._at < sequence.start + len(sequence.data):
                offset = self._at - sequence.start
                data = sequence.data[offset : offset + wanted]
                break
        if data:
            self._at += len(data)
            return data
        # Fetch a block from here on; the next reads get the rest.
        at, limit = self._at, self._size
        previous = self._sequences.pop(at, None)
        most = min(_LARGEST_BLOCK, max(_READ_AHEAD // max(len(self._sequences), 1), FIRST_BLOCK))
        size = min(wanted, _LARGEST_BLOCK) if exact else FIRST_BLOCK
        number = bisect_right(self._expected_ranges, (at, self._size + 1)) - 1
        expected = self._expected_ranges[number] if number >= 0 and at < self._expected_ranges[number][1] else None
        if previous is not None and previous.expected == expected:
            size = max(size if exact else 0, min(2 * previous.block_size, most))
        if expected is not None:
            limit = expected[1] if not exact or at + wanted <= expected[1] else limit
            if expected[1] - expected[0] <= most:
                size = max(size, expected[1] - at)
        data = self.fetch(at, min(at + size, limit))
        self._first.keep(at, data)
        rest = data if len(data) > wanted else b""
        self._sequences[at + len(data)] = _SequentialRead(at, rest, len(data), expected)
        if previous is None and len(self._sequences) > 256:  # positions that are read from alternately
            self._sequences.popitem(last=False)
        self._at += min(len(data), wanted)
        return data[:wanted]

    def fetch(self, start: int, stop: int) -> bytes:
        """Fetch `[start, stop)`; any number of drops is survived, as long as some bytes arrive before each."""
        parts: list[bytes] = []
        size, tries, failure = stop - start, 0, dropped_connection()
        while start < stop:
            try:
                data = self._read(start, min(start + size, stop))
            except Transient as error:
                data, failure = b"", error
            if len(data) > min(size, stop - start):
                raise StorageError(f"{self.name}: the store sends more than it was asked for. Download the file.")
            parts.append(data)
            start += len(data)
            tries = 0 if len(data) >= min(_SMALLEST_BLOCK, size) else tries + 1
            if tries == TRIES:
                raise StorageError(f"{self.name}: {failure}")
            if not data:
                wait_before_retry(tries, failure)
                size = max(size // 4, _SMALLEST_BLOCK)
        return parts[0] if len(parts) == 1 else b"".join(parts)


class _SequentialRead(NamedTuple):
    """The last block that was fetched for reads that go on from each other."""

    start: int
    data: bytes
    """b"" if the reader got all of it at once."""
    block_size: int
    """Bytes that were fetched."""
    expected: tuple[int, int] | None
    """The announced range that it is in, past whose end block sizes start anew."""


class _FirstBlocks:
    """The blocks of a file that were fetched first: its ends, which every open reads again, and first rows."""

    def __init__(self) -> None:
        self.size = 0
        self._blocks: list[tuple[int, bytes]] = []

    def get(self, at: int, wanted: int) -> bytes:
        """At most `wanted` bytes from a position on, as far as they are kept."""
        number = bisect_right(self._blocks, at, key=lambda block: block[0]) - 1
        if number < 0:
            return b""
        start, data = self._blocks[number]
        return data[at - start : at - start + wanted]

    def keep(self, at: int, data: bytes) -> None:
        """Keep a block if there is room."""
        if self.size + len(data) <= _KEPT_PER_FILE:
            insort(self._blocks, (at, data))
            self.size += len(data)


_first_blocks: OrderedDict[tuple[str, RemoteStatus], _FirstBlocks] = OrderedDict()
