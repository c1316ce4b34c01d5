"""Which session holds an answer to a history, and whether a message that a client sends back is the one it holds.

Two messages are the same if their role, content and tool calls are: no content, null and "" are one, as are a text
and a single part with that text; arguments are equal as JSON, with numbers exact and typed (1 is not 1.0, 1.0 is
1.00) and repeated keys refused. The ids of tool calls are names: what counts is the call that a result refers to.
Reasoning is compared separately, because clients leave it out.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, InvalidOperation
from typing import Any, TypeAlias

from tito_audit.chains.histories import Key, Prefixes, running
from tito_audit.record.message import Message, ToolCall
from tito_audit.render.spans import common_start
from tito_audit.sessions.model import Fork, ForkReason, Node

START = b""
"""The key of an empty history."""
_COMPARED = frozenset({"role", "content", "tool_calls", "tool_call_id"})
_OF_ANSWERS = frozenset({"assistant"})


def history_keys(keys: Sequence[bytes]) -> list[bytes]:
    """A key for each beginning of a history, `[L + 1]`: equal where all messages up to there are the same."""
    history = [START]
    for key in keys:
        history.append(running(history[-1] + key).digest())
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
            # Counted back from here, as the message before may have been compacted.
            refers = ("call", index - place[0], place[1]) if place is not None else plain(answered)
        tool_calls = tuple((call.name, arguments_of(call)) for call in message.tool_calls)
        rest = {} if message.role in _OF_ANSWERS else wire
        stated = [(key, value) for key, value in rest.items() if key not in _COMPARED and value is not None]
        others = tuple(sorted((str(key), repr(plain(value))) for key, value in stated))
        keys.append(digest(repr((message.role, _content(message), tool_calls, refers, others))))
        calls.update({call.id: (index, k) for k, call in enumerate(message.tool_calls) if call.id is not None})
    return keys


def _content(message: Message) -> object:
    """The text of a message; its parts where they are more than one text."""
    content = message.content
    if content is None or isinstance(content, str):
        return _short(content or "")
    filled = ({key: value for key, value in part.items() if value is not None} for part in content)
    texts = all(
        part.keys() == {"type", "text"} and part["type"] == "text" and isinstance(part["text"], str)
        for part in filled
    )
    return _short(message.text) if texts and (len(content) < 2 or message.role in _OF_ANSWERS) else plain(content)


def _short(text: str) -> object:
    """A text, or the digest of a long one, which is cheaper than its repr."""
    if len(text) <= 500:
        return text
    return "long", len(text), digest(text)


def arguments_of(call: ToolCall) -> object:
    """The arguments of a call as comparable JSON; their text if it is not JSON or repeats a key."""
    arguments = call.arguments
    if not isinstance(arguments, str):
        return "json", plain(arguments)
    try:
        parsed = json.loads(
            arguments, object_pairs_hook=_Pairs, parse_float=_Number, parse_int=int, parse_constant=_Number
        )
        return "json", plain(parsed)
    except (ValueError, RecursionError):
        return "text", arguments


class _Number(str):
    """A number with a fraction or an exponent, as written."""

    __slots__ = ()


class _Pairs(dict[str, Any]):
    """An object of JSON text; ValueError if it repeats a key."""

    def __init__(self, pairs: Iterable[tuple[str, Any]]) -> None:
        listed = list(pairs)
        super().__init__(listed)
        if len(self) != len(listed):
            raise ValueError("a key is repeated")


def plain(value: object) -> object:
    """A JSON value as tuples, texts and numbers whose repr is the same where the values are."""
    if isinstance(value, _Number):
        return "number", _exact(value)
    if isinstance(value, float):
        return "number", _exact(repr(value))
    if isinstance(value, Mapping):
        return "object", tuple(sorted((str(key), plain(item)) for key, item in value.items()))
    if isinstance(value, list | tuple):
        return "list", tuple(plain(item) for item in value)
    if value is None or isinstance(value, str | bool | int):
        return value
    return type(value).__name__, str(value)


def _exact(number: str) -> str:
    """The exact value of a decimal number, however it is written."""
    try:
        return str(Context(prec=len(number), Emax=MAX_EMAX, Emin=MIN_EMIN).normalize(Decimal(number)))
    except InvalidOperation:
        return number


def text_bytes(text: str) -> bytes:
    """The bytes of a text; lone surrogates too."""
    return text.encode("utf-8", "surrogatepass")


def digest(text: str) -> bytes:
    """The digest of a text."""
    return running(text_bytes(text)).digest()


class Beginnings:
    """The digests of the beginnings of a text, computed incrementally."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._lengths = [0]
        self._states = [running()]

    def digest(self, length: int | None = None) -> bytes:
        """The digest of `text[:length]`; None: of all of it."""
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
"""How well an answer fits a history: how many messages have the tool call ids they were given, and how many the
reasoning they were given. More is better.
"""


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """Where the template ends an answer."""

    at: int
    """Characters up to the end of what the answer says; its end token follows."""
    digest: bytes
    """The digest of what the template writes up to there."""
    new_from: int
    """Where the new text begins after an answer that was cut: the template closes what is open."""
    ended: bool
    """Whether the template writes an end of the turn there."""


@dataclass(slots=True, eq=False)
class StoredAnswer:
    """An answer, and what the session knows about it."""

    node: Node
    history: tuple[Message, ...]
    """The messages for the template: the session's own answers in full, this one last."""
    sent: tuple[Message, ...]
    """The history as the client has it, this answer last; one message per key in `keys`."""
    keys: tuple[bytes, ...]
    """The key of each message of `sent`."""
    end: TurnEnd | Fork | None = None
    """Where the template ends its turn, or why it cannot be continued; None until asked for."""
    exact: TurnEnd | None = None
    """The same in a prompt that holds the answer exactly as sampled; None until there is one."""

    def is_answer(self, at: int) -> bool:
        """Whether the message at this place of its history was sampled, as its role says."""
        return at < len(self.sent) and self.sent[at].sampled


@dataclass(slots=True, eq=False)
class _Beginning:
    """A beginning of a history."""

    answers: list[StoredAnswer] = field(default_factory=list)
    """The answers whose message is the last one here, in the order of their commits."""
    passing: StoredAnswer | None = None
    """The latest answer with a longer history that begins like this."""


@dataclass(frozen=True, slots=True)
class Match:
    """An answer that a history holds."""

    answer: StoredAnswer
    depth: int
    """Messages of the call up to and including it."""
    alike: int
    """Other answers, with other ids, that fit the history equally well."""


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """Where a history departs from what the session holds."""

    at: int
    """The first message that differs."""
    answer: StoredAnswer
    """An answer from whose history it departs there."""
    reasoning: bool = False
    """Whether it is the reasoning that differs."""


class AnsweredHistories:
    """All answers of a session, found by the keys of a history in time linear in its messages."""

    def __init__(self) -> None:
        self._places: dict[bytes, _Beginning] = {}
        self._answered: set[bytes] = set()

    def add(self, answer: StoredAnswer, history_keys: Sequence[bytes]) -> None:
        """Hold an answer; the keys are those of its `sent`, the empty history first."""
        for key in history_keys[:-1]:
            self._places.setdefault(key, _Beginning()).passing = answer
        self._places.setdefault(history_keys[-1], _Beginning()).answers.append(answer)
        self._answered.add(answer.keys[-1])

    def answered(self, keys: Sequence[bytes]) -> bool:
        """Whether one of these messages is an answer of this session, whatever came before it."""
        return not self._answered.isdisjoint(keys)

    def matches(self, messages: Sequence[Message], history_keys: Sequence[bytes]) -> Iterator[Match]:
        """The answer at each place of a history where there is one, the last place first."""
        for depth in range(self.shared(history_keys), 0, -1):
            best = self._at(messages, history_keys[depth], depth)
            if len(best) > 1:
                # The client most likely continues the best fit, of several the latest.
                fits = [_fit(messages, answer, depth) for answer in best]
                best = [answer for answer, fit in zip(best, fits, strict=True) if fit == max(fits)]
            if best:
                yield Match(best[-1], depth, sum(not answer.node.has_ids_of(best[-1].node) for answer in best))

    def fit(self, messages: Sequence[Message], key: bytes, depth: int) -> Fit | None:
        """How well the best answer at this place of a history fits; None if none does."""
        answers = self._at(messages, key, depth)
        return max((_fit(messages, answer, depth) for answer in answers), default=None)

    def shared(self, history_keys: Sequence[bytes]) -> int:
        """How many messages the history shares with one that the session holds."""
        return next((n for n in range(len(history_keys) - 1, 0, -1) if history_keys[n] in self._places), 0)

    def departure(
        self, messages: Sequence[Message], history_keys: Sequence[bytes], agreed: int = 0
    ) -> ForkPoint | None:
        """Where a history departs from the stored one that it shares the most with; None if it only continues. Its
        first `agreed` messages are those of a stored answer.
        """
        shared = self.shared(history_keys)
        place = self._places.get(history_keys[shared])
        if place is None:
            return None
        for answer in reversed([*place.answers, *([place.passing] if place.passing is not None else [])]):
            at = _differing(messages, answer, shared)
            if at is not None and at >= agreed:
                return ForkPoint(at, answer, reasoning=True)
        return ForkPoint(shared, place.passing) if place.passing is not None and shared < len(messages) else None

    def _at(self, messages: Sequence[Message], key: bytes, depth: int) -> list[StoredAnswer]:
        """The answers at a place of a history that has no other reasoning than theirs."""
        place = self._places.get(key)
        answers = place.answers if place is not None else ()
        return [answer for answer in answers if _differing(messages, answer, depth) is None]


def _differing(messages: Sequence[Message], answer: StoredAnswer, depth: int) -> int | None:
    """The first of `depth` messages whose reasoning differs from what the session holds."""
    for index, (sent, stored) in enumerate(zip(messages[:depth], answer.sent, strict=False)):
        if sent.reasoning and sent.reasoning != stored.reasoning:
            return index
    return None


def _fit(messages: Sequence[Message], answer: StoredAnswer, depth: int) -> Fit:
    """How well an answer fits a history whose messages are the same."""
    ids = reasonings = 0
    for sent, stored in zip(messages[:depth], answer.sent, strict=False):
        ids += [call.id for call in sent.tool_calls] == [call.id for call in stored.tool_calls]
        reasonings += (sent.reasoning or None) == (stored.reasoning or None)
    return ids, reasonings


class Index:
    """The answers of all sessions, by session id."""

    def __init__(self) -> None:
        self.bytes = 0
        """What the sessions hold in memory, as an estimate."""
        self._histories: dict[bytes, dict[str, None]] = {}
        self._texts: Prefixes[str] = Prefixes()
        self._last: tuple[Sequence[Message], list[bytes], list[bytes]] | None = None

    def answered(self, session_id: str, history: bytes) -> None:
        """Note that a session holds an answer to this history (a key)."""
        sessions = self._histories.setdefault(history, {})
        sessions.pop(session_id, None)
        sessions[session_id] = None

    def wrote(self, session_id: str, key: Key) -> None:
        """Note that a session holds a text prompt with its answer, or their ids (a key)."""
        self._texts.add(key, session_id)

    def keys(self, messages: Sequence[Message]) -> tuple[list[bytes], list[bytes]]:
        """The key of each message, and of each beginning of the history; computed once for the look-up here and in
        the session.
        """
        if self._last is None or self._last[0] is not messages:
            keys = message_keys(messages)
            self._last = messages, keys, history_keys(keys)
        return self._last[1:]

    def forget(self, session_id: str, histories: Sequence[bytes], texts: Sequence[Key]) -> None:
        """Note that the session no longer holds these."""
        for history in histories:
            sessions = self._histories.get(history, {})
            if sessions.pop(session_id, 0) is None and not sessions:
                del self._histories[history]
        for key in texts:
            self._texts.remove(key, session_id)

    def at(self, history: bytes) -> Iterable[str]:
        """The sessions that hold an answer to this history, the latest first."""
        return reversed(self._histories.get(history, {}))

    def of_text(self, data: bytes) -> str | None:
        """The session with the longest prompt and answer that this text, or these ids, start with."""
        match = next(self._texts.matches(data), None)
        return match[1][-1] if match is not None else None


_BEFORE, _AFTER, _QUOTED = 24, 48, 60


def departed(messages: Sequence[Message], keys: Sequence[bytes], departure: ForkPoint) -> Fork:
    """The fork of a client that changed the history or left part of it out."""
    at, answer = departure.at, departure.answer
    call = f"call {answer.node.call_id}"
    if departure.reasoning:
        texts = _two(messages[at].reasoning, answer.sent[at].reasoning)
        return Fork(ForkReason.EDITED, f"message {at} has other reasoning than it had: {texts}", at)
    later = answer.keys[at + 1 :]
    if keys[at] in later:
        left_out = later.index(keys[at]) + 1
        what = f"messages {at} to {at + left_out - 1} are" if left_out > 1 else f"message {at} is"
        return Fork(ForkReason.SHORTENED, f"{what} left out of the history that {call} had", at)
    texts = _two(_shown(messages[at]), _shown(answer.sent[at]))
    return Fork(ForkReason.EDITED, f"message {at} differs from the one that {call} had: {texts}", at)


def new_conversation(messages: Sequence[Message]) -> Fork:
    """The fork of a call whose history has no answer of this session."""
    answers = sum(message.sampled for message in messages)
    if answers == 0:
        detail = "the history holds no answer"
    elif answers == 1:
        detail = "the answer in the history was not given in this session"
    else:
        detail = f"none of the {answers} answers in the history was given in this session"
    return Fork(ForkReason.NEW_CONVERSATION, detail)


def left_memory() -> Fork:
    """The fork of a client that comes back to a session that left memory."""
    return Fork(ForkReason.LEFT_MEMORY, "the answers of this session left memory; they are in the log")


def rewrites(before: str, after: str, when: str, message: int | None) -> Fork:
    """The fork of a template that writes the history differently; both texts, from a little before they part."""
    at = common_start(before, after)
    texts = " became ".join(_quoted(text[max(at - _BEFORE, 0) : at + _AFTER]) for text in (before, after))
    return Fork(
        ForkReason.TEMPLATE_REWRITES, f"the template writes the history differently {when}: {texts}", message
    )


def _two(sent: str | None, stored: str | None) -> str:
    """Two texts, from a little before they part."""
    sent, stored = sent or "", stored or ""
    at = max(common_start(sent, stored) - _BEFORE, 0)
    return f"{_quoted(sent[at:])}, not {_quoted(stored[at:])}"


def _shown(message: Message) -> str:
    """A message as one text."""
    calls = [f"{call.name}({call.arguments})" for call in message.tool_calls]
    return " ".join([f"{message.role}:", *filter(None, [message.text]), *calls])


def _quoted(text: str) -> str:
    """A text in quotes, shortened."""
    return repr(text if len(text) <= _QUOTED + 12 else f"{text[:_QUOTED]}…")
