"""Files on web servers and on the Hugging Face hub, read by ranges.

Tried in their place: fsspec's HTTPFileSystem needs aiohttp, which the core does without, gives up at the first
dropped connection or busy answer, and reads no file of a server without ranges; HfFileSystem waits for a silent
server for ever. Where a file changes while it is read, both go on with its new bytes.
"""

from __future__ import annotations

import base64
import http.client
import importlib
import os
import re
import ssl
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.message import Message
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit

from tito_audit.storage._store import (
    CONNECT_SECONDS,
    READ_SECONDS,
    Advice,
    ChangedFile,
    Missing,
    Refusal,
    RemoteStatus,
    Store,
    dropped,
    of_status,
    refusal,
)

ADVICE = Advice(
    credentials="Pass them as https://USER:PASSWORD@HOST/…, or use a signed URL that has not expired.",
    place="Look at the address.",
)
_AS_IS = "%/:=&?~+!$,;'@()*[]"
"""What a URL may hold as it is."""
_LEAST = 1 << 16
"""How many bytes a server has to send in `READ_SECONDS`, and how much is read of a body that nobody needs."""


class WebStore(Store):
    """Files on web servers: one at a time, by URL."""

    advice = ADVICE

    def status(self, url: str) -> RemoteStatus:
        """What the headers of the file's first byte say: some servers and most signed URLs allow no HEAD."""
        answer = _ask(url, {"Range": "bytes=0-0"})
        if answer.status == 416 and _size(answer.headers) != 0:  # not an empty file: it refuses ranges
            with answer:
                answer.read_rest()
            answer = _ask(url, {})
        with answer:
            if answer.status in (206, 416):
                size = _size(answer.headers)
                answer.read_rest()
            elif answer.status == 200:
                size = _number(answer.headers.get("Content-Length", ""))
            else:
                raise answer.refusal()
            if size is None:
                raise Refusal("the server does not say how long the file is. Download it and pass the file.")
            ranges = answer.status != 200 or size == 0
            try:
                changed = parsedate_to_datetime(answer.headers.get("Last-Modified", "")).timestamp()
            except (ValueError, TypeError):
                changed = 0
            return RemoteStatus(size, int(changed) * 1_000_000_000, _etag(answer.headers), ranges=ranges)

    def read(self, url: str, start: int, stop: int, status: RemoteStatus) -> bytes:
        answer = _ask(url, {"Range": f"bytes={start}-{stop - 1}"} if status.ranges else {})
        with answer:
            if answer.status not in (200, 206):
                raise answer.refusal()
            if status.etag is not None and _etag(answer.headers) not in (None, status.etag):
                raise ChangedFile
            if answer.status == 206:
                place = answer.headers.get("Content-Range", "").rpartition("/")[0]
                if _size(answer.headers) not in (None, status.st_size):
                    raise ChangedFile
                if place.strip() and not place.replace("=", " ").startswith(f"bytes {start}-"):
                    raise Refusal("the server sends another range than it was asked for. Download the file.")
            elif start:
                raise Refusal("the server stopped to send ranges of the file. Download it and pass the file.")
            return answer.body(stop - start)


@dataclass
class _Answer:
    """The head of an answer whose body was not read yet."""

    response: http.client.HTTPResponse
    connection: http.client.HTTPConnection
    where: tuple[object, ...]

    def __post_init__(self) -> None:
        self.status, self.headers = self.response.status, self.response.headers

    def body(self, most: int) -> bytes:
        """At most so many bytes; fewer if the connection was dropped after some."""
        parts: list[bytes] = []
        try:
            parts.extend(self._blocks(most))
        except (OSError, http.client.HTTPException) as error:
            if not parts:
                raise refusal(error, ADVICE) from None
        data = b"".join(parts)
        if not data:
            raise dropped()
        return data

    def read_rest(self) -> None:
        """Read a body that should be short, so that the connection serves again."""
        with suppress(OSError, http.client.HTTPException):
            for _ in self._blocks(_LEAST):
                pass

    def _blocks(self, most: int) -> Iterator[bytes]:
        """The next bytes of the body as they come, until a server sends next to nothing for a long time."""
        size, began = 0, time.monotonic()
        while size < most and (block := self.response.read1(min(_LEAST, most - size))):
            yield block
            size += len(block)
            if time.monotonic() - began > READ_SECONDS * (1 + size // _LEAST):
                return
        if self.response.length == 0:
            self.response.read()  # tells it that its end was read

    def refusal(self) -> Refusal:
        return of_status(self.status, ADVICE, float(_number(self.headers.get("Retry-After", "")) or 0))

    def __enter__(self) -> _Answer:
        return self

    def __exit__(self, *_: object) -> None:
        # A connection serves again only after its answer was read to the end.
        open_connections = _connections()
        if self.response.isclosed() and self.connection.sock is not None and len(open_connections) < 8:
            open_connections[self.where] = self.connection
        else:
            self.response.close()
            self.connection.close()


def _ask(url: str, headers: Mapping[str, str]) -> _Answer:
    """The answer to a GET, after redirects; user and password are for the first server alone."""
    origin = _parts(url)
    for _ in range(10):
        parts = _parts(url)
        same = (parts.scheme, parts.hostname, parts.port) == (origin.scheme, origin.hostname, origin.port)
        sent = {"Accept-Encoding": "identity", "User-Agent": "tito-audit", **headers}
        try:
            answer = _answer(parts, sent | (_authorization(origin) if same else {}))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise refusal(error, ADVICE) from None
        place = answer.headers.get("Location")
        if answer.status not in (301, 302, 303, 307, 308) or not place:
            return answer
        with answer:
            answer.read_rest()
        try:
            url = urljoin(url, place)
        except ValueError:  # brackets are missing
            raise Refusal("the server redirects to what is no address. " + ADVICE.place) from None
        if parts.scheme == "https" and _parts(url).scheme != "https":
            raise Refusal("the server redirects from https to http, which is not followed. " + ADVICE.place)
    raise Missing("the server redirects without end. " + ADVICE.place)


def _parts(url: str) -> SplitResult:
    """The parts of an address; Refused if it is not one."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts
    except ValueError:  # the port is not a number, or brackets are missing
        pass
    raise Refusal("this is not an address that can be read. " + ADVICE.place)


def _answer(parts: SplitResult, headers: Mapping[str, str]) -> _Answer:
    """The answer to one GET, on a connection that is open already or on a new one."""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    proxy = None
    if not urllib.request.proxy_bypass(str(parts.hostname)):
        proxy = urllib.request.getproxies().get(parts.scheme)
    at = urlsplit(proxy if "://" in proxy else f"http://{proxy}") if proxy else None
    where = (parts.scheme, parts.hostname, port, proxy)
    target = quote(parts.path or "/", _AS_IS) + (f"?{quote(parts.query, _AS_IS)}" if parts.query else "")
    headers = {**headers, "Host": parts.netloc.rpartition("@")[2]}
    if at is not None and parts.scheme == "http":
        target = f"http://{headers['Host']}{target}"
        headers |= _authorization(at, "Proxy-Authorization")
    if (connection := _connections().pop(where, None)) is not None:
        try:
            connection.request("GET", target, headers=headers)
            return _Answer(connection.getresponse(), connection, where)
        except (OSError, http.client.HTTPException):
            connection.close()  # the server had closed it; a new one will tell
    first, number = (str(at.hostname), at.port or 80) if at is not None else (str(parts.hostname), port)
    if parts.scheme == "http":
        connection = http.client.HTTPConnection(first, number, timeout=CONNECT_SECONDS)
    else:
        connection = http.client.HTTPSConnection(first, number, timeout=CONNECT_SECONDS, context=_context())
        if at is not None:
            connection.set_tunnel(str(parts.hostname), port, _authorization(at, "Proxy-Authorization"))
    try:
        connection.connect()
        connection.sock.settimeout(READ_SECONDS)
        connection.request("GET", target, headers=headers)
        return _Answer(connection.getresponse(), connection, where)
    except BaseException:
        connection.close()
        raise


def _authorization(parts: SplitResult, name: str = "Authorization") -> dict[str, str]:
    """The header for the user and password in a URL."""
    if parts.username is None:
        return {}
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {name: "Basic " + base64.b64encode(pair.encode()).decode()}


@cache
def _context() -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not os.environ.get("SSL_CERT_FILE"):
        with suppress(ImportError):  # some systems have no certificates of their own
            certifi: Any = importlib.import_module("certifi")
            context.load_verify_locations(certifi.where())
    return context


_local = threading.local()


def _connections() -> dict[tuple[object, ...], http.client.HTTPConnection]:
    """The connections that this thread of this process keeps open."""
    if getattr(_local, "process", None) != os.getpid():
        for inherited in getattr(_local, "connections", {}).values():
            inherited.close()  # the other process goes on with it
        _local.process, _local.connections = os.getpid(), {}
    connections: dict[tuple[object, ...], http.client.HTTPConnection] = _local.connections
    return connections


def _etag(headers: Message) -> str | None:
    """What changes with the content: the strong etag, or the time of the last change."""
    etag = headers.get("ETag")
    return etag if etag and not etag.startswith("W/") else headers.get("Last-Modified")


def _size(headers: Message) -> int | None:
    """The size of the file that a part of it was sent of."""
    return _number(headers.get("Content-Range", "").rpartition("/")[2])


def _number(text: str) -> int | None:
    """The number of bytes or seconds that a header holds; None if it holds none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


# The hub: a revision is looked up once for a run and its commit is read from then on, whatever is pushed.

HUB_ADVICE = Advice(
    credentials="Run `hf auth login`, or set HF_TOKEN to a token that may read it.",
    place="Look at the name: hf://datasets/OWNER/NAME@REVISION/PATH.",
)
_KINDS = {"datasets": "dataset", "spaces": "space", "models": "model"}
_REFERENCE = re.compile(r"refs/(?:convert|pr)/[^/]+")


@dataclass(frozen=True, slots=True)
class HubPlace:
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

    def refusal(self, error: Exception, url: str) -> Refusal:
        """What an exception of the hub's client says: of requests or httpx, whichever it uses."""
        return hub_refusal(error, hub_place(url))

    def status(self, url: str) -> RemoteStatus:
        """Its size and hash at the commit that its revision is now."""
        place = hub_place(url)
        commit = self._commit(place)
        entry = self._entry(place, commit)
        if entry is None or entry["type"] != "file":
            raise Missing(f"there is no such file in {place.name}. {HUB_ADVICE.place}")
        return _hub_status(entry, place, commit)

    def is_folder(self, url: str) -> bool:
        """Whether the repository has this folder."""
        place = hub_place(url)
        commit = self._commit(place)
        if not place.path:
            return True
        entry = self._entry(place, commit)
        return entry is not None and entry["type"] == "directory"

    def files(self, url: str) -> Iterator[tuple[str, RemoteStatus]]:
        """All files below, a thousand a request."""
        place = hub_place(url)
        commit = self._commit(place)
        for entry in self._tree(place, commit, recursive=True):
            if entry["type"] == "file":
                yield f"{place.root}/{entry['path']}", _hub_status(entry, place, commit)

    def entries(self, url: str) -> list[str]:
        place = hub_place(url)
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
        answer = hub.get_session().get(address, headers=headers, timeout=READ_SECONDS)
        if answer.status_code not in (200, 206):
            raise of_status(answer.status_code, HUB_ADVICE)
        data: bytes = answer.content
        return data[start:stop] if answer.status_code == 200 else data[: stop - start]

    def _commit(self, place: HubPlace) -> str:
        about = self._api.repo_info(
            place.name, revision=place.revision, repo_type=place.kind, timeout=READ_SECONDS
        )
        return str(about.sha)

    def _entry(self, place: HubPlace, commit: str) -> Mapping[str, Any] | None:
        """The file or folder at a path; None if there is none."""
        body = {"paths": [place.path], "expand": False}
        entries: list[Mapping[str, Any]] = self._ask(place, "POST", f"paths-info/{commit}", data=body).json()
        return entries[0] if entries else None

    def _tree(self, place: HubPlace, commit: str, *, recursive: bool) -> Iterator[Mapping[str, Any]]:
        """What is in a folder, or below it."""
        below = f"/{quote(place.path, safe='')}" if place.path else ""
        address: str | None = f"tree/{commit}{below}?recursive={str(recursive).lower()}"
        while address is not None:
            answer = self._ask(place, "GET", address)
            yield from answer.json()
            address = answer.links.get("next", {}).get("url")

    def _ask(self, place: HubPlace, method: str, address: str, **body: Any) -> Any:
        """The hub's answer about a repository; the client's own functions would wait for it for ever."""
        import huggingface_hub

        hub: Any = huggingface_hub.utils
        headers = hub.build_hf_headers(token=self._api.token)
        if "://" not in address:
            address = f"{self._api.endpoint}/api/{place.kind}s/{place.name}/{address}"
        answer = hub.get_session().request(method, address, headers=headers, timeout=READ_SECONDS, **body)
        hub.hf_raise_for_status(answer)
        return answer


def hub_place(url: str) -> HubPlace:
    """The parts of `hf://[datasets/|spaces/]OWNER/NAME[@REVISION][/PATH]`."""
    rest = url.removeprefix("hf://").strip("/")
    head, _, after = rest.partition("/")
    kind = _KINDS.get(head, "model")
    prefix = f"{head}/" if head in _KINDS else ""
    owner, _, rest = (after if head in _KINDS else rest).partition("/")
    if not owner or not rest or head == "buckets":
        raise Refusal(f"this does not name a repository and a file in it. {HUB_ADVICE.place}")
    name, at, path = rest.partition("@") if "@" in rest.partition("/")[0] else (rest, "", "")
    if not at:
        name, _, path = rest.partition("/")
        return HubPlace(kind, f"{owner}/{name}", None, path, f"hf://{prefix}{owner}/{name}")
    reference = _REFERENCE.match(path)
    revision = reference[0] if reference else path.partition("/")[0]
    path = path[len(revision) :].lstrip("/")
    return HubPlace(kind, f"{owner}/{name}", unquote(revision), path, f"hf://{prefix}{owner}/{name}@{revision}")


def _hub_status(entry: Mapping[str, Any], place: HubPlace, commit: str) -> RemoteStatus:
    etag = (entry.get("lfs") or entry)["oid"]
    return RemoteStatus(int(entry["size"]), 0, str(etag), f"{place.kind} {place.name} {commit} {entry['path']}")


def hub_refusal(error: Exception, place: HubPlace) -> Refusal:
    names = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in names:
        return Refusal(f"{place.name} is gated: ask for access on its page. {HUB_ADVICE.credentials}")
    if "RevisionNotFoundError" in names:
        return Missing(f"{place.name} has no revision {place.revision or 'main'}. {HUB_ADVICE.place}")
    if "RepositoryNotFoundError" in names:
        return Missing(
            f"there is no {place.kind} {place.name}, or it is private. {HUB_ADVICE.credentials} "
            "Data sets begin with hf://datasets/."
        )
    if "OfflineModeIsEnabled" in names:
        return Refusal("HF_HUB_OFFLINE forbids to reach the hub. Unset it, or pass files on disk.")
    if "HFValidationError" in names:
        return Refusal(f"{place.name} cannot be the name of a repository. {HUB_ADVICE.place}")
    if "EntryNotFoundError" in names:
        return Missing(f"there is no such folder in {place.name}. {HUB_ADVICE.place}")
    return refusal(error, HUB_ADVICE)
