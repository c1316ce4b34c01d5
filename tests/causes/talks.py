"""Conversations to put faults into: some of real rollouts, some made by hand."""

from __future__ import annotations

import copy
import gzip
import json
import re
from dataclasses import dataclass, field
from functools import cache
from itertools import islice

from tests.causes.families import SHARED, Messages, Tools
from tests.tables import stored

_ODD = re.compile(r"<\||<think|<tool|<start_of|<end_of|<eos|<bos|\ufffd|```json|^\s|\s$|[\u0300-\u036f]")
_LONGEST = 1500


@dataclass
class Talk:
    """Messages that a template can append to, and the tools they were sampled with."""

    name: str
    messages: Messages
    tools: Tools = field(default_factory=list)
    takes_tools: bool = False

    def copy(self) -> Talk:
        """One to be changed."""
        return copy.deepcopy(self)

    @property
    def answers(self) -> list[int]:
        """Where the answers stand."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]

    @property
    def system(self) -> str | None:
        """The system prompt."""
        return self.messages[0]["content"] if self.messages[0]["role"] == "system" else None


def _say(*texts: str, system: str | None = None) -> Messages:
    roles = ("user", "assistant")
    out = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return [{"role": "system", "content": system}, *out] if system else out


def _tool(name: str, **parameters: str) -> dict[str, object]:
    properties = {key: {"type": kind, "description": f"the {key}"} for key, kind in parameters.items()}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Use {name}.",
            "parameters": {"type": "object", "properties": properties, "required": [*parameters]},
        },
    }


TOOLS = [_tool("search", query="string", limit="integer"), _tool("weather", city="string"), _tool("clock")]


def by_hand() -> list[Talk]:
    """Conversations without tool calls."""
    counted = [
        f"Question {i}: what comes after number {i * 7}?"
        if i % 2 == 0
        else f"After number {(i - 1) * 7} comes {(i - 1) * 7 + 1}, of course."
        for i in range(10)
    ]
    texts = {**stored("causes", "TALKS"), "long": ["You count.", *counted]}
    return [Talk(name, _say(*said, system=system or None)) for name, (system, *said) in texts.items()]


def with_tools() -> list[Talk]:
    """Conversations in which tools are called."""

    def call(name: str, **arguments: object) -> dict[str, object]:
        return {"type": "function", "function": {"name": name, "arguments": arguments}}

    def asks(text: str, *calls: dict[str, object]) -> dict[str, object]:
        return {"role": "assistant", "content": text, "tool_calls": list(calls)}

    weather = [
        {"role": "system", "content": "You help travellers."},
        {"role": "user", "content": "Is it raining in Köln?"},
        asks("Let me look.", call("weather", city="Köln", days=2, hourly=False)),
        {"role": "tool", "content": '{"rain": true, "mm": 3.5}'},
        {"role": "assistant", "content": "Yes, it is raining in Köln."},
        {"role": "user", "content": "Find a café there."},
        asks("", call("search", query='café "Köln"', limit=3)),
        {"role": "tool", "content": "Café Schmitz"},
        {"role": "assistant", "content": "There is the Café Schmitz."},
    ]
    clock = [
        {"role": "user", "content": "What time is it?"},
        asks("", call("clock")),
        {"role": "tool", "content": "12:30"},
        {"role": "assistant", "content": "It is half past twelve."},
    ]
    return [Talk("weather", weather, TOOLS, True), Talk("clock", clock, TOOLS[1:], True)]


@cache
def sampled(count: int) -> list[Talk]:
    """Conversations of real rollouts whose texts hold nothing that is a fault by itself."""
    out: list[Talk] = []
    for model in ("qwen2.5-coder", "gemma-3", "smollm2"):
        with gzip.open(SHARED / "rollouts" / model / "tito.jsonl.gz", "rt", encoding="utf-8") as lines:
            for row in islice(filter(_usable, map(json.loads, lines)), count):
                messages = [{"role": m["role"], "content": m["content"]} for m in row["messages"]]
                out.append(Talk(row["id"], messages))
    return out


def _usable(row: dict[str, object]) -> bool:
    messages = row["messages"]
    assert isinstance(messages, list)
    roles = [m["role"] for m in messages if m["role"] != "system"]
    if len(roles) < 4 or roles != ["user", "assistant"] * (len(roles) // 2) or row["tools"]:
        return False
    texts = [m["content"] for m in messages]
    if not all(isinstance(text, str) and text and not _ODD.search(text) for text in texts):
        return False
    return sum(map(len, texts)) < _LONGEST
