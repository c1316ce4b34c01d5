"""`rollout`: runs an agent in an environment, and returns the training sample.

The agent needs no changes: it gets messages, asks a model through an `openai` client, and returns text. Requests
of that client stay in this process: a transport of ours takes the place of the connection.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import threading
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from tito_audit.errors import ProviderError, RenderError, SetupError
from tito_audit.parser import Reads
from tito_audit.parsers import guess_parser
from tito_audit.provider import GenerationResult, ProviderOptions, SamplingParams, ScoredTokens, TokenProvider
from tito_audit.providers import key_of, open_provider
from tito_audit.record.build import build_training_row
from tito_audit.record.message import as_messages
from tito_audit.record.rollout import Place, Rollout, Turn
from tito_audit.render.renderer import make_renderer
from tito_audit.repairs import all_repairs
from tito_audit.rules import all_rules
from tito_audit.run.auditor import Auditor, audit_rollout, selected_codes
from tito_audit.sessions.fit import find_tokenizer
from tito_audit.sessions.managed import ManagedServer, SequenceNode
from tito_audit.sessions.sample import Sample, SampledTurn, SampleStatus
from tito_audit.settings.model import Settings
from tito_audit.tokens.load import load_tokenizer
from tito_audit.tokens.tokenizer import Tokenizer

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


# Environments of all usual shapes, as their first messages and their reply to each text.
#
# `reset` and `step` of Gymnasium (also rLLM, OpenEnv), `init` and `step` of SkyRL (NovaSky-AI/SkyRL
# `skyrl_gym/envs/base_text_env.py`: BaseTextEnv), `reset`, tools and `get_reward` of TRL (huggingface/trl
# `trl/trainer/grpo_trainer.py`: environment_factory), or a function that scores a text.


@dataclass(frozen=True, slots=True)
class _StepResult:
    messages: list[dict[str, Any]] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False
    truncated: bool = False
    action: str | None = None
    """The agent's text as the environment wants it in the history; None: unchanged."""


def _as_step(value: Any) -> _StepResult:
    """What `step` returned, in any of the usual shapes; ValueError for another.

    A number is the reward of a text that ends the rollout. A text or messages are an observation. A tuple is
    `(observation, reward, done)`, with `info`, or with `terminated, truncated, info` as in Gymnasium. An object or
    mapping has `observation` or `observations`, `reward`, `done` or `terminated`, `truncated`.
    """
    if isinstance(value, bool | int | float) or hasattr(value, "item"):  # `item`: of numpy or torch
        return _StepResult(reward=float(value), done=True)
    if isinstance(value, str | list) or (isinstance(value, Mapping) and "role" in value):
        return _StepResult(_as_messages(value))
    if isinstance(value, tuple):
        if len(value) not in (3, 4, 5):
            raise ValueError(f"step returned {len(value)} values, not (observation, reward, done)")
        cut = bool(value[3]) if len(value) == 5 else False
        return _StepResult(_as_messages(value[0]), _reward(value[1]), bool(value[2]) or cut, cut)
    names = ("observation", "observations", "reward", "done", "terminated", "truncated", "postprocessed_action")
    get = value.get if isinstance(value, Mapping) else lambda name: getattr(value, name, None)
    first, several, reward, done, terminated, truncated, action = map(get, names)
    if first is several is reward is done is terminated is None:
        raise ValueError(f"step returned {type(value).__name__}, which holds no observation, reward or done")
    ended = bool(done) or bool(terminated) or bool(truncated)
    return _StepResult(
        _as_messages(several if first is None else first), _reward(reward), ended, bool(truncated), action
    )


def _reward(value: Any) -> float:
    return 0.0 if value is None else float(value)


def _as_messages(value: Any) -> list[dict[str, Any]]:
    """An observation as messages; a text is a message of the user."""
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, Mapping):
        return [dict(value)]
    if isinstance(value, list) and all(isinstance(message, Mapping) for message in value):
        return [dict(message) for message in value]
    raise ValueError(f"an observation is a text or messages, not {type(value).__name__}")


class Environment:
    """An environment of any shape, with `begin`, `step` and its tools."""

    def __init__(self, environment: Any, call: Callable[..., Any]) -> None:
        if isinstance(environment, type):
            environment = environment()
        self._environment, self._call = environment, call
        self._step = getattr(environment, "step", None)
        self.tools: dict[str, Callable[..., Any]] = {}
        if self._step is None and callable(environment):
            self._step = environment
        elif self._step is None and hasattr(environment, "reset"):
            # From the class, since `getmembers` of an instance runs its properties.
            for name, _ in inspect.getmembers(type(environment), inspect.isfunction):
                if name[0] != "_" and name not in ("reset", "get_reward", "close"):
                    self.tools[name] = getattr(environment, name)
        if self._step is None and not self.tools:
            raise SetupError(
                f"{type(environment).__name__} has no `step`, is no function, and has no tools.\n"
                "Pass an environment with reset and step, or a function that scores a text. Environments that run "
                "the model themselves (verifiers, Atropos) take the gateway's address or a managed server."
            )

    async def begin(self, prompt: list[dict[str, Any]], task: Mapping[str, Any]) -> list[dict[str, Any]]:
        if hasattr(self._environment, "init"):
            value = await self._call(self._environment.init, prompt)
            return _as_messages(value[0] if isinstance(value, tuple) else value)
        if not hasattr(self._environment, "reset"):
            return prompt
        value = await self._call(self._environment.reset, **task)
        if isinstance(value, tuple):
            value = value[0]
        elif isinstance(value, Mapping) and "role" not in value:
            value = value.get("observation")
        else:
            value = getattr(value, "observation", value)
        last = prompt[-1] if prompt else {}
        if (
            isinstance(value, str)
            and last.get("role") == "user"
            and self.tools
            and isinstance(last["content"], str)
        ):
            return [*prompt[:-1], {**last, "content": last["content"] + value}]  # as TRL does
        return [*prompt, *_as_messages(value)]

    async def step(self, message: Mapping[str, Any]) -> _StepResult:
        if not self.tools:
            return _as_step(await self._call(self._step, message.get("content") or ""))
        results = []
        for call in message.get("tool_calls") or ():
            function = call["function"]
            try:
                arguments = json.loads(function["arguments"] or "{}")
                content = await self._call(self.tools[function["name"]], **arguments)
            except Exception as error:  # of the tool, of the arguments that were sampled, or of an unknown name
                content = {"error": f"{type(error).__name__}: {error}"}
            text = content if isinstance(content, str) else json.dumps(content, default=str)
            named = {"tool_call_id": call["id"], "name": function["name"]}
            results.append({"role": "tool", **named, "content": text})
        if results:
            return _StepResult(results)
        scores = getattr(self._environment, "get_reward", None)
        return _StepResult(reward=0.0 if scores is None else _reward(await self._call(scores)), done=True)

    def schemas(self) -> list[dict[str, Any]]:
        """The JSON schemas of its tools for a chat template, from their docstrings, as TRL makes them."""
        if not self.tools:
            return []
        try:
            from transformers.utils import get_json_schema
        except ImportError:
            raise SetupError("Tools of an environment need transformers: pip install 'tito-audit[hf]'") from None
        try:
            return [get_json_schema(tool) for tool in self.tools.values()]
        except Exception as error:  # transformers' errors here have no class in common
            raise SetupError(
                f"{type(self._environment).__name__}: a tool cannot be described ({error}).\n"
                "Give each public method types and a docstring with its arguments, or begin its name with `_`."
            ) from None


# The agent and its rollout


_POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD
_load_once = cache(load_tokenizer)
_SERVER_TOKENIZERS: WeakKeyDictionary[Any, Tokenizer] = WeakKeyDictionary()
"""By provider, the tokenizer that its server names."""
_AUDITORS: dict[tuple[int, str | None], Auditor] = {}


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

    `agent(messages)` or `agent(messages, client)` gets the conversation and returns the text of the next answer;
    None ends the rollout. It asks the model through `client`, an `openai.AsyncOpenAI` if the agent is async, else
    an `openai.OpenAI`, or through `rollout_client()`. `environment` is an object with `reset` or `init` and
    `step`, a TRL environment of tools, a class of these, or a function that scores a text. `prompt` is the
    question if the environment has none, and `task` holds keyword arguments of `reset`. `provider` may be named
    as `vllm=URL`. Sync code runs in a thread of its own.

    `sampling` has the parameters that the agent's calls leave out. After `max_turns` turns, or when a prompt
    leaves no room in `max_length` tokens, the sample is `truncated`. An error of agent, environment or provider
    makes it `aborted`, with `error`; its tokens stay what was sampled. A wrong setting raises SetupError.

    The audit compares each row with what the provider was sent and returned: see `Sample.proven`.
    """
    opened = (
        open_provider(provider, ProviderOptions(api_key=key_of(provider))) if isinstance(provider, str) else None
    )
    source = opened or provider
    assert not isinstance(source, str), "opened"
    try:
        auditor = await _find_auditor(source, tokenizer, chat_template)
        loaded, renderer = auditor.tokenizer, auditor.renderer
        assert loaded is not None
        if hasattr(source, "end_ids"):
            source.end_ids = loaded.eos_ids
        recorder = RecordingProvider(source, sampling or SamplingParams(), max_length)
        template = None if renderer is None else renderer.template(True).source
        parsers = []
        for name, reads in ((tool_parser, Reads.TOOLS), (reasoning_parser, Reads.REASONING)):
            if name == "auto":
                guessed = guess_parser(template, reads).parser
                name = None if guessed is None else guessed.name
            parsers.append(name)
        source_of_ids: Any = recorder  # it streams nothing
        managed = ManagedServer(source_of_ids, loaded, False, *parsers, renderer=renderer)
        running = RunningRollout(managed, recorder)
        async with _user_code(running) as call:
            episode = _Episode(running, call, agent, Environment(environment, call), max_turns)
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            await episode.run([dict(message) for message in messages], task or {})
        if running.setup_error is not None:
            raise running.setup_error
        sample = episode.sample(auditor, dict(metadata or {}))
    finally:
        if opened is not None:
            await opened.close()
    for row in (sample, *sample.others):
        row.index, row.group_index = index, group_index
    return sample


async def _find_auditor(
    provider: TokenProvider, tokenizer: Tokenizer | str | Path | None, chat_template: str | None
) -> Auditor:
    """The auditor that rollouts with this tokenizer (None: the server's) and template share, and its renderer."""
    if isinstance(tokenizer, Tokenizer):
        loaded = tokenizer
    elif tokenizer is not None:
        loaded = _load_once(str(tokenizer))
    elif not isinstance(provider, Hashable):
        loaded = await find_tokenizer(provider)
    else:
        if provider not in _SERVER_TOKENIZERS:
            _SERVER_TOKENIZERS[provider] = await find_tokenizer(provider)
        loaded = _SERVER_TOKENIZERS[provider]
    key = id(loaded), chat_template  # the auditor keeps the tokenizer alive, so no other gets its id
    if key not in _AUDITORS:
        has_template = chat_template is not None or bool(loaded.chat_templates)
        renderer = make_renderer(loaded, chat_template=chat_template) if has_template else None
        _AUDITORS[key] = Auditor(loaded, renderer, all_rules(), selected_codes(Settings()), all_repairs)
        while len(_AUDITORS) > 8:
            del _AUDITORS[next(iter(_AUDITORS))]
    return _AUDITORS[key]


@asynccontextmanager
async def _user_code(running: RunningRollout) -> AsyncIterator[Callable[..., Any]]:
    """A function that calls the user's functions: async ones here, others in a thread of the rollout."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="rollout")

    async def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if _is_async(function):
            return await function(*arguments, **named)
        work = partial(copy_context().run, partial(function, *arguments, **named))
        value = await running.loop.run_in_executor(pool, work)
        return await value if inspect.isawaitable(value) else value

    token = CURRENT.set(running)
    try:
        yield call
    finally:
        CURRENT.reset(token)
        for future in tuple(running.pending):
            future.cancel()
        pool.shutdown(wait=False, cancel_futures=True)


def _is_async(function: Callable[..., Any]) -> bool:
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


@dataclass(slots=True)
class _Episode:
    running: RunningRollout
    call: Callable[..., Any]
    agent: Callable[..., Any]
    environment: Environment
    max_turns: int
    messages: list[dict[str, Any]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    """One for each turn."""
    text: str = ""
    truncated: bool = False
    error: Exception | None = None

    async def run(self, prompt: list[dict[str, Any]], task: Mapping[str, Any]) -> None:
        self.running.tools = self.environment.schemas()
        # Pass the client by the name `client`, or else as the second required parameter.
        parameters: list[inspect.Parameter] = []
        with suppress(TypeError, ValueError):
            parameters = list(inspect.signature(self.agent).parameters.values())
        required = [each.name for each in parameters if each.default is each.empty and each.kind is _POSITIONAL]
        names = ["client"] if "client" in [each.name for each in parameters] else required[1:2]
        clients = {name: open_client(self.running, sync=not _is_async(self.agent)) for name in names}
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
                # Give the agent's text to the environment.
                running, agent_text = self.running, _answer_text(text)
                sampled_text = running.answer.get("content") or ""
                same = running.answer and (text is None or agent_text.strip() == sampled_text.strip())
                message = running.answer if same else {"role": "assistant", "content": agent_text}
                self.text = message.get("content") or ""
                if same and running.request[: len(self.messages)] == self.messages:
                    self.messages = list(running.request)  # keeps what the agent added to the history in this turn
                step = await self.environment.step(message if self.environment.tools else {"content": agent_text})
                self.rewards.append(step.reward)
                self.truncated = step.truncated
                if step.action is not None and step.action != agent_text:
                    message = {"role": "assistant", "content": step.action}
                self.messages = [*self.messages, message, *step.messages]
                if step.done:
                    return
            self.truncated = True
        except SetupError:
            raise
        except Exception as error:  # of the user's code, or of the provider
            failure = self.running.failure
            is_clients = failure is not None and type(error).__module__.split(".")[0] == "openai"
            self.error = failure if is_clients else error

    def sample(self, auditor: Auditor, metadata: dict[str, Any]) -> Sample:
        """The training row that ends with the last answer, with all other rows in `others`."""
        recorder, answers = self.running.recorder, self.running.recorder.answers
        lasts = {answer.turn: answer.call for answer in answers}
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
            turns = {}
            for answer in answers:
                result = answer.result
                start, end = len(result.input_ids), len(result.input_ids) + len(result.output_ids)
                if start == end or not row.loss_mask[start:end] or not all(row.loss_mask[start:end]):
                    continue
                if row.tokens[:end] != [*result.input_ids, *result.output_ids]:
                    continue
                # The last answer of a turn gets its reward.
                is_last = lasts[answer.turn] == answer.call and answer.turn < len(self.rewards)
                reward = self.rewards[answer.turn] if is_last else 0.0
                turns[start] = SampledTurn(
                    answer.turn, start, end, reward, result.finish_reason, result.weight_version
                )
            row.turns = [turns[start] for start in sorted(turns)]
            row.findings = _audit(auditor, row, answers)
            rows.append(row)
        if not rows:
            return Sample(self.messages, reward=total, metadata=metadata, messages=self.messages, **stated)
        latest = [*answers[-1].result.input_ids, *answers[-1].result.output_ids]
        last = [row for row in rows if row.tokens == latest] or rows[-1:]
        same = [row for row in rows if row.messages and row.messages[-1].get("content") == self.text]
        main = (same or last)[-1]
        main.others = [row for row in rows if row is not main]
        return main


def _answer_text(value: Any) -> str:
    """The text of what an agent returned: a text, a message or a chat completion."""
    if isinstance(value, str) or value is None:
        return value or ""
    if hasattr(value, "choices"):
        value = value.choices[0].message
    content = value.get("content") if isinstance(value, Mapping) else getattr(value, "content", value)
    if content is None or isinstance(content, str):
        return content or ""
    raise TypeError(f"an agent returns a text or a message, not {type(value).__name__}")


def _audit(auditor: Auditor, row: Sample, answers: Sequence[RecordedAnswer]) -> tuple[Any, ...]:
    """Audit a row beside the calls that it holds, as they were sent and returned."""
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
        training_row=build_training_row(
            np.array(row.tokens, np.int32),
            mask=("loss_mask", row.loss_mask),
            logprobs=("rollout_log_probs", row.rollout_log_probs or []),
            sentinel=0.0,
            whole=True,
        ),
    )
    return audit_rollout(record, auditor).findings
