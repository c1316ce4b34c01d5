"""Whose token each one is, read off the control tokens alone."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from tito_audit.align.pieces import Pieces
from tito_audit.record.arrays import Mask

__all__ = [
    "ASSISTANT",
    "GENERATION_PROMPT",
    "TEMPLATE",
    "TURN_END",
    "UNKNOWN",
    "Roles",
    "token_roles",
    "unknown_roles",
]

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
_NAMES = (UNKNOWN, TEMPLATE, GENERATION_PROMPT, ASSISTANT, TURN_END, "system", "user", "tool")
_CODES = {name: code for code, name in enumerate(_NAMES)}
"""Every role that control tokens tell, by the number it has in an array; 0 is unknown."""


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

    def __iter__(self) -> Iterator[str]:
        return map(self._names.__getitem__, self._codes.tolist())

    def among(self, names: Collection[str]) -> Mask:
        """`[N]` bool, True where a token has one of these roles."""
        wanted: Mask = np.array([name in names for name in self._names], np.bool_)[self._codes]
        return wanted

    def given(self, name: str, mask: Mask) -> Roles:
        """The same roles, but this one where the mask, `[N]` bool, is true."""
        names = self._names if name in self._names else (*self._names, name)
        return Roles(names, np.where(mask, np.int16(names.index(name)), self._codes))

    def counted(self, mask: Mask) -> dict[str, tuple[int, int]]:
        """How many tokens of each role the mask, `[N]` bool, has and how many it has not; no role without any."""
        counts = np.bincount(2 * self._codes + mask, minlength=2 * len(self._names)).tolist()
        pairs = zip(self._names, counts[1::2], counts[::2], strict=True)
        return {name: (with_it, without) for name, with_it, without in pairs if with_it or without}


@dataclass(slots=True)
class _State:
    role: str = UNKNOWN
    header: bool = False


def token_roles(pieces: Pieces, end_ids: frozenset[int]) -> Roles:
    """`[N]` the role of each token: a message's own, `template`, `generation prompt` or `turn end`.

    Read from role markers such as `<|im_start|>assistant` or `<｜Assistant｜>`; `unknown` until the first
    marker and for templates that mark roles in plain text.
    """
    codes = np.zeros(len(pieces), np.int16)
    state = _State()
    for start, end in pieces.units():
        if pieces.control[start] and end == start + 1:
            literal = pieces.bytes_of(start, end).decode("utf-8", "replace")
            _enter(literal, state)
            codes[start] = _CODES[_control_role(int(pieces.ids[start]), literal, state, end_ids)]
        else:
            _text(pieces, start, end, state, codes)
    return Roles(tuple(_CODES), codes)


def unknown_roles(size: int) -> Roles:
    """`[N]` the roles of tokens of which nothing is known."""
    return Roles((UNKNOWN,), np.zeros(size, np.int16))


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


def _text(pieces: Pieces, start: int, end: int, state: _State, codes: NDArray[np.int16]) -> None:
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
    own = start + int(pieces.end[start:end].searchsorted(offset + header, side="right"))
    codes[start:own] = _CODES[GENERATION_PROMPT if state.role == ASSISTANT else TEMPLATE]
    codes[own:end] = _CODES[state.role]
