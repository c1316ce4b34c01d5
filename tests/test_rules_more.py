"""Rules of weights, images, units and trainers' columns: what formats hand them, and what holds for every row."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests import toy
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
from tito_audit.record.finding import Finding, Hit, Where
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
VALUES = [-0.5, -0.25, -0.5, -1.0, -2.0, -0.125, -0.75, -0.01]


def findings(tmp_path: Path, row: Mapping[str, Any], *codes: str) -> list[Finding]:
    """What a scan of a log with one row finds."""
    log = tmp_path / "log.jsonl"
    log.write_bytes(orjson.dumps(row) + b"\n")
    results = scan_rollouts(log, Settings(tokenizer=TOY, select=codes or NEW))
    return [finding for result in results for finding in result.findings]


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


# What formats hand to the rules.


@pytest.mark.parametrize("trainer", ["old_log_probs", "log_probs", "prox_logp", "old_per_token_logps"])
def test_a_trainers_column_is_not_taken_for_the_samplers(trainer: str, tmp_path: Path) -> None:
    off = [value - 0.5 for value in VALUES]
    row = {"token_ids": IDS, "loss_mask": [1] * 8, trainer: off, "rollout_log_probs": VALUES}
    (finding,) = findings(tmp_path, row)
    assert (finding.code, finding.severity.word) == ("LPR509", "warning")
    assert f"`{trainer}` differs from `rollout_log_probs`: over 8 tokens" in finding.hit.message
    assert "trainer minus sampler has a mean of -0.5" in finding.hit.message


def test_the_only_column_of_logprobs_is_the_samplers(tmp_path: Path) -> None:
    assert findings(tmp_path, {"token_ids": IDS, "loss_mask": [1] * 8, "old_log_probs": VALUES}) == []


@pytest.mark.parametrize(
    "row",
    [
        {"input_ids": IDS, "loss_mask": [0, 1] * 4, "logprobs": VALUES, "versions": [-1, 6] * 2 + [-1, 7] * 2},
        {"tokens": IDS, "response_length": 2, "rollout_log_probs": VALUES[:2], "weight_versions": ["6", "7"]},
        {
            "prompt_ids": IDS,
            "completion_ids": IDS[:2],
            "completion_logprobs": VALUES[:2],
            "weight_versions": ["6", "7"],
        },
        {"input_tokens": IDS, "output_tokens": IDS[:2], "output_logprobs": VALUES[:2], "output_versions": [6, 7]},
        {"token_ids": IDS, "loss_mask": [0, 1] * 4, "logprobs": VALUES, "weight_versions": ["6", "6", "6", "7"]},
    ],
    ids=["AReaL row", "slime row", "one call", "AReaL call", "generic row"],
)
def test_versions_are_read_wherever_logs_have_them(row: dict[str, Any], tmp_path: Path) -> None:
    (finding,) = findings(tmp_path, row, "REC008")
    assert "2 weight versions: 6" in finding.hit.message
    assert " and 7" in finding.hit.message


ALTERNATIVES = [[-0.0458, -1.3010, -1.5229], [-0.3010, -0.5229, -1.0], [-0.1549, -0.6990, -1.3010]]
"""In base 10."""


def as_openai(tops: list[list[float]]) -> dict[str, Any]:
    """Logprobs of a chat answer with the alternatives of each token."""
    content = [
        {"token": "", "logprob": top[0], "bytes": [], "top_logprobs": [{"token": "", "logprob": v} for v in top]}
        for top in tops
    ]
    return {"content": content}


def as_completions(tops: list[list[float]]) -> dict[str, Any]:
    """The same of a completion."""
    named = [{str(k): value for k, value in enumerate(top)} for top in tops]
    return {"token_logprobs": [top[0] for top in tops], "top_logprobs": named}


@pytest.mark.parametrize("shape", [as_openai, as_completions, lambda tops: tops])
def test_alternatives_are_read_in_every_form_and_tell_the_base(shape: Any, tmp_path: Path) -> None:
    row = {"prompt_ids": IDS, "completion_ids": IDS[:3]}
    (finding,) = findings(tmp_path, {**row, "logprobs": shape(ALTERNATIVES)}, "LPR508")
    assert finding.hit.cause == "base 10"
    natural = [[value * math.log(10) for value in top] for top in ALTERNATIVES]
    assert findings(tmp_path, {**row, "logprobs": shape(natural)}, "LPR508") == []


def test_the_sampled_token_among_its_alternatives_counts_once(tmp_path: Path) -> None:
    tops = [[-0.2, -0.2, -1.8], [-0.3, -0.3, -1.6], [-0.1, -0.1, -2.5]]
    row = {"prompt_ids": IDS, "completion_ids": IDS[:3], "logprobs": as_openai(tops)}
    assert findings(tmp_path, row, "LPR508") == []


def test_images_are_skipped_where_the_vocabulary_has_no_tokens_for_them(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "4"}]
    log = tmp_path / "log.jsonl"
    log.write_bytes(orjson.dumps({"messages": messages, "token_ids": IDS, "loss_mask": [1] * 8}))
    (result,) = scan_rollouts(log, Settings(tokenizer=TOY, select=("REC010",)))
    assert [skip.because for skip in result.skips] == ["the tokenizer's image tokens are unknown"]


TALK = [{"role": "user", "content": "4"}, {"role": "assistant", "content": "4"}]


def test_images_are_skipped_where_neither_messages_nor_vocabulary_tell(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_bytes(orjson.dumps({"token_ids": IDS, "loss_mask": [1] * 8}))
    (result,) = scan_rollouts(log, Settings(tokenizer=TOY, select=("REC010",)))
    assert [skip.because for skip in result.skips] == ["the tokenizer's image tokens are unknown"]
    ids = [2001, 314, 257, 198, 19, 2002, 198, 2001, 1620, 198, 19, 2002]
    text = {"token_ids": ids, "loss_mask": [0] * 10 + [1] * 2, "messages": TALK}
    log.write_bytes(orjson.dumps(text))
    (result,) = scan_rollouts(log, Settings(tokenizer=TOY, select=("REC010",)))
    assert list(result.skips) == []


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


def test_a_logprob_beside_its_id_is_no_alternative(tmp_path: Path) -> None:
    row = {
        "prompt_ids": IDS,
        "completion_ids": IDS[:4],
        "logprobs": [[-0.5, 71], [-0.25, 54], [-1.5, 71], [-2, 9]],
    }
    assert findings(tmp_path, row, "LPR508") == []


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
