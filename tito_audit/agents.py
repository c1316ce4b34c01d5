"""An agent and an environment, run to a training sample that the audit has checked.

The agent is not changed: it gets messages, asks a model by an `openai` client, and returns text. The client answers
from the rollout's provider, in this process. Environments keep the shapes they have elsewhere: `reset` and `step` of
Gymnasium (also rLLM, OpenEnv), `init` and `step` of SkyRL (skyrl-gym `envs/base_text_env.py`: BaseTextEnv), `reset`,
tools and `get_reward` of TRL (`trainer/grpo_trainer.py`: environment_factory), or a function that scores a text.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import threading
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from tito_audit.errors import ProviderError, RenderError, SetupError
from tito_audit.parser import Reads
from tito_audit.parsers import guess_parser
from tito_audit.provider import (
    GenerationResult,
    ProviderOptions,
    SamplingParams,
    ScoredTokens,
    TokenProvider,
)
from tito_audit.providers import key_of, open_provider
from tito_audit.record.build import training_row
from tito_audit.record.message import as_messages
from tito_audit.record.rollout import Place, Rollout, Turn
from tito_audit.render.renderer import Renderer, make_renderer
from tito_audit.repairs import all_repairs
from tito_audit.rules import all_rules
from tito_audit.run.auditor import Auditor, audit_rollout, selected_codes
from tito_audit.sessions.fit import find_tokenizer
from tito_audit.sessions.managed import ManagedServer, SequenceNode
from tito_audit.sessions.sample import Sample, SampledTurn, SampleStatus
from tito_audit.settings.model import Settings
from tito_audit.tokens.load import load_tokenizer
from tito_audit.tokens.tokenizer import Tokenizer

Messages: TypeAlias = list[dict[str, Any]]
_NAMED = inspect.Parameter.POSITIONAL_OR_KEYWORD
_IGNORED = frozenset(
    ("stream", "stream_options", "store", "metadata", "service_tier", "prompt_cache_key", "safety_identifier")
)
"""Fields of a request that change nothing about what is sampled."""
_LOADED: dict[str, Tokenizer] = {}
_FOUND: WeakKeyDictionary[Any, Tokenizer] = WeakKeyDictionary()
"""The tokenizer of each provider whose server stated it."""


# What the provider samples, as it samples it


@dataclass(frozen=True, slots=True)
class _Sampled:
    """One answer, with the turn and the call in which it was sampled."""

    turn: int
    call: int
    """The answers of one call have the same number."""
    result: GenerationResult


class _Recorder:
    """A provider that notes each answer of a rollout, and keeps to the limits of the rollout."""

    def __init__(self, provider: TokenProvider, sampling: SamplingParams, max_length: int | None) -> None:
        self.name, self.model = provider.name, provider.model
        self.turn = 0
        self.answers: list[_Sampled] = []
        self.is_full = False
        """Whether a prompt left no room."""
        self._provider, self._sampling, self._max_length = provider, sampling, max_length

    async def generate_n(self, input_ids: Sequence[int], sampling: SamplingParams) -> tuple[GenerationResult, ...]:
        """The provider's answers, no longer than the rollout may be."""
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
        self.answers += [_Sampled(self.turn, call, result) for result in results]
        return results

    async def score(self, ids: Sequence[int], *, start: int = 0, top: int = 0) -> ScoredTokens:
        """The provider's scores."""
        return await self._provider.score(ids, start=start, top=top)


# The client that an agent gets: the `openai` package's own, whose requests stay in this process


@dataclass(slots=True, eq=False)
class _Running:
    """A rollout while its agent runs."""

    managed: ManagedServer
    recorder: _Recorder
    tools: Sequence[Mapping[str, Any]] = ()
    """Those of the environment, for calls that name none."""
    asked: Messages = field(default_factory=list)
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
                self.asked = request["messages"]
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


_CURRENT: ContextVar[_Running | None] = ContextVar("rollout", default=None)


def rollout_client(*, sync: bool = False) -> Any:
    """An `openai.AsyncOpenAI` (`sync`: an `openai.OpenAI`) whose calls the running rollout's provider answers.

    One client serves all rollouts, each in its own task; `model` can be any name. It answers `chat.completions` and
    `completions`; a call outside a rollout fails. SetupError without the openai package.
    """
    return _client(None, sync=sync)


def _client(running: _Running | None, *, sync: bool) -> Any:
    try:
        import openai
    except ImportError:
        raise SetupError("A rollout's client needs the openai package: pip install 'tito-audit[serve]'") from None
    base = next(each for each in openai.DefaultHttpxClient.__mro__ if each.__module__.split(".")[0] != "openai")
    http: Any = sys.modules[base.__module__.split(".")[0]]

    def target() -> _Running:
        current = running or _CURRENT.get()
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

    where = {"base_url": "http://rollout/v1", "api_key": "none", "max_retries": 0}
    if sync:
        return openai.OpenAI(**where, http_client=http.Client(transport=SyncTransport(), trust_env=False))
    return openai.AsyncOpenAI(**where, http_client=http.AsyncClient(transport=AsyncTransport(), trust_env=False))


# What environments return


@dataclass(frozen=True, slots=True)
class _Step:
    """What an environment says to an agent's text."""

    messages: Messages = field(default_factory=list)
    reward: float = 0.0
    done: bool = False
    truncated: bool = False
    action: str | None = None
    """The agent's text as the environment wants it in the history; None: as it is."""


def _as_step(value: Any) -> _Step:
    """What `step` returned, in any of the usual shapes; ValueError for another.

    A number is the reward of a text that ends the rollout. A text or messages are an observation. A tuple is
    `(observation, reward, done)`, with `info`, or with `terminated, truncated, info` as in Gymnasium. An object or
    mapping has `observation` or `observations`, `reward`, `done` or `terminated`, `truncated`.
    """
    if isinstance(value, bool | int | float) or hasattr(value, "item"):  # also of numpy and torch
        return _Step(reward=float(value), done=True)
    if isinstance(value, tuple):
        if len(value) not in (3, 4, 5):
            raise ValueError(f"step returned {len(value)} values, not (observation, reward, done)")
        truncated = bool(value[3]) if len(value) == 5 else False
        return _Step(_observed(value[0]), _reward(value[1]), bool(value[2]) or truncated, truncated)
    if isinstance(value, str | list):
        return _Step(_observed(value))
    if isinstance(value, Mapping) and "role" in value:
        return _Step(_observed(value))
    names = ("observation", "observations", "reward", "done", "terminated", "truncated", "postprocessed_action")
    if isinstance(value, Mapping):
        fields = {name: value.get(name) for name in names}
    else:
        fields = {name: getattr(value, name, None) for name in names}
    if all(fields[name] is None for name in names[:5]):
        raise ValueError(f"step returned {type(value).__name__}, which holds no observation, reward or done")
    observation = fields["observations"] if fields["observation"] is None else fields["observation"]
    truncated = bool(fields["truncated"])
    done = bool(fields["done"]) or bool(fields["terminated"]) or truncated
    return _Step(
        _observed(observation), _reward(fields["reward"]), done, truncated, fields["postprocessed_action"]
    )


def _reward(value: Any) -> float:
    return 0.0 if value is None else float(value)


def _observed(value: Any) -> Messages:
    """An observation as messages: a text is the user's."""
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, Mapping):
        return [dict(value)]
    if isinstance(value, list) and all(isinstance(message, Mapping) for message in value):
        return [dict(message) for message in value]
    raise ValueError(f"an observation is a text or messages, not {type(value).__name__}")


class _Environment:
    """An environment of any of the shapes, as `begin` and `step`."""

    def __init__(self, environment: Any, call: Callable[..., Any]) -> None:
        if isinstance(environment, type):
            environment = environment()
        self._environment, self._call = environment, call
        self._step = getattr(environment, "step", None)
        self.tools: dict[str, Callable[..., Any]] = {}
        if self._step is None and callable(environment):
            self._step = environment
        elif self._step is None:
            # Of the class, since looking at an instance runs its properties.
            for name, _ in inspect.getmembers(type(environment), inspect.isfunction):
                if name[0] != "_" and name not in ("reset", "get_reward", "close"):
                    self.tools[name] = getattr(environment, name)
        if self._step is None and not self.tools:
            raise SetupError(
                f"{type(environment).__name__} has no `step`, is no function, and has no tools.\n"
                "Pass an environment with reset and step, or a function that scores a text."
            )

    async def begin(self, prompt: Messages, task: Mapping[str, Any]) -> Messages:
        """The first messages."""
        if hasattr(self._environment, "init"):
            value = await self._call(self._environment.init, prompt)
            return _observed(value[0] if isinstance(value, tuple) else value)
        if not hasattr(self._environment, "reset"):
            return prompt
        value = await self._call(self._environment.reset, **task)
        if isinstance(value, tuple):
            value = value[0]
        elif isinstance(value, Mapping) and "role" not in value:
            value = value.get("observation")
        else:
            value = getattr(value, "observation", value)
        if isinstance(value, str) and prompt and prompt[-1].get("role") == "user" and self.tools:
            return [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + value}]  # as TRL does
        return [*prompt, *_observed(value)]

    async def step(self, message: Mapping[str, Any]) -> _Step:
        """What it says to a message of the agent."""
        if not self.tools:
            return _as_step(await self._call(self._step, message.get("content") or ""))
        calls = message.get("tool_calls") or ()
        if calls:
            return _Step([await self._tool_message(call) for call in calls])
        scores = getattr(self._environment, "get_reward", None)
        return _Step(reward=0.0 if scores is None else _reward(await self._call(scores)), done=True)

    async def _tool_message(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """What a tool returns, or how it failed: models may name tools that do not exist."""
        function = call["function"]
        try:
            arguments = json.loads(function["arguments"] or "{}")
            content = await self._call(self.tools[function["name"]], **arguments)
        except Exception as error:  # the user's code, by a model's arguments
            content = {"error": f"{type(error).__name__}: {error}"}
        text = content if isinstance(content, str) else json.dumps(content, default=str)
        return {"role": "tool", "tool_call_id": call["id"], "name": function["name"], "content": text}

    def schemas(self) -> list[dict[str, Any]]:
        """Its tools for a chat template, from their docstrings as TRL reads them."""
        if not self.tools:
            return []
        try:
            from transformers.utils import get_json_schema
        except ImportError:
            raise SetupError("Tools of an environment need transformers: pip install 'tito-audit[hf]'") from None
        return [get_json_schema(tool) for tool in self.tools.values()]


# A rollout


async def rollout(
    agent: Callable[..., Any],
    environment: Any,
    provider: TokenProvider | str,
    *,
    prompt: str | Sequence[Mapping[str, Any]] = (),
    task: Mapping[str, Any] | None = None,
    tokenizer: Tokenizer | str | Path | None = None,
    sampling: SamplingParams | None = None,
    max_turns: int = 32,
    max_length: int | None = None,
    tool_parser: str | None = "auto",
    reasoning_parser: str | None = "auto",
    chat_template: str | None = None,
    index: int | None = None,
    group_index: int | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Sample:
    """The training sample of one episode of an agent in an environment.

    `agent(messages)` or `agent(messages, client)` gets the conversation and returns the text of the next answer, or
    a message with tool calls; None ends the rollout. It is async or sync, and asks the model by `client`, an
    `openai.AsyncOpenAI` or `openai.OpenAI`, or by `rollout_client()`. `environment` is an object with `reset` or
    `init` and `step`, a TRL environment of tools, or a function that scores a text (`prompt` is then the question).
    `task` holds keyword arguments of `reset`. `provider` is one, or `vllm=URL` and the like.

    `sampling` holds the parameters that the agent's calls leave out. After `max_turns` turns, or when a prompt leaves
    no room in `max_length` tokens, the sample is `truncated`. An error of agent, environment or provider makes it
    `aborted`, with `error`; its tokens stay what was sampled. A wrong setting raises SetupError.

    The audit compares each row with what the provider was sent and returned: see `Sample.proven`.
    """
    opened = (
        open_provider(provider, ProviderOptions(api_key=key_of(provider))) if isinstance(provider, str) else None
    )
    source = opened or provider
    assert not isinstance(source, str), "opened"
    try:
        held = await _tokenizer_of(source, tokenizer)
        has_template = chat_template is not None or bool(held.chat_templates)
        renderer = make_renderer(held, chat_template=chat_template) if has_template else None
        if hasattr(source, "end_ids"):
            source.end_ids = held.eos_ids
        recorder = _Recorder(source, sampling or SamplingParams(), max_length)
        template = None if renderer is None else renderer.template(True).source
        parsers = [
            _parser_name(name, reads, template)
            for name, reads in ((tool_parser, Reads.TOOLS), (reasoning_parser, Reads.REASONING))
        ]
        managed = ManagedServer(recorder, held, False, *parsers, chat_template=chat_template)  # type: ignore[arg-type]
        running = _Running(managed, recorder)
        async with _caller(running) as call:
            episode = _Episode(running, call, agent, _Environment(environment, call), max_turns)
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            await episode.run([dict(message) for message in messages], task or {})
        if running.refused is not None:
            raise running.refused
        sample = episode.sample(_Audit(held, renderer), dict(metadata or {}))
    finally:
        if opened is not None:
            await opened.close()
    for row in (sample, *sample.others):
        row.index, row.group_index = index, group_index
    return sample


async def _tokenizer_of(provider: TokenProvider, tokenizer: Tokenizer | str | Path | None) -> Tokenizer:
    """The tokenizer of a rollout, loaded once in a process."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if tokenizer is None:
        if not isinstance(provider, Hashable):
            return await find_tokenizer(provider)
        if provider not in _FOUND:
            _FOUND[provider] = await find_tokenizer(provider)
        return _FOUND[provider]
    name = str(tokenizer)
    if name not in _LOADED:
        _LOADED[name] = load_tokenizer(name)
    return _LOADED[name]


def _parser_name(name: str | None, reads: Reads, template: str | None) -> str | None:
    if name != "auto":
        return name
    parser = guess_parser(template, reads).parser
    return None if parser is None else parser.name


@asynccontextmanager
async def _caller(running: _Running) -> AsyncIterator[Callable[..., Any]]:
    """What calls functions of the user: async ones here, others in one thread of the rollout."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="rollout")

    async def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if _is_async(function):
            return await function(*arguments, **named)
        work = partial(copy_context().run, partial(function, *arguments, **named))
        value = await running.loop.run_in_executor(pool, work)
        return await value if inspect.isawaitable(value) else value

    token = _CURRENT.set(running)
    try:
        yield call
    finally:
        _CURRENT.reset(token)
        for future in tuple(running.pending):
            future.cancel()
        pool.shutdown(wait=False, cancel_futures=True)


def _is_async(function: Callable[..., Any]) -> bool:
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


def _clients(agent: Callable[..., Any], running: _Running) -> dict[str, Any]:
    """The client as the agent's arguments take it: by the name `client`, or as the second of two; {} if it takes
    none."""
    try:
        parameters = list(inspect.signature(agent).parameters.values())
    except (TypeError, ValueError):
        return {}
    by_name = [each.name for each in parameters if each.name == "client"]
    required = [each.name for each in parameters if each.default is each.empty and each.kind is _NAMED]
    names = by_name or required[1:2]
    return {name: _client(running, sync=not _is_async(agent)) for name in names}


@dataclass(slots=True)
class _Episode:
    """An agent in its environment, turn by turn."""

    running: _Running
    call: Callable[..., Any]
    agent: Callable[..., Any]
    environment: _Environment
    max_turns: int
    messages: Messages = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    """Of each turn."""
    text: str = ""
    """The agent's latest."""
    truncated: bool = False
    error: Exception | None = None

    async def run(self, prompt: Messages, task: Mapping[str, Any]) -> None:
        """Run to the end; an error is kept."""
        self.running.tools = self.environment.schemas()
        clients = _clients(self.agent, self.running)
        try:
            self.messages = await self.environment.begin(prompt, task)
            if not self.messages:
                raise SetupError("The rollout has no first message.\nPass prompt, or return one from `reset`.")
            for turn in range(self.max_turns):
                self.running.recorder.turn = turn
                self.running.answer = {}
                text = await self.call(self.agent, [dict(message) for message in self.messages], **clients)
                if text is None and not self.running.answer.get("tool_calls"):
                    return
                if await self._take(text):
                    return
            self.truncated = True
        except SetupError:
            raise
        except Exception as error:  # the user's code, or the provider's answer to it
            failure = self.running.failure
            is_clients = failure is not None and type(error).__module__.split(".")[0] == "openai"
            self.error = failure if is_clients else error

    async def _take(self, text: Any) -> bool:
        """Give the agent's answer to the environment; whether that ends the rollout."""
        running = self.running
        message = _message(text, running.answer)
        self.text = message.get("content") or ""
        if message is running.answer and running.asked[: len(self.messages)] == self.messages:
            self.messages = list(running.asked)  # with what the agent added in this turn
        step = await self.environment.step(message if self.environment.tools else {"content": _text(text)})
        self.rewards.append(step.reward)
        self.truncated = step.truncated
        if step.action is not None and step.action != _text(text):
            message = {"role": "assistant", "content": step.action}
        self.messages = [*self.messages, message, *step.messages]
        return step.done

    def sample(self, audit: _Audit, metadata: dict[str, Any]) -> Sample:
        """What was sampled, as the row of the last answer and further rows."""
        recorder = self.running.recorder
        total, error = sum(self.rewards, 0.0), None if recorder.is_full else self.error
        status = SampleStatus.TRUNCATED if self.truncated or recorder.is_full else SampleStatus.COMPLETED
        status = SampleStatus.ABORTED if error is not None else status
        stated: dict[str, Any] = {"error": error}
        if status is not SampleStatus.COMPLETED:
            stated["status"] = status
        nodes: list[SequenceNode] = self.running.managed.get_state()["nodes"]
        rows = []
        for node in nodes:
            row = node.as_sample(total, metadata={**metadata, **node.metadata}, **stated)
            row.turns = self._turns(row)
            row.findings = audit.of(row, recorder.answers)
            rows.append(row)
        if not rows:
            return Sample(self.messages, reward=total, metadata=metadata, messages=self.messages, **stated)
        ends = [[*each.result.input_ids, *each.result.output_ids] for each in recorder.answers]
        last = [row for row in rows if row.tokens == ends[-1]] or rows[-1:]
        same = [row for row in rows if row.messages and row.messages[-1].get("content") == self.text]
        main = (same or last)[-1]
        main.others = [row for row in rows if row is not main]
        return main

    def _turns(self, row: Sample) -> list[SampledTurn]:
        """The answers that a row trains, each with the reward of its turn at the turn's last answer."""
        answers = self.running.recorder.answers
        lasts = {answer.turn: answer.call for answer in answers}
        turns = {}
        for answer in answers:
            result = answer.result
            start, end = len(result.input_ids), len(result.input_ids) + len(result.output_ids)
            if start == end or not row.loss_mask[start:end] or not all(row.loss_mask[start:end]):
                continue
            if row.tokens[:end] != [*result.input_ids, *result.output_ids]:
                continue
            is_last = lasts[answer.turn] == answer.call and answer.turn < len(self.rewards)
            reward = self.rewards[answer.turn] if is_last else 0.0
            turns[start] = SampledTurn(
                answer.turn, start, end, reward, result.finish_reason, result.weight_version
            )
        return [turns[start] for start in sorted(turns)]


def _message(value: Any, answer: dict[str, Any]) -> dict[str, Any]:
    """The agent's answer as a message: the model's own if it says the same, up to white space around it."""
    if value is None or (answer and _text(value).strip() == (answer.get("content") or "").strip()):
        return answer
    return {"role": "assistant", "content": _text(value)}


def _text(value: Any) -> str:
    """The text of what an agent returned: a text, a message or a completion."""
    if isinstance(value, str) or value is None:
        return value or ""
    if hasattr(value, "choices"):
        value = value.choices[0].message
    content = value.get("content") if isinstance(value, Mapping) else getattr(value, "content", value)
    if content is None or isinstance(content, str):
        return content or ""
    raise TypeError(f"an agent returns a text or a message, not {type(value).__name__}")


# The audit of a row: what it trains against what the provider was sent and returned


@dataclass(frozen=True, slots=True)
class _Audit:
    tokenizer: Tokenizer
    renderer: Renderer | None

    def of(self, row: Sample, answers: Sequence[_Sampled]) -> tuple[Any, ...]:
        """The findings of a row beside the calls that it holds."""
        calls = {}
        for answer in answers:
            result = answer.result
            seen = [*result.input_ids, *result.output_ids]
            if row.tokens[: len(seen)] == seen:
                calls[len(seen)] = Turn(
                    np.array(result.input_ids, np.int32),
                    np.array(result.output_ids, np.int32),
                    np.array(result.logprobs, np.float64),
                    finish_reason=result.finish_reason,
                )
        record = Rollout(
            Place("rollout", 0),
            "tito_sample",
            as_messages(row.messages, "messages"),
            turns=tuple(calls[size] for size in sorted(calls)),
            training_row=training_row(
                np.array(row.tokens, np.int32),
                mask=("loss_mask", row.loss_mask),
                logprobs=("rollout_log_probs", row.rollout_log_probs or []),
                sentinel=0.0,
                whole=True,
            ),
        )
        auditor = Auditor(self.tokenizer, self.renderer, all_rules(), _codes(), all_repairs)
        return audit_rollout(record, auditor).findings


@cache
def _codes() -> frozenset[str]:
    return selected_codes(Settings())
