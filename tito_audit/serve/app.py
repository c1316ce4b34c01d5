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
from prometheus_client import generate_latest

from tito_audit.errors import ProviderError, SetupError
from tito_audit.provider import GenerationResult, TokenProvider, count_waits
from tito_audit.serve.errors import Refused, anthropic_error, openai_error
from tito_audit.serve.gateway import Call, Gateway
from tito_audit.serve.messages import MessagesApi
from tito_audit.serve.request import SamplingRequest, parse_chat_request, parse_text_request
from tito_audit.serve.responses import ResponsesApi
from tito_audit.sessions.fit import describe_tokenizer_difference
from tito_audit.sessions.model import Node
from tito_audit.sessions.session import Session
from tito_audit.sessions.shapes import ResponseHead, TokenView
from tito_audit.tokens.tokenizer import Tokenizer

LOGGER = logging.getLogger("tito_audit.serve")
_DONE = b"data: [DONE]\n\n"
_STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


async def send_stream(
    request: web.Request, headers: Mapping[str, str], events: AsyncGenerator[dict[str, Any], None], last: bytes
) -> web.StreamResponse:
    """Send all events, then `last`.

    Headers go out with the first event, so a refusal before it keeps its own status. A later error is sent as the
    last event, in place of `last`.
    """
    async with aclosing(events):
        first = await anext(events)
        response = web.StreamResponse(headers={**_STREAM_HEADERS, **headers})
        await response.prepare(request)
        await response.write(_sse_event(first))
        try:
            async for event in events:
                await response.write(_sse_event(event))
        except ConnectionError:
            raise
        except Exception as error:
            await response.write(_sse_event(_error_response(request, error)[0]))
        else:
            await response.write(last)
        await response.write_eof()
        return response


def _sse_event(event: Mapping[str, Any]) -> bytes:
    name = event.get("type")  # None for a chunk of a completion, which is sent without a name
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + orjson.dumps(event, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n\n"


# Sessions as JSON: a summary of each, and the training rows of its threads.


def session_summary(gateway: Gateway, session: Session) -> dict[str, Any]:
    """A session as `GET /sessions` lists it."""
    state = gateway.state_of(session)
    return {
        "session_id": session.id,
        "answers": len(session.nodes),
        "used": session.used,
        "closed": state.closed,
        "reward": state.reward,
    }


def session_rollout(gateway: Gateway, session: Session) -> dict[str, Any]:
    """The summary of a session with a training row for each thread; each answer is trained in one of the rows."""
    nodes_by_thread: dict[str, list[Node]] = {}
    threads = gateway.state_of(session).threads
    for node in session.nodes:
        nodes_by_thread.setdefault(threads.name_of(node), []).append(node)
    rows: list[dict[str, Any]] = []
    for thread, nodes in nodes_by_thread.items():
        # The last call holds the whole thread, since each prompt starts with the call before it.
        last = nodes[-1]
        ids = last.seen_ids
        mask, logprobs = np.zeros(len(ids), np.int8), np.zeros(len(ids))
        for node in nodes:
            sampled = slice(node.prompt.length, node.prompt.length + len(node.output_ids))
            mask[sampled] = 1
            logprobs[sampled] = node.logprobs
        messages = () if last.prompt.written is None else last.prompt.written.messages
        rows.append(
            {
                "thread_id": thread,
                "call_ids": [node.call_id for node in nodes],
                "token_ids": ids,
                "loss_mask": mask,
                "logprobs": logprobs,
                "messages": [*(message.wire for message in messages), last.message.wire] if messages else None,
                "finish_reason": last.finish_reason,
            }
        )
    return {**session_summary(gateway, session), "rollouts": rows}


# Answers to clients: completions and chat completions, whole or streamed.


def chat_completion(gateway: Gateway, call: Call, results: Sequence[GenerationResult]) -> dict[str, Any]:
    """The body of a chat completion that is not streamed."""
    writer = _logprob_writer(gateway, call)
    choices = [
        {
            "index": index,
            "message": {"refusal": None, **answer.message()},
            "logprobs": writer and writer.chat_logprobs(result),
            "finish_reason": answer.client_finish_reason,
            "stop_reason": result.stop_reason,
            **({"token_ids": result.output_ids} if call.request.returns_token_ids else {}),
        }
        for index, (answer, result) in enumerate(zip(call.answers, results, strict=True))
    ]
    return _head(gateway, call).chat(choices, usage=call.usage, **call.prompt_ids)


def text_completion(gateway: Gateway, call: Call, results: Sequence[GenerationResult]) -> dict[str, Any]:
    """The body of a completion that is not streamed."""
    writer = _logprob_writer(gateway, call)
    choices = [
        {
            "index": index,
            "text": answer.text,
            "logprobs": writer and writer.text_logprobs(result, 0),
            "finish_reason": result.finish_reason,
            "stop_reason": result.stop_reason,
            **call.prompt_ids,
            **({"token_ids": result.output_ids} if call.request.returns_token_ids else {}),
        }
        for index, (answer, result) in enumerate(zip(call.answers, results, strict=True))
    ]
    return _head(gateway, call).text(choices, usage=call.usage)


async def chat_chunks(gateway: Gateway, call: Call) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks of a streamed chat completion; those with the finish reason come once it is in the log."""
    head, request, writer = _head(gateway, call), call.request, _logprob_writer(gateway, call)
    started = False
    async with aclosing(gateway.stream(call)) as pieces:
        async for chunk, deltas in pieces:
            if not started:
                started = True
                for index in range(len(call.answers)):
                    begin = _choice(index, delta={"role": "assistant", "content": ""})
                    yield head.chat_chunk([begin], **call.prompt_ids)
            # Ids and logprobs, if the client wants them, go with the first delta of their chunk.
            columns: dict[str, Any] = {}
            if chunk.output_ids and request.returns_token_ids:
                columns["token_ids"] = chunk.output_ids
            if chunk.output_ids and writer is not None:
                columns["logprobs"] = writer.chat_logprobs(chunk)
            for number, delta in enumerate(deltas or ([{}] if columns else [])):
                yield head.chat_chunk([_choice(chunk.index, delta=delta, **({} if number else columns))])
    for index, answer in enumerate(call.answers):
        ended = _choice(index, delta={}, stop_reason=answer.stop_reason, finish_reason=answer.client_finish_reason)
        yield head.chat_chunk([ended])
    if request.include_usage:
        yield head.chat_chunk([], usage=call.usage)


async def text_chunks(gateway: Gateway, call: Call) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks of a streamed completion; those with the finish reason come once it is in the log."""
    head, request, writer = _head(gateway, call), call.request, _logprob_writer(gateway, call)
    offsets = [0] * len(call.answers)
    begun: set[int] = set()
    async with aclosing(gateway.stream(call)) as pieces:
        async for chunk, deltas in pieces:
            index = chunk.index
            text = "".join(delta.get("content", "") for delta in deltas)
            columns: dict[str, Any] = {"token_ids": chunk.output_ids} if request.returns_token_ids else {}
            if index not in begun:
                columns |= call.prompt_ids
                begun.add(index)
            if writer is not None:
                columns["logprobs"] = writer.text_logprobs(chunk, offsets[index])
            offsets[index] += len(text)
            if text or columns:
                yield head.text([_choice(index, text=text, **columns)])
    for index, answer in enumerate(call.answers):
        ended = _choice(index, text="", stop_reason=answer.stop_reason, finish_reason=answer.finish_reason)
        yield head.text([ended])
    if request.include_usage:
        yield head.text([], usage=call.usage)


def _head(gateway: Gateway, call: Call) -> ResponseHead:
    return ResponseHead(call.call_id, int(call.created), call.request.model or gateway.model)


def _choice(index: int, **fields: Any) -> dict[str, Any]:
    return {"index": index, "logprobs": None, "finish_reason": None, **fields}


def _logprob_writer(gateway: Gateway, call: Call) -> TokenView | None:
    """What writes the logprobs of a call in OpenAI's form; None if its client did not ask for them."""
    request = call.request
    return TokenView(gateway.tokenizer.vocabulary, request.returns_tokens_as_ids) if request.logprobs else None


GATEWAY: web.AppKey[Gateway] = web.AppKey("gateway", Gateway)
SESSION_HEADER = "X-Session-ID"
_MAX_SESSION_NAME = 256
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
    """The routes of a gateway; the caller closes its provider and log."""
    options = options or HttpOptions()
    app = web.Application(client_max_size=options.max_body, middlewares=[_guard])
    app[GATEWAY], app[OPTIONS] = gateway, options
    messages = MessagesApi(options.api_key)
    responses = ResponsesApi()
    chat = partial(_respond, parse_chat_request, chat_completion, chat_chunks, _DONE)
    text = partial(_respond, parse_text_request, text_completion, text_chunks, _DONE)
    message = partial(_respond, messages.parse, messages.answer, messages.stream, b"")
    response = partial(_respond, responses.parse, responses.answer, responses.stream, b"")

    async def count_tokens(request: web.Request) -> web.Response:
        body = await _read_body(request)
        await gateway.check_ready()
        parsed = messages.parse(body, counts=True)
        _check_model(gateway, parsed)
        return _json_response({"input_tokens": await gateway.count_prompt_tokens(parsed, _session_id(request))})

    for prefix in ("", "/s/{session}"):
        app.router.add_post(f"{prefix}/v1/chat/completions", chat)
        app.router.add_post(f"{prefix}/v1/completions", text)
        app.router.add_post(f"{prefix}/v1/responses", response)
        app.router.add_get(f"{prefix}/v1/responses/{{response}}", _as_endpoint(responses.retrieve))
        app.router.add_delete(f"{prefix}/v1/responses/{{response}}", _as_endpoint(responses.delete))
        app.router.add_get(f"{prefix}/v1/responses/{{response}}/input_items", _as_endpoint(responses.input_items))
        app.router.add_post(f"{prefix}/v1/messages", message)
        app.router.add_post(f"{prefix}/v1/messages/count_tokens", count_tokens)
    app.add_routes(_ROUTES)
    return app


async def _respond(
    parse: Callable[[bytes], SamplingRequest],
    answer: Callable[..., dict[str, Any]],
    stream: Callable[..., Any],
    last: bytes,
    request: web.Request,
) -> web.StreamResponse:
    """Sample for one request, and send the answer in the form of its API; a stream ends with `last`."""
    gateway, body = request.app[GATEWAY], await _read_body(request)
    await gateway.check_ready()
    began, waits = time.perf_counter(), count_waits()
    parsed = parse(body)
    _check_model(gateway, parsed)
    call = await gateway.begin_call(parsed, _session_id(request) or parsed.session_id)
    branch, fork = call.prompt.branch, call.prompt.fork
    headers = {SESSION_HEADER: call.session.id, "X-Tito-Branch": str(branch), "request-id": call.call_id}
    if fork is not None:
        headers["X-Tito-Fork"] = str(fork.reason)
    if parsed.stream:
        return await send_stream(request, headers, stream(gateway, call), last)
    results = await gateway.sample(call)
    response = _json_response(answer(gateway, call, results), headers=headers)
    overhead = time.perf_counter() - began - waits.seconds
    gateway.metrics.overhead.labels(branch).observe(overhead)
    response.headers["X-Tito-Overhead-Ms"] = f"{overhead * 1000:.2f}"
    return response


def _as_endpoint(answer: Callable[[web.Request], Mapping[str, Any]]) -> Handler:
    """A handler that sends the object that `answer` returns."""

    async def respond(request: web.Request) -> web.Response:
        return _json_response(answer(request))

    return respond


async def _read_body(request: web.Request) -> bytes:
    try:
        return await request.read()
    except web.RequestPayloadError:
        raise Refused(
            "the body cannot be decoded: it does not match its Content-Encoding, or is cut off"
        ) from None


def _check_model(gateway: Gateway, parsed: SamplingRequest) -> None:
    names = list(dict.fromkeys(name for name in (gateway.model, gateway.provider.model) if name))
    if parsed.model is not None and parsed.model not in names:
        raise Refused(
            f"The model `{parsed.model}` does not exist; this gateway serves {', '.join(names)}.",
            "model",
            status=404,
            code="model_not_found",
        )


def _session_id(request: web.Request) -> str | None:
    """The session that a request names in its path or its header; None if it names none."""
    named = request.match_info.get("session") or request.headers.get(SESSION_HEADER) or None
    if named is not None and (len(named) > _MAX_SESSION_NAME or not named.isprintable()):
        raise Refused(f"a session's name has at most {_MAX_SESSION_NAME} characters, all printable")
    return named


# Sessions


@_ROUTES.get("/sessions")
async def _list_sessions(request: web.Request) -> web.Response:
    gateway = request.app[GATEWAY]
    return _json_response({"sessions": [session_summary(gateway, session) for session in gateway.conversations]})


@_ROUTES.get("/sessions/{session}")
async def _show_session(request: web.Request) -> web.Response:
    gateway = request.app[GATEWAY]
    return _json_response(session_rollout(gateway, gateway.find_session(request.match_info["session"])))


@_ROUTES.post("/sessions/{session}/close")
async def _close_session(request: web.Request) -> web.Response:
    gateway, data = request.app[GATEWAY], await _read_body(request)
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
    return _json_response(session_rollout(gateway, session))


@_ROUTES.delete("/sessions/{session}")
async def _delete_session(request: web.Request) -> web.Response:
    gateway = request.app[GATEWAY]
    session = gateway.find_session(request.match_info["session"])
    gateway.conversations.close(session.id)
    return _json_response({"session_id": session.id, "deleted": True})


@_ROUTES.get("/v1/models")
@_ROUTES.get("/s/{session}/v1/models")
async def _list_models(request: web.Request) -> web.Response:
    gateway = request.app[GATEWAY]
    with suppress(Refused):  # The name known so far.
        await gateway.check_ready()
    entry = {"id": gateway.model, "object": "model", "created": 0, "owned_by": "tito-audit"}
    return _json_response({"object": "list", "data": [entry]})


@_ROUTES.get("/health")
async def _health(request: web.Request) -> web.Response:
    return _json_response({"status": "ok", "sessions": len(request.app[GATEWAY].conversations)})


@_ROUTES.get("/metrics")
async def _metrics(request: web.Request) -> web.Response:
    gateway = request.app[GATEWAY]
    gateway.metrics.sessions.set(len(gateway.conversations))
    text = generate_latest(gateway.metrics.registry)
    return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4"})


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer only requests that have the key; write errors in the form of the API that was called; count both."""
    metrics, options = request.app[GATEWAY].metrics, request.app[OPTIONS]
    started, status = time.perf_counter(), 499
    metrics.in_flight.inc()
    try:
        try:
            if options.api_key is not None and request.path != "/health":
                # Anthropic's clients send the key in a header of its own.
                keys = request.headers.get("Authorization", ""), f"Bearer {request.headers.get('x-api-key', '')}"
                wanted = f"Bearer {options.api_key}".encode()
                if not any(hmac.compare_digest(key.encode("utf-8", "surrogateescape"), wanted) for key in keys):
                    raise Refused("the API key is missing or wrong", status=401, code="invalid_api_key")
            response = await handler(request)
        except ConnectionError:
            status = 500
            raise
        except Exception as error:
            response = _json_response(*_error_response(request, error))
        status = response.status
        return response
    finally:
        seconds = time.perf_counter() - started
        # The pattern of the route, so that no name of a session becomes a label.
        resource = request.match_info.route.resource
        endpoint = "other" if resource is None else resource.canonical
        metrics.in_flight.dec()
        metrics.requests.labels(endpoint, status).inc()
        metrics.seconds.labels(endpoint).observe(seconds)
        if options.access_log is not None:
            options.access_log(f"{request.method} {endpoint} {status} {seconds * 1000:.1f} ms")


def _error_response(request: web.Request, error: Exception) -> tuple[dict[str, Any], int]:
    """The body of an error in the form of the API that was called, and its status."""
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
    body = anthropic_error if "/v1/messages" in request.path else openai_error
    return body(message, status, *details), status


def _json_response(value: Any, status: int = 200, *, headers: dict[str, str] | None = None) -> web.Response:
    data = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    return web.Response(body=data, status=status, headers=headers, content_type="application/json")


# The server, until it is told to stop.

_HTTP_LOG = logging.getLogger("aiohttp.server")
_SWEEP_SECONDS = 30.0
"""The longest pause between two searches for idle sessions."""


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
    """Serve until SIGTERM or SIGINT; `started` is called with the address. SetupError if the port is in use.

    Running calls have `grace` seconds to finish and are then cut off. Closes the provider and the log.
    """
    stop = asyncio.Event()
    _HTTP_LOG.addFilter(_is_gateway_error)
    runner = web.AppRunner(
        make_app(gateway, http), handler_cancellation=True, shutdown_timeout=options.grace, access_log=None
    )
    await runner.setup()

    async def sweep() -> None:
        while True:
            await asyncio.sleep(min(_SWEEP_SECONDS, max(options.idle / 2, 0.05)))
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
        _HTTP_LOG.removeFilter(_is_gateway_error)
        await gateway.provider.close()
        gateway.log.close()


async def check_fit(provider: TokenProvider, tokenizer: Tokenizer) -> tuple[str | None, str | None]:
    """Why the server's tokenizer does not fit, and a notice that it could not be compared; None, None if it fits.

    Afterwards the provider knows the name of its model, if its server answers.
    """
    find_model = getattr(provider, "find_model", None)
    try:
        if find_model is not None:
            await find_model()
        return await describe_tokenizer_difference(provider, tokenizer), None
    except ProviderError as error:
        return None, f"the server's tokenizer was not compared: {error}"


def _is_gateway_error(record: logging.LogRecord) -> bool:
    """False for errors that a client caused: a bad request, or a connection that it closed."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError | ConnectionError)
