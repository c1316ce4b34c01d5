"""What an attention mask hides: padding where nothing trains it, else tokens with a finding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from tests.forms import read_one, row_of
from tito_audit import Settings, scan_rollouts
from tito_audit.formats import pick_format
from tito_audit.record.move_row import move_row
from tito_audit.record.repaired import RepairedRollout, unrepaired
from tito_audit.record.rollout import Padding

FLAT = {"input_ids": [9, 11, 12, 13, 2, 9, 9], "loss_mask": [0, 0, 0, 1, 1, 0, 0], "logprobs": [0.0] * 7}
VERL = {"prompts": [0, 11, 12], "responses": [13, 14, 2, 0], "response_mask": [1, 0, 1, 0]}


def errors_of(row: Mapping[str, Any], tmp_path: Path) -> list[tuple[str, str, int, int]]:
    log = tmp_path / "log.jsonl"
    log.write_bytes(orjson.dumps(row))
    (result,) = scan_rollouts([str(log)], Settings())
    return [(f.code, f.hit.cause, f.hit.start, f.hit.end) for f in result.findings if f.severity.word == "error"]


def test_padding_that_nothing_trains_is_cut_off() -> None:
    row = row_of({**FLAT, "attention_mask": [0, 1, 1, 1, 1, 0, 0]})
    assert (row.padding, row.hidden) == (Padding(1, 2), None)


CASES = [
    ({**FLAT, "attention_mask": [0, 1, 1, 1, 1, 0, 0], "loss_mask": [0, 0, 0, 1, 1, 1, 0]}, [4], (4, 5)),
    ({**FLAT, "attention_mask": [0, 1, 1, 1, 1, 0, 0], "loss_mask": [1, 0, 0, 1, 1, 0, 0]}, [0], (0, 1)),
    ({**FLAT, "attention_mask": [0, 1, 1, 0, 1, 0, 0]}, [2], (2, 3)),
    (
        {**FLAT, "attention_mask": [0, 1, 1, 1, 1, 0, 0], "loss_mask": [-100, -100, -100, 13, 2, 9, 9]},
        [4, 5],
        (4, 6),
    ),
    ({**VERL, "attention_mask": [0, 1, 1, 1, 1, 1, 0], "response_mask": [1, 0, 1, 1]}, [5], (5, 6)),
    ({**VERL, "attention_mask": [0, 1, 1, 1, 1, 1, 0], "response_mask": [1, 1, 1, 1]}, [5], (5, 6)),
    ({**VERL, "attention_mask": [0, 1, 1, 0, 1, 1, 0]}, [2], (2, 3)),
]


@pytest.mark.parametrize(("logged", "hidden", "span"), CASES)
def test_trained_tokens_that_are_hidden_stay_in_the_row_and_are_an_error(
    logged: dict[str, Any], hidden: list[int], span: tuple[int, int], tmp_path: Path
) -> None:
    row = row_of(logged)
    assert row.hidden is not None
    assert np.flatnonzero(row.hidden).tolist() == hidden
    assert ("MSK401", "hidden by the attention mask", *span) in errors_of(logged, tmp_path)
    (same,) = pick_format(logged).update(logged, [unrepaired(read_one(logged))])
    assert same is logged


@pytest.mark.parametrize("logged", [logged for logged, _, _ in CASES if logged.get("response_mask") != [1] * 4])
def test_a_mask_changes_where_tokens_are_hidden_and_ids_do_not(logged: dict[str, Any]) -> None:
    rollout, row = read_one(logged), row_of(logged)
    assert row.loss_mask is not None
    assert row.hidden is not None
    left = row.loss_mask & ~row.hidden
    same = np.arange(len(row.token_ids))
    new = move_row(row, row.token_ids, same, loss_mask=left, logprobs=row.logprobs).row
    (written,) = pick_format(logged).update(logged, [RepairedRollout(replace(rollout, training_row=new), ())])
    again = row_of(written)
    trained = [i for i, trains in zip(row.token_ids.tolist(), left.tolist(), strict=True) if trains]
    assert again.loss_mask is not None
    assert again.token_ids[again.loss_mask].tolist() == trained
    assert again.hidden is None or not (again.hidden & again.loss_mask).any()
    untouched = set(logged) - {"loss_mask", "response_mask"}
    assert all(written[name] is logged[name] for name in untouched)


def test_hidden_tokens_that_nothing_trains_are_no_fault(tmp_path: Path) -> None:
    logged = {**FLAT, "attention_mask": [0, 1, 0, 1, 1, 0, 0]}
    assert row_of(logged).hidden is not None
    assert errors_of(logged, tmp_path) == []
