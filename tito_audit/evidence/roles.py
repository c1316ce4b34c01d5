"""Whose token each one is, read off the control tokens alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from tito_audit.align.pieces import Pieces
from tito_audit.align.prefix import common_byte_prefix
from tito_audit.evidence.heads import HARMONY, HARMONY_END, SAMPLED_HEADERS, TOOL_END, Heads, Speaker
from tito_audit.record.arrays import Mask, Offsets
from tito_audit.record.speakers import ASSISTANT, GIVEN_ANSWER, unknown_role_name

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

TEMPLATE, UNKNOWN = "template", "unknown"
GENERATION_PROMPT, TURN_END = "generation prompt", "turn end"

_NAMES = (UNKNOWN, TEMPLATE, GENERATION_PROMPT, ASSISTANT, TURN_END, "system", "user", "tool", GIVEN_ANSWER)
"""Every role that control tokens tell, by the number it has in an array; 0 is unknown. Roles that are not known by
name come behind them."""
_GROUP, _GROUP_END = "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"
"""What older templates of DeepSeek put around all that tools returned."""
_LONGEST_HEADER = 64
"""Tokens that are read for a header where that may not be one."""


class Roles(Sequence[str]):
    """One role a token, as a number and a list of names."""

    def __init__(self, names: Sequence[str], codes: NDArray[np.integer[Any]]) -> None:
        self._names = tuple(names)
        self._codes = codes

    @classmethod
    def of(cls, roles: Sequence[str]) -> Roles:
        """These roles, one a token."""
        names = tuple(dict.fromkeys(roles)) or (UNKNOWN,)
        number = {name: code for code, name in enumerate(names)}
        return cls(names, np.array([number[role] for role in roles], np.int16))

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

    def unclear(self) -> Mask:
        """`[N]` bool, True where the role is not known, so that nobody can say whether a token was sampled."""
        return self.among([name for name in self._names if unknown_role_name(name) is not None])

    def given(self, name: str, mask: Mask) -> Roles:
        """The same roles, but this one where the mask, `[N]` bool, is true."""
        names = self._names if name in self._names else (*self._names, name)
        return Roles(names, np.where(mask, np.int16(names.index(name)), self._codes))

    def counted(self, mask: Mask) -> dict[str, tuple[int, int]]:
        """How many tokens of each role the mask, `[N]` bool, has and how many it has not; no role without any."""
        counts = np.bincount(2 * self._codes + mask, minlength=2 * len(self._names)).tolist()
        pairs = zip(self._names, counts[1::2], counts[::2], strict=True)
        return {name: (with_it, without) for name, with_it, without in pairs if with_it or without}


def token_roles(pieces: Pieces, end_ids: frozenset[int], heads: Heads | None = None) -> Roles:
    """`[N]` the role of each token: a message's own, `template`, `generation prompt` or `turn end`.

    Read from role markers such as `<|im_start|>assistant` or `<｜Assistant｜>`; `unknown` until the first
    marker and for templates that mark roles in plain text. A token that spans a header and what lies behind it
    is the header's.
    """
    heads = heads or _PUBLISHED
    if heads.ids:
        marked = np.isin(pieces.ids, np.fromiter(heads.ids, np.int64))
        pieces = replace(pieces, control=pieces.control | marked)
    walk = _Walk(pieces, end_ids, heads)
    for start, end in pieces.units():
        if pieces.control[start] and end == start + 1:
            walk.control(start)
        else:
            walk.text(start, end)
    return walk.roles()


def unknown_roles(size: int) -> Roles:
    """`[N]` the roles of tokens of which nothing is known."""
    return Roles((UNKNOWN,), np.zeros(size, np.int16))


_PUBLISHED = Heads()


class _Walk:
    """From control token to control token, with whoever speaks there."""

    def __init__(self, pieces: Pieces, end_ids: frozenset[int], heads: Heads) -> None:
        self._pieces = pieces
        self._end_ids = end_ids
        self._heads = heads
        self._names = {name: code for code, name in enumerate(_NAMES)}
        self._codes = np.zeros(len(pieces), np.int16)
        self._role = UNKNOWN
        self._opener: str | None = None
        """What opened the header that has not ended yet."""
        self._close = b""
        """What the template writes in front of the text that comes next."""
        self._grouped = False
        self._own = False
        """Whether the header that has not ended yet was sampled."""
        self._answered = -1
        """Where the last answer ended in a way that lets its call go on."""
        self._begun: list[int] = []
        """The bytes at which answers begin."""

    def roles(self) -> Roles:
        """`[N]` what was found."""
        given, starts = self._heads.given, self._starts()
        for begin in self._begun if given else ():
            if self._pieces.data.startswith(given, begin):
                first, last = starts.searchsorted([begin, begin + len(given)]).tolist()
                self._codes[first:last] = self._names[GENERATION_PROMPT]
        return Roles(tuple(self._names), self._codes)

    def control(self, at: int) -> None:
        """Take a control token."""
        literal = self._pieces.bytes_of(at, at + 1).decode("utf-8", "replace")
        self._close = b""
        self._codes[at] = self._code(self._of_control(at, literal))

    def _of_control(self, at: int, literal: str) -> str:
        """The role of a control token; one inside an answer is the answer's."""
        heads, role = self._heads, self._role
        if int(self._pieces.ids[at]) in self._end_ids:
            self._answered = at if role == ASSISTANT and literal == HARMONY_END else -1
            self._role, self._opener = TEMPLATE if role != UNKNOWN else UNKNOWN, None
            return TURN_END if role == ASSISTANT else role if unknown_role_name(role) is not None else TEMPLATE
        if literal in heads.openers and self._opens(at, literal):
            self._role, self._opener = UNKNOWN, literal
            return ASSISTANT if self._own else TEMPLATE
        if literal in heads.named or literal == TOOL_END:
            return self._speaks(at, literal)
        if literal in heads.ends and self._opener is not None:
            self._opener, self._close = None, heads.ends[literal]
            self._begins(at + 1)
            return GENERATION_PROMPT if role == ASSISTANT else TEMPLATE
        if literal in SAMPLED_HEADERS:
            self._opener = None
        return role if role == ASSISTANT or unknown_role_name(role) is not None else TEMPLATE

    def _opens(self, at: int, literal: str) -> bool:
        """Whether a token that opens messages opens one here, and not one that somebody said."""
        goes_on = literal == HARMONY and at == self._answered + 1
        self._own = goes_on and self._heads.speaker(self._line_behind(at), literal) == ASSISTANT
        said = self._role not in (UNKNOWN, TEMPLATE) and self._opener is None
        return not said or self._heads.knows(self._line_behind(at), literal)

    def _speaks(self, at: int, literal: str) -> str:
        """The role of a control token that is a role by itself."""
        self._opener = None
        if literal in (_GROUP, _GROUP_END):
            self._grouped = literal == _GROUP
        if literal == TOOL_END and self._grouped:
            return TEMPLATE
        named = self._heads.named.get(literal, Speaker(ASSISTANT))
        self._role, self._close = self._heads.speakers.speaker(named.role), named.close
        self._begins(at + 1)
        return GENERATION_PROMPT if self._role == ASSISTANT else TEMPLATE

    def text(self, start: int, end: int) -> None:
        """Give the tokens of a run of text their role; what belongs to a header is template."""
        data = self._pieces.bytes_of(start, end)
        headed = self._opener is not None
        header = self._header(data) if headed else common_byte_prefix(data, self._close) if self._close else 0
        self._close = b""
        if headed and self._role != ASSISTANT and data[header:].lstrip().startswith(b"<tool_response>"):
            self._role = self._heads.speakers.speaker("tool")
        offset = int(self._pieces.end[start - 1]) if start else 0
        own = start
        if header:
            own += 1 + int(self._pieces.end[start : end - 1].searchsorted(offset + header))
            self._begins(own, offset + header)
        scaffold = GENERATION_PROMPT if self._role == ASSISTANT else TEMPLATE
        self._codes[start:own] = self._code(ASSISTANT if self._own else scaffold)
        self._codes[own:end] = self._code(self._role)
        self._own = self._own and self._opener is not None

    def _header(self, data: bytes) -> int:
        """How much of a text is the header that was opened in front of it."""
        opener = self._opener
        assert opener is not None
        line, newline, _ = data.partition(b"\n")
        self._role = self._heads.speaker(line, opener) or UNKNOWN
        sampled = self._heads.own_words(line, opener) if self._role == ASSISTANT else 0
        if sampled or newline:
            self._opener = None
        if sampled:
            return sampled
        close = self._heads.openers[opener].close
        return len(line) + max(common_byte_prefix(data[len(line) :], close), len(newline))

    def _begins(self, at: int, byte: int | None = None) -> None:
        """Remember where an answer begins, by its first token or, where that began before, by its first byte."""
        if self._role == ASSISTANT and not self._own:
            before = int(self._pieces.end[at - 1]) if at else 0
            self._begun.append(before if byte is None else byte)

    def _line_behind(self, at: int) -> bytes:
        """The line behind a control token, as far as the next one and as a header goes."""
        pieces, stop = self._pieces, min(at + 1 + _LONGEST_HEADER, len(self._pieces))
        controls = pieces.control[at + 1 : stop].nonzero()[0]
        return pieces.bytes_of(at + 1, at + 1 + int(controls[0]) if len(controls) else stop).partition(b"\n")[0]

    def _starts(self) -> Offsets:
        """`[N]` the byte at which each token begins."""
        return (
            np.concatenate((np.zeros(1, np.int64), self._pieces.end[:-1]))
            if len(self._pieces)
            else self._pieces.end
        )

    def _code(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names))
