"""A gateway: sessions, a provider and a log; every answer is logged before its client has all of it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

import orjson
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tito_audit.errors import EncodeError, ProviderError, RenderError, StorageError
from tito_audit.parser import Delta, Parsed, ParseOptions, Parser, ParserRun
from tito_audit.parsers import (
    JsonCallsRun,
    PlainRun,
    calls_grammar,
    finish_reason,
    join_deltas,
    json_grammar,
    start_answer,
    to_delta,
    to_message,
)
from tito_audit.provider import GenerationChunk, GenerationResult, TokenProvider, logged_spans
from tito_audit.record.policy_columns import WeightSpans
from tito_audit.record.prompt_ids import PromptIds
from tito_audit.render.renderer import wrap_text_in_parts
from tito_audit.serve.call_log import CallLog
from tito_audit.serve.errors import Refused, refusal_of
from tito_audit.serve.request import ChatRequest, SamplingRequest, TextRequest
from tito_audit.sessions.engine import Conversations
from tito_audit.sessions.model import Branch, Node, Prompt
from tito_audit.sessions.session import Session
from tito_audit.sessions.shapes import usage
from tito_audit.tokens.text_stream import TextStream
from tito_audit.tokens.tokenizer import Tokenizer

# Which thread of calls an answer belongs to; each answer is in exactly one.

AnswerKey = tuple[str, int]
"""The id of a call, and the index of one of its answers."""


@dataclass(slots=True)
class Threads:
    """The threads of one session.

    A thread goes on with the first answer of the first call that continues its last answer. Every other answer
    begins a new thread. So in a thread each prompt starts with everything before it.
    """

    _names: dict[AnswerKey, str] = field(default_factory=dict)
    _continued: set[AnswerKey] = field(default_factory=set)

    def assign(self, call_id: str, prompt: Prompt, answers: int) -> tuple[str, ...]:
        """The name of the thread of each answer to a call."""
        names = [thread_name(call_id, choice) for choice in range(answers)]
        parent = prompt.parent if prompt.branch is Branch.CONTINUES else None
        if parent is not None:
            key = (parent.call_id, parent.choice)
            if key in self._names and key not in self._continued:
                names[0] = self._names[key]
                self._continued.add(key)
        self._names |= {(call_id, choice): name for choice, name in enumerate(names)}
        return tuple(names)

    def name_of(self, node: Node) -> str:
        return self._names[node.call_id, node.choice]


def thread_name(call_id: str, choice: int) -> str:
    """The name of the thread that begins with this answer."""
    return f"{call_id}/{choice}"


# The gateway's metrics for Prometheus. No label holds anything of a session or a prompt.

_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_OVERHEAD_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1)


class Metrics:
    """What one gateway counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        common: Any = {"namespace": "tito_audit", "registry": self.registry}
        counter: Callable[..., Counter] = partial(Counter, **common)
        gauge: Callable[..., Gauge] = partial(Gauge, **common)
        histogram: Callable[..., Histogram] = partial(Histogram, **common)
        self.requests = counter("requests", "Answered requests", ("endpoint", "status"))
        self.in_flight = gauge("in_flight", "Requests in progress")
        self.seconds = histogram("request_seconds", "Time to answer a request", ("endpoint",), buckets=_BUCKETS)
        self.prompt_seconds = histogram("prompt_seconds", "Time to make a prompt", buckets=_OVERHEAD_BUCKETS)
        text = "Time that the gateway itself takes for a request that does not stream"
        self.overhead = histogram("overhead_seconds", text, ("branch",), buckets=_OVERHEAD_BUCKETS)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens")
        self.kept_tokens = counter("kept_tokens", "Prompt tokens that came from stored answers")
        self.sampled_tokens = counter("sampled_tokens", "Sampled tokens")
        self.branches = counter("prompts", "Prompts by branch: start, continues or fork", ("branch",))
        self.forks = counter("forks", "Forks by reason", ("reason",))
        self.unfinished = counter("unfinished", "Answers that were cut off", ("status",))
        self.sessions = gauge("sessions", "Sessions in memory")
        self.log_errors = counter("log_errors", "Calls that could not be logged")


# The lines of the log: one for each answer, and one for the end of a session.

VERSION = 1


class Status(StrEnum):
    """What became of an answer."""

    ANSWERED = "answered"
    CLIENT_GONE = "client_gone"
    """The client left while it was sampled. The line holds what was sampled by then; no prompt continues it."""
    BROKEN_OFF = "broken_off"
    """The provider failed while it was sampled. The line holds what was sampled by then; nothing continues it."""
    DUMMY = "dummy"
    """Its ids are placeholders that no model sampled."""


def log_lines(gateway: Gateway, call: Call, status: Status, threads: Mapping[int, str]) -> list[dict[str, Any]]:
    """A line for each answer of a call whose thread `threads` names, by the index of the answer."""
    prompt, request = call.prompt, call.request
    parent, fork = prompt.parent, prompt.fork
    cut_off = status in (Status.CLIENT_GONE, Status.BROKEN_OFF)
    shared = {
        "tito_audit_gateway": VERSION,
        "session_id": call.session.id,
        "call_id": call.call_id,
        "thread_id": "",
        "choice": 0,
        "n": request.sampling.n,
        "parent": None if parent is None else {"call_id": parent.call_id, "choice": parent.choice},
        "branch": prompt.branch,
        "fork": None if fork is None else {"reason": fork.reason, "detail": fork.detail, "message": fork.message},
        "kept": prompt.kept,
        "proof": prompt.proof,
        **({"alike": prompt.alike} if prompt.alike else {}),
        **_request_columns(gateway, call),
    }
    lines = []
    for choice, thread in threads.items():
        answer, is_chat = call.answers[choice], isinstance(request, ChatRequest)
        spans = logged_spans(answer.weight_spans, len(answer.ids))  # [] where `weight_version` says it all
        line = {
            **shared,
            "thread_id": thread,
            "choice": choice,
            "weight_version": answer.weight_version,
            **({"weight_versions": spans} if spans else {}),
            "response_message": answer.message() if is_chat else None,
            **({} if is_chat else {"text": answer.text}),
            "prompt_token_ids": orjson.Fragment(call.ids.json),
            "completion_token_ids": answer.ids,
            "logprobs": answer.logprobs,
            "finish_reason": (answer.finish_reason or "abort") if cut_off else answer.client_finish_reason,
            "stop_reason": answer.stop_reason,
            "status": status,
        }
        lines.append(line)
    return lines


def _request_columns(gateway: Gateway, call: Call) -> dict[str, Any]:
    """The columns of a log line that are the same for all answers of a call."""
    request = call.request
    columns: dict[str, Any] = {
        "endpoint": request.endpoint,
        "model": gateway.model,
        **gateway.digests,
        "created": call.created,
        "weight_version": None,
        "sampling": request.sampling_as_sent,
    }
    if isinstance(request, ChatRequest):
        columns |= {
            "chat_template_kwargs": request.call.template_kwargs,
            "tools": list(request.call.tools),
            "messages": request.messages,
        }
        if request.forced_syntax is not None:
            columns["forced"] = {"functions": list(request.forced_schemas), "syntax": request.forced_syntax}
        # The messages given to the template, if they differ from those that the client sent.
        messages = None if call.prompt.written is None else call.prompt.written.messages
        wraps = call.session.wraps_texts
        if messages is not None and (wraps or messages is not request.parsed_messages):
            wires = [wrap_text_in_parts(message.wire) if wraps else message.wire for message in messages]
            if wires != [message.wire for message in request.parsed_messages]:
                columns["template_messages"] = wires
        return columns
    if isinstance(request, TextRequest) and isinstance(request.prompt, str):
        columns["prompt"] = request.prompt
    return {**columns, "messages": None}


_LONG_TEXT = 20_000
"""Texts of this many characters take several milliseconds to encode, too long for the event loop."""
_ENCODER_THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))


class BackgroundEncoder:
    """Encodes long texts off the event loop; the tokenizers library releases the GIL."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._threads: ThreadPoolExecutor | None = None

    async def encode_ahead(self, text: str) -> None:
        """Put the segments of a long text into the tokenizer's cache, so that encoding it is fast afterwards."""
        if len(text) < _LONG_TEXT:
            return
        segments = self._tokenizer.segments
        unknown = segments.uncached_segments(text)
        if sum(map(len, unknown)) < _LONG_TEXT:
            return
        self._threads = self._threads or ThreadPoolExecutor(_ENCODER_THREADS, thread_name_prefix="encode")
        loop = asyncio.get_running_loop()
        segments.remember(await loop.run_in_executor(self._threads, segments.encode_uncached, unknown))


_GRAMMAR_FIELDS = frozenset(
    (
        *("response_format", "structured_outputs", "structural_tag", "regex", "ebnf", "json_schema"),
        *("guided_json", "guided_regex", "guided_grammar", "guided_choice"),
    )
)
"""Fields of a request that constrain an answer to a grammar."""
Parsers = tuple[Parser | None, Parser | None]
"""The parsers of reasoning and of tool calls."""


@dataclass(slots=True)
class SessionState:
    """What a gateway knows of a session besides its answers."""

    threads: Threads = field(default_factory=Threads)
    closed: float | None = None
    """When it was closed, in seconds since the epoch; None while it is open."""
    reward: float | None = None


@dataclass(slots=True)
class UnfinishedAnswer:
    """One answer while it is sampled: its ids, and what its client gets of them: text, reasoning and tool calls.

    Parsing never changes the ids. The deltas add up to `message()`.
    """

    stream: TextStream
    parser: ParserRun | None
    """None: the provider's server parses the answer once it is whole."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    weight_version: str | None = None
    weight_spans: WeightSpans = ()
    _deltas: list[Delta] = field(default_factory=list)
    _call_ids: list[str] = field(default_factory=list)
    _parsed: Parsed | None = None

    def add(self, chunk: GenerationChunk | GenerationResult) -> list[dict[str, Any]]:
        """Add the next ids; the deltas that they complete, as OpenAI writes them."""
        self.ids += chunk.output_ids
        self.logprobs += chunk.logprobs
        self.weight_version = chunk.weight_version or self.weight_version
        self.weight_spans = chunk.weight_spans or self.weight_spans
        if chunk.finish_reason is not None:
            self.finish_reason, self.stop_reason = chunk.finish_reason, chunk.stop_reason
        text = self.stream.feed(chunk.output_ids)
        return [] if self.parser is None else self._add_deltas(self.parser.feed(text))

    def close(self, by_server: Parsed | None) -> list[dict[str, Any]]:
        """End the answer; the deltas that were held back, or all of them where the server parsed it."""
        text = self.stream.close()
        if self.parser is not None:
            return self._add_deltas((*self.parser.feed(text), *self.parser.close()))
        assert by_server is not None, "the server parses"
        calls = enumerate(by_server.tool_calls)
        deltas = [Delta(call=number, name=call.name, arguments=call.arguments) for number, call in calls]
        return self._add_deltas([Delta(by_server.content or "", by_server.reasoning or ""), *deltas])

    @property
    def wire_deltas(self) -> list[dict[str, Any]]:
        return self._as_wire(self._deltas)

    @property
    def parsed(self) -> Parsed:
        self._parsed = self._parsed or join_deltas(self._deltas)
        return self._parsed

    @property
    def text(self) -> str:
        return self.parsed.content or ""

    def message(self) -> dict[str, Any]:
        return to_message(self.parsed, self._call_id)

    @property
    def client_finish_reason(self) -> str | None:
        """`tool_calls` where the model stopped after tool calls, else `finish_reason`."""
        return finish_reason(self.parsed, self.finish_reason)

    def _add_deltas(self, deltas: Sequence[Delta]) -> list[dict[str, Any]]:
        self._deltas += deltas
        self._parsed = None
        return self._as_wire(deltas)

    def _as_wire(self, deltas: Sequence[Delta]) -> list[dict[str, Any]]:
        return [wire for delta in deltas if (wire := to_delta(delta, self._call_id))]

    def _call_id(self, number: int) -> str:
        """The id of the tool call with this number, made when it is first asked for."""
        while len(self._call_ids) <= number:
            self._call_ids.append(f"call_{uuid4().hex[:24]}")
        return self._call_ids[number]


@dataclass(slots=True)
class Call:
    """A request with its prompt, and its answers while they are sampled."""

    session: Session
    request: SamplingRequest
    prompt: Prompt
    ids: PromptIds
    """`[P]` the prompt."""
    call_id: str
    created: float
    answers: list[UnfinishedAnswer]

    @property
    def sampled_tokens(self) -> int:
        """How many tokens all answers have so far."""
        return sum(len(answer.ids) for answer in self.answers)

    @property
    def usage(self) -> dict[str, int]:
        """The usage so far, as OpenAI writes it."""
        return usage(len(self.ids), self.sampled_tokens)

    @property
    def prompt_ids(self) -> dict[str, Any]:
        """The field with the ids of the prompt; {} if the client did not ask for ids."""
        return {"prompt_token_ids": orjson.Fragment(self.ids.json)} if self.request.returns_token_ids else {}


@dataclass(slots=True)
class Gateway:
    """Samples for the endpoints, and logs every answer; belongs to one event loop."""

    provider: TokenProvider
    tokenizer: Tokenizer
    conversations: Conversations
    log: CallLog
    model: str
    """The name that clients know the model by."""
    start_parser: Callable[[ParseOptions], ParserRun] = lambda options: start_answer(options=options)
    server_parses: bool = False
    """Whether the provider's server parses whole answers, in place of `start_parser`."""
    parsers: Parsers = (None, None)
    """The parsers that `start_parser` starts; the grammars that force calls follow their syntax."""
    metrics: Metrics = field(default_factory=Metrics)
    digests: Mapping[str, str] = field(default_factory=dict)
    """The digests of tokenizer and template, as columns of the log."""
    clock: Callable[[], float] = time.time
    deferred_check: Callable[[Gateway], Awaitable[None]] | None = None
    """Checks the provider's server before the first call, if it did not answer at the start. Raises ProviderError
    while it does not answer, Refused if its tokenizer does not fit."""
    _states: WeakKeyDictionary[Session, SessionState] = field(default_factory=WeakKeyDictionary)
    _encoder: BackgroundEncoder = field(init=False)

    def __post_init__(self) -> None:
        self._encoder = BackgroundEncoder(self.tokenizer)
        if hasattr(self.provider, "end_ids"):  # a server that does not say why an answer ended
            self.provider.end_ids = self.tokenizer.eos_ids

    async def check_ready(self) -> None:
        """Refused while calls cannot be served: the server was never reached, or its tokenizer does not fit."""
        if self.deferred_check is None:
            return
        try:
            await self.deferred_check(self)
        except ProviderError as error:
            raise refusal_of(error) from error
        self.deferred_check = None

    async def begin_call(self, request: SamplingRequest, session_id: str | None) -> Call:
        """A call with its prompt, in this session, or else in the one that its history continues, or a new one."""
        started = time.perf_counter()
        if isinstance(request, ChatRequest):
            try:
                request = replace(request, call=self.conversations.with_content_form(request.call))
            except RenderError as error:
                raise Refused(str(error), "messages") from None
        now = self.clock()
        if session_id is not None:
            session = self.conversations.open(session_id, now=now)
            if self.state_of(session).closed is not None:
                raise Refused(f"session {session.id} is closed", status=409, code="session_closed")
        else:
            if isinstance(request, ChatRequest):
                session = self.conversations.find(request.call, now=now)
            else:
                assert isinstance(request, TextRequest)
                session = self.conversations.find_text(request.prompt, now=now)
            if self.state_of(session).closed is not None:  # a closed session never goes on: begin a new one
                session = self.conversations.open(None, now=now)
        try:
            if isinstance(request, ChatRequest):
                draft = session.draft(request.call)
                await self._encoder.encode_ahead(draft.prompt.added)
                prompt = session.encode(draft)
            else:
                assert isinstance(request, TextRequest)
                prompt = session.text_prompt(request.prompt)
        except RenderError as error:
            raise Refused(f"the chat template cannot write these messages: {error}", "messages") from None
        except EncodeError as error:
            raise Refused(str(error).split("\n")[0]) from None
        metrics = self.metrics
        metrics.prompt_seconds.observe(time.perf_counter() - started)
        metrics.prompt_tokens.inc(prompt.length)
        metrics.kept_tokens.inc(prompt.kept)
        metrics.branches.labels(prompt.branch).inc()
        if prompt.branch is Branch.FORK and prompt.fork is not None:
            metrics.forks.labels(prompt.fork.reason).inc()
        metrics.sessions.set(len(self.conversations))
        ids = PromptIds(prompt.ids)
        request, answers = self._begin_answers(request, ids)
        return Call(session, request, prompt, ids, f"{request.id_prefix}{uuid4().hex}", self.clock(), answers)

    async def count_prompt_tokens(self, request: SamplingRequest, session_id: str | None) -> int:
        """How many ids the prompt of a call would have; Refused if no prompt can be built."""
        call = await self.begin_call(request, session_id)
        if session_id is None and not call.session.nodes:
            self.conversations.close(call.session.id)  # new, and no client knows its name
        return len(call.ids)

    async def sample(self, call: Call) -> tuple[GenerationResult, ...]:
        """Sample, parse and log all answers of a call; Refused if the provider or the log fails."""
        try:
            results = await self.provider.generate_n(call.ids, call.request.sampling)
            parsed = await self._parsed_by_server(call, results)
        except ProviderError as error:
            raise refusal_of(error) from error
        for answer, result, by_server in zip(call.answers, results, parsed, strict=True):
            answer.add(result)
            answer.close(by_server)
        await self._log_and_commit(call, results)
        return results

    async def stream(self, call: Call) -> AsyncGenerator[tuple[GenerationChunk, list[dict[str, Any]]], None]:
        """The chunks of all answers with their deltas; after the last one the call is in the log.

        If the generator is closed or the provider fails, what was sampled is logged as cut off.
        """
        status = Status.CLIENT_GONE
        try:
            chunks = self.provider.stream(call.ids, call.request.sampling)
            try:
                async for chunk in chunks:
                    yield chunk, call.answers[chunk.index].add(chunk)
            finally:
                if isinstance(chunks, AsyncGenerator):
                    await chunks.aclose()  # stops the generation
            results = [
                GenerationResult(
                    call.ids,
                    tuple(answer.ids),
                    tuple(answer.logprobs),
                    None,
                    answer.finish_reason,
                    answer.stop_reason,
                    answer.weight_version,
                    answer.weight_spans,
                )
                for answer in call.answers
            ]
            parsed = await self._parsed_by_server(call, results)
            for index, (answer, by_server) in enumerate(zip(call.answers, parsed, strict=True)):
                if deltas := answer.close(by_server):
                    yield GenerationChunk(index, (), ()), deltas
            status = Status.ANSWERED
        except ProviderError as error:
            status = Status.BROKEN_OFF
            raise refusal_of(error) from error
        finally:
            if status is not Status.ANSWERED:
                self.metrics.unfinished.labels(status).inc()
                begun = [choice for choice, answer in enumerate(call.answers) if answer.ids]
                threads = {choice: thread_name(call.call_id, choice) for choice in begun}
                try:
                    self.log.append_unsynced(log_lines(self, call, status, threads))
                except StorageError:  # no client to tell: it has left, or already has an error
                    self.metrics.log_errors.inc()
        await self._log_and_commit(call, results)

    async def _parsed_by_server(self, call: Call, results: Sequence[GenerationResult]) -> Sequence[Parsed | None]:
        """Each answer as the provider's server parses it; None where it is parsed here."""
        request = call.request
        if not self.server_parses or not isinstance(request, ChatRequest):
            return [None] * len(results)
        chat_request: dict[str, Any] = {
            "messages": list(request.messages),
            "chat_template_kwargs": dict(request.call.template_kwargs),
            "skip_special_tokens": not request.shows_special_tokens,
        }
        if request.parses_calls:
            chat_request["tools"] = list(request.call.tools)
        provider: Any = self.provider  # it has parsers: this was checked when the gateway was made
        parsed: Sequence[Parsed] = await provider.derender(results, chat_request)
        return parsed

    async def _log_and_commit(self, call: Call, results: Sequence[GenerationResult]) -> None:
        chat = call.request if isinstance(call.request, ChatRequest) else None
        messages = [answer.message() if chat else {"text": answer.text} for answer in call.answers]
        threads = self.state_of(call.session).threads.assign(call.call_id, call.prompt, len(results))
        status = Status.DUMMY if getattr(self.provider, "dummy", False) else Status.ANSWERED
        self.metrics.sampled_tokens.inc(sum(len(result.output_ids) for result in results))
        # Log first: an answer that could not be logged must not be in the session, as its client gets an error.
        await self._append_to_log(log_lines(self, call, status, dict(enumerate(threads))))
        call.session.commit(call.call_id, call.prompt, chat.call if chat else None, results, messages)

    async def _append_to_log(self, lines: Sequence[dict[str, Any]]) -> None:
        try:
            await self.log.append(lines)
        except StorageError as error:
            self.metrics.log_errors.inc()
            raise Refused(
                f"the answer was sampled but could not be logged: {error}", status=507, code="log_failed"
            ) from error

    def state_of(self, session: Session) -> SessionState:
        return self._states.setdefault(session, SessionState())

    def find_session(self, session_id: str) -> Session:
        session = self.conversations.find_open(session_id)
        if session is None:
            raise Refused(f"session {session_id} is not in memory; its answers are in the log", status=404)
        return session

    async def close_session(self, session_id: str, reward: float | None) -> Session:
        """End a session and log its reward; no call continues it. Refused if it is closed already."""
        session = self.find_session(session_id)
        state = self.state_of(session)
        if state.closed is not None:
            raise Refused(f"session {session_id} is closed", status=409, code="session_closed")
        now = self.clock()
        line = {"tito_audit_gateway": VERSION, "session_id": session_id, "closed": now, "reward": reward}
        await self._append_to_log([line])
        state.closed, state.reward = now, reward
        return session

    def _begin_answers(
        self, request: SamplingRequest, ids: PromptIds
    ) -> tuple[SamplingRequest, list[UnfinishedAnswer]]:
        """The answers of a call, and its request, which gets a grammar if it forces calls.

        The grammar is in the template's own syntax of calls, or else in JSON.
        """
        # The end of the prompt, long enough for a generation prompt.
        prompt_end = self.tokenizer.vocabulary.text(ids.tail(64)) if isinstance(request, ChatRequest) else ""
        if isinstance(request, ChatRequest) and request.forced_schemas:
            forcing, extra = getattr(self.provider, "forcing", None), request.sampling.extra
            if forcing is None or self.server_parses:
                why = f"{self.provider.name} takes no grammars" if forcing is None else "the server parses answers"
                raise Refused(f"`tool_choice` cannot force calls here: {why}", "tool_choice")
            if extra.keys() & _GRAMMAR_FIELDS:
                raise Refused("`tool_choice` cannot force calls: the request has another grammar", "tool_choice")
            tag = calls_grammar(*self.parsers, request.forced_schemas, prompt_end, single=request.single_call)
            syntax = "json" if tag is None else "template"
            tag = tag or json_grammar(request.forced_schemas, named=request.forced_by_name)
            sampling = replace(request.sampling, extra={**extra, **forcing(tag)})
            request = replace(request, sampling=sampling, forced_syntax=syntax)
        sampling, answers = request.sampling, []
        for _ in range(sampling.n):
            parser: ParserRun | None = start_answer()
            if isinstance(request, ChatRequest) and self.server_parses:
                parser = None
            elif isinstance(request, ChatRequest) and request.forced_syntax == "json":
                parser = JsonCallsRun(next(iter(request.forced_schemas)) if request.forced_by_name else None)
            elif isinstance(request, ChatRequest):
                options = ParseOptions(request.call.tools if request.parses_calls else (), prompt_end)
                parser = self.start_parser(options)
            text = TextStream(
                self.tokenizer.vocabulary,
                # Parsers need the control tokens of their syntax, as vLLM's do.
                special=request.shows_special_tokens or not isinstance(parser, PlainRun),
                end_ids={*self.tokenizer.eos_ids, *sampling.stop_token_ids},
                stop=sampling.stop,
                keep_stop=bool(sampling.extra.get("include_stop_str_in_output")),
            )
            answers.append(UnfinishedAnswer(text, parser))
        return request, answers
