"""RemoteFile: a file in a bucket, on the hub or on a web server, as a path that reads ranges of bytes."""

from __future__ import annotations

import io
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from tito_audit.errors import StorageError

_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_FIRST = 1 << 16
"""How many bytes a sequential read fetches first; each further fetch doubles."""
_MOST = 8 << 20


def is_url(name: str) -> bool:
    """Whether a name is a URL rather than a path."""
    return _URL.match(name) is not None


@dataclass(frozen=True, slots=True)
class RemoteStatus:
    """What the store says of a file, under the names of `os.stat_result`."""

    st_size: int
    """Bytes."""
    st_mtime_ns: int = 0
    """When it was last written, in nanoseconds since 1970; 0 if the store does not say."""
    etag: str | None = None
    """Changes whenever the content does; None if the store does not say."""


class RemoteFile(type(Path())):  # type: ignore[misc]
    """A path that is shown as its URL; what is read of it comes over the network.

    It pickles as its URL, and a process asks the store itself. Joins (`folder / name`), `parent`, `name` and
    suffixes work as for any path. Anything that the store refuses is an OSError with a message for `unreadable`.
    """

    def __str__(self) -> str:
        return str(super().__str__()).replace(":/", "://", 1)

    def __fspath__(self) -> str:
        return str(self)

    def stat(self, *, follow_symlinks: bool = True) -> RemoteStatus:
        """Size, time and etag; FileNotFoundError if there is no such file."""
        about = filesystem_of(self).info(_key(self))
        return status_of(about)

    @property
    def etag(self) -> str | None:
        """What the store says changes with the content; None if it does not say."""
        return self.stat().etag

    def exists(self) -> bool:
        """Whether there is such a file or folder."""
        return bool(filesystem_of(self).exists(_key(self)))

    def is_file(self) -> bool:
        """Whether it is a file."""
        return bool(filesystem_of(self).isfile(_key(self)))

    def is_dir(self) -> bool:
        """Whether files are below it."""
        return bool(filesystem_of(self).isdir(_key(self)))

    def open(self, mode: str = "rb", buffering: int = -1, *_: Any) -> BinaryIO:
        """The file for reading bytes, from any place in it."""
        if mode != "rb":
            raise StorageError(f"{self}: a remote file is written whole, by new_file.")
        raw = RangedFile(self)
        return cast(BinaryIO, raw if buffering == 0 else io.BufferedReader(raw, _FIRST))

    def resolve(self, strict: bool = False) -> RemoteFile:
        """Itself."""
        return self

    def absolute(self) -> RemoteFile:
        """Itself."""
        return self

    def expanduser(self) -> RemoteFile:
        """Itself."""
        return self


class RangedFile(io.RawIOBase):
    """The bytes of a remote file, fetched range by range.

    `read(n)` at any place fetches exactly that range, once. Reading on from there fetches ever larger blocks.
    """

    def __init__(self, path: RemoteFile) -> None:
        super().__init__()
        self._filesystem = filesystem_of(path)
        self._key = _key(path)
        self._size = path.stat().st_size
        self._at = 0

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """The place of the next byte."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place; nothing is fetched."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(start + offset, 0)
        return self._at

    def size(self) -> int:
        """Bytes of the file, as pyarrow asks for it."""
        return self._size

    def readinto(self, buffer: Any) -> int:
        """Fetch the next bytes; 0 at the end."""
        view = memoryview(buffer).cast("B")
        stop = min(self._at + len(view), self._size)
        if stop <= self._at:
            return 0
        data = self._filesystem.cat_file(self._key, start=self._at, end=stop)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


def filesystem_of(path: RemoteFile) -> Any:
    """The fsspec filesystem that holds a remote file, made once in each process."""
    import fsspec

    return fsspec.core.url_to_fs(str(path))[0]


def status_of(about: dict[str, Any]) -> RemoteStatus:
    """What an fsspec filesystem's `info` says of a file."""
    etag = next((about[name] for name in ("ETag", "etag", "md5Hash", "content_md5") if about.get(name)), None)
    when = next((about[name] for name in ("LastModified", "last_modified", "mtime") if about.get(name)), None)
    if when is not None and hasattr(when, "timestamp"):
        when = when.timestamp()
    written = int(when * 1_000_000_000) if isinstance(when, int | float) else 0
    return RemoteStatus(int(about.get("size") or 0), written, str(etag) if etag is not None else None)


def _key(path: RemoteFile) -> str:
    """How its filesystem names the file."""
    import fsspec

    return str(fsspec.core.url_to_fs(str(path))[1])
