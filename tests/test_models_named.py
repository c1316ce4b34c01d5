"""Which model and tokenizer a log names, in the row, in an object of it or in its calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tito_audit.formats import pick_format
from tito_audit.formats._calls import model_name
from tito_audit.record.rollout import Place
from tito_audit.record.stated import Stated

NAME = "org/model-7b"
FLAT = {"token_ids": [11, 12, 13], "loss_mask": [0, 1, 1]}
CALL = {"prompt_ids": [1], "completion_ids": [2, 3]}
SLIME = {"tokens": [11, 12, 13], "response_length": 2, "loss_mask": [1, 1]}
NODE = {"full_text": "", "tokens": [1, 2], "masked_tokens": [-100, 2], "logprobs": [1.0, -0.1]}


def stated(row: Mapping[str, Any]) -> Stated:
    return pick_format(row).read(row, Place("log.jsonl", 0))[0].stated


@pytest.mark.parametrize(
    "row",
    [
        {**FLAT, "model": NAME},
        {**FLAT, "model_name": NAME},
        {**FLAT, "model_name_or_path": NAME},
        {**FLAT, "model": {"name": NAME}},
        {**FLAT, "metadata": {"model": NAME}},
        {**FLAT, "model": "policy_model", "config": {"model_path": NAME}},
        {"calls": [{**CALL, "model": NAME}, {**CALL, "model": NAME}]},
        {"calls": [{**CALL, "response": {"model": NAME}}, CALL]},
        {**SLIME, "metadata": {"model": NAME}},
        {"nodes": [NODE], "model": NAME},
        {**FLAT, "export_sequence_idx": 0, "model": NAME},
        {"prompt_token_ids": [[1]], "response_ids": [[2]], "loss_masks": [[1]], "model": NAME},
        {"message_log": [{"role": "user", "content": "", "token_ids": [1]}], "model": NAME},
        {"choices": [{"message": {"role": "assistant", "content": "4"}, "token_ids": [4]}], "model": NAME},
        {"prompt": "2+2?", "completion": "4", "model": NAME},
    ],
)
def test_the_model_is_found_where_a_row_names_it(row: dict[str, Any]) -> None:
    assert stated(row).model == NAME


def test_a_tokenizer_is_found_as_well() -> None:
    for key in ("tokenizer", "tokenizer_name", "tokenizer_path"):
        assert stated({**FLAT, key: NAME}).tokenizer == NAME


@pytest.mark.parametrize("name", ["", "model", "policy_model", "Default", " actor ", None, 7])
def test_a_stand_in_is_no_name(name: object) -> None:
    assert model_name(name) is None
    assert stated({**FLAT, "model": name}).model is None
    assert stated({"calls": [{**CALL, "model": name}]}).model is None


def test_calls_of_several_models_name_none() -> None:
    assert stated({"calls": [{**CALL, "model": NAME}, {**CALL, "model": "org/other"}]}).model is None
