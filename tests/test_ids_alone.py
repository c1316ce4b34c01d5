"""What ids say without a tokenizer: counts that a reader can check, and families only where their marks are."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from tito_audit.identify.ids_alone import FAMILIES, IdFamily, IdsAlone, describe_ids
from tito_audit.record.arrays import as_ids
from tito_audit.record.rollout import Place, Rollout, TrainingRow, Turn

SHARED = Path(
    os.environ.get("TITO_AUDIT_TOKENIZERS") or Path(__file__).resolve().parents[2] / "shared" / "tokenizers"
)
LOCAL = {
    "SmolLM2": "smollm2",
    "Llama 3": "llama-3.1",
    "DeepSeek V3, R1": "deepseek-v3",
    "Qwen2.5": "qwen2.5-coder",
    "Qwen3": "qwen3",
    "gpt-oss": "gpt-oss",
    "Gemma 3": "gemma-3",
}


def call(prompt: list[int], completion: list[int]) -> Rollout:
    turn = Turn(as_ids(prompt, "prompt"), as_ids(completion, "completion"))
    return Rollout(Place("log", 0), "generic", turns=(turn,))


def chat(family: IdFamily, opening: int = 0) -> list[int]:
    return [*family.opens[opening], 11, 12, *family.marks, 13]


def said(*rollouts: Rollout) -> IdsAlone:
    found = describe_ids(rollouts)
    assert found is not None
    return found


def names(found: IdsAlone) -> list[str]:
    return [seen.family.name for seen in found.families]


def test_counts_are_of_what_was_seen() -> None:
    found = said(call([5, 6, 7], [8, 9]), call([5, 6, 20], [9]))
    assert (found.sequences, found.ids, found.distinct, found.smallest, found.largest) == (2, 9, 6, 5, 20)
    assert found.opening == (5, 6)
    assert (found.turns, found.ends) == (2, ((9, 2),))
    assert found.families == ()


def test_rows_without_ids_say_nothing() -> None:
    assert describe_ids([Rollout(Place("log", 0), "generic")]) is None
    assert describe_ids([]) is None


def test_a_training_row_ends_its_sampled_turns_where_the_mask_says() -> None:
    mask = np.array([False, True, True, False, True])
    row = TrainingRow(as_ids([1, 2, 3, 4, 5], "ids"), mask, None)
    found = said(Rollout(Place("log", 0), "generic", training_row=row))
    assert found.ends == ((3, 1), (5, 1))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_chat_of_a_family_may_be_of_it_and_nothing_else_is_said(family: IdFamily) -> None:
    for opening in range(len(family.opens)):
        found = names(said(call(chat(family, opening), [family.size - 1])))
        assert family.name in found
        others = {one.name for one in FAMILIES if one.marks == family.marks and one.size >= family.size}
        assert set(found) <= others


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_is_not_named_without_its_marks_or_beyond_its_vocabulary(family: IdFamily) -> None:
    for mark in family.marks:
        ids = [one for one in chat(family) if one != mark]
        assert family.name not in names(said(call(ids, [11])))
    assert family.name not in names(said(call(chat(family), [family.size])))
    assert family.name not in names(said(call([13, *chat(family)], [11])))


def test_a_family_needs_nearly_all_sequences() -> None:
    family = FAMILIES[0]
    good, bad = call(chat(family), [7]), call([9, 9], [9])
    assert names(said(*[good] * 9, bad)) == [family.name]
    assert names(said(*[good] * 8, bad, bad)) == []


@pytest.mark.shared
@pytest.mark.parametrize("family", [one for one in FAMILIES if one.name in LOCAL], ids=lambda family: family.name)
def test_what_is_known_of_a_family_is_what_its_tokenizer_says(family: IdFamily) -> None:
    file = SHARED / LOCAL[family.name] / "tokenizer.json"
    if not file.is_file():
        pytest.skip("the tokenizer is not beside this checkout")
    whole = json.loads(file.read_text(encoding="utf-8"))
    added = {one["id"]: one["content"] for one in whole["added_tokens"]}
    assert {one: added.get(one) for one in family.marks} == dict(family.marks)
    assert max(*added, *whole["model"]["vocab"].values()) < family.size
