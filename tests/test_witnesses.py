"""What a log shows of its own values, through the command line: precision, counts, text and versions.

A case of `tests/data/rows_found.jsonl` is a log: its rows, what a scan of them is asked for (TOY is the toy
tokenizer), and all that it finds. Real logs, and what is worked out from them, stand here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import toy
from tests.command import run, written
from tests.replay_paths import RECORDED
from tests.world import ROOT, lines_of
from tito_audit import audit_batch

TOY = toy.TOKENIZERS / "toy_bpe"
CASES = {case["name"]: case for case in lines_of(ROOT / "tests" / "data" / "rows_found.jsonl")}
NEMO_GYM = RECORDED.parents[1] / "nemo-gym-round-trip.json"
ROLLOUTS = RECORDED.parents[2] / "rollouts"
CALL = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
FIELDS = ("row", "code", "severity", "cause", "where", "turn", "start", "end", "message")
needs_recorded = pytest.mark.skipif(not NEMO_GYM.is_file(), reason="no recorded rollouts are beside the checkout")


def findings(log: Path, *more: object) -> list[dict[str, Any]]:
    code, out, err = run("scan", log, "-f", "json", *more)
    assert code in (0, 1), err
    return list(json.loads(out)["findings"])


def causes(listed: Iterable[dict[str, Any]]) -> list[tuple[str, str, str]]:
    return [(finding["code"], finding["severity"], finding["cause"]) for finding in listed]


@pytest.mark.parametrize("name", CASES)
def test_all_that_is_found_in_these_rows_is(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    log = written(tmp_path / "log.jsonl", case["rows"])
    listed = findings(log, *case["scan"].replace("TOY", str(TOY)).split())
    assert [{field: finding[field] for field in FIELDS} for finding in listed] == case["found"]


# Zeros


def recorded_calls() -> list[dict[str, Any]]:
    """Two calls of Qwen3 as NeMo-RL logs them: 99 of 495 and 38 of 207 logprobs are exactly 0."""
    output = json.loads(NEMO_GYM.read_text(encoding="utf-8"))["input"]["output"]
    return [{name: item[name] for name in CALL} for item in output if CALL[2] in item]


@needs_recorded
def test_zeros_of_a_sure_model_are_no_padding_and_those_of_a_column_cut_short_are(tmp_path: Path) -> None:
    calls = recorded_calls()
    log = written(tmp_path / "log.jsonl", [{"calls": calls}])
    assert findings(log, "--select", "LPR505,LPR506") == []
    calls[0]["generation_log_probs"][-150:] = [0.0] * 150
    written(log, [{"calls": calls}])
    assert causes(findings(log, "--select", "LPR505")) == [("LPR505", "warning", "run of zeros")]


def test_a_looping_answer_is_certain_for_hundreds_of_tokens(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    values = [-0.05 - (at * 37 % 190) / 100 for at in range(200)]
    while len(values) < 8000:
        values += [0.0] * min(int(draw.pareto(0.9) * 6) + 1, 700)
        values += [-float(steps) * 1.1920929e-07 for steps in draw.integers(1, 40, draw.integers(1, 5))]
    assert np.mean(np.array(values) == 0) > 0.8
    ids = [100 + at % 50 for at in range(len(values))]
    call = {"prompt_token_ids": [5, 6, 7], "generation_token_ids": ids, "generation_log_probs": values}
    assert findings(written(tmp_path / "log.jsonl", [{"calls": [call]}]), "--select", "LPR505") == []


# Counts


@pytest.mark.skipif(not RECORDED.is_dir(), reason=f"no recorded answers at {RECORDED}")
def test_answers_of_a_real_server_hold_what_it_counted(tmp_path: Path) -> None:
    names = [path for path in sorted(RECORDED.glob("*.json")) if "stream" not in path.name]
    answers = [json.loads(path.read_text(encoding="utf-8")) for path in names]
    responses = [answer["response"] for answer in answers if "choices" in (answer.get("response") or {})]
    assert len(responses) > 30
    log = written(tmp_path / "log.jsonl", responses)
    assert findings(log, "--select", "REC005", "--format", "vllm") == []
    for response in responses:
        for choice in response["choices"]:
            if choice.get("token_ids"):
                choice["token_ids"] = choice["token_ids"][:-3]
    listed = findings(written(log, responses), "--select", "REC005", "--format", "vllm")
    assert len({finding["row"] for finding in listed}) > 20


# Logprobs over the response beside a mask over the whole row


def of_the_response() -> dict[str, Any]:
    """A row with two answers, and logprobs from the first trained token on."""
    (row,) = CASES["logprobs of the response are taken from the first trained token on: known names"]["rows"]
    return {name: list(column) for name, column in row.items()}


def test_a_batch_says_the_same() -> None:
    row = of_the_response()
    assert not audit_batch([row["token_ids"]], [row["loss_mask"]], [row["logprobs"]]).findings


def test_a_real_rollout_says_the_same(tmp_path: Path) -> None:
    path = ROLLOUTS / "smollm2" / "tito.jsonl.gz"
    if not path.is_file():
        pytest.skip("no real rollouts are beside the checkout")
    rows = []
    for line in lines_of(path):
        prompt, sampled, values = (line["calls"][-1][name] for name in CALL)
        mask = [0] * len(prompt) + [1] * len(sampled)
        # The end of the turn, which the trainer appends and masks.
        ids = [*prompt, *sampled, 198]
        rows.append({"token_ids": ids, "loss_mask": [*mask, 0], "logprobs": [*values, 0.0]})
    assert findings(written(tmp_path / "log.jsonl", rows), "--select", "LPR501,REC002") == []


def test_a_repair_writes_them_back_over_the_response(tmp_path: Path) -> None:
    row = of_the_response()
    row["logprobs"][1] = -9999.0
    log, out = written(tmp_path / "log.jsonl", [row]), tmp_path / "out.jsonl"
    code, _, err = run("repair", log, "-o", out, "--with", "mask", "--no-provenance")
    assert code in (0, 1), err
    (after,) = lines_of(out)
    assert after["logprobs"] == row["logprobs"]
    assert after["loss_mask"][9] == 0
    assert sum(after["loss_mask"]) == 8


# Versions, and one id repeated


def test_spans_of_versions_survive_a_conversion(tmp_path: Path) -> None:
    rows = CASES["the tokens of each version within a call are named (vLLM)"]["rows"]
    log, out = written(tmp_path / "log.jsonl", rows), tmp_path / "out.jsonl"
    code, _, err = run("convert", log, "-o", out, "--to", "calls", "--lossy")
    assert code == 0, err
    assert [finding["cause"] for finding in findings(out, "--select", "REC008")] == ["within a call"]


@needs_recorded
def test_a_real_answer_whose_ids_were_overwritten_is_judged_by_its_logprobs(tmp_path: Path) -> None:
    (call, _) = recorded_calls()
    ids = [*call["prompt_token_ids"], *[0] * len(call["generation_token_ids"])]
    mask = [0] * len(call["prompt_token_ids"]) + [1] * len(call["generation_token_ids"])
    row = {"token_ids": ids, "loss_mask": mask, "logprobs": [0.0] * len(ids)}
    log = written(tmp_path / "log.jsonl", [row])
    assert causes(findings(log, "--select", "REC004")) == [("REC004", "error", "one id repeated")]
    own = row["logprobs"][-len(call["generation_log_probs"]) :] = call["generation_log_probs"]
    written(log, [{"calls": [{**call, "generation_token_ids": [0] * len(own)}]}])
    assert findings(log, "--select", "REC004") == []  # a model may have been this sure
    unsure = [min(-0.4, value) for value in own]
    written(log, [{"calls": [{**call, "generation_token_ids": [0] * len(own), CALL[2]: unsure}]}])
    assert causes(findings(log, "--select", "REC004")) == [("REC004", "warning", "undecided")]
