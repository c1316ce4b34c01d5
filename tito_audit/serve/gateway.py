"""A gateway: sessions, a provider and a log; every answer is logged before its client has all of it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from tito_audit.errors import EncodeError, ProviderError, RenderError, StorageError
from tito_audit.parser import Parsed, ParseOptions, ParserRun
from tito_audit.parsers import PlainRun, start_answer
from tito_audit.provider import GenerationChunk, GenerationResult, TokenProvider
from tito_audit.record.prompt_ids import PromptIds
from tito_audit.serve.apart import Apart
from tito_audit.serve.call_log import CallLog
from tito_audit.serve.errors import Refused, of_provider
from tito_audit.serve.lines import Answered, Sampled, Status, answer_lines, closed_line
from tito_audit.serve.metrics import Metrics
from tito_audit.serve.reading import Reading
from tito_audit.serve.request import Asked, ChatAsked, TextAsked
from tito_audit.serve.server_parser import ParsingProvider, SilentRun, chat_request, deltas_of
from tito_audit.serve.threads import Threads, new_thread
from tito_audit.sessions.engine import Conversations
from tito_audit.sessions.model import Branch, Prompt
from tito_audit.sessions.session import Session
from tito_audit.tokens.text_stream import TextStream
from tito_audit.tokens.tokenizer import Tokenizer

StartParser = Callable[[ParseOptions], ParserRun]
_PROMPT_END = 64
"""Ids at the end of a prompt that parsers are shown, as text."""


@dataclass(slots=True)
class Kept:
    """What a gateway keeps of a session besides its answers."""

    threads: Threads = field(default_factory=Threads)
    closed: float | None = None
    reward: float | None = None


@dataclass(slots=True)
class Partial:
    """One answer while it is being sampled."""

    reading: Reading
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    weight_version: str | None = None

    def take(self, chunk: GenerationChunk) -> list[dict[str, Any]]:
        """The deltas that the next tokens add."""
        self.ids += chunk.output_ids
        self.logprobs += chunk.logprobs
        self.weight_version = chunk.weight_version or self.weight_version
        if chunk.finish_reason is not None:
            self.finish_reason, self.stop_reason = chunk.finish_reason, chunk.stop_reason
        return self.reading.feed(chunk.output_ids)


@dataclass(slots=True)
class Call:
    """A call with its prompt, still without answers."""

    session: Session
    asked: Asked
    prompt: Prompt
    ids: PromptIds
    """`[P]` of the prompt."""
    call_id: str
    created: float
    answers: list[Partial]


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
    metrics: Metrics = field(default_factory=Metrics)
    clock: Callable[[], float] = time.time
    unchecked: Callable[[Gateway], Awaitable[None]] | None = None
    """What could not be asked of the provider's server at the start: asked before the first call. ProviderError
    while the server does not answer, Refused where it does not fit."""
    _kept: WeakKeyDictionary[Session, Kept] = field(default_factory=WeakKeyDictionary)
    _apart: Apart = field(init=False)

    def __post_init__(self) -> None:
        self._apart = Apart(self.tokenizer)

    async def ready(self) -> None:
        """Refused while calls cannot be served: the provider's server was never reached, or its tokenizer does not
        fit.
        """
        if self.unchecked is None:
            return
        try:
            await self.unchecked(self)
        except ProviderError as error:
            raise of_provider(error) from error
        self.unchecked = None

    # Calls

    async def begin(self, asked: Asked, session_id: str | None) -> Call:
        """A call with its prompt; Refused if no prompt can be made."""
        started = time.perf_counter()
        session = self._session(asked, session_id)
        if self.kept(session).closed is not None:
            raise Refused(f"session {session.id} is closed", status=409, code="session_closed")
        try:
            prompt = await self._prompt(session, asked)
        except RenderError as error:
            raise Refused(f"the chat template cannot write these messages: {error}", "messages") from None
        except EncodeError as error:
            raise Refused(str(error).split("\n")[0]) from None
        self._count(prompt, time.perf_counter() - started)
        kind = "chatcmpl" if isinstance(asked, ChatAsked) else "cmpl"
        ids = PromptIds(prompt.ids)
        answers = [Partial(self._reading(asked, ids)) for _ in range(asked.sampling.n)]
        return Call(session, asked, prompt, ids, f"{kind}-{uuid4().hex}", self.clock(), answers)

    async def _prompt(self, session: Session, asked: Asked) -> Prompt:
        if not isinstance(asked, ChatAsked):
            assert isinstance(asked, TextAsked)
            return session.text_prompt(asked.prompt)
        draft = session.draft(asked.call)
        await self._apart.encode(draft.prompt.added)
        return session.encoded(draft)

    async def sample(self, call: Call) -> tuple[GenerationResult, ...]:
        """All answers of a call, logged; Refused if the provider or the log fails."""
        try:
            results = await self.provider.generate_n(call.ids, call.asked.sampling)
            parsed = await self._parsed_by_server(call, results)
        except ProviderError as error:
            raise of_provider(error) from error
        for partial, result in zip(call.answers, results, strict=True):
            partial.take(_as_chunk(result))
            partial.reading.close()
        for partial, found in zip(call.answers, parsed, strict=False):
            partial.reading.say(deltas_of(found))
        await self._finish(call, results)
        return results

    async def stream(self, call: Call) -> AsyncGenerator[tuple[GenerationChunk, list[dict[str, Any]]], None]:
        """The chunks of all answers with their deltas; at the end the call is in the log.

        If it is closed or fails earlier, what was sampled is logged as cut off, and no later prompt continues it.
        """
        status = Status.CLIENT_GONE
        try:
            async with aclosing(_generator(self.provider.stream(call.ids, call.asked.sampling))) as chunks:
                async for chunk in chunks:
                    yield chunk, call.answers[chunk.index].take(chunk)
            parsed = await self._parsed_by_server(call, [_result(call, one) for one in call.answers])
            for index, partial in enumerate(call.answers):
                deltas = partial.reading.close()
                deltas += partial.reading.say(deltas_of(parsed[index])) if parsed else []
                if deltas:
                    yield GenerationChunk(index, (), ()), deltas
            status = Status.ANSWERED
        except ProviderError as error:
            status = Status.BROKEN_OFF
            raise of_provider(error) from error
        finally:
            if status is not Status.ANSWERED:
                self._log_partial(call, status)
        await self._finish(call, [_result(call, one) for one in call.answers])

    async def _parsed_by_server(self, call: Call, results: Sequence[GenerationResult]) -> tuple[Parsed, ...]:
        """The answers as the server parses them; () if they are parsed here."""
        if not self.server_parses or not isinstance(call.asked, ChatAsked):
            return ()
        assert isinstance(self.provider, ParsingProvider), "checked when the gateway was made"
        return await self.provider.derender(results, chat_request(call.asked))

    async def _finish(self, call: Call, results: Sequence[GenerationResult]) -> None:
        """Keep the answers in their session, and log them."""
        chat = isinstance(call.asked, ChatAsked)
        messages = [one.reading.message() if chat else {"text": one.reading.text} for one in call.answers]
        own = call.asked.call if isinstance(call.asked, ChatAsked) else None
        threads = self.kept(call.session).threads.begin(call.call_id, call.prompt, len(results))
        status = Status.DUMMY if getattr(self.provider, "dummy", False) else Status.ANSWERED
        answers = [
            Sampled(
                choice,
                thread,
                message,
                result.output_ids,
                result.logprobs,
                partial.reading.why(result.finish_reason),
                result.stop_reason,
                result.weight_version,
            )
            for choice, (thread, message, result, partial) in enumerate(
                zip(threads, messages, results, call.answers, strict=True)
            )
        ]
        self.metrics.sampled_tokens.inc(sum(len(one.output_ids) for one in results))
        # An answer that could not be logged is not kept in the session either: its client gets an error.
        await self._log(answer_lines(self._answered(call, status), answers))
        call.session.commit(call.call_id, call.prompt, own, results, messages)

    def _log_partial(self, call: Call, status: Status) -> None:
        """Log the part of an answer that was sampled before the client left or the provider failed."""
        self.metrics.unfinished.labels(status).inc()
        answers = [
            Sampled(
                choice,
                new_thread(call.call_id, choice),
                one.reading.message() if isinstance(call.asked, ChatAsked) else {"text": one.reading.text},
                one.ids,
                one.logprobs,
                one.finish_reason or "abort",
                one.stop_reason,
                one.weight_version,
            )
            for choice, one in enumerate(call.answers)
            if one.ids
        ]
        try:
            self.log.append_now(answer_lines(self._answered(call, status), answers))
        except StorageError:  # Its client has left or already has an error.
            self.metrics.log_errors.inc()

    async def _log(self, lines: Sequence[dict[str, Any]]) -> None:
        try:
            await self.log.append(lines)
        except StorageError as error:
            self.metrics.log_errors.inc()
            raise Refused(
                f"the answer was sampled but could not be logged: {error}", status=507, code="log_failed"
            ) from error

    def _answered(self, call: Call, status: Status) -> Answered:
        return Answered(
            call.session.id,
            call.call_id,
            call.created,
            self.model,
            call.asked,
            call.prompt,
            call.ids,
            status,
        )

    # Sessions

    def kept(self, session: Session) -> Kept:
        """What is known of a session besides its answers."""
        return self._kept.setdefault(session, Kept())

    def session(self, session_id: str) -> Session:
        """The session with this id; Refused if it is not in memory."""
        found = self.conversations.get(session_id)
        if found is None:
            raise Refused(f"session {session_id} is not in memory; its answers are in the log", status=404)
        return found

    async def close_session(self, session_id: str, reward: float | None) -> Session:
        """End a session: no call continues it, and the log has its reward."""
        session = self.session(session_id)
        kept = self.kept(session)
        if kept.closed is not None:
            raise Refused(f"session {session_id} is closed", status=409, code="session_closed")
        now = self.clock()
        await self._log([closed_line(session_id, now, reward)])
        kept.closed, kept.reward = now, reward
        return session

    def _session(self, asked: Asked, session_id: str | None) -> Session:
        now = self.clock()
        if session_id is not None:
            return self.conversations.open(session_id, now=now)
        if isinstance(asked, ChatAsked):
            found = self.conversations.find(asked.call, now=now)
        else:
            assert isinstance(asked, TextAsked)
            found = self.conversations.find_text(asked.prompt, now=now)
        # The closed session had no name: the same history begins a new one.
        return found if self.kept(found).closed is None else self.conversations.open(None, now=now)

    # Parts of a call

    def _reading(self, asked: Asked, ids: PromptIds) -> Reading:
        run: ParserRun = start_answer()
        if isinstance(asked, ChatAsked):
            run = SilentRun() if self.server_parses else self._parser(asked, ids)
        sampling = asked.sampling
        text = TextStream(
            self.tokenizer.vocabulary,
            # Parsers need the control tokens of their syntax, as vLLM's do.
            special=asked.special or not isinstance(run, PlainRun),
            end_ids={*self.tokenizer.eos_ids, *sampling.stop_token_ids},
            stop=sampling.stop,
            keep_stop=bool(sampling.extra.get("include_stop_str_in_output")),
        )
        return Reading(text, run)

    def _parser(self, asked: ChatAsked, ids: PromptIds) -> ParserRun:
        end = self.tokenizer.vocabulary.text(ids.tail(_PROMPT_END))
        return self.start_parser(ParseOptions(asked.call.tools if asked.parses_calls else (), end))

    def _count(self, prompt: Prompt, seconds: float) -> None:
        metrics = self.metrics
        metrics.prompt_seconds.observe(seconds)
        metrics.prompt_tokens.inc(prompt.length)
        metrics.kept_tokens.inc(prompt.kept)
        metrics.branches.labels(prompt.branch).inc()
        if prompt.branch is Branch.FORK and prompt.fork is not None:
            metrics.forks.labels(prompt.fork.reason).inc()
        metrics.sessions.set(len(self.conversations))


def _as_chunk(result: GenerationResult) -> GenerationChunk:
    return GenerationChunk(
        0,
        result.output_ids,
        result.logprobs,
        finish_reason=result.finish_reason,
        stop_reason=result.stop_reason,
        weight_version=result.weight_version,
    )


def _result(call: Call, one: Partial) -> GenerationResult:
    return GenerationResult(
        call.ids,
        tuple(one.ids),
        tuple(one.logprobs),
        None,
        one.finish_reason,
        one.stop_reason,
        one.weight_version,
    )


async def _generator(chunks: AsyncIterator[GenerationChunk]) -> AsyncGenerator[GenerationChunk, None]:
    """The same chunks; closing it closes theirs, which ends the generation."""
    try:
        async for chunk in chunks:
            yield chunk
    finally:
        if isinstance(chunks, AsyncGenerator):
            await chunks.aclose()
