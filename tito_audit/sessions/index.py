"""Finds the session that holds an answer to a history, and tells whether a client changed messages it sends back.

Two messages are the same if their role, content and tool calls are. No content, null and "" are equal, and so are
a text and a single part with that text. Arguments are compared as JSON: numbers are exact and typed (1 is not 1.0,
1.0 is 1.00), repeated keys count as text. Ids of tool calls are names: what counts is the call that a result
refers to. Reasoning is compared separately, because clients leave it out.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, InvalidOperation
from typing import Any, TypeAlias

from tito_audit.chains.histories import Key, Prefixes, new_digest
from tito_audit.record.message import Message, ToolCall
from tito_audit.render.spans import common_start
from tito_audit.sessions.model import Fork, ForkReason, Node

START = b""
"""The key of an empty history."""
_COMPARED = frozenset({"role", "content", "tool_calls", "tool_call_id"})
_OF_ANSWERS = frozenset({"assistant"})


def history_keys(keys: Sequence[bytes]) -> list[bytes]:
    """`[L + 1]` a key for each beginning of a history, equal where all messages up to there are the same."""
    history = [START]
    for key in keys:
        history.append(new_digest(history[-1] + key).digest())
    return history


def message_keys(messages: Sequence[Message]) -> list[bytes]:
    """A key for each message, equal where the messages are the same, reasoning aside."""
    calls: dict[str, tuple[int, int]] = {}
    keys: list[bytes] = []
    for index, message in enumerate(messages):
        # repr of tuples, texts and numbers is injective, so equal digests mean equal messages.
        wire = message.wire
        answered = wire.get("tool_call_id")
        refers: object = None
        if answered is not None:
            place = calls.get(answered) if isinstance(answered, str) else None
            # Counted back from here, as messages before the call may have been compacted.
            refers = ("call", index - place[0], place[1]) if place is not None else comparable_value(answered)
        tool_calls = tuple((call.name, comparable_arguments(call)) for call in message.tool_calls)
        rest = {} if message.role in _OF_ANSWERS else wire
        stated = [(key, value) for key, value in rest.items() if key not in _COMPARED and value is not None]
        others = tuple(sorted((str(key), repr(comparable_value(value))) for key, value in stated))
        # The content is a text, unless it has parts that are more than one text.
        content: object
        if message.content is None or isinstance(message.content, str):
            content = _shorten(message.content or "")
        else:
            filled = ({key: value for key, value in part.items() if value is not None} for part in message.content)
            are_texts = all(
                part.keys() == {"type", "text"} and part["type"] == "text" and isinstance(part["text"], str)
                for part in filled
            )
            is_text = are_texts and (len(message.content) < 2 or message.role in _OF_ANSWERS)
            content = _shorten(message.text) if is_text else comparable_value(message.content)
        keys.append(digest_text(repr((message.role, content, tool_calls, refers, others))))
        calls.update({call.id: (index, k) for k, call in enumerate(message.tool_calls) if call.id is not None})
    return keys


def _shorten(text: str) -> object:
    """A text, or the digest of a long one, which is cheaper to compute than its repr."""
    if len(text) <= 500:
        return text
    return "long", len(text), digest_text(text)


def comparable_arguments(call: ToolCall) -> object:
    """The arguments of a call as a comparable value; their text if it is not JSON or repeats a key."""
    arguments = call.arguments
    if not isinstance(arguments, str):
        return "json", comparable_value(arguments)
    try:
        parsed = json.loads(
            arguments, object_pairs_hook=_Pairs, parse_float=_Number, parse_int=int, parse_constant=_Number
        )
        return "json", comparable_value(parsed)
    except (ValueError, RecursionError):
        return "text", arguments


class _Number(str):
    """A number with a fraction or an exponent, as it is written in JSON text."""

    __slots__ = ()


class _Pairs(dict[str, Any]):
    """A parsed JSON object; ValueError if it repeats a key."""

    def __init__(self, pairs: Iterable[tuple[str, Any]]) -> None:
        listed = list(pairs)
        super().__init__(listed)
        if len(self) != len(listed):
            raise ValueError("a key is repeated")


def comparable_value(value: object) -> object:
    """A JSON value as tuples, texts and numbers, whose repr is equal if and only if the values are."""
    if isinstance(value, _Number):
        return "number", _exact_number(value)
    if isinstance(value, float):
        return "number", _exact_number(repr(value))
    if isinstance(value, Mapping):
        return "object", tuple(sorted((str(key), comparable_value(item)) for key, item in value.items()))
    if isinstance(value, list | tuple):
        return "list", tuple(comparable_value(item) for item in value)
    if value is None or isinstance(value, str | bool | int):
        return value
    return type(value).__name__, str(value)


def _exact_number(number: str) -> str:
    """One spelling for all spellings of a decimal number."""
    try:
        return str(Context(prec=len(number), Emax=MAX_EMAX, Emin=MIN_EMIN).normalize(Decimal(number)))
    except InvalidOperation:
        return number


def text_bytes(text: str) -> bytes:
    """The bytes of a text that may hold lone surrogates."""
    return text.encode("utf-8", "surrogatepass")


def digest_text(text: str) -> bytes:
    """The digest of a text."""
    return new_digest(text_bytes(text)).digest()


class PrefixDigests:
    """The digests of prefixes of a text; each is computed from the longest shorter one that is known."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._lengths = [0]
        self._states = [new_digest()]

    def digest(self, length: int | None = None) -> bytes:
        """The digest of `text[:length]`; None: of the whole text."""
        length = len(self.text) if length is None else min(length, len(self.text))
        place = bisect_right(self._lengths, length)
        at, state = self._lengths[place - 1], self._states[place - 1]
        if at < length:
            state = state.copy()
            state.update(text_bytes(self.text[at:length]))
            self._lengths.insert(place, length)
            self._states.insert(place, state)
        return state.digest()


Fit: TypeAlias = tuple[int, int]
"""How well an answer fits a history: messages with the same tool call ids, and with the same reasoning."""


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """Where the template ends an answer, in the text that it writes up to it."""

    at: int
    """Characters up to the end token."""
    digest: bytes
    """Of the text up to there."""
    new_from: int
    """Where the new text begins after an answer that was cut: it closes what is open."""
    ended: bool
    """Whether the template writes an end token there."""


@dataclass(slots=True, eq=False)
class StoredAnswer:
    """An answer of a session, and the history that it ends."""

    node: Node
    history: tuple[Message, ...]
    """The messages for the template: the session's own answers in full, this one last."""
    sent: tuple[Message, ...]
    """The history as the client has it, this answer last."""
    keys: tuple[bytes, ...]
    """The key of each message of `sent`."""
    end: TurnEnd | Fork | None = None
    """Where the template ends its turn, or why it cannot be continued; None until it is looked up."""
    exact: TurnEnd | None = None
    """Its end in a prompt that holds the answer exactly as sampled; None until there is one."""

    def is_answer(self, at: int) -> bool:
        """Whether message `at` of its history was sampled, going by its role."""
        return at < len(self.sent) and self.sent[at].sampled


@dataclass(slots=True, eq=False)
class _HistoryPrefix:
    """The answers to one beginning of a history."""

    answers: list[StoredAnswer] = field(default_factory=list)
    """Those whose message is the last one here, in the order of their commits."""
    passing: StoredAnswer | None = None
    """The latest answer whose history goes on from here."""


@dataclass(frozen=True, slots=True)
class Match:
    """A stored answer that a history holds."""

    answer: StoredAnswer
    depth: int
    """Messages of the history up to and with it."""
    alike: int
    """Other answers, with other ids, that fit equally well."""


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """Where a history departs from that of a stored answer."""

    at: int
    """The first message that differs."""
    answer: StoredAnswer
    reasoning: bool = False
    """Whether only its reasoning differs."""


class AnsweredHistories:
    """All answers of a session, found in time linear in the messages of a history."""

    def __init__(self) -> None:
        self._places: dict[bytes, _HistoryPrefix] = {}
        self._answered: set[bytes] = set()

    def add(self, answer: StoredAnswer, history_keys: Sequence[bytes]) -> None:
        """Add an answer; the keys are `history_keys` of its `keys`."""
        for key in history_keys[:-1]:
            self._places.setdefault(key, _HistoryPrefix()).passing = answer
        self._places.setdefault(history_keys[-1], _HistoryPrefix()).answers.append(answer)
        self._answered.add(answer.keys[-1])

    def holds_answer(self, keys: Sequence[bytes]) -> bool:
        """Whether a message with one of these keys is an answer of this session, whatever came before it."""
        return not self._answered.isdisjoint(keys)

    def matches(self, messages: Sequence[Message], history_keys: Sequence[bytes]) -> Iterator[Match]:
        """The best answer at each place of a history that has any, the last place first."""
        for depth in range(self.shared_length(history_keys), 0, -1):
            best = self._answers_at(messages, history_keys[depth], depth)
            if len(best) > 1:
                # The client most likely continues the one that fits best, of several the latest.
                fits = [_fit_answer(messages, answer, depth) for answer in best]
                best = [answer for answer, fit in zip(best, fits, strict=True) if fit == max(fits)]
            if best:
                yield Match(best[-1], depth, sum(not answer.node.has_ids_of(best[-1].node) for answer in best))

    def best_fit(self, messages: Sequence[Message], key: bytes, depth: int) -> Fit | None:
        """How well the best answer at a place of a history fits; None if none does."""
        answers = self._answers_at(messages, key, depth)
        return max((_fit_answer(messages, answer, depth) for answer in answers), default=None)

    def shared_length(self, history_keys: Sequence[bytes]) -> int:
        """How many messages the history starts with that a stored history starts with too."""
        return next((n for n in range(len(history_keys) - 1, 0, -1) if history_keys[n] in self._places), 0)

    def find_departure(
        self, messages: Sequence[Message], history_keys: Sequence[bytes], agreed: int = 0
    ) -> ForkPoint | None:
        """Where a history departs, at `agreed` or later, from the closest stored one; None: nowhere."""
        shared = self.shared_length(history_keys)
        place = self._places.get(history_keys[shared])
        if place is None:
            return None
        for answer in reversed([*place.answers, *([place.passing] if place.passing is not None else [])]):
            at = _first_other_reasoning(messages, answer, shared)
            if at is not None and at >= agreed:
                return ForkPoint(at, answer, reasoning=True)
        return ForkPoint(shared, place.passing) if place.passing is not None and shared < len(messages) else None

    def _answers_at(self, messages: Sequence[Message], key: bytes, depth: int) -> list[StoredAnswer]:
        """The answers at a place of a history, without those that were sent other reasoning."""
        place = self._places.get(key)
        answers = place.answers if place is not None else ()
        return [answer for answer in answers if _first_other_reasoning(messages, answer, depth) is None]


def _first_other_reasoning(messages: Sequence[Message], answer: StoredAnswer, depth: int) -> int | None:
    """The first of `depth` messages that was sent with other reasoning than stored; None if there is none."""
    for index, (sent, stored) in enumerate(zip(messages[:depth], answer.sent, strict=False)):
        if sent.reasoning and sent.reasoning != stored.reasoning:
            return index
    return None


def _fit_answer(messages: Sequence[Message], answer: StoredAnswer, depth: int) -> Fit:
    """How well an answer fits a history with the same messages."""
    ids = reasonings = 0
    for sent, stored in zip(messages[:depth], answer.sent, strict=False):
        ids += [call.id for call in sent.tool_calls] == [call.id for call in stored.tool_calls]
        reasonings += (sent.reasoning or None) == (stored.reasoning or None)
    return ids, reasonings


class SessionIndex:
    """Finds sessions by the histories and texts that they hold answers to."""

    def __init__(self) -> None:
        self.bytes = 0
        """An estimate of the memory of all sessions."""
        self._histories: dict[bytes, dict[str, None]] = {}
        self._texts: Prefixes[str] = Prefixes()
        self._last: tuple[Sequence[Message], list[bytes], list[bytes]] | None = None

    def add_history(self, session_id: str, history: bytes) -> None:
        """Add a history, by its key, that a session has answered."""
        sessions = self._histories.setdefault(history, {})
        sessions.pop(session_id, None)
        sessions[session_id] = None

    def add_text(self, session_id: str, key: Key) -> None:
        """Add a text prompt with its answer, or their ids, by its key."""
        self._texts.add(key, session_id)

    def keys(self, messages: Sequence[Message]) -> tuple[list[bytes], list[bytes]]:
        """`message_keys` and `history_keys`; kept for the session, which looks up the same messages next."""
        if self._last is None or self._last[0] is not messages:
            keys = message_keys(messages)
            self._last = messages, keys, history_keys(keys)
        return self._last[1:]

    def forget(self, session_id: str, histories: Sequence[bytes], texts: Sequence[Key]) -> None:
        """Remove histories and texts of a session."""
        for history in histories:
            sessions = self._histories.get(history, {})
            if sessions.pop(session_id, 0) is None and not sessions:
                del self._histories[history]
        for key in texts:
            self._texts.remove(key, session_id)

    def sessions_at(self, history: bytes) -> Iterable[str]:
        """The sessions that have answered this history, the latest first."""
        return reversed(self._histories.get(history, {}))

    def session_of_text(self, data: bytes) -> str | None:
        """The session with the longest prompt and answer that `data`, a text or ids, starts with; None without."""
        match = next(self._texts.matches(data), None)
        return match[1][-1] if match is not None else None


_BEFORE, _AFTER, _QUOTED = 24, 48, 60


def fork_at_departure(messages: Sequence[Message], keys: Sequence[bytes], departure: ForkPoint) -> Fork:
    """The fork of a client that changed the history, or left a part of it out."""
    at, answer = departure.at, departure.answer
    call = f"call {answer.node.call_id}"
    if departure.reasoning:
        texts = _contrast(messages[at].reasoning, answer.sent[at].reasoning)
        return Fork(ForkReason.EDITED, f"message {at} has other reasoning than it had: {texts}", at)
    later = answer.keys[at + 1 :]
    if keys[at] in later:
        left_out = later.index(keys[at]) + 1
        what = f"messages {at} to {at + left_out - 1} are" if left_out > 1 else f"message {at} is"
        return Fork(ForkReason.SHORTENED, f"{what} left out of the history that {call} had", at)
    texts = _contrast(_message_text(messages[at]), _message_text(answer.sent[at]))
    return Fork(ForkReason.EDITED, f"message {at} differs from the one that {call} had: {texts}", at)


def fork_to_new_conversation(messages: Sequence[Message]) -> Fork:
    """The fork of a call whose history has no answer of this session."""
    answers = sum(message.sampled for message in messages)
    if answers == 0:
        detail = "the history holds no answer"
    elif answers == 1:
        detail = "the answer in the history was not given in this session"
    else:
        detail = f"none of the {answers} answers in the history was given in this session"
    return Fork(ForkReason.NEW_CONVERSATION, detail)


def fork_after_leaving_memory() -> Fork:
    """The fork of a client that comes back to a session that left memory."""
    return Fork(ForkReason.LEFT_MEMORY, "the answers of this session left memory; they are in the log")


def fork_by_rewrite(before: str, after: str, when: str, message: int | None) -> Fork:
    """The fork of a template that writes the history differently; it shows both texts where they part."""
    at = common_start(before, after)
    texts = " became ".join(_quoted(text[max(at - _BEFORE, 0) : at + _AFTER]) for text in (before, after))
    return Fork(
        ForkReason.TEMPLATE_REWRITES, f"the template writes the history differently {when}: {texts}", message
    )


def _contrast(sent: str | None, stored: str | None) -> str:
    """`'…', not '…'`: two texts from a little before they part."""
    sent, stored = sent or "", stored or ""
    at = max(common_start(sent, stored) - _BEFORE, 0)
    return f"{_quoted(sent[at:])}, not {_quoted(stored[at:])}"


def _message_text(message: Message) -> str:
    calls = [f"{call.name}({call.arguments})" for call in message.tool_calls]
    return " ".join([f"{message.role}:", *filter(None, [message.text]), *calls])


def _quoted(text: str) -> str:
    return repr(text if len(text) <= _QUOTED + 12 else f"{text[:_QUOTED]}…")
