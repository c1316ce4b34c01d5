"""What a log shows of its own values, through the command line: precision, counts, text and versions."""

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

TOY = toy.TOKENIZERS / "toy_bpe"
NEMO_GYM = RECORDED.parents[1] / "nemo-gym-round-trip.json"
ROLLOUTS = RECORDED.parents[2] / "rollouts"
needs_recorded = pytest.mark.skipif(not NEMO_GYM.is_file(), reason="no recorded rollouts are beside the checkout")


def findings(log: Path, *more: object) -> list[dict[str, Any]]:
    code, out, err = run("scan", log, "-f", "json", *more)
    assert code in (0, 1), err
    return list(json.loads(out)["findings"])


def causes(found: Iterable[dict[str, Any]]) -> list[tuple[str, str, str]]:
    return [(one["code"], one["severity"], one["cause"]) for one in found]


def recorded_calls() -> list[dict[str, Any]]:
    """Two calls of Qwen3 as NeMo-RL logs them: 99 of 495 and 38 of 207 logprobs are exactly 0."""
    output = json.loads(NEMO_GYM.read_text(encoding="utf-8"))["input"]["output"]
    names = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
    return [{name: item[name] for name in names} for item in output if names[2] in item]


def a_call(logprobs: Iterable[float]) -> dict[str, Any]:
    values = list(logprobs)
    ids = [100 + at % 50 for at in range(len(values))]
    return {
        "calls": [{"prompt_token_ids": [5, 6, 7], "generation_token_ids": ids, "generation_log_probs": values}]
    }


def ordinary(size: int) -> list[float]:
    return [-0.05 - (at * 37 % 190) / 100 for at in range(size)]


class TestZeros:
    @needs_recorded
    def test_zeros_of_a_sure_model_are_no_padding(self, tmp_path: Path) -> None:
        log = written(tmp_path / "log.jsonl", [{"calls": recorded_calls()}])
        assert findings(log, "--select", "LPR505,LPR506") == []

    @needs_recorded
    def test_a_column_cut_short_and_padded_is_found_among_sure_answers(self, tmp_path: Path) -> None:
        calls = recorded_calls()
        calls[0]["generation_log_probs"][-150:] = [0.0] * 150
        log = written(tmp_path / "log.jsonl", [{"calls": calls}])
        assert causes(findings(log, "--select", "LPR505")) == [("LPR505", "warning", "run of zeros")]

    def test_a_looping_answer_is_certain_for_hundreds_of_tokens(self, tmp_path: Path) -> None:
        draw = np.random.default_rng(0)
        values = ordinary(200)
        while len(values) < 8000:
            values += [0.0] * min(int(draw.pareto(0.9) * 6) + 1, 700)
            values += [-float(one) * 1.1920929e-07 for one in draw.integers(1, 40, draw.integers(1, 5))]
        assert np.mean(np.array(values) == 0) > 0.8
        assert findings(written(tmp_path / "log.jsonl", [a_call(values)]), "--select", "LPR505") == []

    @pytest.mark.parametrize("step", [0.125, 0.01, 0.0001])
    def test_a_rounded_column_reaches_zero(self, tmp_path: Path, step: float) -> None:
        values = [-step * (1 + at * 7 % 40) for at in range(60)]
        values[30:40] = [-step, *[0.0] * 8, -step]
        assert findings(written(tmp_path / "log.jsonl", [a_call(values)]), "--select", "LPR505") == []

    def test_certain_markup_after_an_unsure_token_is_no_more_than_a_note(self, tmp_path: Path) -> None:
        values = [*ordinary(200), -2e-7, -0.4, *[0.0] * 12]
        found = findings(written(tmp_path / "log.jsonl", [a_call(values)]), "--select", "LPR505")
        assert causes(found) == [("LPR505", "note", "undecided")]

    @pytest.mark.parametrize("at", [0, 20, 32])
    def test_zeros_among_values_that_never_come_near_zero_are_padding(self, tmp_path: Path, at: int) -> None:
        values = ordinary(40)
        values[at : at + 8] = [0.0] * 8
        found = findings(written(tmp_path / "log.jsonl", [a_call(values)]), "--select", "LPR505")
        assert causes(found) == [("LPR505", "warning", "run of zeros")]

    def test_a_call_of_zeros_beside_a_sure_call_is_a_note(self, tmp_path: Path) -> None:
        unsure, sure = a_call([*ordinary(30), -1e-7])["calls"][0], a_call([0.0] * 9)["calls"][0]
        log = written(tmp_path / "log.jsonl", [{"calls": [unsure, sure]}])
        assert causes(findings(log, "--select", "LPR506")) == [("LPR506", "note", "undecided")]
        unsure["generation_log_probs"][-1] = -0.2
        written(log, [{"calls": [unsure, sure]}])
        assert causes(findings(log, "--select", "LPR506")) == [("LPR506", "warning", "all zero")]
