"""The gateway's HTTP server: OpenAI's API, sessions, health and metrics."""

from __future__ import annotations

import hmac
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

from tito_audit.provider import count_waits
from tito_audit.serve.answers import chat_answer, chat_stream, text_answer, text_stream
from tito_audit.serve.errors import Refused, error_object
from tito_audit.serve.gateway import Call, Gateway
from tito_audit.serve.request import Asked, chat_asked, text_asked
from tito_audit.serve.rollouts import rollout_of, session_line
from tito_audit.serve.sse import LOGGER, send_stream

GATEWAY: web.AppKey[Gateway] = web.AppKey("gateway", Gateway)
SESSION_HEADER = "X-Session-ID"
_OVERHEAD_HEADER = "X-Tito-Overhead-Ms"
"""Time that the gateway itself added to an answer that is not streamed."""
_OPEN = frozenset(("/health",))
"""Paths that need no key."""
_NAME_LENGTH = 256
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """Options of the HTTP server."""

    api_key: str | None = None
    max_body: int = 64 << 20
    """The longest request body, in bytes."""
    access_log: Callable[[str], None] | None = None
    """Called with a line for each request: method, endpoint, status and time, nothing that a client sent."""


def make_app(gateway: Gateway, options: HttpOptions | None = None) -> web.Application:
    """The application; the caller closes the provider and the log."""
    options = options or HttpOptions()
    app = web.Application(
        client_max_size=options.max_body,
        middlewares=[_observed(gateway, options.access_log), _errors, _with_key(options.api_key)],
    )
    app[GATEWAY] = gateway
    chat = _Completions(chat_asked, chat_answer, chat_stream)
    text = _Completions(text_asked, text_answer, text_stream)
    for prefix in ("", "/s/{session}"):
        app.router.add_post(f"{prefix}/v1/chat/completions", chat.respond)
        app.router.add_post(f"{prefix}/v1/completions", text.respond)
        app.router.add_get(f"{prefix}/v1/models", _models)
    app.router.add_get("/health", _health)
    app.router.add_get("/metrics", _metrics)
    app.router.add_get("/sessions", _sessions)
    app.router.add_get("/sessions/{session}", _session)
    app.router.add_post("/sessions/{session}/close", _close)
    app.router.add_delete("/sessions/{session}", _delete)
    return app


# Completions


@dataclass(frozen=True, slots=True)
class _Completions:
    """One endpoint that samples."""

    asked: Callable[[bytes], Asked]
    answer: Callable[..., dict[str, Any]]
    pieces: Callable[..., Any]

    async def respond(self, request: web.Request) -> web.StreamResponse:
        """The answer to a request."""
        gateway, body = request.app[GATEWAY], await _body(request)
        await gateway.ready()
        began, waits = time.perf_counter(), count_waits()
        asked = self.asked(body)
        _check_model(gateway, asked)
        call = await gateway.begin(asked, _session_id(request))
        headers = _headers(call)
        if asked.stream:
            return await send_stream(request, headers, self.pieces(gateway, call))
        results = await gateway.sample(call)
        response = _json(self.answer(gateway, call, results), headers=headers)
        overhead = time.perf_counter() - began - waits.seconds
        gateway.metrics.overhead.labels(call.prompt.branch).observe(overhead)
        response.headers[_OVERHEAD_HEADER] = f"{overhead * 1000:.2f}"
        return response


async def _body(request: web.Request) -> bytes:
    try:
        return await request.read()
    except web.RequestPayloadError:
        raise Refused(
            "the body cannot be decoded: it does not match its Content-Encoding, or is cut off"
        ) from None


def _check_model(gateway: Gateway, asked: Asked) -> None:
    known = list(dict.fromkeys(name for name in (gateway.model, gateway.provider.model) if name))
    if asked.model is not None and asked.model not in known:
        raise Refused(
            f"The model `{asked.model}` does not exist; this gateway serves {', '.join(known)}.",
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


def _headers(call: Call) -> dict[str, str]:
    """The headers of an answer that name its session."""
    prompt = call.prompt
    said = {SESSION_HEADER: call.session.id, "X-Tito-Branch": str(prompt.branch)}
    return said if prompt.fork is None else {**said, "X-Tito-Fork": str(prompt.fork.reason)}


# Sessions


async def _sessions(request: web.Request) -> web.Response:
    gateway = request.app[GATEWAY]
    return _json({"sessions": [session_line(gateway, one) for one in gateway.conversations]})


async def _session(request: web.Request) -> web.Response:
    gateway = request.app[GATEWAY]
    return _json(rollout_of(gateway, gateway.session(request.match_info["session"])))


async def _close(request: web.Request) -> web.Response:
    gateway = request.app[GATEWAY]
    session = await gateway.close_session(request.match_info["session"], _reward(await _body(request)))
    return _json(rollout_of(gateway, session))


async def _delete(request: web.Request) -> web.Response:
    gateway = request.app[GATEWAY]
    session = gateway.session(request.match_info["session"])
    gateway.conversations.close(session.id)
    return _json({"session_id": session.id, "deleted": True})


def _reward(data: bytes) -> float | None:
    if not data.strip():
        return None
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise Refused(f"the body is not JSON: {error}") from None
    reward = body.get("reward") if isinstance(body, dict) else body
    if reward is not None and (not isinstance(reward, int | float) or isinstance(reward, bool)):
        raise Refused("`reward` is not a number", "reward")
    return None if reward is None else float(reward)


# Middleware


async def _models(request: web.Request) -> web.Response:
    gateway = request.app[GATEWAY]
    with suppress(Refused):  # The name known so far.
        await gateway.ready()
    entry = {"id": gateway.model, "object": "model", "created": 0, "owned_by": "tito-audit"}
    return _json({"object": "list", "data": [entry]})


async def _health(request: web.Request) -> web.Response:
    return _json({"status": "ok", "sessions": len(request.app[GATEWAY].conversations)})


async def _metrics(request: web.Request) -> web.Response:
    gateway = request.app[GATEWAY]
    gateway.metrics.sessions.set(len(gateway.conversations))
    return web.Response(body=gateway.metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4"})


def _with_key(key: str | None) -> Any:
    wanted = None if key is None else f"Bearer {key}".encode()

    @web.middleware
    async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
        if wanted is not None and request.path not in _OPEN:
            given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, wanted):
                raise Refused("the API key is missing or wrong", status=401, code="invalid_api_key")
        return await handler(request)

    return checked


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns every refusal into an OpenAI error object."""
    try:
        return await handler(request)
    except Refused as error:
        body = error_object(str(error), error.status, error.param, error.code)
        return _json(body, status=error.status)
    except web.HTTPRequestEntityTooLarge as error:
        return _json(error_object(f"the body is too large: {error.text}", 413), status=413)
    except web.HTTPException as error:
        said = f"{request.method} {request.path}: {error.reason}"
        return _json(error_object(said, error.status), status=error.status)
    except ConnectionError:
        raise
    except Exception as error:
        LOGGER.exception("this is a bug in tito-audit, not a fault of the request")
        return _json(error_object(f"the gateway failed: {type(error).__name__}", 500), status=500)


def _observed(gateway: Gateway, access_log: Callable[[str], None] | None) -> Any:
    metrics = gateway.metrics

    @web.middleware
    async def observed(request: web.Request, handler: Handler) -> web.StreamResponse:
        started, status = time.perf_counter(), 499
        metrics.in_flight.inc()
        try:
            response = await handler(request)
            status = response.status
            return response
        except Exception:
            status = 500
            raise
        finally:
            seconds = time.perf_counter() - started
            endpoint = _endpoint(request)
            metrics.in_flight.dec()
            metrics.requests.labels(endpoint, status).inc()
            metrics.seconds.labels(endpoint).observe(seconds)
            if access_log is not None:
                access_log(f"{request.method} {endpoint} {status} {seconds * 1000:.1f} ms")

    return observed


def _endpoint(request: web.Request) -> str:
    """The route of a request, without the names in it."""
    resource = request.match_info.route.resource
    return "other" if resource is None else resource.canonical


def _json(value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    data = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    return web.Response(body=data, status=status, headers=headers, content_type="application/json")
