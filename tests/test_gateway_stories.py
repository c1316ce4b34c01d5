"""Stories that every client of the gateway tells alike; they stand in `tests/data/tables/gateway_stories.toml`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests import serving
from tests.gateway.clients import CLIENTS, Answer, Client
from tests.serving import Scripted, check_chain, codes_of, hermes, logged, make_gateway, plain, served, until
from tests.tables import stored
from tito_audit.errors import ProviderError

STORIES = {story["name"]: story for story in stored(__file__, "stories")}
TEXTS = {**vars(serving), "CALLED": serving.CALL.removesuffix("<|im_end|>")}


def sampled(answer: Any) -> Any:
    """What the upstream says or fails with."""
    if isinstance(answer, str):
        return answer.format_map(TEXTS)
    error = ProviderError(answer["error"], status=answer.get("status"))
    error.__cause__ = TimeoutError() if "late" in answer else None
    return error


def of(row: Mapping[str, Any], path: str) -> Any:
    for name in path.split("."):
        row = row[name]
    return row


def tell(
    step: Mapping[str, Any], agent: Client, provider: Scripted, log: Path, streams: bool, fields: Any
) -> None:
    """One step of a story: what the client sends, and that it is answered so."""
    agent.history += [{who: step[who]} for who in ("user", "result", "assistant") if who in step]
    provider.stays_after, provider.fails_after = step.get("stays_after"), step.get("fails_after")
    size = log.stat().st_size
    if "leaves" in step:
        closed, stream = provider.closed_early, agent.stream(tools=agent.tools, **fields)
        for _ in range(step["leaves"]):
            next(iter(stream))
        stream.close()
        until(lambda: provider.closed_early == closed + 1 and log.stat().st_size > size)
    elif "error" in step:
        with pytest.raises((openai.APIError, anthropic.APIStatusError), match=step["error"]) as raised:
            agent.ask(streams, **fields)
        agent.check_error(raised.value, step["status"], broken="fails_after" in step)
    else:
        says = agent.ask(streams, **fields).says
        expected = dict(step.get("says", {}))
        if not agent.shows_reasoning:
            expected.pop("reasoning", None)
            assert says["reasoning"] == ""
        assert {name: says[name] for name in expected} == expected


def check_rows(rows: list[Any], agent: Client, provider: Scripted, before: int) -> None:
    """The log has what was sent to the upstream and sampled there, and what each client was answered."""
    calls_made = zip(rows, provider.prompts[before:], provider.sampled[before:], strict=True)
    for row, prompt, output in calls_made:
        ids = tuple(row["completion_token_ids"])
        assert tuple(row["prompt_token_ids"]) == prompt
        assert 0 < len(ids) <= len(output)
        assert ids == (output if row["status"] == "answered" else output[: len(ids)])
        assert len(row["logprobs"]) == len(ids)
        assert row["tools"] == serving.TOOLS
    answers = [turn for turn in agent.history if isinstance(turn, Answer)]
    for row, answer in zip([row for row in rows if row["status"] == "answered"], answers, strict=True):
        logged_message = row["response_message"]
        assert (row["call_id"], row["endpoint"]) == (answer.id, answer.api)
        assert answer.usage == (len(row["prompt_token_ids"]), len(row["completion_token_ids"]))
        assert (logged_message["content"] or "") == answer.says["text"]
        assert answer.says["reasoning"] in (logged_message.get("reasoning_content", ""), "")
        calls = logged_message.get("tool_calls", ())
        assert [call["id"] for call in calls] == [call["id"] for call in answer.calls]
    if agent.api != "chat.completions" and agent.shows_reasoning and answers:
        sent_back = [message for message in rows[-1]["messages"] if message["role"] == "assistant"]
        for row, message in zip(rows, sent_back, strict=False):
            names = ("content", "reasoning_content")
            assert [row["response_message"].get(name) for name in names] == [message.get(name) for name in names]
    roles = [message["role"] for message in rows[-1]["messages"] if message["role"] != "system"] if rows else []
    calls, expected = 0, []
    for turn in agent.history[:-1]:
        answered = isinstance(turn, Answer)
        own = ["assistant"] if answered else ["tool"] * calls if "result" in turn else list(turn)
        expected += [] if own == expected[-1:] == ["assistant"] else own
        calls = len(turn.calls) if answered else 0
    assert roles == expected[: len(roles)]


@pytest.mark.parametrize("name", STORIES)
def test_clients_of_every_api_are_told_and_logged_alike(name: str, tmp_path: Path) -> None:
    story, log = STORIES[name], tmp_path / "log.jsonl"
    ways = [
        (who, streams) for who in story.get("clients", CLIENTS) for streams in story.get("streams", (False, True))
    ]
    answers = [sampled(answer) for answer in story["answers"]]
    parser = plain if story.get("parser") == "plain" else hermes
    gateway, provider = make_gateway(log, answers * len(ways), start_parser=parser)
    answers_of: dict[str, list[Any]] = {}
    with served(gateway) as address:
        for who, streams in ways:
            # Sessions are named where answers are streamed, else found by their history.
            where = f"{address}/s/{who.replace(' ', '')}" if streams else address
            history: list[Any] = []
            agents = [CLIENTS[name_of_client](where, history) for name_of_client in who.split(" & ")]
            before, seen = len(provider.prompts), len(logged(log))
            for number, step in enumerate(story["steps"]):
                own = {"user": f"{step['user']} {who}"} if "user" in step and not number else {}
                agent = agents[number % len(agents)]
                tell({**step, **own}, agent, provider, log, streams, story.get("fields", {}))
            rows = logged(log)[seen:]
            if "rows" not in story:
                check_chain(rows)
            for path, values in story.get("rows", {}).items():
                assert [of(row, path) for row in rows] == values, (who, path)
            if story.get("rows") == {}:
                assert rows == []
            else:
                check_rows(rows, agents[0], provider, before)
            if system := story.get("fields", {}).get("system"):
                assert rows[0]["messages"][0] == {"role": "system", "content": system}
            answers_of.setdefault(who, []).append([turn.says for turn in history if isinstance(turn, Answer)])
    for whole, *others in answers_of.values():
        assert others == [whole] * len(others)
    assert codes_of(log) == story.get("codes", [])
