"""`/v1/responses` over HTTP, as the openai client meets it: items and events, sessions, and what is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from tests.gateway.clients import Responses
from tests.serving import (
    CALL,
    FLAT,
    PLAIN,
    SAID,
    TOOLS,
    check_chain,
    client,
    codes_of,
    logged,
    make_gateway,
    plain,
    served,
)
from tito_audit.parser import Reads
from tito_audit.parsers import parser_named

PATH = "/v1/responses"


def outputs(response: Response) -> list[Any]:
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": "rain"}
        for item in response.output
        if item.type == "function_call"
    ]


def test_reasoning_that_returns_between_texts_is_read_back_as_one_answer(tmp_path: Path) -> None:
    """Parsers of channels give reasoning and text by turns; results may stand between the calls of an answer."""
    log = tmp_path / "log.jsonl"
    answer = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Well.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>So.<|end|>"
        '<|start|>assistant to=functions.weather<|channel|>commentary<|message|>{"city": 1}<|call|>'
        '<|start|>assistant to=functions.weather<|channel|>commentary<|message|>{"city": 2}<|im_end|>'
    )
    harmony = parser_named("openai", Reads.TOOLS)
    gateway, _ = make_gateway(log, [answer, PLAIN], start_parser=harmony.start)
    with served(gateway) as address:
        ask: Any = {"model": "toy", "tools": FLAT}
        first = client(address).responses.create(input="Oslo?", **ask)
        assert [item.type for item in first.output] == [
            *("reasoning", "message", "reasoning", "function_call", "function_call")
        ]
        *others, weather, again = [item.to_dict() for item in first.output]
        results = outputs(first)
        question = {"role": "user", "content": "Oslo?"}
        history: Any = [question, *others, weather, results[0], again, results[1]]
        client(address).responses.create(input=history, **ask)
    before, row = logged(log)
    assert row["messages"][1] == before["response_message"]
    assert [message["role"] for message in row["messages"]] == ["user", "assistant", "tool", "tool"]
    assert row["parent"] is not None


class Weather(BaseModel):
    city: str
    degrees: int


def test_a_schema_is_passed_on_and_the_answer_parsed(tmp_path: Path) -> None:
    gateway, provider = make_gateway(
        tmp_path / "log.jsonl", ['{"city": "Oslo", "degrees": 7}<|im_end|>'] * 2, start_parser=plain
    )
    with served(gateway) as address:
        responses = client(address).responses
        parsed = responses.parse(model="toy", input="Oslo?", text_format=Weather)
        with responses.stream(model="toy", input="Oslo?", text_format=Weather) as stream:
            streamed = stream.get_final_response()
    assert parsed.output_parsed == streamed.output_parsed == Weather(city="Oslo", degrees=7)
    for sampling in provider.asked:
        wanted = sampling.extra["response_format"]
        assert (wanted["type"], wanted["json_schema"]["name"]) == ("json_schema", "Weather")
        assert wanted["json_schema"]["schema"]["required"] == ["city", "degrees"]


SPACE: Any = {"type": "namespace", "name": "sky", "description": "The sky", "tools": FLAT}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("how", ["history", "previous"])
def test_functions_in_a_namespace_are_called_by_their_own_names(tmp_path: Path, streams: bool, how: str) -> None:
    """As Codex sends its agents and MCP tools; the template gets the names that vLLM would give them."""
    log, tools = tmp_path / "log.jsonl", [SPACE, *FLAT]
    inside = CALL.replace('"weather"', '"sky__weather"')
    gateway, _ = make_gateway(log, [inside, CALL, SAID, inside])
    with served(gateway) as address:
        agent = Responses(address, [{"user": "Oslo?"}], how)
        items = []
        for _ in range(3):
            items += agent.ask(streams, tools=tools).native
            agent.history.append({"result": "rain"})
        events = list(Responses(address, [{"user": "Paris?"}]).stream(tools=tools))
    calls = [(item["name"], item.get("namespace")) for item in items if item["type"] == "function_call"]
    assert calls == [("weather", "sky"), ("weather", None)]
    assert [event.item.namespace for event in events if event.type.startswith("response.output_item.")] == [
        "sky"
    ] * 2
    rows = logged(log)[:3]
    check_chain(rows)
    assert [tool["function"]["name"] for tool in rows[0]["tools"]] == ["sky__weather", "weather"]
    assert rows[0]["tools"][0]["function"] == {**TOOLS[0]["function"], "name": "sky__weather"}
    named = [row["response_message"]["tool_calls"][0]["function"]["name"] for row in rows[:2]]
    assert named == ["sky__weather", "weather"]
    assert codes_of(log) == []
