"""Calls in rows of their own become the conversations that they were, whatever the order of the rows."""

from __future__ import annotations

import pickle
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.tables import table
from tests.tiers import examples
from tests.world import TOY
from tito_audit.chains.links import connected_components
from tito_audit.join.history import HashNumbers, HistoryIndex, JoinedBy, JoinedConversations
from tito_audit.join.traces import CallTraits
from tito_audit.record.message import Message, as_message
from tito_audit.tokens.load import load_tokenizer
from tito_audit.tokens.tokenizer import Tokenizer

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
    marked = MARKS.get(id_) or named.get(id_) or ("<|mark|>" if id_ < WORDS[0] else "")
    return marked or f"{'kstmrlnp'[id_ % 8]}{'aeiou'[id_ % 5]}{id_} "


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
            call, answer = self.call(tree, history, group)
            # Two calls with the prompt of a first one are two samples.
            if not first and self.random.random() < 0.15:
                self.calls.append(replace(call))  # the row twice
            if not first and self.random.random() < 0.2:
                call, answer = self.call(tree, history, group)  # a retry, which is what goes on
            if self.random.random() < 0.1:
                self.conversation([("system", self.words(5, 9)), ("user", self.words(5, 9))], 2, group)  # an agent
            history = [*history, ("assistant", answer), (self.random.choice(("user", "tool")), self.words(3, 12))]
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
        sampled = self.words(14, 40)
        in_prompts, opener = sampled, OPENER
        if drift == "merge":
            in_prompts = merged(sampled, self.random.randrange(4, len(sampled) - 4))
        if drift == "reasoning":
            sampled = (THINK, *self.words(5, 30), THOUGHT, *sampled)
        if drift == "opened":
            sampled, opener = (*self.words(5, 30), THOUGHT, *sampled), (*OPENER, THINK)
        ended = drift == "opened" or self.random.random() >= self.cut
        completion = (*sampled, END) if ended else sampled
        prompt = rendered(history) + opener
        request = [
            answer_message(ids, apart=False) if role == "assistant" else message(role, ids)
            for role, ids in history
        ]
        whole = (THINK, *sampled) if drift == "opened" else sampled
        answer = answer_message(whole, apart=self.random.random() < 0.5)
        call = Call(tree, prompt, completion, self.sessions, group, request, answer)
        self.calls.append(call)
        return call, in_prompts


def world(seed: int, drifts: Sequence[str] = (), groups: int = 6, cut: float = 0.15) -> list[Call]:
    generator = World(random.Random(seed), drifts, cut)
    for _ in range(groups):
        generator.group()
    return generator.calls


# What is found


def settled(
    traits: Sequence[CallTraits], decoder: Callable[..., bytes] | None = decode, read: list[int] | None = None
) -> JoinedConversations:
    index = HistoryIndex()
    index.tracer.learn(traits)
    assert [index.add(index.tracer.trace(call)) for call in traits] == list(range(len(traits)))

    def reread(numbers: Sequence[int]) -> Iterator[tuple[int, CallTraits]]:
        assert list(numbers) == sorted(set(numbers))
        if read is not None:
            read.extend(numbers)
        return ((number, traits[number]) for number in numbers)

    joined = index.join_conversations(reread, decoder)
    assert joined.of.dtype == np.int64
    assert joined.by.dtype == np.uint8
    assert len(joined.of) == len(joined.by) == len(traits)
    assert all(joined.of[first] == first for first in joined.of), "a conversation is named by its first call"
    assert all(joined.of <= np.arange(len(traits)))
    return joined


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
    joined = settled([replace(call, request=None).traits() for call in calls])
    assert parts(joined.of) == trees(calls)
    assert set(joined.by.tolist()) <= {JoinedBy.NOTHING, JoinedBy.IDS}
    assert not len(joined.unsure)
    assert not joined.keys_believed


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


DRIFTS = ("merge", "reasoning", "opened")
BY_IDS = [("merge",), ("reasoning",), ("merge", "reasoning")]


@pytest.mark.parametrize(
    ("decoder", "drifts", "ids", "messages"),
    [
        (decode, [*BY_IDS, ("opened",), DRIFTS], True, False),
        (None, BY_IDS, True, False),
        (None, [DRIFTS], True, True),
        (None, [DRIFTS], False, True),
    ],
    ids=["by a tokenizer", "by the ids that stayed", "by ids and messages", "by messages alone"],
)
@settings(max_examples=examples(12, 150))
@example(seed=0)
@given(seed=SEEDS)
def test_a_continuation_that_drifted_is_found(
    decoder: Callable[..., bytes] | None, drifts: Any, ids: bool, messages: bool, seed: int
) -> None:
    calls = world(seed, drifts[seed % len(drifts)])
    assert trees(calls) == pairs(calls)
    random.Random(seed).shuffle(calls)
    shown = calls if messages else [replace(call, request=None) for call in calls]
    read: list[int] = []
    joined = settled([call.traits(ids=ids) for call in shown], decoder, read)
    assert parts(joined.of) == trees(calls)
    assert (decoder is None and not messages) or not len(joined.unsure)
    # In few worlds, none of the first ones, each match by messages is the deeper one.
    assert seed > 50 or not (ids and messages) or JoinedBy.IDS in joined.by
    assert not messages or JoinedBy.MESSAGES in joined.by
    assert ids or not read, "messages need no second look"


@settings(max_examples=examples(10, 100))
@given(SEEDS)
def test_the_order_of_the_rows_changes_nothing(seed: int) -> None:
    calls = world(seed, ("merge", "reasoning", "opened"))
    wanted = None
    for turn in range(3):
        order = list(range(len(calls)))
        random.Random(seed + turn).shuffle(order)
        joined = settled([replace(calls[call], request=None).traits() for call in order])
        partition = {frozenset(order[row] for row in part) for part in parts(joined.of)}
        by = sorted(joined.by[joined.by != 0])
        assert wanted in (None, (partition, by))
        wanted = partition, by


# Keys


@settings(max_examples=examples(12, 100))
@given(SEEDS)
def test_keys_that_name_conversations_join_what_history_does_not(seed: int) -> None:
    calls = world(seed, groups=10, cut=0)
    random.Random(seed).shuffle(calls)
    joined = settled([replace(call, request=None).traits(b"%d" % call.session) for call in calls])
    sessions = parts([call.session for call in calls])
    assert joined.keys_believed
    assert parts(joined.of) == sessions
    for session in sessions:
        starts = {min(part) for part in trees(calls) if part <= session}
        assert sum(joined.by[list(session)] == JoinedBy.KEY) == len(starts) - 1
    assert not len(joined.unsure)


def group_key(call: Call, _: int) -> bytes:
    return b"%d" % call.group


def own_key(_: Call, row: int) -> bytes:
    return b"%d" % row


@settings(max_examples=examples(12, 100))
@given(SEEDS, st.sampled_from([group_key, own_key]))
def test_keys_that_name_something_else_join_nothing(seed: int, key: Callable[[Call, int], bytes]) -> None:
    generator = World(random.Random(seed))
    for _ in range(8):
        start: list[Text] = [("system", generator.words(1, 4)), ("user", generator.words(3, 9))]
        group = generator.trees
        for _ in range(3):
            generator.conversation(list(start), 4, group)
    calls = generator.calls
    generator.random.shuffle(calls)
    joined = settled([replace(call, request=None).traits(key(call, row)) for row, call in enumerate(calls)])
    assert not joined.keys_believed
    assert parts(joined.of) == trees(calls)


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
@pytest.mark.parametrize("answer", [FIRST, merged(FIRST, 8)])
def test_what_continues_a_sample_without_a_row_is_not_joined_to_its_sibling(
    decoder: Callable[..., bytes] | None, answer: Ids
) -> None:
    sibling = call([SYSTEM, QUESTION], (*OTHER, END))
    own = call([SYSTEM, QUESTION], (*FIRST, END))
    later = call(after(answer), (*OTHER, END))
    assert parts(settled([sibling, later], decoder).of) == {frozenset({0}), frozenset({1})}
    assert parts(settled([sibling, own, later], decoder).of) == {frozenset({0}), frozenset({1, 2})}


@pytest.mark.parametrize(*table(__file__, "answers"))
def test_an_answer_is_the_same_in_another_spelling_and_no_other(what: str, sampled: str, sent: str) -> None:
    joined = talked(load_tokenizer(str(TOY)), sampled, sent)
    same = not what.startswith("other")
    assert parts(joined.of) == ({frozenset({0, 1})} if same else {frozenset({0}), frozenset({1})})
    assert joined.by.tolist() == [JoinedBy.NOTHING, JoinedBy.IDS if same else JoinedBy.NOTHING]


def talked(tokenizer: Tokenizer, sampled: str, answer: str) -> JoinedConversations:
    """An answer, and a call whose prompt has `answer` in its place."""
    encode, end = tokenizer.encode, "<|im_end|>\n"
    start = f"<|im_start|>user\nHow much?{end}<|im_start|>assistant\n"
    later = f"{start}{answer}{end}<|im_start|>user\nThanks.{end}<|im_start|>assistant\n"
    texts = [(start, f"{sampled}<|im_end|>"), (later, "Bye.<|im_end|>")]
    ids = [tuple(np.asarray(encode(text), np.int64) for text in pair) for pair in texts]
    traits = [CallTraits(0, prompt, completion, True, None, None) for prompt, completion in ids]
    return settled(traits, tokenizer.vocabulary.bytes_of)


def test_equal_conversations_are_told_apart_one_to_one_and_called_unsure() -> None:
    first, later = call([SYSTEM, QUESTION], (*FIRST, END)), call(after(FIRST), (*OTHER, END))
    for rows, wanted in (
        ([first, first, later, later], {frozenset({0, 3}), frozenset({1, 2})}),
        ([first, later, first, later], {frozenset({0, 1}), frozenset({2, 3})}),
        ([later, later, first, first], {frozenset({0, 2}), frozenset({1, 3})}),
    ):
        joined = settled(rows)
        assert parts(joined.of) == wanted
        assert joined.unsure.tolist() == [row for row, each in enumerate(rows) if each is later]


def test_a_row_twice_is_one_start_and_one_conversation_alone() -> None:
    first, later = call([SYSTEM, QUESTION], (*FIRST, END)), call(after(FIRST), (*OTHER, END))
    last = call(after(FIRST, ("assistant", OTHER), ("user", (260,))), (*FIRST, END))
    joined = settled([first, first, later, later, last])
    assert sorted(map(len, parts(joined.of))) in ([1, 4], [2, 3])
    assert {2, 3} <= set(joined.unsure.tolist())


def test_the_key_tells_equal_conversations_apart() -> None:
    rows = [
        call([SYSTEM, QUESTION], (*FIRST, END), b"a"),
        call([SYSTEM, QUESTION], (*FIRST, END), b"b"),
        call(after(FIRST), (*OTHER, END), b"a"),
        call(after(FIRST), (*OTHER, END), b"b"),
    ]
    joined = settled(rows)
    assert parts(joined.of) == {frozenset({0, 2}), frozenset({1, 3})}
    assert not len(joined.unsure)
    unnamed = [replace(row, key=b"one") for row in rows]
    assert not settled(unnamed).keys_believed, "the key of a group of samples"


def test_samples_of_one_prompt_are_conversations_of_their_own() -> None:
    joined = settled([call([SYSTEM, QUESTION], (*FIRST[: 20 + size], END)) for size in range(8)])
    assert joined.of.tolist() == list(range(8))
    assert not joined.by.any()


def test_calls_of_another_context_are_not_joined() -> None:
    first, later = call([SYSTEM, QUESTION], (*FIRST, END), b"a"), call(after(FIRST), (*OTHER, END), b"a")
    assert settled([first, later]).of.tolist() == [0, 0]
    assert settled([first, replace(later, context=8)]).of.tolist() == [0, 1]
    assert settled([first, later, replace(later, context=(1 << 64) - 1)]).of.tolist() == [0, 0, 2]


def test_a_generation_that_was_interrupted_goes_on() -> None:
    first = call([SYSTEM, QUESTION], FIRST[:10])
    rest = replace(first, prompt=np.array((*rendered([SYSTEM, QUESTION]), *OPENER, *FIRST[:10])))
    beyond = replace(first, prompt=np.array((*rest.prompt, *rest.completion, 500, 501)))
    for rows in ([first, rest, beyond], [beyond, rest, first], [rest, beyond, first]):
        assert settled(rows).of.tolist() == [0, 0, 0]


def test_calls_without_completions_continue_and_are_not_continued() -> None:
    first, later = call([SYSTEM, QUESTION], ()), call(after(FIRST), ())
    assert settled([first, first, later]).of.tolist() == [0, 1, 2]
    completed = replace(first, completion=np.array((*FIRST, END)), ended=True)
    assert settled([later, completed]).of.tolist() == [0, 0]
    unknown = replace(first, completion=None)
    assert settled([unknown, later, completed]).of.tolist() == [0, 1, 1]


@pytest.mark.parametrize("ends", [(2,), (2, 8), tuple(range(20, 50))])
def test_turns_may_end_in_other_tokens_and_be_called_ended_by_mistake(ends: Ids) -> None:
    generator = World(random.Random(5))
    for _ in range(20):
        generator.group()
    rows = []
    for row, each in enumerate(generator.calls):
        end = ends[row % len(ends)]
        swapped = tuple(end if id_ == END else id_ for id_ in each.completion)
        rows.append(replace(each, completion=swapped).traits())
    # Later prompts hold END: where another end was sampled, the answer is the same but for that.
    joined = settled([replace(row, ended=True, request=None, answer=None) for row in rows])
    assert parts(joined.of) == trees(generator.calls)


def test_an_answer_found_in_messages_is_told_from_those_that_say_the_same_by_its_tool_call_ids() -> None:
    question = as_message({"role": "user", "content": "Where?"}, "m")
    answers = [
        as_message(
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": f"thought {number}",
                "tool_calls": [{"id": f"call_{number}", "function": {"name": "f", "arguments": '{"a": 1}'}}],
            },
            "m",
        )
        for number in range(4)
    ]
    rows = [CallTraits(0, None, None, True, [question], answer) for answer in answers]
    result = as_message({"role": "tool", "content": "4"}, "m")
    done = as_message({"role": "assistant", "content": "Done."}, "m")
    later = [
        CallTraits(0, None, None, True, [question, without_thought(answer), result], done)
        for answer in reversed(answers)
    ]
    joined = settled([*rows, *later], None)
    assert joined.of.tolist() == [0, 1, 2, 3, 3, 2, 1, 0]
    assert joined.by.tolist() == [JoinedBy.NOTHING] * 4 + [JoinedBy.MESSAGES] * 4
    assert not len(joined.unsure)


def without_thought(answer: Message) -> Message:
    wire = {name: value for name, value in answer.wire.items() if name != "reasoning_content"}
    (tool_call,) = wire["tool_calls"]
    function = {**tool_call["function"], "arguments": {"a": 1}}
    return as_message({**wire, "content": None, "tool_calls": [{**tool_call, "function": function}]}, "m")


def test_the_deeper_of_a_match_by_ids_and_one_by_messages_wins() -> None:
    """Two samples begin with the same answer; which of them a call continues, only its messages tell."""
    say = [message(role, ids) for role, ids in after(FIRST)]
    history = [SYSTEM, QUESTION]
    first = [replace(call(history, (*FIRST, END)), request=say[:2], answer=say[2]) for _ in range(2)]
    second = [replace(call(after(FIRST), (*OTHER[number:], END)), request=say) for number in range(2)]
    second = [replace(each, answer=message("assistant", OTHER[number:])) for number, each in enumerate(second)]
    drifted = after(FIRST, ("assistant", merged(OTHER[1:], 9)), ("user", (270,)))
    third = replace(call(drifted, (*FIRST, END)), request=[message(role, ids) for role, ids in drifted])
    joined = settled([*first, *second, third], None)
    assert joined.of[4] == joined.of[3] != joined.of[2]
    assert joined.by[4] == JoinedBy.MESSAGES


def test_rows_with_text_alone_are_joined_by_it() -> None:
    rng = random.Random(3)
    calls = world(3, ("reasoning",))
    rng.shuffle(calls)
    rows = [
        CallTraits(0, None, None, True, None, None, decode(each.prompt).decode(), decode(each.completion).decode())
        for each in calls
    ]
    joined = settled(rows, None)
    assert parts(joined.of) == trees(calls)
    assert set(joined.by.tolist()) == {JoinedBy.NOTHING, JoinedBy.TEXT}


def test_rows_of_each_kind_stay_apart_and_no_row_is_no_conversation() -> None:
    empty = CallTraits(0, None, None, False, None, None)
    blank = CallTraits(0, np.empty(0, np.int64), np.empty(0, np.int64), False, (), None, "", "")
    assert settled([]).of.tolist() == []
    assert settled([empty, empty, blank, blank]).of.tolist() == [0, 1, 2, 3]
    first, later = call([SYSTEM, QUESTION], (*FIRST, END)), call(after(FIRST), (*OTHER, END))
    text = replace(later, prompt=None, completion=None, prompt_text=decode(later.prompt).decode())
    talk = replace(first, prompt=None, request=(message("user", FIRST),), answer=message("assistant", FIRST))
    assert settled([talk, empty, first, text, later]).of.tolist() == [0, 1, 2, 3, 2]


def bytes_of(index: HistoryIndex) -> int:
    """What is kept of the calls, without the factors that every index has."""
    return len(pickle.dumps({name: each for name, each in vars(index).items() if name != "tracer"}))


def test_what_an_index_holds_does_not_grow_with_the_length_of_histories() -> None:
    index, history = HistoryIndex(), [SYSTEM, QUESTION]
    sizes = []
    for turn in range(400):
        answer = tuple(500 + (turn * 7 + each) % 300 for each in range(20))
        traits = call(history, (*answer, END))
        if not turn:
            index.tracer.learn([traits])
        index.add(index.tracer.trace(traits))
        sizes.append(bytes_of(index))
        history += [("assistant", answer), ("user", (200 + turn % 300, 201))]
    assert sizes[-1] - sizes[200] <= 2 * (sizes[200] - sizes[1])
    assert sizes[-1] / len(sizes) < 120


def test_prefixes_keep_their_numbers_while_the_table_grows() -> None:
    numbers, expected = HashNumbers(), {}
    rng = random.Random(1)
    for _ in range(5000):
        hash_ = rng.getrandbits(64) if rng.random() < 0.7 or not expected else rng.choice(list(expected))
        assert numbers.find(hash_) == expected.get(hash_, 0)
        assert numbers.add(hash_) == expected.setdefault(hash_, len(expected) + 1)
    hashes = [*expected, *(rng.getrandbits(64) for _ in range(500))]
    assert numbers.find_all(np.array(hashes, np.uint64)).tolist() == [expected.get(hash_, 0) for hash_ in hashes]


@given(st.integers(0, 1000))
def test_linked_calls_are_one_component_however_the_links_run(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 60)
    links = [[rng.randrange(count) if rng.random() < 0.7 else -1 for _ in range(count)] for _ in range(2)]
    label = list(range(count))
    for call, other in [(number, to) for link in links for number, to in enumerate(link) if to >= 0]:
        low, high = sorted((label[call], label[other]))
        label = [low if each == high else each for each in label]
    assert connected_components(count, *(np.array(link, np.int64) for link in links)).tolist() == label


def test_a_key_of_a_whole_run_names_no_conversation() -> None:
    generator = World(random.Random(4))
    for _ in range(100):
        generator.group()
    joined = settled([replace(each, request=None).traits(b"run 1") for each in generator.calls])
    assert not joined.keys_believed
    assert parts(joined.of) == trees(generator.calls)


def test_calls_without_a_key_join_those_with_one_and_bridge_none() -> None:
    generator = World(random.Random(6), cut=0)
    for _ in range(20):
        generator.group()
    rng = random.Random(7)
    calls = generator.calls
    keys = [b"%d" % each.session if rng.random() < 0.9 else None for each in calls]
    joined = settled([replace(each, request=None).traits(key) for each, key in zip(calls, keys, strict=True)])
    assert joined.keys_believed
    for part in parts(joined.of):
        assert len({calls[row].session for row in part}) == 1
        assert len({keys[row] for row in part} - {None}) <= 1
    keyed = [row for row, key in enumerate(keys) if key is not None]
    named = {calls[row].session: joined.of[row] for row in keyed}
    assert all(joined.of[row] == named[calls[row].session] for row in keyed)
