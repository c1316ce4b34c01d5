"""The lines of the log: one for each answer, and one for the end of a session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

from tito_audit.record.message import Message
from tito_audit.record.prompt_ids import PromptIds
from tito_audit.serve.request import Asked, ChatAsked, TextAsked
from tito_audit.sessions.model import Prompt

VERSION = 1


class Status(StrEnum):
    """What became of an answer."""

    ANSWERED = "answered"
    CLIENT_GONE = "client_gone"
    """The client left while it was being sampled. The line holds what was sampled until then; no later prompt
    continues it.
    """
    BROKEN_OFF = "broken_off"
    """The provider failed while it was being sampled; the same holds."""
    DUMMY = "dummy"
    """Its ids are placeholders, never sampled."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One answer, as sampled and as the client got it."""

    choice: int
    thread_id: str
    message: Mapping[str, Any]
    """In OpenAI chat form; `{"text": …}` for a completion."""
    ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str | None
    stop_reason: str | int | None = None
    weight_version: str | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """What all lines of one call share."""

    session_id: str
    call_id: str
    created: float
    model: str
    asked: Asked
    prompt: Prompt
    prompt_ids: PromptIds
    """`[P]`"""
    status: Status = Status.ANSWERED


def answer_lines(call: Answered, answers: Sequence[Sampled]) -> list[dict[str, Any]]:
    """One line for each answer of a call."""
    prompt = call.prompt
    parent, fork = prompt.parent, prompt.fork
    said: dict[str, Any] = {
        "parent": None if parent is None else {"call_id": parent.call_id, "choice": parent.choice},
        "branch": prompt.branch,
        "fork": None if fork is None else {"reason": fork.reason, "detail": fork.detail, "message": fork.message},
        "kept": prompt.kept,
        "proof": prompt.proof,
    }
    shared = {
        **(
            {
                "tito_audit_gateway": VERSION,
                "session_id": call.session_id,
                "call_id": call.call_id,
                "thread_id": "",
                "choice": 0,
                "n": call.asked.sampling.n,
            }
        ),
        **({**said, "alike": prompt.alike} if prompt.alike else said),
        **_request(call),
    }
    return [
        {
            **shared,
            "thread_id": one.thread_id,
            "choice": one.choice,
            "weight_version": one.weight_version,
            "response_message": one.message if "role" in one.message else None,
            **({"text": one.message["text"]} if "text" in one.message else {}),
            "prompt_token_ids": orjson.Fragment(call.prompt_ids.json),
            "completion_token_ids": one.ids,
            "logprobs": one.logprobs,
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
            "status": call.status,
        }
        for one in answers
    ]


def closed_line(session_id: str, now: float, reward: float | None) -> dict[str, Any]:
    """The line that ends a session."""
    return {"tito_audit_gateway": VERSION, "session_id": session_id, "closed": now, "reward": reward}


def _request(call: Answered) -> dict[str, Any]:
    asked = call.asked
    said: dict[str, Any] = {
        "endpoint": "chat.completions" if isinstance(asked, ChatAsked) else "completions",
        "model": call.model,
        "created": call.created,
        "weight_version": None,
        "sampling": asked.told,
    }
    if isinstance(asked, ChatAsked):
        said |= {
            "chat_template_kwargs": asked.call.template_kwargs,
            "tools": list(asked.call.tools),
            "messages": asked.messages,
        }
        given = _given_to_template(asked.call.messages, call.prompt)
        return said if given is None else {**said, "template_messages": given}
    if isinstance(asked, TextAsked) and isinstance(asked.prompt, str):
        said["prompt"] = asked.prompt
    return {**said, "messages": None}


def _given_to_template(sent: Sequence[Message], prompt: Prompt) -> list[Mapping[str, Any]] | None:
    """The messages given to the template, if they differ from those that the client sent."""
    given = None if prompt.written is None else prompt.written.messages
    if given is None or given is sent:
        return None
    wires = [one.wire for one in given]
    return None if wires == [one.wire for one in sent] else wires
