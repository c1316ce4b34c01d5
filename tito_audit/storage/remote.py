"""RemoteFile: a file in a bucket, on the hub or on a web server, as a path; RangedFile: its bytes."""

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
    Passing,
    Refusal,
    RemoteStatus,
    S3Store,
    Store,
    dropped,
    retried,
    settings_of_drivers,
    wait,
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
"""Those of `_store_web` by name: it imports what speaks HTTP, an eighth of what a small scan of files imports."""
_HIDDEN = "…"
"""What is shown in place of a URL's query, which may sign it."""
FIRST = 1 << 16
"""How many bytes a sequential read fetches first; each further fetch doubles."""
_MOST = 8 << 20
"""How many bytes one request asks for at most."""
_LEAST = 1 << 16
"""How few bytes a request asks for after connections were dropped."""
_AHEAD = 64 << 20
"""How many bytes are read ahead of them, all together."""
_OF_ONE = 16 << 20
"""How much of a file is kept for as long as it is read: what was fetched first."""
_OF_ALL = 64 << 20
"""How much of all files is kept."""

Read = Callable[[int, int], bytes]
"""Bytes from one place on, at most up to another; fewer if the connection was dropped."""


def is_url(name: str) -> bool:
    """Whether a name is a URL rather than a path."""
    return _URL.match(name) is not None


class RemoteFile(type(Path())):  # type: ignore[misc]
    """A path that is shown as its URL; what is read of it comes over the network.

    It is shown without user, password and query, which may be secret. Joins (`folder / name`), `parent`, `name`
    and suffixes work as for any path. It pickles with what the store said of it first, and reading another version
    than that is refused. What the store refuses is a StorageError in one line, or FileNotFoundError for `stat`.
    """

    below: list[RemoteFile] | None = None
    """The files below it, if it is a folder that was listed."""
    alike: RemoteFile | None = None
    """A file of the same folder that is of the same kind, if it is one of many shards."""

    def __new__(cls, *parts: Any) -> RemoteFile:
        """A path for a URL, or for the parts of one."""
        file: RemoteFile = super().__new__(cls, *map(_plain, parts))
        if len(parts) == 1 and not isinstance(parts[0], RemoteFile):
            file._exact = str(parts[0])
            if (shown := str(file)) != file._exact:
                _by_name[shown] = file
        return file

    if sys.version_info >= (3, 12):

        def __init__(self, *parts: Any) -> None:
            super().__init__(*map(_plain, parts))

    @property
    def url(self) -> str:
        """What to ask the store for, with user, password and query."""
        return getattr(self, "_exact", None) or str(self)

    def __str__(self) -> str:
        exact: str | None = getattr(self, "_exact", None)
        return _shown(exact) if exact is not None else super().__str__().replace(":/", "://", 1)

    def __fspath__(self) -> str:
        return str(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteFile) and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.url, getattr(self, "_status", None))

    @property
    def store(self) -> Store:
        """What holds it, made once for each process and set of credentials in the environment; StorageError if its
        driver is not installed."""
        scheme = self.url.partition("://")[0].lower()
        kind = _STORES.get(scheme)
        if kind is None:
            schemes = ", ".join(f"{name}://" for name in _STORES)
            raise StorageError(f"{self}: {scheme}:// is not read. Logs are read from {schemes} and from disk.")
        if isinstance(kind, str):
            from tito_audit.storage import _store_web

            kind = cast("type[Store]", getattr(_store_web, kind))
        which = (os.getpid(), kind, settings_of_drivers())
        if which not in _stores:
            try:
                _stores[which] = kind()
            except (StorageError, Refusal) as error:
                raise StorageError(f"{self}: {error}") from None
        return _stores[which]

    def stat(self, *, follow_symlinks: bool = True) -> RemoteStatus:
        """Size, time and etag, as first asked for; FileNotFoundError if there is no such file."""
        status: RemoteStatus | None = getattr(self, "_status", None)
        if status is None and (listed := _by_name.get(str(self))) is not None and listed.url == self.url:
            status = self._status = getattr(listed, "_status", None)
        if status is None:
            try:
                status = self._status = self.ask(lambda store: store.status(self.url))
            except Missing as error:
                raise FileNotFoundError(2, str(error), str(self)) from None
        return status

    def with_status(self, status: RemoteStatus) -> RemoteFile:
        """Itself, with what the store said of it."""
        self._status = status
        return self

    def refreshed(self) -> RemoteStatus:
        """What the store says of it now; FileNotFoundError if there is no such file."""
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
        if self.below is not None or getattr(self, "_status", None) is not None:
            return bool(self.below)
        try:
            return self.ask(lambda store: store.is_folder(self.url))
        except Missing:
            return False

    def files(self) -> Iterator[RemoteFile]:
        """The files below it at any depth, with their status."""
        try:
            files = self.ask(lambda store: list(store.files(self.url)))
        except Missing:
            return
        for url, status in files:
            yield RemoteFile(url).with_status(status)

    def entries(self) -> list[str]:
        """The names of what is directly in it, the first thousand or so; [] if it cannot be listed."""
        try:
            urls = self.ask(lambda store: store.entries(self.url))
        except (Missing, StorageError):
            return []
        return [url.rstrip("/").rpartition("/")[2] for url in urls]

    def ask(self, question: Callable[[Store], T]) -> T:
        """The store's answer, asked again where that may help; StorageError if it refuses, or Missing."""
        try:
            return retried(lambda: self._answer(question))
        except Missing:
            raise
        except Refusal as error:
            raise StorageError(f"{self}: {error}") from None

    def _answer(self, question: Callable[[Store], T]) -> T:
        """The store's answer to one try, or a Refused."""
        store = self.store
        try:
            return question(store)
        except (StorageError, Refusal):
            raise
        except Exception as error:  # drivers raise exceptions of many kinds
            raise store.refusal(error, self.url) from None

    def open(self, mode: str = "rb", buffering: int = -1, *_: Any, **__: Any) -> BinaryIO:
        """The file for reading bytes, from any place in it; FileNotFoundError if there is none."""
        if mode != "rb":
            raise StorageError(f"{self}: a remote file is written whole, by new_file.")
        status = self.stat()
        raw = RangedFile(str(self), status, self._read if status.ranges else _copy_of(self))
        return cast(BinaryIO, raw if buffering == 0 else io.BufferedReader(raw, FIRST))

    def _read(self, start: int, stop: int) -> bytes:
        status = self.stat()
        try:
            return self._answer(lambda store: store.read(self.url, start, stop, status))
        except Passing:
            raise
        except Refusal as error:
            raise StorageError(f"{self}: {error}") from None

    def read_bytes(self) -> bytes:
        with self.open() as file:
            return file.read()


def remote_file(name: str) -> RemoteFile:
    """The remote file for a URL, or for what one was shown as."""
    return _by_name.get(name) or RemoteFile(name)


def know(file: RemoteFile) -> RemoteFile:
    """Remember a file with its status, for `remote_file` in this process."""
    _by_name[str(file)] = file
    return file


_stores: dict[tuple[Any, ...], Store] = {}
_by_name: dict[str, RemoteFile] = {}
"""Files by what they are shown as."""
_copies: dict[str, tuple[RemoteStatus, Read]] = {}


def _copy_of(path: RemoteFile) -> Read:
    """Reads a file of a server that sends no ranges, from a temporary file without a name, which this run and the
    processes that are forked later share."""
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


def _unpickled(url: str, status: RemoteStatus | None) -> RemoteFile:
    file = RemoteFile(url)
    if status is None:
        return file
    # The very status of this run, by which a copy of the file is found.
    own = getattr(_by_name.get(str(file)), "_status", None)
    return file.with_status(own if own == status else status)


def _plain(part: Any) -> Any:
    """A part of a path; of a URL without what it hides."""
    text = part if isinstance(part, str) else os.fspath(part)
    return _shown(text).removesuffix(f"?{_HIDDEN}") if of_web(text) else text


def _shown(url: str) -> str:
    """A URL without user, password and query, if it is of a web server."""
    if not of_web(url):
        return url
    try:
        parts = urlsplit(url)
    except ValueError:  # no address; the store says so
        return url.partition("?")[0].rpartition("@")[2]
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, _HIDDEN if parts.query else "", ""))


def of_web(text: str) -> bool:
    """Whether a URL is of a web server."""
    return text[:8].lower().startswith(("http://", "https://"))


class RangedFile(io.RawIOBase):
    """The bytes of a remote file, from any place in it, fetched range by range; nothing twice without need.

    A first read at a place fetches exactly what it asks for. Reading on from there fetches ever larger blocks, at
    several places at once. `read` returns as much as it was asked for, `readinto` what is there without waiting.

    Tried in its place: fsspec's caches ask for blocks of one size. Of 64 KiB they make 490 requests for 30 MB of
    JSONL, for which 9 do; of 1 MiB they fetch 8 MB of a table of which 71 KB are read.
    """

    name: str
    """The file's URL, as it is shown."""

    def __init__(self, name: str, status: RemoteStatus, read: Read) -> None:
        super().__init__()
        self.name = name
        self._size = status.st_size
        self._read = read
        first = _first_blocks.pop((name, status), None)
        self._first = first or _FirstBlocks()
        if status.etag is not None:
            _first_blocks[name, status] = self._first
            size = sum(blocks.size for blocks in _first_blocks.values())
            while size > _OF_ALL and len(_first_blocks) > 1:  # those of files that were not opened for long go
                size -= _first_blocks.popitem(last=False)[1].size
        self._at = 0
        self._runs: OrderedDict[int, _Run] = OrderedDict()
        """By the end of what was fetched."""
        self._expected: list[tuple[int, int]] = []

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place; nothing is fetched."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(start + offset, 0)
        return self._at

    def size(self) -> int:
        """Bytes of the file, as pyarrow asks for it."""
        return self._size

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Ranges `[start, stop)`, each of which will be read from its start to its end; replaces earlier ones.

        No read within one fetches bytes past its end, and one that is small is fetched at once.
        """
        self._expected = sorted(ranges)

    def readinto(self, buffer: Any) -> int:
        """Fetch the next bytes; 0 at the end."""
        view = memoryview(buffer).cast("B")
        data = self._next(len(view), exact=False)
        view[: len(data)] = data
        return len(data)

    def read(self, size: int = -1) -> bytes:
        """So many bytes; fewer only at the end. -1: all that are left."""
        stop = self._size if size is None or size < 0 else min(self._at + size, self._size)
        parts = []
        while self._at < stop:
            parts.append(self._next(stop - self._at, exact=True))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def readall(self) -> bytes:
        return self.read()

    def _next(self, wanted: int, *, exact: bool) -> bytes:
        """At least one byte and at most `wanted` from here on; b"" at the end of the file."""
        wanted = min(wanted, self._size - self._at)
        if wanted <= 0:
            return b""
        data, at = self._first.get(self._at, wanted), self._at
        if not data:
            fetched = (run for run in reversed(self._runs.values()) if run.start <= at < run.start + len(run.data))
            data = next((run.data[at - run.start : at - run.start + wanted] for run in fetched), b"")
        data = data or self._fetch_block(wanted, exact=exact)
        self._at += len(data)
        return data

    def _fetch_block(self, wanted: int, *, exact: bool) -> bytes:
        """Fetch a block that begins here; what is more than wanted waits for the next read."""
        at, limit = self._at, self._size
        run = self._runs.pop(at, None)
        most = min(_MOST, max(_AHEAD // max(len(self._runs), 1), FIRST))
        block = min(wanted, _MOST) if exact else FIRST
        number = bisect_right(self._expected, (at, self._size + 1)) - 1
        expected = self._expected[number] if number >= 0 and at < self._expected[number][1] else None
        if run is not None and run.expected == expected:
            block = max(block if exact else 0, min(2 * run.step, most))
        if expected is not None:
            limit = expected[1] if not exact or at + wanted <= expected[1] else limit
            if expected[1] - expected[0] <= most:
                block = max(block, expected[1] - at)
        start, stop = at, min(at + block, limit)
        parts: list[bytes] = []
        step, tried, lost = stop - start, 0, dropped()
        while start < stop:
            try:
                data = self._read(start, min(start + step, stop))
            except Passing as failure:
                data, lost = b"", failure
            if len(data) > min(step, stop - start):
                raise StorageError(f"{self.name}: the store sends more than it was asked for. Download the file.")
            parts.append(data)
            start += len(data)
            # Many drops are survived as long as each leaves something behind.
            tried = 0 if len(data) >= min(_LEAST, step) else tried + 1
            if tried == TRIES:
                raise StorageError(f"{self.name}: {lost}")
            if not data:
                wait(tried, lost)
                step = max(step // 4, _LEAST)
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        self._first.keep(at, data)
        end = at + len(data)
        self._runs[end] = _Run(at, data if len(data) > wanted else b"", len(data), expected)
        if run is None and len(self._runs) > 256:  # places that are read on from at the same time
            self._runs.popitem(last=False)
        return data[:wanted]


class _Run(NamedTuple):
    """The last block of bytes that are read one after the other."""

    start: int
    data: bytes
    """Empty if all of it was used at once."""
    step: int
    """How many bytes were fetched."""
    expected: tuple[int, int] | None
    """The expected range that they were in; past its end reading starts anew."""


class _FirstBlocks:
    """What was fetched of a file first: its beginning and end, which every open reads again, and first rows."""

    def __init__(self) -> None:
        self.size = 0
        self._blocks: list[tuple[int, bytes]] = []

    def get(self, at: int, wanted: int) -> bytes:
        """What is kept from a place on."""
        number = bisect_right(self._blocks, at, key=lambda block: block[0]) - 1
        if number < 0:
            return b""
        start, data = self._blocks[number]
        return data[at - start : at - start + wanted]

    def keep(self, at: int, data: bytes) -> None:
        """Keep a block, if there is room."""
        if self.size + len(data) <= _OF_ONE:
            insort(self._blocks, (at, data))
            self.size += len(data)


_first_blocks: OrderedDict[tuple[str, RemoteStatus], _FirstBlocks] = OrderedDict()
