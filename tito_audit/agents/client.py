"""The client that an agent gets: the `openai` package's own, whose requests the rollout's provider answers.

Requests stay in this process: the client has a transport of ours in the place of a connection.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from tito_audit.errors import ProviderError, RenderError, SetupError
from tito_audit.provider import GenerationResult, SamplingParams, ScoredTokens, TokenProvider
from tito_audit.sessions.managed import ManagedServer

_IGNORED = frozenset(
    ("stream", "stream_options", "store", "metadata", "service_tier", "prompt_cache_key", "safety_identifier")
)
"""Fields of a request that change nothing about what is sampled."""


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """One answer, with the turn and the call in which it was sampled."""

    turn: int
    call: int
    """The answers of one call have the same number."""
    result: GenerationResult


class RecordingProvider:
    """A provider that notes each answer of a rollout, and keeps to the limits of the rollout."""

    def __init__(self, provider: TokenProvider, sampling: SamplingParams, max_length: int | None) -> None:
        self.name, self.model = provider.name, provider.model
        self.turn = 0
        self.answers: list[RecordedAnswer] = []
        self.is_full = False
        """Whether a prompt left no room."""
        self._provider, self._sampling, self._max_length = provider, sampling, max_length

    async def generate_n(self, input_ids: Sequence[int], sampling: SamplingParams) -> tuple[GenerationResult, ...]:
        defaults = self._sampling
        names = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")
        how = replace(
            sampling,
            **{name: getattr(defaults, name) for name in names if getattr(sampling, name) is None},
            stop=sampling.stop or defaults.stop,
            stop_token_ids=sampling.stop_token_ids or defaults.stop_token_ids,
            extra={**defaults.extra, **sampling.extra},
        )
        if self._max_length is not None:
            room = self._max_length - len(input_ids)
            if room < 1:
                self.is_full = True
                why = f"the prompt has {len(input_ids)} tokens, and the rollout at most {self._max_length}"
                raise ProviderError(f"{why} (max_length)", status=400)
            how = replace(how, max_tokens=min(how.max_tokens or room, room))
        results = await self._provider.generate_n(input_ids, how)
        self.model = self._provider.model
        call = self.answers[-1].call + 1 if self.answers else 0
        self.answers += [RecordedAnswer(self.turn, call, result) for result in results]
        return results

    async def score(self, ids: Sequence[int], *, start: int = 0, top: int = 0) -> ScoredTokens:
        return await self._provider.score(ids, start=start, top=top)


@dataclass(slots=True, eq=False)
class Running:
    """A rollout while its agent runs."""

    managed: ManagedServer
    recorder: RecordingProvider
    tools: Sequence[Mapping[str, Any]] = ()
    """Those of the environment, for calls that name none."""
    request: list[dict[str, Any]] = field(default_factory=list)
    """The messages of the latest call."""
    answer: dict[str, Any] = field(default_factory=dict)
    """The message that the latest call was answered with; {} before the first."""
    failure: ProviderError | None = None
    """How the latest call that failed did; clients tell it as an error of their own."""
    refused: SetupError | None = None
    """What no call can succeed without."""
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    thread: int = field(default_factory=threading.get_ident)
    pending: set[Future[Any]] = field(default_factory=set)
    """Requests of clients that block a thread."""

    async def respond(self, path: str, body: bytes) -> tuple[int, Any]:
        """Status and object for a request to OpenAI's API; pieces for one that streams."""
        sent: dict[str, Any] = json.loads(body or b"{}")
        request = {name: value for name, value in sent.items() if name not in _IGNORED}
        try:
            if path.endswith("/chat/completions"):
                if self.tools and "tools" not in request:
                    request["tools"] = list(self.tools)
                answer = (await self.managed.chat_completion(**request)).model_dump(mode="json")
                self.request = request["messages"]
                message = answer["choices"][0]["message"]
                self.answer = {name: value for name, value in message.items() if value is not None}
                return 200, list(_chunks(answer)) if sent.get("stream") else answer
            if path.endswith("/completions") and not sent.get("stream"):
                return 200, (await self.managed.completion(**request)).model_dump(mode="json")
        except ProviderError as error:
            self.failure = error
            return _refusal(error.status or 502, error)
        except (ValueError, RenderError) as error:
            return _refusal(400, error)
        except SetupError as error:
            self.refused = error
            return _refusal(400, error)
        return _refusal(404, f"a rollout's client has chat.completions and completions, not {path}")

    def respond_to_thread(self, path: str, body: bytes) -> tuple[int, Any]:
        """The same for a client that blocks its thread."""
        if threading.get_ident() == self.thread:
            raise RuntimeError("an async agent needs the async client: rollout_client(), not sync=True")
        future = asyncio.run_coroutine_threadsafe(self.respond(path, body), self.loop)
        self.pending.add(future)
        try:
            return future.result()
        finally:
            self.pending.discard(future)


def _refusal(status: int, error: object) -> tuple[int, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return status, {"error": {"message": str(error), "type": kind, "param": None, "code": None}}


def _chunks(answer: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A whole chat completion as the chunks of a stream."""
    head = {name: answer[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    for choice in answer["choices"]:
        delta = dict(choice["message"])
        calls = delta.get("tool_calls")
        if calls:
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        yield {**head, "choices": [{"index": choice["index"], "delta": delta, "finish_reason": None}]}
        end = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
        yield {**head, "choices": [end]}
    yield {**head, "choices": [], "usage": answer.get("usage")}


CURRENT: ContextVar[Running | None] = ContextVar("rollout", default=None)


def rollout_client(*, sync: bool = False) -> Any:
    """An `openai.AsyncOpenAI` (`sync`: an `openai.OpenAI`) whose calls the running rollout's provider answers.

    One client serves all rollouts, each in its own task; `model` can be any name. It answers `chat.completions`
    and `completions`; a call outside a rollout fails. SetupError without the openai package.
    """
    return open_client(None, sync=sync)


def open_client(running: Running | None, *, sync: bool) -> Any:
    """A client of one rollout; None: of the one that is running where it is called."""
    try:
        import openai
    except ImportError:
        raise SetupError("A rollout's client needs the openai package: pip install 'tito-audit[serve]'") from None
    base = next(each for each in openai.DefaultHttpxClient.__mro__ if each.__module__.split(".")[0] != "openai")
    http: Any = sys.modules[base.__module__.split(".")[0]]

    def target() -> Running:
        current = running or CURRENT.get()
        if current is None:
            raise RuntimeError("this client answers only inside a rollout: call the agent by `rollout(...)`")
        return current

    def response(status: int, value: Any) -> Any:
        if not isinstance(value, list):
            return http.Response(status, json=value)
        events = "".join(f"data: {json.dumps(piece)}\n\n" for piece in value) + "data: [DONE]\n\n"
        return http.Response(status, headers={"Content-Type": "text/event-stream"}, content=events.encode())

    class AsyncTransport(http.AsyncBaseTransport):  # type: ignore[misc]
        async def handle_async_request(self, request: Any) -> Any:
            return response(*await target().respond(request.url.path, await request.aread()))

    class SyncTransport(http.BaseTransport):  # type: ignore[misc]
        def handle_request(self, request: Any) -> Any:
            return response(*target().respond_to_thread(request.url.path, request.read()))

    where: Any = {"base_url": "http://rollout/v1", "api_key": "none", "max_retries": 0}
    if sync:
        return openai.OpenAI(**where, http_client=http.Client(transport=SyncTransport(), trust_env=False))
    return openai.AsyncOpenAI(**where, http_client=http.AsyncClient(transport=AsyncTransport(), trust_env=False))
