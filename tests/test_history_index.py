"""Calls in rows of their own become the conversations that they were, whatever the order of the rows."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiers import examples
from tito_audit.join.history import CallTraits, Conversations, HistoryIndex, JoinedBy
from tito_audit.record.message import Message, as_message
from tito_audit.tokens.load import load_tokenizer
from tito_audit.tokens.tokenizer import Tokenizer

TOY = Path(__file__).resolve().parents[1] / "fixtures" / "tokenizers" / "toy_bpe"

# A small language: ids of syllables, and an id for each pair of them that says the same.

END, LINE, THINK, THOUGHT = 2, 3, 4, 5
ROLES = {"system": 10, "user": 11, "assistant": 12, "tool": 13}
WORDS = range(100, 900)
MERGED = 10_000
MARKS = {
    END: "<|end|>",
    LINE: "\n",
    THINK: "<think>",
    THOUGHT: "</think>",
}

Ids = tuple[int, ...]
Text = tuple[str, Ids]


def spelled(id_: int) -> str:
    if id_ >= MERGED:
        return spelled(WORDS[(id_ - MERGED) // 800]) + spelled(WORDS[(id_ - MERGED) % 800])
    named = {number: f"<|{name}|>" for name, number in ROLES.items()}
    return MARKS.get(id_) or named.get(id_) or f"{'kstmrlnp'[id_ % 8]}{'aeiou'[id_ % 5]}{id_} "


def decode(ids: Sequence[int] | np.ndarray) -> bytes:
    return "".join(spelled(int(id_)) for id_ in ids).encode()


def merged(ids: Ids, at: int) -> Ids:
    """The same text with two syllables as one id."""
    first, second = ids[at : at + 2]
    return (*ids[:at], MERGED + (first - 100) * 800 + second - 100, *ids[at + 2 :])


def rendered(history: Sequence[Text]) -> Ids:
    return tuple(id_ for role, ids in history for id_ in (ROLES[role], LINE, *ids, END, LINE))


OPENER = (ROLES["assistant"], LINE)


# Conversations


@dataclass
class Call:
    """One call, and the number of the conversation that it was made in."""

    tree: int
    prompt: Ids
    completion: Ids
    session: int = 0
    group: int = 0
    request: Sequence[Message] | None = None
    answer: Message | None = None

    def traits(self, key: bytes | None = None, *, ids: bool = True) -> CallTraits:
        prompt, completion = np.array(self.prompt, np.int64), np.array(self.completion, np.int64)
        ended = self.completion[-1:] == (END,)
        return CallTraits(
            7, prompt if ids else None, completion if ids else None, ended, self.request, self.answer, key=key
        )


def message(role: str, ids: Ids) -> Message:
    return as_message({"role": role, "content": decode(ids).decode()}, "message")


def answer_message(ids: Ids, *, apart: bool) -> Message:
    """An answer as messages log it: reasoning in a field of its own, or in the text."""
    if not apart or THOUGHT not in ids:
        return message("assistant", ids)
    cut = ids.index(THOUGHT)
    thought, rest = (decode(part).decode() for part in (ids[: cut + 1], ids[cut + 1 :]))
    thought = thought.removeprefix("<think>").removesuffix("</think>")
    return as_message({"role": "assistant", "content": rest, "reasoning_content": thought}, "message")


@dataclass
class World:
    """Makes conversations; `drifts` says how an answer may change on its way into the next prompt."""

    random: random.Random
    drifts: Sequence[str] = ()
    cut: float = 0.15
    """How many answers end before their end token."""
    calls: list[Call] = field(default_factory=list)
    trees: int = 0
    sessions: int = 0

    def words(self, least: int, most: int) -> Ids:
        return tuple(self.random.choices(WORDS, k=self.random.randint(least, most)))

    def tree(self) -> int:
        self.trees += 1
        return self.trees

    def group(self) -> None:
        """Samples of one prompt, each a conversation."""
        start: list[Text] = [("system", self.words(1, 4)), ("user", self.words(3, 9))]
        group = self.trees
        for _ in range(self.random.choice((1, 1, 2, 4))):
            self.sessions += 1
            self.conversation(list(start), self.random.randint(1, 6), group)

    def conversation(self, history: list[Text], turns: int, group: int) -> None:
        tree, first = self.tree(), True
        for _ in range(turns):
            call, kept = self.call(tree, history, group)
            # Two calls with the prompt of a first one are two samples.
            if not first and self.random.random() < 0.15:
                self.calls.append(replace(call))  # the row twice
            if not first and self.random.random() < 0.2:
                call, kept = self.call(tree, history, group)  # a retry, which is what goes on
            if self.random.random() < 0.1:
                self.conversation([("system", self.words(5, 9)), ("user", self.words(5, 9))], 2, group)  # an agent
            history = [*history, ("assistant", kept), (self.random.choice(("user", "tool")), self.words(3, 12))]
            changed = self.random.random()
            if changed < 0.08:
                history = [history[0], ("user", self.words(10, 20))]  # a summary
            elif changed < 0.16:
                history = [history[0], ("user", self.words(3, 9)), *history[2:]]  # an edit
            first = changed < 0.16
            tree = self.tree() if first else tree

    def call(self, tree: int, history: list[Text], group: int) -> tuple[Call, Ids]:
        """A call, and what later prompts hold of its answer."""
        drift = self.random.choice(("", *self.drifts))
        said = self.words(14, 40)
        kept, opener = said, OPENER
        if drift == "merge":
            kept = merged(said, self.random.randrange(4, len(said) - 4))
        if drift == "reasoning":
            said = (THINK, *self.words(5, 30), THOUGHT, *said)
        if drift == "opened":
            said, opener = (*self.words(5, 30), THOUGHT, *said), (*OPENER, THINK)
        ended = drift == "opened" or self.random.random() >= self.cut
        completion = (*said, END) if ended else said
        prompt = rendered(history) + opener
        request = [
            answer_message(ids, apart=False) if role == "assistant" else message(role, ids)
            for role, ids in history
        ]
        answer = answer_message((THINK, *said) if drift == "opened" else said, apart=self.random.random() < 0.5)
        made = Call(tree, prompt, completion, self.sessions, group, request, answer)
        self.calls.append(made)
        return made, kept


def world(seed: int, drifts: Sequence[str] = (), groups: int = 6, cut: float = 0.15) -> list[Call]:
    made = World(random.Random(seed), drifts, cut)
    for _ in range(groups):
        made.group()
    return made.calls


# What is found


def settled(
    traits: Sequence[CallTraits], decoder: Callable[..., bytes] | None = decode, read: list[int] | None = None
) -> Conversations:
    index = HistoryIndex()
    assert [index.add(call) for call in traits] == list(range(len(traits)))

    def reread(numbers: Sequence[int]) -> Iterator[tuple[int, CallTraits]]:
        assert list(numbers) == sorted(set(numbers))
        if read is not None:
            read.extend(numbers)
        return ((number, traits[number]) for number in numbers)

    found = index.settle(reread, decoder)
    assert found.of.dtype == np.int64
    assert found.by.dtype == np.uint8
    assert len(found.of) == len(found.by) == len(traits)
    assert all(found.of[first] == first for first in found.of), "a conversation is named by its first call"
    assert all(found.of <= np.arange(len(traits)))
    return found


def parts(of: Sequence[int] | np.ndarray) -> set[frozenset[int]]:
    together: dict[int, set[int]] = {}
    for call, name in enumerate(of):
        together.setdefault(int(name), set()).add(call)
    return {frozenset(calls) for calls in together.values()}


def trees(calls: Sequence[Call]) -> set[frozenset[int]]:
    return parts([call.tree for call in calls])


SEEDS = st.integers(0, 10_000)


@settings(max_examples=examples(12, 150))
@given(SEEDS)
def test_calls_that_continue_each_other_exactly_are_one_conversation(seed: int) -> None:
    calls = world(seed)
    assert trees(calls) == pairs(calls), "the generator makes what a comparison of all pairs finds"
    random.Random(seed).shuffle(calls)
    found = settled([replace(call, request=None).traits() for call in calls])
    assert parts(found.of) == trees(calls)
    assert set(found.by.tolist()) <= {JoinedBy.NOTHING, JoinedBy.IDS}
    assert not len(found.unsure)
    assert not found.keys_believed


def pairs(calls: Sequence[Call]) -> set[frozenset[int]]:
    """Conversations by comparing every call with every other one, as text without reasoning."""
    label = list(range(len(calls)))
    shown = [plain(call.prompt) for call in calls]
    seen = [plain(call.prompt + call.completion) for call in calls]
    for child, prompt in enumerate(shown):
        for parent, history in enumerate(seen):
            if len(shown[parent]) < len(prompt) and prompt.startswith(history):
                old, new = label[child], label[parent]
                label = [new if each == old else each for each in label]
    return parts(label)


def plain(ids: Ids) -> str:
    return re.sub(r"<think>.*?</think>|\s", "", decode(ids).decode(), flags=re.DOTALL)


@settings(max_examples=examples(12, 150))
@given(SEEDS, st.sampled_from([("merge",), ("reasoning",), ("opened",), ("merge", "reasoning", "opened")]))
def test_a_continuation_that_drifted_is_found(seed: int, drifts: tuple[str, ...]) -> None:
    calls = world(seed, drifts)
    assert trees(calls) == pairs(calls)
    random.Random(seed).shuffle(calls)
    traits = [replace(call, request=None).traits() for call in calls]
    found = settled(traits)
    assert parts(found.of) == trees(calls)
    assert not len(found.unsure)


@settings(max_examples=examples(12, 150))
@given(SEEDS, st.sampled_from([("merge",), ("reasoning",), ("merge", "reasoning")]))
def test_without_a_tokenizer_drift_is_proven_by_the_ids_that_stayed(seed: int, drifts: tuple[str, ...]) -> None:
    calls = world(seed, drifts)
    random.Random(seed).shuffle(calls)
    found = settled([replace(call, request=None).traits() for call in calls], None)
    assert parts(found.of) == trees(calls)


@settings(max_examples=examples(12, 150))
@given(SEEDS, st.booleans())
def test_messages_join_calls_whose_ids_drifted_or_are_missing(seed: int, ids: bool) -> None:
    calls = world(seed, ("merge", "reasoning", "opened"))
    random.Random(seed).shuffle(calls)
    read: list[int] = []
    found = settled([call.traits(ids=ids) for call in calls], None, read)
    assert parts(found.of) == trees(calls)
    assert not len(found.unsure)
    assert not ids or JoinedBy.IDS in found.by
    assert JoinedBy.MESSAGES in found.by
    if not ids:
        assert not read, "messages need no second look"


@settings(max_examples=examples(10, 100))
@given(SEEDS)
def test_the_order_of_the_rows_changes_nothing(seed: int) -> None:
    calls = world(seed, ("merge", "reasoning", "opened"))
    wanted = None
    for turn in range(3):
        order = list(range(len(calls)))
        random.Random(seed + turn).shuffle(order)
        found = settled([replace(calls[call], request=None).traits() for call in order])
        partition = {frozenset(order[row] for row in part) for part in parts(found.of)}
        by = sorted(found.by[found.by != 0])
        assert wanted in (None, (partition, by))
        wanted = partition, by


# Keys


@settings(max_examples=examples(12, 100))
@given(SEEDS)
def test_keys_that_name_conversations_join_what_history_does_not(seed: int) -> None:
    calls = world(seed, groups=10, cut=0)
    random.Random(seed).shuffle(calls)
    found = settled([replace(call, request=None).traits(b"%d" % call.session) for call in calls])
    sessions = parts([call.session for call in calls])
    assert found.keys_believed
    assert parts(found.of) == sessions
    for session in sessions:
        starts = {min(part) for part in trees(calls) if part <= session}
        assert sum(found.by[list(session)] == JoinedBy.KEY) == len(starts) - 1
    assert not len(found.unsure)


def group_key(call: Call, _: int) -> bytes:
    return b"%d" % call.group


def own_key(_: Call, row: int) -> bytes:
    return b"%d" % row


@settings(max_examples=examples(12, 100))
@given(SEEDS, st.sampled_from([group_key, own_key]))
def test_keys_that_name_something_else_join_nothing(seed: int, key: Callable[[Call, int], bytes]) -> None:
    made = World(random.Random(seed))
    for _ in range(8):
        start: list[Text] = [("system", made.words(1, 4)), ("user", made.words(3, 9))]
        group = made.trees
        for _ in range(3):
            made.conversation(list(start), 4, group)
    calls = made.calls
    made.random.shuffle(calls)
    found = settled([replace(call, request=None).traits(key(call, row)) for row, call in enumerate(calls)])
    assert not found.keys_believed
    assert parts(found.of) == trees(calls)


# Single cases

SYSTEM: Text = ("system", (150, 151, 152))
QUESTION: Text = ("user", (200, 201, 202, 203))
FIRST = tuple(range(300, 330))
OTHER = tuple(range(400, 430))


def call(history: Sequence[Text], completion: Ids, key: bytes | None = None, context: int = 7) -> CallTraits:
    prompt = np.array(rendered(history) + OPENER)
    return CallTraits(context, prompt, np.array(completion), completion[-1:] == (END,), None, None, key=key)


def after(answer: Ids, *more: Text) -> list[Text]:
    return [SYSTEM, QUESTION, ("assistant", answer), ("user", (250, 251)), *more]


@pytest.mark.parametrize("decoder", [decode, None])
@pytest.mark.parametrize("kept", [FIRST, merged(FIRST, 8)])
def test_what_continues_a_sample_without_a_row_is_not_joined_to_its_sibling(
    decoder: Callable[..., bytes] | None, kept: Ids
) -> None:
    sibling = call([SYSTEM, QUESTION], (*OTHER, END))
    own = call([SYSTEM, QUESTION], (*FIRST, END))
    later = call(after(kept), (*OTHER, END))
    assert parts(settled([sibling, later], decoder).of) == {frozenset({0}), frozenset({1})}
    assert parts(settled([sibling, own, later], decoder).of) == {frozenset({0}), frozenset({1, 2})}


def test_an_answer_with_another_number_is_another_answer() -> None:
    tokenizer = load_tokenizer(str(TOY))
    kept = "The sum of all the numbers in the list is 42, so that the answer is 42."
    found = talked(tokenizer, kept.replace("42", "43"), kept)
    assert parts(found.of) == {frozenset({0}), frozenset({1})}


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ('<tool_call>{"name": "f", "arguments": {"b": 1, "a": 2}}</tool_call>',) * 2,
        (
            '<tool_call>\n{"name": "f", "arguments": {"b": 1, "a": 2}}\n</tool_call>',
            '<tool_call>{"name":"f","arguments":{"a":2,"b":1}}</tool_call>',
        ),
        ("<think>\nTwo and two.\n</think>\n\nIt is 4.", "It is 4."),
        ("It is 4.", "<think>\n\n</think>\n\nIt is 4."),
    ],
)
def test_an_answer_is_the_same_in_another_spelling(said: str, kept: str) -> None:
    found = talked(load_tokenizer(str(TOY)), said, kept)
    assert parts(found.of) == {frozenset({0, 1})}
    assert found.by.tolist() == [JoinedBy.NOTHING, JoinedBy.IDS]


def test_a_tool_call_with_other_arguments_is_another_answer() -> None:
    said = (
        '<tool_call>{"name": "weather_of_a_city", "arguments": {"city": "Paris", "unit": "celsius"}}</tool_call>'
    )
    found = talked(load_tokenizer(str(TOY)), said, said.replace("Paris", "Rome"))
    assert parts(found.of) == {frozenset({0}), frozenset({1})}


def talked(tokenizer: Tokenizer, said: str, kept: str) -> Conversations:
    """An answer, and a call whose prompt has `kept` in its place."""
    encode, end = tokenizer.encode, "<|im_end|>\n"
    start = f"<|im_start|>user\nHow much?{end}<|im_start|>assistant\n"
    later = f"{start}{kept}{end}<|im_start|>user\nThanks.{end}<|im_start|>assistant\n"
    texts = [(start, f"{said}<|im_end|>"), (later, "Bye.<|im_end|>")]
    ids = [tuple(np.asarray(encode(text), np.int64) for text in pair) for pair in texts]
    traits = [CallTraits(0, prompt, completion, True, None, None) for prompt, completion in ids]
    return settled(traits, tokenizer.vocabulary.data)
