"""Files of data sets, models and spaces on the Hugging Face hub.

A revision is looked up once for a run and its commit is read from then on, so a push does not change what is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from tito_audit.storage._store import READ_SECONDS, Missing, Refused, RemoteStatus, Store
from tito_audit.storage._store_errors import Advice, of_status, refusal

ADVICE = Advice(
    credentials="Run `hf auth login`, or set HF_TOKEN to a token that may read it.",
    place="Look at the name: hf://datasets/OWNER/NAME@REVISION/PATH.",
)
_KINDS = {"datasets": "dataset", "spaces": "space", "models": "model"}
_REFERENCE = re.compile(r"refs/(?:convert|pr)/[^/]+")


@dataclass(frozen=True, slots=True)
class _Place:
    """A path in a repository."""

    kind: str
    name: str
    revision: str | None
    path: str
    root: str
    """The URL of the repository, as it was given."""


class HubStore(Store):
    """The repositories of a hub. A status's key is `KIND OWNER/NAME COMMIT PATH`."""

    def __init__(self) -> None:
        from huggingface_hub import HfApi

        self._api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=os.environ.get("HF_TOKEN"))

    def status(self, url: str) -> RemoteStatus:
        """Its size and hash at the commit that its revision is now."""
        place = _place(url)
        commit = self._commit(place)
        found = self._entry(place, commit)
        if found is None or found["type"] != "file":
            raise Missing(f"there is no such file in {place.name}. {ADVICE.place}")
        return _status(found, place, commit)

    def is_folder(self, url: str) -> bool:
        """Whether the repository has this folder."""
        place = _place(url)
        commit = self._commit(place)
        if not place.path:
            return True
        found = self._entry(place, commit)
        return found is not None and found["type"] == "directory"

    def files(self, url: str) -> Iterator[tuple[str, RemoteStatus]]:
        """All files below, a thousand a request."""
        place = _place(url)
        commit = self._commit(place)
        for entry in self._tree(place, commit, recursive=True):
            if entry["type"] == "file":
                yield f"{place.root}/{entry['path']}", _status(entry, place, commit)

    def entries(self, url: str) -> list[str]:
        """What is in a folder."""
        place = _place(url)
        return [
            f"{place.root}/{entry['path']}" for entry in self._tree(place, self._commit(place), recursive=False)
        ]

    def read(self, url: str, start: int, stop: int, status: RemoteStatus) -> bytes:
        """Bytes of the file at the commit of its status."""
        import huggingface_hub
        from huggingface_hub import hf_hub_url

        hub: Any = huggingface_hub.utils  # its helpers are public, but not marked so for type checkers

        kind, name, commit, path = status.key.split(" ", 3)
        address = hf_hub_url(name, path, repo_type=kind, revision=commit, endpoint=self._api.endpoint)
        headers = {**hub.build_hf_headers(token=self._api.token), "Range": f"bytes={start}-{stop - 1}"}
        headers["Accept-Encoding"] = "identity"
        try:
            answer = hub.get_session().get(address, headers=headers, timeout=READ_SECONDS)
        except Exception as error:  # of requests or httpx, whichever the hub's client uses
            raise refusal(error, ADVICE) from None
        if answer.status_code not in (200, 206):
            raise of_status(answer.status_code, ADVICE)
        data: bytes = answer.content
        if answer.status_code == 200:
            data = data[start:stop]
        return data[: stop - start]

    def _commit(self, place: _Place) -> str:
        try:
            about = self._api.repo_info(
                place.name, revision=place.revision, repo_type=place.kind, timeout=READ_SECONDS
            )
        except Exception as error:
            raise _refusal(error, place) from None
        return str(about.sha)

    def _entry(self, place: _Place, commit: str) -> Mapping[str, Any] | None:
        """The file or folder at a path; None if there is none."""
        address = f"{self._address(place)}/paths-info/{commit}"
        answer = self._asked(place, "POST", address, data={"paths": [place.path], "expand": False})
        found: list[Mapping[str, Any]] = answer.json()
        return found[0] if found else None

    def _tree(self, place: _Place, commit: str, *, recursive: bool) -> Iterator[Mapping[str, Any]]:
        """What is in a folder, or below it."""
        below = f"/{quote(place.path, safe='')}" if place.path else ""
        address: str | None = f"{self._address(place)}/tree/{commit}{below}?recursive={str(recursive).lower()}"
        while address is not None:
            answer = self._asked(place, "GET", address)
            yield from answer.json()
            address = answer.links.get("next", {}).get("url")

    def _address(self, place: _Place) -> str:
        return f"{self._api.endpoint}/api/{place.kind}s/{place.name}"

    def _asked(self, place: _Place, method: str, address: str, **body: Any) -> Any:
        """The answer of the hub; the client's own functions would wait for it for ever."""
        import huggingface_hub

        hub: Any = huggingface_hub.utils
        headers = hub.build_hf_headers(token=self._api.token)
        try:
            answer = hub.get_session().request(method, address, headers=headers, timeout=READ_SECONDS, **body)
            hub.hf_raise_for_status(answer)
        except Exception as error:  # of requests or httpx, whichever the hub's client uses
            raise _refusal(error, place) from None
        return answer


def _place(url: str) -> _Place:
    """The parts of `hf://[datasets/|spaces/]OWNER/NAME[@REVISION][/PATH]`."""
    rest = url.removeprefix("hf://").strip("/")
    head, _, after = rest.partition("/")
    kind = _KINDS.get(head, "model")
    prefix = f"{head}/" if head in _KINDS else ""
    owner, _, rest = (after if head in _KINDS else rest).partition("/")
    if not owner or not rest or head == "buckets":
        raise Refused(f"this does not name a repository and a file in it. {ADVICE.place}")
    name, at, path = rest.partition("@") if "@" in rest.partition("/")[0] else (rest, "", "")
    if not at:
        name, _, path = rest.partition("/")
        return _Place(kind, f"{owner}/{name}", None, path, f"hf://{prefix}{owner}/{name}")
    reference = _REFERENCE.match(path)
    revision = reference[0] if reference else path.partition("/")[0]
    path = path[len(revision) :].lstrip("/")
    return _Place(kind, f"{owner}/{name}", unquote(revision), path, f"hf://{prefix}{owner}/{name}@{revision}")


def _status(entry: Mapping[str, Any], place: _Place, commit: str) -> RemoteStatus:
    etag = (entry.get("lfs") or entry)["oid"]
    return RemoteStatus(int(entry["size"]), 0, str(etag), f"{place.kind} {place.name} {commit} {entry['path']}")


def _refusal(error: Exception, place: _Place) -> Refused:
    names = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in names:
        return Refused(f"{place.name} is gated: ask for access on its page. {ADVICE.credentials}")
    if "RevisionNotFoundError" in names:
        return Missing(f"{place.name} has no revision {place.revision or 'main'}. {ADVICE.place}")
    if "RepositoryNotFoundError" in names:
        return Missing(
            f"there is no {place.kind} {place.name}, or it is private. {ADVICE.credentials} "
            "Data sets begin with hf://datasets/."
        )
    if "OfflineModeIsEnabled" in names:
        return Refused("HF_HUB_OFFLINE forbids to reach the hub. Unset it, or pass files on disk.")
    if "HFValidationError" in names:
        return Refused(f"{place.name} cannot be the name of a repository. {ADVICE.place}")
    if "EntryNotFoundError" in names:
        return Missing(f"there is no such folder in {place.name}. {ADVICE.place}")
    return refusal(error, ADVICE)
