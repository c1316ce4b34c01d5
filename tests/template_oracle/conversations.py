"""Conversations that templates are tried with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

Message = dict[str, Any]
Chat = list[Message]

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up a word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "The word."}},
            "required": ["word"],
        },
    },
}


def system() -> Message:
    return {"role": "system", "content": "You are a patient librarian."}


def user(number: int = 1) -> Message:
    return {"role": "user", "content": f"Question {number}, please?"}


def answer(number: int = 1, *, reasoning: bool = False, inline: bool = False) -> Message:
    """A plain answer; with reasoning in a field of its own, or inside of the text."""
    message: Message = {"role": "assistant", "content": f"Answer {number}, certainly."}
    thought = f"Thought {number} about it."
    if inline:
        message["content"] = f"<think>\n{thought}\n</think>\n\n{message['content']}"
    elif reasoning:
        message |= {"reasoning_content": thought}
    return message


def asking(number: int = 1, *, calls: int = 1, reasoning: bool = False, text: bool = False) -> Message:
    """An assistant message that calls the tool so many times."""
    called = [
        {
            "id": f"call{number:04}{index}",
            "type": "function",
            "function": {"name": "look_up", "arguments": {"word": f"word-{number}-{index}"}},
        }
        for index in range(calls)
    ]
    message = {"role": "assistant", "content": f"Looking, {number}." if text else "", "tool_calls": called}
    return message | ({"reasoning_content": f"Thought {number} about it."} if reasoning else {})


def result(number: int = 1, index: int = 0) -> Message:
    return {
        "role": "tool",
        "name": "look_up",
        "tool_call_id": f"call{number:04}{index}",
        "content": f"Result {number}-{index}.",
    }


def forms(chat: Chat) -> Iterator[Chat]:
    """The conversation as templates may want it: arguments as an object or as text, content missing or None."""
    yield chat
    if not any("tool_calls" in message for message in chat):
        return
    for empty in ("", None, "absent"):
        for parsed in (True, False):
            variant = [_form(message, empty, parsed) for message in chat]
            if variant != chat:
                yield variant


def _form(message: Mapping[str, Any], empty: str | None, parsed: bool) -> Message:
    if "tool_calls" not in message:
        return dict(message)
    calls = [
        {**call, "function": {**call["function"], "arguments": _arguments(call["function"]["arguments"], parsed)}}
        for call in message["tool_calls"]
    ]
    variant = {**message, "tool_calls": calls}
    if variant["content"] == "" and empty == "absent":
        del variant["content"]
    elif variant["content"] == "":
        variant["content"] = empty
    return variant


def _arguments(value: Any, parsed: bool) -> Any:
    return value if parsed else json.dumps(value)


STEPS: dict[str, tuple[Chat, Chat]] = {
    # What was said up to a sampled answer, and what comes next.
    "user after an answer": ([user(), answer()], [user(2)]),
    "user after a system prompt and an answer": ([system(), user(), answer()], [user(2)]),
    "user after two answers": ([user(), answer(), user(2), answer(2)], [user(3)]),
    "user after reasoning": ([user(), answer(reasoning=True)], [user(2)]),
    "user after reasoning in the text": ([user(), answer(inline=True)], [user(2)]),
    "user after reasoning twice": (
        [user(), answer(reasoning=True), user(2), answer(2, reasoning=True)],
        [user(3)],
    ),
    "user after a tool": ([user(), asking(), result(), answer()], [user(2)]),
    "user after a tool, with reasoning": (
        [user(), asking(reasoning=True), result(), answer(reasoning=True)],
        [user(2)],
    ),
    "tool after a call": ([user(), asking()], [result()]),
    "tool after a call with text": ([user(), asking(text=True)], [result()]),
    "tool after a call, with reasoning": ([user(), asking(reasoning=True)], [result()]),
    "tool after a second call": ([user(), asking(), result(), asking(2)], [result(2)]),
    "tool after a second call, with reasoning": (
        [user(), asking(reasoning=True), result(), asking(2, reasoning=True)],
        [result(2)],
    ),
    "tool after a call in a second exchange": ([user(), answer(), user(2), asking()], [result()]),
    "tool after a call in a second exchange, with reasoning": (
        [user(), answer(reasoning=True), user(2), asking(reasoning=True)],
        [result()],
    ),
    "tool after parallel calls": ([user(), asking(calls=2)], [result(), result(1, 1)]),
    "assistant after an answer": ([user(), answer()], [answer(2)]),
}
"""The steps from one call to the next, by name; the first word is the role of the message that comes."""
SYSTEM_STEPS: dict[str, tuple[Chat, Chat]] = {
    "system after an answer": ([user(), answer()], [system()]),
    "system and user after an answer": ([system(), user(), answer()], [system(), user(2)]),
    "user after a tool's result and no answer": ([user(), asking()], [result(), user(2)]),
    "two users after an answer": ([user(), answer()], [user(2), user(3)]),
}
"""Steps that few frameworks take."""
