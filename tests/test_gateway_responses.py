"""`/v1/responses` over HTTP, as the openai client meets it: items and events, sessions, and what is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from tests.gateway.clients import Responses
from tests.serving import (
    CALL,
    FLAT,
    PLAIN,
    SAID,
    THOUGHT,
    TOOLS,
    asked,
    check_chain,
    client,
    codes_of,
    gated,
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


def test_the_events_of_a_stream_are_in_order_and_add_up_to_the_response(tmp_path: Path) -> None:
    gateway, _ = make_gateway(tmp_path / "log.jsonl", [THOUGHT + CALL.replace("<|im_end|>", "\n" + CALL)] * 2)
    ask: Any = {"model": "toy", "input": "Oslo?", "tools": FLAT}
    with served(gateway) as address:
        events = list(client(address).responses.create(**ask, stream=True))
        whole = client(address, "/s/other").responses.create(**ask)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert [kind for number, kind in enumerate(kinds) if kinds[number - 1 : number] != [kind]] == [
        "response.created",
        "response.in_progress",
        *ITEM("reasoning_text"),
        *ITEM("output_text"),
        *ITEM("function_call_arguments"),
        *ITEM("function_call_arguments"),
        "response.completed",
    ]
    final = events[-1].response
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == final.output
    for index, item in enumerate(final.output):
        assert item.id.endswith(f"{index:04x}")
        deltas = "".join(getattr(e, "delta", "") for e in events if getattr(e, "output_index", None) == index)
        assert deltas == (item.arguments if item.type == "function_call" else item.content[0].text)
    for response in (whole, final):
        Response.model_validate(response.to_dict())
        assert [item.type for item in response.output] == ["reasoning", "message", *["function_call"] * 2]
        assert response.output_text == "\n\nLet me look. "
        assert response.status == "completed"
        assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert whole.output[3].arguments == '{"city":   "Oslo"}'


def ITEM(word: str) -> list[str]:
    """The events of one item."""
    call = word == "function_call_arguments"
    part = [] if call else ["response.content_part.added"], [] if call else ["response.content_part.done"]
    text = [f"response.{word}.delta", f"response.{word}.done"]
    return ["response.output_item.added", *part[0], *text, *part[1], "response.output_item.done"]


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


def test_a_response_is_stored_read_listed_and_deleted(tmp_path: Path) -> None:
    with gated(tmp_path, [CALL, SAID, PLAIN, PLAIN]) as (address, _, _):
        responses = client(address).responses
        first = responses.create(model="toy", input="Oslo?", tools=FLAT, metadata={"task": "7"})
        second = responses.create(model="toy", input=outputs(first), previous_response_id=first.id, tools=FLAT)
        assert responses.retrieve(first.id) == first
        assert first.metadata == {"task": "7"}
        assert second.previous_response_id == first.id
        listed = list(responses.input_items.list(second.id, order="asc", limit=1))
        assert [item.type for item in listed] == ["message", "function_call", "function_call_output"]
        assert listed[1].id == first.output[-1].id
        backwards = list(responses.input_items.list(second.id))
        assert [item.id for item in backwards] == [item.id for item in listed][::-1]
        reference: Any = [{"role": "user", "content": "Oslo?"}, {"type": "item_reference", "id": listed[1].id}]
        again = responses.create(model="toy", input=[*reference, *outputs(first)], tools=FLAT)
        responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError, match="not found") as wrong:
            responses.create(model="toy", input="And?", previous_response_id=first.id)
        assert (wrong.value.code, wrong.value.param) == ("previous_response_not_found", "previous_response_id")
        hidden = responses.create(model="toy", input="Oslo?", store=False)
        with pytest.raises(openai.NotFoundError):
            responses.retrieve(hidden.id)
    assert again.output_text
    assert [row["branch"] for row in logged(tmp_path / "log.jsonl")][:3] == ["start", "continues", "continues"]


def test_a_previous_response_names_its_session_and_keeps_no_instructions(tmp_path: Path) -> None:
    with gated(tmp_path, [PLAIN] * 4, start_parser=plain) as (address, _, log):
        firsts = [client(address, f"/s/{name}").responses.create(model="toy", input="Hi") for name in "ab"]
        for first in firsts:
            client(address).responses.create(model="toy", input="So?", previous_response_id=first.id)
    rows = logged(log)
    assert [row["session_id"] for row in rows] == ["a", "b", "a", "b"]
    assert [row["branch"] for row in rows] == ["start", "start", "continues", "continues"]


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


def test_a_broken_stream_is_a_failed_response_that_is_not_stored(tmp_path: Path) -> None:
    gateway, provider = make_gateway(tmp_path / "log.jsonl", [PLAIN], start_parser=plain)
    provider.fails_after = 3
    with served(gateway) as address:
        *_, last = client(address).responses.create(model="toy", input="x", stream=True)
        assert last.type == "response.failed"
        assert asked(address, f"{PATH}/{last.response.id}", method="GET")[0] == 404
        assert asked(address, f"{PATH}/resp_x", method="DELETE")[0] == 404
