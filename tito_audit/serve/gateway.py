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
from typing import Any, Protocol, runtime_checkable
from uuid import uuid4
from weakref import WeakKeyDictionary

import orjson
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tito_audit.errors import EncodeError, ProviderError, RenderError, StorageError
from tito_audit.parser import Delta, Parsed, ParseOptions, Parser, ParserRun
from tito_audit.parsers import (
    JsonCalls,
    PlainRun,
    collected,
    finish_reason,
    forced_format,
    forced_json,
    start_answer,
    to_delta,
    to_message,
)
from tito_audit.provider import GenerationChunk, GenerationResult, TokenProvider, logged_spans
from tito_audit.record.by_name import WeightSpans
from tito_audit.record.prompt_ids import PromptIds
from tito_audit.render.renderer import wrap_text_in_parts
from tito_audit.serve.call_log import CallLog
from tito_audit.serve.errors import Refused, of_provider
from tito_audit.serve.request import Asked, ChatAsked, TextAsked
from tito_audit.sessions.engine import Conversations
from tito_audit.sessions.model import Branch, Node, Prompt
from tito_audit.sessions.session import Session
from tito_audit.tokens.text_stream import TextStream
from tito_audit.tokens.tokenizer import Tokenizer

# Which thread of calls an answer belongs to; each answer is in exactly one.

Answer = tuple[str, int]
"""A call by its id, and which of its answers."""


@dataclass(slots=True)
class Threads:
    """The threads of one session.

    The first answer to the first call that continues an answer stays in its thread; every other answer, start or
    fork begins a new one. So in a thread each prompt starts with everything before it.
    """

    _of: dict[Answer, str] = field(default_factory=dict)
    _continued: set[Answer] = field(default_factory=set)

    def begin(self, call_id: str, prompt: Prompt, answers: int) -> tuple[str, ...]:
        names = [new_thread(call_id, choice) for choice in range(answers)]
        parent = prompt.parent if prompt.branch is Branch.CONTINUES else None
        if parent is not None:
            before = (parent.call_id, parent.choice)
            if before in self._of and before not in self._continued:
                names[0] = self._of[before]
                self._continued.add(before)
        self._of |= {(call_id, choice): name for choice, name in enumerate(names)}
        return tuple(names)

    def of(self, node: Node) -> str:
        return self._of[node.call_id, node.choice]


def new_thread(call_id: str, choice: int) -> str:
    """The name of a thread that an answer begins."""
    return f"{call_id}/{choice}"


# The gateway's metrics for Prometheus. No label holds anything of a session or a prompt.

_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_OVERHEAD = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1)


class Metrics:
    """The numbers of one gateway."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        own: Any = {"namespace": "tito_audit", "registry": self._registry}
        counter: Callable[..., Counter] = partial(Counter, **own)
        gauge: Callable[..., Gauge] = partial(Gauge, **own)
        histogram: Callable[..., Histogram] = partial(Histogram, **own)
        self.requests = counter("requests", "Answered requests", ("endpoint", "status"))
        self.in_flight = gauge("in_flight", "Requests in progress")
        self.seconds = histogram("request_seconds", "Time to answer a request", ("endpoint",), buckets=_SECONDS)
        self.prompt_seconds = histogram("prompt_seconds", "Time to make a prompt", buckets=_OVERHEAD)
        text = "Time that the gateway itself takes for a request that does not stream"
        self.overhead = histogram("overhead_seconds", text, ("branch",), buckets=_OVERHEAD)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens")
        self.kept_tokens = counter("kept_tokens", "Prompt tokens that came from stored answers")
        self.sampled_tokens = counter("sampled_tokens", "Sampled tokens")
        self.branches = counter("prompts", "Prompts by branch: start, continues or fork", ("branch",))
        self.forks = counter("forks", "Forks by reason", ("reason",))
        self.unfinished = counter("unfinished", "Answers that were cut off", ("status",))
        self.sessions = gauge("sessions", "Sessions in memory")
        self.log_errors = counter("log_errors", "Calls that could not be logged")

    def prompt(self, prompt: Prompt, seconds: float) -> None:
        """Count a prompt that was made in so many seconds."""
        self.prompt_seconds.observe(seconds)
        self.prompt_tokens.inc(prompt.length)
        self.kept_tokens.inc(prompt.kept)
        self.branches.labels(prompt.branch).inc()
        if prompt.branch is Branch.FORK and prompt.fork is not None:
            self.forks.labels(prompt.fork.reason).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)


# The lines of the log: one for each answer, and one for the end of a session.

VERSION = 1


class Status(StrEnum):
    """What became of an answer."""

    ANSWERED = "answered"
    CLIENT_GONE = "client_gone"
    """The client left while it was being sampled. The line holds what was sampled until then; no later prompt
    continues it.
    """
    BROKEN_OFF = "broken_off"
    """The provider failed while it was being sampled; the same holds."""
    DUMMY = "dummy"
    """Its ids are placeholders, never sampled."""


Facts = Mapping[str, str]


def answer_lines(call: Call, sampler: Facts, status: Status, threads: Mapping[int, str]) -> list[dict[str, Any]]:
    """One line for each of these answers of a call, by number, in the threads that they belong to."""
    prompt, fields = call.prompt, call.fields
    parent, fork = prompt.parent, prompt.fork
    cut_off = status in (Status.CLIENT_GONE, Status.BROKEN_OFF)
    shared = {
        "tito_audit_gateway": VERSION,
        "session_id": call.session.id,
        "call_id": call.call_id,
        "thread_id": "",
        "choice": 0,
        "n": fields.sampling.n,
        "parent": None if parent is None else {"call_id": parent.call_id, "choice": parent.choice},
        "branch": prompt.branch,
        "fork": None if fork is None else {"reason": fork.reason, "detail": fork.detail, "message": fork.message},
        "kept": prompt.kept,
        "proof": prompt.proof,
        **({"alike": prompt.alike} if prompt.alike else {}),
        **_request(call, sampler),
    }
    return [
        {
            **shared,
            "thread_id": thread,
            "choice": choice,
            "weight_version": answer.weight_version,
            # Where one version sampled all of it, `weight_version` says so.
            **(
                {"weight_versions": spans} if (spans := logged_spans(answer.weight_spans, len(answer.ids))) else {}
            ),
            "response_message": answer.message() if isinstance(fields, ChatAsked) else None,
            **({} if isinstance(fields, ChatAsked) else {"text": answer.text}),
            "prompt_token_ids": orjson.Fragment(call.ids.json),
            "completion_token_ids": answer.ids,
            "logprobs": answer.logprobs,
            "finish_reason": (answer.finish_reason or "abort") if cut_off else answer.why(),
            "stop_reason": answer.stop_reason,
            "status": status,
        }
        for choice, thread in threads.items()
        for answer in (call.answers[choice],)
    ]


def _request(call: Call, sampler: Facts) -> dict[str, Any]:
    fields = call.fields
    facts: dict[str, Any] = {
        "endpoint": fields.endpoint,
        **sampler,
        "created": call.created,
        "weight_version": None,
        "sampling": fields.sampling_as_sent,
    }
    if isinstance(fields, ChatAsked):
        facts |= {
            "chat_template_kwargs": fields.call.template_kwargs,
            "tools": list(fields.call.tools),
            "messages": fields.messages,
        }
        if fields.syntax is not None:
            facts["forced"] = {"functions": list(fields.forced), "syntax": fields.syntax}
        # The messages given to the template, if they differ from those that the client sent.
        messages = None if call.prompt.written is None else call.prompt.written.messages
        wraps = call.session.wraps_texts
        if messages is not None and (wraps or messages is not fields.sent):
            wires = [wrap_text_in_parts(message.wire) if wraps else message.wire for message in messages]
            if wires != [message.wire for message in fields.sent]:
                facts["template_messages"] = wires
        return facts
    if isinstance(fields, TextAsked) and isinstance(fields.prompt, str):
        facts["prompt"] = fields.prompt
    return {**facts, "messages": None}


# Long texts are encoded in threads, so that other requests do not wait.

_LONG = 20_000
"""Texts of this many characters take several milliseconds to encode, too long for the event loop."""
_THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))


class Apart:
    """Encodes long texts off the event loop; the tokenizer library releases the GIL."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._threads: ThreadPoolExecutor | None = None

    async def encode(self, text: str) -> None:
        """Encode the segments of a long text in advance, so that encoding it later is fast."""
        if len(text) < _LONG:
            return
        segments = self._tokenizer.segments
        unknown = segments.uncached_segments(text)
        if sum(map(len, unknown)) < _LONG:
            return
        self._threads = self._threads or ThreadPoolExecutor(_THREADS, thread_name_prefix="encode")
        loop = asyncio.get_running_loop()
        segments.remember(await loop.run_in_executor(self._threads, segments.encode_uncached, unknown))


@runtime_checkable
class ParsingProvider(Protocol):
    """A provider whose server has parsers of its own, for model families without a parser here."""

    async def derender(
        self, results: Sequence[GenerationResult], chat_request: Mapping[str, Any]
    ) -> tuple[Parsed, ...]:
        """The answers to one prompt, parsed; ProviderError if the server cannot."""
        ...


_GRAMMARS = frozenset(
    (
        *("response_format", "structured_outputs", "structural_tag", "regex", "ebnf", "json_schema"),
        *("guided_json", "guided_regex", "guided_grammar", "guided_choice"),
    )
)
"""Fields of a request that keep an answer to a grammar."""
StartParser = Callable[[ParseOptions], ParserRun]
Parsers = tuple[Parser | None, Parser | None]
"""Those of reasoning and of tools."""
_PROMPT_END = 64
"""Ids at the end of a prompt that parsers are shown, as text."""


@dataclass(slots=True)
class SessionFacts:
    """What a gateway keeps of a session besides its answers."""

    threads: Threads = field(default_factory=Threads)
    closed: float | None = None
    reward: float | None = None


@dataclass(slots=True)
class PartialAnswer:
    """One answer while it is being sampled, and as its client gets it: text, reasoning and tool calls.

    What it reads does not change its ids; its deltas add up to `message`.
    """

    stream: TextStream
    run: ParserRun | None
    """None: the provider's server parses the whole answer at its end."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    weight_version: str | None = None
    weight_spans: WeightSpans = ()
    _deltas: list[Delta] = field(default_factory=list)
    _call_ids: list[str] = field(default_factory=list)
    _parsed: Parsed | None = None

    def take(self, chunk: GenerationChunk | GenerationResult) -> list[dict[str, Any]]:
        """The deltas that the next ids add, as OpenAI writes them."""
        self.ids += chunk.output_ids
        self.logprobs += chunk.logprobs
        self.weight_version = chunk.weight_version or self.weight_version
        self.weight_spans = chunk.weight_spans or self.weight_spans
        if chunk.finish_reason is not None:
            self.finish_reason, self.stop_reason = chunk.finish_reason, chunk.stop_reason
        text = self.stream.feed(chunk.output_ids)
        return [] if self.run is None else self._add(self.run.feed(text))

    def close(self, by_server: Parsed | None) -> list[dict[str, Any]]:
        """The deltas that were held back, at the end of the answer, or all as the server parsed it."""
        text = self.stream.close()
        if self.run is not None:
            return self._add((*self.run.feed(text), *self.run.close()))
        assert by_server is not None, "the server parses"
        calls = enumerate(by_server.tool_calls)
        deltas = [Delta(call=number, name=call.name, arguments=call.arguments) for number, call in calls]
        return self._add([Delta(by_server.content or "", by_server.reasoning or ""), *deltas])

    @property
    def wires(self) -> list[dict[str, Any]]:
        """All deltas so far."""
        return [wire for delta in self._deltas if (wire := to_delta(delta, self._call_id))]

    @property
    def parsed(self) -> Parsed:
        self._parsed = self._parsed or collected(self._deltas)
        return self._parsed

    @property
    def text(self) -> str:
        return self.parsed.content or ""

    def message(self) -> dict[str, Any]:
        return to_message(self.parsed, self._call_id)

    def why(self) -> str | None:
        """Why it ended, for its client."""
        return finish_reason(self.parsed, self.finish_reason)

    def _add(self, deltas: Sequence[Delta]) -> list[dict[str, Any]]:
        self._deltas += deltas
        self._parsed = None
        return [wire for delta in deltas if (wire := to_delta(delta, self._call_id))]

    def _call_id(self, number: int) -> str:
        """The id of a tool call; always the same for one number."""
        while len(self._call_ids) <= number:
            self._call_ids.append(f"call_{uuid4().hex[:24]}")
        return self._call_ids[number]


@dataclass(slots=True)
class Call:
    """A call with its prompt, still without answers."""

    session: Session
    fields: Asked
    prompt: Prompt
    ids: PromptIds
    """`[P]` of the prompt."""
    call_id: str
    created: float
    answers: list[PartialAnswer]

    @property
    def sampled(self) -> int:
        """The number of tokens of all answers."""
        return sum(len(answer.ids) for answer in self.answers)

    @property
    def prompt_wire(self) -> dict[str, Any]:
        """The ids of the prompt, where the client asked for ids."""
        return {"prompt_token_ids": orjson.Fragment(self.ids.json)} if self.fields.token_ids else {}


@dataclass(slots=True)
class Gateway:
    """What the endpoints use; belongs to one event loop."""

    provider: TokenProvider
    tokenizer: Tokenizer
    conversations: Conversations
    log: CallLog
    model: str
    """The name that clients know the model by."""
    start_parser: StartParser = lambda options: start_answer(options=options)
    server_parses: bool = False
    """The provider's server parses whole answers, and `start_parser` is not used."""
    parsers: Parsers = (None, None)
    """Those that `start_parser` starts, for the grammars that force calls."""
    metrics: Metrics = field(default_factory=Metrics)
    digests: Facts = field(default_factory=dict)
    """Those of tokenizer and template, for the log."""
    clock: Callable[[], float] = time.time
    unchecked: Callable[[Gateway], Awaitable[None]] | None = None
    """What could not be asked of the provider's server at the start: asked before the first call. ProviderError
    while the server does not answer, Refused where it does not fit."""
    _kept: WeakKeyDictionary[Session, SessionFacts] = field(default_factory=WeakKeyDictionary)
    _apart: Apart = field(init=False)

    def __post_init__(self) -> None:
        self._apart = Apart(self.tokenizer)
        if hasattr(self.provider, "end_ids"):  # a server that does not say why an answer ended
            self.provider.end_ids = self.tokenizer.eos_ids

    async def ready(self) -> None:
        """Refused while calls cannot be served: the server was never reached, or its tokenizer does not fit."""
        if self.unchecked is None:
            return
        try:
            await self.unchecked(self)
        except ProviderError as error:
            raise of_provider(error) from error
        self.unchecked = None

    async def begin(self, fields: Asked, session_id: str | None) -> Call:
        """A call with its prompt; Refused if no prompt can be made."""
        started = time.perf_counter()
        if isinstance(fields, ChatAsked):
            try:
                fields = replace(fields, call=self.conversations.in_form(fields.call))
            except RenderError as error:
                raise Refused(str(error), "messages") from None
        now = self.clock()
        if session_id is not None:
            session = self.conversations.open(session_id, now=now)
            if self.facts_of(session).closed is not None:
                raise Refused(f"session {session.id} is closed", status=409, code="session_closed")
        else:
            if isinstance(fields, ChatAsked):
                session = self.conversations.find(fields.call, now=now)
            else:
                assert isinstance(fields, TextAsked)
                session = self.conversations.find_text(fields.prompt, now=now)
            if self.facts_of(session).closed is not None:  # it had no name: the same history begins a new one
                session = self.conversations.open(None, now=now)
        try:
            if isinstance(fields, ChatAsked):
                draft = session.draft(fields.call)
                await self._apart.encode(draft.prompt.added)
                prompt = session.encoded(draft)
            else:
                assert isinstance(fields, TextAsked)
                prompt = session.text_prompt(fields.prompt)
        except RenderError as error:
            raise Refused(f"the chat template cannot write these messages: {error}", "messages") from None
        except EncodeError as error:
            raise Refused(str(error).split("\n")[0]) from None
        self.metrics.prompt(prompt, time.perf_counter() - started)
        self.metrics.sessions.set(len(self.conversations))
        ids = PromptIds(prompt.ids)
        if isinstance(fields, ChatAsked) and fields.forced:
            fields = self._forcing(fields, self.tokenizer.vocabulary.text(ids.tail(_PROMPT_END)))
        answers = [self._unsampled(fields, ids) for _ in range(fields.sampling.n)]
        return Call(session, fields, prompt, ids, f"{fields.id_prefix}{uuid4().hex}", self.clock(), answers)

    async def prompt_length(self, fields: Asked, session_id: str | None) -> int:
        """How many ids the prompt of a call would have; Refused as for the call."""
        call = await self.begin(fields, session_id)
        if session_id is None and not call.session.nodes:
            self.conversations.close(call.session.id)  # It is new, and nobody knows its name.
        return len(call.ids)

    async def sample(self, call: Call) -> tuple[GenerationResult, ...]:
        """All answers of a call, logged; Refused if the provider or the log fails."""
        try:
            results = await self.provider.generate_n(call.ids, call.fields.sampling)
            parsed = await self._parsed_by_server(call, results)
        except ProviderError as error:
            raise of_provider(error) from error
        for answer, result, by_server in zip(call.answers, results, parsed, strict=True):
            answer.take(result)
            answer.close(by_server)
        await self._finish(call, results)
        return results

    async def stream(self, call: Call) -> AsyncGenerator[tuple[GenerationChunk, list[dict[str, Any]]], None]:
        """The chunks of all answers with their deltas; at the end the call is in the log.

        If it is closed or fails earlier, what was sampled is logged as cut off, and no later prompt continues it.
        """
        status = Status.CLIENT_GONE
        try:
            chunks = self.provider.stream(call.ids, call.fields.sampling)
            try:
                async for chunk in chunks:
                    yield chunk, call.answers[chunk.index].take(chunk)
            finally:
                if isinstance(chunks, AsyncGenerator):
                    await chunks.aclose()  # which ends the generation
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
            raise of_provider(error) from error
        finally:
            if status is not Status.ANSWERED:
                self.metrics.unfinished.labels(status).inc()
                threads = {
                    choice: new_thread(call.call_id, choice) for choice, a in enumerate(call.answers) if a.ids
                }
                try:
                    self.log.append_now(answer_lines(call, {"model": self.model, **self.digests}, status, threads))
                except StorageError:  # Its client has left or already has an error.
                    self.metrics.log_errors.inc()
        await self._finish(call, results)

    async def _parsed_by_server(self, call: Call, results: Sequence[GenerationResult]) -> Sequence[Parsed | None]:
        """The answers as the server parses them; None for those that are parsed here."""
        fields = call.fields
        if not self.server_parses or not isinstance(fields, ChatAsked):
            return [None] * len(results)
        assert isinstance(self.provider, ParsingProvider), "checked when the gateway was made"
        request: dict[str, Any] = {
            "messages": list(fields.messages),
            "chat_template_kwargs": dict(fields.call.template_kwargs),
            "skip_special_tokens": not fields.special,
        }
        if fields.parses_calls:
            request["tools"] = list(fields.call.tools)
        return await self.provider.derender(results, request)

    async def _finish(self, call: Call, results: Sequence[GenerationResult]) -> None:
        chat = call.fields if isinstance(call.fields, ChatAsked) else None
        messages = [answer.message() if chat else {"text": answer.text} for answer in call.answers]
        threads = self.facts_of(call.session).threads.begin(call.call_id, call.prompt, len(results))
        status = Status.DUMMY if getattr(self.provider, "dummy", False) else Status.ANSWERED
        self.metrics.sampled_tokens.inc(sum(len(result.output_ids) for result in results))
        # An answer that could not be logged is not kept in the session either: its client gets an error.
        await self._log(
            answer_lines(call, {"model": self.model, **self.digests}, status, dict(enumerate(threads)))
        )
        call.session.commit(call.call_id, call.prompt, chat.call if chat else None, results, messages)

    async def _log(self, lines: Sequence[dict[str, Any]]) -> None:
        try:
            await self.log.append(lines)
        except StorageError as error:
            self.metrics.log_errors.inc()
            raise Refused(
                f"the answer was sampled but could not be logged: {error}", status=507, code="log_failed"
            ) from error

    def facts_of(self, session: Session) -> SessionFacts:
        return self._kept.setdefault(session, SessionFacts())

    def session(self, session_id: str) -> Session:
        """The session with this id; Refused if it is not in memory."""
        open_session = self.conversations.get(session_id)
        if open_session is None:
            raise Refused(f"session {session_id} is not in memory; its answers are in the log", status=404)
        return open_session

    async def close_session(self, session_id: str, reward: float | None) -> Session:
        """End a session: no call continues it, and the log has its reward."""
        session = self.session(session_id)
        facts = self.facts_of(session)
        if facts.closed is not None:
            raise Refused(f"session {session_id} is closed", status=409, code="session_closed")
        now = self.clock()
        line = {"tito_audit_gateway": VERSION, "session_id": session_id, "closed": now, "reward": reward}
        await self._log([line])
        facts.closed, facts.reward = now, reward
        return session

    def _forcing(self, fields: ChatAsked, end: str) -> ChatAsked:
        """The request with a grammar: in the template's own syntax if it has one, else as vLLM forces calls."""
        forcing = getattr(self.provider, "forcing", None)
        if forcing is None or self.server_parses:
            why = f"{self.provider.name} takes no grammars" if forcing is None else "the server parses answers"
            raise Refused(f"`tool_choice` cannot force calls here: {why}", "tool_choice")
        extra = fields.sampling.extra
        if extra.keys() & _GRAMMARS:
            raise Refused("`tool_choice` cannot force calls: the request has another grammar", "tool_choice")
        tag = forced_format(*self.parsers, fields.forced, end, single=fields.one_call)
        syntax = "json" if tag is None else "template"
        tag = tag or forced_json(fields.forced, named=fields.forced_by_name)
        sampling = replace(fields.sampling, extra={**extra, **forcing(tag)})
        return replace(fields, sampling=sampling, syntax=syntax)

    def _unsampled(self, fields: Asked, ids: PromptIds) -> PartialAnswer:
        run: ParserRun | None = start_answer()
        if isinstance(fields, ChatAsked) and self.server_parses:
            run = None
        elif isinstance(fields, ChatAsked) and fields.syntax == "json":
            run = JsonCalls(next(iter(fields.forced)) if fields.forced_by_name else None)
        elif isinstance(fields, ChatAsked):
            end = self.tokenizer.vocabulary.text(ids.tail(_PROMPT_END))
            options = ParseOptions(fields.call.tools if fields.parses_calls else (), end)
            run = self.start_parser(options)
        sampling = fields.sampling
        text = TextStream(
            self.tokenizer.vocabulary,
            # Parsers need the control tokens of their syntax, as vLLM's do.
            special=fields.special or not isinstance(run, PlainRun),
            end_ids={*self.tokenizer.eos_ids, *sampling.stop_token_ids},
            stop=sampling.stop,
            keep_stop=bool(sampling.extra.get("include_stop_str_in_output")),
        )
        return PartialAnswer(text, run)
