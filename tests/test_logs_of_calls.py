"""Logs that hold every call's complete prompt: what is worked out once says what working all of it out says."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from benchmarks.calls import recorded_ids
from benchmarks.corpus import Factory, Shape
from tests import test_fast_engine, toy
from tests.faults import END, Log, clean_logs, encode, log_of, places, spelling
from tests.tiers import examples
from tests.world import TOY
from tito_audit.align.alignment import align
from tito_audit.evidence.chains import chain_turns
from tito_audit.evidence.differences import (
    Stretch,
    compare_between_controls,
    compare_text,
    stretches,
)
from tito_audit.evidence.gather import gather
from tito_audit.evidence.model import Evidence, TextSide
from tito_audit.evidence.reference import Reference
from tito_audit.record.arrays import Ids
from tito_audit.record.message import as_messages
from tito_audit.record.rollout import Rollout, Turn
from tito_audit.render.renderer import Renderer
from tito_audit.settings.model import Settings
from tito_audit.tokens.segments import ControlTokens, KnownText, KnownTexts, PrefixEncoder, SegmentEncoder

some = settings(max_examples=examples(20, 60), deadline=None, derandomize=True)
PARTS = ("<|im_start|>", "<tool_call>", "<|im_end|>", "user\n", "The dog", " is", "\n", " ")
PARTS += ("Füße", " 你好", " 🙂", "<|im", "<unk>")


def written(dice: random.Random, most: int = 30) -> str:
    """Words and control tokens, whole ones and the beginnings of some."""
    return "".join(dice.choice(PARTS) for _ in range(dice.randrange(most)))


def chains(dice: random.Random, count: int = 25) -> list[str]:
    """Texts of which most go on from one of those before, some cut short or changed."""
    texts = [written(dice)]
    while len(texts) < count:
        text = dice.choice(texts[-3:])
        cut = dice.randrange(len(text) + 1) if dice.random() < 0.4 else len(text)
        texts.append(text[:cut] + written(dice, 12))
    return texts


# Texts that begin alike


@pytest.mark.parametrize("name", ["toy_bpe", "toy_metaspace"])
@some
@given(seed=st.integers(0, 1 << 30))
def test_a_grown_text_has_the_ids_of_the_whole_text(name: str, seed: int) -> None:
    tokenizer = toy.toy_tokenizer(name)
    lengths: list[int] = []

    def alone(texts: Any) -> list[Ids]:
        lengths.extend(map(len, texts))
        return [np.array(tokenizer.backend.encode(text, add_special_tokens=False).ids, np.int32) for text in texts]

    whole = SegmentEncoder(alone, ControlTokens({}), 1 << 20)
    grown = PrefixEncoder(whole, tokenizer.control_tokens)
    for text in chains(random.Random(seed)):
        text = text.ljust(2048, "a")  # shorter ones are encoded whole
        assert np.array_equal(grown.encode_batch([text])[0], tokenizer.encode(text))
    assert grown.encode_batch(["", "The"])[1].tolist() == tokenizer.encode("The").tolist()


def test_of_a_growing_text_only_what_is_new_is_encoded() -> None:
    tokenizer = toy.toy_tokenizer()
    lengths: list[int] = []

    def alone(texts: Any) -> list[Ids]:
        lengths.extend(map(len, texts))
        return tokenizer.encode_batch(texts)

    grown = PrefixEncoder(SegmentEncoder(alone, ControlTokens({}), 1 << 20), tokenizer.control_tokens)
    text = "<|im_start|>user\n" + "The dog is. " * 300
    for turn in range(40):
        text += f"<|im_end|>\n<|im_start|>user\nThe dog is {turn}."
        assert np.array_equal(grown.encode_batch([text])[0], tokenizer.encode(text))
    assert sum(lengths) < 2 * len(text)


def test_a_control_token_that_stands_for_an_unknown_character_is_no_cut() -> None:
    cuts = ControlTokens({"<unk>": 5, "<e>": 6})
    text = "é<unk>a<e>b"
    known_text = KnownText(cuts, text, np.array([5, 5, 10, 6, 11], np.int32))
    assert known_text.count_shared_cuts(text) == 0
    plain = KnownText(cuts, text, np.array([9, 5, 10, 6, 11], np.int32))
    assert plain.count_shared_cuts(text) == 2
    assert (plain.text_ends, plain.id_ends) == ([6, 10], [2, 4])
    assert plain.count_shared_cuts("é<unk>a<e") == 1
    assert plain.count_shared_cuts("e<unk>a<e>b") == 0


def test_a_text_that_has_little_in_common_is_not_looked_at() -> None:
    cuts = ControlTokens({"<e>": 6})
    known_texts = KnownTexts(cuts)
    known_texts.remember("ab<e>" + "c" * 40, np.array([1, 6, *[3] * 40], np.int32))
    assert known_texts.find_longest("ab<e>d") == (None, 0, 0, 0)
    nearest, _, *places = known_texts.find_longest("ab<e>" + "c" * 30)
    assert nearest is not None
    assert places == [5, 2]


_MARKED = st.lists(st.sampled_from(["a", "b", "<e>", "<a>"]), max_size=12).map("".join)


@some
@given(texts=st.lists(_MARKED, min_size=2, max_size=5), spelled=st.data())
def test_the_known_text_that_shares_the_most_is_found(texts: list[str], spelled: Any) -> None:
    cuts, (*earlier, text) = ControlTokens({"<e>": 6, "<a>": 7}), texts
    text = spelled.draw(st.sampled_from(earlier)) + text
    known_texts, sizes = KnownTexts(cuts), [(0, 0)]
    for before in earlier:
        ids = [cuts.tokens.get(part, 1) for part in cuts.split(before) if part]
        known_texts.remember(before, np.array(ids, np.int32))
        alone = KnownText(cuts, before, np.array(ids, np.int32))
        shared = alone.count_shared_cuts(text)
        sizes += [(alone.text_ends[shared - 1], alone.id_ends[shared - 1])] if shared else []
    assert known_texts.find_longest(text)[2:] == max(sizes)


@some
@given(several=st.lists(st.lists(st.sampled_from([-1, 0, 5, 70, 260, 300, 1 << 20]), max_size=90), max_size=5))
def test_several_sequences_are_spelled_at_once_as_each_is_alone(several: list[list[int]]) -> None:
    reference = Reference(toy.toy_tokenizer(), None)
    arrays = [np.array(ids, np.int32) for ids in several]
    for pieces, ids in zip(reference.pieces_of_each(arrays), arrays, strict=True):
        alone = reference.pieces(ids)
        assert pieces.data == alone.data
        for column in ("ids", "end", "control"):
            assert np.array_equal(getattr(pieces, column), getattr(alone, column))
        assert pieces.has_empty() == (0 in reference.vocabulary.byte_lengths(ids))


@some
@given(seed=st.integers(0, 1 << 30))
def test_a_text_leads_to_ids_exactly_if_it_has_them(seed: int) -> None:
    dice = random.Random(seed)
    tokenizer = toy.toy_tokenizer()
    for text in chains(dice):
        ids = tokenizer.encode(text)
        other = ids.copy()
        if len(other) and dice.random() < 0.7:
            other[dice.randrange(len(other))] = dice.choice((*ids.tolist(), 300))
        cut, longer = ids[: dice.randrange(len(ids) + 1)], np.append(ids, np.int32(300))
        for recorded in (other, cut, longer, ids, other[: len(cut)]):
            same = np.array_equal(ids, recorded)
            assert tokenizer.encodes_to(text, recorded) == same
            begins = np.array_equal(ids[: len(recorded)], recorded)
            assert tokenizer.encodes_to(text, recorded, goes_on=True) == begins


def test_ids_that_are_changed_later_do_not_change_what_is_known() -> None:
    tokenizer = toy.toy_tokenizer()
    text = "<|im_start|>user\nThe dog is.<|im_end|>\nThe baker"
    ids = np.array(tokenizer.encode(text))
    assert tokenizer.encodes_to(text, ids)
    ids[2] += 1
    assert not tokenizer.encodes_to(text, ids)
    assert not tokenizer.encodes_to(text + " told", np.concatenate([ids, tokenizer.encode(" told")]))


@some
@given(seed=st.integers(0, 1 << 30))
def test_a_text_is_borne_out_by_the_ids_that_spell_it(seed: int) -> None:
    dice = random.Random(seed)
    reference = Reference(toy.toy_tokenizer(), None)
    for text in chains(dice, 15):
        ids = respelled(toy.toy_tokenizer().encode(text), dice)
        other = ids.copy()
        if len(other):
            other[dice.randrange(len(other))] = 300
        for recorded in (other, ids, ids[:-1], np.append(ids, np.int32(300))):
            assert reference.spells(recorded, text) == (reference.decode(recorded) == text)
    broken = toy.toy_tokenizer().vocabulary.ids_of_bytes(b"\xe2")[0]
    assert not reference.spells(np.array([broken], np.int32), "\ufffd"), "the bytes were lost on the way"


def respelled(ids: Ids, dice: random.Random) -> Ids:
    """Some tokens by their single bytes."""
    out: list[int] = []
    for token in ids.tolist():
        if token in toy.toy_tokenizer().vocabulary.added_ids or dice.random() < 0.8:
            out.append(token)
        else:
            out += encode_bytes(token)
    return np.array(out, np.int32)


# Prompts that grow


def grown_and_whole(dice: random.Random) -> int:
    """A chain of texts compared both ways; how often one left out what was found before."""
    reference = Reference(toy.toy_tokenizer(), None)
    text, recorded = "", np.empty(0, np.int32)
    before, keys = None, set()
    shorter = 0
    for _ in range(14):
        new = written(dice, 14)
        ids = encode(new if dice.random() < 0.9 else new + "dog")
        text, recorded = text + new, np.concatenate([recorded, respelled(np.array(ids, np.int32), dice)])
        if dice.random() < 0.15:  # a record that does not go on from the one before
            recorded = respelled(np.array(encode(text), np.int32), dice)
        stretches_of_text, before = compare_text(text, recorded, before, reference)
        every, _ = plain(text, recorded, None, reference)
        left_out = len(every) - len(stretches_of_text)
        wanted = [stated(stretch) for stretch in every]
        places = [wanted.index(stated(stretch)) for stretch in stretches_of_text]
        assert places == sorted(set(places)), "what is found is found in the whole too, in order"
        assert {stretch.key for at, stretch in enumerate(every) if at not in places} <= keys, (
            "the rest was found before"
        )
        if reference.decode(recorded) != text:
            assert before.texts is None or before.texts
        elif before.texts is not None:
            assert places == list(range(left_out, len(every)))
        keys = {stretch.key for stretch in every}
        shorter += left_out > 0
        if dice.random() < 0.2:
            text = text[: dice.randrange(len(text) + 1)]
            recorded = respelled(np.array(encode(text), np.int32), dice)
            before, keys = None, set()
    return shorter


def stated(stretch: Stretch) -> list[Any]:
    return [facts(getattr(stretch, name)) for name in Stretch.__dataclass_fields__]


def test_behind_what_was_compared_the_same_is_found_as_in_the_whole() -> None:
    assert sum(grown_and_whole(random.Random(seed)) for seed in range(80)) > 40


# Texts that differ, alone


def turns_of(dice: random.Random) -> list[str]:
    """Messages as a template writes them, some alike."""
    texts = ["Yes", "The dog is", "Füße 你好", " 🙂", "a dog", "<think>\nSkinny\n</think>\n\nYes", ""]
    return [f"{dice.choice(('user', 'assistant'))}\n{dice.choice(texts)}" for _ in range(dice.randrange(1, 7))]


def disturbed_turn(turn: str, dice: random.Random) -> str:
    """A message without its reasoning, with reasoning, or with other words."""
    role, _, rest = turn.partition("\n")
    kind = dice.randrange(4)
    if kind == 0:
        return f"{role}\n<think>\n{rest[:3]}\n</think>\n\n{rest}"
    if kind == 1:
        return f"{role}\n{rest.rpartition('</think>')[2]}"
    return dice.choice((turn + " is", f"{role}\nThe{rest}", "", turn[:4], turn + "<|im_end|>", turn + "<unk>"))


@settings(max_examples=examples(150, 600), deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 30))
def test_of_texts_that_differ_alone_the_same_is_found_as_of_the_whole(seed: int) -> None:
    dice = random.Random(seed)
    reference = Reference(toy.toy_tokenizer(), None)
    turns = turns_of(dice)
    others = [disturbed_turn(turn, dice) if dice.random() < 0.3 else turn for turn in turns]
    text, other = ("<|im_end|>\n<|im_start|>".join(each) for each in (turns, others))
    encoded = reference.encode("<|im_start|>" + text)
    recorded = np.array(encode("<|im_start|>" + other), np.int32)
    recorded = respelled(recorded, dice) if dice.random() < 0.6 else recorded
    if dice.random() < 0.2:
        recorded = np.insert(recorded, dice.randrange(len(recorded)), dice.choice((1 << 20, -1))).astype(np.int32)
    open_end, after = dice.random() < 0.5, dice.choice((0, 0, dice.randrange(len(recorded))))
    if open_end:
        encoded = np.append(encoded, np.array(encode("<|im_end|>\n" * dice.randrange(3)), np.int32))
    whole = reference.decode(encoded)
    known_text = KnownText(reference.tokenizer.control_tokens, whole, encoded)
    changed = compare_between_controls(known_text, recorded, reference, open_end=open_end, after=after)
    event("alone" if changed is not None else "whole")
    if changed is None or np.array_equal(recorded, encoded):
        return
    both = reference.pieces(recorded), reference.pieces(encoded)
    wanted = stretches(*both, align(*both, open_end=open_end))
    places = [stated(each) for each in wanted if after <= each.start < len(recorded) or not open_end]
    stated_stretches = [stated(each) for each in changed[0] if after <= each.start]
    assert stated_stretches == [each for each in places if each[1] >= after]
    if not open_end and not after:
        assert (not changed[1].texts) == (both[0].data == both[1].data)


# Whole rollouts


def plain(
    text: str, recorded: Ids, _before: Any, reference: Reference, *, open_end: bool = False, after: int = 0
) -> Any:
    """A prompt against its whole text."""
    encoded = reference.tokenizer.encode(text)
    pieces, canonical = reference.pieces(recorded), reference.pieces(encoded)
    return stretches(pieces, canonical, align(pieces, canonical, open_end=open_end, compare_from=after)), None


def facts(value: Any) -> Any:
    """A value that `==` compares whole."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tolist()
    if isinstance(value, TextSide):
        return facts(value.ids), value.data, value.before, value.after
    return value


def said(evidence: Evidence) -> Any:
    fields = type(evidence.differences[0]).__dataclass_fields__ if evidence.differences else ()
    return (
        [[facts(getattr(difference, name)) for name in fields] for difference in evidence.differences],
        evidence.links,
        evidence.render_errors,
        evidence.present,
    )


def check(rollout: Rollout) -> None:
    tokenizer, renderer = toy.toy_tokenizer(), toy.toy_renderer()
    evidence_facts = said(gather(rollout, tokenizer, renderer))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tito_audit.evidence.prompts.compare_text", plain)
        patch.setattr(Reference, "spells", lambda *_: False)
        patch.setattr(Reference, "leads_to", lambda *_, **__: False)
        patch.setattr(Renderer, "render_chat_fast", lambda *_, **__: ([], None))
        assert evidence_facts == said(gather(rollout, tokenizer, renderer))


def other_spelling(log: Log, dice: random.Random) -> Log:
    """A token of an answer by its bytes; later prompts keep them, or hold what encoding them again gives."""
    spots = [spot for spot in places(log, 1) if len(spelling(log.completions[spot[0]][spot[1]])) > 1]
    turn, at, run = dice.choice(spots)
    before = list(log.completions[turn])
    out = log.replaced(turn, at, at + 1, encode_bytes(run[0]))
    return out if dice.random() < 0.5 else out.forgotten(turn, before)


def disturbed(log: Log, dice: random.Random) -> Rollout:
    """A rollout of the log in which calls were made anew, left out, or asked otherwise."""
    for _ in range(dice.choice((0, 1, 1, 2))):
        log = other_spelling(log, dice)
    if dice.random() < 0.5:  # what was given, in other tokens or other words, as all later prompts have it
        at = dice.randrange(len(log))
        gap = log.gaps[at] if dice.random() < 0.5 else [*log.gaps[at][:3], 314, *log.gaps[at][3:]]
        log.gaps[at] = respelled(np.array(gap, np.int32), dice).tolist()
        log.lay()
    rollout = log.rollout()
    turns = list(rollout.turns)
    for _ in range(dice.randrange(3)):
        at = dice.randrange(len(turns))
        kind = dice.choice(("again", "sibling", "compacted", "foreign", "silent", "respelled", "without messages"))
        turn = turns[at]
        assert turn.prompt_ids is not None
        if kind == "again":
            turns.insert(at, turn)
        elif kind == "sibling":
            said_instead = np.array(encode("Nobody" + END), np.int32)
            turns.insert(at, replace(turn, completion_ids=said_instead, completion_logprobs=None, columns=()))
        elif kind == "compacted":
            first = dice.randrange(len(turn.prompt_ids))
            turns[at] = replace(turn, prompt_ids=np.delete(turn.prompt_ids, slice(first, first + 9)))
        elif kind == "foreign":
            prompt = np.array(encode("<|im_start|>user\nRate it.<|im_end|>\n<|im_start|>assistant\n"), np.int32)
            turns.insert(at, Turn(prompt, np.array(encode("Good" + END), np.int32)))
        elif kind == "silent":
            turns[at] = replace(turn, completion_ids=None, completion_logprobs=None, columns=())
        elif kind == "respelled":
            turns[at] = replace(turn, prompt_ids=respelled(turn.prompt_ids, dice))
        else:
            turns[at] = replace(turn, message_index=None)
    messages = log.messages
    if dice.random() < 0.3:
        number = dice.randrange(len(messages))
        word = dice.choice((" twice", "\n", "\ufffd", " <|im_end|>"))
        other = {**messages[number], "content": f"{messages[number]['content']}{word}"}
        messages = [*messages[:number], other, *messages[number + 1 :]]
    return replace(rollout, turns=tuple(turns), messages=as_messages(messages, "messages"))


@settings(max_examples=examples(30, 200), deadline=None, derandomize=True)
@given(clean_logs(), st.integers(0, 1 << 30))
def test_prompts_compared_where_they_are_new_show_what_whole_prompts_show(log: Log, seed: int) -> None:
    check(disturbed(log, random.Random(seed)))


def test_what_a_long_conversation_keeps_is_said_once_and_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(5)
    messages: list[dict[str, Any]] = []
    for k in range(12):
        messages.append({"role": "user", "content": f"The baker told us of dog number {k}."})
        messages.append({"role": "assistant", "content": f"It is a skinny dog, they say, the dog {k}."})
    log = log_of(messages, [], 3)
    for turn in (1, 4, 9):
        at, run = next((at, run) for t, at, run in places(log, 1, [turn]) if len(spelling(run[0])) > 2)
        log = log.replaced(turn, at, at + 1, encode_bytes(run[0]))
    check(disturbed(log, dice))
    check(log.rollout())
    lengths: list[int] = []
    whole = Reference.encode_as

    def watched(self: Reference, text: str, recorded: Ids, **how: Any) -> Ids:
        lengths.append(len(recorded))
        return whole(self, text, recorded, **how)

    rendered: list[bool] = []
    render = Renderer.render

    def counted(self: Renderer, *args: Any, add_generation_prompt: bool, **how: Any) -> str:
        rendered.append(add_generation_prompt)
        return render(self, *args, add_generation_prompt=add_generation_prompt, **how)

    monkeypatch.setattr(Reference, "encode_as", watched)
    monkeypatch.setattr(Renderer, "render", counted)
    gather(replace(log.rollout(), training_row=None), toy.toy_tokenizer(), toy.toy_renderer())
    seen = len(log.prompts[-1]) + len(log.completions[-1])
    assert sum(lengths) < 4 * seen < sum(map(len, log.prompts))
    assert not any(rendered), "of a prompt, what the ids spell is what the template writes"


def encode_bytes(token: int) -> list[int]:
    """A token by its bytes."""
    return [toy.toy_tokenizer().vocabulary.ids_of_bytes(bytes([byte]))[0] for byte in spelling(token)]


def test_every_prompt_after_the_first_has_a_link() -> None:
    rollout = Rollout(
        toy.rollout_of({}).place,
        "toy",
        turns=tuple(Turn(np.arange(n, dtype=np.int32) if n != 4 else None, np.array([n])) for n in range(1, 7)),
    )
    assert [link.turn for link in chain_turns(rollout, None).links] == [1, 2, 4, 5]


# Logs on disk


@pytest.mark.parametrize("seed", range(examples(1, 2)))
def test_the_fast_engine_says_what_the_reference_engine_says(seed: int, tmp_path: Path) -> None:
    shape = Shape(turns=(2, 6, 12), words=14, faulty=0.6, seed=seed, calls=True)
    corpus = Factory(TOY, tmp_path).corpus(shape, 3000)
    rows = [orjson.loads(line) for line in Path(corpus.jsonl).read_bytes().splitlines()]
    assert sum(recorded_ids(row["calls"]) for row in rows) == corpus.recorded > 2 * corpus.tokens
    dice = random.Random(seed)
    for row in list(rows):
        for change in (lambda c: [*c[:1], *c], lambda c: c[::-1], lambda c: c[1:]):
            if dice.random() < 0.2:
                rows.append({**row, "calls": change(row["calls"])})
    log = tmp_path / "calls.jsonl"
    log.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    test_fast_engine.check(log, Settings(tokenizer=str(TOY)))


def test_a_log_of_calls_holds_the_same_rows_in_both_kinds_of_file(tmp_path: Path) -> None:
    from pyarrow import parquet

    corpus = Factory(TOY, tmp_path).corpus(Shape(turns=(2, 4), words=10, faulty=0.6, calls=True), 5000)
    rows = [orjson.loads(line) for line in Path(corpus.jsonl).read_bytes().splitlines()]
    table = parquet.read_table(corpus.parquet).to_pylist()
    assert len(rows) == len(table) == corpus.rows
    continued, again = 0, 0
    for number, (row, other) in enumerate(zip(rows, table, strict=True)):
        for call, two in zip(row["calls"], other["calls"], strict=True):
            assert call["prompt_token_ids"] == two["prompt_token_ids"]
            assert call["generation_token_ids"] == two["generation_token_ids"]
            assert len(call["generation_log_probs"]) == len(call["generation_token_ids"])
        seen = [call["prompt_token_ids"] + call["generation_token_ids"] for call in row["calls"]]
        grows = all(
            call["prompt_token_ids"][: len(before)] == before
            for before, call in zip(seen, row["calls"][1:], strict=False)
        )
        assert grows or number in corpus.faulty
        continued, again = continued + (grows and number in corpus.faulty), again + (not grows)
    assert continued > 0, "some later prompts keep what was sampled"
    assert again > 0, "some later prompts hold it encoded again"
