"""Files on web servers and on the Hugging Face hub, read range by range.

Tried instead: fsspec's HTTPFileSystem needs aiohttp, which the core does without, gives up at the first dropped
connection or busy server, and cannot read from servers without ranges. HfFileSystem waits forever for a silent
server. If a file changes while it is read, both go on with its new bytes.
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
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit

from tito_audit.storage._store import (
    CONNECT_SECONDS,
    READ_SECONDS,
    Advice,
    ChangedFile,
    Missing,
    NameTaken,
    Refusal,
    RemoteStatus,
    Store,
    Transient,
    dropped_connection,
    refusal_from_error,
    refusal_from_status,
)

ADVICE = Advice(
    credentials="Pass them as https://USER:PASSWORD@HOST/…, or use a signed URL that has not expired.",
    check="Look at the address.",
)
_UNQUOTED = "%/:=&?~+!$,;'@()*[]"
"""Characters of a URL that are not quoted."""
_BLOCK = 1 << 16
"""Bytes that a server has to send in `READ_SECONDS`, and that are read at most of a body that nobody needs."""


class WebStore(Store):
    """Files on web servers: one at a time, by URL."""

    advice = ADVICE

    def status(self, url: str) -> RemoteStatus:
        """Asks for the first byte: some servers and most signed URLs refuse HEAD."""
        response = _request(url, {"Range": "bytes=0-0"})
        if response.status == 416 and _file_size(response.headers) != 0:  # not an empty file: ranges are refused
            with response:
                response.read_rest()
            response = _request(url, {})
        with response:
            if response.status in (206, 416):
                size = _file_size(response.headers)
                response.read_rest()
            elif response.status == 200:
                size = _parse_number(response.headers.get("Content-Length", ""))
            else:
                raise response.refusal()
            if size is None:
                raise Refusal("the server does not say how long the file is. Download it and pass the file.")
            serves_ranges = response.status != 200 or size == 0
            try:
                changed = parsedate_to_datetime(response.headers.get("Last-Modified", "")).timestamp()
            except (ValueError, TypeError):
                changed = 0
            tag = _version_tag(response.headers)
            return RemoteStatus(size, int(changed) * 1_000_000_000, tag, serves_ranges=serves_ranges)

    def read(self, url: str, start: int, stop: int, status: RemoteStatus) -> bytes:
        response = _request(url, {"Range": f"bytes={start}-{stop - 1}"} if status.serves_ranges else {})
        with response:
            if response.status not in (200, 206):
                raise response.refusal()
            if status.etag is not None and _version_tag(response.headers) not in (None, status.etag):
                raise ChangedFile
            if response.status == 206:
                sent_range = response.headers.get("Content-Range", "").rpartition("/")[0]
                if _file_size(response.headers) not in (None, status.st_size):
                    raise ChangedFile
                if sent_range.strip() and not sent_range.replace("=", " ").startswith(f"bytes {start}-"):
                    raise Refusal("the server sends another range than it was asked for. Download the file.")
            elif start:
                raise Refusal("the server stopped to send ranges of the file. Download it and pass the file.")
            return response.body(stop - start)


@dataclass
class _Response:
    """A response whose body is still to be read; as a context manager, it gives its connection back."""

    http_response: http.client.HTTPResponse
    connection: http.client.HTTPConnection
    pool_key: tuple[object, ...]
    """Where `_open_connections` keeps the connection."""

    def __post_init__(self) -> None:
        self.status, self.headers = self.http_response.status, self.http_response.headers

    def body(self, limit: int) -> bytes:
        """At most `limit` bytes; fewer if the connection drops after some."""
        parts: list[bytes] = []
        try:
            parts.extend(self._blocks(limit))
        except (OSError, http.client.HTTPException) as error:
            if not parts:
                raise refusal_from_error(error, ADVICE) from None
        data = b"".join(parts)
        if not data:
            raise dropped_connection()
        return data

    def read_rest(self) -> None:
        """Read a short body to its end, so that the connection can be used again."""
        with suppress(OSError, http.client.HTTPException):
            for _ in self._blocks(_BLOCK):
                pass

    def _blocks(self, limit: int) -> Iterator[bytes]:
        """The body as it arrives, up to `limit` bytes; ends early if the server is too slow."""
        size, began = 0, time.monotonic()
        while size < limit and (block := self.http_response.read1(min(_BLOCK, limit - size))):
            yield block
            size += len(block)
            if time.monotonic() - began > READ_SECONDS * (1 + size // _BLOCK):
                return
        if self.http_response.length == 0:
            self.http_response.read()  # notices its end, which closes it

    def refusal(self) -> Refusal:
        retry_after = _parse_number(self.headers.get("Retry-After", "")) or 0
        return refusal_from_status(self.status, ADVICE, retry_after)

    def __enter__(self) -> _Response:
        return self

    def __exit__(self, *_: object) -> None:
        # A connection can be used again only after its response was read to the end.
        idle = _open_connections()
        if self.http_response.isclosed() and self.connection.sock is not None and len(idle) < 8:
            idle[self.pool_key] = self.connection
        else:
            self.http_response.close()
            self.connection.close()


def _request(url: str, headers: Mapping[str, str]) -> _Response:
    """The response to a GET after redirects; only the first server gets user and password."""
    origin = _split_url(url)
    for _ in range(10):
        parts = _split_url(url)
        same_server = (parts.scheme, parts.hostname, parts.port) == (origin.scheme, origin.hostname, origin.port)
        sent = {"Accept-Encoding": "identity", "User-Agent": "tito-audit", **headers}
        try:
            response = _send_get(parts, sent | (_basic_auth(origin) if same_server else {}))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise refusal_from_error(error, ADVICE) from None
        location = response.headers.get("Location")
        if response.status not in (301, 302, 303, 307, 308) or not location:
            return response
        with response:
            response.read_rest()
        try:
            url = urljoin(url, location)
        except ValueError:  # brackets are missing
            raise Refusal("the server redirects to what is no address. " + ADVICE.check) from None
        if parts.scheme == "https" and _split_url(url).scheme != "https":
            raise Refusal("the server redirects from https to http, which is not followed. " + ADVICE.check)
    raise Missing("the server redirects without end. " + ADVICE.check)


def _split_url(url: str) -> SplitResult:
    """The parts of an http or https URL; Refusal if it is none."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts
    except ValueError:  # the port is not a number, or brackets are missing
        pass
    raise Refusal("this is not an address that can be read. " + ADVICE.check)


def _send_get(parts: SplitResult, headers: Mapping[str, str]) -> _Response:
    """Send one GET, on an open connection if there is one."""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    proxy = None
    if not urllib.request.proxy_bypass(str(parts.hostname)):
        proxy = urllib.request.getproxies().get(parts.scheme)
    proxy_parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}") if proxy else None
    pool_key = (parts.scheme, parts.hostname, port, proxy)
    target = quote(parts.path or "/", _UNQUOTED) + (f"?{quote(parts.query, _UNQUOTED)}" if parts.query else "")
    headers = {**headers, "Host": parts.netloc.rpartition("@")[2]}
    if proxy_parts is not None and parts.scheme == "http":
        target = f"http://{headers['Host']}{target}"
        headers |= _basic_auth(proxy_parts, "Proxy-Authorization")
    if (connection := _open_connections().pop(pool_key, None)) is not None:
        try:
            connection.request("GET", target, headers=headers)
            return _Response(connection.getresponse(), connection, pool_key)
        except (OSError, http.client.HTTPException):
            connection.close()  # the server closed it meanwhile, or a new one fails as well
    peer = (str(parts.hostname), port)
    if proxy_parts is not None:
        peer = (str(proxy_parts.hostname), proxy_parts.port or 80)
    if parts.scheme == "http":
        connection = http.client.HTTPConnection(*peer, timeout=CONNECT_SECONDS)
    else:
        connection = http.client.HTTPSConnection(*peer, timeout=CONNECT_SECONDS, context=_tls_context())
        if proxy_parts is not None:
            connection.set_tunnel(str(parts.hostname), port, _basic_auth(proxy_parts, "Proxy-Authorization"))
    try:
        connection.connect()
        connection.sock.settimeout(READ_SECONDS)
        connection.request("GET", target, headers=headers)
        return _Response(connection.getresponse(), connection, pool_key)
    except BaseException:
        connection.close()
        raise


def _basic_auth(parts: SplitResult, name: str = "Authorization") -> dict[str, str]:
    """The header for the user and password in a URL; {} without them."""
    if parts.username is None:
        return {}
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {name: "Basic " + base64.b64encode(pair.encode()).decode()}


@cache
def _tls_context() -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not os.environ.get("SSL_CERT_FILE"):
        with suppress(ImportError):  # on systems without certificates of their own
            certifi: Any = importlib.import_module("certifi")
            context.load_verify_locations(certifi.where())
    return context


_local = threading.local()


def _open_connections() -> dict[tuple[object, ...], http.client.HTTPConnection]:
    """The idle connections of this thread, by server and proxy; those of a parent process are closed."""
    if getattr(_local, "process", None) != os.getpid():
        for parent_connection in getattr(_local, "connections", {}).values():
            parent_connection.close()  # only here: the parent goes on with it
        _local.process, _local.connections = os.getpid(), {}
    connections: dict[tuple[object, ...], http.client.HTTPConnection] = _local.connections
    return connections


def _version_tag(headers: Message) -> str | None:
    """The strong etag, or else the time of the last change; None without either."""
    etag = headers.get("ETag")
    return etag if etag and not etag.startswith("W/") else headers.get("Last-Modified")


def _file_size(headers: Message) -> int | None:
    """The size of the whole file, of which a part is sent; None if the headers do not say."""
    return _parse_number(headers.get("Content-Range", "").rpartition("/")[2])


def _parse_number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


# The hub. A revision is resolved once in a run; then its commit is read, whatever is pushed meanwhile.

HUB_ADVICE = Advice(
    credentials="Run `hf auth login`, or set HF_TOKEN to a token that may read it.",
    check="Look at the name: hf://datasets/OWNER/NAME@REVISION/PATH.",
)
_KINDS = {"datasets": "dataset", "spaces": "space", "models": "model"}
_REFERENCE = re.compile(r"refs/(?:convert|pr)/[^/]+")


@dataclass(frozen=True, slots=True)
class HubPath:
    """A path in a repository of the hub."""

    kind: str
    name: str
    revision: str | None
    path: str
    root: str
    """The URL of the repository, as the user wrote it."""


class HubStore(Store):
    """The repositories of a hub; the key of a status is `KIND OWNER/NAME COMMIT PATH`."""

    def __init__(self) -> None:
        from huggingface_hub import HfApi

        self._api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=os.environ.get("HF_TOKEN"))

    def refusal(self, error: Exception, url: str) -> Refusal:
        return refusal_from_hub(error, parse_hub_url(url))

    def status(self, url: str) -> RemoteStatus:
        place = parse_hub_url(url)
        commit = self._commit(place)
        entry = self._entry(place, commit)
        if entry is None or entry["type"] != "file":
            raise Missing(f"there is no such file in {place.name}. {HUB_ADVICE.check}")
        return _hub_status(entry, place, commit)

    def is_folder(self, url: str) -> bool:
        place = parse_hub_url(url)
        commit = self._commit(place)
        if not place.path:
            return True
        entry = self._entry(place, commit)
        return entry is not None and entry["type"] == "directory"

    def files(self, url: str) -> Iterator[tuple[str, RemoteStatus]]:
        place = parse_hub_url(url)
        commit = self._commit(place)
        for entry in self._list_tree(place, commit, recursive=True):
            if entry["type"] == "file":
                yield f"{place.root}/{entry['path']}", _hub_status(entry, place, commit)

    def entries(self, url: str) -> list[str]:
        place = parse_hub_url(url)
        tree = self._list_tree(place, self._commit(place), recursive=False)
        return [f"{place.root}/{entry['path']}" for entry in tree]

    def read(self, url: str, start: int, stop: int, status: RemoteStatus) -> bytes:
        import huggingface_hub
        from huggingface_hub import hf_hub_url

        hub: Any = huggingface_hub.utils  # public, but not for type checkers

        kind, name, commit, path = status.key.split(" ", 3)
        address = hf_hub_url(name, path, repo_type=kind, revision=commit, endpoint=self._api.endpoint)
        headers = {**hub.build_hf_headers(token=self._api.token), "Range": f"bytes={start}-{stop - 1}"}
        headers["Accept-Encoding"] = "identity"
        response = hub.get_session().get(address, headers=headers, timeout=READ_SECONDS)
        if response.status_code not in (200, 206):
            raise refusal_from_status(response.status_code, HUB_ADVICE)
        data: bytes = response.content
        return data[start:stop] if response.status_code == 200 else data[: stop - start]

    def upload(self, file: Path, url: str, *, overwrite: bool) -> None:
        from huggingface_hub import CommitOperationAdd
        from huggingface_hub.utils.tqdm import (
            are_progress_bars_disabled,
            disable_progress_bars,
            enable_progress_bars,
        )

        place, api = parse_hub_url(url), self._api
        about: dict[str, Any] = {"repo_id": place.name, "repo_type": place.kind, "revision": place.revision}
        shows_progress = not are_progress_bars_disabled()
        if shows_progress:  # the client's own, which would mix with ours
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
            refused = refusal_from_hub(error, place)
            if isinstance(refused, ChangedFile):
                refused = Transient("others write to this data set all the time. Run again later.")
            raise refused.about_writing() from None
        finally:
            if shows_progress:
                enable_progress_bars()

    def _commit(self, place: HubPath) -> str:
        about = self._api.repo_info(
            place.name, revision=place.revision, repo_type=place.kind, timeout=READ_SECONDS
        )
        return str(about.sha)

    def _entry(self, place: HubPath, commit: str) -> Mapping[str, Any] | None:
        """The hub's entry for a file or folder; None if there is none."""
        body = {"paths": [place.path], "expand": False}
        response = self._call_api(place, "POST", f"paths-info/{commit}", data=body)
        return next(iter(response.json()), None)

    def _list_tree(self, place: HubPath, commit: str, *, recursive: bool) -> Iterator[Mapping[str, Any]]:
        """The entries in a folder, or at any depth below it."""
        below = f"/{quote(place.path, safe='')}" if place.path else ""
        address: str | None = f"tree/{commit}{below}?recursive={str(recursive).lower()}"
        while address is not None:
            response = self._call_api(place, "GET", address)
            yield from response.json()
            address = response.links.get("next", {}).get("url")

    def _call_api(self, place: HubPath, method: str, address: str, **body: Any) -> Any:
        """A response of the hub about a repository; the client's own functions would wait forever for it."""
        import huggingface_hub

        hub: Any = huggingface_hub.utils
        headers = hub.build_hf_headers(token=self._api.token)
        if "://" not in address:
            address = f"{self._api.endpoint}/api/{place.kind}s/{place.name}/{address}"
        response = hub.get_session().request(method, address, headers=headers, timeout=READ_SECONDS, **body)
        hub.hf_raise_for_status(response)
        return response


def parse_hub_url(url: str) -> HubPath:
    """Parse `hf://[datasets/|spaces/]OWNER/NAME[@REVISION][/PATH]`."""
    rest = url.removeprefix("hf://").strip("/")
    head, _, after = rest.partition("/")
    kind = _KINDS.get(head, "model")
    prefix = f"{head}/" if head in _KINDS else ""
    owner, _, rest = (after if head in _KINDS else rest).partition("/")
    if not owner or not rest or head == "buckets":
        raise Refusal(f"this does not name a repository and a file in it. {HUB_ADVICE.check}")
    name, revision_mark, path = rest.partition("@") if "@" in rest.partition("/")[0] else (rest, "", "")
    if not revision_mark:
        name, _, path = rest.partition("/")
        return HubPath(kind, f"{owner}/{name}", None, path, f"hf://{prefix}{owner}/{name}")
    reference = _REFERENCE.match(path)
    revision = reference[0] if reference else path.partition("/")[0]
    path = path[len(revision) :].lstrip("/")
    return HubPath(kind, f"{owner}/{name}", unquote(revision), path, f"hf://{prefix}{owner}/{name}@{revision}")


def _hub_status(entry: Mapping[str, Any], place: HubPath, commit: str) -> RemoteStatus:
    etag = (entry.get("lfs") or entry)["oid"]
    return RemoteStatus(int(entry["size"]), 0, str(etag), f"{place.kind} {place.name} {commit} {entry['path']}")


def refusal_from_hub(error: Exception, place: HubPath) -> Refusal:
    """What an exception of the hub's client means, judged by the names of its classes."""
    name, credentials, check = place.name, HUB_ADVICE.credentials, HUB_ADVICE.check
    private = f"or it is private. {credentials} Data sets begin with hf://datasets/."
    kinds: dict[str, tuple[type[Refusal], str]] = {
        "GatedRepoError": (Refusal, f"{name} is gated: ask for access on its page. {credentials}"),
        "RevisionNotFoundError": (Missing, f"{name} has no revision {place.revision or 'main'}. {check}"),
        "RepositoryNotFoundError": (Missing, f"there is no {place.kind} {name}, {private}"),
        "OfflineModeIsEnabled": (
            Refusal,
            "HF_HUB_OFFLINE forbids to reach the hub. Unset it, or pass files on disk.",
        ),
        "HFValidationError": (Refusal, f"{name} cannot be the name of a repository. {check}"),
        "EntryNotFoundError": (Missing, f"there is no such folder in {name}. {check}"),
    }
    classes = {kind.__name__ for kind in type(error).__mro__}
    for kind, words in (kinds[cls] for cls in kinds if cls in classes):
        return kind(words)
    return refusal_from_error(error, HUB_ADVICE)
