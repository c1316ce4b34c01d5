"""`/v1/responses` over HTTP, as the openai client meets it: items and events, sessions, and what is stored."""

from __future__ import annotations

import random
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from tests.serving import client, logged, make_gateway, served
from tests.test_gateway import ASK, CALL, PLAIN, SAID, TOOLS, as_sent_back, asked, plain, until
from tests.test_gateway import TOY as TOKENIZER
from tests.tiers import examples
from tito_audit import Settings, scan_rollouts
from tito_audit.errors import ProviderError
from tito_audit.record.finding import Severity
from tito_audit.serve.app import HttpOptions

PATH = "/v1/responses"
FLAT: list[Any] = [{"type": "function", **TOOLS[0]["function"]}]
THOUGHT = "<think>\nHm, Oslo.\n</think>\n\nLet me look. " + CALL
OUT: Any = {"type": "function_call_output", "output": "rain"}


def clean(log: Path) -> None:
    """A scan of the log gives no error and no warning."""
    results = list(scan_rollouts(log, Settings(tokenizer=str(TOKENIZER))))
    assert results
    assert [one for result in results for one in result.findings if one.severity is not Severity.NOTE] == []


def one_chain(rows: list[dict[str, Any]]) -> None:
    """Each call continues the one before it, ids and all."""
    assert [row["branch"] for row in rows] == ["start", *["continues"] * (len(rows) - 1)], [
        row["fork"] for row in rows
    ]
    for before, row in pairwise(rows):
        seen = before["prompt_token_ids"] + before["completion_token_ids"]
        assert row["prompt_token_ids"][: len(seen)] == seen
        assert row["parent"] == {"call_id": before["call_id"], "choice": 0}
        assert row["thread_id"] == before["thread_id"]


def outputs(response: Response) -> list[Any]:
    return [{**OUT, "call_id": item.call_id} for item in response.output if item.type == "function_call"]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("how", ["history", "previous", "not stored", "without ids"])
def test_an_agent_with_tools_leaves_a_log_of_one_chain(tmp_path: Path, streams: bool, how: str) -> None:
    log = tmp_path / "log.jsonl"
    gateway, provider = make_gateway(log, [THOUGHT, CALL, SAID])
    with served(gateway) as address:
        agent = client(address)
        history: list[Any] = [{"role": "user", "content": ASK["content"]}]
        more: dict[str, Any] = {"model": "toy", "tools": FLAT, "instructions": "Be brief."}
        if how == "not stored":
            more |= {"store": False, "include": ["reasoning.encrypted_content"]}
        for _ in range(3):
            if streams:
                with agent.responses.stream(input=history, **more) as stream:
                    for _event in stream:
                        pass
                    response: Any = stream.get_final_response()
            else:
                response = agent.responses.create(input=history, **more)
            if how == "previous":
                history, more["previous_response_id"] = outputs(response), response.id
                continue
            items = [item.to_dict() for item in response.output]
            for item in items:
                item.pop("parsed_arguments", None)
                if how == "not stored" and item["type"] == "reasoning":
                    del item["content"]
                if how == "without ids":
                    del item["id"]
            history += [*items, *outputs(response)]
    rows = logged(log)
    one_chain(rows)
    assert [row["prompt_token_ids"] for row in rows] == [list(ids) for ids in provider.prompts]
    assert [row["completion_token_ids"] for row in rows] == [list(ids) for ids in provider.sampled]
    assert {row["endpoint"] for row in rows} == {"responses"}
    first = rows[1]["messages"]
    assert [message["role"] for message in first] == ["system", "user", "assistant", "tool"]
    assert first[2]["reasoning_content"] == "\nHm, Oslo.\n"
    assert first[2] == rows[0]["response_message"]
    assert rows[0]["tools"] == TOOLS
    clean(log)


def test_a_session_may_mix_both_apis(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    gateway, _ = make_gateway(log, [THOUGHT, CALL, CALL, SAID])
    with served(gateway) as address:
        agent = client(address)
        chat = agent.chat.completions.create(model="toy", messages=[ASK], tools=TOOLS)
        message = chat.choices[0].message
        (call,) = message.tool_calls or ()
        items: list[Any] = [
            ASK,
            {"role": "assistant", "content": message.content},
            {"type": "function_call", "call_id": call.id, **call.to_dict()["function"]},  # type: ignore[dict-item]
            {**OUT, "call_id": call.id},
        ]
        second = agent.responses.create(model="toy", input=items, tools=FLAT)
        (asks,) = [item for item in second.output if item.type == "function_call"]
        function = {"name": asks.name, "arguments": asks.arguments}
        history: list[Any] = [
            ASK,
            as_sent_back(message),
            {"role": "tool", "tool_call_id": call.id, "content": "rain"},
            {"role": "assistant", "tool_calls": [{"id": asks.call_id, "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": asks.call_id, "content": "wind"},
        ]
        third = agent.chat.completions.create(model="toy", messages=history, tools=TOOLS)
        history += [as_sent_back(third.choices[0].message), {"role": "tool", "content": "calm"}]
        agent.chat.completions.create(model="toy", messages=history, tools=TOOLS)
    rows = logged(log)
    one_chain(rows)
    assert [row["endpoint"] for row in rows] == ["chat.completions", "responses", *["chat.completions"] * 2]
    clean(log)


def test_the_events_of_a_stream_are_in_order_and_add_up_to_the_response(tmp_path: Path) -> None:
    gateway, _ = make_gateway(tmp_path / "log.jsonl", [THOUGHT.replace("<|im_end|>", "\n" + CALL)] * 2)
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
    final = events[-1].response  # type: ignore[union-attr]
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
    assert whole.output[3].arguments == '{"city":   "Oslo"}'  # type: ignore[union-attr]


def ITEM(word: str) -> list[str]:
    """The events of one item."""
    call = word == "function_call_arguments"
    part = [] if call else ["response.content_part.added"], [] if call else ["response.content_part.done"]
    text = [f"response.{word}.delta", f"response.{word}.done"]
    return ["response.output_item.added", *part[0], *text, *part[1], "response.output_item.done"]


def test_reasoning_that_returns_between_texts_is_read_back_as_one_answer(tmp_path: Path) -> None:
    """Parsers of channels give reasoning and text by turns; results may stand between the calls of an answer."""
    from tito_audit.parser import Reads
    from tito_audit.parsers import parser_named

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
        *others, one, other = [item.to_dict() for item in first.output]
        results = outputs(first)
        history: Any = [{"role": "user", "content": "Oslo?"}, *others, one, results[0], other, results[1]]
        client(address).responses.create(input=history, **ask)
    before, row = logged(log)
    assert row["messages"][1] == before["response_message"]
    assert [message["role"] for message in row["messages"]] == ["user", "assistant", "tool", "tool"]
    assert row["parent"] is not None


def test_a_response_is_stored_read_listed_and_deleted(tmp_path: Path) -> None:
    gateway, _ = make_gateway(tmp_path / "log.jsonl", [CALL, SAID, PLAIN, PLAIN])
    with served(gateway) as address:
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
    log = tmp_path / "log.jsonl"
    gateway, _ = make_gateway(log, [PLAIN] * 4, start_parser=plain)
    with served(gateway) as address:
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


def test_what_a_client_asks_for_reaches_the_provider(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    gateway, provider = make_gateway(log, [SAID])
    with served(gateway) as address:
        response = client(address).responses.create(
            model="toy",
            input="Oslo?",
            max_output_tokens=5,
            temperature=0.5,
            top_p=0.9,
            reasoning={"effort": "low"},
            truncation="disabled",
            user="someone",
            extra_body={"top_k": 5, "seed": 3, "ignore_eos": True, "return_token_ids": True},
        )
    (sampling,) = provider.asked
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (5, 0.5, 0.9, 5)
    assert sampling.extra == {"ignore_eos": True}
    (row,) = logged(log)
    assert row["chat_template_kwargs"] == {"reasoning_effort": "low"}
    assert row["finish_reason"] == "length"
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    last = response.output[-1].to_dict()
    assert last["status"] == "incomplete"
    assert last["prompt_token_ids"] == list(provider.prompts[0])
    assert last["generation_token_ids"] == row["completion_token_ids"]
    assert last["generation_log_probs"] == row["logprobs"]


SPACE: Any = {"type": "namespace", "name": "sky", "description": "The sky", "tools": FLAT}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("how", ["history", "previous"])
def test_functions_in_a_namespace_are_called_by_their_own_names(tmp_path: Path, streams: bool, how: str) -> None:
    """As Codex sends its agents and MCP tools; the template gets the names that vLLM would give them."""
    log = tmp_path / "log.jsonl"
    inside = CALL.replace('"weather"', '"sky__weather"')
    gateway, _ = make_gateway(log, [inside, CALL, SAID])
    with served(gateway) as address:
        agent = client(address)
        history: list[Any] = [{"role": "user", "content": ASK["content"]}]
        more: dict[str, Any] = {"model": "toy", "tools": [SPACE, *FLAT]}
        calls = []
        for _ in range(3):
            if streams:
                with agent.responses.stream(input=history, **more) as stream:
                    events = list(stream)
                response: Any = stream.get_final_response()
                added = [event.item for event in events if event.type == "response.output_item.added"]
                assert [getattr(item, "namespace", None) for item in added] == [
                    getattr(item, "namespace", None) for item in response.output
                ]
            else:
                response = agent.responses.create(input=history, **more)
            calls += [(item.name, item.namespace) for item in response.output if item.type == "function_call"]
            if how == "previous":
                history, more["previous_response_id"] = outputs(response), response.id
                continue
            items = [item.to_dict() for item in response.output]
            for item in items:
                item.pop("parsed_arguments", None)
            history += [*items, *outputs(response)]
    assert calls == [("weather", "sky"), ("weather", None)]
    rows = logged(log)
    one_chain(rows)
    assert [tool["function"]["name"] for tool in rows[0]["tools"]] == ["sky__weather", "weather"]
    assert rows[0]["tools"][0]["function"] == {**TOOLS[0]["function"], "name": "sky__weather"}
    named = [row["response_message"]["tool_calls"][0]["function"]["name"] for row in rows[:2]]
    assert named == ["sky__weather", "weather"]
    clean(log)


@pytest.mark.parametrize(("kind", "setting"), [("web_search", 'web_search = "disabled"'), ("x", ""), (None, "")])
def test_a_tool_that_is_no_function_is_refused_with_its_place_and_how_to_turn_it_off(
    tmp_path: Path, kind: str | None, setting: str
) -> None:
    gateway, _ = make_gateway(tmp_path / "log.jsonl", [])
    with served(gateway) as address:
        for tools, place in (
            ([*FLAT, {"type": kind}], "`tools[1]`"),
            ([{**SPACE, "tools": [*FLAT, {"type": kind}]}], "`tools[0].tools[1]`"),
            ([{**SPACE, "tools": [SPACE]}], "`tools[0].tools[0]`"),
        ):
            status, answer = asked(address, PATH, {"input": "x", "tools": tools})
            assert (status, answer["error"]["param"]) == (400, "tools")
            assert place in answer["error"]["message"]
            assert setting in answer["error"]["message"] or place == "`tools[0].tools[0]`"


WRONG = {
    "no JSON": (b"{", 400, None),
    "no input": ({"model": "toy"}, 400, "input"),
    "nothing in it": ({"input": []}, 400, "input"),
    "an image": ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400, "input"),
    "a file": ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, 400, "input"),
    "a result with an image": (
        {"input": [{"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image"}]}]},
        400,
        "input",
    ),
    "a hosted call": ({"input": [{"type": "web_search_call", "id": "x"}]}, 400, "input"),
    "an unknown role": ({"input": [{"role": "narrator", "content": "x"}]}, 400, "input"),
    "a call without a name": ({"input": [{"type": "function_call", "call_id": "a"}]}, 400, "input"),
    "a strange seal": ({"input": [{"type": "reasoning", "encrypted_content": "gAAA"}]}, 400, "input"),
    "an unknown item": ({"input": [{"type": "item_reference", "id": "x"}]}, 404, "input"),
    "a hosted tool": ({"input": "x", "tools": [{"type": "web_search"}]}, 400, "tools"),
    "a tool without a name": ({"input": "x", "tools": [{"type": "function"}]}, 400, "tools"),
    "a namespace without a name": ({"input": "x", "tools": [{"type": "namespace"}]}, 400, "tools"),
    "a namespace of one": (
        {"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": {}}]},
        400,
        "tools",
    ),
    "a call in a strange namespace": (
        {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}", "namespace": 7}]},
        400,
        "input",
    ),
    "truncation": ({"input": "x", "truncation": "auto"}, 400, "truncation"),
    "background": ({"input": "x", "background": True}, 400, "background"),
    "a conversation": ({"input": "x", "conversation": "c"}, 400, "conversation"),
    "logprobs": ({"input": "x", "include": ["message.output_text.logprobs"]}, 400, "include"),
    "several answers": ({"input": "x", "n": 2}, 400, "n"),
    "a short answer": ({"input": "x", "max_output_tokens": 0}, 400, "max_output_tokens"),
    "a strange format": ({"input": "x", "text": {"format": {"type": "xml"}}}, 400, "text"),
    "another model": ({"input": "x", "model": "other"}, 404, "model"),
}


def test_what_is_wrong_with_a_request_is_said_of_its_field(tmp_path: Path) -> None:
    gateway, provider = make_gateway(tmp_path / "log.jsonl", [])
    with served(gateway, HttpOptions(max_body=8000)) as address:
        for what, (body, status, param) in WRONG.items():
            got, said = asked(address, PATH, body)
            assert (got, said["error"]["param"]) == (status, param), (what, said)
            assert said["error"]["message"], what
        assert asked(address, f"{PATH}/resp_x", method="GET")[0] == 404
        assert asked(address, f"{PATH}/resp_x", method="DELETE")[0] == 404
        assert "web_search" in asked(address, PATH, WRONG["a hosted tool"][0])[1]["error"]["message"]
    assert provider.prompts == []


def test_a_provider_that_fails_has_its_status_and_a_broken_stream_a_failed_response(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    gateway, provider = make_gateway(log, [ProviderError("busy", status=429)] * 2 + [PLAIN], start_parser=plain)
    with served(gateway) as address:
        for stream in (False, True):
            assert asked(address, PATH, {"input": "x", "stream": stream})[0] == 429
        provider.fails_after = 3
        events = list(client(address).responses.create(model="toy", input="x", stream=True))
        assert events[-1].type == "response.failed"
        assert "broke off" in (events[-1].response.error.message)  # type: ignore[union-attr]
        assert asked(address, f"{PATH}/{events[-1].response.id}", method="GET")[0] == 404
    (row,) = logged(log)
    assert row["status"] == "broken_off"
    clean(log)


def test_a_client_that_goes_away_ends_its_generation(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    gateway, provider = make_gateway(log, [PLAIN, PLAIN], start_parser=plain)
    provider.stays_after = 8
    with served(gateway) as address:
        stream = client(address, "/s/left").responses.create(model="toy", input="x", stream=True)
        for _ in range(6):
            next(iter(stream))
        stream.close()
        until(lambda: provider.closed_early == 1 and log.stat().st_size > 0)
        provider.stays_after = None
        client(address, "/s/left").responses.create(model="toy", input="x")
    gone, whole = logged(log)
    assert (gone["status"], whole["branch"]) == ("client_gone", "start")
    clean(log)


def test_an_answer_of_nothing_is_an_empty_message_that_can_be_continued(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    gateway, _ = make_gateway(log, ["<|im_end|>", PLAIN], start_parser=plain)
    with served(gateway) as address:
        responses = client(address).responses
        first = responses.create(model="toy", input="x")
        responses.create(model="toy", input="y", previous_response_id=first.id)
    assert (first.output_text, len(first.output)) == ("", 1)
    one_chain(logged(log))


class LookUp:
    """The tool of the agent in the guide."""

    tools = FLAT

    def __call__(self, name: str, arguments: str) -> str:
        return f"{name}: 7 degrees"


def test_the_agent_of_the_guide_leaves_a_clean_log(tmp_path: Path) -> None:
    guide = (Path(__file__).resolve().parents[1] / "docs" / "serve.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(re.findall(r"^```python\n(.*?)^```", guide, re.M | re.S)[0], names)
    log = tmp_path / "log.jsonl"
    gateway, _ = make_gateway(log, [THOUGHT, CALL, SAID])
    with served(gateway) as address:
        text = names["rollout"](f"{address}/v1", "task-1", "Oslo?", LookUp())
    assert text.strip() == "It rains in Oslo."
    one_chain(logged(log))
    clean(log)


def strange(dice: random.Random, depth: int = 0) -> Any:
    """A value that a hostile client may put anywhere."""
    leaves = [None, True, 0, -1, 1.5, 10**30, "", "x", "user", "\x00", "resp_x", [], {}, "message", "reasoning"]
    if depth > 2 or dice.random() < 0.6:
        return dice.choice(leaves)
    if dice.random() < 0.5:
        return [strange(dice, depth + 1) for _ in range(dice.randrange(3))]
    return {dice.choice(KEYS): strange(dice, depth + 1) for _ in range(dice.randrange(4))}


KEYS = ["type", "role", "content", "text", "id", "call_id", "output", "name", "arguments", "summary", "format"]
KEYS += ["namespace", "tools"]
KINDS = ["message", "reasoning", "function_call", "function_call_output", "item_reference", "web_search_call"]
FIELDS = [
    *(
        "input",
        "instructions",
        "tools",
        "tool_choice",
        "text",
        "reasoning",
        "include",
        "store",
        "stream",
        "metadata",
    ),
    *("previous_response_id", "max_output_tokens", "truncation", "n", "model", "stop", "top_k", "user", "prompt"),
    *("chat_template_kwargs", "messages", "response_format", "parallel_tool_calls", "skip_special_tokens"),
]


def hostile(dice: random.Random) -> Iterator[tuple[str, bytes]]:
    """Bodies of which some part is anything."""
    good: dict[str, Any] = {"input": "Oslo?"}
    for _ in range(examples(500, 2000)):
        body = dict(good)
        items = [{"type": dice.choice(KINDS), "role": dice.choice(["user", "assistant"])} for _ in range(3)]
        for item in items:
            item |= {dice.choice(KEYS): strange(dice) for _ in range(3)}  # type: ignore[misc]
        if dice.random() < 0.6:
            body["input"] = items
        if dice.random() < 0.2:
            body["tools"] = [{**SPACE, dice.choice(KEYS): strange(dice)}, strange(dice)][: dice.randrange(1, 3)]
        for _ in range(dice.randrange(3)):
            body[dice.choice(FIELDS)] = strange(dice)
        try:
            yield PATH, orjson.dumps(body)
        except TypeError:
            continue


def test_hostile_bodies_are_answered_or_refused(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    gateway, _ = make_gateway(log, [PLAIN] * examples(500, 2000), start_parser=plain)
    statuses: dict[int, int] = {}
    with served(gateway) as address:
        for path, body in hostile(random.Random(7)):
            request = urllib.request.Request(address + path, body)
            try:
                with urllib.request.urlopen(request, timeout=20) as answer:
                    status, text = answer.status, answer.read()
            except urllib.error.HTTPError as error:
                status, text = error.code, error.read()
            assert status < 500, (body, text)
            assert b"the gateway failed" not in text, (body, text)
            statuses[status] = statuses.get(status, 0) + 1
        for query in ("limit=0", "limit=x", "after=x", "order=%00", "limit=" + "9" * 5000):
            assert asked(address, f"{PATH}/{'x' * 9}/input_items?{query}", method="GET")[0] == 404
    assert statuses[200] > 50
    assert statuses[400] > 100
    assert len(logged(log)) == statuses[200]
