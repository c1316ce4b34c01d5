"""What only the Messages API of the gateway has: events, thinking, arguments as objects, counts of tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.gateway.clients import Answer
from tests.gateway.clients import Messages as Agent
from tests.serving import (
    ASK,
    CALL,
    PLAIN,
    SCHEMAS,
    THOUGHT,
    Scripted,
    check_chain,
    client,
    fetched,
    gated,
    logged,
    make_gateway,
    plain,
    served,
)
from tests.tables import stored, table
from tito_audit.provider import GenerationResult, SamplingParams
from tito_audit.serve.messages import MessagesApi

PATH = "/v1/messages"
OSLO = {"user": "Oslo?"}


def events_of(address: str, body: Any) -> list[tuple[str, Any]]:
    """The events of a stream as they are on the wire."""
    asking = {"max_tokens": 500, "stream": True, "messages": [ASK], "tools": SCHEMAS, **body}
    _, headers, data = fetched(address, PATH, asking)
    assert headers["Content-Type"].startswith("text/event-stream")
    lines = [event.split("\n") for event in data.decode().split("\n\n") if event]
    assert all(len(event) == 2 for event in lines)
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in lines]


def test_pings_say_that_hidden_reasoning_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tito_audit.serve.messages._PING_AFTER", 0.0)
    with gated(tmp_path, [THOUGHT + CALL]) as (address, provider, _):
        names = [name for name, _ in events_of(address, {})]
    before_text = names[: names.index("content_block_start")]
    assert before_text[0] == "message_start"
    assert set(before_text[1:]) == {"ping"}
    assert 5 < len(before_text) < len(provider.sampled[0])


def test_the_key_of_the_gateway_signs_thoughts_and_a_restart_does_not() -> None:
    assert MessagesApi().sign("Hm.") == MessagesApi().sign("Hm.") != MessagesApi("secret").sign("Hm.")


def sent_with(agent: Agent, value: Any) -> Any:
    """The first answer of a history, with another object as the arguments of its call."""
    answer: Answer = agent.history[1]
    (block,) = answer.native[0]["content"]
    shown = block["input"]
    content = [{**block, "input": value}]
    agent.history[1:] = [replace(answer, native=[{"role": "assistant", "content": content}]), {"result": "rain"}]
    return shown


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(*table(__file__, "arguments"), ids=range(8))
def test_arguments_that_json_objects_do_not_keep_are_continued_as_sampled(
    tmp_path: Path, sampled: str, sent: str, streams: bool
) -> None:
    log = tmp_path / "log.jsonl"
    sampled, value = (text.replace("$198", "[" * 198 + "]" * 198) for text in (sampled, sent))
    value = json.loads(value)
    call = f'<tool_call>\n{{"name": "weather", "arguments": {sampled}}}\n</tool_call><|im_end|>'
    gateway, _ = make_gateway(log, [call, PLAIN])
    with served(gateway) as address:
        agent = Agent(address, [OSLO])
        agent.ask(streams)
        shown = sent_with(agent, value)
        assert {**shown, "n": 0} == {**value, "n": 0}, "an integer of 30 digits is exact in a stream"
        agent.ask(streams=False)
    check_chain(logged(log))


class Ending(Scripted):
    """A provider whose answers end as it is told."""

    ends: Any = ()

    def _result(self, input_ids: Any, sampling: SamplingParams) -> GenerationResult:
        return replace(super()._result(input_ids, sampling), finish_reason=self.ends[0], stop_reason=self.ends[1])

    def _pieces(self, index: int, result: GenerationResult) -> Iterator[Any]:
        *pieces, last = super()._pieces(index, result)
        yield from pieces
        yield replace(last, stop_reason=result.stop_reason)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(*table(__file__, "ends"))
def test_a_stop_reason_is_anthropics(tmp_path: Path, ends: str, reason: str, sequence: str, streams: bool) -> None:
    gateway, provider = make_gateway(tmp_path / "log.jsonl", [], start_parser=plain)
    gateway.provider = ending = Ending(provider._tokenizer, [PLAIN])
    ending.ends = json.loads(ends)
    with served(gateway) as address:
        agent = client(address, kind=anthropic.Anthropic)
        asking: Any = {"model": "toy", "max_tokens": 500, "messages": [ASK], "stop_sequences": ["degrees"]}
        if streams:
            with agent.messages.stream(**asking) as stream:
                message = stream.get_final_message()
        else:
            message = agent.messages.create(**asking)
    assert (message.stop_reason, message.stop_sequence or "") == (reason, sequence)
    assert message.content[0].text == "It rains in Oslo, and it is 7 "


def test_consecutive_messages_of_one_role_are_one() -> None:
    case = stored(__file__, "one")
    fields = MessagesApi().parse(case["body"].encode())
    assert fields.messages == json.loads(case["messages"])
    assert not fields.call.add_generation_prompt, "the last answer is continued"
