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
from typing import Any
from urllib.parse import unquote

from tito_audit.errors import StorageError
from tito_audit.storage._store import (
    BucketStore,
    ChangedFile,
    Missing,
    Passing,
    Refusal,
    RemoteStatus,
    codes_of,
    refusal,
    retried,
)
from tito_audit.storage.remote import RemoteFile, is_url

_BLOCK = 1 << 20
CONTENT = "sha256:"
"""How the etag of `content_status` begins."""
_PART = 16 << 20
"""Bytes of a part of a large upload, a multiple of 256 KiB as Google wants it."""
_PARTS = 4
"""How many parts are sent at once."""
_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {"chunksize": _PART, "max_concurrency": _PARTS},
    "gs": {"chunksize": _PART},
    "az": {"max_concurrency": _PARTS},
}
_CONTENT = {".html": "text/html; charset=utf-8", ".json": "application/json"}
"""What browsers show, by suffix; other files have the type that the store gives them."""
_CONTENT_OPTION = {"s3": "ContentType", "gs": "content_type"}
_buckets: set[str] = set()
"""The buckets that exist."""
_SAME = {"s3a": "s3", "gcs": "gs", "abfs": "az"}
_FULL = {"QuotaExceeded", "XMinioAdminBucketQuotaExceeded", "XMinioStorageFull", "EntityTooLarge"}


class NameTaken(Refusal):
    """The name is taken."""


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
    if is_url(str(path)):
        return same_key(str(path))
    # The file that it leads to, if there is one; else its path, with links followed.
    with suppress(OSError, ValueError):
        status = os.stat(path)  # noqa: PTH116  a path that is no path has no file
        if stat.S_ISREG(status.st_mode):
            return f"file {status.st_ino} of {status.st_dev}"
    return os.path.realpath(path)


def same_key(url: str) -> str:
    """A URL in the one form that all its spellings have: schemes, doubled slashes, and the hub's main branch."""
    scheme, _, rest = url.partition("://")
    scheme = _SAME.get(scheme.lower(), scheme.lower())
    if scheme in ("http", "https"):
        return url
    parts = [part for part in rest.split("/") if part not in ("", ".")]
    if scheme == "hf":
        at = 2 if parts[:1] == ["datasets"] else 1
        parts[at : at + 1] = [unquote(part).removesuffix("@main") for part in parts[at : at + 1]]
    return f"{scheme}://{'/'.join(parts)}"


def is_folder(path: Path) -> bool:
    """Whether it is a folder, or files are below a URL; False if there is no such bucket or repository."""
    if not isinstance(path, RemoteFile):
        # os.path returns False for names that are too long or link to themselves; the error comes later.
        return os.path.isdir(path)  # noqa: PTH112
    try:
        return path.is_dir()
    except Missing:
        return False


def refuse_remote(target: RemoteFile, *, overwrite: bool, source: Path | None = None) -> None:
    """StorageError if no file can be written there: one exists, it is the input, or there is no such bucket."""
    if source is not None and place_key(target) == place_key(source):
        raise input_error(target)
    refuse_place(target)
    scheme, _, rest = same_key(target.url).partition("://")
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


def refuse_place(target: RemoteFile) -> None:
    """StorageError if nothing is ever written to such a URL; the store is not asked."""
    from tito_audit.storage._store_web import HubStore

    if not isinstance(target.store, BucketStore | HubStore):
        raise StorageError(
            f"{target}: a web server is only read. Write to a bucket (s3://, gs://, az://), to hf://datasets/, or "
            "to disk."
        )
    if isinstance(target.store, HubStore) and not same_key(target.url).startswith("hf://datasets/"):
        raise StorageError(
            f"{target}: on the hub only data sets are written. Name a file hf://datasets/OWNER/NAME/PATH."
        )


def refuse_remotes(targets: Iterable[RemoteFile]) -> None:
    """StorageError if any of these files exists; where there are many, their folder is listed instead."""
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
        present = {same_key(url) for url, _ in above.ask(lambda store: list(store.files(above.url)))}
    except Missing:  # an empty folder is none
        return
    for target in wanted:
        if same_key(target.url) in present:
            raise exists_error(target)


def _exists(target: RemoteFile) -> bool:
    try:
        target.refreshed()
    except FileNotFoundError:
        return False
    return True


def upload(file: Path, place: RemoteFile, *, overwrite: bool) -> None:
    """Send a file on disk to a store, as a whole; a connection that drops is tried again with all of it.

    Raises FileExistsError if the name is taken and must not be overwritten, and StorageError in one line if the
    store refuses it; then nothing has appeared.
    """
    try:
        retried(lambda: _sent(file, place, overwrite))
    except Refusal as error:
        raise StorageError(f"{place}: nothing was written: {error}") from None
    arrived, size = place.refreshed().st_size, file.stat().st_size
    if arrived != size:
        raise StorageError(
            f"{place}: the store holds {arrived:,} bytes of the {size:,} that were sent; delete it and run again."
        )


def input_error(target: Path) -> StorageError:
    """The error for a target that is the log."""
    return StorageError(f"{target}: this is the input itself, and the input is never written; name another file.")


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
        if isinstance(place.store, BucketStore):
            _to_bucket(place.store, file, place.url, overwrite)
        else:
            _to_hub(place.store, file, place.url, overwrite)
    except NameTaken:
        # The file of an earlier try whose answer was lost is no other file: it holds the same bytes.
        if place.refreshed().st_size != file.stat().st_size:
            raise FileExistsError from None
        with place.open() as there, file.open("rb") as here:
            blocks = iter(lambda: (there.read(_BLOCK), here.read(_BLOCK)), (b"", b""))
            if any(block != other for block, other in blocks):
                raise FileExistsError from None


def _to_bucket(store: BucketStore, file: Path, url: str, overwrite: bool) -> None:
    key = url.partition("://")[2].strip("/")
    options = dict(_OPTIONS[store.extra])
    content = _CONTENT.get(Path(key).suffix.lower())
    if content is not None and store.extra in _CONTENT_OPTION:
        options[_CONTENT_OPTION[store.extra]] = content
    mode = "overwrite" if overwrite else "create"
    try:
        store.filesystem.put_file(os.fspath(file), key, mode=mode, **options)
    except FileExistsError:
        raise NameTaken from None
    except Exception as error:  # drivers raise exceptions of many kinds
        codes = codes_of(error)
        if not overwrite and codes & {"NotImplemented", "501"}:
            # A server that knows no conditions: the name was free a moment ago.
            return _to_bucket(store, file, url, True)
        refused = refusal(error, store.advice)
        if codes & _FULL:
            refused = Refusal("the store has no room for it. Free some, or write elsewhere.")
        elif codes & {"ConditionalRequestConflict", "OperationAborted", "409"}:
            refused = Passing("somebody else writes this file. Run again once nobody does.")
        elif isinstance(refused, ChangedFile):
            refused = Passing("the store lost the upload. Run again.") if overwrite else NameTaken()
        else:
            refused = _of_writing(refused)
        raise refused from None


def _of_writing(refused: Refusal) -> Refusal:
    """A refusal in the words of who writes; those of `refusal` are of who reads."""
    words = str(refused).replace("may not read it", "may not write it").replace("may read it", "may write to it")
    refused.args = (words,)
    return refused


def _to_hub(store: Any, file: Path, url: str, overwrite: bool) -> None:
    from huggingface_hub import CommitOperationAdd
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    from tito_audit.storage._store_web import hub_place, hub_refusal

    place, api = hub_place(url), store._api
    about: dict[str, Any] = {"repo_id": place.name, "repo_type": place.kind, "revision": place.revision}
    shows_progress = not are_progress_bars_disabled()
    if shows_progress:  # of its own, which would mix with ours
        disable_progress_bars()
    try:
        head = api.repo_info(**about).sha
        if not overwrite and api.get_paths_info(place.name, [place.path], repo_type=place.kind, revision=head):
            raise NameTaken
        api.create_commit(
            **about,
            operations=[CommitOperationAdd(place.path, os.fspath(file))],
            commit_message=f"Write {place.path} with tito-audit",
            parent_commit=None if overwrite else head,
        )
    except NameTaken:
        raise
    except Exception as error:  # of requests or httpx, whichever the hub's client uses
        refused = hub_refusal(error, place)
        if isinstance(refused, ChangedFile):
            refused = Passing("others write to this data set all the time. Run again later.")
        raise _of_writing(refused) from None
    finally:
        if shows_progress:
            enable_progress_bars()
