"""RemoteFile: a file in a bucket, on the hub or on a web server, as a path that reads ranges of bytes."""

from __future__ import annotations

import io
import os
import re
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import urlsplit, urlunsplit

from tito_audit.errors import StorageError
from tito_audit.storage._ranged import FIRST, RangedFile
from tito_audit.storage._store import Missing, Passing, Refused, RemoteStatus, Store, retried
from tito_audit.storage._store_buckets import (
    AzureStore,
    BucketStore,
    GoogleStore,
    S3Store,
    settings_of_drivers,
    status_of,
)
from tito_audit.storage._store_hub import HubStore
from tito_audit.storage._store_web import WebStore

__all__ = [
    "RangedFile",
    "RemoteFile",
    "RemoteStatus",
    "filesystem_of",
    "is_url",
    "status_of",
]

T = TypeVar("T")

_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_STORES: dict[str, type[Store]] = {
    "s3": S3Store,
    "s3a": S3Store,
    "gs": GoogleStore,
    "gcs": GoogleStore,
    "az": AzureStore,
    "abfs": AzureStore,
    "hf": HubStore,
    "https": WebStore,
    "http": WebStore,
}
_HIDDEN = "…"
"""What is shown in place of a URL's query, which may sign it."""


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
        made: RemoteFile = super().__new__(cls, *map(_plain, parts))
        if len(parts) == 1 and not isinstance(parts[0], RemoteFile):
            made._remember(str(parts[0]))
        return made

    if sys.version_info >= (3, 12):

        def __init__(self, *parts: Any) -> None:
            super().__init__(*map(_plain, parts))

    def _remember(self, url: str) -> None:
        self._exact = url
        if (shown := str(self)) != url:
            _known[shown] = self

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
        """What holds it; StorageError if its driver is not installed."""
        return store_of(self)

    def stat(self, *, follow_symlinks: bool = True) -> RemoteStatus:
        """Size, time and etag, as first asked for; FileNotFoundError if there is no such file."""
        found: RemoteStatus | None = getattr(self, "_status", None)
        if found is None and (known := _known.get(str(self))) is not None and known.url == self.url:
            found = self._status = getattr(known, "_status", None)
        if found is None:
            try:
                found = retried(lambda: self.store.status(self.url))
            except Missing as error:
                raise FileNotFoundError(2, str(error), str(self)) from None
            except Refused as error:
                raise StorageError(f"{self}: {error}") from None
            self._status = found
        return found

    def with_status(self, status: RemoteStatus) -> RemoteFile:
        """Itself, with what the store said of it."""
        self._status = status
        return self

    def refreshed(self) -> RemoteStatus:
        """What the store says of it now; FileNotFoundError if there is no such file."""
        self.__dict__.pop("_status", None)
        _known.pop(str(self), None)
        return self.stat()

    @property
    def etag(self) -> str | None:
        """What the store says changes with the content; None if it does not say."""
        return self.stat().etag

    def exists(self, **_: Any) -> bool:
        """Whether there is such a file or folder."""
        return self.is_file() or self.is_dir()

    def is_file(self, **_: Any) -> bool:
        """Whether it is a file."""
        try:
            self.stat()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self, **_: Any) -> bool:
        """Whether files are below it."""
        if self.below is not None or getattr(self, "_status", None) is not None:
            return bool(self.below)
        try:
            return self.asked(lambda: self.store.is_folder(self.url))
        except Missing:
            return False

    def is_symlink(self) -> bool:
        """False."""
        return False

    def files(self) -> Iterator[RemoteFile]:
        """The files below it at any depth, with their status."""
        try:
            found = self.asked(lambda: list(self.store.files(self.url)))
        except Missing:
            return
        for url, status in found:
            yield RemoteFile(url).with_status(status)

    def entries(self) -> list[str]:
        """The names of what is directly in it, the first thousand or so; [] if it cannot be listed."""
        try:
            return [url.rstrip("/").rpartition("/")[2] for url in retried(lambda: self.store.entries(self.url))]
        except Refused:
            return []

    def asked(self, question: Callable[[], T]) -> T:
        """The store's answer, asked again where that may help; StorageError if it refuses, or Missing."""
        try:
            return retried(question)
        except Missing:
            raise
        except Refused as error:
            raise StorageError(f"{self}: {error}") from None

    def open(self, mode: str = "rb", buffering: int = -1, *_: Any, **__: Any) -> BinaryIO:
        """The file for reading bytes, from any place in it; FileNotFoundError if there is none."""
        if mode != "rb":
            raise StorageError(f"{self}: a remote file is written whole, by new_file.")
        status = self.stat()
        read = self._read if status.ranges else _copy_of(self).read
        raw = RangedFile(str(self), status, read)
        return cast(BinaryIO, raw if buffering == 0 else io.BufferedReader(raw, FIRST))

    def _read(self, start: int, stop: int) -> bytes:
        try:
            return self.store.read(self.url, start, stop, self.stat())
        except Passing:
            raise
        except Refused as error:
            raise StorageError(f"{self}: {error}") from None

    def read_bytes(self) -> bytes:
        """All its bytes."""
        with self.open() as file:
            return file.read()

    def resolve(self, strict: bool = False) -> RemoteFile:
        """Itself."""
        return self

    def absolute(self) -> RemoteFile:
        """Itself."""
        return self

    def expanduser(self) -> RemoteFile:
        """Itself."""
        return self


def remote_file(name: str) -> RemoteFile:
    """The remote file for a URL, or for what one was shown as."""
    return _known.get(name) or RemoteFile(name)


def know(file: RemoteFile) -> RemoteFile:
    """Remember a file with its status, for `remote_file` in this process."""
    _known[str(file)] = file
    return file


def store_of(path: RemoteFile) -> Store:
    """The store of a URL, made once in each process and for each set of credentials in the environment."""
    scheme = path.url.partition("://")[0].lower()
    kind = _STORES.get(scheme)
    if kind is None:
        raise StorageError(
            f"{path}: {scheme}:// is not read. Logs are read from {', '.join(f'{name}://' for name in _STORES)} "
            "and from disk."
        )
    which = (os.getpid(), kind, settings_of_drivers())
    if which not in _stores:
        try:
            _stores[which] = kind()
        except StorageError as error:
            raise StorageError(f"{path}: {error}") from None
        except Refused as error:
            raise StorageError(f"{path}: {error}") from None
    return _stores[which]


def filesystem_of(path: RemoteFile) -> Any:
    """The fsspec filesystem that holds a remote file, made once in each process."""
    store = store_of(path)
    if isinstance(store, BucketStore):
        return store.filesystem
    import fsspec

    return fsspec.core.url_to_fs(path.url)[0]


class _Copy:
    """A file of a server that sends no ranges, in a temporary file without a name."""

    def __init__(self, path: RemoteFile) -> None:
        self._file = tempfile.TemporaryFile(prefix="tito-audit-")  # noqa: SIM115 - lives as long as this
        weakref.finalize(self, self._file.close)
        status = path.stat()
        data = path.asked(lambda: path.store.read(path.url, 0, status.st_size, status))
        if len(data) < status.st_size:
            raise StorageError(
                f"{path}: the connection was dropped, and the server sends no ranges to go on from there. "
                "Download the file and pass it."
            )
        self._file.write(data)
        self._file.flush()

    def read(self, start: int, stop: int) -> bytes:
        """Bytes of the file; processes that are forked later can read it too."""
        return os.pread(self._file.fileno(), stop - start, start)


_stores: dict[tuple[Any, ...], Store] = {}
_known: dict[str, RemoteFile] = {}
"""Files by what they are shown as."""
_copies: dict[str, tuple[RemoteStatus, _Copy]] = {}


def _copy_of(path: RemoteFile) -> _Copy:
    """The copy of a file that this run, or one that it was forked from, has made."""
    status, (of, copy) = path.stat(), _copies.get(path.url, (None, None))
    if copy is None or of is not status:
        copy = _Copy(path)
        _copies[path.url] = status, copy
    return copy


def _unpickled(url: str, status: RemoteStatus | None) -> RemoteFile:
    file = RemoteFile(url)
    if status is None:
        return file
    # The very status of this run, by which a copy of the file is found.
    own = getattr(_known.get(str(file)), "_status", None)
    return file.with_status(own if own == status else status)


def _plain(part: Any) -> Any:
    """A part of a path; of a URL without what it hides."""
    text = part if isinstance(part, str) else os.fspath(part)
    return _shown(text).removesuffix(f"?{_HIDDEN}") if _of_web(text) else text


def _shown(url: str) -> str:
    """A URL without user, password and query, if it is of a web server."""
    if not _of_web(url):
        return url
    try:
        parts = urlsplit(url)
    except ValueError:  # no address; the store says so
        return url.partition("?")[0].rpartition("@")[2]
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, _HIDDEN if parts.query else "", ""))


def _of_web(text: str) -> bool:
    return text[:8].lower().startswith(("http://", "https://"))
