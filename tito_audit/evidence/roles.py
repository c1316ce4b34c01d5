"""Reads the role of each token from control tokens alone, by the headers of published templates."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from tito_audit.align.pieces import Pieces
from tito_audit.evidence.model import Evidence
from tito_audit.record.arrays import Mask, Offsets
from tito_audit.record.memo import memoized
from tito_audit.record.prefix import common_byte_prefix
from tito_audit.record.speakers import ASSISTANT, GIVEN_ANSWER, UNSAMPLED_SPEAKERS, Speakers, unknown_role_name


class Opener(NamedTuple):
    """A control token followed by a role."""

    close: bytes = b"\n"
    """The text that ends the role, where no control token does."""
    role: str | None = None
    """The role if the words after the token name none, or there are none."""


class RoleToken(NamedTuple):
    """A control token that is a role by itself."""

    role: str
    close: bytes = b""
    """What the template writes after it."""


HARMONY = "<|start|>"
"""Opens a message of gpt-oss; the model writes the rest of the header after its own name."""
HARMONY_END = "<|end|>"
"""Ends a message of gpt-oss; the same call may continue with another message."""
TOOL_END = "<｜tool▁output▁end｜>"
"""DeepSeek's end of the output of a tool."""
SAMPLED_HEADERS = frozenset(("<|channel|>", "<|constrain|>", "<|message|>"))
"""Header tokens that the model itself writes (harmony, the format of gpt-oss)."""
_TOOL = re.compile(rb"functions\.|.*\sto=assistant\b")
_WORD = re.compile(rb"[ \t]*([^\s<>|:,;]+)")

_OPENERS: Mapping[str, Opener] = {
    **dict.fromkeys(("<|im_start|>", "<start_of_turn>", HARMONY, "<|turn>"), Opener()),
    **dict.fromkeys(("<|start_header_id|>", "<|header_start|>", "<|start_of_role|>"), Opener()),
    "<|im_assistant|>": Opener(role=ASSISTANT),
    "<|im_user|>": Opener(role="user"),
    "<|im_system|>": Opener(role="system"),
}
_ENDS: Mapping[str, bytes] = {
    **dict.fromkeys(("<|end_header_id|>", "<|header_end|>"), b"\n\n"),
    **dict.fromkeys(("<|im_sep|>", "<|im_middle|>", "<|end_of_role|>"), b""),
}
_ROLE_TOKENS: Mapping[str, RoleToken] = {
    "<｜User｜>": RoleToken("user"),
    "<｜Assistant｜>": RoleToken(ASSISTANT),
    "<｜tool▁outputs▁begin｜>": RoleToken("tool"),
    "<｜tool▁output▁begin｜>": RoleToken("tool"),
    "<｜tool▁outputs▁end｜>": RoleToken(ASSISTANT),
    "<|user|>": RoleToken("user", b"\n"),
    "<|assistant|>": RoleToken(ASSISTANT, b"\n"),
    "<|system|>": RoleToken("system", b"\n"),
    "<|observation|>": RoleToken("tool", b"\n"),
    "<|CHATBOT_TOKEN|>": RoleToken(ASSISTANT),
    "<|USER_TOKEN|>": RoleToken("user"),
    "<|SYSTEM_TOKEN|>": RoleToken("system"),
    "[INST]": RoleToken("user"),
    "[/INST]": RoleToken(ASSISTANT),
    "[SYSTEM_PROMPT]": RoleToken("system"),
    "[AVAILABLE_TOOLS]": RoleToken("system"),
    "[TOOL_RESULTS]": RoleToken("tool"),
    "[/TOOL_RESULTS]": RoleToken(ASSISTANT),
}
_PREFILL = re.compile(r"<\|?(?:\w+:)?think(?:ing)?\b|<\|?START_THINKING|\[THINK\]")


@dataclass(frozen=True, slots=True)
class Headers:
    """Message headers of published templates, and this template's own before an answer."""

    speakers: Speakers = field(default_factory=Speakers)
    openers: Mapping[str, Opener] = field(default_factory=lambda: _OPENERS)
    ends: Mapping[str, bytes] = field(default_factory=lambda: _ENDS)
    """Control tokens that end a header, each with the text that the template writes after it."""
    role_tokens: Mapping[str, RoleToken] = field(default_factory=lambda: _ROLE_TOKENS)
    word: bytes = b"model"
    """The template's name for the role that answers."""
    prefill: bytes = b""
    """The text of a generation prompt after its header, such as an empty <think> block."""
    ids: frozenset[int] = frozenset()
    """Header tokens that the tokenizer does not mark as special."""

    @property
    def literals(self) -> frozenset[str]:
        """The texts of control tokens in headers."""
        return frozenset((*self.openers, *self.ends, *self.role_tokens, TOOL_END))

    def speaker(self, header: bytes, opener: str) -> str | None:
        """Who speaks after a header with these words; None for a header without words."""
        match = _WORD.match(header)
        if match is None:
            return None
        own = self.speakers.speaker(match[1].decode("utf-8", "replace"))
        if own != ASSISTANT and match[1] == self.word:
            return self.speakers.speaker(ASSISTANT)
        if own in UNSAMPLED_SPEAKERS or own == ASSISTANT:
            return own
        if opener == HARMONY and _TOOL.match(header):
            return self.speakers.speaker("tool")
        default = self.openers[opener].role
        return own if default is None else self.speakers.speaker(default)

    def is_header(self, header: bytes, opener: str) -> bool:
        """Whether these words, after a token that opens messages, are a header with a known role."""
        speaker = self.speaker(header, opener)
        return speaker is not None and unknown_role_name(speaker) is None


def headers_of(generation_prompt: str, control_texts: Sequence[str], speakers: Speakers) -> Headers:
    """The message headers of a template with this generation prompt; "" if it is unknown."""
    headers = Headers(speakers)
    prefill = _PREFILL.search(generation_prompt)
    head = generation_prompt[: prefill.start()] if prefill else generation_prompt
    longest_first = sorted(control_texts, key=len, reverse=True)
    # Text before the first control token, then each control token and the text after it.
    parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", head) if control_texts else [head]
    if len(parts) < 3:
        return headers
    headers = replace(headers, prefill=generation_prompt[len(head) :].encode())
    *before, literal, text = parts[1:]
    word, close = text.strip().encode(), text.encode()
    if word:
        close = close[len(close.rstrip()) :] or b"\n"
        return replace(headers, openers={**headers.openers, literal: Opener(close)}, word=word)
    word = before[-1].strip().encode() if before else b""
    if word:
        openers = {before[-2]: Opener(), **headers.openers}
        return replace(headers, openers=openers, ends={**headers.ends, literal: close}, word=word)
    return replace(headers, role_tokens={**headers.role_tokens, literal: RoleToken(ASSISTANT, close)})


TEMPLATE, UNKNOWN = "template", "unknown"
GENERATION_PROMPT, TURN_END = "generation prompt", "turn end"
COMMON_ROLES = frozenset(("system", "user", "assistant", "tool"))
"""Roles that every template knows."""

_NAMES = (UNKNOWN, TEMPLATE, GENERATION_PROMPT, ASSISTANT, TURN_END, "system", "user", "tool", GIVEN_ANSWER)
"""Every role that control tokens name, indexed by code; 0 is unknown. Codes of other roles come after these."""
_NUMBERS = {name: code for code, name in enumerate(_NAMES)}
_GROUP, _GROUP_END = "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"
"""Older DeepSeek templates write these around all tool outputs of a turn."""


class Roles(Sequence[str]):
    """The role of each token, as codes into a tuple of names."""

    def __init__(self, names: Sequence[str], codes: NDArray[np.integer[Any]]) -> None:
        self._names = tuple(names)
        self._codes = codes

    @classmethod
    def of(cls, roles: Sequence[str]) -> Roles:
        """Roles from names, one for each token."""
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

    def at(self, places: Offsets) -> Roles:
        """The roles of the tokens at these indices."""
        return Roles(self._names, self._codes[places])

    def among(self, names: Collection[str]) -> Mask:
        """`[N]` True where a token has one of these roles."""
        wanted: Mask = np.array([name in names for name in self._names], np.bool_)[self._codes]
        return wanted

    def unclear(self) -> Mask:
        """`[N]` True where the role is unknown, so that it is open whether the token was sampled."""
        return self.among([name for name in self._names if unknown_role_name(name) is not None])

    def with_role(self, name: str, mask: Mask) -> Roles:
        """These roles, with `name` where the mask, `[N]`, is True."""
        names = self._names if name in self._names else (*self._names, name)
        return Roles(names, np.where(mask, np.int16(names.index(name)), self._codes))

    def token_counts(self, mask: Mask) -> dict[str, tuple[int, int]]:
        """For each role, how many of its tokens are in the mask, `[N]`, and how many are not."""
        counts = np.bincount(2 * self._codes + mask, minlength=2 * len(self._names)).tolist()
        pairs = zip(self._names, counts[1::2], counts[::2], strict=True)
        return {name: (with_it, without) for name, with_it, without in pairs if with_it or without}


class LazyRoles(Roles):
    """Roles that are all known, but computed only if a rule or a viewer needs one; for most rows none does."""

    def __init__(self, turn_ends: Mask, compute: Callable[[], Roles]) -> None:
        self.turn_ends = turn_ends
        """`[N]` True where the role is `turn end`."""
        self._compute = compute

    def __len__(self) -> int:
        return len(self.turn_ends)

    def unclear(self) -> Mask:
        """`[N]` False: every role is known."""
        return np.zeros(len(self), np.bool_)

    @cached_property
    def _computed(self) -> Roles:
        return self._compute()

    @property
    def _names(self) -> tuple[str, ...]:  # type: ignore[override]
        return self._computed._names

    @property
    def _codes(self) -> NDArray[np.integer[Any]]:  # type: ignore[override]
        return self._computed._codes


def token_roles(pieces: Pieces, end_ids: frozenset[int], headers: Headers | None = None) -> Roles:
    """`[N]` the role of each token: a message's own, `template`, `generation prompt` or `turn end`.

    Roles come from markers such as `<|im_start|>assistant` or `<｜Assistant｜>`: `unknown` before the first one,
    and for templates that mark roles in plain text. A token that spans a header and the text after it belongs to
    the header.
    """
    headers = headers or _PUBLISHED
    if headers.ids:
        marked = np.isin(pieces.ids, np.fromiter(headers.ids, np.int64))
        pieces = replace(pieces, control=pieces.control | marked)
    reader = _RoleReader(pieces, end_ids, headers)
    units = pieces.split_at_control()
    ids = pieces.ids[[start for start, _ in units]].tolist()
    for (start, end), (is_control, data), id_ in zip(units, pieces.range_keys(units), ids, strict=True):
        if is_control:
            reader.read_control(start, id_, data.decode("utf-8", "replace"))
        else:
            reader.read_text(start, end, data)
    return reader.roles()


def unknown_roles(size: int) -> Roles:
    """`[N]` the role `unknown` for each token."""
    return Roles((UNKNOWN,), np.zeros(size, np.int16))


_PUBLISHED = Headers()


class _RoleReader:
    """Reads a sequence from control token to control token and tracks who speaks."""

    def __init__(self, pieces: Pieces, end_ids: frozenset[int], headers: Headers) -> None:
        self._pieces = pieces
        self._end_ids = end_ids
        self._headers = headers
        self._starts = [0]
        """The first token of each run of one role; the first run is empty."""
        self._run_roles = [UNKNOWN]
        self._role = UNKNOWN
        self._opener: str | None = None
        """The control token that opened the current header; None outside headers."""
        self._close = b""
        """What the template writes before the next text."""
        self._grouped = False
        """Whether the current tool output is one of a group."""
        self._sampled_header = False
        """Whether the model wrote the current header."""
        self._answered = -1
        """Where the last answer ended, if its call may continue after that token."""
        self._answer_starts: list[int] = []
        """The bytes at which answers begin."""

    def roles(self) -> Roles:
        """`[N]` the roles of the tokens read."""
        numbers = dict(_NUMBERS)
        run_codes = np.array([numbers.setdefault(name, len(numbers)) for name in self._run_roles], np.int16)
        codes = run_codes.repeat(np.subtract([*self._starts[1:], len(self._pieces)], self._starts))
        prefix = self._headers.prefill
        if prefix and self._answer_starts:
            starts = self._pieces.start
            for begin in self._answer_starts:
                if self._pieces.data.startswith(prefix, begin):
                    first, last = starts.searchsorted([begin, begin + len(prefix)]).tolist()
                    codes[first:last] = numbers[GENERATION_PROMPT]
        return Roles(tuple(numbers), codes)

    def read_control(self, at: int, id_: int, literal: str) -> None:
        """Give a control token its role and update who speaks; inside an answer, it is part of the answer."""
        self._close = b""
        headers, role = self._headers, self._role
        if id_ in self._end_ids:
            self._answered = at if role == ASSISTANT and literal == HARMONY_END else -1
            self._role, self._opener = TEMPLATE if role != UNKNOWN else UNKNOWN, None
            of_control = TURN_END if role == ASSISTANT else TEMPLATE if role in _NUMBERS else role
        elif literal in headers.openers and self._opens(at, literal):
            self._role, self._opener = UNKNOWN, literal
            of_control = ASSISTANT if self._sampled_header else TEMPLATE
        elif literal in headers.role_tokens or literal == TOOL_END:
            self._opener = None
            if literal in (_GROUP, _GROUP_END):
                self._grouped = literal == _GROUP
            if literal == TOOL_END and self._grouped:
                of_control = TEMPLATE
            else:
                token = headers.role_tokens.get(literal, RoleToken(ASSISTANT))
                self._role, self._close = headers.speakers.speaker(token.role), token.close
                if self._role == ASSISTANT:
                    self._note_answer_start(at + 1)
                of_control = GENERATION_PROMPT if self._role == ASSISTANT else TEMPLATE
        elif literal in headers.ends and self._opener is not None:
            self._opener, self._close = None, headers.ends[literal]
            if role == ASSISTANT:
                self._note_answer_start(at + 1)
            of_control = GENERATION_PROMPT if role == ASSISTANT else TEMPLATE
        else:
            if literal in SAMPLED_HEADERS:
                self._opener = None
            of_control = TEMPLATE if role != ASSISTANT and role in _NUMBERS else role
        self._starts.append(at)
        self._run_roles.append(of_control)

    def _opens(self, at: int, literal: str) -> bool:
        """Whether a token that opens messages does so here, and is not part of the text of one."""
        goes_on = literal == HARMONY and at == self._answered + 1
        self._sampled_header = goes_on and self._headers.speaker(self._line_after(at), literal) == ASSISTANT
        in_message = self._role not in (UNKNOWN, TEMPLATE) and self._opener is None
        return not in_message or self._headers.is_header(self._line_after(at), literal)

    def read_text(self, start: int, end: int, data: bytes) -> None:
        """Give a run of text tokens their role; the tokens of a header are template."""
        headers, opener = self._headers, self._opener
        header = 0  # how many bytes belong to the header
        if opener is not None:
            line, newline, _ = data.partition(b"\n")
            self._role = headers.speaker(line, opener) or UNKNOWN
            # The model writes the rest of a harmony header itself.
            word = _WORD.match(line) if opener == HARMONY and self._role == ASSISTANT else None
            header = word.end() if word is not None else 0
            if header or newline:
                self._opener = None
            if not header:
                close, at = headers.openers[opener].close, len(line)
                written = len(close) if data.startswith(close, at) else common_byte_prefix(data[at:], close)
                header = at + max(written, len(newline))
            if self._role != ASSISTANT and data[header:].lstrip().startswith(b"<tool_response>"):
                self._role = headers.speakers.speaker("tool")
        elif self._close:
            header = common_byte_prefix(data, self._close)
        self._close = b""
        text_start = start
        if header:
            offset = int(self._pieces.end[start - 1]) if start else 0
            text_start += 1 + int(self._pieces.end[start : end - 1].searchsorted(offset + header))
            if self._role == ASSISTANT:
                self._note_answer_start(text_start, offset + header)
        scaffold = GENERATION_PROMPT if self._role == ASSISTANT else TEMPLATE
        self._starts += start, text_start
        self._run_roles += ASSISTANT if self._sampled_header else scaffold, self._role
        self._sampled_header = self._sampled_header and self._opener is not None

    def _note_answer_start(self, at: int, byte: int | None = None) -> None:
        """Note that an answer begins at token `at`, or inside it at `byte`, unless its header was sampled too."""
        if not self._sampled_header:
            before = int(self._pieces.end[at - 1]) if at else 0
            self._answer_starts.append(before if byte is None else byte)

    def _line_after(self, at: int) -> bytes:
        """The line after a control token, up to the next control token and no longer than a header."""
        pieces, stop = self._pieces, min(at + 1 + 64, len(self._pieces))
        controls = pieces.control[at + 1 : stop].nonzero()[0]
        return pieces.bytes_of(at + 1, at + 1 + int(controls[0]) if len(controls) else stop).partition(b"\n")[0]


@dataclass(frozen=True, slots=True)
class UnclearRoles:
    """Roles in a training row that are not known to be sampled or given."""

    names: tuple[str, ...]
    """As logged, those of trained tokens first."""
    tokens: Mask
    """`[T]` the trained tokens in such a role."""


@memoized
def unclear_tokens(evidence: Evidence) -> Mask:
    """`[T]` True where the role of a row token is unknown, turn ends of unknown roles included."""
    view, row = evidence.row, evidence.rollout.training_row
    if view is None or view.proven or row is None or not isinstance(view.roles, Roles):
        return np.zeros(len(row.token_ids) if row is not None else 0, np.bool_)
    unclear = view.roles.unclear()
    if not unclear.any():
        return unclear
    ends = np.isin(row.token_ids, np.fromiter(evidence.end_ids, np.int64)) & ~view.sampled
    follows = np.concatenate((np.zeros(1, np.bool_), unclear[:-1]))
    return unclear | (ends & follows)


@memoized
def unclear_roles(evidence: Evidence) -> UnclearRoles | None:
    """The roles that leave open which row tokens were sampled; None without such roles, or if calls show it."""
    view, row = evidence.row, evidence.rollout.training_row
    if view is None or view.proven or row is None or row.loss_mask is None:
        return None
    unknown = [
        unknown_role_name(speaker) for speaker in dict.fromkeys(m.speaker for m in evidence.rollout.messages)
    ]
    unclear = unclear_tokens(evidence)
    if not unclear.any() and all(name is None for name in unknown):
        return None
    tokens = unclear & row.loss_mask
    in_row = [unknown_role_name(view.roles[at]) for at in tokens.nonzero()[0].tolist()]
    names = tuple(dict.fromkeys(name for name in (*in_row, *unknown) if name is not None))
    return UnclearRoles(names, tokens) if names else None
