"""Trace: the hashes of a call. Likeness: how much an answer resembles what a later prompt holds in its place.

Hashes depend only on the call and on the turn ends learned before, so any process can compute them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import IntFlag
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from tito_audit.align.runs import HASH_BASE, gaps, paired_runs
from tito_audit.record.arrays import Ids, Offsets
from tito_audit.record.message import Message, ToolCall
from tito_audit.record.prefix import starts_with


@dataclass(frozen=True, slots=True)
class CallTraits:
    """One call as its row has it, of which an index keeps only hashes."""

    context: int
    """A 64-bit hash of format, model, tools and arguments; calls of one conversation have the same."""
    prompt: Ids | None
    """`[P]`"""
    completion: Ids | None
    """`[C]`"""
    ended: bool
    """Whether the model ended its turn itself, so that the last completion id is an end token."""
    request: Sequence[Message] | None
    """The messages it was sent; None if not recorded."""
    answer: Message | None
    prompt_text: str | None = None
    completion_text: str | None = None
    key: bytes | None = None
    """The key of its conversation in the log; None if there is none."""


Decode: TypeAlias = Callable[[Ids], bytes]
"""The bytes of token ids."""
Reread: TypeAlias = Callable[[Sequence[int]], Iterator[tuple[int, CallTraits]]]
"""Reads calls again, given by ascending numbers: (number, call)."""


_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_THOUGHT_END = "</think>"
_ANALYSIS = re.compile(r"<\|channel\|>analysis<\|message\|>.*?<\|end\|>(?:<\|start\|>assistant)?", re.DOTALL)
_CALL = re.compile(r'\{\s*"(?:name|arguments|parameters|function|type|id)"\s*:')
_MARKERS = re.compile(
    r"</?tool_calls?>|```(?:json)?|<\|/?tool_calls?(?:_begin|_end|s_begin|s_end)?\|>|\[/?TOOL_CALLS?\]|<\|python_tag\|>"
)
_DECODER = json.JSONDecoder()


def message_digest(message: Message) -> int:
    """A 64-bit hash of what a message says, the same for all spellings of an answer and its tool calls."""
    text = message.text
    if message.sampled:
        text, calls = text_and_calls(text, message.tool_calls)
    else:
        text, calls = text.strip(), [_spell_call(call) for call in message.tool_calls]
    # Parts such as images
    parts = () if message.content is None or isinstance(message.content, str) else message.content
    others = [_canonical_json(dict(part)) for part in parts if not isinstance(part.get("text"), str)]
    return hash_text("\0".join([message.speaker, text, *calls, *others]))


def exact_digest(message: Message) -> int:
    """A 32-bit hash, never 0, that tells an answer from others that say the same.

    It is of the ids of its tool calls or, if there are none, of its exact text and reasoning.
    """
    ids = [call.id for call in message.tool_calls if call.id]
    spelled = "\0".join(ids) if ids else f"{message.reasoning or ''}\0{message.text}"
    return crc32(spelled.encode("utf-8", "surrogatepass")) or 1


def text_and_calls(text: str, calls: tuple[ToolCall, ...] = ()) -> tuple[str, list[str]]:
    """The text of an answer without reasoning and tool calls, and its tool calls in one spelling.

    `calls` are those that are recorded beside the text.
    """
    text = without_reasoning(text)
    spelled, at = [*map(_spell_call, calls)], 0
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
            spelled.append(_spell_call(ToolCall(call["name"], call.get("arguments", call.get("parameters")))))
            rest.append(text[at : match.start()])
            at = end
    text = "".join([*rest, text[at:]])
    return ("".join(_MARKERS.sub("", text).split()) if spelled else text.strip()), spelled


def without_reasoning(text: str) -> str:
    """The text without `<think>…</think>`, even if the prompt opened that, and without analysis messages."""
    if "<|channel|>analysis" in text:
        text = _ANALYSIS.sub("", text)
    if _THOUGHT_END not in text:
        return text
    thought, end, rest = text.rpartition(_THOUGHT_END)
    text = _THOUGHT.sub("", thought + end) + rest
    return text.rpartition(_THOUGHT_END)[2]


def _spell_call(call: ToolCall) -> str:
    return f"{call.name}({_canonical_json(call.arguments)})"


def _canonical_json(value: Any) -> str:
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
_FACTOR = 0x9E3779B97F4A7C15
_NO_TURNS: Hashes = np.empty(0, np.uint64)


class Has(IntFlag):
    """What the row of a call holds."""

    IDS = 1
    TEXT = 2
    MESSAGES = 4
    NO_ANSWERS = 8
    """Its messages hold no answer, so that it starts its conversation."""


class Trace(NamedTuple):
    """The hashes of a call; 0 where it has nothing to hash."""

    has: int
    """`Has`"""
    length: int
    """The length of its prompt: in ids, else in bytes of text, else in messages."""
    prompt: int
    """Of its prompt, or of its messages if it has no other prompt."""
    turns: Hashes
    """`[E]` of its prompt up to each turn end, the longest first."""
    seen: int
    """Of its prompt and completion."""
    key: int
    """Of its key and context."""
    answers: Sequence[int] = ()
    """Of its messages up to each answer among them, the longest first."""
    dialogue: int = 0
    """Of its messages and its answer."""
    exact: int = 0
    """`exact_digest` of its answer."""
    exact_before: int = 0
    """`exact_digest` of the last answer among its messages."""


class Tracer:
    """Hashes calls, and all their prefixes that end with a turn.

    A hash is a sum over positions, each with its own random factor, so that no pattern of ids makes two sequences
    collide. Processes with the same `ends` get the same hashes.
    """

    def __init__(self) -> None:
        self.ends: tuple[int, ...] = ()
        """Ids that end turns, the most frequent first."""
        self._factors = _random_factors(1 << 12)

    def learn(self, calls: Iterable[CallTraits]) -> None:
        """Learn which ids end turns: the last ids of ended completions that hardly occur inside completions.

        Calls with other end tokens are joined too, by rereading their rows.
        """
        sampled = [(call.completion, call.ended) for call in calls if call.prompt is not None]
        completions = [(ids, ended) for ids, ended in sampled if ids is not None]
        last = Counter(int(ids[-1]) for ids, ended in completions if ended and len(ids))
        ends: list[int] = []
        for id_, count in sorted(last.items(), key=lambda each: (-each[1], each[0]))[:16]:
            inside = sum(int(np.count_nonzero(ids[:-1] == id_)) for ids, _ in completions)
            # An end token may also stand inside a few completions.
            if count >= 0.05 * sum(ended for _, ended in completions) and inside <= 0.02 * (count + inside):
                ends.append(id_)
        self.ends = tuple(ends[:8])

    def after_ends(self, ids: Ids) -> Offsets:
        """`[E]` the positions after each turn end of a sequence, ascending."""
        if not self.ends:
            return np.empty(0, np.int64)
        at = ids == self.ends[0]
        for id_ in self.ends[1:]:
            at |= ids == id_
        return np.flatnonzero(at) + 1

    def without_ends(self, ids: Ids) -> Ids:
        """The sequence without turn ends at its end."""
        end = len(ids)
        while end and int(ids[end - 1]) in self.ends:
            end -= 1
        return ids[:end]

    def prefixes(self, values: NDArray[np.integer], salt: int) -> Hashes:
        """`[N+1]` the hash of the first n values, for each n."""
        hash_at = np.empty(len(values) + 1, np.uint64)
        hash_at[0] = salt
        terms = self._terms(values, 0)
        terms[:1] += np.uint64(salt)
        np.cumsum(terms, out=hash_at[1:])
        return hash_at

    def extended(self, hash_: int, length: int, values: NDArray[np.integer]) -> int:
        """The hash of a sequence, of which hash and length are given, followed by these values."""
        return (hash_ + int(self._terms(values, length).sum())) & MASK

    def _terms(self, values: NDArray[np.integer], at: int) -> Hashes:
        end = at + len(values)
        if end > len(self._factors):
            self._factors = _random_factors(2 * end)
        terms = values.astype(np.uint64)
        terms += _OFFSET
        terms *= HASH_BASE
        terms ^= terms >> np.uint64(32)
        terms *= self._factors[at:end]
        return terms

    def trace(self, call: CallTraits) -> Trace:
        """The hashes of a call."""
        has, length, prompt, seen, turns = Has(0), 0, 0, 0, _NO_TURNS
        if call.prompt is not None:
            has, length = Has.IDS, len(call.prompt)
            hash_at = self.prefixes(call.prompt, empty_hash("ids", call.context))
            prompt, turns = int(hash_at[-1]), hash_at[self.after_ends(call.prompt)[::-1]]
            if call.completion is not None and len(call.completion):
                seen = self.extended(prompt, length, call.completion)
        elif call.request is None and call.prompt_text is not None:
            has, values = Has.TEXT, text_array(call.prompt_text)
            length, prompt = len(values), self.extended(empty_hash("text", call.context), 0, values)
            if call.completion_text:
                seen = self.extended(prompt, length, text_array(call.completion_text))
        key = 0 if call.key is None else hash_bytes(call.key) ^ empty_hash("key", call.context)
        if call.request is None:
            return Trace(int(has), length, prompt, turns, seen, key)
        hash_at_message = [empty_hash("messages", call.context)]
        for message in call.request:
            hash_at_message.append(_extend_hash(hash_at_message[-1], message))
        sampled = [at for at, message in enumerate(call.request) if message.sampled][::-1]
        has |= Has.MESSAGES
        # A prompt of more turns than messages has a history; one turn more may be a template's system prompt.
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
            0 if call.answer is None else _extend_hash(hash_at_message[-1], call.answer),
            0 if call.answer is None else exact_digest(call.answer),
            exact_digest(call.request[sampled[0]]) if sampled else 0,
        )


def _random_factors(count: int) -> Hashes:
    """`[count]` odd pseudo-random factors (splitmix64)."""
    state = np.arange(1, count + 1, dtype=np.uint64) * HASH_BASE
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (state ^ (state >> np.uint64(31))) | np.uint64(1)


def hash_bytes(data: bytes) -> int:
    """A 64-bit hash of bytes."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def hash_text(text: str) -> int:
    """A 64-bit hash of a text, which may hold lone surrogates."""
    return hash_bytes(text.encode("utf-8", "surrogatepass"))


def empty_hash(kind: str, context: int) -> int:
    """The hash of an empty sequence of this kind and context, to which values are added."""
    return (hash_bytes(kind.encode()) ^ (context * _FACTOR)) & MASK


def text_array(text: str) -> NDArray[np.uint8]:
    """`[N]` the bytes of a text."""
    return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)


def _extend_hash(hash_: int, message: Message) -> int:
    """The hash of messages, of which the hash is given, followed by one more."""
    mixed = ((hash_ ^ message_digest(message)) * _FACTOR) & MASK
    return (mixed ^ (mixed >> 29)) * _FACTOR & MASK


PROVEN = 0.8
"""The likeness from which two texts are the same answer."""
SAME, SAME_WITHOUT_REASONING, SAME_IN_OTHER_SPELLING = 3.0, 2.0, 1.0
_UNPROVEN = 0.5
"""The most that two answers may get that say different things in similar words."""
_LEAST_BYTES, _LEAST_IDS = 16, 8
_MOST_WORDS, _MOST_IDS, _FREQUENT_FROM = 1000, 1500, 200
_WORD = re.compile(r"\w+|[^\w\s]")


def likeness_of_texts(answer: bytes, there: bytes, *, open_end: bool = False) -> float:
    """How much an answer resembles the text in its place: 1 to 3 if they say the same, else below 1.

    With `open_end`, the text may go on after the answer.
    """
    if not answer.strip() or not there.strip():
        return 0.0
    if answer == there or (open_end and len(answer) >= _LEAST_BYTES and there.startswith(answer)):
        return SAME
    spelled, spelled_there = (text.decode("utf-8", "replace") for text in (answer, there))
    shown, shown_there = without_reasoning(spelled).strip(), without_reasoning(spelled_there).strip()
    if shown and _same_text(shown, shown_there, open_end=open_end):
        return SAME_WITHOUT_REASONING
    (text, calls), (text_there, calls_there) = text_and_calls(spelled), text_and_calls(spelled_there)
    if calls != calls_there[: len(calls)] or (len(calls) != len(calls_there) and not open_end):
        return 0.0
    text, text_there = "".join(text.split()), "".join(text_there.split())
    if _same_text(text, text_there, open_end=open_end) and (text or calls):
        return SAME_IN_OTHER_SPELLING
    # The share of words that the texts have in common, in order; at most _UNPROVEN if numbers differ.
    words, others = _WORD.findall(shown), _WORD.findall(shown_there)
    if open_end or not words or not others or max(len(words), len(others)) > _MOST_WORDS:
        return 0.0
    matcher = SequenceMatcher(None, words, others, autojunk=False)
    same = [word for start, _, size in matcher.get_matching_blocks() for word in words[start : start + size]]
    equal = sum(map(len, same))
    likeness = equal / max(sum(map(len, words)), sum(map(len, others)))
    numbers, other_numbers = (
        Counter(word for word in spelled if any(map(str.isdigit, word))) for spelled in (words, others)
    )
    return likeness if numbers == other_numbers and equal >= _LEAST_BYTES else min(likeness, _UNPROVEN)


def _same_text(text: str, there: str, *, open_end: bool) -> bool:
    return text == there or (open_end and len(text) >= _LEAST_BYTES and there.startswith(text))


def likeness_of_ids(answer: Ids, there: Ids, *, open_end: bool = False) -> float:
    """`likeness_of_texts` for ids whose text is unknown.

    One id in place of another is another text; several in place of one may be the same text.
    """
    if not len(answer) or not len(there):
        return 0.0
    if open_end:
        return SAME if len(answer) >= _LEAST_IDS and starts_with(there, answer) else 0.0
    if np.array_equal(answer, there):
        return SAME
    if len(there) < len(answer) and np.array_equal(answer[-len(there) :], there):
        return SAME_WITHOUT_REASONING
    runs = list(paired_runs(answer, there, longest=_MOST_IDS, frequent_from=_FREQUENT_FROM))
    equal = sum(run.size for run in runs)
    swapped = any(
        gap.end - gap.start == gap.other_end - gap.other == 1 for gap in gaps(runs, len(answer), len(there))
    )
    likeness = min(equal / len(there), 0.99)
    return likeness if equal >= _LEAST_IDS and not swapped else min(likeness, _UNPROVEN)
