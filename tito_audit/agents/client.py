"""The client that an agent gets: one of the `openai` package, whose requests the provider of the rollout answers.

Requests stay in this process: a transport of ours takes the place of the connection.
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

_IGNORED_FIELDS = frozenset(
    ("stream", "stream_options", "store", "metadata", "service_tier", "prompt_cache_key", "safety_identifier")
)
"""Fields of a request that do not change what is sampled."""


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """One sampled answer, with the numbers of its turn and its call; a call may have several answers."""

    turn: int
    call: int
    result: GenerationResult


class RecordingProvider:
    """Records each answer of a rollout, fills in its sampling parameters, and limits its length."""

    def __init__(self, provider: TokenProvider, sampling: SamplingParams, max_length: int | None) -> None:
        self.name, self.model = provider.name, provider.model
        self.turn = 0
        self.answers: list[RecordedAnswer] = []
        self.is_full = False
        """Whether a prompt left no room for an answer."""
        self._provider, self._sampling, self._max_length = provider, sampling, max_length

    async def generate_n(self, input_ids: Sequence[int], sampling: SamplingParams) -> tuple[GenerationResult, ...]:
        defaults = self._sampling
        names = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")
        merged = replace(
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
            merged = replace(merged, max_tokens=min(merged.max_tokens or room, room))
        results = await self._provider.generate_n(input_ids, merged)
        self.model = self._provider.model
        call = self.answers[-1].call + 1 if self.answers else 0
        self.answers += [RecordedAnswer(self.turn, call, result) for result in results]
        return results

    async def score(self, ids: Sequence[int], *, start: int = 0, top: int = 0) -> ScoredTokens:
        return await self._provider.score(ids, start=start, top=top)


@dataclass(slots=True, eq=False)
class RunningRollout:
    """A rollout while its agent runs."""

    managed: ManagedServer
    recorder: RecordingProvider
    tools: Sequence[Mapping[str, Any]] = ()
    """The tools of the environment, for calls that name none."""
    request: list[dict[str, Any]] = field(default_factory=list)
    """The messages of the latest call."""
    answer: dict[str, Any] = field(default_factory=dict)
    """The message that answered the latest call of this turn; {} before the first."""
    failure: ProviderError | None = None
    """The error of the latest call that failed, which a client raises as an error of its own."""
    setup_error: SetupError | None = None
    """The error that every call fails with."""
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    thread: int = field(default_factory=threading.get_ident)
    pending: set[Future[Any]] = field(default_factory=set)
    """Requests that a thread is waiting for."""

    async def respond(self, path: str, body: bytes) -> tuple[int, Any]:
        """The status and body of the answer to a request to OpenAI's API; a list of chunks if it streams."""
        sent: dict[str, Any] = json.loads(body or b"{}")
        request = {name: value for name, value in sent.items() if name not in _IGNORED_FIELDS}
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
            self.setup_error = error
            return _refusal(400, error)
        return _refusal(404, f"a rollout's client has chat.completions and completions, not {path}")

    def respond_to_thread(self, path: str, body: bytes) -> tuple[int, Any]:
        """The same as `respond`, for a client in another thread, which waits for the answer."""
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
    """The chunks that stream a whole chat completion."""
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


CURRENT: ContextVar[RunningRollout | None] = ContextVar("rollout", default=None)


def rollout_client(*, sync: bool = False) -> Any:
    """An `openai.AsyncOpenAI` (`sync`: an `openai.OpenAI`) that the provider of the running rollout answers.

    One client serves all rollouts, each in its own task; `model` can be any name. It has `chat.completions` and
    `completions`; a call outside a rollout fails. SetupError without the openai package.
    """
    return open_client(None, sync=sync)


def open_client(running: RunningRollout | None, *, sync: bool) -> Any:
    """A client of this rollout; with None, of the rollout that is running wherever it is called."""
    try:
        import openai
    except ImportError:
        raise SetupError("A rollout's client needs the openai package: pip install 'tito-audit[serve]'") from None
    base = next(each for each in openai.DefaultHttpxClient.__mro__ if each.__module__.split(".")[0] != "openai")
    httpx: Any = sys.modules[base.__module__.split(".")[0]]

    def target() -> RunningRollout:
        current = running or CURRENT.get()
        if current is None:
            raise RuntimeError("this client answers only inside a rollout: call the agent by `rollout(...)`")
        return current

    def response(status: int, value: Any) -> Any:
        if not isinstance(value, list):
            return httpx.Response(status, json=value)
        events = "".join(f"data: {json.dumps(piece)}\n\n" for piece in value) + "data: [DONE]\n\n"
        return httpx.Response(status, headers={"Content-Type": "text/event-stream"}, content=events.encode())

    class AsyncTransport(httpx.AsyncBaseTransport):  # type: ignore[misc]
        async def handle_async_request(self, request: Any) -> Any:
            return response(*await target().respond(request.url.path, await request.aread()))

    class SyncTransport(httpx.BaseTransport):  # type: ignore[misc]
        def handle_request(self, request: Any) -> Any:
            return response(*target().respond_to_thread(request.url.path, request.read()))

    where: Any = {"base_url": "http://rollout/v1", "api_key": "none", "max_retries": 0}
    if sync:
        return openai.OpenAI(**where, http_client=httpx.Client(transport=SyncTransport(), trust_env=False))
    return openai.AsyncOpenAI(**where, http_client=httpx.AsyncClient(transport=AsyncTransport(), trust_env=False))
