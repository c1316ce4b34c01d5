"""What a mask column says by its values, and what it never says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tito_audit import Settings, scan_rollouts
from tito_audit.formats import pick_format
from tito_audit.record.column import Alignment, MaskEncoding
from tito_audit.record.rollout import Place, TrainingRow
from tito_audit.run.repair import repair_rollouts
from tito_audit.settings.model import RepairSettings

TOY = Path(__file__).resolve().parents[1] / "fixtures" / "tokenizers" / "toy_bpe"
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


REAL = [0.0, 0.0, -0.2, -0.5]


@pytest.mark.parametrize(
    ("more", "alignment"),
    [
        ({"loss_mask": [0, 0, 1, 1], "logprobs": REAL[1:]}, Alignment.SHIFTED),
        ({"loss_mask": [0, 0, 1, 1], "logprobs": [None, -0.2, -0.5]}, Alignment.SHIFTED),
        ({"loss_mask": [0, 1, 1], "logprobs": REAL[1:]}, Alignment.SHIFTED),
        ({"logprobs": [-3.0, -0.2, -0.5]}, Alignment.SHIFTED),
        ({"loss_mask": [0, 0, 1, 1], "logprobs": REAL[:-1]}, None),
        ({"loss_mask": [0, 0, 1, 1], "logprobs": [-3.0, -0.2, -0.5]}, None),
        ({"loss_mask": [0, 0, 1, 1], "logprobs": [0.0, *REAL]}, None),
    ],
)
def test_a_missing_logprob_is_the_first_one_only_where_the_row_shows_it(
    more: dict[str, Any], alignment: Alignment | None
) -> None:
    row = row_of({"token_ids": IDS, **more})
    assert row.columns[-1].alignment is alignment
    assert (row.logprobs is None) == (alignment is None)


ATROPOS = {"tokens": IDS, "masked_tokens": [-100, 12, 13, 14], "full_text": "x"}
MASK = [0, 0, 1, 1]
LABELS = [-100, 12, 13, 14]
ONE_SHORT = [
    {**ATROPOS, "logprobs": [1.0, -1.0, -0.2]},
    {**ATROPOS, "logprobs": [-1.0, -0.2, -0.5]},
    {**ATROPOS, "logprobs": [1.0, 1.0, -1.0, -0.2, -0.5]},
    {"nodes": [{**ATROPOS, "logprobs": [1.0, -1.0, -0.2]}]},
    {"tokens": IDS, "masks": LABELS, "scores": 1.0, "inference_logprobs": [1.0, -0.2, -0.3]},
    {"tokens": [IDS], "masks": [LABELS], "scores": [1.0], "inference_logprobs": [[1.0, -0.2, -0.3]]},
    {
        "token_ids": [IDS],
        "token_loss_mask": [MASK],
        "input_lengths": [4],
        "generation_logprobs": [[0.0, 0.0, -0.2]],
    },
    {"export_sequence_idx": 0, "token_ids": IDS, "loss_mask": MASK, "inference_logprobs": [0.0, -0.2, -0.5]},
    {"tokens": IDS, "loss_mask": [0.0, 0.0, 1.0, 1.0], "rollout_log_probs": [0.0, 0.0, -0.2], "status": None},
    {"tokens": IDS, "response_length": 2, "loss_mask": [1, 1], "rollout_log_probs": [-0.2]},
    {"prompt_ids": [[1, 2]], "completion_ids": [[3, 4]], "logprobs": [[-0.5]]},
    {
        "prompt_token_ids": [[1]],
        "response_ids": [[3, 4, 5]],
        "loss_masks": [MASK[1:]],
        "rollout_logprobs": [[0.0]],
    },
]


@pytest.mark.parametrize("row", ONE_SHORT, ids=lambda row: "-".join(row))
def test_a_logprob_too_few_or_too_many_is_counted_in_every_format(row: dict[str, Any], tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps(row))
    (result,) = scan_rollouts([str(log)], Settings())
    causes = [(finding.code, finding.hit.cause) for finding in result.findings if finding.severity.word == "error"]
    many = len(row.get("logprobs", ())) > 4
    assert causes == [("LPR501", "one too many" if many else "one too few")]


def test_an_answer_that_is_only_its_end_has_no_inverted_mask(tmp_path: Path) -> None:
    prompt, end = [2001, 314, 257, 198, 18, 2002, 198, 2001, 1620, 198], 2002
    rows = [
        {"tokens": [*prompt, end], "response_length": 1, "loss_mask": [1]},
        {"tokens": [*prompt, 19, end], "response_length": 2, "loss_mask": [0, 1]},
        {"tokens": [*prompt, 19, end], "response_length": 12, "loss_mask": [1] * 10 + [0, 0]},
    ]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    results = scan_rollouts([str(log)], Settings(tokenizer=str(TOY), select=("MSK403",)))
    assert [[finding.hit.cause for finding in result.findings] for result in results] == [[], [], ["inverted"]]


def test_logprobs_do_not_move_under_a_mask_that_trains_what_no_call_sampled(tmp_path: Path) -> None:
    """Else the token behind the answer would be trained with yet another value that is not its own."""
    calls = [
        {"prompt_token_ids": [1, 2, 3], "completion_ids": [4, 5, 6, 7], "logprobs": [-0.5, -0.25, -0.75, -1.0]}
    ]
    columns = {"loss_mask": [0, 0, 0, 0, 0, 1, 1, 1, 0], "logprobs": [0.0] * 4 + [-0.5, -0.25, -0.75, -1.0, 0.0]}
    row = {"token_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9], **columns, "turns": calls}
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps(row) + "\n", encoding="utf-8")
    for strategies, mask, logprobs in (
        (("realign",), columns["loss_mask"], columns["logprobs"]),
        (("realign", "mask"), [0, 0, 0, 0, 0, 1, 1, 0, 0], [*columns["logprobs"][1:], 0.0]),
    ):
        (outcome,) = repair_rollouts(
            log, tmp_path / "out.jsonl", Settings(), RepairSettings(strategies=strategies)
        )
        written = json.loads((tmp_path / "out.jsonl").read_text(encoding="utf-8"))
        (tmp_path / "out.jsonl").unlink()
        assert (written["loss_mask"], written["logprobs"]) == (mask, logprobs)
        assert ("as the calls show" in outcome.declined.get("realign", "")) is (strategies == ("realign",))
