"""Requests to a model server: timeouts, a limit on concurrent calls, retries that sample nothing twice, one-line
errors.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import orjson

from tito_audit.errors import ProviderError, SetupError
from tito_audit.provider import ProviderOptions, waiting
from tito_audit.providers._echo import without_echo
from tito_audit.record.prompt_ids import PromptIds

if TYPE_CHECKING:
    import aiohttp


# Parses server-sent events from bytes that are split anywhere.

_EVENT_BYTES = 1 << 24


class Events:
    """The `data` of each event, in order."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The events that are complete with this piece; ValueError for one of more than 16 MiB."""
        searched = len(self._rest)
        self._rest += piece
        begin = 0
        while (end := self._rest.find(b"\n", max(begin, searched))) >= 0:
            line = bytes(self._rest[begin:end]).rstrip(b"\r")
            begin = end + 1
            if line:
                # One line of an event; comments and fields other than `data` are ignored.
                name, _, value = line.partition(b":")
                if name == b"data":
                    self._data.append(value.removeprefix(b" "))
                    self._size += len(value)
                    self._bounded(self._size)
            elif self._data:
                yield b"\n".join(self._data)
                self._data, self._size = [], 0
        del self._rest[:begin]
        self._bounded(len(self._rest))

    def _bounded(self, size: int) -> None:
        """ValueError if an event is too long."""
        if size > _EVENT_BYTES:
            raise ValueError(f"an event is longer than {_EVENT_BYTES >> 20} MiB")


_ANSWER_BYTES = 1 << 28
"""The longest answer that is read: no server needs 256 MiB for one call."""
_ERROR_BYTES = 1 << 16
_CONNECT_SECONDS = 10.0
_IDLE_SECONDS = 3.0
"""Idle connections are closed before the server closes them (uvicorn: after 5 s) and a request fails."""
_READ_OUT_SECONDS = 1.0
_RETRIES = 4
_BUSY = {429, 503}
"""With these statuses a server has not begun to sample."""
_LONGEST_PAUSE = 10.0


class Http:
    """One server. A request is sent again only if the server cannot have begun with it: no connection, or the
    answer 429 or 503. Any later failure is an error.
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
        self._calls: asyncio.Semaphore | None = None

    async def json(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, sent: PromptIds | None = None
    ) -> Any:
        """The JSON answer to a request; ProviderError for anything else. `sent`: a prompt that the answer repeats;
        it is `SAME` in the returned value.
        """
        async with self._answer(method, path, body) as response:
            with waiting():
                data = await self._read(response, _ANSWER_BYTES)
            return self._parsed(data, path, sent)

    async def events(
        self, path: str, body: Mapping[str, Any], *, sent: PromptIds | None = None
    ) -> AsyncIterator[Any]:
        """The events of a streamed answer, up to `[DONE]`; ProviderError if it ends before."""
        events = Events()
        async with self._answer("POST", path, body) as response:
            try:
                async for piece in response.content.iter_any():
                    for data in events.feed(piece):
                        if data == b"[DONE]":
                            await _read_out(response)
                            return
                        yield self._checked(self._parsed(data, path, sent), path)
            except (self._aiohttp.ClientError, ValueError, TimeoutError) as error:
                raise self._failed(path, error) from error
        raise ProviderError(f"{self.base_url}{path}: the stream ended before it was complete (no [DONE])")

    async def close(self) -> None:
        """Close all connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer of status 200, its body not read yet."""
        session = self._opened()
        assert self._calls is not None, "opened"
        async with self._calls:
            response = await self._sent(session, method, path, body)
            try:
                await self._refuse_others(response, path)
                yield response
            except self._aiohttp.ClientError as error:
                raise self._failed(path, error) from error
            except TimeoutError as error:
                raise self._failed(path, error) from error
            finally:
                response.close() if not response.content.at_eof() else response.release()

    async def _sent(
        self, session: aiohttp.ClientSession, method: str, path: str, body: Mapping[str, Any] | None
    ) -> aiohttp.ClientResponse:
        """The head of the answer; retries while that is safe."""
        data = None if body is None else orjson.dumps(body)
        headers = {"Content-Type": "application/json"} if data is not None else {}
        for attempt in range(_RETRIES + 1):
            try:
                with waiting():
                    response = await session.request(
                        method, self.base_url + path, data=data, headers=headers, allow_redirects=False
                    )
            except self._aiohttp.ClientConnectorError as error:
                if attempt == _RETRIES:
                    raise self._failed(path, error) from error
                pause = None
            except (self._aiohttp.ClientError, TimeoutError) as error:
                raise self._failed(path, error) from error
            else:
                if response.status not in _BUSY or attempt == _RETRIES:
                    return response
                pause = response.headers.get("Retry-After")
                response.release()
            with waiting():
                await asyncio.sleep(_pause(attempt, pause))
        raise AssertionError("the last attempt returns or raises")

    async def _refuse_others(self, response: aiohttp.ClientResponse, path: str) -> None:
        """ProviderError for every status but 200, with what the server says."""
        where = f"{self.base_url}{path}"
        if response.status == 200:
            if response.content_type == "text/html":
                raise ProviderError(
                    f"{self.base_url}{path} answers with a web page: is this the address of the API?"
                )
            return
        where = f"{self.base_url}{path}"
        if 300 <= response.status < 400:
            to = response.headers.get("Location", "nowhere")
            raise ProviderError(f"{where} redirects to {to}: use that address", status=response.status)
        text = (await response.content.read(_ERROR_BYTES)).decode(errors="replace")
        raise ProviderError(
            f"{where} answers {response.status}: {error_in(text, response.content_type)}",
            status=response.status,
            body=text,
        )

    async def _read(self, response: aiohttp.ClientResponse, limit: int) -> bytes:
        """The whole body, if it is not longer than that."""
        pieces, size = [], 0
        async for piece in response.content.iter_any():
            size += len(piece)
            if size > limit:
                raise ProviderError(f"{response.url}: the answer is longer than {limit >> 20} MiB")
            pieces.append(piece)
        return b"".join(pieces)

    def _parsed(self, data: bytes, path: str, sent: PromptIds | None = None) -> Any:
        """JSON; NaN is allowed here, so that a later check names it."""
        data = data if sent is None else without_echo(data, sent.json)
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError:
            pass
        try:
            return json.loads(data)
        except ValueError:
            text = one_line(data[:200].decode(errors="replace"))
            raise ProviderError(f"{self.base_url}{path}: the answer is not JSON: {text}") from None

    def _checked(self, event: Any, path: str) -> Any:
        """The event; ProviderError if it is an error."""
        error = event.get("error") if isinstance(event, dict) else None
        if isinstance(event, dict) and event.get("object") == "error":  # older servers
            error = event
        if error:
            status = error.get("code") if isinstance(error, dict) else None
            text = error.get("message") if isinstance(error, dict) else error
            raise ProviderError(
                f"{self.base_url}{path}: {one_line(str(text))}",
                status=status if type(status) is int else None,
                body=json.dumps(event)[:_ERROR_BYTES],
            )
        return event

    def _opened(self) -> aiohttp.ClientSession:
        """The session of the running event loop."""
        loop = asyncio.get_running_loop()
        if self._session is None or self._session.closed or self._loop is not loop:
            aiohttp, options = self._aiohttp, self._options
            self._loop = loop
            self._calls = asyncio.Semaphore(max(1, options.connections))
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS),
                timeout=aiohttp.ClientTimeout(total=options.timeout, sock_connect=_CONNECT_SECONDS),
                headers={"Authorization": f"Bearer {options.api_key}"} if options.api_key else None,
                read_bufsize=1 << 18,
            )
        return self._session

    def _failed(self, path: str, error: Exception) -> ProviderError:
        """What went wrong with a connection, in one line."""
        where = f"{self.base_url}{path}"
        if isinstance(error, self._aiohttp.ClientConnectorError):
            return ProviderError(f"{where}: no server answers here: {one_line(str(error))}")
        if isinstance(error, TimeoutError):
            return ProviderError(f"{where}: no complete answer within {self._options.timeout:g} s")
        return ProviderError(f"{where}: the connection broke: {one_line(str(error)) or type(error).__name__}")


async def _read_out(response: aiohttp.ClientResponse) -> None:
    """Read what follows the last event for up to a second, so that the connection can be reused."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_READ_OUT_SECONDS):
            async for _ in response.content.iter_any():
                pass


def error_in(text: str, content_type: str) -> str:
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


def _pause(attempt: int, retry_after: str | None) -> float:
    """Seconds until the next attempt: what the server asks for, or doubled each time."""
    try:
        return min(_LONGEST_PAUSE, max(0.0, float(retry_after or "")))
    except ValueError:
        return 0.25 * float(1 << attempt) * random.uniform(0.75, 1.25)
