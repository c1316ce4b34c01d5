"""What a log shows of its own values, through the command line: precision, counts, text and versions."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import toy
from tests.command import run, written
from tests.replay_paths import RECORDED
from tito_audit import audit_batch

TOY = toy.TOKENIZERS / "toy_bpe"
FORMATS = toy.TOKENIZERS.parent / "formats"
NEMO_GYM = RECORDED.parents[1] / "nemo-gym-round-trip.json"
ROLLOUTS = RECORDED.parents[2] / "rollouts"
Causes = Callable[..., list[tuple[str, str, str]]]
CALL = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
needs_recorded = pytest.mark.skipif(not NEMO_GYM.is_file(), reason="no recorded rollouts are beside the checkout")


def findings(log: Path, *more: object) -> list[dict[str, Any]]:
    code, out, err = run("scan", log, "-f", "json", *more)
    assert code in (0, 1), err
    return list(json.loads(out)["findings"])


def causes(listed: Iterable[dict[str, Any]]) -> list[tuple[str, str, str]]:
    return [(finding["code"], finding["severity"], finding["cause"]) for finding in listed]


@pytest.fixture
def causes_of(tmp_path: Path) -> Causes:
    """What the rules of these codes find in a log of this row alone."""

    def listed(row: dict[str, Any], codes: str, *more: object) -> list[tuple[str, str, str]]:
        return causes(findings(written(tmp_path / "log.jsonl", [row]), "--select", codes, *more))

    return listed


def recorded_calls() -> list[dict[str, Any]]:
    """Two calls of Qwen3 as NeMo-RL logs them: 99 of 495 and 38 of 207 logprobs are exactly 0."""
    output = json.loads(NEMO_GYM.read_text(encoding="utf-8"))["input"]["output"]
    return [{name: item[name] for name in CALL} for item in output if CALL[2] in item]


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

    def test_a_looping_answer_is_certain_for_hundreds_of_tokens(self, causes_of: Causes) -> None:
        draw = np.random.default_rng(0)
        values = ordinary(200)
        while len(values) < 8000:
            values += [0.0] * min(int(draw.pareto(0.9) * 6) + 1, 700)
            values += [-float(steps) * 1.1920929e-07 for steps in draw.integers(1, 40, draw.integers(1, 5))]
        assert np.mean(np.array(values) == 0) > 0.8
        assert causes_of(a_call(values), "LPR505") == []

    @pytest.mark.parametrize("step", [0.125, 0.01, 0.0001])
    def test_a_rounded_column_reaches_zero(self, tmp_path: Path, step: float) -> None:
        values = [0.0 - step * (at * 7 % 40) for at in range(60)]
        values[30:40] = [-step, *[0.0] * 8, -step]
        log = written(tmp_path / "log.jsonl", [a_call(values)])
        assert findings(log, "--select", "LPR505") == []
        written(
            log, [a_call([-step if value == 0 and not 30 < at < 39 else value for at, value in enumerate(values)])]
        )
        listed = findings(log, "--select", "LPR505")  # no value but these is rounded to zero
        assert causes(listed) == [("LPR505", "warning", "run of zeros")]

    def test_certain_markup_after_an_unsure_token_is_no_more_than_a_note(self, causes_of: Causes) -> None:
        values = [*ordinary(200), -2e-7, -0.4, *[0.0] * 12]
        assert causes_of(a_call(values), "LPR505") == [("LPR505", "note", "undecided")]

    @pytest.mark.parametrize("at", [0, 20, 32])
    def test_zeros_among_values_that_never_come_near_zero_are_padding(self, causes_of: Causes, at: int) -> None:
        values = ordinary(40)
        values[at : at + 8] = [0.0] * 8
        assert causes_of(a_call(values), "LPR505") == [("LPR505", "warning", "run of zeros")]

    def test_a_call_of_zeros_beside_a_sure_call_is_a_note(self, tmp_path: Path) -> None:
        unsure, sure = a_call([*ordinary(30), -1e-7])["calls"][0], a_call([0.0] * 9)["calls"][0]
        log = written(tmp_path / "log.jsonl", [{"calls": [unsure, sure]}])
        assert causes(findings(log, "--select", "LPR506")) == [("LPR506", "note", "undecided")]
        unsure["generation_log_probs"][-1] = -0.2
        written(log, [{"calls": [unsure, sure]}])
        assert causes(findings(log, "--select", "LPR506")) == [("LPR506", "warning", "all zero")]


def an_answer(size: int, counted: int, *, choices: int = 1, **more: Any) -> dict[str, Any]:
    """An answer of a vLLM server with so many ids in each choice; `counted` tokens by its usage."""
    call = {"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    choice = {"message": message, "finish_reason": "tool_calls", "token_ids": list(range(300, 300 + size))}
    return {
        "object": "chat.completion",
        "prompt_token_ids": [5, 6, 7],
        "choices": [{"index": number, **choice} for number in range(choices)],
        "usage": {"prompt_tokens": 3, "completion_tokens": counted, **more},
    }


class TestUsage:
    def test_fewer_ids_than_the_server_counted_are_an_error(self, tmp_path: Path) -> None:
        (finding,) = findings(written(tmp_path / "log.jsonl", [an_answer(8, 31)]), "--select", "REC005")
        assert (finding["severity"], finding["cause"]) == ("error", "incomplete: usage")
        assert "the 8 completion ids are fewer than the 31 tokens that the server counted" in finding["message"]

    @pytest.mark.parametrize(
        "row",
        [
            an_answer(31, 31),
            an_answer(30, 31),  # the end token is counted and not logged
            an_answer(31, 30),  # or logged and not counted
            an_answer(31, 93, choices=3),
            an_answer(31, 96, choices=3),
            an_answer(31, 12),  # a count of the last part of a resumed answer
            an_answer(31, 51, completion_tokens_details={"rejected_prediction_tokens": 20}),
            {**an_answer(31, 62), "choices": [{**an_answer(31, 62)["choices"][0], "index": 1}]},
            {"request": {"model": "m", "messages": [], "n": 2}, "response": an_answer(31, 62)},
        ],
    )
    def test_a_count_that_other_tokens_explain_accuses_nobody(
        self, causes_of: Causes, row: dict[str, Any]
    ) -> None:
        assert causes_of(row, "REC005") == []

    def test_ids_are_missing_among_several_choices(self, causes_of: Causes) -> None:
        row = {"request": {"model": "m", "messages": []}, "response": an_answer(8, 62, choices=2)}
        assert causes_of(row, "REC005") == [("REC005", "error", "incomplete: usage")] * 2

    def test_reasoning_that_is_counted_and_not_logged_is_a_warning(self, causes_of: Causes) -> None:
        row = an_answer(31, 71, completion_tokens_details={"reasoning_tokens": 40})
        assert causes_of(row, "REC005") == [("REC005", "warning", "incomplete: reasoning")]

    def test_a_count_that_may_be_of_choices_in_other_rows_is_a_warning(self, causes_of: Causes) -> None:
        assert causes_of(an_answer(31, 62), "REC005") == [("REC005", "warning", "incomplete: usage")]

    @pytest.mark.parametrize(
        ("counted", "causes_of_row"),
        [
            ({"prompt_tokens": 12}, [("REC006", "warning", "prompt of another length")]),
            ({"prompt_tokens": 1}, [("REC006", "warning", "prompt of another length")]),
            ({"prompt_tokens": 4}, []),  # BOS
            ({"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 2}}, []),
            ({"prompt_tokens": 43, "completion_tokens": 9}, []),  # an answer that was resumed
        ],
    )
    @pytest.mark.parametrize("content", ["2?", [{"type": "image_url", "image_url": {"url": "x"}}]])
    def test_a_prompt_has_as_many_ids_as_the_server_counted(
        self, counted: dict[str, Any], causes_of_row: list[Any], content: Any, causes_of: Causes
    ) -> None:
        request = {"model": "m", "messages": [{"role": "user", "content": content}]}
        row = {"request": request, "response": an_answer(31, 31)}
        row["response"]["usage"] |= counted
        assert causes_of(row, "REC") == (causes_of_row if isinstance(content, str) else [])

    def test_a_tool_call_of_an_answer_alone_is_looked_for_in_its_ids(self, causes_of: Causes) -> None:
        row = an_answer(8, 0)
        (choice,) = row["choices"]
        choice["token_ids"] = toy.toy_tokenizer().encode("Let me look.<|im_end|>").tolist()
        assert causes_of(row, "REC005", "-t", TOY) == [("REC005", "error", "incomplete: tool call")]
        for sampled in ('<tool_call>{"name": "get_weather"}</tool_call>', '{"city": "Paris"}'):
            choice["token_ids"] = toy.toy_tokenizer().encode(sampled).tolist()
            assert causes_of(row, "REC005", "-t", TOY) == []

    def test_a_gateway_keeps_the_count_in_the_answer_of_its_server(self, causes_of: Causes) -> None:
        rows = [json.loads(line) for line in (FORMATS / "rllm_gateway.jsonl").read_text().splitlines()]
        row = next(logged for logged in rows if (logged.get("raw_response") or {}).get("usage"))
        assert causes_of(row, "REC005") == []
        row["raw_response"]["usage"]["completion_tokens"] += 30
        assert [cause for _, _, cause in causes_of(row, "REC005")] == ["incomplete: usage"]

    def test_an_sglang_answer_has_a_count_of_its_own(self, causes_of: Causes) -> None:
        meta = {"completion_tokens": 40, "output_token_logprobs": [[-0.5, 7, None]] * 12}
        row = {"text": "a text", "meta_info": meta}
        assert causes_of(row, "REC005") == [("REC005", "warning", "incomplete: usage")]

    @pytest.mark.skipif(not RECORDED.is_dir(), reason=f"no recorded answers at {RECORDED}")
    def test_answers_of_a_real_server_hold_what_it_counted(self, tmp_path: Path) -> None:
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


def a_row(logprobs: int, *, first: int = 8, **more: Any) -> dict[str, Any]:
    """A row of 20 tokens with two answers, the first of them at `first`, and so many logprobs."""
    mask = [int(first <= at < 12 or at >= 15) for at in range(20)]
    # What lies between the answers, 7 to 4 tokens before the end, was not sampled.
    values = [0.0 if 5 < left <= 8 else -0.05 - left * 37 % 90 / 100 for left in range(logprobs, 0, -1)]
    return {"token_ids": list(range(100, 120)), "loss_mask": mask, "logprobs": values, **more}


class TestLogprobsOfTheResponse:
    """Logprobs over the response beside a mask over the whole row."""

    def test_they_are_taken_from_the_first_trained_token_on(self, causes_of: Causes, tmp_path: Path) -> None:
        row = a_row(12)
        assert causes_of(row, "LPR,REC,MSK") == []
        other = {"all": row["token_ids"], "trains": row["loss_mask"], "scores": row["logprobs"]}
        maps = ("--map", "token_ids=all", "--map", "loss_mask=trains", "--map", "logprobs=scores")
        assert findings(written(tmp_path / "log.jsonl", [other]), *maps, "--select", "LPR,REC,MSK") == []

    def test_a_batch_says_the_same(self) -> None:
        row = a_row(12)
        assert not audit_batch([row["token_ids"]], [row["loss_mask"]], [row["logprobs"]]).findings

    def test_a_real_rollout_says_the_same(self, tmp_path: Path) -> None:
        path = ROLLOUTS / "smollm2" / "tito.jsonl.gz"
        if not path.is_file():
            pytest.skip("no real rollouts are beside the checkout")
        rows = []
        for line in gzip.decompress(path.read_bytes()).splitlines():
            prompt, sampled, values = (json.loads(line)["calls"][-1][name] for name in CALL)
            mask = [0] * len(prompt) + [1] * len(sampled)
            # The end of the turn, which the trainer appends and masks.
            rows.append(
                {"token_ids": [*prompt, *sampled, 198], "loss_mask": [*mask, 0], "logprobs": [*values, 0.0]}
            )
        assert findings(written(tmp_path / "log.jsonl", rows), "--select", "LPR501,REC002") == []

    @pytest.mark.parametrize(
        ("row", "cause"),
        [
            (a_row(13), "one too many"),
            (a_row(11), "one too few"),
            (a_row(10), "one too many"),  # of the trained tokens
            (a_row(8), "one too few"),
            (a_row(11, prompt_length=8), "one too few"),
            (a_row(11, first=9, prompt_length=8), "one too few"),
            (a_row(4), "other count"),
        ],
    )
    def test_other_counts_stay_errors(self, causes_of: Causes, row: dict[str, Any], cause: str) -> None:
        assert causes_of(row, "LPR501") == [("LPR501", "error", cause)]

    def test_a_null_in_front_is_one_too_many(self, causes_of: Causes) -> None:
        row = a_row(12)
        row["loss_mask"][-1] = 0
        row["loss_mask"][12:15] = [1, 1, 1]
        row["logprobs"] = [None, *[-0.5 - at / 100 for at in range(11)]]
        assert causes_of(row, "LPR501") == [("LPR501", "error", "one too many")]

    def test_a_response_that_may_begin_before_the_first_trained_token_is_open(
        self, causes_of: Causes, tmp_path: Path
    ) -> None:
        assert causes_of(a_row(15), "LPR501") == [("LPR501", "warning", "undecided")]
        log = written(tmp_path / "log.jsonl", [a_row(15, prompt_length=5)])
        assert findings(log, "--select", "LPR501") == []

    def test_a_repair_writes_them_back_over_the_response(self, tmp_path: Path) -> None:
        row = a_row(12)
        row["logprobs"][1] = -9999.0
        log, out = written(tmp_path / "log.jsonl", [row]), tmp_path / "out.jsonl"
        code, _, err = run("repair", log, "-o", out, "--with", "mask", "--no-provenance")
        assert code in (0, 1), err
        (after,) = map(json.loads, out.read_text().splitlines())
        assert after["logprobs"] == row["logprobs"]
        assert after["loss_mask"][9] == 0
        assert sum(after["loss_mask"]) == 8


SPANS = [{"version": "3", "start": 0, "end": 20}, {"version": "4", "start": 20, "end": 30}]
A_CALL = {"prompt_token_ids": [5, 6, 7], "generation_token_ids": list(range(300, 330))}


class TestVersions:
    @pytest.mark.parametrize(
        "row",
        [
            {"text": "", "output_ids": A_CALL["generation_token_ids"], "meta_info": {"weight_versions": SPANS}},
            {**an_answer(30, 30), "metadata": {"weight_version": "4", "weight_versions": SPANS}},
            {"calls": [{**A_CALL, "weight_versions": SPANS}]},
            {"calls": [{**A_CALL, "weight_versions": [["3", 0, 20], ["4", 20, 30]]}]},
            {"calls": [{**A_CALL, "weight_versions": ["3"] * 20 + ["4"] * 10}]},
            {"calls": [{**A_CALL, "weight_versions": [3] * 20 + [4] * 10}]},
        ],
    )
    def test_the_tokens_of_each_version_within_a_call_are_named(self, tmp_path: Path, row: dict[str, Any]) -> None:
        (finding,) = findings(written(tmp_path / "log.jsonl", [row]), "--select", "REC008")
        assert (finding["severity"], finding["cause"]) == ("note", "within a call")
        assert (finding["where"], finding["start"], finding["end"]) == ("completion", 20, 30)
        assert "3 (20 tokens) and 4 (10 tokens), which change within a call: 3 in 0:20" in finding["message"]

    @pytest.mark.parametrize(
        "versions",
        [
            [
                [{"version": "3", "abs_start": 8, "abs_end": 12}],
                [{"version": "4", "abs_start": 15, "abs_end": 20}],
            ],
            [{"spans": [{"version": "3", "abs_start": 8, "abs_end": 12}]}, {"spans": [["4", 15, 20]]}],
            [["3", 0, 4], ["4", 7, 12]],
        ],
    )
    def test_spans_of_a_row_count_from_its_start_or_its_response(
        self, tmp_path: Path, versions: list[Any]
    ) -> None:
        row = a_row(20, weight_versions=versions)
        (finding,) = findings(written(tmp_path / "log.jsonl", [row]), "--select", "REC008")
        assert (finding["cause"], finding["start"], finding["end"]) == ("between calls", 15, 20)
        assert "3 (4 tokens) and 4 (5 tokens)" in finding["message"]

    def test_calls_of_one_version_each_are_said_as_that(self, tmp_path: Path) -> None:
        calls = [{**A_CALL, "weight_version": version} for version in ("3", "4")]
        (finding,) = findings(written(tmp_path / "log.jsonl", [{"calls": calls}]), "--select", "REC008")
        assert (finding["cause"], finding["turn"]) == ("between calls", 1)
        assert "3 (30 tokens) and 4 (30 tokens), one in each call" in finding["message"]

    def test_tokens_before_the_first_sampled_one_have_no_version(self, tmp_path: Path) -> None:
        row = a_row(20, versions=[-1] * 8 + [3] * 4 + [-1] * 3 + [3] * 5)
        log = written(tmp_path / "log.jsonl", [row])
        assert findings(log, "--select", "REC008") == []
        row["versions"][17:] = [4] * 3
        (finding,) = findings(written(log, [row]), "--select", "REC008")
        assert (finding["cause"], finding["start"], finding["end"]) == ("within a call", 17, 20)
        assert "3 in 15:17 and 4 in 17:20" in finding["message"]

    def test_spans_survive_a_conversion(self, tmp_path: Path) -> None:
        log = written(tmp_path / "log.jsonl", [{**an_answer(30, 30), "metadata": {"weight_versions": SPANS}}])
        code, _, err = run("convert", log, "-o", tmp_path / "out.jsonl", "--to", "calls", "--lossy")
        assert code == 0, err
        assert [finding["cause"] for finding in findings(tmp_path / "out.jsonl", "--select", "REC008")] == [
            "within a call"
        ]


class TestOneIdRepeated:
    @pytest.mark.parametrize(
        ("more", "severity"),
        [
            ({}, "warning"),
            ({"generation_log_probs": [-1.5, -0.3, -0.02, -0.001, -1e-5, 0.0]}, None),
            ({"generation_log_probs": [-0.5] * 6}, "error"),
            ({"text": "!" * 6}, None),
            ({"text": "The answer is 4."}, "error"),
        ],
    )
    @pytest.mark.parametrize("tokenizer", [(), ("-t", TOY)])
    def test_logprobs_and_text_tell_a_loop_from_a_placeholder(
        self, tmp_path: Path, more: dict[str, Any], severity: str | None, tokenizer: tuple[object, ...]
    ) -> None:
        row = {"calls": [{"prompt_token_ids": [5, 6, 7], "generation_token_ids": [0] * 6, **more}]}
        listed = findings(written(tmp_path / "log.jsonl", [row]), "--select", "REC004", *tokenizer)
        assert [finding["severity"] for finding in listed] == ([] if severity is None else [severity])

    def test_the_message_of_an_answer_alone_tells_too(self, tmp_path: Path) -> None:
        row = an_answer(6, 6)
        (choice,) = row["choices"]
        choice |= {"token_ids": [0] * 6, "message": {"role": "assistant", "content": "!" * 6}}
        log = written(tmp_path / "log.jsonl", [row])
        assert findings(log, "--select", "REC004") == findings(log, "--select", "REC004", "-t", TOY) == []

    @needs_recorded
    def test_a_real_answer_whose_ids_were_overwritten_is_judged_by_its_logprobs(self, tmp_path: Path) -> None:
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
