"""Splice, mask and fork on plain ids: by hand, against generated conversations, and with real templates."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tables import stored
from tests.tiers import crossed, examples, some
from tito_audit.align.mask_drift import mask_drift
from tito_audit.chains.fork import fork_cost, fork_rows
from tito_audit.chains.splice import splice_prefix
from tito_audit.errors import RecordError, SpliceError, TitoAuditError
from tito_audit.record.message import as_messages
from tito_audit.render.renderer import Renderer, make_renderer
from tito_audit.tokens.load import load_tokenizer
from tito_audit.tokens.tokenizer import Tokenizer

SHARED = Path(__file__).resolve().parents[2] / "shared"
TOKENIZERS = SHARED / "tokenizers"
MERGED = SHARED / "recorded" / "nemo-rl-merged-tokens.json"
NAN = float("nan")
few = settings(max_examples=examples(30, 150), deadline=None, derandomize=True)
ids = st.lists(st.integers(0, 12), max_size=24)

needs_tokenizers = pytest.mark.skipif(
    not TOKENIZERS.is_dir(), reason="no tokenizer folders in shared/ beside the checkout"
)

# A toy ChatML: every message is OPEN role NL text END NL.
OPEN, NL, END, OTHER_END, THINK, UNTHINK = 1, 5, 9, 8, 6, 7
ROLES = {"system": 4, "user": 2, "assistant": 3}
STOPS = (END, OTHER_END)
MERGED_TOKEN, ITS_PARTS = 99, (97, 98)
"""One token of the tokenizer that the model likes to sample as two."""

Message = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Role, reasoning, text."""


def header(role: str) -> list[int]:
    return [OPEN, ROLES[role], NL]


def say(role: str, *text: int, thinks: Sequence[int] = ()) -> Message:
    return role, tuple(thinks), text


def write(messages: Sequence[Message], *, strip: bool = False, drop: bool = False) -> tuple[list[int], list[int]]:
    """The toy template, and where the end token of each message stands (-1: left out).

    `strip` takes the reasoning of turns before the last user message out; `drop` leaves messages out that
    have nothing left to say.
    """
    last_user = max((i for i, (role, _, _) in enumerate(messages) if role == "user"), default=-1)
    written: list[int] = []
    ends: list[int] = []
    for i, (role, thinks, text) in enumerate(messages):
        reasoning = [THINK, *thinks, UNTHINK] if thinks and not (strip and i < last_user) else []
        if drop and role == "assistant" and not reasoning and not text:
            ends.append(-1)
            continue
        written += [*header(role), *reasoning, *text]
        ends.append(len(written))
        written += [END, NL]
    return written, ends


def sampled(canonical: Sequence[int]) -> list[int]:
    """The same text as the model samples it."""
    return [part for token in canonical for part in (ITS_PARTS if token == MERGED_TOKEN else (token,))]


SYSTEM = say("system", 20, 21, 22)
ASK = say("user", 30, 31)
THOUGHT = say("assistant", 40, MERGED_TOKEN, 41, thinks=(50, 51, MERGED_TOKEN, 52))
NEXT = say("user", 60, 61, 62)
GENERATION = header("assistant")


def seen_of(messages: Sequence[Message], *, stop: int | None = END) -> list[int]:
    """What was seen of a conversation that ends with a sampled turn; no stop when it was cut by length."""
    written, ends = write(messages)
    return sampled(written[: ends[-1]]) + ([stop] if stop is not None else [])


def prompt_of(messages: Sequence[Message], *, strip: bool = False, drop: bool = False) -> list[int]:
    return write(messages, strip=strip, drop=drop)[0] + GENERATION


def tail_of(messages: Sequence[Message]) -> list[int]:
    """What the template writes behind the end of the turn before these messages, to the generation prompt."""
    return [NL, *write(messages)[0], *GENERATION]


PREFIX_ENDINGS = {
    "with scaffolding": lambda prefix: prefix,
    "up to the turn end": lambda prefix: prefix[:-1],
    "with a generation prompt": lambda prefix: prefix + GENERATION,
    "without the turn end": lambda prefix: prefix[:-2],
}
STOPPED = {"same stop": END, "another stop": OTHER_END, "cut by length": None}
REMARK = say("user", 70)
EMPTIED = say("assistant", thinks=(50, 51, 52, 53))


def spelled(*thinks: int) -> Message:
    return say("assistant", 40, END, 41, MERGED_TOKEN, thinks=thinks)


QUOTING = say("user", *write([spelled()])[0], OTHER_END, 60, END)
FULL_OF_ENDS = say("user", 30, END, 31, END, END, 32)
AGAIN = [ASK, say("assistant", 40, MERGED_TOKEN, 41), ASK]
TALKS = {
    "an answer": ([SYSTEM, ASK, THOUGHT], [NEXT], False),
    "an emptied last turn that the template drops": ([SYSTEM, ASK, THOUGHT, NEXT, EMPTIED], [REMARK], True),
    "an emptied earlier turn that the template drops": ([SYSTEM, ASK, EMPTIED, NEXT, THOUGHT], [ASK], True),
    "a stop token in the answer": ([SYSTEM, FULL_OF_ENDS, spelled(50, 51)], [QUOTING], False),
    "a stop token in the reasoning": ([SYSTEM, FULL_OF_ENDS, spelled(50, END, 51)], [QUOTING], False),
    **{f"turns that repeat {times} times": ([ASK, THOUGHT] * times, AGAIN, False) for times in (1, 2, 5)},
}
"""What was said, what is said next, and whether the template leaves out what has nothing left to say."""


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("ending", PREFIX_ENDINGS)
@pytest.mark.parametrize("strip", [False, True], ids=["append-only", "reasoning stripped"])
@pytest.mark.parametrize("stop", STOPPED)
def test_a_prompt_goes_on_behind_the_sampled_turn_whatever_its_end(talk, ending, strip, stop) -> None:
    history, new, drop = TALKS[talk]
    template = prompt_of([*history, *new], strip=strip or drop, drop=drop)
    seen = seen_of(history, stop=STOPPED[stop])
    spliced = splice_prefix(seen, PREFIX_ENDINGS[ending](write(history)[0]), template, STOPS)
    assert spliced == seen + [END] * (STOPPED[stop] is None) + tail_of(new)


def test_a_template_that_forgets_the_oldest_of_equal_turns_keeps_the_new_message() -> None:
    history = [SYSTEM, *[ASK, say("assistant", 40)] * 2]
    template = prompt_of([SYSTEM, ASK, say("assistant", 40), ASK])
    assert splice_prefix(seen_of(history), write(history)[0], template, END) == seen_of(history) + tail_of([ASK])


def test_a_template_that_ends_the_last_turn_with_another_id_is_followed() -> None:
    history = [ASK, say("assistant", 40, MERGED_TOKEN)]
    prefix = [*write(history)[0][:-2], OTHER_END]
    spliced = splice_prefix(seen_of(history, stop=OTHER_END), prefix, prompt_of([*history, NEXT]), STOPS)
    assert spliced == seen_of(history, stop=OTHER_END) + tail_of([NEXT])


def test_an_answer_in_other_words_is_not_written_twice() -> None:
    history = [SYSTEM, ASK, say("assistant", 40, 41, 42, 43, 44, MERGED_TOKEN)]
    changed = [SYSTEM, ASK, say("assistant", 80, 81, 82, 83, 84, 85)]
    spliced = splice_prefix(seen_of(history), write(history)[0], prompt_of([*changed, NEXT]), END)
    assert spliced == seen_of(history) + tail_of([NEXT])


def test_a_turn_to_be_continued_is_continued() -> None:
    history = [SYSTEM, ASK, say("assistant", 40, MERGED_TOKEN, 41)]
    prompt = write(history)[0][:-2]
    assert splice_prefix(seen_of(history, stop=None), prompt, prompt, END) == seen_of(history, stop=None)


def test_with_nothing_seen_the_prompt_stays() -> None:
    assert splice_prefix([], [], [1, 2, 3], END) == [1, 2, 3]
    assert splice_prefix([], [4, END], [], END) == []


def test_the_ids_may_be_arrays_and_plain_integers_come_back() -> None:
    history = [SYSTEM, ASK, THOUGHT]
    arrays = [
        np.array(seen_of(history), np.int64),
        np.array(write(history)[0], np.uint16),
        tuple(prompt_of([*history, NEXT])),
    ]
    spliced = splice_prefix(*arrays, np.int64(END))
    assert spliced == seen_of(history) + tail_of([NEXT])
    assert {type(token) for token in spliced} == {int}


def test_no_place_to_splice_is_an_error_that_says_what_was_looked_for() -> None:
    history = [SYSTEM, ASK, THOUGHT]
    with pytest.raises(SpliceError) as caught:
        splice_prefix(seen_of(history), write(history)[0], [70, 71, 72, END, 73], END)
    message = str(caught.value)
    for words in (
        "template_ids (5 tokens, 1 turn ends)",
        "[… 99, 52, 7, 40, 99, 41]",
        "ids 9",
        "agree in 0",
        "stop_ids",
    ):
        assert words in message
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, TitoAuditError)


def test_a_prompt_full_of_stop_tokens_holds_nobody_up() -> None:
    seen, prefix = [1, END, 2, 3], [1, END, 4] + [END] * 200_000
    started = time.process_time()
    with pytest.raises(SpliceError, match="too many to align"):
        splice_prefix(seen, prefix, [1, END, 5] + [END, 6] * 100_000, END)
    assert time.process_time() - started < 5


@given(ids, ids)
@few
def test_what_was_seen_as_the_template_writes_it_changes_nothing(seen, rest) -> None:
    assert splice_prefix(seen, seen, seen + rest, STOPS) == seen + rest


@given(ids, ids, ids)
@few
def test_a_splice_is_all_that_was_seen_and_an_end_of_the_prompt(seen, prefix, template) -> None:
    try:
        spliced = splice_prefix(seen, prefix, template, STOPS)
    except SpliceError:
        return
    assert spliced[: len(seen)] == seen
    rest = spliced[len(seen) :]
    assert rest == template[len(template) - len(rest) :]
    assert splice_prefix(seen, prefix, spliced, STOPS) == spliced


texts = st.lists(st.sampled_from([*range(20, 60), MERGED_TOKEN, END]), max_size=6).map(tuple)
answers = st.lists(st.sampled_from([*range(20, 60), MERGED_TOKEN]), min_size=1, max_size=8).map(tuple)
exchanges = st.tuples(
    texts.map(lambda text: say("user", *text)), st.tuples(answers, st.one_of(st.just(()), answers))
)


@given(
    st.lists(exchanges, min_size=1, max_size=5),
    st.lists(texts, min_size=1, max_size=2),
    st.booleans(),
    st.sampled_from([END, OTHER_END, None]),
    st.sampled_from(list(PREFIX_ENDINGS)),
    st.integers(1, 2),
)
@settings(max_examples=examples(60, 300), deadline=None, derandomize=True)
def test_the_place_is_where_the_generator_put_it(pairs, new_texts, strip, stop, ending, times) -> None:
    """The oracle wrote the prompts itself, so it knows where the last turn ends."""
    history: list[Message] = [SYSTEM]
    for ask, (thinks, text) in pairs * times:
        history += [ask, ("assistant", thinks, text)]
    new = [say("user", *text) for text in new_texts]
    template, ends = write([*history, *new], strip=strip, drop=strip)
    place = next(end for end in reversed(ends[: len(history)]) if end >= 0)
    seen = seen_of(history, stop=stop)
    prefix = PREFIX_ENDINGS[ending](write(history)[0])
    expected = seen + (template + GENERATION)[place + (stop is not None) :]
    assert splice_prefix(seen, prefix, template + GENERATION, STOPS) == expected


def test_the_recorded_prompt_of_others_is_mended_to_the_token() -> None:
    if not MERGED.is_file() or not TOKENIZERS.is_dir():
        pytest.skip("no recorded prompts in shared/ beside the checkout")
    recorded = json.loads(MERGED.read_bytes())
    qwen = tokenizer("qwen3")
    seen = recorded["seen_token_ids"]
    prefix = qwen.encode(decode(qwen, seen))
    spliced = splice_prefix(seen, prefix, recorded["output_prompt_token_ids"], 151645)
    assert len(spliced) == 7841
    assert spliced == recorded["expected_output"]


# Real tokenizers and chat templates.

STOPS_OF, HARMONY, DROPPING = (stored(__file__, name) for name in ("STOPS_OF", "HARMONY", "DROPPING"))
TEMPLATES = some([*STOPS_OF], 2)
ENDINGS = {"same stop": 0, "another stop": 1, "cut by length": None}
"""How a sampled turn may end, as the index of its stop."""


@cache
def tokenizer(name: str) -> Tokenizer:
    return load_tokenizer(str(TOKENIZERS / name))


@cache
def renderer(name: str) -> Renderer:
    return make_renderer(tokenizer(name), chat_template=HARMONY if name == "gpt-oss" else None)


def decode(tokens: Tokenizer, token_ids: Sequence[int]) -> str:
    return str(tokens.backend.decode(list(token_ids), skip_special_tokens=False))


def stop_ids(name: str) -> tuple[int, ...]:
    (own, other) = (tokenizer(name).backend.token_to_id(stop) for stop in STOPS_OF[name])
    return own, other


def split_token(tokens: Tokenizer, token_ids: list[int]) -> list[int]:
    """The same text with the last token that has two parts in the vocabulary written as those."""
    backend = tokens.backend
    vocabulary = backend.get_vocab()
    for at in reversed(range(len(token_ids))):
        piece = backend.id_to_token(token_ids[at])
        if len(piece) < 4 or token_ids[at] in tokens.vocabulary.special_ids:
            continue
        for cut in range(2, len(piece) - 1):
            left, right = vocabulary.get(piece[:cut]), vocabulary.get(piece[cut:])
            if left is not None and right is not None:
                return [*token_ids[:at], left, right, *token_ids[at + 1 :]]
    raise AssertionError("no token to split")


def chat(*contents: str) -> list[dict[str, str]]:
    """User and assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def check_real(
    name: str,
    history: list[dict[str, str]],
    new: list[dict[str, str]],
    *,
    stop: int | None = 0,
    chat_template: str | None = None,
) -> None:
    """Splice every form of the prefix and compare the text behind what was seen with the template's own.

    `stop` is the index of the stop that was sampled; None when the turn was cut by length.
    """
    tokens = tokenizer(name)
    writer = make_renderer(tokens, chat_template=chat_template) if chat_template else renderer(name)
    stops, end = stop_ids(name), STOPS_OF[name][0]

    def text(messages: list[dict[str, str]], prompt: bool) -> str:
        return writer.render(as_messages(messages, "messages"), add_generation_prompt=prompt)

    prompt, rendered, template = text(history[:-1], True), text(history, False), text([*history, *new], True)
    assert rendered.startswith(prompt), "the test needs a template that appends its last turn"
    turn_end = max(rendered.rfind(each) for each in STOPS_OF[name])
    body = rendered[len(prompt) : turn_end]
    seen = [*tokens.encode(prompt).tolist(), *split_token(tokens, tokens.encode(body).tolist())]
    assert seen != tokens.encode(prompt + body).tolist()
    seen += [stops[stop]] if stop is not None else []
    place = template.rindex(end, 0, template.index(new[0]["content"]))
    expected = template[place + (len(end) if stop is not None else 0) :]
    prefixes = {
        "rendered": rendered,
        "with a generation prompt": text(history, True),
        "without scaffolding": rendered.rstrip("\n"),
        "without the turn end": prompt + body,
        "decoded": decode(tokens, seen),
    }
    for form, prefix in prefixes.items():
        spliced = splice_prefix(seen, tokens.encode(prefix), tokens.encode(template), stops)
        assert spliced[: len(seen)] == seen, form
        assert decode(tokens, spliced[len(seen) :]) == decode(tokens, tokens.encode(expected)), form


@needs_tokenizers
@pytest.mark.parametrize(("ending", "name"), crossed([*ENDINGS], TEMPLATES))
def test_a_real_template_goes_on_behind_the_sampled_turn(name, ending) -> None:
    history = chat("What is invisible ink?", "Invisible ink is fluid.", "And who uses it?", "Spies and children.")
    check_real(name, history, chat("Skinny climbers too?"), stop=ENDINGS[ending])


@needs_tokenizers
@pytest.mark.parametrize(("ending", "name"), crossed(["same stop", "cut by length"], TEMPLATES))
def test_a_stop_token_spelled_in_real_text_ends_no_turn(name, ending) -> None:
    end = STOPS_OF[name][0]
    history = chat(f"What does {end} do?", "It ends a turn.", f"{end}{end} again", "Still nothing unusual.")
    check_real(name, history, chat(f"Then {end} it\n{end}"), stop=ENDINGS[ending])


@needs_tokenizers
@pytest.mark.parametrize("name", TEMPLATES)
def test_real_turns_that_repeat_word_for_word_are_taken_in_order(name) -> None:
    check_real(name, chat(*["Continue, please.", "Understood, continuing."] * 4), chat("Enough now."))


@needs_tokenizers
@pytest.mark.parametrize(("ending", "name"), crossed([*ENDINGS], ["gpt-oss", "qwen3"]))
@pytest.mark.parametrize("times", some([4, 1], 1))
def test_reasoning_that_the_template_strips_from_history_stays_as_sampled(name, ending, times) -> None:
    history = []
    for turn in range(times):
        history += chat("How many legs have spiders?", "Spiders have eight legs.")
        history[-1]["reasoning_content"] = f"Thinking number {turn} about spiders and their many legs. " * 20
    check_real(name, history, chat("And insects?"), stop=ENDINGS[ending])


@needs_tokenizers
def test_reasoning_of_several_tool_calls_is_stripped_at_once() -> None:
    history = chat("What is the weather?", "")
    for step in range(6):
        call = {"type": "function", "function": {"name": "look", "arguments": {"step": step}}}
        history[-1] |= {"reasoning_content": f"Look once more, number {step}.", "tool_calls": [call]}  # type: ignore[dict-item]
        history += [{"role": "tool", "content": f"cloudy {step % 2}"}, {"role": "assistant", "content": ""}]
    history[-1] |= {"content": "Cloudy everywhere.", "reasoning_content": "Enough looking around."}
    check_real("qwen3", history, chat("And tomorrow?"))


@needs_tokenizers
@pytest.mark.parametrize("name", some(["qwen3", "qwen2.5-coder"], 1))
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_real_turn_that_the_template_drops_stays_as_sampled(name, ending) -> None:
    emptied = "<think>Thinking about nothing in particular.</think>"
    last = chat("Hello there.", "General greetings.", "Anything else?", emptied)
    check_real(name, last, chat("Nothing at all?"), stop=ENDINGS[ending], chat_template=DROPPING)
    earlier = chat("Hello there.", emptied, "Anything else?", "<think>Hm.</think>Nothing interesting.")
    check_real(name, earlier, chat("Goodbye."), stop=ENDINGS[ending], chat_template=DROPPING)


# Masks.


MASKS = stored(__file__, "MASKS")


@pytest.mark.parametrize("what", MASKS)
def test_what_drifted_leaves_the_loss(what) -> None:
    recorded, reference, before, how, after = MASKS[what]
    mask = [digit == "1" for digit in before]
    for column in (mask, np.array(mask, np.int64)):
        assert mask_drift(recorded, reference, column, **how) == [digit == "1" for digit in after]


def test_a_long_row_is_aligned_beyond_what_was_put_in_and_left_out() -> None:
    draw = np.random.default_rng(5)
    reference = draw.integers(0, 5000, 40_000)
    put_in, left_out = draw.integers(6000, 7000, 3000), slice(20_000, 26_000)
    recorded = np.concatenate((reference[:9000], put_in, reference[9000:20_000], reference[26_000:]))
    expected = np.ones(len(recorded), np.bool_)
    expected[9000:12_000] = False
    started = time.process_time()
    assert mask_drift(recorded, reference, np.ones(len(recorded))) == expected.tolist()
    assert left_out.stop - left_out.start == 6000
    assert time.process_time() - started < 2


def slow_common(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the longest common subsequence, by the book."""
    row = [0] * (len(b) + 1)
    for x in a:
        old = row[:]
        for j, y in enumerate(b):
            row[j + 1] = old[j] + 1 if x == y else max(old[j + 1], row[j])
    return row[-1]


def is_subsequence(a: Sequence[int], b: Sequence[int]) -> bool:
    rest = iter(b)
    return all(x in rest for x in a)


@given(ids, ids, st.randoms())
@few
def test_a_mask_loses_what_is_out_of_place_and_wins_nothing(recorded, reference, random) -> None:
    mask = [random.random() < 0.7 for _ in recorded]
    trained = [r for r, k in zip(recorded, mask_drift(recorded, reference, [1] * len(recorded)), strict=True) if k]
    assert is_subsequence(trained, reference)
    assert len(trained) <= slow_common(recorded, reference)
    by_span = mask_drift(recorded, reference, mask)
    for by in ("span", "turn", "first-divergence"):
        masked = mask_drift(recorded, reference, mask, by=by)
        assert all(s or not m for m, s in zip(masked, by_span, strict=True))
        assert all(old or not new for new, old in zip(masked, mask, strict=True))
        assert mask_drift(recorded, recorded, mask, by=by) == mask


# Forks.


FORKS = stored(__file__, "FORKS")


def test_calls_that_extend_each_other_are_one_row() -> None:
    calls = [([1, 2], [3], [-0.5]), ([1, 2, 3, 4], [5, 6], [-0.25, None])]
    (row,) = fork_rows(calls)
    assert row.token_ids == [1, 2, 3, 4, 5, 6]
    assert row.loss_mask == [False, False, True, False, True, True]
    assert row.logprobs == pytest.approx([NAN, NAN, -0.5, NAN, -0.25, NAN], nan_ok=True)
    assert (row.calls, row.trained) == ((0, 1), (0, 1))
    assert fork_cost(calls, [row]) == (1, 0)


@pytest.mark.parametrize("what", FORKS)
def test_calls_become_rows(what) -> None:
    calls, expected, cost = FORKS[what]
    rows = fork_rows(calls)
    assert fork_cost(calls, rows) == tuple(cost)
    for row, (token_ids, mask, logprobs, chain, trained) in zip(rows, expected, strict=True):
        assert (row.token_ids, [*row.calls], [*row.trained]) == (token_ids, chain, trained)
        assert row.loss_mask == [digit == "1" for digit in mask]
        assert row.logprobs == pytest.approx(logprobs, nan_ok=True)


def test_environment_tokens_inside_a_response_are_not_trained_and_have_no_logprob() -> None:
    calls = [([1], [2, 8, 9, 3], [-0.5, -7.0, 0.0, -0.25]), ([1, 2, 8, 9, 3, 4], [5, 8], [-1.0, 0.0]), ([7], [6])]
    first, second = fork_rows(calls, sampled=[[1, 0, 0, 1], np.array([True, False]), None])
    assert first.token_ids == [1, 2, 8, 9, 3, 4, 5, 8]
    assert [i for i, label in enumerate(first.loss_mask) if label] == [1, 4, 6]
    assert first.logprobs == pytest.approx([NAN, -0.5, NAN, NAN, -0.25, NAN, -1.0, NAN], nan_ok=True)
    assert second.loss_mask == [False, True]
    # A response that an environment wrote alone is context: it is in the row of the call behind it, or in none.
    (row,) = fork_rows(calls[:2], sampled=[[0, 0, 0, 0], None])
    assert (row.calls, row.trained) == ((0, 1), (1,))
    assert fork_rows(calls[:1], sampled=[[0, 0, 0, 0]]) == []
    assert fork_rows(calls, sampled=[None] * 3)[0].loss_mask == fork_rows(calls)[0].loss_mask


HISTORY = [SYSTEM, ASK, THOUGHT]
CALLS = [([1], [2, 3]), ([1], [4])]
REFUSED = [
    (
        SpliceError,
        "holds no end",
        splice_prefix,
        seen_of(HISTORY),
        write(HISTORY)[0],
        prompt_of([*HISTORY, NEXT]),
        1000,
    ),
    (SpliceError, "stop_ids is empty", splice_prefix, [1], [2], [3], ()),
    (RecordError, "template_ids", splice_prefix, [1], [2], ["3"], 9),
    (ValueError, r"shape \(2,\).*3 tokens", mask_drift, [1, 2, 3], [1, 2, 3], [1, 1]),
    (ValueError, "values other", mask_drift, [1, 2], [1, 2], [1, -100]),
    (ValueError, "'word' is unknown", partial(mask_drift, by="word"), [1], [1], [1]),
    (ValueError, r"sampled has 1 masks for 2 calls", partial(fork_rows, sampled=[[1, 0]]), CALLS),
    (ValueError, r"sampled\[0\] has 1 entries for 2 comp", partial(fork_rows, sampled=[[1], None]), CALLS),
    (ValueError, r"sampled\[1\] holds values other than", partial(fork_rows, sampled=[None, [2]]), CALLS),
    (ValueError, r"sampled\[0\] holds values other than", partial(fork_rows, sampled=[[None, 1], None]), CALLS),
    (ValueError, "call 0 has 1 logprobs and 2 completion", fork_rows, [([1], [2, 3], [-0.5])]),
    (ValueError, "call 1 is not", fork_rows, [([1], [2]), ([1],)]),
    (RecordError, r"calls\[0\] completion_ids", fork_rows, [([1], [2.5])]),
]
"""The error, what it says, and the call that it answers."""


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[1])
def test_what_cannot_be_mended_is_refused(case) -> None:
    error, says, function, *arguments = case
    with pytest.raises(error, match=says):
        function(*arguments)


def test_a_thousand_calls_take_no_minute() -> None:
    calls, prompt = [], np.arange(20, dtype=np.int32)
    for number in range(1000):
        completion = np.full(5, number, np.int32)
        calls.append((prompt, completion))
        if number % 10:
            prompt = np.concatenate((prompt, completion, [3, 4, 5])).astype(np.int32)
    started = time.process_time()
    rows = fork_rows(calls)
    assert time.process_time() - started < 10
    assert sorted(k for row in rows for k in row.trained) == list(range(1000))
    assert len(rows) == 101


short = st.lists(st.integers(0, 2), max_size=5)


@given(st.lists(st.tuples(short, st.lists(st.integers(0, 2), max_size=3)), max_size=8))
@few
def test_every_sampled_token_is_trained_once_in_the_context_it_was_sampled_in(calls) -> None:
    rows = fork_rows(calls)
    trained = [k for row in rows for k in row.trained]
    assert sorted(trained) == [k for k, (_, completion) in enumerate(calls) if completion]
    assert [row.trained[0] for row in rows] == sorted(row.trained[0] for row in rows)
    for row in rows:
        expected = [False] * len(row.token_ids)
        for k in row.calls:
            prompt, completion = calls[k]
            assert row.token_ids[: len(prompt) + len(completion)] == prompt + completion
            if k in row.trained:
                expected[len(prompt) : len(prompt) + len(completion)] = [True] * len(completion)
        assert row.loss_mask == expected
        assert all(math.isnan(value) for value in row.logprobs)
        for parent, child in zip(row.calls, row.calls[1:], strict=False):
            assert parent == slow_parent(calls, child)
        assert slow_parent(calls, row.calls[0]) is None


def slow_parent(calls: Sequence[tuple[list[int], list[int]]], k: int) -> int | None:
    prompt = calls[k][0]
    parents = [(len(p) + len(c), j) for j, (p, c) in enumerate(calls[:k]) if p + c == prompt[: len(p) + len(c)]]
    return max((pair for pair in parents if pair[0]), default=(0, None))[1]
