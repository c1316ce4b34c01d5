"""How a whole file gets into each store: to a bucket in one upload, to the hub in one commit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from tito_audit.storage._store import Changed, Passing, Refused, Store
from tito_audit.storage._store_buckets import BucketStore
from tito_audit.storage._store_errors import refusal
from tito_audit.storage._store_hub import HubStore, _place
from tito_audit.storage._store_hub import _refusal as _hub_refusal

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
_SAME = {"s3a": "s3", "gcs": "gs", "abfs": "az"}
_FULL = {"QuotaExceeded", "XMinioAdminBucketQuotaExceeded", "XMinioStorageFull", "EntityTooLarge"}


class Taken(Refused):
    """The name is taken."""


def send(store: Store, file: Path, url: str, *, overwrite: bool) -> None:
    """Store a file on disk under a URL, as a whole.

    Raises Taken if the name is taken and must not be overwritten, else Refused; then nothing has appeared.
    """
    if isinstance(store, BucketStore):
        _to_bucket(store, file, url, overwrite)
    else:
        assert isinstance(store, HubStore), "refuse_store was asked first"
        _to_hub(store, file, url, overwrite)


def refuse_store(store: Store, url: str) -> None:
    """Refused if nothing can be written to a store, or to this part of it; nothing is asked."""
    if not isinstance(store, BucketStore | HubStore):
        raise Refused(
            "a web server is only read. Write to a bucket (s3://, gs://, az://), to hf://datasets/, or to disk."
        )
    if isinstance(store, HubStore) and not same_key(url).startswith("hf://datasets/"):
        raise Refused("on the hub only data sets are written. Name a file hf://datasets/OWNER/NAME/PATH.")


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


def bucket_of(url: str) -> str:
    """The URL of the bucket or repository that a file is in; Refused if it names no file in one."""
    scheme, _, rest = same_key(url).partition("://")
    parts = rest.split("/")
    depth = 3 if scheme == "hf" else 1
    if len(parts) <= depth:
        raise Refused("this names no file. Add a name after it.")
    return f"{scheme}://{'/'.join(parts[:depth])}"


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
        raise Taken from None
    except Exception as error:  # drivers raise exceptions of many kinds
        if not overwrite and _codes(error) & {"NotImplemented", "501"}:
            # A server that knows no conditions: the name was free a moment ago.
            return _to_bucket(store, file, url, True)
        raise _refusal(error, store, overwrite) from None


def _refusal(error: Exception, store: BucketStore, overwrite: bool) -> Refused:
    """Why the store did not take a file."""
    codes = _codes(error)
    if codes & _FULL:
        return Refused("the store has no room for it. Free some, or write elsewhere.")
    if codes & {"ConditionalRequestConflict", "OperationAborted", "409"}:
        return Passing("somebody else writes this file. Run again once nobody does.")
    found = refusal(error, store.advice)
    if isinstance(found, Changed):
        return Passing("the store lost the upload. Run again.") if overwrite else Taken()
    return _of_writing(found)


def _of_writing(found: Refused) -> Refused:
    """A refusal in the words of who writes; `_store_errors` has those of who reads."""
    words = str(found).replace("may not read it", "may not write it").replace("may read it", "may write to it")
    found.args = (words,)
    return found


def _codes(error: BaseException | None) -> set[str]:
    """The codes of a service in an exception and its causes."""
    found: set[str] = set()
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            found.add(str(response.get("Error", {}).get("Code", "")))
        error = error.__cause__
    return found


def _to_hub(store: HubStore, file: Path, url: str, overwrite: bool) -> None:
    from huggingface_hub import CommitOperationAdd

    place, api = _place(url), store._api
    about: dict[str, Any] = {"repo_id": place.name, "repo_type": place.kind, "revision": place.revision}
    try:
        head = api.repo_info(**about).sha
        if not overwrite and api.get_paths_info(place.name, [place.path], repo_type=place.kind, revision=head):
            raise Taken
        with _no_progress():
            api.create_commit(
                **about,
                operations=[CommitOperationAdd(place.path, os.fspath(file))],
                commit_message=f"Write {place.path} with tito-audit",
                parent_commit=None if overwrite else head,
            )
    except Taken:
        raise
    except Exception as error:  # of requests or httpx, whichever the hub's client uses
        found = _hub_refusal(error, place)
        if isinstance(found, Changed):
            found = Passing("others write to this data set all the time. Run again later.")
        raise _of_writing(found) from None


@contextmanager
def _no_progress() -> Iterator[None]:
    """The hub's client shows no progress of its own, which would mix with ours."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
