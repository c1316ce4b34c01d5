"""The same calls and the same sampled tokens for two managed servers: Atropos' and ours.

They stand in `tests/data/tables/managed.toml`. A scenario is plain data, so that a Python that has Atropos can
read it too: `calls`, each with `messages` or a `prompt`, and the `answers` that the model gives (`ids`,
`logprobs`, `finish`). In messages and prompts `{"answer": [call, choice]}` stands for what the client was given
for that call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from tests.scripted import END, Scripted, ids_of, spelled
from tests.tables import stored
from tests.world import TOY
from tito_audit import managed_server
from tito_audit.errors import TitoAuditError
from tito_audit.provider import GenerationResult

__all__ = ["SCENARIOS", "STORIES", "planned", "play", "played"]

_TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def _answer(text: str) -> dict[str, Any]:
    """A sampled answer."""
    marks, text = text[: len(text) - len(text.lstrip("~*!"))], text.lstrip("~*!")
    ids = [*(spelled(text) if "*" in marks else ids_of(text)), *(() if "~" in marks else ids_of(END))]
    logprobs = [-round(0.05 + (token * 37 + at * 53) % 200 / 100, 4) for at, token in enumerate(ids)]
    finish = "length" if "~" in marks else "stop"
    return {"ids": ids, "logprobs": logprobs[: len(ids) - ("!" in marks)], "finish": finish}


def _built(story: Mapping[str, Any]) -> dict[str, Any]:
    calls = []
    for call in story["calls"]:
        answers = [_answer(text) for text in call["says"]]
        parts = [
            {"answer": part} if isinstance(part, list) else part for part in call.get("ask", call.get("text"))
        ]
        if "text" in call:
            calls.append({"prompt": parts, "answers": answers})
            continue
        messages = [{"role": "user", "content": part} if isinstance(part, str) else part for part in parts]
        tools = {"tools": [_TOOL]} if "tools" in call else {}
        calls.append({"messages": messages, "answers": answers, **tools})
    return {"calls": calls, "tree": story.get("tree", False)}


STORIES: dict[str, Any] = {**stored("test_managed.py", "scenarios"), **stored("test_managed.py", "stories")}
SCENARIOS = {name: _built(story) for name, story in stored("test_managed.py", "scenarios").items()}
"""By name; docs/managed-server.md says of each what the two make of it."""


def planned(name: str) -> dict[str, Any]:
    """A scenario or a story as calls."""
    return _built(STORIES[name])


def played(scenario: Mapping[str, Any], **choices: Any) -> Any:
    """Ids, labels and logprobs of each node of our managed server; what it says where it refuses."""
    try:
        nodes, _ = asyncio.run(play(scenario, **choices))
    except TitoAuditError as error:
        return f"{type(error).__name__}: {error}"
    return [[node.tokens, node.masked_tokens, node.logprobs] for node in nodes]


async def play(scenario: Mapping[str, Any], **choices: Any) -> tuple[list[Any], Scripted]:
    """The nodes of our managed server, and its provider."""
    answers: list[Any] = []
    provider = Scripted(
        GenerationResult((), tuple(answer["ids"]), tuple(answer["logprobs"]), None, answer["finish"])
        for call in scenario["calls"]
        for answer in call["answers"]
    )

    def content_of(part: Any) -> Any:
        """What stands for a part: the text of an answer, or its message."""
        if not isinstance(part, dict) or "answer" not in part:
            return {"role": "assistant", "content": part["assistant"]} if "assistant" in part else part
        call, choice = part["answer"]
        answer = answers[call].choices[choice]
        if not hasattr(answer, "message"):
            return str(answer.text)
        return {"role": "assistant", "content": answer.message.content}

    async with managed_server(provider, TOY, track_tree=scenario["tree"], **choices) as managed:
        for call in scenario["calls"]:
            options = {"n": len(call["answers"]), **({"tools": call["tools"]} if "tools" in call else {})}
            parts = [content_of(part) for part in call.get("prompt", call.get("messages"))]
            ask = managed.completion(prompt="".join(parts), **options) if "prompt" in call else None
            answers.append(await (ask or managed.chat_completion(messages=parts, **options)))
        return managed.get_state()["nodes"], provider
