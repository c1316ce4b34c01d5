"""What a mask column says by its values, and what it never says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tito_audit.formats import pick_format
from tito_audit.record.column import MaskEncoding
from tito_audit.record.rollout import Place, TrainingRow

IDS = [11, 12, 13, 14]


def row_of(row: dict[str, Any]) -> TrainingRow:
    (rollout,) = pick_format(row).read(row, Place("log.jsonl", 0))
    assert rollout.training_row is not None
    return rollout.training_row


@pytest.mark.parametrize("name", ["loss_mask", "labels", "mask"])
@pytest.mark.parametrize(
    ("values", "encoding"),
    [
        ([-100, 12, 13, 14], MaskEncoding.LABELS),
        ([-100.0, 12.0, 13.0, 14.0], MaskEncoding.LABELS),
        (IDS, MaskEncoding.LABELS),
        ([0, 1, 1, 0], MaskEncoding.BINARY),
        ([0.0, 1.0, 1.0, 0.0], MaskEncoding.FLOAT),
        ([0.0, 0.5, 2.0, 2.0], MaskEncoding.FLOAT),
        ([0.0, 2.0, 2.0, 2.0], MaskEncoding.FLOAT),
        ([False, True, True, False], MaskEncoding.BOOL),
    ],
)
def test_a_mask_is_read_as_what_its_values_are(name: str, values: list[Any], encoding: MaskEncoding) -> None:
    row = row_of({"token_ids": IDS, name: values})
    assert row.columns[0].encoding is encoding
    assert row.loss_mask is not None
    assert row.loss_mask.tolist() == [value not in (0, -100, False) for value in values]


@pytest.mark.parametrize("name", ["loss_mask", "labels"])
@pytest.mark.parametrize(
    "values",
    [[0, 0, 2, 3], [0, 2, 2, 2], [1, 1, 2, 2], [0.0, 2.0, 3.0, 3.0], [-100, 0.5, 0.5, 0.5], [-100, -7, 13, 14]],
)
def test_numbers_that_are_no_mask_train_nothing(name: str, values: list[Any]) -> None:
    row = row_of({"token_ids": IDS, name: values})
    assert row.columns[0].encoding is None
    assert row.loss_mask is None


def test_labels_of_a_response_are_compared_with_the_response() -> None:
    row = row_of({"token_ids": IDS, "prompt_length": 2, "labels": [13, 14]})
    assert row.columns[0].encoding is MaskEncoding.LABELS
    assert row.loss_mask is not None
    assert row.loss_mask.tolist() == [False, False, True, True]
    assert row_of({"token_ids": IDS, "prompt_length": 2, "labels": np.array([2, 3])}).loss_mask is None
