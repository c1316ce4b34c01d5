"""The hashes of a call: they depend only on the call and the known turn ends, so any process can compute them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntFlag
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from tito_audit.align.runs import HASH_BASE
from tito_audit.record.arrays import Ids, Offsets
from tito_audit.record.message import Message, ToolCall


@dataclass(frozen=True, slots=True)
class CallTraits:
    """One call, as its row has it; an index keeps only hashes of it."""

    context: int
    """Calls with different numbers (another format, model or tools) never share a conversation; unsigned, 64
    bits."""
    prompt: Ids | None
    """`[P]`"""
    completion: Ids | None
    """`[C]`"""
    ended: bool
    """Whether the model ended its turn itself, which makes the last completion id an end token."""
    request: Sequence[Message] | None
    """The messages it was sent; None where they are not recorded."""
    answer: Message | None
    prompt_text: str | None = None
    completion_text: str | None = None
    key: bytes | None = None
    """The stated key of its conversation; None where the log has none."""


Decode: TypeAlias = Callable[[Ids], bytes]
Reread: TypeAlias = Callable[[Sequence[int]], Iterator[tuple[int, CallTraits]]]
"""The calls with these numbers (ascending), read again, each with its number."""


_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_THOUGHT_END = "</think>"
_ANALYSIS = re.compile(r"<\|channel\|>analysis<\|message\|>.*?<\|end\|>(?:<\|start\|>assistant)?", re.DOTALL)
_CALL = re.compile(r'\{\s*"(?:name|arguments|parameters|function|type|id)"\s*:')
_MARKERS = re.compile(
    r"</?tool_calls?>|```(?:json)?|<\|/?tool_calls?(?:_begin|_end|s_begin|s_end)?\|>|\[/?TOOL_CALLS?\]|<\|python_tag\|>"
)
_DECODER = json.JSONDecoder()


def message_digest(message: Message) -> int:
    """A 64-bit hash of what a message says: the same for two spellings of one answer."""
    text = message.text
    if message.sampled:
        text, calls = text_and_calls(text, message.tool_calls)
    else:
        text, calls = text.strip(), [_spelled(call) for call in message.tool_calls]
    # What a message holds besides text, such as images.
    parts = () if message.content is None or isinstance(message.content, str) else message.content
    others = [_canonical(dict(part)) for part in parts if not isinstance(part.get("text"), str)]
    return digest("\0".join([message.speaker, text, *calls, *others]))


def exact_digest(message: Message) -> int:
    """A 32-bit hash, never 0, that distinguishes an answer from others that say the same.

    It covers the ids of its tool calls or, if there are none, its exact text and reasoning.
    """
    ids = [call.id for call in message.tool_calls if call.id]
    spelled = "\0".join(ids) if ids else f"{message.reasoning or ''}\0{message.text}"
    return crc32(spelled.encode("utf-8", "surrogatepass")) or 1


def text_and_calls(text: str, calls: tuple[ToolCall, ...] = ()) -> tuple[str, list[str]]:
    """The text of an answer without reasoning and tool calls, and the tool calls in one spelling."""
    text = without_reasoning(text)
    spelled, at = [*map(_spelled, calls)], 0
    rest: list[str] = []
    for match in _CALL.finditer(text):
        if match.start() < at or len(rest) == 64:
            continue
        try:
            value, end = _DECODER.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            continue
        inner = value.get("function")
        call = inner if isinstance(inner, dict) else value
        if isinstance(call.get("name"), str) and ("arguments" in call or "parameters" in call):
            spelled.append(_spelled(ToolCall(call["name"], call.get("arguments", call.get("parameters")))))
            rest.append(text[at : match.start()])
            at = end
    text = "".join([*rest, text[at:]])
    return ("".join(_MARKERS.sub("", text).split()) if spelled else text.strip()), spelled


def without_reasoning(text: str) -> str:
    """Text without `<think>…</think>`, even if the prompt opened it, and without analysis messages."""
    if "<|channel|>analysis" in text:
        text = _ANALYSIS.sub("", text)
    if _THOUGHT_END not in text:
        return text
    thought, end, rest = text.rpartition(_THOUGHT_END)
    text = _THOUGHT.sub("", thought + end) + rest
    return text.rpartition(_THOUGHT_END)[2]


def _spelled(call: ToolCall) -> str:
    return f"{call.name}({_canonical(call.arguments)})"


def _canonical(value: Any) -> str:
    """Arguments as JSON with one spacing and one key order; text that is not JSON unchanged."""
    try:
        if isinstance(value, str):
            value = json.loads(value) if value.strip() else {}
        value = value if value is not None else {}
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=repr)
    except (ValueError, RecursionError, TypeError):
        return str(value).strip() if isinstance(value, str) else type(value).__name__


Hashes: TypeAlias = NDArray[np.uint64]
MASK = (1 << 64) - 1
_OFFSET = np.uint64(0xD1B54A32D192ED03)


class Rolling:
    """Hashes of all prefixes of a sequence of integers.

    Each position has its own factor, so no pattern of ids makes two sequences collide.
    """

    def __init__(self) -> None:
        self._factors = _factors(1 << 12)

    def prefixes(self, values: NDArray[np.integer], salt: int) -> Hashes:
        """`[N+1]` The hash of the first n values, for each n."""
        hash_at = np.empty(len(values) + 1, np.uint64)
        hash_at[0] = salt
        terms = self._terms(values, 0)
        terms[:1] += np.uint64(salt)
        np.cumsum(terms, out=hash_at[1:])
        return hash_at

    def extended(self, hash_: int, length: int, values: NDArray[np.integer]) -> int:
        """The hash of a sequence with this hash and length, followed by these values."""
        return (hash_ + int(self._terms(values, length).sum())) & MASK

    def _terms(self, values: NDArray[np.integer], at: int) -> Hashes:
        end = at + len(values)
        if end > len(self._factors):
            self._factors = _factors(2 * end)
        terms = values.astype(np.uint64)
        terms += _OFFSET
        terms *= HASH_BASE
        terms ^= terms >> np.uint64(32)
        terms *= self._factors[at:end]
        return terms


def _factors(count: int) -> Hashes:
    """`[count]` Odd factors that look random (splitmix64)."""
    state = np.arange(1, count + 1, dtype=np.uint64) * HASH_BASE
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (state ^ (state >> np.uint64(31))) | np.uint64(1)


def hash_of(data: bytes) -> int:
    """A 64-bit hash of bytes."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def digest(text: str) -> int:
    """A number below 2**64 that identifies a text."""
    return hash_of(text.encode("utf-8", "surrogatepass"))


_WATCHED = 16


class TurnEnds:
    """Ids that end a turn: last ids of ended completions that do not occur earlier in completions."""

    def __init__(self) -> None:
        self.ids: tuple[int, ...] = ()
        """The most frequent ones."""
        self._ended = 0
        self._last: Counter[int] = Counter()
        self._inside: Counter[int] = Counter()

    def learn(self, completion: Ids, *, ended: bool) -> None:
        """Count the last id of a completion, and the known ends within it."""
        changed = False
        self._ended += ended
        for id_ in self._last:
            if (inside := int(np.count_nonzero(completion[:-1] == id_))) != 0:
                self._inside[id_] += inside
                changed = True
        if ended and len(completion):
            last = int(completion[-1])
            if last not in self._last and len(self._last) == _WATCHED:
                rarest = min(self._last, key=self._last.__getitem__)
                if self._last[rarest] == 1:
                    del self._last[rarest], self._inside[rarest]
            if last in self._last or len(self._last) < _WATCHED:
                self._last[last] += 1
                changed |= last not in self.ids
        if changed or self._ended & (self._ended - 1) == 0:
            surest = sorted(self._last.items(), key=lambda each: (-each[1], each[0]))
            often = [(id_, count, self._inside[id_]) for id_, count in surest if count >= 0.05 * self._ended]
            # An id may end turns that is rarely used inside completions, too.
            self.ids = tuple(id_ for id_, count, inside in often if inside <= 0.02 * (count + inside))[:8]

    def after(self, ids: Ids) -> Offsets:
        """The positions after each turn end in a sequence, ascending; `[E]` int64."""
        if not self.ids:
            return np.empty(0, np.int64)
        at = ids == self.ids[0]
        for id_ in self.ids[1:]:
            at |= ids == id_
        return np.flatnonzero(at) + 1

    def without(self, ids: Ids) -> Ids:
        """A sequence without trailing turn ends."""
        end = len(ids)
        while end and int(ids[end - 1]) in self.ids:
            end -= 1
        return ids[:end]


_FACTOR = 0x9E3779B97F4A7C15
_NO_TURNS: Hashes = np.empty(0, np.uint64)


class Has(IntFlag):
    """What a call's row holds."""

    IDS = 1
    TEXT = 2
    MESSAGES = 4
    NO_ANSWERS = 8
    """Its messages hold no answer, so it starts its conversation."""


class Trace(NamedTuple):
    """The hashes of a call."""

    has: int
    length: int
    """The length of its prompt: in ids, else in bytes of text, else in messages."""
    prompt: int
    """Of its prompt, or of its messages if it has no other prompt."""
    turns: Hashes
    """`[E]` After each turn end of its prompt, the last one first."""
    seen: int
    """Of its prompt and completion; 0 if it has no completion."""
    key: int
    """Of its key and context; 0 if it has no key."""
    answers: Sequence[int] = ()
    """Of its messages up to each answer among them, the last one first."""
    dialogue: int = 0
    """Of its messages and its answer; 0 if it has none."""
    exact: int = 0
    """What distinguishes its answer from others that say the same; 0 if it has none."""
    exact_before: int = 0
    """The same for the last answer among its messages."""


class Tracer:
    """Hashes calls. Processes with the same `ends` get the same hashes."""

    def __init__(self) -> None:
        self.ends, self.rolling = TurnEnds(), Rolling()

    def learn(self, call: CallTraits) -> None:
        """Learn from a call which ids end a turn."""
        if call.prompt is not None and call.completion is not None:
            self.ends.learn(call.completion, ended=call.ended)

    def trace(self, call: CallTraits) -> Trace:
        """The hashes of a call."""
        has, length, prompt, seen, turns = Has(0), 0, 0, 0, _NO_TURNS
        if call.prompt is not None:
            has, length = Has.IDS, len(call.prompt)
            hash_at = self.rolling.prefixes(call.prompt, salt("ids", call.context))
            prompt, turns = int(hash_at[-1]), hash_at[self.ends.after(call.prompt)[::-1]]
            if call.completion is not None and len(call.completion):
                seen = self.rolling.extended(prompt, length, call.completion)
        elif call.request is None and call.prompt_text is not None:
            has, values = Has.TEXT, as_bytes(call.prompt_text)
            length, prompt = len(values), self.rolling.extended(salt("text", call.context), 0, values)
            if call.completion_text:
                seen = self.rolling.extended(prompt, length, as_bytes(call.completion_text))
        key = 0 if call.key is None else hash_of(call.key) ^ salt("key", call.context)
        if call.request is None:
            return Trace(int(has), length, prompt, turns, seen, key)
        hash_at_message = [salt("messages", call.context)]
        for message in call.request:
            hash_at_message.append(_then(hash_at_message[-1], message))
        sampled = [at for at, message in enumerate(call.request) if message.sampled][::-1]
        has |= Has.MESSAGES
        # A prompt of several turns has a history; a template may add a system prompt.
        if not sampled and len(turns) <= len(call.request) + 1:
            has |= Has.NO_ANSWERS
        if call.prompt is None:
            length, prompt = len(call.request), hash_at_message[-1]
        return Trace(
            int(has),
            length,
            prompt,
            turns,
            seen,
            key,
            [hash_at_message[at + 1] for at in sampled],
            0 if call.answer is None else _then(hash_at_message[-1], call.answer),
            0 if call.answer is None else exact_digest(call.answer),
            exact_digest(call.request[sampled[0]]) if sampled else 0,
        )


def salt(kind: str, context: int) -> int:
    """The hash of the empty sequence, by kind and context."""
    return (hash_of(kind.encode()) ^ (context * _FACTOR)) & MASK


def as_bytes(text: str) -> NDArray[np.uint8]:
    """Text as an array of bytes."""
    return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)


def _then(hash_: int, message: Message) -> int:
    """The hash of messages with this hash, followed by one more."""
    mixed = ((hash_ ^ message_digest(message)) * _FACTOR) & MASK
    return (mixed ^ (mixed >> 29)) * _FACTOR & MASK
