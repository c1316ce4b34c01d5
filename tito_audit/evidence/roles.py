"""Whose token each one is, read off the control tokens alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from tito_audit.align.pieces import Pieces

__all__ = ["ASSISTANT", "GENERATION_PROMPT", "TEMPLATE", "TURN_END", "UNKNOWN", "Roles", "token_roles"]

ASSISTANT, TEMPLATE, UNKNOWN = "assistant", "template", "unknown"
GENERATION_PROMPT, TURN_END = "generation prompt", "turn end"

_OPENERS = frozenset(("<|im_start|>", "<start_of_turn>", "<|start_header_id|>", "<|start|>", "<|turn>"))
_HEADER_ENDS = frozenset(("<|end_header_id|>",))
_SAMPLED_HEADERS = frozenset(("<|channel|>", "<|constrain|>", "<|message|>"))
"""Header tokens that a model writes itself (the harmony format of gpt-oss)."""
_SPEAKERS = {
    "<｜User｜>": "user",
    "<|user|>": "user",
    "<｜Assistant｜>": ASSISTANT,
    "<|assistant|>": ASSISTANT,
    "<|system|>": "system",
    "<|observation|>": "tool",
    "<｜tool▁outputs▁begin｜>": "tool",
}
_ROLE = re.compile(rb"\s*(system|developer|user|assistant|model|tool|ipython|environment|observation|function)\b")
_WORDS = {"model": ASSISTANT, "developer": "system"} | dict.fromkeys(
    ("ipython", "environment", "observation", "function"), "tool"
)


class Roles(Sequence[str]):
    """One role a token, as a number and a list of names."""

    def __init__(self, names: Sequence[str], codes: NDArray[np.integer[Any]]) -> None:
        self._names = tuple(names)
        self._codes = codes

    def __len__(self) -> int:
        return len(self._codes)

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> Roles: ...
    def __getitem__(self, at: int | slice) -> str | Roles:
        if isinstance(at, slice):
            return Roles(self._names, self._codes[at])
        name: str = self._names[int(self._codes[at])]
        return name


@dataclass(slots=True)
class _State:
    role: str = UNKNOWN
    header: bool = False


def token_roles(pieces: Pieces, end_ids: frozenset[int]) -> list[str]:
    """`[N]` the role of each token: a message's own, `template`, `generation prompt` or `turn end`.

    Read from role markers such as `<|im_start|>assistant` or `<｜Assistant｜>`; `unknown` until the first
    marker and for templates that mark roles in plain text.
    """
    roles = [UNKNOWN] * len(pieces)
    state = _State()
    for start, end in pieces.units():
        if pieces.control[start] and end == start + 1:
            literal = pieces.bytes_of(start, end).decode("utf-8", "replace")
            _enter(literal, state)
            roles[start] = _control_role(int(pieces.ids[start]), literal, state, end_ids)
        else:
            _text(pieces, start, end, state, roles)
    return roles


def _enter(literal: str, state: _State) -> None:
    """What a control token makes of the state."""
    if literal in _OPENERS:
        state.role, state.header = UNKNOWN, True
    elif literal in _SPEAKERS:
        state.role, state.header = _SPEAKERS[literal], False
    elif literal in _HEADER_ENDS | _SAMPLED_HEADERS:
        state.header = False


def _control_role(token: int, literal: str, state: _State, end_ids: frozenset[int]) -> str:
    """The role of a control token; one inside an answer is the answer's."""
    role = state.role
    if token in end_ids:
        state.role, state.header = TEMPLATE if role != UNKNOWN else UNKNOWN, False
        return TURN_END if role == ASSISTANT else TEMPLATE
    if role != ASSISTANT:
        return TEMPLATE
    return GENERATION_PROMPT if literal in _SPEAKERS or literal in _HEADER_ENDS else ASSISTANT


def _text(pieces: Pieces, start: int, end: int, state: _State, roles: list[str]) -> None:
    """Give the tokens of a run of text their role; the first line of a header is template."""
    data = pieces.bytes_of(start, end)
    header = 0
    if state.header:
        match = _ROLE.match(data)
        if match:
            word = match[1].decode()
            state.role = _WORDS.get(word, word)
        newline = data.find(b"\n")
        header = newline + 1 if newline >= 0 else len(data)
        state.header = newline < 0
        if data[header:].lstrip().startswith(b"<tool_response>"):
            state.role = "tool"
    offset = int(pieces.end[start - 1]) if start else 0
    for position in range(start, end):
        if int(pieces.end[position]) - offset <= header:
            roles[position] = GENERATION_PROMPT if state.role == ASSISTANT else TEMPLATE
        else:
            roles[position] = state.role
