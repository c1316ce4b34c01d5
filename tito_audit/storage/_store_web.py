"""Files on web servers, read by ranges over connections that stay open."""

from __future__ import annotations

import base64
import http.client
import importlib
import os
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

from tito_audit.storage._store import CONNECT_SECONDS, READ_SECONDS, Changed, Missing, Refused, RemoteStatus, Store
from tito_audit.storage._store_errors import Advice, of_status, refusal

ADVICE = Advice(
    credentials="Pass them as https://USER:PASSWORD@HOST/…, or use a signed URL that has not expired.",
    place="Look at the address.",
)
_AS_IS = "%/:=&?~+!$,;'@()*[]"
"""What a URL may hold as it is."""
_REDIRECTS = 10
_KEPT = 8
"""Open connections that a process keeps."""
_LEAST = 1 << 16
"""How many bytes a server has to send in `READ_SECONDS`, and how much is read of a body that nobody needs."""


class WebStore(Store):
    """Files on web servers: one at a time, by URL."""

    def status(self, url: str) -> RemoteStatus:
        """What the headers of the file's first byte say: some servers and most signed URLs allow no HEAD."""
        answer = _asked(url, {"Range": "bytes=0-0"})
        if answer.status == 416 and _size(answer.headers) != 0:  # not an empty file: it refuses ranges
            with answer:
                answer.rest()
            answer = _asked(url, {})
        with answer:
            if answer.status in (206, 416):
                size = _size(answer.headers)
                answer.rest()
            elif answer.status == 200:
                size = _number(answer.headers.get("Content-Length", ""))
            else:
                raise answer.refusal()
            if size is None:
                raise Refused("the server does not say how long the file is. Download it and pass the file.")
            ranges = answer.status != 200 or size == 0
            return RemoteStatus(size, _written(answer.headers), _etag(answer.headers), ranges=ranges)

    def is_folder(self, url: str) -> bool:
        """False: a web server lists no files."""
        return False

    def files(self, url: str) -> Iterator[tuple[str, RemoteStatus]]:
        """Nothing: a web server lists no files."""
        return iter(())

    def entries(self, url: str) -> list[str]:
        """Nothing: a web server lists no files."""
        return []

    def read(self, url: str, start: int, stop: int, status: RemoteStatus) -> bytes:
        """Bytes of the file."""
        answer = _asked(url, {"Range": f"bytes={start}-{stop - 1}"} if status.ranges else {})
        with answer:
            if answer.status not in (200, 206):
                raise answer.refusal()
            if status.etag is not None and _etag(answer.headers) not in (None, status.etag):
                raise Changed
            if answer.status == 206:
                place = answer.headers.get("Content-Range", "").rpartition("/")[0]
                if _size(answer.headers) not in (None, status.st_size):
                    raise Changed
                if place.strip() and not place.replace("=", " ").startswith(f"bytes {start}-"):
                    raise Refused("the server sends another range than it was asked for. Download the file.")
            elif start:
                raise Refused("the server stopped to send ranges of the file. Download it and pass the file.")
            return answer.body(stop - start)


@dataclass
class _Answer:
    """The head of an answer whose body was not read yet."""

    response: http.client.HTTPResponse
    connection: http.client.HTTPConnection
    where: tuple[object, ...]

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.response.status

    @property
    def headers(self) -> Message:
        """The headers, by any case of their names."""
        return self.response.headers

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
            raise refusal(ConnectionResetError(), ADVICE)
        return data

    def rest(self) -> None:
        """Read a body that should be short, so that the connection serves again."""
        with suppress(OSError, http.client.HTTPException):
            for _ in self._blocks(_LEAST):
                pass

    def _blocks(self, most: int) -> Iterator[bytes]:
        """The next bytes of the body as they come, until a server sends next to nothing for a long time."""
        held, began = 0, time.monotonic()
        while held < most and (block := self.response.read1(min(_LEAST, most - held))):
            yield block
            held += len(block)
            if time.monotonic() - began > READ_SECONDS * (1 + held // _LEAST):
                return
        if self.response.length == 0:
            self.response.read()  # tells it that its end was read

    def refusal(self) -> Refused:
        """The refusal that the status means."""
        after = self.headers.get("Retry-After", "")
        return of_status(self.status, ADVICE, float(_number(after) or 0))

    def __enter__(self) -> _Answer:
        return self

    def __exit__(self, *_: object) -> None:
        # A connection serves again only after its answer was read to the end.
        kept = _connections()
        if self.response.isclosed() and self.connection.sock is not None and len(kept) < _KEPT:
            kept[self.where] = self.connection
        else:
            self.response.close()
            self.connection.close()


def _asked(url: str, headers: Mapping[str, str]) -> _Answer:
    """The answer to a GET, after redirects."""
    origin = _parts(url)
    given = _authorization(origin)
    for _ in range(_REDIRECTS):
        parts = _parts(url)
        same = (parts.scheme, parts.hostname, parts.port) == (origin.scheme, origin.hostname, origin.port)
        sent = {"Accept-Encoding": "identity", "User-Agent": "tito-audit", **headers, **(given if same else {})}
        try:
            answer = _answered(parts, sent)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise refusal(error, ADVICE) from None
        place = answer.headers.get("Location")
        if answer.status not in (301, 302, 303, 307, 308) or not place:
            return answer
        with answer:
            answer.rest()
        try:
            url = urljoin(url, place)
        except ValueError:  # brackets are missing
            raise Refused("the server redirects to what is no address. " + ADVICE.place) from None
        if parts.scheme == "https" and _parts(url).scheme != "https":
            raise Refused("the server redirects from https to http, which is not followed. " + ADVICE.place)
    raise Missing("the server redirects without end. " + ADVICE.place)


def _parts(url: str) -> SplitResult:
    """The parts of an address; Refused if it is not one."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts
    except ValueError:  # the port is not a number, or brackets are missing
        pass
    raise Refused("this is not an address that can be read. " + ADVICE.place)


def _answered(parts: SplitResult, headers: Mapping[str, str]) -> _Answer:
    port = parts.port or (443 if parts.scheme == "https" else 80)
    proxy = _proxy(parts)
    where = (parts.scheme, parts.hostname, port, proxy)
    target = quote(parts.path or "/", _AS_IS) + (f"?{quote(parts.query, _AS_IS)}" if parts.query else "")
    headers = {**headers, "Host": (parts.netloc.rpartition("@")[2])}
    if proxy and parts.scheme == "http":
        target = f"http://{headers['Host']}{target}"
        headers |= _authorization(urlsplit(proxy), "Proxy-Authorization")
    if (kept := _connections().pop(where, None)) is not None:
        try:
            kept.request("GET", target, headers=headers)
            return _Answer(kept.getresponse(), kept, where)
        except (OSError, http.client.HTTPException):
            kept.close()  # the server had closed it; a new one will tell
    connection = _connection(parts, port, proxy)
    try:
        connection.request("GET", target, headers=headers)
        return _Answer(connection.getresponse(), connection, where)
    except BaseException:
        connection.close()
        raise


def _connection(parts: SplitResult, port: int, proxy: str | None) -> http.client.HTTPConnection:
    host = str(parts.hostname)
    at = urlsplit(proxy) if proxy else None
    first, number = (str(at.hostname), at.port or 80) if at is not None else (host, port)
    if parts.scheme == "http":
        connection = http.client.HTTPConnection(first, number, timeout=CONNECT_SECONDS)
    else:
        connection = http.client.HTTPSConnection(first, number, timeout=CONNECT_SECONDS, context=_context())
        if at is not None:
            connection.set_tunnel(host, port, _authorization(at, "Proxy-Authorization"))
    connection.connect()
    connection.sock.settimeout(READ_SECONDS)
    return connection


def _authorization(parts: SplitResult, name: str = "Authorization") -> dict[str, str]:
    """The header for the user and password in a URL."""
    if parts.username is None:
        return {}
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {name: "Basic " + base64.b64encode(pair.encode()).decode()}


def _proxy(parts: SplitResult) -> str | None:
    """The proxy that the environment names for a host."""
    if urllib.request.proxy_bypass(str(parts.hostname)):
        return None
    named = urllib.request.getproxies().get(parts.scheme)
    return named if named is None or "://" in named else f"http://{named}"


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
    """The connections that this thread of this process keeps."""
    if getattr(_local, "process", None) != os.getpid():
        for inherited in getattr(_local, "kept", {}).values():
            inherited.close()  # the other process goes on with it
        _local.process, _local.kept = os.getpid(), {}
    kept: dict[tuple[object, ...], http.client.HTTPConnection] = _local.kept
    return kept


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


def _written(headers: Message) -> int:
    try:
        return int(parsedate_to_datetime(headers.get("Last-Modified", "")).timestamp()) * 1_000_000_000
    except (ValueError, TypeError):
        return 0
