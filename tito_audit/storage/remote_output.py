"""Outputs in buckets and on the hub: written to a temporary file, and sent as a whole once they are complete.

A store shows an object once all of it has arrived: nobody ever sees a part of it, and a run that is killed leaves
nothing that can be seen.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from tito_audit.errors import StorageError
from tito_audit.storage._store import Missing, Refused, RemoteStatus, retried
from tito_audit.storage._store_writing import Taken, bucket_of, refuse_store, same_key, send
from tito_audit.storage.remote import RemoteFile, is_url

_LISTED = 8
"""From how many targets on their folder is listed, rather than asking for each."""
_BLOCK = 1 << 20
CONTENT = "sha256:"
"""How the etag of `content_status` begins."""


def output_path(name: str | Path) -> Path:
    """The path for the name of an output, which may be a URL."""
    if isinstance(name, RemoteFile):
        return name
    return RemoteFile(str(RemoteFile(str(name)))) if is_url(str(name)) else Path(name)


def place_key(path: str | Path) -> str:
    """The same text for all names of a place: of a file on disk, whatever links, mounts or spellings lead to it,
    in a store with one spelling."""
    if isinstance(path, RemoteFile):
        return same_key(path.url)
    return same_key(str(path)) if is_url(str(path)) else _file_key(path)


def _file_key(path: str | Path) -> str:
    """The file that a path leads to, if there is one; else its path, with links followed."""
    with suppress(OSError, ValueError):
        status = os.stat(path)  # noqa: PTH116  a path that is no path has no file
        if stat.S_ISREG(status.st_mode):
            return f"file {status.st_ino} of {status.st_dev}"
    return os.path.realpath(path)


def is_folder(path: RemoteFile) -> bool:
    """Whether files are below a URL; False if there is no such bucket or repository."""
    try:
        return path.is_dir()
    except Missing:
        return False


def refuse_remote(target: RemoteFile, *, overwrite: bool, source: Path | None = None) -> None:
    """StorageError if no file can be written there: one exists, it is the input, or there is no such bucket."""
    if source is not None and place_key(target) == place_key(source):
        raise StorageError(
            f"{target}: this is the input itself, and the input is never written; name another file."
        )
    bucket = _bucket(target)
    if not _exists(target):
        _refuse_missing(target, bucket)
    elif not overwrite:
        raise exists_error(target)


def refuse_remotes(targets: Iterable[RemoteFile]) -> None:
    """StorageError if any of these files exists; where there are many, their folder is listed instead."""
    wanted = list(targets)
    if len(wanted) < _LISTED:
        for target in wanted:
            if _exists(target):
                raise exists_error(target)
        return
    above = wanted[0].parent
    while not all(target.is_relative_to(above) for target in wanted):
        above = above.parent
    try:
        taken = {same_key(url) for url, _ in above.store.files(above.url)}
    except Missing:  # an empty folder is none
        return
    except Refused as error:
        raise StorageError(f"{above}: {error}") from None
    found = next((target for target in wanted if same_key(target.url) in taken), None)
    if found is not None:
        raise exists_error(found)


def _exists(target: RemoteFile) -> bool:
    try:
        target.refreshed()
    except FileNotFoundError:
        return False
    return True


def refuse_place(target: RemoteFile) -> None:
    """StorageError if nothing is ever written to such a URL; the store is not asked."""
    try:
        refuse_store(target.store, target.url)
    except Refused as error:
        raise StorageError(f"{target}: {error}") from None


def _bucket(target: RemoteFile) -> RemoteFile:
    """The bucket or repository that a target is in; StorageError if nothing can be written there."""
    refuse_place(target)
    try:
        return RemoteFile(bucket_of(target.url))
    except Refused as error:
        raise StorageError(f"{target}: {error}") from None


def _refuse_missing(target: RemoteFile, bucket: RemoteFile) -> None:
    """StorageError if there is no such bucket or repository, which is asked once."""
    if bucket.url in _buckets:
        return
    try:
        there = bucket.is_dir()
    except Missing as error:
        raise StorageError(f"{target}: {error}") from None
    if not there:
        raise StorageError(f"{target}: there is no {bucket}, so nothing was written; create it first.")
    _buckets.add(bucket.url)


def upload(file: Path, place: RemoteFile, *, overwrite: bool) -> None:
    """Send a file on disk to a store, as a whole; a connection that drops is tried again with all of it.

    Raises FileExistsError if the name is taken and must not be overwritten, and StorageError in one line if the
    store refuses it; then nothing has appeared.
    """
    try:
        retried(lambda: _sent(file, place, overwrite))
    except Refused as error:
        raise StorageError(f"{place}: nothing was written: {error}") from None
    held, size = place.refreshed().st_size, file.stat().st_size
    if held != size:
        raise StorageError(
            f"{place}: the store holds {held:,} bytes of the {size:,} that were sent; delete it and run again."
        )


def exists_error(target: Path) -> StorageError:
    """The error for a name that is taken."""
    return StorageError(
        f"{target}: the file exists, so nothing was written; name another file, or overwrite it with --force."
    )


def content_status(file: Path) -> RemoteStatus:
    """Size and, as its etag, a hash of the content, for which the file is read; FileNotFoundError without it."""
    digest = sha256()
    with file.open("rb") as opened:
        while block := opened.read(_BLOCK):
            digest.update(block)
    return RemoteStatus(file.stat().st_size, 0, CONTENT + digest.hexdigest())


def _sent(file: Path, place: RemoteFile, overwrite: bool) -> None:
    try:
        send(place.store, file, place.url, overwrite=overwrite)
    except Taken:
        # The file of an earlier try whose answer was lost is no other file.
        if not _holds(place, file):
            raise FileExistsError from None


def _holds(place: RemoteFile, file: Path) -> bool:
    """Whether a store holds exactly the bytes of a file on disk."""
    if place.refreshed().st_size != file.stat().st_size:
        return False
    with place.open() as there, file.open("rb") as here:
        blocks = iter(lambda: (there.read(_BLOCK), here.read(_BLOCK)), (b"", b""))
        return all(one == other for one, other in blocks)


_buckets: set[str] = set()
"""The buckets that exist."""
