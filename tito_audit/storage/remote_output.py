"""Outputs in buckets and on the hub: written to a temporary file, and uploaded once they are complete.

A store shows an object only once all of it has arrived, so nobody sees a part of it, even if the run is killed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from urllib.parse import unquote

from tito_audit.errors import StorageError
from tito_audit.storage._store import (
    BucketStore,
    Missing,
    NameTaken,
    Refusal,
    RemoteStatus,
    with_retries,
)
from tito_audit.storage.remote import RemoteFile, is_url

_BLOCK = 1 << 20
CONTENT_ETAG = "sha256:"
"""Prefix of the etags of `content_status`."""
_buckets: set[str] = set()
"""URLs of buckets that were found to exist."""
_SCHEME_ALIASES = {"s3a": "s3", "gcs": "gs", "abfs": "az"}


def output_path(name: str | Path) -> Path:
    """The path of an output, whose name may be a URL."""
    if isinstance(name, RemoteFile):
        return name
    return RemoteFile(str(RemoteFile(str(name)))) if is_url(str(name)) else Path(name)


def path_identity(path: str | Path) -> str:
    """A text that all names of one file share, whatever links, mounts and spellings lead to it on disk, or however
    its URL is spelled."""
    if isinstance(path, RemoteFile):
        return normalize_url(path.url)
    if is_url(str(path)):
        return normalize_url(str(path))
    with suppress(OSError, ValueError):
        status = os.stat(path)  # noqa: PTH116  names that cannot be paths raise ValueError
        if stat.S_ISREG(status.st_mode):
            return f"file {status.st_ino} of {status.st_dev}"
    return os.path.realpath(path)


def normalize_url(url: str) -> str:
    """A URL in one spelling: aliases of schemes, doubled slashes and the hub's `@main` are gone."""
    scheme, _, rest = url.partition("://")
    scheme = _SCHEME_ALIASES.get(scheme.lower(), scheme.lower())
    if scheme in ("http", "https"):
        return url
    parts = [part for part in rest.split("/") if part not in ("", ".")]
    if scheme == "hf":
        at = 2 if parts[:1] == ["datasets"] else 1
        parts[at : at + 1] = [unquote(part).removesuffix("@main") for part in parts[at : at + 1]]
    return f"{scheme}://{'/'.join(parts)}"


def is_folder(path: Path) -> bool:
    """Whether a path is a folder on disk, or a URL has files below it."""
    if not isinstance(path, RemoteFile):
        # Unlike pathlib, False for names that are too long or link to themselves; the error comes later.
        return os.path.isdir(path)  # noqa: PTH112
    try:
        return path.is_dir()
    except Missing:
        return False


def refuse_remote_target(target: RemoteFile, *, overwrite: bool, source: Path | None = None) -> None:
    """StorageError if the target exists, is the input, or is in no bucket that exists."""
    if source is not None and path_identity(target) == path_identity(source):
        raise input_error(target)
    refuse_read_only_store(target)
    scheme, _, rest = normalize_url(target.url).partition("://")
    parts, depth = rest.split("/"), 3 if scheme == "hf" else 1
    if len(parts) <= depth:
        raise StorageError(f"{target}: this names no file. Add a name after it.")
    if _exists(target):
        if not overwrite:
            raise exists_error(target)
        return
    bucket = RemoteFile(f"{scheme}://{'/'.join(parts[:depth])}")
    if bucket.url in _buckets:
        return
    try:
        there = bucket.is_dir()
    except Missing as error:
        raise StorageError(f"{target}: {error}") from None
    if not there:
        raise StorageError(f"{target}: there is no {bucket}, so nothing was written; create it first.")
    _buckets.add(bucket.url)


def refuse_read_only_store(target: RemoteFile) -> None:
    """StorageError for URLs that are only read: of web servers, and of models and spaces on the hub."""
    from tito_audit.storage._store_web import HubStore

    if not isinstance(target.store, BucketStore | HubStore):
        raise StorageError(
            f"{target}: a web server is only read. Write to a bucket (s3://, gs://, az://), to hf://datasets/, or "
            "to disk."
        )
    if isinstance(target.store, HubStore) and not normalize_url(target.url).startswith("hf://datasets/"):
        raise StorageError(
            f"{target}: on the hub only data sets are written. Name a file hf://datasets/OWNER/NAME/PATH."
        )


def refuse_existing_remotes(targets: Iterable[RemoteFile]) -> None:
    """StorageError if any of these files exists; the folder of many files is listed instead."""
    wanted = list(targets)
    if len(wanted) < 8:
        for target in wanted:
            if _exists(target):
                raise exists_error(target)
        return
    above = wanted[0].parent
    while not all(target.is_relative_to(above) for target in wanted):
        above = above.parent
    try:
        present = {normalize_url(url) for url, _ in above.ask(lambda store: list(store.files(above.url)))}
    except Missing:  # stores have no empty folders
        return
    for target in wanted:
        if normalize_url(target.url) in present:
            raise exists_error(target)


def _exists(target: RemoteFile) -> bool:
    """Whether the store has the file now."""
    try:
        target.refresh_status()
    except FileNotFoundError:
        return False
    return True


def upload(file: Path, place: RemoteFile, *, overwrite: bool) -> None:
    """Send a whole file to a store, again from its start if the connection drops.

    FileExistsError if the name is taken and must not be overwritten; StorageError in one line if the store refuses
    the file. Then nothing has appeared.
    """
    try:
        with_retries(lambda: place.store.upload(file, place.url, overwrite=overwrite))
    except NameTaken:
        # It may be the file of an earlier try whose response was lost: then it has the same bytes.
        if place.refresh_status().st_size != file.stat().st_size:
            raise FileExistsError from None
        with place.open() as there, file.open("rb") as here:
            blocks = iter(lambda: (there.read(_BLOCK), here.read(_BLOCK)), (b"", b""))
            if any(block != other for block, other in blocks):
                raise FileExistsError from None
    except Refusal as error:
        raise StorageError(f"{place}: nothing was written: {error}") from None
    arrived, size = place.refresh_status().st_size, file.stat().st_size
    if arrived != size:
        raise StorageError(
            f"{place}: the store holds {arrived:,} bytes of the {size:,} that were sent; delete it and run again."
        )


def input_error(target: Path) -> StorageError:
    """The error for a target that is the log itself."""
    return StorageError(f"{target}: this is the input itself, and the input is never written; name another file.")


def exists_error(target: Path) -> StorageError:
    """The error for a target that exists."""
    return StorageError(
        f"{target}: the file exists, so nothing was written; name another file, or overwrite it with --force."
    )


def content_status(file: Path) -> RemoteStatus:
    """A status with a hash of the content as its etag, for which the whole file is read."""
    digest = sha256()
    with file.open("rb") as opened:
        while block := opened.read(_BLOCK):
            digest.update(block)
    return RemoteStatus(file.stat().st_size, 0, CONTENT_ETAG + digest.hexdigest())
