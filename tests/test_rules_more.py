"""Rules of weights, images, units and trainers' columns: what holds for every row.

What formats hand them stands in `tests/data/rows_found.jsonl`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests import toy
from tests.command import written
from tests.tiers import examples, some
from tito_audit.evidence.gather import gather
from tito_audit.evidence.images import (
    FAMILIES,
    ImageSpan,
    ImageTokens,
    StatedImages,
    image_tokens,
    images_in_ids,
    images_in_messages,
)
from tito_audit.record.build import build_call_columns, build_training_row
from tito_audit.record.column import MovePolicy
from tito_audit.record.finding import Hit, Where
from tito_audit.record.message import as_messages
from tito_audit.record.mismatch import MismatchCause
from tito_audit.record.rollout import Place, Rollout, Turn
from tito_audit.rules import all_rules, rule_of
from tito_audit.rules.lpr507_low_logprobs_where_tokens_drifted import _chance
from tito_audit.run.check import check
from tito_audit.run.scan import scan_rollouts
from tito_audit.settings.model import Settings
from tito_audit.tokens.load import load_tokenizer

TOY = str(toy.TOKENIZERS / "toy_bpe")
SHARED = Path(__file__).resolve().parents[2] / "shared" / "tokenizers"
NEW = ("REC008", "REC010", "LPR507", "LPR508", "LPR509")
IDS = [2001, 314, 257, 198, 54, 71, 2002, 198]
IMAGE = {"role": "user", "content": [{"type": "image"}]}
ANSWER = {"role": "assistant", "content": "4"}
VALUES = [-0.5, -0.25, -0.5, -1.0, -2.0, -0.125, -0.75, -0.01]


def hits(code: str, rollout: Rollout) -> list[Hit]:
    """What a rule says of a rollout without a tokenizer."""
    rule = rule_of(code)
    assert rule is not None
    assert rule.check is not None
    return list(rule.check(gather(rollout, None, None)))


def row_of(logprobs: Any, mask: Any = None, **columns: Any) -> Rollout:
    """A training row with these columns; every token is trained unless a mask is given."""
    size = len(logprobs)
    row = build_training_row(
        np.arange(10, 10 + size, dtype=np.int32),
        mask=("loss_mask", np.ones(size, np.int64) if mask is None else mask),
        logprobs=("logprobs", logprobs),
        other={name: (values, MovePolicy.MOVE) for name, values in columns.items()},
    )
    return Rollout(Place("made up", 0), "toy", training_row=row)


# Images.


@pytest.mark.parametrize("messages", [[IMAGE, ANSWER], []], ids=["an image", "no messages"])
def test_images_are_skipped_where_neither_messages_nor_vocabulary_tell(messages: Any, tmp_path: Path) -> None:
    row = {"token_ids": IDS, "loss_mask": [1] * 8} | ({"messages": messages} if messages else {})
    assert skipped(tmp_path, row) == ["the tokenizer's image tokens are unknown"]


def test_messages_without_images_tell_that_there_are_none(tmp_path: Path) -> None:
    ids = [2001, 314, 257, 198, 19, 2002, 198, 2001, 1620, 198, 19, 2002]
    talk = [{"role": "user", "content": "4"}, ANSWER]
    assert skipped(tmp_path, {"token_ids": ids, "loss_mask": [0] * 10 + [1] * 2, "messages": talk}) == []


def skipped(tmp_path: Path, row: Mapping[str, Any]) -> list[str]:
    """Why the rule of images does not run on a row."""
    (result,) = scan_rollouts(written(tmp_path / "log.jsonl", [row]), Settings(tokenizer=TOY, select=("REC010",)))
    return [skip.because for skip in result.skips]


def test_parts_with_empty_fields_are_no_images() -> None:
    part = {"text": "4", "image": None, "video": None}
    assert images_in_messages(as_messages([{"role": "user", "content": [part]}], "here")) == StatedImages((), 0)
    images = images_in_messages(as_messages([{"role": "user", "content": [{**part, "image": "a.png"}]}], "here"))
    assert images == StatedImages(("a.png",), 0)


RUN = ["<|vision_start|>", *["<|image_pad|>"] * 6, "<|vision_end|>"]
SPELLED = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]


@pytest.mark.parametrize("field", ["content", "reasoning_content", "tool_calls"])
@pytest.mark.parametrize("spelled", [SPELLED, ["<|vision_start|>", *RUN, "<|vision_end|>"]])
def test_images_are_not_counted_where_text_spells_their_tokens(field: str, spelled: list[str]) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "".join(spelled)}}}
    answer: Any = [call] if field == "tool_calls" else "".join(spelled)
    messages = [
        {"role": "user", "content": [{"type": "image"}]},
        {"role": "assistant", "content": "4", field: answer},
        {"role": "user", "content": "2"},
        {"role": "assistant", "content": "4"},
    ]
    turn = {"prompt": ["<|im_start|>", *RUN, *spelled], "completion": ["4"], "message": 3}
    case = {"tokenizer_name": "toy_vision", "messages": messages, "turns": [turn]}
    assert image_hits(case) == []
    silent = [messages[0], {"role": "assistant", "content": "4"}, *messages[2:]]
    assert len(image_hits({**case, "messages": silent})) >= 1


def test_tokens_of_images_around_other_text_are_no_images() -> None:
    around = ["<|vision_start|>", "4", "<|vision_start|>", "2", "<|vision_end|>", "<|vision_end|>"]
    for prompt in (around, [*RUN, "<|vision_start|>", "4", "<|vision_end|>"]):
        assert (
            image_hits({"tokenizer_name": "toy_vision", "turns": [{"prompt": prompt, "completion": ["4"]}]}) == []
        )


def image_hits(case: Mapping[str, Any]) -> list[Hit]:
    """What REC010 says of a case."""
    rule = rule_of("REC010")
    assert rule is not None
    assert rule.check is not None
    return list(rule.check(toy.evidence_of(case)))


def test_a_trainers_column_of_zeros_was_never_written() -> None:
    assert hits("LPR509", row_of(VALUES, old_log_probs=np.zeros(8))) == []
    assert len(hits("LPR509", row_of(VALUES, old_log_probs=np.array([0.0] * 7 + [-0.01])))) == 1


def test_a_call_that_sampled_nothing_has_no_version() -> None:
    ids, nothing = np.arange(5, dtype=np.int32), np.arange(0, dtype=np.int32)
    turns = (Turn(ids, ids, weight_versions=("3",)), Turn(ids, nothing, weight_versions=("4",)))
    assert hits("REC008", Rollout(Place("made up", 0), "toy", turns=turns)) == []


def test_versions_of_calls_without_ids_are_told_without_a_count() -> None:
    turns = tuple(Turn(None, None, weight_versions=(version,)) for version in "34")
    (hit,) = hits("REC008", Rollout(Place("made up", 0), "toy", turns=turns))
    assert "weight versions: 3 and 4, one in each call;" in hit.message


# What holds for every row.

LOGPROBS = st.lists(st.floats(-12, -1e-4), min_size=2, max_size=60)


@settings(max_examples=examples(30, 400))
@given(LOGPROBS, st.integers(0, 999))
def test_right_rows_are_silent(values: list[float], seed: int) -> None:
    logprobs = np.random.default_rng(seed).permutation(values)
    assume((np.diff(logprobs) > 0).any())
    noise = np.random.default_rng(seed).normal(0, 0.01, len(values))
    rollout = row_of(logprobs, old_log_probs=np.minimum(logprobs + noise, 0), versions=np.full(len(values), 4))
    assert [hit for code in NEW for hit in hits(code, rollout)] == []


@settings(max_examples=examples(30, 400))
@given(LOGPROBS, st.integers(0, 999), st.floats(0, 2))
def test_the_numbers_of_two_columns_are_those_of_the_simple_form(
    values: list[float], seed: int, width: float
) -> None:
    noise = np.random.default_rng(seed).normal(0, width, len(values)).tolist()
    trainer = [min(value + apart, 0.0) for value, apart in zip(values, noise, strict=True)]
    mismatches = hits("LPR509", row_of(values, old_log_probs=trainer))
    differences = [b - a for a, b in zip(values, trainer, strict=True)]
    far = sum(abs(difference) > 1 for difference in differences)
    mean = sum(map(abs, differences)) / len(differences)
    if [hit.cause for hit in mismatches] == [MismatchCause.COPIED.value]:
        assert values == trainer
        return
    assert len(mismatches) == 1 if far else len(mismatches) <= (mean > math.log(1.05))
    for hit in mismatches:
        average = sum(differences) / len(differences)
        assert f"has a mean of {average:+.3g} and a mean size of {mean:.3g}" in hit.message
        k3 = sum(math.exp(d) - 1 - d for d in differences) / len(differences)
        assert f"k3 {k3:.3g}" in hit.message
        worst = max(range(len(differences)), key=lambda at: abs(differences[at]))
        assert abs(differences[hit.start]) == abs(differences[worst])


@settings(max_examples=examples(30, 400))
@given(st.lists(st.floats(-3, -1e-3), min_size=13, max_size=50), st.integers(0, 999))
def test_sums_are_told_from_logprobs(values: list[float], seed: int) -> None:
    (hit,) = hits("LPR508", row_of(np.cumsum(values)))
    assert (hit.cause, hit.start, hit.end) == ("sums", 0, len(values))
    shuffled = np.random.default_rng(seed).permutation(values)
    assume((np.diff(shuffled) > 0).any())
    assert hits("LPR508", row_of(shuffled)) == []


@settings(max_examples=examples(20, 400))
@given(st.lists(st.floats(-3, -0.5), min_size=120, max_size=150), st.integers(0, 999))
def test_sums_to_the_end_are_told_from_logprobs_that_rise(values: list[float], seed: int) -> None:
    (hit,) = hits("LPR508", row_of(np.cumsum(values)[::-1]))
    assert (hit.cause, hit.start, hit.end) == ("sums", 0, len(values))
    assert "never fall" in hit.message
    assert hits("LPR508", row_of(np.sort(values))) == []


@settings(max_examples=examples(20, 400))
@given(st.integers(0, 9999), st.floats(0.5, 2.0), st.sampled_from((3, 10, 50)))
def test_base_2_is_read_from_alternatives_and_natural_logarithms_are_not_it(
    seed: int, temperature: float, size: int
) -> None:
    scores = np.random.default_rng(seed).normal(0, np.linspace(0.1, 2, 32)[:, None], (32, size)) / temperature
    natural = -np.sort(-(scores - np.log(np.exp(scores).sum(1, keepdims=True))), axis=1)
    best = natural[:, 0][natural[:, 0] < -0.5 * math.log(2)]
    assume(len(best) >= 12 and np.ptp(best) >= 0.5)
    assert [hit.cause for hit in hits("LPR508", with_alternatives(natural / math.log(2)))] == ["base 2"]
    for alternatives in (1, 2, size):
        assert hits("LPR508", with_alternatives(natural[:, :alternatives])) == []


def with_alternatives(tops: np.ndarray[Any, Any]) -> Rollout:
    """A call whose tokens have these alternatives."""
    ids = np.arange(len(tops), dtype=np.int32)
    values, columns = build_call_columns(ids, logprobs=("logprobs", tops[:, 0]))
    turn = Turn(ids, ids, values, columns=columns, alternatives=tuple(map(tuple, tops.tolist())))
    return Rollout(Place("made up", 0), "toy", turns=(turn,))


@settings(max_examples=examples(30, 400))
@given(
    st.lists(st.floats(-9, -0.2), min_size=12, max_size=40),
    st.sampled_from((2, 10)),
    st.booleans(),
    st.integers(0, 999),
)
def test_a_base_is_read_from_two_columns_and_reported_once(
    values: list[float], base: int, of_trainer: bool, seed: int
) -> None:
    dice = np.random.default_rng(seed)
    exact = dice.permutation(values)
    right, wrong = exact * dice.normal(1, 2e-3, len(values)), exact / math.log(base)
    assume((np.diff(wrong) > 0).any())
    sampler, trainer = (right, wrong) if of_trainer else (wrong, right)
    rollout = row_of(sampler, old_log_probs=trainer)
    (hit,) = hits("LPR508", rollout)
    assert hit.cause == f"base {base}"
    assert f"`{'old_log_probs' if of_trainer else 'logprobs'}` holds logarithms of base {base}" in hit.message
    assert hits("LPR509", rollout) == []


@settings(max_examples=examples(30, 400))
@given(st.lists(st.tuples(st.booleans(), st.integers(-1, 3)), min_size=1, max_size=40))
def test_every_sampled_token_is_counted_for_its_version(tokens: list[tuple[bool, int]]) -> None:
    mask, versions = [int(sampled) for sampled, _ in tokens], [version for _, version in tokens]
    assume(len(tokens) > 1)
    want = Counter(version for sampled, version in tokens if sampled and version >= 0)
    notes = hits("REC008", row_of(np.full(len(mask), -0.5), mask, versions=np.array(versions)))
    assert bool(notes) == (len(want) > 1)
    for hit in notes:
        assert all(f"{v} ({n} token{'s' * (n > 1)})" in hit.message for v, n in want.items())
        first = next(at for at, (sampled, version) in enumerate(tokens) if sampled and version >= 0)
        assert all(not s or v in (-1, versions[first]) for s, v in tokens[: hit.start])
        assert versions[hit.start] != versions[first]


@given(st.lists(st.sampled_from(("3", "4", "5")), min_size=1, max_size=6))
def test_calls_of_several_versions_are_one_note_where_the_second_begins(versions: list[str]) -> None:
    turns = []
    for version in versions:
        ids = np.arange(5, dtype=np.int32)
        values, columns = build_call_columns(ids, logprobs=("logprobs", VALUES[:5]))
        turns.append(Turn(ids, ids, values, weight_versions=(version,), columns=columns))
    notes = hits("REC008", Rollout(Place("made up", 0), "toy", turns=tuple(turns)))
    other = next((number for number, later in enumerate(versions) if later != versions[0]), None)
    assert [(hit.where, hit.turn) for hit in notes] == ([] if other is None else [(Where.COMPLETION, other)])


@given(st.integers(1, 4), st.integers(0, 8), st.data())
def test_the_chance_of_low_values_is_that_of_dealing_them_out(
    drifted: int, others: int, data: st.DataObject
) -> None:
    size = drifted + others
    values = data.draw(st.lists(st.sampled_from((-9.0, -1.0)), min_size=size, max_size=size))
    low = sum(value < -8 for value in values[:drifted])
    hands = list(combinations(range(len(values)), drifted))
    as_good = sum(sum(values[at] < -8 for at in hand) >= low for hand in hands)
    want = math.log10(as_good / len(hands))
    assert math.isclose(_chance(np.array(values[:drifted]), np.array(values[drifted:])), want, abs_tol=1e-9)


def test_images_that_a_processor_expanded_are_as_the_template_writes_them() -> None:
    opened = ["<|im_start|>", "us", "er", "\n", "<|vision_start|>", *["<|image_pad|>"] * 6, "<|vision_end|>", "2"]
    prompt = [*opened, "<|im_end|>", "\n", "<|im_start|>", "assistant", "\n"]
    tokens = ["4", "!", "<|im_end|>"]
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "2"}]},
        {"role": "assistant", "content": "4!"},
    ]
    case: dict[str, Any] = {"tokenizer_name": "toy_vision", "messages": messages}
    call = {**case, "turns": [{"prompt": prompt, "completion": tokens, "logprobs": VALUES[:3]}]}
    mask = "0" * len(prompt) + "1110"
    row = {**case, "row": [*prompt, *tokens, "\n"], "mask": mask, "prompt_length": len(prompt)}
    every = frozenset(rule.code for rule in all_rules())
    for logged in (call, row, {**call, **row}):
        reported, _ = check(toy.evidence_of(logged), all_rules(), every)
        assert [finding.hit.message for finding in reported] == []
    wrong = {**call, "turns": [{**call["turns"][0], "prompt": [*prompt[:5], "<|image_pad|>", "3", *prompt[6:]]}]}
    assert check(toy.evidence_of(wrong), all_rules(), every)[0]


TOKENS = ImageTokens(FAMILIES[0], pad=5, start=3, end=4, video=6)


@settings(max_examples=examples(30, 400))
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 6), st.booleans(), st.integers(0, 3)), max_size=6))
def test_images_are_found_as_they_were_written(images: list[tuple[int, int, bool, int]]) -> None:
    ids, want = [7], []
    for depth, pads, video, gap in images:
        start = len(ids)
        ids += [TOKENS.start] * depth + [TOKENS.video if video else TOKENS.pad] * pads + [TOKENS.end] * depth
        want.append(ImageSpan(start, len(ids), pads, depth, video and pads > 0))
        ids += [8] * gap
    assert images_in_ids(np.array(ids, np.int32), TOKENS) == want


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.exists(), reason="no tokenizers beside the checkout")
@pytest.mark.parametrize(
    ("name", "family"), some([("qwen3", "Qwen-VL"), ("smollm2", None), ("gemma-3", "Gemma 3")], 2)
)
def test_families_are_known_by_the_tokens_of_published_vocabularies(name: str, family: str | None) -> None:
    tokens = image_tokens(load_tokenizer(str(SHARED / name)).vocabulary)
    assert (None if tokens is None else tokens.family.name) == family
