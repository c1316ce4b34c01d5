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


def described(*rollouts: Rollout) -> IdsAlone:
    description = describe_ids(rollouts)
    assert description is not None
    return description


def names(description: IdsAlone) -> list[str]:
    return [seen.family.name for seen in description.families]


def test_counts_are_of_what_was_seen() -> None:
    description = described(call([5, 6, 7], [8, 9]), call([5, 6, 20], [9]))
    assert (description.sequences, description.ids, description.distinct) == (2, 9, 6)
    assert (description.smallest, description.largest) == (5, 20)
    assert description.opening == (5, 6)
    assert (description.turns, description.ends) == (2, ((9, 2),))
    assert description.families == ()


def test_rows_without_ids_say_nothing() -> None:
    assert describe_ids([Rollout(Place("log", 0), "generic")]) is None
    assert describe_ids([]) is None


def test_a_training_row_ends_its_sampled_turns_where_the_mask_says() -> None:
    mask = np.array([False, True, True, False, True])
    row = TrainingRow(as_ids([1, 2, 3, 4, 5], "ids"), mask, None)
    description = described(Rollout(Place("log", 0), "generic", training_row=row))
    assert description.ends == ((3, 1), (5, 1))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_chat_of_a_family_may_be_of_it_and_nothing_else_is_said(family: IdFamily) -> None:
    for opening in range(len(family.opens)):
        family_names = names(described(call(chat(family, opening), [family.size - 1])))
        assert family.name in family_names
        others = {other.name for other in FAMILIES if other.marks == family.marks and other.size >= family.size}
        assert set(family_names) <= others


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_is_not_named_without_its_marks_or_beyond_its_vocabulary(family: IdFamily) -> None:
    for mark in family.marks:
        ids = [token_id for token_id in chat(family) if token_id != mark]
        assert family.name not in names(described(call(ids, [11])))
    assert family.name not in names(described(call(chat(family), [family.size])))
    assert family.name not in names(described(call([13, *chat(family)], [11])))


def test_a_family_needs_nearly_all_sequences() -> None:
    family = FAMILIES[0]
    good, bad = call(chat(family), [7]), call([9, 9], [9])
    assert names(described(*[good] * 9, bad)) == [family.name]
    assert names(described(*[good] * 8, bad, bad)) == []


@pytest.mark.shared
@pytest.mark.parametrize(
    "family", [each for each in FAMILIES if each.name in LOCAL], ids=lambda family: family.name
)
def test_what_is_known_of_a_family_is_what_its_tokenizer_says(family: IdFamily) -> None:
    file = SHARED / LOCAL[family.name] / "tokenizer.json"
    if not file.is_file():
        pytest.skip("the tokenizer is not beside this checkout")
    whole = json.loads(file.read_text(encoding="utf-8"))
    added = {entry["id"]: entry["content"] for entry in whole["added_tokens"]}
    assert {token_id: added.get(token_id) for token_id in family.marks} == dict(family.marks)
    assert max(*added, *whole["model"]["vocab"].values()) < family.size
