"""Renders the whole conversation as the template writes it, with the role of each token."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.align.alignment import align
from tito_audit.align.blocks import Blocks
from tito_audit.align.pieces import Pieces
from tito_audit.errors import RenderError
from tito_audit.evidence.reference import Reference
from tito_audit.evidence.roles import (
    COMMON_ROLES,
    GENERATION_PROMPT,
    TEMPLATE,
    TURN_END,
    UNKNOWN,
    LazyRoles,
    Roles,
    token_roles,
)
from tito_audit.record.arrays import Ids, Mask, Offsets, empty_ids
from tito_audit.record.message import Message
from tito_audit.record.prefix import same_ids
from tito_audit.record.rollout import Rollout
from tito_audit.record.speakers import ASSISTANT, GIVEN_ANSWER, unknown_role_name
from tito_audit.render.marks import SpanKind
from tito_audit.render.scaffolds import Scaffold
from tito_audit.render.spans import FastRendering, Rendering, render_fast, render_spans
from tito_audit.render.template import Template
from tito_audit.tokens.segments import any_of, common_beginning
from tito_audit.tokens.tokenizer import Tokenizer
from tito_audit.tokens.vocab import Prefix

Turns = tuple[tuple[int, int], ...]
"""For each answer, the index of its first token and of its end token."""
_Kind = tuple[object, ...]

_ONE_IN = 256
"""One in this many conversations of a kind is read by marks as a check."""


class TurnReader:
    """Finds the model's turns in rendered ids by control tokens alone, for one template, generation prompt and
    tokenizer."""

    def __init__(self, tokenizer: Tokenizer, prompt: Ids, end_ids: frozenset[int]) -> None:
        vocabulary = tokenizer.vocabulary
        self._vocabulary = vocabulary
        self._prompt = prompt.tobytes()
        self._size = len(prompt)
        self._first = int(prompt[0])
        self._controls = int(np.count_nonzero(vocabulary.control(prompt)))
        """How many control tokens the generation prompt has."""
        self._ends = end_ids
        contents = sorted(vocabulary.piece(token) for token in vocabulary.special_ids)
        self._opening = common_beginning(contents[0], contents[-1])
        """The text that every control token begins with, to search for first."""
        self._spelled = re.compile(any_of(contents))
        self._seen: dict[_Kind, int] = {}
        """How many conversations of each kind were read; -1 once marks showed other turns."""
        self._scaffolds: dict[Scaffold, tuple[_Kind, int]] = {}
        """The kind of conversations with a scaffold, and how many control tokens it seems to hold."""

    def turns(
        self, rollout: Rollout, ids: Ids, written: FastRendering, proof: Callable[[Turns], bool]
    ) -> Turns | None:
        """The turns in the ids `[N]` of a rendered conversation; None if control tokens do not show them.

        `proof` says whether marks show the same turns. It is called for the first conversation of a kind and for
        one in 256 of the rest.
        """
        kind, controls = self._scaffolds.get(written.scaffold, (None, -1)) if written.scaffold else (None, -1)
        if kind is None:
            # The kind holds what a template may tell apart: who speaks, and what there is besides plain text.
            shapes = frozenset(
                {
                    (
                        message.role,
                        bool(message.tool_calls),
                        message.reasoning is None,
                        type(message.content),
                        "</think>" in message.text if message.role == ASSISTANT else None,
                    )
                    for message in rollout.messages
                }
            )
            kind = (shapes, rollout.messages[0].role, bool(rollout.tools), repr(rollout.template_kwargs))
            if written.scaffold is not None and self._opening:
                controls = sum(piece.count(self._opening) for piece in written.scaffold.pieces)
                self._scaffolds[written.scaffold] = kind, controls
        seen = self._seen.get(kind, 0)
        turns = self._find_turns(rollout.messages, ids) if seen >= 0 else None
        if turns is None:
            return None
        # If the scaffold accounts for all that begins like a control token, the messages spell none.
        if written.text.count(self._opening) != controls and self._spell_control_token(rollout.messages):
            return None
        if seen % _ONE_IN == 0 and not proof(turns):
            self._seen[kind] = -1
            return None
        self._seen[kind] = seen + 1
        return turns

    def _find_turns(self, messages: Sequence[Message], ids: Ids) -> Turns | None:
        """The turns, if there are as many as answers; None too unless each message was sampled or given as its
        role says, and every answer is a single text."""
        answers = 0
        for message in messages:
            is_answer = message.role == ASSISTANT
            as_role_says = message.stated_speaker is None or message.sampled == is_answer
            if message.role not in COMMON_ROLES or not as_role_says:
                return None
            if is_answer and isinstance(message.content, tuple):
                return None
            answers += is_answer
        at = self._vocabulary.control(ids).nonzero()[0]
        control, places = ids.take(at).tolist(), at.tolist()
        turns: list[tuple[int, int]] = []
        for number, place in enumerate(places):
            start, stop = place + self._size, number + self._controls
            if control[number] != self._first or ids[place:start].tobytes() != self._prompt:
                continue
            # The next control token has to be the turn end, and no other end may come right before it.
            if stop >= len(places) or control[stop] not in self._ends or (turns and turns[-1][1] >= start):
                return None
            closer = places[stop]
            if closer > start and int(ids[closer - 1]) in self._ends:
                return None
            turns.append((start, closer))
        return tuple(turns) if turns and len(turns) == answers else None

    def _spell_control_token(self, messages: Sequence[Message]) -> bool:
        """Whether a text or a key anywhere in these messages spells a control token."""
        texts: list[str] = []
        pending: list[Iterable[Any]] = [message.wire.values() for message in messages]
        for values in pending:
            for value in values:
                if type(value) is str:
                    texts.append(value)
                elif isinstance(value, Mapping):
                    pending += value.keys(), value.values()
                elif isinstance(value, list | tuple):
                    pending.append(value)
        wires = "\n".join(texts)
        return self._opening in wires and self._spelled.search(wires) is not None


def turn_reader(
    tokenizer: Tokenizer, template: Template, prompt: str | None, end_ids: frozenset[int]
) -> TurnReader | None:
    """The reader for what a template writes; None if its generation prompt cannot show turns."""
    vocabulary = tokenizer.vocabulary
    if not prompt or not vocabulary.special_ids or not end_ids:
        return None
    readers: dict[str, TurnReader | None] = template.memo.setdefault((TurnReader, vocabulary), {})
    if prompt not in readers:
        (ids,) = tokenizer.encode_fast_batch([prompt])
        # The prompt has to open with a control token, and to be what its own tokens decode to.
        shows = len(ids) > 0 and vocabulary.control(ids)[0] and vocabulary.text(ids) == prompt
        readers[prompt] = TurnReader(tokenizer, ids, end_ids) if shows else None
    return readers[prompt]


@dataclass(frozen=True, slots=True)
class ByteRoles:
    """The role of each byte of a text, span by span."""

    names: tuple[str, ...]
    """Role names, indexed by `codes`."""
    codes: NDArray[np.int16]
    """`[S]` the role of each span."""
    starts: Offsets
    """`[S]` the first byte of each span, from 0 on; a span ends where the next begins."""
    sampled: tuple[tuple[int, int], ...]
    """Byte ranges that a model would sample; none is empty."""
    size: int
    """Total number of bytes, at least 1."""

    def of_tokens(self, at: Offsets) -> tuple[Roles, Mask]:
        """`[N]` each: the role of the first byte of each token, and whether a model would sample it.

        `at` is the byte at which each token begins, in ascending order; past the last byte, the last one counts.
        """
        first = at.searchsorted(self.starts)
        counts = np.empty_like(first)
        counts[:-1] = first[1:] - first[:-1]
        counts[-1] = len(at) - first[-1]
        sampled = np.zeros(len(at), np.bool_)
        if self.sampled:
            edges = at.searchsorted([edge for stretch in self.sampled for edge in stretch]).tolist()
            for (_, end), start, stop in zip(self.sampled, edges[::2], edges[1::2], strict=True):
                sampled[start : stop if end < self.size else None] = True
        return Roles(self.names, self.codes.repeat(counts)), sampled


@dataclass(frozen=True, slots=True)
class TurnsByControl:
    """The turns of a rendered conversation as its control tokens show them."""

    turns: Turns
    roles: Callable[[], tuple[Roles, ByteRoles | None]]
    """The role of each token, and of each byte if known; computed at each call."""

    def of_tokens(self, size: int) -> tuple[LazyRoles, Mask]:
        """`[size]` each: the role of each of the first tokens, and whether a model would sample it."""
        sampled, ends = np.zeros(size, np.bool_), np.zeros(size, np.bool_)
        for start, closer in self.turns:
            sampled[start : closer + 1] = True
            ends[closer : closer + 1] = True
        return LazyRoles(ends, lambda: self.roles()[0][:size]), sampled

    def of_bytes(self, at: Offsets, starts: Offsets) -> tuple[Roles, Mask]:
        """`[T]` each: roles and what is sampled, for recorded tokens that begin at the bytes `at`, `[T]`.

        `starts`, `[N]`, is the byte at which each token of the conversation begins. Both ascend.
        """

        def roles_there() -> Roles:
            roles, byte_roles = self.roles()
            if byte_roles is not None:
                return byte_roles.of_tokens(at)[0]
            return roles.at(starts.searchsorted(at, "right") - 1)

        sampled, ends = np.zeros(len(at), np.bool_), np.zeros(len(at), np.bool_)
        edges = [(first, closer, closer + 1) for first, closer in self.turns]
        bounds = np.append(starts, np.iinfo(np.int64).max)[np.array(edges)]
        for start, closer, end in at.searchsorted(bounds).tolist():
            sampled[start:end] = True
            ends[closer:end] = True
        return LazyRoles(ends, roles_there), sampled


@dataclass(frozen=True, slots=True)
class RenderedConversation:
    """A rendered conversation, encoded."""

    ids: Ids
    """`[N]` its tokens today."""
    shown: TurnsByControl | ByteRoles | None
    """The turns that control tokens show, else the role of each byte; None if neither is known."""
    data: bytes | None = None
    """The bytes of these tokens; None: not computed yet."""
    spelled: bool = False
    """Whether the recorded tokens have the same bytes."""

    def of_tokens(self, starts: Offsets) -> tuple[Roles, Mask] | None:
        """`[N]` each: the role of each token, and whether a model would sample it; None if unknown.

        `starts` is the byte at which each token begins.
        """
        if isinstance(self.shown, TurnsByControl):
            return self.shown.of_tokens(len(self.ids))
        return None if self.shown is None else self.shown.of_tokens(starts)

    def of_recorded(self, recorded: Pieces, canonical: Pieces, blocks: Blocks) -> tuple[Roles, Mask] | None:
        """`[T]` each: the same for recorded tokens that `blocks` aligns with those of the conversation."""
        if self.shown is None:
            return None
        # The byte of the conversation at which each recorded token begins, scaled to the block it lies in.
        zero, block_of = np.zeros(1, np.int64), blocks.recorded_end.searchsorted(np.arange(len(recorded)), "right")
        ends, canonical_ends = np.concatenate((zero, recorded.end)), np.concatenate((zero, canonical.end))
        first = np.concatenate((zero, blocks.recorded_end[:-1]))[block_of]
        canonical_first = np.concatenate((zero, blocks.canonical_end[:-1]))[block_of]
        last = np.maximum(canonical_ends[blocks.canonical_end[block_of]] - 1, 0)
        at = np.minimum(canonical_ends[canonical_first] + recorded.start - ends[first], last)
        if isinstance(self.shown, TurnsByControl):
            return self.shown.of_bytes(at, canonical.start)
        return self.shown.of_tokens(at)


def render_conversation(rollout: Rollout, reference: Reference) -> tuple[RenderedConversation | None, str | None]:
    """All messages as the template writes them today; or None, and why it cannot.

    If the template may not know a role, the role assignment that shares most tokens with the row is taken.
    """
    if COMMON_ROLES.issuperset([message.role for message in rollout.messages]):
        return _render(rollout, reference)
    recorded = rollout.training_row.token_ids if rollout.training_row is not None else empty_ids()
    first: tuple[RenderedConversation | None, str | None] | None = None
    best, most = None, -1
    for messages in role_assignments(rollout.messages):
        rendering = _render(replace(rollout, messages=messages), reference)
        first = first or rendering
        if rendering[0] is None:
            continue
        if same_ids(rendering[0].ids, recorded):
            return rendering
        blocks = align(reference.pieces(recorded), reference.pieces(rendering[0].ids), open_end=True)
        if (shared := len(blocks.matched_positions()[0])) > most:
            best, most = rendering, shared
    return best or first or (None, None)


def role_assignments(messages: tuple[Message, ...]) -> Iterator[tuple[Message, ...]]:
    """The messages in their own roles, then in roles that every template knows, as loaders map them: tool outputs
    as `tool`, then as `user`."""
    others = [message for message in messages if message.role not in COMMON_ROLES]
    yield messages
    for of_tools in (
        ("tool", "user") if any(unknown_role_name(message.speaker) is None for message in others) else ()
    ):
        common = {ASSISTANT: "assistant", GIVEN_ANSWER: "assistant", "tool": of_tools}
        yield tuple(
            message
            if message.role in COMMON_ROLES or unknown_role_name(role) is not None
            else replace(message, role=role, wire={**message.wire, "role": role}, stated_speaker=message.speaker)
            for message in messages
            for role in [common.get(message.speaker, message.speaker)]
        )


def _render(rollout: Rollout, reference: Reference) -> tuple[RenderedConversation | None, str | None]:
    renderer = reference.renderer
    assert renderer is not None
    recorded = rollout.training_row.token_ids if rollout.training_row is not None else empty_ids()
    fast_text = render_fast(renderer, rollout.messages, rollout.tools, rollout.template_kwargs)
    try:
        if fast_text is not None:
            ids, spelled = _confirm_fast_text(fast_text, rollout, recorded, reference)
            if ids is not None:
                turns = _turns_by_control(rollout, fast_text, ids, reference)
                if turns is not None:
                    data = None if ids is recorded else fast_text.text.encode()
                    return RenderedConversation(ids, turns, data, spelled), None
                by_marks = fast_text.find_spans()
                if by_marks is not None:
                    return _with_byte_roles(rollout, by_marks, ids, reference), None
        rendering = render_spans(renderer, rollout.messages, rollout.tools, rollout.template_kwargs)
    except RenderError as error:
        return None, str(error)
    return _with_byte_roles(rollout, rendering, reference.encode_as(rendering.text, recorded), reference), None


def _confirm_fast_text(
    fast_text: FastRendering, rollout: Rollout, recorded: Ids, reference: Reference
) -> tuple[Ids | None, bool]:
    """Today's ids of a text by the fast engine, None if the template writes another one; and whether the recorded
    ids are others with the same bytes.

    Recorded ids confirm the text if they spell it. Otherwise the template itself has to write it; RenderError if
    it refuses.
    """
    text = fast_text.text
    end = int(recorded[-1]) if len(recorded) else -1
    if end in reference.end_ids():
        # Most rows stop at their last turn end, after which the template writes a line feed that no model samples.
        spelling = reference.vocabulary.piece(end)
        size, own = text.rfind(spelling) + len(spelling), reference.tokenizer.control_tokens.tokens.get(spelling)
        if len(spelling) <= size < len(text) and own == end and reference.leads_to(text[:size], recorded):
            (rest,) = reference.tokenizer.encode_fast_batch([text[size:]])
            return np.concatenate((recorded, rest)), False
    if reference.leads_to(text, recorded):
        return recorded, False
    spelled = reference.spells(recorded, text)
    if not spelled:
        chat, written = fast_text.renderer.render_chat(
            rollout.messages,
            rollout.tools,
            add_generation_prompt=False,
            template_kwargs=rollout.template_kwargs,
        )
        if written != text or chat != fast_text.chat:
            return None, False
    return reference.encode_as(text, recorded), spelled and reference.vocabulary.prefix is Prefix.NEVER


def _turns_by_control(
    rollout: Rollout, fast_text: FastRendering, ids: Ids, reference: Reference
) -> TurnsByControl | None:
    """The turns in the ids of a text by control tokens; None if these do not show them."""
    template = fast_text.renderer.template(bool(rollout.tools))
    reader = turn_reader(reference.tokenizer, template, fast_text.generation_prompt, reference.end_ids())
    if reader is None or not reference.has_bytes_of(ids, fast_text.text):
        return None

    def marked() -> tuple[Roles, Mask, ByteRoles] | None:
        """What marks in the template's text show: `[N]` roles and what is sampled, and the role of each byte."""
        rendering = fast_text.find_spans()
        shown = None if rendering is None else _with_byte_roles(rollout, rendering, ids, reference).shown
        if not isinstance(shown, ByteRoles):
            return None
        lengths = reference.vocabulary.byte_lengths(ids)
        return *shown.of_tokens(lengths.cumsum() - lengths), shown

    def is_proved(turns: Turns) -> bool:
        """Whether marks show exactly these turns and no role is unclear."""
        by_marks = marked()
        if by_marks is None:
            return False
        roles, sampled, _ = by_marks
        ends, generated = TurnsByControl(turns, lambda: (roles, None)).of_tokens(len(ids))
        alike = np.array_equal(generated, sampled) and np.array_equal(roles.among((TURN_END,)), ends.turn_ends)
        return alike and not roles.unclear().any()

    def roles() -> tuple[Roles, ByteRoles | None]:
        """The role of each token by marks, else by control tokens; and of each byte if marks show it."""
        by_marks = marked()
        if by_marks is not None:
            return by_marks[0], by_marks[2]
        headers = reference.headers(rollout.template_kwargs)
        return token_roles(reference.pieces(ids), reference.end_ids(), headers), None

    turns = reader.turns(rollout, ids, fast_text, is_proved)
    return None if turns is None else TurnsByControl(turns, roles)


def _with_byte_roles(
    rollout: Rollout, rendering: Rendering, ids: Ids, reference: Reference
) -> RenderedConversation:
    # If a normalizer changed the text, its spans do not fit the bytes of the tokens.
    exact = reference.has_bytes_of(ids, rendering.text)
    size = reference.vocabulary.byte_count(ids)
    return RenderedConversation(ids, _byte_roles(rollout, rendering, size) if exact else None)


def _byte_roles(rollout: Rollout, rendering: Rendering, size: int) -> ByteRoles | None:
    """The role of each byte of a text; None if an answer of the model is not found in it."""
    ranges = [rendering.sampled.get(i) for i, message in enumerate(rollout.messages) if message.sampled]
    sampled = [span for span in ranges if span is not None]
    if not size or not ranges or len(sampled) < len(ranges):
        return None
    # The UTF-8 byte offset of each character offset that is needed.
    byte: dict[int, int] = {}
    before = offset = 0
    for edge in sorted({edge for span in sampled for edge in span} | {span.start for span in rendering.spans}):
        part = rendering.text[before:edge]
        offset += len(part) if part.isascii() else len(part.encode("utf-8", "surrogatepass"))
        byte[edge], before = offset, edge
    names: dict[str, int] = {}
    codes = []
    for span in rendering.spans:
        speaker = UNKNOWN if span.message_index is None else rollout.messages[span.message_index].speaker
        if span.kind is SpanKind.GENERATION_PROMPT:
            name = GENERATION_PROMPT
        elif span.kind is SpanKind.TURN_END:
            name = TURN_END if speaker == ASSISTANT else TEMPLATE
        else:
            name = TEMPLATE if span.kind is SpanKind.SCAFFOLD else speaker
        codes.append(names.setdefault(name, len(names)))
    return ByteRoles(
        tuple(names),
        np.array(codes, np.int16),
        np.array([byte[span.start] for span in rendering.spans], np.int64),
        tuple((byte[start], byte[end]) for start, end in sampled if start < end),
        size,
    )
