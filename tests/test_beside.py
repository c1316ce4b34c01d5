"""Experts, kept-token sets and advantages in the forms of the frameworks, and what repairs leave of them."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from tests.command import run, written
from tito_audit.formats import all_formats
from tito_audit.record.move_row import move_row
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Place

DRAW = np.random.default_rng(3)
IDS = list(range(1, 13))


def chosen(rows: int) -> Any:
    """Two of eight experts in three layers."""
    return np.stack([[DRAW.permutation(8)[:2] for _ in range(3)] for _ in range(rows)]).astype(np.int32)


def packed(experts: Any, **more: Any) -> dict[str, Any]:
    data = base64.b64encode(experts.astype(np.uint8).tobytes()).decode()
    return {"data": data, "shape": list(experts.shape), "dtype": "uint8", **more}


def envelope(experts: Any) -> str:
    data = base64.b64encode(experts.astype(np.int8).tobytes()).decode()
    return f"nrlre1:int8:{'x'.join(map(str, experts.shape))}:{data}"


def npy(experts: Any) -> str:
    file = io.BytesIO()
    np.save(file, experts)
    return base64.b64encode(file.getvalue()).decode()


def bare(experts: Any) -> str:
    return base64.b64encode(experts.astype("<i4").tobytes()).decode()


def slime(**more: Any) -> dict[str, Any]:
    mask = [1] * 8
    return {"tokens": IDS, "response_length": 8, "loss_mask": mask, "rollout_log_probs": [-0.5] * 8, **more}


def prime_rl(**more: Any) -> dict[str, Any]:
    mask = [False] * 4 + [True] * 8
    facts = {"temperatures": [1.0] * 12, "env_name": "e", "advantages": [0.5] * 12}
    return {"token_ids": IDS, "mask": mask, "logprobs": [0.0] * 4 + [-0.5] * 8, **facts, **more}


def gym(**more: Any) -> dict[str, Any]:
    item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
    tokens = {"prompt_token_ids": IDS[:4], "generation_token_ids": IDS[4:], "generation_log_probs": [-0.5] * 8}
    request = {"input": [{"role": "user", "content": "b"}]}
    return {
        "responses_create_params": request,
        "response": {"output": [{**item, **tokens, **more}]},
        "reward": 1.0,
    }


def sglang(**more: Any) -> dict[str, Any]:
    scores = [[-0.5, token, None] for token in IDS[4:]]
    return {
        "input_ids": IDS[:4],
        "text": "a",
        "output_ids": IDS[4:],
        "meta_info": {"output_token_logprobs": scores, **more},
    }


def generic(**more: Any) -> dict[str, Any]:
    return {"token_ids": IDS, "loss_mask": [0] * 4 + [1] * 8, "logprobs": [0.0] * 4 + [-0.5] * 8, **more}


def calls(**more: Any) -> dict[str, Any]:
    return {"calls": [{"prompt_ids": IDS[:4], "completion_ids": IDS[4:], "logprobs": [-0.5] * 8, **more}]}


FORMS: list[tuple[Any, str, Any, int]] = [
    (slime, "rollout_routed_experts", np.ndarray.tolist, 11),
    (slime, "rollout_routed_experts", bare, 11),
    (prime_rl, "routed_experts", packed, 12),
    (gym, "routed_experts", envelope, 12),
    (gym, "routed_experts", np.ndarray.tolist, 12),
    (sglang, "routed_experts", bare, 11),
    (generic, "routed_experts", npy, 11),
    (generic, "rollout_expert_indices", packed, 11),
    (calls, "routed_experts", packed, 11),
]


def findings(path: Path, row: dict[str, Any], code: str) -> list[Any]:
    _, out, _ = run("scan", str(written(path, [row])), "--select", code, "--report", "json")
    return [finding for finding in orjson.loads(out)["findings"] if finding["code"] in (code, "REC001")]


@pytest.mark.parametrize(("row", "name", "form", "rows"), FORMS)
def test_experts_are_read_in_the_form_of_each_framework(
    tmp_path: Path, row: Any, name: str, form: Any, rows: int
) -> None:
    assert findings(tmp_path / "right.jsonl", row(**{name: form(chosen(rows))}), "REC013") == []
    (finding,) = findings(tmp_path / "short.jsonl", row(**{name: form(chosen(rows - 2))}), "REC013")
    assert (finding["severity"], finding["cause"]) == ("error", "rows of other tokens")


@pytest.mark.parametrize("value", ["not base64!", [["a"], ["b"]], {"some": "object"}, 3])
def test_experts_in_an_unknown_form_are_not_checked(tmp_path: Path, value: Any) -> None:
    log = written(tmp_path / "log.jsonl", [generic(routed_experts=value)])
    _, out, _ = run("scan", str(log), "--select", "REC013", "--report", "json")
    summary = orjson.loads(out)["summary"]
    assert summary["findings"] == {}
    assert summary["skipped"]["REC013"]["because"] == "the form of the routed experts is not known"


SETS: list[tuple[Any, Any]] = [
    (slime, lambda ids: {"rollout_top_p_token_ids": ids, "rollout_top_p_token_offsets": list(range(9))}),
    (slime, lambda ids: {"rollout_sampling_mask": {"ids": ids, "offsets": list(range(9))}}),
    (sglang, lambda ids: {"output_token_sampling_mask": [[token] for token in ids]}),
    (generic, lambda ids: {"sampling_mask": [[-1]] * 4 + [[token] for token in ids]}),
    (calls, lambda ids: {"kept_tokens": {"ids": ids, "counts": [1] * 8}}),
]


@pytest.mark.parametrize(("row", "sets"), SETS)
def test_kept_sets_are_read_in_the_form_of_each_framework(tmp_path: Path, row: Any, sets: Any) -> None:
    assert findings(tmp_path / "right.jsonl", row(**sets(IDS[4:])), "REC014") == []
    (finding,) = findings(tmp_path / "other.jsonl", row(**sets([*IDS[4:11], 99])), "REC014")
    assert finding["message"].startswith("1 sampled token of 8 not in the set")


@pytest.mark.parametrize(
    ("row", "name", "form", "rows"), [form for form in FORMS if form[0] in (slime, prime_rl, generic)]
)
def test_a_repair_that_changes_tokens_leaves_out_what_it_cannot_rebuild(
    row: Any, name: str, form: Any, rows: int
) -> None:
    log = row(**{name: form(chosen(rows)), "sampling_mask": [[token] for token in IDS]})
    form_of_row = next(each for each in all_formats() if each.matches(log))
    (rollout,) = form_of_row.read(log, Place("log", 0))
    old = rollout.training_row
    assert old is not None
    source = np.array([0, 1, 2, 3, -1, *range(4, 12)])
    ids = np.array([*IDS[:4], 40, *IDS[4:]], np.int32)
    mask, logprobs = (source >= 4).astype(bool), np.where(source >= 4, -0.5, np.nan)
    moved = move_row(old, ids, source, loss_mask=mask, logprobs=logprobs).row
    (new,) = form_of_row.update(log, [RepairedRollout(replace(rollout, training_row=moved), ())])
    assert (new[name], new["sampling_mask"]) == (None, None)
    (same,) = form_of_row.update(log, [RepairedRollout(rollout, ())])
    assert same is log
