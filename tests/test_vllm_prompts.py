"""`rescore --prompts` with a real vLLM server: it has the prompts of its own logs, and finds others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.command import run, written
from tests.test_vllm_apis import APIS, SMALL, THINKS, WORDS, Talk, before
from tests.tiers import some
from tests.vllm.agent import FREE, HELD, LOOP, TOOLS, Agent, Row
from tests.vllm.claims import direct_log, served
from tests.vllm.server import VllmServer


def greedy(agent: Agent) -> Agent:
    return replace(agent, n=1, more={"temperature": 0.0})


AGENTS = (
    Agent(FREE, max_tokens=24, seed=1),
    Agent(LOOP, tools=TOOLS, seed=7, keeps_reasoning=True),
    Agent(HELD, tools=TOOLS, seed=5, keeps_reasoning=True, stream=True),
    greedy(Agent(LOOP, tools=TOOLS)),
    Agent(HELD, tools=TOOLS, seed=6, n=1),
)
CALLS = 6


def report_of(log: Path, server: VllmServer, *more: object, code: int = 0) -> Any:
    """The report, as JSON. The toy model's ids may look like another tokenizer's, see `scanned`."""
    words = ("--prompts", "--provider", f"vllm={server.url}", "-t", server.model, "--ignore", "REC007")
    result = run("rescore", log, *words, "-f", "json", *more)
    assert result[0] == code, result
    return json.loads(result[1])


def counts(report: Any) -> dict[str, tuple[int, int]]:
    return {each["question"]: (each["compared"], each["differing"]) for each in report["summary"]["questions"]}


def test_the_server_has_the_prompts_of_a_log_that_it_wrote(vllm_server: VllmServer, tmp_path: Path) -> None:
    # Adding up a stream, this client leaves out the ids.
    whole = [replace(agent, stream=False) for agent in some(AGENTS, 2)]
    agents = (greedy(Agent(FREE, max_tokens=24)), *whole)
    report = report_of(direct_log(vllm_server, tmp_path, agents), vllm_server)
    calls = CALLS * len(agents)
    assert counts(report)["sent as ids"] == counts(report)["sent as messages"] == (calls, 0)
    # Of the others, answers had a temperature or a grammar.
    assert counts(report)["replayed greedily"] == (CALLS, 0)
    assert report["summary"]["replayed"] == 8 * CALLS


def test_the_server_has_the_prompts_of_a_gateways_log_but_for_what_they_keep(
    vllm_server: VllmServer, tmp_path: Path
) -> None:
    agents = some(AGENTS, 4)
    log = served(vllm_server, tmp_path / "log", agents, *WORDS).log
    report = report_of(log, vllm_server)
    answers = sum(CALLS * agent.n for agent in agents)
    assert counts(report)["sent as ids"] == counts(report)["sent as messages"] == (answers, 0)
    assert counts(report)["replayed greedily"][1] == 0
    assert report["summary"]["spliced"] > 0


def test_the_server_has_the_prompts_that_each_api_leads_to(vllm_server: VllmServer, tmp_path: Path) -> None:
    """With reasoning, tool calls and results; the first call of a conversation is forced."""
    log = tmp_path / "log.jsonl"
    with before(vllm_server, log, *WORDS) as (process, _):
        for api in APIS:
            talk = Talk(api, process.address, api, SMALL)
            talk.turn("Is it warm in Oslo?", "look", 3000, {"seed": 1, **THINKS})
            talk.turn("It is 7 degrees.", None, 16, {"seed": 2, "temperature": 0.0})
            talk.turn("Sure?", None, 16, {"seed": 3, "temperature": 0.0})
    report = report_of(log, vllm_server)
    assert counts(report)["sent as ids"] == counts(report)["sent as messages"] == (9, 0)
    assert counts(report)["replayed greedily"] == (6, 0)


def test_a_log_of_another_template_differs_where_the_template_does(
    vllm_server: VllmServer, tmp_path: Path
) -> None:
    template = tmp_path / "other.jinja"
    own = (vllm_server.model / "chat_template.jinja").read_text()
    template.write_text(own.replace("These tools can be called:\\n", "Tools:\\n\\n"))
    agents = [Agent(LOOP, tools=TOOLS, n=1), Agent(FREE, n=1, max_tokens=16)]
    words = (*WORDS, "--chat-template", template)
    log = served(vllm_server, tmp_path / "log", agents, *words).log
    report = report_of(log, vllm_server, "--chat-template", template, code=1)
    assert counts(report)["sent as ids"] == (2 * CALLS, 0)
    first = [each for each in report["differences"] if each["row"] == 0 or each["turn"] == 0]
    assert {each["question"] for each in first} == {"sent as messages"}
    assert all("the server has another one" in each["what"] for each in first)
    text = "".join(vocabulary(vllm_server, each["server"]) for each in first)
    assert "These tools can be called" in text


def vocabulary(server: VllmServer, ids: Sequence[int]) -> str:
    import tokenizers

    loaded = tokenizers.Tokenizer.from_file(str(server.model / "tokenizer.json"))
    return loaded.decode(list(ids), skip_special_tokens=False)


def test_a_prompt_that_was_not_the_one_sampled_from_is_found_both_ways(
    vllm_server: VllmServer, tmp_path: Path
) -> None:
    """One id of each prompt in the log is another: the server writes it as it was, and answers it otherwise."""
    log = direct_log(vllm_server, tmp_path, [greedy(Agent(FREE, max_tokens=24))])
    rows: list[Row] = [json.loads(line) for line in log.read_bytes().splitlines()]
    place = 8
    for row in rows:
        ids = row["response"]["prompt_token_ids"]
        ids[place] = 300 if ids[place] != 300 else 301
    report = report_of(written(tmp_path / "altered.jsonl", rows), vllm_server, code=1)
    assert counts(report)["sent as ids"] == (CALLS, 0)
    compared, differing = counts(report)["replayed greedily"]
    assert compared == CALLS
    assert differing > CALLS / 2
    messages = [each for each in report["differences"] if each["question"] == "sent as messages"]
    assert {each["turn"] for each in messages} >= {0}
    assert all(each["start"] <= place < each["end"] for each in messages)
