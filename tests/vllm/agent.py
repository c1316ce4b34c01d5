"""An agent as users write one, with the `openai` client: tools, six turns, two answers a turn.

It knows a `base_url`, and nothing of what is behind it.

A grammar holds the answers of a model of random weights to thoughts and tool calls, spaced as models space them;
free answers are whatever it samples.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import openai

from tests.gateway.clients import add_delta
from tests.tables import stored

Row = dict[str, Any]

_FIELDS = {"city": {"type": "string"}, "celsius": {"type": "boolean"}}
_TAKES = {"type": "object", "properties": _FIELDS, "required": ["city"]}
_WEATHER = {"name": "get_weather", "description": "The weather", "parameters": _TAKES}
TOOLS: tuple[Row, ...] = ({"type": "function", "function": _WEATHER},)


@dataclass(frozen=True, slots=True)
class Step:
    """One turn: what the agent says to the model, and the form of what the model says."""

    says: str
    form: str | None = None
    """A regex; None: anything."""


HELD, LOOP = (tuple(Step(*step) for step in stored("vllm.py", name)["steps"]) for name in ("held", "loop"))
FREE = tuple(Step(text) for text in ("Say it.", "Again?", "In French.", "Why  so?", "More 🙂", "Bye."))


@dataclass(frozen=True, slots=True)
class Agent:
    """One conversation of an agent. Each turn continues one of the two answers of the turn before."""

    steps: Sequence[Step]
    system: str = "You are a weather bot."
    n: int = 2
    max_tokens: int = 160
    tools: Sequence[Row] = ()
    keeps_reasoning: bool = False
    stream: bool = False
    seed: int = 0
    more: Mapping[str, Any] = field(default_factory=dict)
    """Fields of each request that the `openai` client does not know."""

    async def run(self, base_url: str, model: str = "tiny", headers: Mapping[str, str] | None = None) -> list[Row]:
        """A row for each call: the request, and the response as the client got it."""
        rows: list[Row] = []
        client = openai.AsyncOpenAI(base_url=base_url, api_key="none", default_headers=headers, max_retries=0)
        async with client:
            messages: list[Row] = [{"role": "system", "content": self.system}]
            waits: list[str] = []
            for turn, step in enumerate(self.steps):
                messages = [*messages, *_says(step, waits)]
                request = self._request(model, turn, step, messages)
                response = await _answered(client, request, stream=self.stream)
                rows.append({"request": request, "response": response})
                answer = response["choices"][turn % self.n]["message"]
                waits = [call["id"] for call in answer.get("tool_calls") or ()]
                messages = [*messages, self._sent_back(answer)]
        return rows

    def _request(self, model: str, turn: int, step: Step, messages: list[Row]) -> Row:
        forced = {"structured_outputs": {"regex": step.form}} if step.form is not None else {}
        tools = {"tools": list(self.tools), "tool_choice": "auto"} if self.tools else {}
        return {
            "model": model,
            "messages": messages,
            "temperature": 1.0,
            "n": self.n,
            "seed": self.seed + turn,
            "max_tokens": self.max_tokens,
            "logprobs": True,
            **tools,
            **forced,
            **self.more,
        }

    def _sent_back(self, answer: Row) -> Row:
        names = ("content", "tool_calls", *(("reasoning", "reasoning_content") if self.keeps_reasoning else ()))
        return {"role": "assistant", "content": None} | {
            name: answer[name] for name in names if answer.get(name) is not None
        }


def _says(step: Step, waits: Sequence[str]) -> list[Row]:
    if not waits:
        return [{"role": "user", "content": step.says}]
    return [{"role": "tool", "tool_call_id": call, "content": step.says} for call in waits]


_OWN = ("structured_outputs", "return_token_ids", "chat_template_kwargs", "session_id", "stop_token_ids", "top_k")
"""Fields that the client sends only as `extra_body`."""


async def _answered(client: openai.AsyncOpenAI, request: Row, *, stream: bool) -> Row:
    extra = {name: request[name] for name in _OWN if name in request}
    own = {name: value for name, value in request.items() if name not in _OWN}
    if not stream:
        answer = await client.chat.completions.with_raw_response.create(**own, extra_body=extra)
        return json.loads(answer.text)
    chunks = await client.chat.completions.create(**own, stream=True, extra_body=extra)
    return joined([chunk.model_dump() async for chunk in chunks])


def joined(chunks: Sequence[Row]) -> Row:
    """The response that the chunks of a stream add up to, as a client adds them up."""
    choices: dict[int, Row] = {}
    for part in (part for chunk in chunks for part in chunk["choices"]):
        choice = choices.setdefault(part["index"], {"index": part["index"], "message": {"role": "assistant"}})
        add_delta(choice["message"], {name: value for name, value in part["delta"].items() if value is not None})
        choice["finish_reason"] = part.get("finish_reason") or choice.get("finish_reason")
    return {"id": chunks[0]["id"], "model": chunks[0]["model"], "choices": [choices[at] for at in sorted(choices)]}


async def run_all(agents: Sequence[Agent], base_url: str, *, at_once: bool = True) -> list[list[Row]]:
    """The rows of each agent; all run at once, or one after the other."""
    if not at_once:
        return [await agent.run(base_url) for agent in agents]
    return list(await asyncio.gather(*(agent.run(base_url) for agent in agents)))
