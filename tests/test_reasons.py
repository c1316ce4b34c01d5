"""Why a format did not read something reaches the report: a rule that skips because of it says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.command import written
from tito_audit import Settings, scan_rollouts
from tito_audit.evidence.needs import Needs, describe_missing
from tito_audit.record.stated import NOTHING_STATED, NotRead, Stated, Unread

TOY = str(Path(__file__).resolve().parents[1] / "fixtures" / "tokenizers" / "toy_bpe")
ROW = {"token_ids": [[5, 6, 7]], "token_loss_mask": [[0, 1, 1]], "sample_loss_mask": [1.0], "content": [["a"]]}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [CALL]}]
PLAIN = [TALK[0], {"role": "assistant", "content": "b"}]
SEARCH = {"type": "web_search_call", "id": "w", "status": "completed"}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]}
IDS = {"prompt_token_ids": [5], "generation_token_ids": [6], "generation_log_probs": [-0.5]}
GYM = {
    "responses_create_params": {"input": [TALK[0]]},
    "response": {"object": "response", "output": [SEARCH, {**SAID, **IDS}]},
}
DASHBOARD = {"sample_index": 3, "group_index": 0, "status": "completed", "messages": PLAIN}
STEPS = [
    {"step_id": 1, "source": "user", "message": "a", "observation": {"results": [{"content": "seen"}]}},
    {
        "step_id": 2,
        "source": "agent",
        "message": "b",
        "metrics": {"prompt_token_ids": [5], "completion_token_ids": [6]},
    },
]
ATIF = {"schema_version": "ATIF-v1.4", "session_id": "s", "agent": {"name": "x", "version": "1"}, "steps": STEPS}
LOG = [{"role": "user", "content": "", "token_ids": [5]}, {"role": "assistant", "content": "b", "token_ids": [6]}]
RENDERED = [{**LOG[0], "content": "<|im_start|>user\na"}, LOG[1]]
TRACE = {"trace_id": "t", "messages": TALK[:1], "response_message": TALK[1], "raw_request": {}}
NO_TOOLS = "messages not read: they call tools that the log does not list"
NO_TEXT = "messages not read: some have token ids and no text"
ELSEWHERE = "ids not read: they are in dashboard_columns/rollout_ID.parquet, by sample_index"


def episode(prompt: list[Any], talk: list[Any]) -> dict[str, Any]:
    step = {"prompt_ids": prompt, "response_ids": [6], "chat_completions": talk}
    return {"id": "t:1", "is_correct": True, "trajectories": [{"uid": "u", "steps": [step]}]}


@pytest.mark.parametrize(
    ("row", "form", "code", "reason"),
    [
        (episode([5], TALK), "rllm_episode", "TPL211", NO_TOOLS),
        (
            episode([5, {"type": "image"}], PLAIN),
            "rllm_episode",
            "SEQ301",
            "prompts not read: they hold parts that are not tokens, such as images",
        ),
        ({**TRACE, "prompt_token_ids": [5], "completion_token_ids": [6]}, "rllm_gateway", "TPL211", NO_TOOLS),
        (ROW, "nemo_rl", "TPL211", "messages not read: the texts of the log name no roles"),
        ({"message_log": LOG}, "nemo_rl_message_log", "TPL211", NO_TEXT),
        (
            {"message_log": RENDERED},
            "nemo_rl_message_log",
            "TPL211",
            "messages not read: a template has rendered some already",
        ),
        (
            GYM,
            "nemo_gym",
            "TPL211",
            "messages not read: the answer has items that chat messages have no place for, such as a hosted web "
            "search",
        ),
        (
            {"request": {"input": "a"}, "response": {**GYM["response"], "output": [SEARCH, SAID]}},
            "openai_chat",
            "TPL211",
            "messages not read: the answer has items that chat messages have no place for, such as a hosted web "
            "search",
        ),
        (ATIF, "atif", "TPL211", "messages not read: an observation of a step without an agent has no known form"),
        (DASHBOARD, "miles_trajectory", "REC003", ELSEWHERE),
    ],
)
def test_a_rule_that_skips_says_why_its_format_did_not_read(
    row: dict[str, Any], form: str, code: str, reason: str, tmp_path: Path
) -> None:
    log = written(tmp_path / "log.jsonl", [row])
    (result,) = scan_rollouts([log], Settings(tokenizer=TOY))
    assert result.rollout is not None
    assert result.rollout.format == form
    (because,) = (skip.because for skip in result.skips if skip.code == code)
    assert because.startswith("no ")
    assert because.endswith(f"; {reason}")


def test_a_reason_is_told_only_where_a_need_is_unmet_because_of_it() -> None:
    messages, prompts = NotRead(Unread.MESSAGES, "m"), NotRead(Unread.PROMPTS, "p")
    assert describe_missing(Needs.PROMPTS, reasons=(messages, prompts)) == "no prompt ids; prompts not read: p"
    assert describe_missing(Needs.MESSAGES, reasons=(messages, prompts)) == "no messages; messages not read: m"
    both = describe_missing(Needs.RENDERING, reasons=(messages, prompts))
    assert both == f"{describe_missing(Needs.RENDERING)}; messages not read: m; prompts not read: p"
    # Another file gave the messages, other calls the prompts.
    assert describe_missing(
        Needs.RENDERING, Needs.MESSAGES | Needs.PROMPTS, (messages, prompts)
    ) == describe_missing(Needs.RENDERING)
    assert describe_missing(Needs.MASK, reasons=(messages, prompts)) == "no loss mask"


def test_what_is_said_later_wins_over_what_is_said_by_default() -> None:
    first = Stated(model="a", group=1, ids_wanted=False, facts={"id": "x", "kind": 1})
    second = Stated(model="b", facts={"id": "y"}).not_read(Unread.PROMPTS, "p")
    assert first.overlay(second) == Stated(
        model="b", group=1, ids_wanted=False, reasons=(NotRead(Unread.PROMPTS, "p"),), facts={"id": "y", "kind": 1}
    )
    assert first.overlay(NOTHING_STATED) == first
    assert first.with_facts(id=None) is first
