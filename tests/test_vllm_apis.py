"""One agent by three APIs before a real vLLM, with the official packages; and calls that are forced."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.clients import Answer, Chat, Client, Messages, Responses
from tests.gateway.process import Process, gateway
from tests.recording_proxy import Proxy, recording
from tests.serving import check_chain, close_clients
from tests.tiers import crossed, examples
from tests.vllm.agent import FREE, LOOP, TOOLS, Row, Step
from tests.vllm.server import VllmServer
from tito_audit import Settings, scan_rollouts
from tito_audit.record.finding import Severity

SYSTEM = "You are a weather bot."
WORDS = ("--tool-parser", "hermes", "--reasoning-parser", "qwen3")


def small(name: str, about: str, **values: list[Any]) -> Row:
    """A function whose arguments even random weights finish."""
    properties = {key: {"enum": allowed} for key, allowed in values.items()}
    parameters = {"type": "object", "properties": properties, "required": list(values)}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


SMALL = (
    small("look", "Look up the weather", city=["Oslo", "Rome"], day=["today", "tomorrow"]),
    small("wait", "Wait", until=["noon", "night"]),
)
ALLOWED = {"look": {"city": {"Oslo", "Rome"}, "day": {"today", "tomorrow"}}, "wait": {"until": {"noon", "night"}}}
OPENS, CLOSES = 2005, 2006
THINKS = {"logit_bias": {str(OPENS): 40.0, str(CLOSES): 36.0}}
"""`<think>` and `</think>` made likely: random weights hardly ever begin to reason, or end it."""


APIS: Mapping[str, Callable[..., Client]] = {
    "chat": partial(Chat, keeps_reasoning=True),
    "responses": Responses,
    "messages": partial(Messages, thinks=True),
}


def chosen(api: str, name: str) -> Any:
    """A tool choice as an API has it."""
    if api == "messages":
        return {"type": "any"} if name == "required" else {"type": "tool", "name": name}
    named = {"name": name} if api == "responses" else {"function": {"name": name}}
    return name if name == "required" else {"type": "function", **named}


@dataclass(slots=True)
class Talk:
    """A conversation; each turn says a text, or gives it as the result of all calls of the answer before."""

    api: str
    address: str
    session: str
    tools: Sequence[Row] = TOOLS
    streams: bool = False
    history: list[Any] = field(default_factory=list)

    def turn(self, says: str, choice: str | None, limit: int, extra: Row) -> Sequence[tuple[str, Any]]:
        """The calls of the next answer: names and arguments."""
        agent = APIS[self.api](f"{self.address}/s/{self.session}", self.history)
        waits = self.history and isinstance(self.history[-1], Answer) and self.history[-1].calls
        self.history.append({"result" if waits else "user": says})
        functions = [tool["function"] for tool in self.tools]
        tools: Any = {
            "chat": self.tools,
            "responses": [{"type": "function", **function} for function in functions],
            "messages": [
                {
                    "name": function["name"],
                    "description": function["description"],
                    "input_schema": function["parameters"],
                }
                for function in functions
            ],
        }
        answer = agent.ask(
            self.streams,
            system=SYSTEM,
            model="tiny",
            tools=tools[self.api],
            max_tokens=limit,
            timeout=600,
            extra_body={"temperature": 1.0, **extra},
            **({} if choice is None else {"tool_choice": chosen(self.api, choice)}),
        )
        return [(name, arguments) for name, arguments in answer.says["calls"]]


@contextmanager
def before(server: VllmServer, log: Path, *words: object) -> Iterator[tuple[Process, Proxy]]:
    """A gateway, and what it asks the server."""
    with recording(server.url) as proxy, gateway(f"vllm={proxy.url}", server.model, log, *words) as process:
        yield process, proxy
        close_clients()
        assert process.stop() == 0


def sessions_of(log: Path, proxy: Proxy) -> dict[str, list[Row]]:
    """The lines of a log by session, once it is known that they hold what the server was sent and sampled."""
    lines = [json.loads(line) for line in log.read_bytes().splitlines()]
    answers = [
        (choice["prompt_token_ids"], choice["token_ids"], choice["logprobs"])
        for exchange in proxy.sampled
        for choice in exchange.choices
    ]
    assert answers == [
        (line["prompt_token_ids"], line["completion_token_ids"], line["logprobs"]) for line in lines
    ]
    sessions = defaultdict(list)
    for line in lines:
        sessions[line["session_id"]].append(line)
    return sessions


def clean(log: Path, server: VllmServer) -> None:
    """A scan finds no error and no warning; of REC007 see `scanned`."""
    settings = Settings(tokenizer=str(server.model), ignore=("REC007",))
    results = list(scan_rollouts(log, settings))
    assert results
    assert [
        finding for result in results for finding in result.findings if finding.severity is not Severity.NOTE
    ] == []


@pytest.mark.parametrize(("kind", "streams"), crossed(["tools", "free"], [False, True]))
def test_an_agent_at_a_seed_samples_the_same_ids_by_each_api(
    vllm_server: VllmServer, tmp_path: Path, kind: str, streams: bool
) -> None:
    log = tmp_path / "log.jsonl"
    steps: Sequence[Step] = LOOP if kind == "tools" else FREE
    seeds = range(examples(1, 5))
    answers = defaultdict(list)
    with before(vllm_server, log, *WORDS) as (process, proxy):
        for api in APIS:
            for seed in seeds:
                talk = Talk(api, process.address, f"{api}-{seed}", streams=streams)
                for number, step in enumerate(steps):
                    constraint = {"structured_outputs": {"regex": step.form}} if step.form is not None else {}
                    extra = {"seed": 100 * seed + number, **constraint}
                    answers[api].append(talk.turn(step.says, None, 160 if constraint else 24, extra))
    sessions = sessions_of(log, proxy)
    assert answers["chat"] == answers["responses"] == answers["messages"]
    for seed in seeds:
        ids = [
            [(line["prompt_token_ids"], line["completion_token_ids"]) for line in sessions[f"{api}-{seed}"]]
            for api in APIS
        ]
        assert len(ids[0]) == len(steps)
        assert ids[0] == ids[1] == ids[2]
        branches = [[line["branch"] for line in sessions[f"{api}-{seed}"]] for api in APIS]
        assert branches[0] == branches[1] == branches[2]
    if kind == "tools":
        assert sum(map(len, answers["chat"])) == 6 * len(seeds)
        for lines in sessions.values():
            check_chain(lines)
    clean(log, vllm_server)


FORCED: Mapping[str, tuple[Sequence[str], Row]] = {
    "after a thought": (WORDS, THINKS),
    "at once": (("--tool-parser", "hermes", "--reasoning-parser", "none"), {}),
    "as XML": (("--tool-parser", "qwen3_coder", "--reasoning-parser", "none"), {}),
    "as one object": (("--tool-parser", "llama3_json", "--reasoning-parser", "none"), {}),
    "as a list": (("--tool-parser", "pythonic", "--reasoning-parser", "none"), {}),
}


@pytest.mark.parametrize(("how", "choice"), crossed(list(FORCED), ["look", "required"]))
def test_a_forced_call_is_parsed_each_time_and_the_next_prompt_continues_it(
    vllm_server: VllmServer, tmp_path: Path, how: str, choice: str
) -> None:
    words, more = FORCED[how]
    log = tmp_path / "log.jsonl"
    tries = examples(3, 50 if how in ("after a thought", "at once") else 12)
    with before(vllm_server, log, *words) as (process, proxy):
        for number in range(tries):
            api = list(APIS)[number % 3]
            talk = Talk(api, process.address, f"{api}-{number}", SMALL, streams=number % 2 == 1)
            calls = talk.turn("Is it warm in Oslo?", choice, 3000, {"seed": number, **more})
            assert len(calls) == 1 or (calls and choice == "required"), number
            for name, arguments in calls:
                assert choice in (name, "required")
                assert arguments.keys() == ALLOWED[name].keys()
                # The grammar of XML allows white space around a value.
                assert all(value.strip() in ALLOWED[name][key] for key, value in arguments.items())
            talk.turn("It is 7 degrees.", None, 16, {"seed": number})
    sessions = sessions_of(log, proxy)
    assert len(sessions) == tries
    for lines in sessions.values():
        assert len(lines) == 2
        check_chain(lines)
        assert lines[0]["finish_reason"] == "tool_calls"
        assert lines[0]["forced"]["syntax"] == ("json" if how == "as a list" else "template")
        ids = lines[0]["completion_token_ids"]
        assert (ids[0] == OPENS and CLOSES in ids) == (how == "after a thought")
    clean(log, vllm_server)
