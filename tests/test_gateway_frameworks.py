"""Frameworks that sample before a gateway leave logs that scan without an error."""

from __future__ import annotations

import json
from pathlib import Path

from tests.frameworks.ask import asked
from tests.serving import logged, make_gateway, served
from tests.world import TOY
from tito_audit import Settings, scan_rollouts
from tito_audit.record.finding import Severity

ANSWERS = [
    '<tool_call>\n{"name":"get_weather",  "arguments": {"city":"Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city" : "Oslo"}}\n</tool_call><|im_end|>',
    "Paris is warmer, I think.<|im_end|>",
    "Skinny as it is, yes.<|im_end|>",
]


def test_the_client_of_verifiers_names_its_session_and_continues_what_was_sampled(tmp_path: Path) -> None:
    log = tmp_path / "calls.jsonl"
    gateway, provider = make_gateway(log, ANSWERS)
    with served(gateway) as address:
        messages = json.loads(asked("verifiers", "--converse", f"{address}/v1", "trace-1", len(ANSWERS)))
    lines = logged(log)
    assert [line["session_id"] for line in lines] == ["trace-1"] * len(ANSWERS)
    assert [line["branch"] for line in lines] == ["start", "continues", "continues"]
    assert [tuple(line["completion_token_ids"]) for line in lines] == provider.sampled
    answers = [message for message in messages if message["role"] == "assistant"]
    # Its client sends `refusal: null` along.
    assert [{"refusal": None, **line["response_message"]} for line in lines] == answers
    assert len(answers[0]["tool_calls"]) == 2
    (result,) = scan_rollouts(log, Settings(tokenizer=str(TOY)))
    assert len(result.rollout.turns) == len(ANSWERS)
    assert [finding for finding in result.findings if finding.severity is Severity.ERROR] == []
