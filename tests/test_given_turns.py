"""Responses of several turns whose mask trains all of them, in the columns of several formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import toy
from tests.command import run, written

BPE = toy.TOKENIZERS / "toy_bpe"
FORMS = ("verl_batch", "verl_batches", "trl_rollout", "skyrl_generator", "generic", "slime", "flat")
PROMPT = "<|im_start|>user\n2<|im_end|>\n<|im_start|>assistant\n"
TOOL = "<|im_end|>\n<|im_start|>tool\nfour<|im_end|>\n<|im_start|>assistant\n"


def row_in(form: str, response: list[int], logprobs: list[float] | None = None) -> dict[str, Any]:
    """A row whose mask trains all of its response."""
    prompt, mask = toy.toy_tokenizer().encode(PROMPT).tolist(), [1] * len(response)
    scored = {} if logprobs is None else {"rollout_log_probs": logprobs}
    seen = [1] * (len(prompt) + len(response))
    if form == "verl_batch":
        return {"prompts": prompt, "responses": response, "response_mask": mask, "attention_mask": seen, **scored}
    if form == "verl_batches":
        sample = row_in("verl_batch", response, logprobs)
        return {name: [value] for name, value in sample.items()}
    if form == "trl_rollout":
        scored = {} if logprobs is None else {"logprobs": [logprobs]}
        return {"prompt_ids": [prompt], "completion_ids": [response], "env_mask": [mask], **scored}
    if form == "skyrl_generator":
        scored = {} if logprobs is None else {"rollout_logprobs": [logprobs]}
        return {"prompt_token_ids": [prompt], "response_ids": [response], "loss_masks": [mask], **scored}
    if form == "generic":
        return {"prompt_ids": prompt, "response_ids": response, "response_mask": mask, **scored}
    if form == "slime":
        return {"tokens": prompt + response, "response_length": len(response), "loss_mask": mask, **scored}
    scored = {name: [0.0] * len(prompt) + value for name, value in scored.items()}
    return {"token_ids": prompt + response, "loss_mask": [0] * len(prompt) + mask, **scored}


def loud(log: Path) -> tuple[int, set[str]]:
    """The exit code of a scan, and the codes of what it finds above a note."""
    code, out, _ = run("scan", log, "-t", BPE, "--no-config", "--report", "jsonl")
    findings = [line for line in map(json.loads, out.splitlines()) if line.get("severity") in ("error", "warning")]
    return code, {finding["code"] for finding in findings}


@pytest.mark.parametrize("scored", [False, True], ids=["no logprobs", "fill between the answers"])
@pytest.mark.parametrize("form", FORMS)
def test_a_trained_header_in_a_response_is_found_and_masked_in_any_format(
    form: str, scored: bool, tmp_path: Path
) -> None:
    encode = toy.toy_tokenizer().encode
    first, between, last = (encode(text).tolist() for text in ("2 plus 2", TOOL, "4!<|im_end|>"))
    own = [-0.1 * (place + 1) for place in range(len(first) + len(last))]
    logprobs = [*own[: len(first)], *[0.0] * len(between), *own[len(first) :]] if scored else None
    log = written(tmp_path / "log.jsonl", [row_in(form, first + between + last, logprobs)])
    code, codes = loud(log)
    assert code == 1
    assert "MSK401" in codes
    fixed = tmp_path / "fixed.jsonl"
    assert run("repair", log, "-t", BPE, "--no-config", "-o", fixed)[0] == 0
    assert loud(fixed) == (0, set())
    assert json.loads(fixed.read_text())["tito_audit"]["cured"]["mask"]


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("slime", "flat")])
def test_a_header_with_the_samplers_logprobs_was_sampled(form: str, tmp_path: Path) -> None:
    response = toy.toy_tokenizer().encode(f"2 plus 2{TOOL}4!<|im_end|>").tolist()
    logprobs = [-0.1 * (place + 1) for place in range(len(response))]
    assert "MSK401" not in loud(written(tmp_path / "log.jsonl", [row_in(form, response, logprobs)]))[1]


def test_a_header_in_a_logged_call_may_have_been_sampled(tmp_path: Path) -> None:
    row = row_in("generic", toy.toy_tokenizer().encode(f"2 plus 2{TOOL}4!<|im_end|>").tolist())
    call = {"prompt_ids": row["prompt_ids"], "completion_ids": row["response_ids"]}
    assert "MSK401" not in loud(written(tmp_path / "log.jsonl", [call]))[1]
    assert "MSK401" not in loud(written(tmp_path / "log.jsonl", [{"calls": [call]}]))[1]


@pytest.mark.parametrize("form", FORMS)
def test_a_response_of_one_answer_is_still_its_one_call(form: str, tmp_path: Path) -> None:
    response = toy.toy_tokenizer().encode("2 plus 2<|im_end|>").tolist()
    assert loud(written(tmp_path / "log.jsonl", [row_in(form, response)])) == (0, set())


def test_a_response_of_several_turns_that_is_trained_twice_is_repaired_in_its_place(tmp_path: Path) -> None:
    response = toy.toy_tokenizer().encode(f"2 plus 2{TOOL}4!<|im_end|>").tolist()
    row = row_in("verl_batch", response)
    log, fixed = written(tmp_path / "log.jsonl", [row, row]), tmp_path / "fixed.jsonl"
    code, _, err = run("repair", log, "-t", BPE, "--no-config", "--with", "mask", "--with", "once", "-o", fixed)
    assert (code, err) == (0, "")
