"""The gateway's HTTP server: OpenAI's and Anthropic's APIs, sessions, health and metrics."""

from __future__ import annotations

import asyncio
import gc
import hmac
import logging
import signal
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import orjson
from aiohttp import web
from aiohttp.http import HttpProcessingError

from tito_audit.errors import ProviderError, SetupError
from tito_audit.provider import GenerationResult, TokenProvider, count_waits
from tito_audit.serve.errors import Refused, anthropic_error, error_object
from tito_audit.serve.gateway import Call, Gateway
from tito_audit.serve.messages import Messages
from tito_audit.serve.request import Asked, chat_asked, text_asked
from tito_audit.serve.responses import Responses
from tito_audit.sessions.fit import find_misfit
from tito_audit.sessions.model import Node
from tito_audit.sessions.session import Session
from tito_audit.sessions.shapes import ResponseHead, TokenView, usage
from tito_audit.tokens.tokenizer import Tokenizer

# Streamed answers, as server-sent events.

LOGGER = logging.getLogger("tito_audit.serve")
_DONE = b"data: [DONE]\n\n"
_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


async def send_stream(
    request: web.Request, headers: Mapping[str, str], pieces: AsyncGenerator[dict[str, Any], None], last: bytes
) -> web.StreamResponse:
    """Sends all pieces; the response.

    Headers are sent with the first piece, so that an earlier refusal has its own status; a later one is the last
    event, without `last`.
    """
    async with aclosing(pieces):
        first = await anext(pieces)
        response = web.StreamResponse(headers={**_HEADERS, **headers})
        await response.prepare(request)
        await response.write(_event(first))
        try:
            async for piece in pieces:
                await response.write(_event(piece))
        except ConnectionError:
            raise
        except Exception as error:
            await response.write(_event(_error(request, error)[0]))
        else:
            await response.write(last)
        await response.write_eof()
        return response


def _event(piece: Any) -> bytes:
    name = piece.get("type")  # Chunks of completions have no type, and events no name.
    return (
        (b"" if name is None else f"event: {name}\n".encode())
        + b"data: "
        + orjson.dumps(piece, option=orjson.OPT_SERIALIZE_NUMPY)
        + b"\n\n"
    )


# Sessions as JSON: a summary of each, and the training rows of its threads.


def session_line(gateway: Gateway, session: Session) -> dict[str, Any]:
    """The summary of a session."""
    facts = gateway.facts_of(session)
    return {
        "session_id": session.id,
        "answers": len(session.nodes),
        "used": session.used,
        "closed": facts.closed,
        "reward": facts.reward,
    }


def rollout_of(gateway: Gateway, session: Session) -> dict[str, Any]:
    """A session with a training row for each of its threads; each answer is trained in one of them."""
    threads: dict[str, list[Node]] = {}
    of = gateway.facts_of(session).threads
    for node in session.nodes:
        threads.setdefault(of.of(node), []).append(node)
    rows: list[dict[str, Any]] = []
    for thread, nodes in threads.items():
        # The last call holds the whole thread, since each prompt starts with the call before it.
        last = nodes[-1]
        ids = last.seen_ids
        mask, logprobs = np.zeros(len(ids), np.int8), np.zeros(len(ids))
        for node in nodes:
            start = node.prompt.length
            mask[start : start + len(node.output_ids)] = 1
            logprobs[start : start + len(node.output_ids)] = node.logprobs
        messages = () if last.prompt.written is None else last.prompt.written.messages
        row = {
            "thread_id": thread,
            "call_ids": [node.call_id for node in nodes],
            "token_ids": ids,
            "loss_mask": mask,
            "logprobs": logprobs,
            "messages": [*(message.wire for message in messages), last.message.wire] if messages else None,
            "finish_reason": last.finish_reason,
        }
        rows.append(row)
    return {**session_line(gateway, session), "rollouts": rows}


# Answers to clients: completions and chat completions, whole or streamed.


def chat_answer(gateway: Gateway, call: Call, results: Sequence[GenerationResult]) -> dict[str, Any]:
    """A whole chat completion."""
    choices, tokens = [], _tokens(gateway, call)
    for index, (answer, result) in enumerate(zip(call.answers, results, strict=True)):
        choice = {
            "index": index,
            "message": {"refusal": None, **answer.message()},
            "logprobs": tokens and tokens.chat_logprobs(result),
            "finish_reason": answer.why(),
            "stop_reason": result.stop_reason,
        }
        choices.append({**choice, "token_ids": result.output_ids} if call.fields.token_ids else choice)
    return _head(gateway, call).chat(choices, usage=usage(len(call.ids), call.sampled), **call.prompt_wire)


def text_answer(gateway: Gateway, call: Call, results: Sequence[GenerationResult]) -> dict[str, Any]:
    """A whole completion."""
    choices, tokens = [], _tokens(gateway, call)
    for index, (answer, result) in enumerate(zip(call.answers, results, strict=True)):
        choice = {
            "index": index,
            "text": answer.text,
            "logprobs": tokens and tokens.text_logprobs(result, 0),
            "finish_reason": result.finish_reason,
            "stop_reason": result.stop_reason,
            **call.prompt_wire,
        }
        choices.append({**choice, "token_ids": result.output_ids} if call.fields.token_ids else choice)
    return _head(gateway, call).text(choices, usage=usage(len(call.ids), call.sampled))


async def chat_stream(gateway: Gateway, call: Call) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks of a streamed chat completion. The last ones are sent once it is in the log."""
    head, fields, tokens = _head(gateway, call), call.fields, _tokens(gateway, call)
    started = False
    async with aclosing(gateway.stream(call)) as pieces:
        async for chunk, deltas in pieces:
            if not started:
                started = True
                for index in range(len(call.answers)):
                    begin = _choice(index, delta={"role": "assistant", "content": ""})
                    yield head.chat_chunk([begin], **call.prompt_wire)
            # The tokens, if the client asked for them, are sent once, with the first of their deltas.
            shown: dict[str, Any] = {}
            if chunk.output_ids and fields.token_ids:
                shown["token_ids"] = chunk.output_ids
            if chunk.output_ids and tokens is not None:
                shown["logprobs"] = tokens.chat_logprobs(chunk)
            for number, delta in enumerate(deltas or ([{}] if shown else [])):
                yield head.chat_chunk([_choice(chunk.index, delta=delta, **({} if number else shown))])
    for index, answer in enumerate(call.answers):
        ended = _choice(index, delta={}, stop_reason=answer.stop_reason, finish_reason=answer.why())
        yield head.chat_chunk([ended])
    if fields.include_usage:
        yield head.chat_chunk([], usage=usage(len(call.ids), call.sampled))


async def text_stream(gateway: Gateway, call: Call) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks of a streamed completion. The last ones are sent once it is in the log."""
    head, fields, tokens = _head(gateway, call), call.fields, _tokens(gateway, call)
    offsets = [0] * len(call.answers)
    begun: set[int] = set()
    async with aclosing(gateway.stream(call)) as pieces:
        async for chunk, deltas in pieces:
            index = chunk.index
            text = "".join(delta.get("content", "") for delta in deltas)
            more: dict[str, Any] = {"token_ids": chunk.output_ids} if fields.token_ids else {}
            if index not in begun:
                more |= call.prompt_wire
                begun.add(index)
            if tokens is not None:
                more["logprobs"] = tokens.text_logprobs(chunk, offsets[index])
            offsets[index] += len(text)
            if text or more:
                yield head.text([_choice(index, text=text, **more)])
    for index, answer in enumerate(call.answers):
        ended = _choice(index, text="", stop_reason=answer.stop_reason, finish_reason=answer.finish_reason)
        yield head.text([ended])
    if fields.include_usage:
        yield head.text([], usage=usage(len(call.ids), call.sampled))


def _head(gateway: Gateway, call: Call) -> ResponseHead:
    return ResponseHead(call.call_id, int(call.created), call.fields.model or gateway.model)


def _choice(index: int, **fields: Any) -> dict[str, Any]:
    return {"index": index, "logprobs": None, "finish_reason": None, **fields}


def _tokens(gateway: Gateway, call: Call) -> TokenView | None:
    """What shows the tokens of a call, if its client asked for logprobs."""
    return TokenView(gateway.tokenizer.vocabulary, call.fields.tokens_as_ids) if call.fields.logprobs else None


GATEWAY: web.AppKey[Gateway] = web.AppKey("gateway", Gateway)
SESSION_HEADER = "X-Session-ID"
_NAME_LENGTH = 256
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_ROUTES = web.RouteTableDef()


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """Options of the HTTP server."""

    api_key: str | None = None
    max_body: int = 64 << 20
    """The longest request body, in bytes."""
    access_log: Callable[[str], None] | None = None
    """Called with a line for each request: method, endpoint, status and time, nothing that a client sent."""


OPTIONS: web.AppKey[HttpOptions] = web.AppKey("options", HttpOptions)


def make_app(gateway: Gateway, options: HttpOptions | None = None) -> web.Application:
    """The application; the caller closes the provider and the log."""
    options = options or HttpOptions()
    app = web.Application(client_max_size=options.max_body, middlewares=[_guarded])
    app[GATEWAY], app[OPTIONS] = gateway, options
    messages = Messages(options.api_key)
    responses = Responses()
    chat = partial(_respond, chat_asked, chat_answer, chat_stream, _DONE)
    text = partial(_respond, text_asked, text_answer, text_stream, _DONE)
    message = partial(_respond, messages.request, messages.answer, messages.stream, b"")
    response = partial(_respond, responses.read_fields, responses.answer, responses.stream, b"")
    for prefix in ("", "/s/{session}"):
        app.router.add_post(f"{prefix}/v1/chat/completions", chat)
        app.router.add_post(f"{prefix}/v1/completions", text)
        app.router.add_post(f"{prefix}/v1/responses", response)
        app.router.add_get(f"{prefix}/v1/responses/{{response}}", _object(responses.retrieve))
        app.router.add_delete(f"{prefix}/v1/responses/{{response}}", _object(responses.delete))
        app.router.add_get(f"{prefix}/v1/responses/{{response}}/input_items", _object(responses.input_items))
        app.router.add_post(f"{prefix}/v1/messages", message)
        app.router.add_post(f"{prefix}/v1/messages/count_tokens", partial(_count_tokens, messages))
    app.add_routes(_ROUTES)
    return app


async def _respond(
    read_fields: Callable[[bytes], Asked],
    answer: Callable[..., dict[str, Any]],
    pieces: Callable[..., Any],
    last: bytes,
    request: web.Request,
) -> web.StreamResponse:
    """The answer of an endpoint that samples; a stream ends with `last`."""
    gateway, body = request.app[GATEWAY], await _body(request)
    await gateway.ready()
    began, waits = time.perf_counter(), count_waits()
    fields = read_fields(body)
    _check_model(gateway, fields)
    call = await gateway.begin(fields, _session_id(request) or fields.session_id)
    branch, fork = call.prompt.branch, call.prompt.fork
    headers = {SESSION_HEADER: call.session.id, "X-Tito-Branch": str(branch), "request-id": call.call_id}
    if fork is not None:
        headers["X-Tito-Fork"] = str(fork.reason)
    if fields.stream:
        return await send_stream(request, headers, pieces(gateway, call), last)
    results = await gateway.sample(call)
    response = _json(answer(gateway, call, results), headers=headers)
    overhead = time.perf_counter() - began - waits.seconds
    gateway.metrics.overhead.labels(branch).observe(overhead)
    response.headers["X-Tito-Overhead-Ms"] = f"{overhead * 1000:.2f}"
    return response


def _object(answer: Callable[[web.Request], Mapping[str, Any]]) -> Handler:
    """An endpoint that answers with an object."""

    async def respond(request: web.Request) -> web.Response:
        return _json(answer(request))

    return respond


async def _body(request: web.Request) -> bytes:
    try:
        return await request.read()
    except web.RequestPayloadError:
        raise Refused(
            "the body cannot be decoded: it does not match its Content-Encoding, or is cut off"
        ) from None


async def _count_tokens(messages: Messages, request: web.Request) -> web.Response:
    gateway, body = request.app[GATEWAY], await _body(request)
    await gateway.ready()
    fields = messages.count_request(body)
    _check_model(gateway, fields)
    return _json({"input_tokens": await gateway.prompt_length(fields, _session_id(request))})


def _check_model(gateway: Gateway, fields: Asked) -> None:
    names = list(dict.fromkeys(name for name in (gateway.model, gateway.provider.model) if name))
    if fields.model is not None and fields.model not in names:
        raise Refused(
            f"The model `{fields.model}` does not exist; this gateway serves {', '.join(names)}.",
            "model",
            status=404,
            code="model_not_found",
        )


def _session_id(request: web.Request) -> str | None:
    """The session that a request names, in its path or its header."""
    named = request.match_info.get("session") or request.headers.get(SESSION_HEADER) or None
    if named is not None and (len(named) > _NAME_LENGTH or not named.isprintable()):
        raise Refused(f"a session's name has at most {_NAME_LENGTH} characters, all printable")
    return named


# Sessions


@_ROUTES.get("/sessions")
async def _sessions(request: web.Request) -> web.Response:
    gateway = request.app[GATEWAY]
    return _json({"sessions": [session_line(gateway, session) for session in gateway.conversations]})


@_ROUTES.get("/sessions/{session}")
async def _session(request: web.Request) -> web.Response:
    gateway = request.app[GATEWAY]
    return _json(rollout_of(gateway, gateway.session(request.match_info["session"])))


@_ROUTES.post("/sessions/{session}/close")
async def _close(request: web.Request) -> web.Response:
    gateway, data = request.app[GATEWAY], await _body(request)
    reward = None
    if data.strip():
        try:
            body = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise Refused(f"the body is not JSON: {error}") from None
        reward = body.get("reward") if isinstance(body, dict) else body
        if reward is not None and (not isinstance(reward, int | float) or isinstance(reward, bool)):
            raise Refused("`reward` is not a number", "reward")
    session = await gateway.close_session(request.match_info["session"], None if reward is None else float(reward))
    return _json(rollout_of(gateway, session))


@_ROUTES.delete("/sessions/{session}")
async def _delete(request: web.Request) -> web.Response:
    gateway = request.app[GATEWAY]
    session = gateway.session(request.match_info["session"])
    gateway.conversations.close(session.id)
    return _json({"session_id": session.id, "deleted": True})


@_ROUTES.get("/v1/models")
@_ROUTES.get("/s/{session}/v1/models")
async def _models(request: web.Request) -> web.Response:
    gateway = request.app[GATEWAY]
    with suppress(Refused):  # The name known so far.
        await gateway.ready()
    entry = {"id": gateway.model, "object": "model", "created": 0, "owned_by": "tito-audit"}
    return _json({"object": "list", "data": [entry]})


@_ROUTES.get("/health")
async def _health(request: web.Request) -> web.Response:
    return _json({"status": "ok", "sessions": len(request.app[GATEWAY].conversations)})


@_ROUTES.get("/metrics")
async def _metrics(request: web.Request) -> web.Response:
    gateway = request.app[GATEWAY]
    gateway.metrics.sessions.set(len(gateway.conversations))
    return web.Response(body=gateway.metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4"})


@web.middleware
async def _guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The answer to a request that has the key, or an error object of the API that was called; counted."""
    metrics, options = request.app[GATEWAY].metrics, request.app[OPTIONS]
    started, status = time.perf_counter(), 499
    metrics.in_flight.inc()
    try:
        try:
            if options.api_key is not None and request.path != "/health":
                # Anthropic's clients send the key in a header of its own.
                sent = request.headers.get("Authorization", ""), f"Bearer {request.headers.get('x-api-key', '')}"
                key = f"Bearer {options.api_key}".encode()
                if not any(hmac.compare_digest(text.encode("utf-8", "surrogateescape"), key) for text in sent):
                    raise Refused("the API key is missing or wrong", status=401, code="invalid_api_key")
            response = await handler(request)
        except ConnectionError:
            status = 500
            raise
        except Exception as error:
            response = _json(*_error(request, error))
        status = response.status
        return response
    finally:
        seconds = time.perf_counter() - started
        # The route of a request, without the names in it.
        resource = request.match_info.route.resource
        endpoint = "other" if resource is None else resource.canonical
        metrics.in_flight.dec()
        metrics.requests.labels(endpoint, status).inc()
        metrics.seconds.labels(endpoint).observe(seconds)
        if options.access_log is not None:
            options.access_log(f"{request.method} {endpoint} {status} {seconds * 1000:.1f} ms")


def _error(request: web.Request, error: Exception) -> tuple[dict[str, Any], int]:
    """The error object of the API that was called, and its status."""
    details: tuple[str | None, ...] = ()
    if isinstance(error, Refused):
        message, status, details = str(error), error.status, (error.param, error.code)
    elif isinstance(error, web.HTTPRequestEntityTooLarge):
        message, status = f"the body is too large: {error.text}", 413
    elif isinstance(error, web.HTTPException):
        message, status = f"{request.method} {request.path}: {error.reason}", error.status
    else:
        LOGGER.error("this is a bug in tito-audit, not a fault of the request", exc_info=error)
        message, status = f"the gateway failed: {type(error).__name__}", 500
    shape = anthropic_error if "/v1/messages" in request.path else error_object
    return shape(message, status, *details), status


def _json(value: Any, status: int = 200, *, headers: dict[str, str] | None = None) -> web.Response:
    data = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    return web.Response(body=data, status=status, headers=headers, content_type="application/json")


# The server, until it is told to stop.

_HTTP_LOG = logging.getLogger("aiohttp.server")
_SWEEPS = 30.0
"""The longest time between searches for idle sessions, in seconds."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The server's address, and how it shuts down."""

    host: str = "127.0.0.1"
    port: int = 8377
    """0: any free one."""
    idle: float = 3600.0
    """Seconds after which an unused session leaves memory."""
    grace: float = 10.0
    """Seconds that running calls have to finish when the server shuts down."""


async def serve(
    gateway: Gateway, http: HttpOptions, options: ServerOptions, started: Callable[[str], None]
) -> None:
    """Serve until SIGTERM or SIGINT; `started` gets the address. SetupError if it is in use.

    Running calls have `grace` seconds to finish and are then cut off; the log and the provider are closed.
    """
    stop = asyncio.Event()
    _HTTP_LOG.addFilter(_is_ours)
    runner = web.AppRunner(
        make_app(gateway, http), handler_cancellation=True, shutdown_timeout=options.grace, access_log=None
    )
    await runner.setup()

    async def sweep() -> None:
        while True:
            await asyncio.sleep(min(_SWEEPS, max(options.idle / 2, 0.05)))
            gateway.conversations.drop_idle(gateway.clock() - options.idle)

    sweeping = asyncio.ensure_future(sweep())
    try:
        try:
            await web.TCPSite(runner, options.host, options.port, backlog=1024).start()
        except OSError as error:
            raise SetupError(
                f"--port {options.port}: {options.host}:{options.port} cannot be used ({error.strerror}).\n"
                "Choose another port, or 0 for any free one."
            ) from None
        host = f"[{options.host}]" if ":" in options.host else options.host
        started(f"http://{host}:{runner.addresses[0][1]}")
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with suppress(NotImplementedError, RuntimeError):
                loop.add_signal_handler(number, stop.set)
        gc.collect()
        gc.freeze()  # Everything loaded by now stays for good: keep the garbage collector off it.
        await stop.wait()
    finally:
        sweeping.cancel()
        await runner.cleanup()
        _HTTP_LOG.removeFilter(_is_ours)
        await gateway.provider.close()
        gateway.log.close()


async def fit_notice(provider: TokenProvider, tokenizer: Tokenizer) -> tuple[str | None, str | None]:
    """Why the gateway must not serve, and a notice for the user; at least one of them is None.

    The provider knows the name of its model afterwards, if its server answers.
    """
    find = getattr(provider, "find_model", None)
    try:
        if find is not None:
            await find()
        return await find_misfit(provider, tokenizer), None
    except ProviderError as error:
        return None, f"the server's tokenizer was not compared: {error}"


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether this is an error of the gateway: not a bad request, and not a client that left."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError | ConnectionError)
