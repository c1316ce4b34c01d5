"""Conversations of real models as flat rows: every token's id, and its logprob where it was sampled."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers

__all__ = ["MODELS", "ROOT", "SHARED", "Chat", "Model", "Turn", "chat_of", "model_of", "splits_a_character"]

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
MODELS = ("qwen2.5-coder", "gemma-3", "smollm2")


@dataclass(frozen=True)
class Model:
    """The control tokens of a model's template; a header is `start`, the role, `newline`."""

    name: str
    start: int
    end: int
    other_end: int
    newline: int
    pad: int
    user: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, int]:
        """Both tokens that end a turn."""
        return self.end, self.other_end


_MODELS = {
    "qwen2.5-coder": Model("qwen2.5-coder", 151644, 151645, 151643, 198, 151643, (872,)),
    "gemma-3": Model("gemma-3", 105, 106, 1, 107, 0, (2364,)),
    "smollm2": Model("smollm2", 1, 2, 0, 198, 2, (4093,)),
}


@dataclass(frozen=True)
class Turn:
    """What one call sampled, `[start, end)`, and the place of the turn's last end token, or the row's end."""

    start: int
    end: int
    last: int
    reason: str


@dataclass(frozen=True)
class Chat:
    """A row as it truly is."""

    model: Model
    ids: list[int]
    truth: list[float | None]
    """The logprob of a token that was sampled; None for one that was given."""
    turns: list[Turn]
    users: list[tuple[int, int]]
    """What users said, turn ends aside."""
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    name: str

    @property
    def prompt(self) -> int:
        """Tokens before the first that was sampled."""
        return self.turns[0].start


@dataclass
class _Draft:
    """A row under construction."""

    ids: list[int] = field(default_factory=list)
    truth: list[float | None] = field(default_factory=list)
    spans: list[tuple[int, int, str]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)

    def unsampled(self, ids: list[int]) -> None:
        self.ids += ids
        self.truth += [None] * len(ids)

    def call(self, call: dict[str, Any], prompt: list[int]) -> None:
        self.unsampled(prompt)
        start = len(self.ids)
        self.ids += call["generation_token_ids"]
        self.truth += call["generation_log_probs"]
        self.spans.append((start, len(self.ids), call["finish_reason"]))


def model_of(name: str) -> Model:
    """The control tokens of one of MODELS."""
    return _MODELS[name]


@cache
def _rows(name: str) -> list[dict[str, Any]]:
    with gzip.open(SHARED / "rollouts" / name / "tito.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@cache
def _tokenizer(name: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(SHARED / "tokenizers" / name / "tokenizer.json"))


def splits_a_character(chat: Chat) -> bool:
    """Whether what was sampled of a turn begins inside a character, as no text that a harness writes ends."""
    for turn in chat.turns:
        ahead = [at for at in range(turn.start, turn.end) if chat.truth[at] is None]
        if ahead and "\ufffd" in _tokenizer(chat.model.name).decode(chat.ids[turn.start : ahead[-1] + 1]):
            return True
    return False


def chat_of(name: str, turns: int, dice: random.Random, *, closed: bool = False) -> Chat:
    """A conversation of so many turns: one that was recorded, cut short, or several after one another.

    `closed` writes what the template puts behind the last answer.
    """
    model, rows = model_of(name), _rows(name)
    first = dice.choice([row for row in rows if len(row["calls"]) >= min(turns, 4)])
    if len(first["calls"]) < turns:
        first = dice.choice([row for row in rows if row["tools"] is None])
    draft, names = _Draft(), [first["id"]]
    _append(draft, model, first, turns)
    while len(draft.spans) < turns:
        other = dice.choice([row for row in rows if row["tools"] is None])
        _append(draft, model, other, turns - len(draft.spans))
        names.append(other["id"])
    if closed:
        draft.unsampled(_closing(draft, model))
    return Chat(
        model=model,
        ids=draft.ids,
        truth=draft.truth,
        turns=[_turn(draft, model, span) for span in draft.spans],
        users=_users(draft, model),
        messages=draft.messages,
        tools=first["tools"],
        name="+".join(names),
    )


def _append(draft: _Draft, model: Model, row: dict[str, Any], turns: int) -> None:
    """The first turns of a recorded conversation, behind what is there."""
    chained, calls = bool(draft.ids), row["calls"][:turns]
    base: list[int] = []
    for number, call in enumerate(calls):
        prompt = call["prompt_token_ids"]
        assert prompt[: len(base)] == base
        ids = prompt[len(base) :]
        if chained and number == 0:
            ids = _closing(draft, model) + _last_user(ids, model)
        draft.call(call, ids)
        base = prompt + call["generation_token_ids"]
    draft.messages += _messages(row["messages"], len(calls), model, chained=chained)


def _messages(
    messages: list[dict[str, Any]], answers: int, model: Model, *, chained: bool
) -> list[dict[str, Any]]:
    """The messages up to the so-manieth answer; without their system prompt where they go on another's."""
    at = [index for index, message in enumerate(messages) if message["role"] == "assistant"][answers - 1]
    copies = [dict(message) for message in messages[: at + 1]]
    if chained and copies[0]["role"] == "system":
        system = copies.pop(0)
        if model.name == "gemma-3":  # its template writes the system prompt into the first user turn
            copies[0]["content"] = f"{system['content']}\n\n{copies[0]['content'].strip()}"
    return copies


def _closing(draft: _Draft, model: Model) -> list[int]:
    """What the template writes behind an answer: its end token unless that was sampled, and a line break."""
    return [model.newline] if draft.ids[-1] == model.end else [model.end, model.newline]


def _last_user(prompt: list[int], model: Model) -> list[int]:
    """The last user turn of a prompt, and the header of the answer."""
    starts = [at for at, token in enumerate(prompt) if token == model.start]
    return prompt[starts[-2] :]


def _turn(draft: _Draft, model: Model, span: tuple[int, int, str]) -> Turn:
    start, end, reason = span
    last = end
    appended = end < len(draft.ids) and draft.ids[end] == model.end
    if not appended and draft.ids[end - 1] in model.ends:
        last = end - 1
    return Turn(start, end, last, reason)


def _users(draft: _Draft, model: Model) -> list[tuple[int, int]]:
    """The stretches between a user's header and its end token, among what was given."""
    header, spans = [model.start, *model.user, model.newline], []
    for at, token in enumerate(draft.ids):
        if token == model.start and draft.truth[at] is None and draft.ids[at : at + len(header)] == header:
            begin = at + len(header)
            spans.append((begin, draft.ids.index(model.end, begin)))
    return spans
