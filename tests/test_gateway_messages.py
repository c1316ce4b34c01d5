"""Anthropic's Messages API of the gateway, as the anthropic client meets it."""

from __future__ import annotations

import random
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import anthropic
import orjson
import pytest
from anthropic import Anthropic
from anthropic.types import Message, ToolUseBlock

from tests.command import run
from tests.serving import Scripted, client, logged, make_gateway, served
from tests.test_gateway import ASK, CALL, PLAIN, SAID, TOY, as_sent_back, asked, plain, until
from tests.test_gateway import TOOLS as CHAT_TOOLS
from tests.tiers import examples
from tito_audit.errors import ProviderError
from tito_audit.provider import GenerationResult, SamplingParams
from tito_audit.serve.app import HttpOptions
from tito_audit.serve.errors import Refused
from tito_audit.serve.gateway import Gateway
from tito_audit.serve.messages import Messages

PATH = "/v1/messages"
TOOLS: list[Any] = [
    {
        "name": "weather",
        "description": "Look up the weather",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
        "cache_control": {"type": "ephemeral"},
    }
]
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}
THOUGHT = "<think>\nHm, Oslo.\n</think>\n\nLet me look. "


@contextmanager
def talking(gateway: Gateway, path: str = "", **options: Any) -> Iterator[Anthropic]:
    """A client of the anthropic package."""
    with (
        served(gateway) as address,
        Anthropic(base_url=address + path, api_key="none", max_retries=0, timeout=20, **options) as agent,
    ):
        yield agent


def ask(agent: Anthropic, messages: list[Any], *, streams: bool = False, **fields: Any) -> Any:
    """The message that a client gets, whole or added up by it."""
    asking: Any = {"model": "toy", "max_tokens": 500, "messages": messages, **fields}
    if not streams:
        return agent.messages.create(**asking)
    with agent.messages.stream(**asking) as stream:
        return stream.get_final_message()


def result(message: Any, text: str, *more: Any) -> dict[str, Any]:
    """The results of all calls of a message."""
    calls = [block for block in message.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": text} for block in calls]
    return {"role": "user", "content": [*results, *more]}


def check_scan(log: Path) -> None:
    """A scan finds nothing but notes."""
    code, out, err = run("scan", str(log), "-t", str(TOY), "--fail-on", "warning")
    assert code == 0, out + err


def check_chain(log: Path, provider: Scripted) -> None:
    """Every line continues the one before, with the ids that the upstream was sent and sampled."""
    rows = logged(log)
    assert [row["branch"] for row in rows] == ["start", *["continues"] * (len(rows) - 1)]
    for before, row in pairwise(rows):
        seen = before["prompt_token_ids"] + before["completion_token_ids"]
        assert row["prompt_token_ids"][: len(seen)] == seen
        assert row["thread_id"] == before["thread_id"]
    assert [tuple(row["prompt_token_ids"]) for row in rows] == provider.prompts
    assert [tuple(row["completion_token_ids"]) for row in rows] == provider.sampled


@pytest.mark.parametrize("streams", [False, True])
def test_an_agent_with_tools_leaves_a_log_of_one_chain(tmp_path: Path, streams: bool) -> None:
    log = tmp_path / "log.jsonl"
    gateway, provider = make_gateway(log, [CALL, CALL, PLAIN, PLAIN])
    system: Any = [
        {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ]
    history: list[Any] = [ASK]
    with talking(gateway) as agent:
        for turn in range(4):
            system[0]["text"] = f"x-anthropic-billing-header: cch={turn};"
            fields: Any = {"system": system, "tools": TOOLS}
            message = ask(agent, history, streams=streams, **fields)
            assert streams or message._request_id == message.id
            assert message.stop_reason == ("tool_use" if turn < 2 else "end_turn")
            history.append({"role": "assistant", "content": message.content})
            history.append(result(message, "rain") if turn < 2 else {"role": "user", "content": "And then?"})
    check_chain(log, provider)
    check_scan(log)
    (first, *_, last) = logged(log)
    assert first["messages"] == [{"role": "system", "content": "Be brief."}, ASK]
    assert [message["role"] for message in last["messages"]][-4:] == ["assistant", "tool", "assistant", "user"]
    assert (last["endpoint"], last["call_id"]) == ("messages", message.id)
    assert last["tools"] == CHAT_TOOLS


class LookUp:
    """The tools of the agent in the guide."""

    definitions = TOOLS

    def __call__(self, name: str, arguments: dict[str, Any]) -> str:
        return f"{name} in {arguments['city']}: 7 degrees"


def test_the_agent_of_the_guide_leaves_a_clean_log(tmp_path: Path) -> None:
    guide = (Path(__file__).resolve().parents[1] / "docs" / "serve.md").read_text(encoding="utf-8")
    (code,) = (code for code in re.findall(r"^```python\n(.*?)^```", guide, re.M | re.S) if "anthropic" in code)
    names: dict[str, Any] = {}
    exec(code, names)
    log = tmp_path / "log.jsonl"
    gateway, provider = make_gateway(log, [CALL, PLAIN])
    with served(gateway) as address:
        answer = names["rollout"](address, "task-1", "Oslo?", LookUp())
    assert answer.content[0].text == PLAIN.removesuffix("<|im_end|>")
    assert {row["session_id"] for row in logged(log)} == {"task-1"}
    check_chain(log, provider)
    check_scan(log)


def test_a_session_may_mix_the_two_apis(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    gateway, provider = make_gateway(log, [CALL, CALL, CALL, PLAIN])
    with served(gateway) as address, Anthropic(base_url=address, api_key="none", max_retries=0) as agent:
        chat = client(address).chat.completions
        first = as_sent_back(chat.create(model="toy", messages=[ASK], tools=CHAT_TOOLS).choices[0].message)
        (call,) = first["tool_calls"]
        use = ToolUseBlock(type="tool_use", id=call["id"], name="weather", input={"city": "Oslo"})
        history: list[Any] = [ASK, {"role": "assistant", "content": [use]}]
        message: Any = Message.construct(content=[use])
        for streams in (False, True):
            history.append(result(message, "wind" if streams else "rain"))
            message = ask(agent, history, streams=streams, tools=TOOLS)
            history.append(message.to_param())
        chats: list[Any] = [ASK, first, {"role": "tool", "tool_call_id": call["id"], "content": "rain"}]
        for line, text in zip(logged(log)[1:], ("wind", "sun"), strict=True):
            answer = line["response_message"]
            chats += [
                answer,
                {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": text},
            ]
        chat.create(model="toy", messages=chats, tools=CHAT_TOOLS)
    assert [row["endpoint"] for row in logged(log)] == [
        "chat.completions",
        "messages",
        "messages",
        "chat.completions",
    ]
    check_chain(log, provider)
    check_scan(log)


@pytest.mark.parametrize("thinking", [None, THINKING])
def test_a_stream_adds_up_to_the_whole_message(tmp_path: Path, thinking: Any) -> None:
    said = f"{THOUGHT}{CALL.removesuffix('<|im_end|>')}\n{CALL}"
    fields = {"tools": TOOLS, **({"thinking": thinking} if thinking else {})}
    messages = []
    for streams in (False, True):
        gateway, _ = make_gateway(tmp_path / f"{streams}.jsonl", [said])
        with talking(gateway) as agent:
            messages.append(ask(agent, [ASK], streams=streams, **fields))
    whole, added = messages
    kinds = [block.type for block in whole.content]
    assert kinds == [*(["thinking"] if thinking else []), "text", "tool_use", "tool_use"]
    ids = {"id", "parsed_output"}
    for block, other in zip(whole.content, added.content, strict=True):
        assert block.model_dump(exclude=ids) == other.model_dump(exclude=ids)
    assert whole.content[-1].input == {"city": "Oslo"}
    assert (whole.stop_reason, whole.usage) == (added.stop_reason, added.usage)
    for streams in (False, True):
        (row,) = logged(tmp_path / f"{streams}.jsonl")
        assert row["response_message"]["reasoning_content"] == "\nHm, Oslo.\n"
        assert whole.usage.input_tokens == len(row["prompt_token_ids"])
        assert whole.usage.output_tokens == len(row["completion_token_ids"])


def events_of(address: str, body: Any) -> list[tuple[str, Any]]:
    """The events of a stream as they are on the wire."""
    request = urllib.request.Request(address + PATH, orjson.dumps({"max_tokens": 500, "stream": True, **body}))
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        lines = [event.split("\n") for event in answer.read().decode().split("\n\n") if event]
    assert all(len(event) == 2 for event in lines)
    return [(name.removeprefix("event: "), orjson.loads(data.removeprefix("data: "))) for name, data in lines]


def test_events_come_in_anthropics_order(tmp_path: Path) -> None:
    gateway, _ = make_gateway(tmp_path / "log.jsonl", [THOUGHT + CALL])
    with served(gateway) as address:
        events = events_of(address, {"messages": [ASK], "tools": TOOLS, "thinking": THINKING})
    assert all(name == event["type"] for name, event in events)
    names = [name for name, _ in events if name != "ping"]
    runs = [name for at, name in enumerate(names) if not at or names[at - 1] != name]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert runs == ["message_start", *block * 3, "message_delta", "message_stop"]
    assert events[1][0] == "ping"
    start = events[0][1]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    opened = [event["content_block"] for name, event in events if name == "content_block_start"]
    assert [block["type"] for block in opened] == ["thinking", "text", "tool_use"]
    assert opened[2]["input"] == {}
    blocks = [event["index"] for name, event in events if name.startswith("content_block")]
    assert blocks == sorted(blocks)
    assert [event["delta"]["type"] for _, event in events if event.get("index") == 0 and "delta" in event][-1] == (
        "signature_delta"
    )


def test_pings_say_that_hidden_reasoning_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tito_audit.serve.messages._QUIET", 0.0)
    gateway, provider = make_gateway(tmp_path / "log.jsonl", [THOUGHT + CALL])
    with served(gateway) as address:
        names = [name for name, _ in events_of(address, {"messages": [ASK], "tools": TOOLS})]
    before_text = names[: names.index("content_block_start")]
    assert before_text[0] == "message_start"
    assert set(before_text[1:]) == {"ping"}
    assert 5 < len(before_text) < len(provider.sampled[0])


def test_an_answer_of_nothing_but_its_end_is_a_message_without_content(tmp_path: Path) -> None:
    gateway, _ = make_gateway(tmp_path / "log.jsonl", ["<|im_end|>", "<|im_end|>"])
    with talking(gateway) as agent:
        for streams in (False, True):
            message = ask(agent, [ASK], streams=streams)
            assert (message.content, message.stop_reason) == ([], "end_turn")


def test_thinking_comes_back_as_it_was_and_what_was_changed_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    gateway, provider = make_gateway(log, [THOUGHT + CALL, THOUGHT + CALL, SAID])
    fields: Any = {"tools": TOOLS, "thinking": THINKING}
    with talking(gateway) as agent:
        history: list[Any] = [ASK]
        for streams in (False, True):
            message = ask(agent, history, streams=streams, **fields)
            history += [message.to_param(), result(message, "rain")]
        ask(agent, history, **fields)
        for change in ({"thinking": "Hm, Rome."}, {"signature": "00"}, {"signature": "é"}, {"signature": None}):
            changed = {"role": "assistant", "content": [{**message.content[0].to_dict(), **change}]}
            with pytest.raises(anthropic.BadRequestError, match=r"messages\.1\.content\.0\.signature"):
                ask(agent, [ASK, changed, {"role": "user", "content": "Go on"}])
    check_chain(log, provider)
    check_scan(log)
    sent = logged(log)[-1]["messages"]
    assert [message.get("reasoning_content") for message in sent[1::2]] == ["\nHm, Oslo.\n"] * 2
    # The gateway's key decides; a restart does not.
    signed = message.content[0].signature
    assert Messages().signed("\nHm, Oslo.\n") == signed != Messages("secret").signed("\nHm, Oslo.\n")


def test_reasoning_that_a_client_did_not_ask_for_is_kept_by_the_session(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    gateway, provider = make_gateway(log, [THOUGHT + CALL, PLAIN])
    with talking(gateway) as agent:
        message = ask(agent, [ASK], tools=TOOLS)
        assert [block.type for block in message.content] == ["text", "tool_use"]
        ask(agent, [ASK, message.to_param(), result(message, "rain")], tools=TOOLS)
    check_chain(log, provider)
    assert "Hm, Oslo." in logged(log)[1]["template_messages"][1]["reasoning_content"]


@pytest.mark.parametrize("thinking", [{"type": "adaptive"}, {"type": "disabled"}])
def test_thinking_is_what_the_template_is_told(tmp_path: Path, thinking: Any) -> None:
    log, on = tmp_path / "log.jsonl", thinking["type"] == "adaptive"
    gateway, _ = make_gateway(log, [PLAIN, PLAIN], start_parser=plain)
    with talking(gateway) as agent:
        ask(agent, [ASK], thinking=thinking, output_config={"effort": "max"})
        own: Any = {"chat_template_kwargs": {"enable_thinking": True}}
        ask(agent, [ASK], thinking=thinking, extra_body=own)
    told = [row["chat_template_kwargs"] for row in logged(log)]
    assert told[0] == {"reasoning_effort": "high", "enable_thinking": on, "thinking": on}
    assert told[1] == {"enable_thinking": True, "thinking": on}


@pytest.mark.parametrize("path", ["", "/s/named"])
def test_tokens_are_counted_of_the_prompt_that_would_be_sent(tmp_path: Path, path: str) -> None:
    log = tmp_path / "log.jsonl"
    gateway, provider = make_gateway(log, [CALL, PLAIN])
    with talking(gateway, path) as agent:
        history: list[Any] = [ASK]
        for _ in range(2):
            counting: Any = {"model": "toy", "messages": list(history), "tools": TOOLS}
            counts = [agent.messages.count_tokens(**counting) for _ in range(2)]
            message = ask(agent, history, tools=TOOLS)
            assert [count.input_tokens for count in counts] == [message.usage.input_tokens] * 2
            history += [message.to_param(), result(message, "rain", {"type": "text", "text": "Go on"})]
        assert len(gateway.conversations) == 1, "counting opens no session"
        beta = agent.beta.messages.count_tokens(**counting, betas=["token-counting-2024-11-01"])
        assert beta.input_tokens == len(provider.prompts[1])
    check_chain(log, provider)


STORED = [
    # As sampled, as JavaScript sends it back.
    ('{"days": 1.0, "n": 1e3}', {"days": 1, "n": 1000}),
    ('{"city": "Oslo",  "city": "Rome"}', {"city": "Rome"}),
    ('{"n": 123456789012345678901234567890}', {"n": 123456789012345678901234567890.0}),
    ('{"INVALID_JSON": "x"}', {"INVALID_JSON": "x"}),
    ('{"city": "caf\\u00e9", "x": [1.5, null, true]}', {"x": [1.5, None, True], "city": "café"}),
    ('{"city": "\\ud83d"}', {"INVALID_JSON": '{"city": "\\ud83d"}'}),
    ('{"deep": ' + "[" * 198 + "]" * 198 + "}", {"INVALID_JSON": '{"deep": ' + "[" * 198 + "]" * 198 + "}"}),
    ("7", {"INVALID_JSON": "7"}),
]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("arguments", "given"), STORED, ids=range(len(STORED)))
def test_arguments_that_json_objects_do_not_keep_are_continued_as_sampled(
    tmp_path: Path, arguments: str, given: Any, streams: bool
) -> None:
    log = tmp_path / "log.jsonl"
    said = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call><|im_end|>'
    gateway, provider = make_gateway(log, [said, PLAIN])
    with talking(gateway) as agent:
        message = ask(agent, [ASK], tools=TOOLS, streams=streams)
        (block,) = message.content
        assert {**block.input, "n": 0} == {**given, "n": 0}, "an integer of 30 digits is exact in a stream"
        sent_back = {"role": "assistant", "content": [{**block.to_dict(), "input": given}]}
        ask(agent, [ASK, sent_back, result(message, "rain")], tools=TOOLS)
    check_chain(log, provider)


def test_changed_arguments_are_a_fork(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    gateway, _ = make_gateway(log, [CALL.replace('"Oslo"', "1.0"), PLAIN])
    with talking(gateway, "/s/named") as agent:
        message = ask(agent, [ASK], tools=TOOLS)
        changed = {"role": "assistant", "content": [{**message.content[0].to_dict(), "input": {"city": 2}}]}
        ask(agent, [ASK, changed, result(message, "rain")], tools=TOOLS)
    assert logged(log)[1]["fork"]["reason"] == "edited"


class Ending(Scripted):
    """A provider whose answers end as it is told."""

    ends: tuple[str, Any] = ("stop", None)

    def _result(self, input_ids: Any, sampling: SamplingParams) -> GenerationResult:
        found = super()._result(input_ids, sampling)
        return GenerationResult(
            found.input_ids, found.output_ids, found.logprobs, None, self.ends[0], stop_reason=self.ends[1]
        )

    def _pieces(self, index: int, result: GenerationResult) -> Iterator[Any]:
        *pieces, last = super()._pieces(index, result)
        yield from pieces
        yield type(last)(
            index,
            last.output_ids,
            last.logprobs,
            finish_reason=result.finish_reason,
            stop_reason=result.stop_reason,
        )


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("ends", "reason", "sequence"),
    [
        (("stop", None), "end_turn", None),
        (("stop", "degrees"), "stop_sequence", "degrees"),
        (("stop", 7), "end_turn", None),
        (("stop", "other"), "end_turn", None),
        (("length", None), "max_tokens", None),
        ((None, None), "end_turn", None),
    ],
)
def test_a_stop_reason_is_anthropics(
    tmp_path: Path, ends: Any, reason: str, sequence: str | None, streams: bool
) -> None:
    gateway, provider = make_gateway(tmp_path / "log.jsonl", [PLAIN], start_parser=plain)
    ending = Ending(provider._tokenizer, [PLAIN])
    ending.ends = ends
    gateway.provider = ending
    with talking(gateway) as agent:
        message = ask(
            agent,
            [ASK],
            streams=streams,
            stop_sequences=["degrees"],
            extra_body={"temperature": 0.5, "top_k": 5, "top_p": 0.9},
        )
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
    assert message.content[0].text == "It rains in Oslo, and it is 7 "
    (sampling,) = ending.asked
    assert (sampling.stop, sampling.max_tokens, sampling.temperature) == (("degrees",), 500, 0.5)
    assert (sampling.top_k, sampling.top_p, sampling.extra) == (5, 0.9, {})


def test_what_a_harness_sends_besides_is_taken_without_complaint(tmp_path: Path) -> None:
    gateway, provider = make_gateway(tmp_path / "log.jsonl", [PLAIN], start_parser=plain)
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    with talking(gateway) as agent:
        agent.beta.messages.create(
            model="toy",
            max_tokens=500,
            messages=[
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
                }
            ],
            betas=["context-management-2025-06-27", "something-new"],
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            metadata={"user_id": "someone"},
            service_tier="auto",
            cache_control={"type": "ephemeral"},
            output_config={"format": {"type": "json_schema", "schema": schema}},
            extra_body={"min_p": 0.1, "seed": 3, "repetition_penalty": 1.1},
        )
    (sampling,) = provider.asked
    response_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    assert sampling.extra == {"repetition_penalty": 1.1, "response_format": response_format}
    assert (sampling.min_p, sampling.seed) == (0.1, 3)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
WRONG: dict[str, tuple[Any, str]] = {
    "no limit": ({"max_tokens": None}, "max_tokens"),
    "a limit of none": ({"max_tokens": 0}, "max_tokens"),
    "no messages": ({"messages": []}, "messages"),
    "a role": ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    "a message": ({"messages": ["x"]}, "messages.0"),
    "a block": ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content.0"),
    "content": ({"messages": [{"role": "user", "content": 7}]}, "messages.0.content"),
    "a text": ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
    "an image": ({"messages": [ASK, {"role": "user", "content": [IMAGE]}]}, "messages.1.content.0: .*'image'"),
    "a document": ({"system": [{"type": "document"}]}, "system.0: .*'document'"),
    "an image of a tool": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}]}
            ]
        },
        "messages.0.content.0.content.0: .*'image'",
    ),
    "a call of a user": ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "'tool_use'"),
    "hidden thinking": (
        {"messages": [ASK, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
        "'redacted_thinking'",
    ),
    "a call without input": (
        {"messages": [ASK, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}]},
        "messages.1.content.0.input",
    ),
    "a hosted tool": ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
    "a tool without schema": ({"tools": [{"name": "a"}]}, "tools.0.input_schema"),
    "tools": ({"tools": {}}, "tools"),
    "a choice": ({"tools": TOOLS, "tool_choice": {"type": "some"}}, "tool_choice"),
    "a choice without tools": ({"tool_choice": {"type": "auto"}}, "tool_choice"),
    "servers of tools": ({"mcp_servers": [{}]}, "mcp_servers"),
    "a container": ({"container": "x"}, "container"),
    "stops": ({"stop_sequences": "x"}, "stop_sequences"),
    "thinking": ({"thinking": {"type": "deep"}}, "thinking"),
    "several answers": ({"n": 2}, "chat/completions"),
    "a number": ({"temperature": "hot"}, "temperature"),
    "effort": ({"output_config": {"effort": 3}}, "reasoning_effort"),
    "a schema": ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_with_a_request_is_said_in_anthropics_shape(tmp_path: Path, what: str) -> None:
    fields, words = WRONG[what]
    gateway, provider = make_gateway(tmp_path / "log.jsonl", [])
    body = {"model": "toy", "max_tokens": 9, "messages": [ASK], **fields}
    with served(gateway) as address, pytest.raises(anthropic.BadRequestError, match=words) as error:
        Anthropic(base_url=address, api_key="-", max_retries=0).messages.create(
            model="toy", max_tokens=9, messages=[], extra_body=body
        )
    assert error.value.body == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": error.value.body["error"]["message"]},  # type: ignore
    }
    assert provider.prompts == []


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "any"}, "required"),
        ({"type": "tool", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}),
    ],
)
def test_a_tool_choice_is_that_of_a_chat_completion(tmp_path: Path, choice: Any, expected: Any) -> None:
    """Whatever becomes of it: chat and messages are answered alike."""
    gateway, _ = make_gateway(tmp_path / "log.jsonl", [CALL, CALL])
    with served(gateway) as address:
        body = {"messages": [ASK], "max_tokens": 500}
        chat = {"tools": CHAT_TOOLS, "tool_choice": expected}
        status, answer = asked(address, "/v1/chat/completions", {**body, **chat})
        found, message = asked(address, PATH, {**body, "tools": TOOLS, "tool_choice": choice})
    assert found == status
    if status == 200:
        calls = answer["choices"][0]["message"].get("tool_calls") or []
        assert len(calls) == sum(block["type"] == "tool_use" for block in message["content"])


def test_errors_of_the_gateway_and_of_the_provider_have_anthropics_shape(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    late = ProviderError("it did not answer in 600 s")
    late.__cause__ = TimeoutError()
    failures: list[tuple[ProviderError, int, str]] = [
        (ProviderError("too long", status=400), 400, "invalid_request_error"),
        (ProviderError("busy", status=429), 429, "rate_limit_error"),
        (ProviderError("overloaded", status=503), 503, "api_error"),
        (ProviderError("nobody there"), 502, "api_error"),
        (late, 504, "timeout_error"),
    ]
    gateway, _ = make_gateway(log, [error for error, *_ in failures for _ in range(2)])
    with served(gateway, HttpOptions(api_key="secret", max_body=2000)) as address:
        key = {"x-api-key": "secret"}
        body = {"messages": [ASK], "max_tokens": 9}
        for _, status, kind in failures:
            for stream in (False, True):
                got, said = asked(address, PATH, {**body, "stream": stream}, **key)
                assert (got, said["type"], said["error"]["type"]) == (status, "error", kind)
        for fields, status, kind in (
            ({"model": "claude"}, 404, "not_found_error"),
            ({"system": "x" * 3000}, 413, "request_too_large"),
        ):
            got, said = asked(address, PATH, {**body, **fields}, **key)
            assert (got, said["error"]["type"]) == (status, kind)
        for headers in ({}, {"x-api-key": "other"}, {"Authorization": "Bearer other"}):
            got, said = asked(address, f"{PATH}/count_tokens", body, **headers)
            assert (got, said["error"]["type"]) == (401, "authentication_error")
        got, said = asked(address, f"{PATH}/count_tokens", body, Authorization="Bearer secret")
        assert (got, list(said)) == (200, ["input_tokens"])
        assert asked(address, PATH, method="GET", **key)[1]["error"]["type"] == "invalid_request_error"
    assert logged(log) == []


def test_a_stream_that_fails_ends_with_an_error_event(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    gateway, provider = make_gateway(log, [PLAIN], start_parser=plain)
    provider.fails_after = 3
    with talking(gateway) as agent, pytest.raises(anthropic.APIStatusError, match="broke off"):
        ask(agent, [ASK], streams=True)
    (row,) = logged(log)
    assert (row["status"], row["endpoint"]) == ("broken_off", "messages")
    check_scan(log)


def test_a_client_that_goes_away_ends_its_generation(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    gateway, provider = make_gateway(log, [PLAIN, PLAIN], start_parser=plain)
    provider.stays_after = 8
    with talking(gateway, "/s/left") as agent:
        stream = agent.messages.create(model="toy", max_tokens=500, messages=[ASK], stream=True)
        for _ in range(4):
            next(iter(stream))
        stream.close()
        until(lambda: provider.closed_early == 1 and log.stat().st_size > 0)
        provider.stays_after = None
        ask(agent, [ASK])
    gone, whole = logged(log)
    assert (gone["status"], whole["branch"]) == ("client_gone", "start")
    assert gone["completion_token_ids"] == list(provider.sampled[0][: len(gone["completion_token_ids"])])
    check_scan(log)


def test_consecutive_messages_of_one_role_are_one() -> None:
    call = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "café"}}
    results = [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "7"}] * 2}]
    body = {
        "max_tokens": 9,
        "system": "Brief.",
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
            {"role": "assistant", "content": "d"},
            {"role": "assistant", "content": [{"type": "text", "text": "e"}, call]},
            {"role": "user", "content": [*results, {"type": "tool_result", "tool_use_id": "b"}]},
            {"role": "user", "content": "f"},
            {"role": "assistant", "content": []},
            {"role": "system", "content": "g"},
            {"role": "user", "content": []},
            {"role": "assistant", "content": "It"},
        ],
    }
    fields = Messages().request(orjson.dumps(body))
    function = {"name": "weather", "arguments": '{"city": "café"}'}
    assert fields.messages == [
        {"role": "system", "content": "Brief."},
        {"role": "user", "content": "a\nb\nc"},
        {
            "role": "assistant",
            "content": "de",
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "7\n7"},
        {"role": "tool", "tool_call_id": "b", "content": ""},
        {"role": "user", "content": "f"},
        {"role": "assistant", "content": ""},
        {"role": "system", "content": "g"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "It"},
    ]
    assert not fields.call.add_generation_prompt, "the last answer is continued"


def test_an_answer_that_the_client_began_is_continued(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    gateway, provider = make_gateway(log, [" rains.<|im_end|>", PLAIN], start_parser=plain)
    with talking(gateway) as agent:
        message = ask(agent, [ASK, {"role": "assistant", "content": "It"}])
        assert message.content[0].text == " rains."
        history: list[Any] = [
            ASK,
            {"role": "assistant", "content": "It rains."},
            {"role": "user", "content": "Yes?"},
        ]
        ask(agent, history)
    check_chain(log, provider)


# Bodies of strangers


def mutated(value: Any, dice: random.Random) -> Any:
    """The value with something else in one place of it."""
    junk = [
        None,
        True,
        0,
        -1,
        1.5,
        1e300,
        "",
        "text",
        "tool_use",
        "thinking",
        [],
        {},
        [{}],
        {"type": "text"},
        [[]],
    ]
    if dice.random() < 0.15 or not isinstance(value, dict | list) or not value:
        return dice.choice(junk)
    if isinstance(value, dict):
        name = dice.choice(list(value))
        if dice.random() < 0.15:
            return {key: item for key, item in value.items() if key != name}
        return {**value, name: mutated(value[name], dice)}
    at = dice.randrange(len(value))
    return [*value[:at], mutated(value[at], dice), *value[at + 1 :]]


def answered(address: str, path: str, data: bytes) -> tuple[int, str, str]:
    """Status, type and body of an answer."""
    try:
        with urllib.request.urlopen(urllib.request.Request(address + path, data), timeout=20) as answer:
            return answer.status, answer.headers.get_content_type(), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers.get_content_type(), error.read().decode()


def test_random_bodies_are_answered_or_refused(tmp_path: Path) -> None:
    count = examples(400, 2000)
    gateway, _ = make_gateway(tmp_path / "log.jsonl", [PLAIN] * 2 * count)
    thought = {"type": "thinking", "thinking": "Hm.", "signature": Messages().signed("Hm.")}
    whole = {
        "model": "toy",
        "max_tokens": 99,
        "system": [{"type": "text", "text": "Brief."}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
            {
                "role": "assistant",
                "content": [
                    thought,
                    {"type": "text", "text": "b"},
                    {"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "Oslo", "x": [1, 2.5]}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "7"}]},
                    {"type": "text", "text": "c"},
                ],
            },
        ],
        "tools": TOOLS,
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
        "thinking": THINKING,
        "stop_sequences": ["x"],
        "temperature": 1.0,
        "top_k": 5,
        "top_p": 0.9,
        "metadata": {"user_id": "a"},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
        "chat_template_kwargs": {"x": 1},
        "stream": False,
    }
    dice, seen = random.Random(7), {}
    with served(gateway) as address:
        for number in range(count):
            body: Any = {**whole, "stream": dice.random() < 0.5}
            for _ in range(dice.randint(1, 2)):
                body = mutated(body, dice)
            for path in (PATH, f"{PATH}/count_tokens"):
                status, kind, text = answered(address, path, orjson.dumps(body))
                seen[status, kind] = seen.get((status, kind), 0) + 1
                assert status in (200, 400, 404), (number, status, text, body)
                if kind == "text/event-stream":
                    assert text.rstrip().endswith('{"type":"message_stop"}'), (number, text, body)
                else:
                    assert (orjson.loads(text).get("type") == "error") == (status != 200)
    kinds = [(200, "application/json"), (200, "text/event-stream"), (400, "application/json")]
    assert min(seen[kind] for kind in kinds) > count / 20, seen


@pytest.mark.parametrize("depth", [260, 5000])
def test_what_is_nested_too_deep_is_refused(depth: int) -> None:
    deep = b"[" * depth + b"]" * depth
    for body in (
        b'{"max_tokens":9,"messages":[{"role":"user","content":%s}]}' % deep,
        b'{"max_tokens":9,"messages":%s}' % deep,
        b'{"max_tokens":9,"messages":[{"role":"user","content":"x"}],"tools":%s}' % deep,
    ):
        with pytest.raises(Refused):
            Messages().request(body)
