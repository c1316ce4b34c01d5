"""The rules of the record, the mask and the logprobs on real rollouts in which all of that is in order."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import orjson
import pytest

from tests.tiers import examples, some
from tito_audit.evidence.gather import gather
from tito_audit.record.arrays import as_ids
from tito_audit.record.build import build_call_columns, build_training_row
from tito_audit.record.message import as_messages, as_tools
from tito_audit.record.rollout import Place, Rollout, TrainingRow, Turn
from tito_audit.rule import missing_evidence
from tito_audit.rules import all_rules
from tito_audit.tokens.load import load_tokenizer

SHARED = Path(__file__).resolve().parents[2] / "shared"
FAMILIES = ("REC", "MSK", "LPR")
EVERY = examples(10, 5)
"""One line in this many is read."""

pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not SHARED.exists(), reason="no recorded rollouts beside the checkout"),
]


def turns_of(line: dict, *, with_text: bool) -> tuple[Turn, ...]:
    answers = [i for i, message in enumerate(line["messages"]) if message["role"] == "assistant"]
    turns = []
    for call, index in zip(line["calls"], answers, strict=True):
        ids = as_ids(call["generation_token_ids"], "generation_token_ids")
        values, columns = build_call_columns(ids, logprobs=("generation_log_probs", call["generation_log_probs"]))
        turns.append(
            Turn(
                as_ids(call["prompt_token_ids"], "prompt_token_ids"),
                ids,
                values,
                message_index=index,
                completion_text=call["text"] if with_text else None,
                finish_reason=call["finish_reason"],
                columns=columns,
            )
        )
    return tuple(turns)


def row_of(turns: tuple[Turn, ...]) -> TrainingRow:
    """The row that a careful trainer makes of calls that continue one another; logprobs to four decimals."""
    ids = turns[-1].seen_ids
    assert ids is not None
    mask, logprobs = np.zeros(len(ids), np.int64), np.zeros(len(ids))
    for turn in turns:
        assert turn.prompt_ids is not None
        assert turn.completion_logprobs is not None
        own = slice(len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.completion_logprobs))
        mask[own], logprobs[own] = 1, turn.completion_logprobs.round(4)
    return build_training_row(ids, mask=("loss_mask", mask), logprobs=("logprobs", logprobs), sentinel=0.0)


@pytest.mark.parametrize("with_text", [True, False], ids=["with text", "with messages only"])
@pytest.mark.parametrize("mode", ["tito", "retok"])
@pytest.mark.parametrize("name", some(["smollm2", "gemma-3", "qwen2.5-coder"], 1))
def test_nothing_is_found_in_a_careful_log(name: str, mode: str, with_text: bool) -> None:
    tokenizer = load_tokenizer(str(SHARED / "tokenizers" / name))
    rules = [rule for rule in all_rules() if rule.code.startswith(FAMILIES)]
    with gzip.open(SHARED / "rollouts" / name / f"{mode}.jsonl.gz") as lines:
        for line in list(map(orjson.loads, lines))[::EVERY]:
            turns = turns_of(line, with_text=with_text)
            rollout = Rollout(
                Place(line["id"], 0),
                "shared",
                as_messages(line["messages"], "messages"),
                as_tools(line["tools"], "tools"),
                turns=turns,
                training_row=row_of(turns) if mode == "tito" else None,
            )
            evidence = gather(rollout, tokenizer, None)
            ready = [rule for rule in rules if rule.check and missing_evidence(rule, evidence.present) is None]
            # These logs name no weights, experts, kept sets or advantages, and have no trainer's columns.
            assert len(ready) >= (len(rules) - 5 if mode == "tito" else 8)
            hits_of = {rule.code: list(rule.check(evidence)) for rule in ready if rule.check}
            assert [(line["id"], code, hit) for code, hits in hits_of.items() for hit in hits] == []
