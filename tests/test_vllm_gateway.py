"""The same agents before vLLM and before the gateway; only their base_url differs, and what is left behind.

Sampled for real: the log is compared with what a proxy between gateway and server kept of the server's answers.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.command import run
from tests.gateway.process import gateway
from tests.tiers import DEEP, examples
from tests.vllm.agent import FREE, HELD, LOOP, TOOLS, Agent, Row
from tests.vllm.ask import asked, running, sampled, until
from tests.vllm.claims import Served, direct_log, scanned, served
from tests.vllm.server import OTHER_ENGINE, SAME_ENGINE, VllmServer

PARSED = ("--tool-parser", "hermes", "--reasoning-parser", "qwen3")
_MANY = examples(1, 3)
_ENDLESS = 3500
"""Tokens that nobody waits for."""
AGENTS: Mapping[str, Sequence[Agent]] = {
    "tools": [Agent(LOOP, tools=TOOLS, keeps_reasoning=True, seed=10 * number) for number in range(_MANY)],
    "questions": [Agent(HELD, tools=TOOLS, seed=10 * number) for number in range(_MANY)],
    "free": [Agent(FREE, max_tokens=24, seed=10 * number) for number in range(_MANY)],
}
"""A tool loop whose reasoning is sent back; questions between which it is dropped; whatever the model says."""
WORDS = {"tools": PARSED, "questions": PARSED, "free": ("--tool-parser", "none", "--reasoning-parser", "none")}
KINDS = pytest.mark.parametrize("kind", list(AGENTS))


@pytest.fixture(scope="module")
def runs(vllm_server: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Served]:
    """What the gateway left behind of each kind of agent."""
    return {
        kind: served(vllm_server, tmp_path_factory.mktemp(kind), agents, *WORDS[kind])
        for kind, agents in AGENTS.items()
    }


@KINDS
def test_the_direct_log_has_prefix_breaks_and_that_of_the_gateway_has_none(
    vllm_server: VllmServer, runs: dict[str, Served], tmp_path: Path, kind: str
) -> None:
    code, errors = scanned(direct_log(vllm_server, tmp_path, AGENTS[kind]), vllm_server)
    assert code == 1
    turns = sum(len(agent.steps) - 1 for agent in AGENTS[kind])
    broken = errors["SEQ301"] + errors["SEQ302"] + errors["SEQ303"]
    assert 0 < broken <= turns, "tokens as they are sampled are hardly ever those of their text"
    assert scanned(runs[kind].log, vllm_server) == (0, Counter())


@KINDS
def test_the_log_holds_what_the_server_sampled_to_the_token_and_nothing_else(
    runs: dict[str, Served], kind: str
) -> None:
    logged = [
        (line["prompt_token_ids"], line["completion_token_ids"], line["logprobs"]) for line in runs[kind].lines
    ]
    answers = [
        (choice["prompt_token_ids"], choice["token_ids"], choice["logprobs"])
        for exchange in runs[kind].sampled
        for choice in exchange.choices
    ]
    assert sorted(logged) == sorted(answers)
    assert all(
        exchange.request["prompt"] == exchange.choices[0]["prompt_token_ids"] for exchange in runs[kind].sampled
    )
    assert len(logged) == sum(2 * len(agent.steps) for agent in AGENTS[kind])


@KINDS
def test_every_answer_that_an_agent_got_is_in_the_log_as_it_got_it(runs: dict[str, Served], kind: str) -> None:
    lines = {(line["call_id"], line["choice"]): line for line in runs[kind].lines}
    got = {
        (call["response"]["id"], choice["index"]): (call["request"], choice)
        for calls in runs[kind].calls
        for call in calls
        for choice in call["response"]["choices"]
    }
    assert lines.keys() == got.keys()
    for key, (request, choice) in got.items():
        line = lines[key]
        assert line["messages"] == request["messages"]
        assert line["status"] == "answered"
        assert line["finish_reason"] == choice["finish_reason"]
        assert {**line["response_message"], "refusal": None} == {**choice["message"], "refusal": None}
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == line["logprobs"]


@KINDS
def test_a_prompt_begins_with_the_answer_that_it_continues(runs: dict[str, Served], kind: str) -> None:
    lines = {(line["call_id"], line["choice"]): line for line in runs[kind].lines}
    for line in lines.values():
        if line["branch"] == "continues":
            parent = lines[line["parent"]["call_id"], line["parent"]["choice"]]
            seen = parent["prompt_token_ids"] + parent["completion_token_ids"]
            assert line["prompt_token_ids"][: line["kept"]] == seen
        else:
            assert (line["parent"], line["kept"]) == (None, 0)


def test_a_prompt_continues_wherever_the_template_keeps_what_was_parts(runs: dict[str, Served]) -> None:
    assert _branches(runs["tools"]) == [["start", *["continues"] * 5]] * _MANY
    # The template drops the reasoning of earlier questions: a fork, and the log says why. The last has none.
    assert (
        _branches(runs["questions"]) == [["start", "continues", "fork", "continues", "fork", "continues"]] * _MANY
    )
    forks = [line["fork"]["reason"] for line in runs["questions"].lines if line["fork"]]
    assert set(forks) == {"template_rewrites"}


def test_free_answers_are_continued_but_for_those_that_the_template_cuts(runs: dict[str, Served]) -> None:
    continued = 0
    for branches, calls in zip(_branches(runs["free"]), runs["free"].calls, strict=True):
        assert branches[0] == "start"
        for branch, call in zip(branches[1:], calls[1:], strict=True):
            answers = [
                message["content"] for message in call["request"]["messages"] if message["role"] == "assistant"
            ]
            # What comes before it is reasoning to the toy template, and dropped once it is history.
            cut = "</think>" in answers[-1]
            assert branch == ("fork" if cut else "continues"), answers[-1]
            continued += not cut
    assert continued > 0


def _branches(run: Served) -> list[list[str]]:
    """The branches of each agent's calls in order."""
    branch = {line["call_id"]: line["branch"] for line in run.lines}
    return [[branch[call["response"]["id"]] for call in calls] for calls in run.calls]


@pytest.mark.skipif(not DEEP, reason="make vllm")
@pytest.mark.parametrize("kind", ["tools", "questions"])
def test_a_stream_adds_up_to_the_answer_that_is_not_streamed(
    vllm_server: VllmServer, tmp_path: Path, kind: str
) -> None:
    streaming = [replace(agent, stream=True) for agent in AGENTS[kind]]
    streamed = served(vllm_server, tmp_path / "streamed", streaming, *WORDS[kind], at_once=False)
    whole = served(vllm_server, tmp_path / "whole", AGENTS[kind], *WORDS[kind], at_once=False)
    assert scanned(streamed.log, vllm_server) == (0, Counter())
    assert _heard(streamed.calls) == _heard(whole.calls)
    assert [line["completion_token_ids"] for line in streamed.lines] != []
    by_ids = [sorted(line["completion_token_ids"] for line in run.lines) for run in (streamed, whole)]
    assert by_ids[0] == by_ids[1]


def _heard(conversations: Sequence[Sequence[Row]]) -> list[Any]:
    """What agents were told, without the ids of calls, which are made up."""
    return [
        (_parts(choice["message"]), choice["finish_reason"])
        for calls in conversations
        for call in calls
        for choice in call["response"]["choices"]
    ]


def _parts(message: Row) -> tuple[str, str, list[tuple[str, str]]]:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    named = [(call["name"], call["arguments"]) for call in calls]
    return message.get("reasoning") or "", message.get("content") or "", named


@pytest.mark.parametrize("kind", ["tools", "questions"])
def test_prompts_that_are_rendered_are_those_that_the_server_would_render(
    vllm_server: VllmServer, runs: dict[str, Served], kind: str
) -> None:
    rendered = [line for line in runs[kind].lines if line["branch"] != "continues" and line["choice"] == 0]
    assert len(rendered) >= _MANY
    for line in rendered:
        body = {"model": "tiny", "messages": line["messages"], "tools": line["tools"]}
        theirs = asyncio.run(asked(vllm_server, "/v1/chat/completions/render", body))
        assert line["prompt_token_ids"] == theirs["token_ids"]


@pytest.mark.parametrize("kind", ["tools", "questions"])
def test_answers_are_parsed_as_the_server_parses_the_same_ids(
    vllm_server: VllmServer, runs: dict[str, Served], kind: str
) -> None:
    parsed = 0
    for line in runs[kind].lines:
        theirs = asyncio.run(_derendered(vllm_server, line))
        ours = line["response_message"]
        reasoning, content, calls = _meant(theirs)
        if not _meant(ours)[0]:  # The answer opened no reasoning: to the server it is some all the same.
            reasoning, content = "", reasoning + content
        assert _meant(ours) == (reasoning, content, calls), (ours, theirs)
        parsed += len(ours.get("tool_calls") or ())
    assert parsed >= 4 * _MANY


async def _derendered(server: VllmServer, line: Row) -> Row:
    """The message that the server's own parsers make of sampled ids."""
    choice = {
        "index": 0,
        "token_ids": line["completion_token_ids"],
        "finish_reason": "stop",
        "logprobs": None,
    }
    request = {"model": "tiny", "messages": line["messages"], "tools": line["tools"], "tool_choice": "auto"}
    body = {
        "model": "tiny",
        "generate_response": {"request_id": "r", "choices": [choice]},
        "chat_request": request,
        "prompt_token_ids": line["prompt_token_ids"],
    }
    answer = await asked(server, "/v1/chat/completions/derender", body)
    return answer["choices"][0]["message"]


def _meant(message: Row) -> Any:
    """What a message says; of arguments their value, as the server writes them anew."""
    reasoning, content, calls = _parts(message)
    return reasoning, content, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_the_generation(
    vllm_server: VllmServer, tmp_path: Path, stream: bool
) -> None:
    log = tmp_path / "calls.jsonl"

    async def leaves(url: str, before: int) -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            answering = asyncio.Event()
            task = asyncio.create_task(_endless(client, answering, stream=stream))
            if stream:
                await answering.wait()
            else:
                await until(lambda: sampled(vllm_server) > before or task.done())
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await until(lambda: running(vllm_server) == 0)

    cut = False
    with gateway(f"vllm={vllm_server.url}", vllm_server.model, log, *WORDS["free"]) as process:
        # A server that samples faster than it answers may be done before the client hears of it.
        for _ in range(5):
            before = sampled(vllm_server)
            asyncio.run(leaves(process.address, before))
            cut = 0 < sampled(vllm_server) - before < _ENDLESS
            if cut:
                break
        assert process.stop() == 0
    assert cut
    lines = [json.loads(line) for line in log.read_bytes().splitlines()]
    assert {line["status"] for line in lines} <= {"client_gone", "answered"}
    assert scanned(log, vllm_server) == (0, Counter())


async def _endless(client: openai.AsyncOpenAI, answering: asyncio.Event, *, stream: bool) -> None:
    """A request for many tokens; the event says that the first have come."""
    answer = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Never stop."}],
        max_tokens=_ENDLESS,
        stream=stream,
        extra_body={"ignore_eos": True},
    )
    if stream:
        async for _ in answer:
            answering.set()


def test_an_error_of_the_server_reaches_the_client_with_its_status(
    vllm_server: VllmServer, tmp_path: Path
) -> None:
    log = tmp_path / "calls.jsonl"
    with gateway(f"vllm={vllm_server.url}", vllm_server.model, log) as process:
        client = openai.OpenAI(base_url=f"{process.address}/v1", api_key="none", max_retries=0)
        with client, pytest.raises(openai.BadRequestError, match="4096"):
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x y " * 4000}])
    assert log.read_bytes() == b""


@pytest.mark.parametrize("provider", ["hf", "vllm"])
def test_the_model_says_what_the_gateway_logged(
    vllm_server: VllmServer, runs: dict[str, Served], provider: str
) -> None:
    import torch

    torch.set_num_threads(1)
    where = f"hf={vllm_server.model}" if provider == "hf" else f"vllm={vllm_server.url}"
    code, summary = _rescored(runs["free"].log, where, vllm_server)
    assert code == 0
    tokens = sum(len(line["completion_token_ids"]) for line in runs["free"].lines)
    assert summary["scored_tokens"] == summary["agreement"]["tokens"] == tokens
    assert summary["agreement"]["largest"] <= (OTHER_ENGINE if provider == "hf" else SAME_ENGINE)


def test_drift_of_a_direct_log_has_a_price(vllm_server: VllmServer, tmp_path: Path) -> None:
    log = direct_log(vllm_server, tmp_path, AGENTS["free"])
    code, summary = _rescored(log, f"vllm={vllm_server.url}", vllm_server)
    assert code == 0, "what was sampled is what the log says; only what is sent back is not"
    prices = {cause["code"]: cause for cause in summary["causes"]}
    assert prices["SEQ301"]["segments"] > 0
    assert prices["SEQ301"]["behind"]["size"] > 0.1, "later tokens are less likely, or more, after other ids"


@pytest.mark.skipif(not DEEP, reason="make vllm")
def test_logprobs_under_a_grammar_are_not_those_of_the_model(
    vllm_server: VllmServer, runs: dict[str, Served]
) -> None:
    code, summary = _rescored(runs["tools"].log, f"vllm={vllm_server.url}", vllm_server)
    assert code == 1
    assert summary["agreement"]["mean"] < -1, "the server counts only what the grammar allows"


def _rescored(log: Path, provider: str, server: VllmServer) -> tuple[int, Row]:
    """The exit code of `rescore`, and its summary."""
    code, out, err = run("rescore", log, "--provider", provider, "-t", server.model, "--report", "json")
    assert out, err
    return code, json.loads(out)["summary"]
