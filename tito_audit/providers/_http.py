"""Requests to a model server, with retries that sample nothing twice, and the model that it serves."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import orjson

from tito_audit.errors import ProviderError, SetupError
from tito_audit.provider import ProviderOptions, ScoredTokens, TokenProvider, waiting
from tito_audit.providers._answers import list_ids
from tito_audit.record.prompt_ids import PromptIds

if TYPE_CHECKING:
    import aiohttp


_MAX_EVENT = 1 << 24


class EventParser:
    """Reads the `data` of server-sent events from bytes that are split anywhere."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The data of the events that this piece completes; ValueError if one is longer than 16 MiB."""
        searched = len(self._rest)
        self._rest += piece
        begin = 0
        while (end := self._rest.find(b"\n", max(begin, searched))) >= 0:
            line = bytes(self._rest[begin:end]).rstrip(b"\r")
            begin = end + 1
            if line:
                # Comments and fields other than `data` are ignored.
                name, _, value = line.partition(b":")
                if name == b"data":
                    self._data.append(value.removeprefix(b" "))
                    self._size += len(value)
                    self._check_size(self._size)
            elif self._data:
                yield b"\n".join(self._data)
                self._data, self._size = [], 0
        del self._rest[:begin]
        self._check_size(len(self._rest))

    def _check_size(self, size: int) -> None:
        if size > _MAX_EVENT:
            raise ValueError(f"an event is longer than {_MAX_EVENT >> 20} MiB")


_MAX_ANSWER = 1 << 28
"""The longest answer that is read, in bytes: no server needs 256 MiB for one call."""
_MAX_ERROR = 1 << 16
_MAX_RETRIES = 4


class Http:
    """A client of one server. It sends a request again only if the server cannot have begun to sample: it did not
    accept the connection, or answered 429 or 503. Any later failure is an error.
    """

    def __init__(self, base_url: str, options: ProviderOptions) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise SetupError(f"{base_url}: not a server's address, which begins with http:// or https://")
        try:
            import aiohttp
        except ImportError:
            raise SetupError("A model server needs aiohttp: pip install 'tito-audit[serve]'") from None
        self.base_url = base_url.rstrip("/")
        self._aiohttp = aiohttp
        self._options = options
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots: asyncio.Semaphore | None = None

    async def json(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, sent: PromptIds | None = None
    ) -> Any:
        """The JSON answer to a request, with `ECHOED` where it repeats the prompt `sent`; else ProviderError."""
        async with self._open_response(method, path, body) as response:
            pieces, size = [], 0
            with waiting():
                async for piece in response.content.iter_any():
                    size += len(piece)
                    if size > _MAX_ANSWER:
                        raise ProviderError(f"{response.url}: the answer is longer than {_MAX_ANSWER >> 20} MiB")
                    pieces.append(piece)
            return self._parse_json(b"".join(pieces), path, sent)

    async def events(
        self, path: str, body: Mapping[str, Any], *, sent: PromptIds | None = None
    ) -> AsyncIterator[Any]:
        """The events of a streamed answer as JSON, up to `[DONE]`; ProviderError if it ends before."""
        events = EventParser()
        async with self._open_response("POST", path, body) as response:
            try:
                async for piece in response.content.iter_any():
                    for data in events.feed(piece):
                        if data != b"[DONE]":
                            yield self._check_event(self._parse_json(data, path, sent), path)
                            continue
                        # Read what follows for up to a second, so that the connection can be reused.
                        with suppress(TimeoutError):
                            async with asyncio.timeout(1.0):
                                async for _ in response.content.iter_any():
                                    pass
                        return
            except ValueError as error:
                raise self._connection_error(path, error) from error
        raise ProviderError(f"{self.base_url}{path}: the stream ended before it was complete (no [DONE])")

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    @asynccontextmanager
    async def _open_response(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer to a request, its body still to be read; ProviderError unless its status is 200."""
        loop = asyncio.get_running_loop()
        if self._session is None or self._session.closed or self._loop is not loop:
            aiohttp, options = self._aiohttp, self._options
            self._loop = loop
            self._slots = asyncio.Semaphore(max(1, options.connections))
            self._session = aiohttp.ClientSession(
                # Close idle connections before the server does (uvicorn: after 5 s), which would fail a request.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0),
                timeout=aiohttp.ClientTimeout(total=options.timeout, sock_connect=10.0),
                headers={"Authorization": f"Bearer {options.api_key}"} if options.api_key else None,
                read_bufsize=1 << 18,
            )
        where, response = f"{self.base_url}{path}", None
        assert self._slots is not None, "made with the session"
        async with self._slots:
            try:
                response = await self._send(self._session, method, where, body)
                kind = response.content_type
                if response.status == 200 and kind == "text/html":
                    raise ProviderError(f"{where} answers with a web page: is this the address of the API?")
                if 300 <= response.status < 400:
                    to = response.headers.get("Location", "nowhere")
                    raise ProviderError(f"{where} redirects to {to}: use that address", status=response.status)
                if response.status != 200:
                    text = (await response.content.read(_MAX_ERROR)).decode(errors="replace")
                    message = f"{where} answers {response.status}: {error_message(text, kind)}"
                    raise ProviderError(message, status=response.status, body=text)
                yield response
            except (self._aiohttp.ClientError, TimeoutError) as error:
                raise self._connection_error(path, error) from error
            finally:
                if response is not None:
                    response.close() if not response.content.at_eof() else response.release()

    async def _send(
        self, session: aiohttp.ClientSession, method: str, url: str, body: Mapping[str, Any] | None
    ) -> aiohttp.ClientResponse:
        """The head of the answer to a request, which is sent again while that is safe."""
        data = None if body is None else orjson.dumps(body)
        headers = {"Content-Type": "application/json"} if data is not None else {}
        for attempt in range(_MAX_RETRIES + 1):
            try:
                with waiting():
                    response = await session.request(
                        method, url, data=data, headers=headers, allow_redirects=False
                    )
            except self._aiohttp.ClientConnectorError:
                if attempt == _MAX_RETRIES:
                    raise
                pause = None
            else:
                # A busy server has not begun to sample.
                if response.status not in (429, 503) or attempt == _MAX_RETRIES:
                    return response
                pause = response.headers.get("Retry-After")
                response.release()
            try:
                seconds = min(10.0, max(0.0, float(pause or "")))
            except ValueError:
                seconds = 0.25 * float(1 << attempt) * random.uniform(0.75, 1.25)
            with waiting():
                await asyncio.sleep(seconds)
        raise AssertionError("the last attempt returns or raises")

    def _parse_json(self, data: bytes, path: str, sent: PromptIds | None = None) -> Any:
        """The JSON value; NaN is accepted, so that the check of logprobs can name its place."""
        data = data if sent is None else replace_echo(data, sent.json)
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError:
            pass
        try:
            return json.loads(data)
        except ValueError:
            text = one_line(data[:200].decode(errors="replace"))
            raise ProviderError(f"{self.base_url}{path}: the answer is not JSON: {text}") from None

    def _check_event(self, event: Any, path: str) -> Any:
        """The event; ProviderError if it reports an error, as servers do once the stream has begun."""
        error = event.get("error") if isinstance(event, dict) else None
        if isinstance(event, dict) and event.get("object") == "error":  # older servers
            error = event
        if error:
            status = error.get("code") if isinstance(error, dict) else None
            text = error.get("message") if isinstance(error, dict) else error
            raise ProviderError(
                f"{self.base_url}{path}: {one_line(str(text))}",
                status=status if type(status) is int else None,
                body=json.dumps(event)[:_MAX_ERROR],
            )
        return event

    def _connection_error(self, path: str, error: Exception) -> ProviderError:
        """The error for a connection that failed, in one line."""
        where = f"{self.base_url}{path}"
        if isinstance(error, self._aiohttp.ClientConnectorError):
            return ProviderError(f"{where}: no server answers here: {one_line(str(error))}")
        if isinstance(error, TimeoutError):
            return ProviderError(f"{where}: no complete answer within {self._options.timeout:g} s")
        return ProviderError(f"{where}: the connection broke: {one_line(str(error)) or type(error).__name__}")


def error_message(text: str, content_type: str) -> str:
    """The message in an error's body, in one line."""
    if content_type == "text/html":
        return "a web page (is this the address of the API?)"
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return one_line(text) or "nothing"
    for key in ("error", "message", "detail"):
        while isinstance(value, dict) and value.get(key):
            value = value[key]
    return one_line(value if isinstance(value, str) else json.dumps(value))


def one_line(text: str) -> str:
    """A text without line breaks, of at most 500 characters."""
    text = " ".join(text.split())
    return text if len(text) <= 500 else f"{text[:500]}…"


# The prompt that an answer repeats is compared as bytes, which is faster than parsing its ids.

ECHOED = f"the ids that were sent: {uuid4().hex}"
"""Stands in an answer for `prompt_token_ids` that equal the ids sent; no server can guess it."""
_ECHO_KEY = b'"prompt_token_ids":'
_ECHO_MARK = b'"' + ECHOED.encode() + b'"'


def replace_echo(data: bytes, ids: bytes) -> bytes:
    """A JSON answer with `ECHOED` in the place of each `prompt_token_ids` that equals `ids`, JSON without spaces.

    A key after a backslash is part of a string, and stays. After any other quote it is a key, or the answer is not
    JSON and stays invalid.
    """
    pieces: list[bytes] = []
    at = 0
    spaced: bytes | None = None
    while (key_at := data.find(_ECHO_KEY, at)) >= 0:
        start = key_at + len(_ECHO_KEY)
        written = ids
        if data.startswith(b" ", start):
            start += 1
            written = spaced = spaced or ids.replace(b",", b", ")
        pieces.append(data[at:start])
        at = start
        if data[key_at - 1 : key_at] != b"\\" and data.startswith(written, start):
            pieces.append(_ECHO_MARK)
            at += len(written)
    return b"".join([*pieces, data[at:]]) if pieces else data


def object_list(answer: Any, key: str) -> list[dict[str, Any]]:
    """The objects of a list in an answer; [] if there is no list."""
    entries = answer.get(key) if isinstance(answer, dict) else None
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


class ServerProvider(TokenProvider):
    """The base of all providers of servers."""

    def __init__(self, kind: str, root: str, options: ProviderOptions | None) -> None:
        self._options = options or ProviderOptions()
        self._http = Http(root, self._options)
        self.name = f"{kind}={self._http.base_url}"
        self.model: str | None = self._options.model

    async def score(self, ids: Sequence[int], *, start: int = 0, top: int = 0) -> ScoredTokens:
        plain, first = list_ids(ids), max(1, start)
        if first > len(plain):
            raise ProviderError(f"there are {len(plain)} ids, and no position {start} to score from", status=400)
        if first == len(plain):
            return ScoredTokens(tuple(plain), first, (), () if top else None)
        return await self._score(plain, first, top)

    def forcing(self, structural_tag: Mapping[str, Any]) -> dict[str, Any]:
        """The extra parameters that keep an answer to a structural tag of xgrammar."""
        return {"structured_outputs": {"structural_tag": json.dumps(structural_tag)}}

    async def _score(self, ids: list[int], start: int, top: int) -> ScoredTokens:
        """The logprobs of `ids[start:]`, which is not empty."""
        raise NotImplementedError

    async def close(self) -> None:
        await self._http.close()


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that a server serves."""

    model: str
    context: int | None
    """Its context length in tokens; None if not stated."""
    root: str | None = None
    """The folder or hub name that it was loaded from; None if not stated."""

    def answer_room(self, prompt: int, name: str) -> int:
        """How many tokens a prompt leaves for its answer; at least 1, so that the server refuses what is too long.

        ProviderError if the context is not stated.
        """
        if self.context is None:
            raise ProviderError(f"{name} does not state its context: max_tokens is needed", status=400)
        return max(1, self.context - prompt)


class ModelServer(ServerProvider):
    """The base of providers whose server states its models at `/v1/models`."""

    def __init__(self, kind: str, root: str, options: ProviderOptions | None) -> None:
        super().__init__(kind, root, options)
        self._served: ServedModel | None = None
        self._asking = asyncio.Lock()

    async def served(self) -> ServedModel:
        """The requested model, or else the first; ProviderError if it is not served. The server is asked once."""
        async with self._asking:
            if self._served is None:
                answer = await self._http.json("GET", "/v1/models")
                cards = [card for card in object_list(answer, "data") if card.get("id")]
                if not cards:
                    raise ProviderError(f"{self._http.base_url}/v1/models names no model")
                wanted = self._options.model or str(cards[0]["id"])
                card = next((card for card in cards if card["id"] == wanted), None)
                if card is None:
                    names = ", ".join(str(card["id"]) for card in cards)
                    raise ProviderError(f"{self.name} does not serve {wanted}; it serves {names}", status=404)
                await self._check_server()
                context, root = card.get("max_model_len"), card.get("root")
                self._served = ServedModel(
                    wanted, context if type(context) is int else None, root if isinstance(root, str) else None
                )
        self.model = self._served.model
        return self._served

    async def find_model(self) -> str:
        """The name of the served model, which also becomes `model`; ProviderError if the server does not say."""
        return (await self.served()).model

    async def _check_server(self) -> None:
        """ProviderError if the server is set up in a way that cannot be used."""
