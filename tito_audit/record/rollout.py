"""Place, Turn, TrainingRow, Rollout: what was sampled and what a trainer gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from tito_audit.record.arrays import Ids, Logprobs, Mask
from tito_audit.record.beside import NOTHING_BESIDE, BesideTokens
from tito_audit.record.column import Column
from tito_audit.record.message import Message, ToolSpec
from tito_audit.record.speakers import Speakers
from tito_audit.record.stated import NOTHING_STATED, Stated


class IdsFrom(StrEnum):
    """Where the completion ids of a turn come from."""

    LOGGED = "logged"  # the log holds ids
    RECOVERED = "recovered"  # looked up from token strings or bytes: a guess, and marked as such


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rollout is in its file."""

    file: str
    row: int
    """Counted from 0: the line of a JSONL file, the row of a table, the element of an array. With `--rows-at`,
    the position of the row in the order in which rows are found."""
    item: int = 0
    """Index within a row that holds several rollouts (a group)."""

    def __str__(self) -> str:
        return f"{self.file}:{self.row}" + (f"[{self.item}]" if self.item else "")


@dataclass(frozen=True, slots=True)
class TokenText:
    """One sampled token as an OpenAI-style log writes it, without an id."""

    text: str
    data: bytes | None
    """Its bytes; None when the log has only the string, b"" for a special token."""
    logprob: float
    """NaN when the log has none."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a server counted for an answer, next to what the log holds of it."""

    counted: int
    """Tokens that it sampled, for all choices of the answer."""
    recorded: int
    """Completion ids of these choices."""
    choices: int
    alone: bool
    """Whether the log holds the request too, so that no other choice can have been counted."""
    reasoning: int = 0
    """How many of the counted tokens are reasoning."""
    prompt: tuple[int, ...] = ()
    """Tokens of the prompt, as it may have counted them; () if that is not said of this prompt alone."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call: what the sampler was given and what it returned."""

    prompt_ids: Ids | None
    """`[P]` the complete prompt of the call; None when the log does not hold it."""
    completion_ids: Ids | None
    """`[C]` what was sampled, including the end token if it was sampled; None when not logged."""
    completion_logprobs: Logprobs | None = None
    """`[C]` NaN: not recorded; None when absent or when the length does not fit (see `columns`)."""
    message_index: int | None = None
    """The assistant message of `Rollout.messages` that it produced; None if the log does not say."""
    prompt_messages: tuple[Message, ...] | None = None
    """What this call was sent, if the log says so per call; None: the messages of the rollout before
    `message_index`."""
    prompt_text: str | None = None
    """The rendered prompt as text, if logged; special tokens may be missing."""
    completion_text: str | None = None
    """The decoded completion as logged; special tokens may be missing."""
    answer: Message | None = field(default=None, compare=False, repr=False)
    """The message that the call returned, if the log holds it with the call."""
    usage: Usage | None = field(default=None, compare=False, repr=False)
    """None when the log has no count, or none that belongs to these ids."""
    finish_reason: str | None = None
    """`stop`, `length`, `tool_calls`, …; None when the log does not say."""
    stop_string: str | None = None
    """The stop string that ended it, which servers cut from the text and keep in the ids; None: none is named."""
    weight_versions: tuple[str, ...] = ()
    """Versions of the weights it was sampled with; () when the log does not say."""
    weight_spans: tuple[tuple[str, int, int], ...] = ()
    """Versions with the completion tokens `[start, end)` of each; () when the log names no tokens."""
    ids_from: IdsFrom = IdsFrom.LOGGED
    token_texts: tuple[TokenText, ...] | None = None
    """Tokens as strings and bytes when the log has no ids; `evidence` recovers ids from them."""
    columns: tuple[Column, ...] = ()
    """Every per-token column of the call as recorded, logprobs included, aligned to the completion."""
    as_row: TrainingRow | None = field(default=None, repr=False)
    """The same columns as a training row, if the log holds a response that its mask trains whole: its ids may show
    that it holds several turns."""
    beside: BesideTokens = field(default=NOTHING_BESIDE, compare=False, repr=False)
    """What an engine or a trainer wrote beside its tokens."""
    alternatives: tuple[tuple[float, ...], ...] = field(default=(), repr=False)
    """The distinct top-k logprobs at some of its first tokens; () when the log has only one per token."""

    @property
    def seen_ids(self) -> Ids | None:
        """`[P + C]` prompt and completion: what the next prompt should start with; None if unknown."""
        if self.prompt_ids is None or self.completion_ids is None:
            return None
        return np.concatenate([self.prompt_ids, self.completion_ids])


@dataclass(frozen=True, slots=True)
class Padding:
    """How many padding entries there were at each end of every column as long as the ids."""

    left: int = 0
    right: int = 0


NO_PADDING = Padding()


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """What a trainer reads, one entry for each token, without padding."""

    token_ids: Ids
    """`[T]`"""
    loss_mask: Mask | None
    """`[T]` True where trained; None when the log has no mask, or none that fits."""
    logprobs: Logprobs | None
    """`[T]` as recorded, including sentinels; NaN where nothing was recorded; None when the log has no column, or
    none that fits."""
    prompt_length: int | None = None
    """How many tokens precede the first sampled one, if the log says."""
    sentinel: float | None = None
    """What the format writes where there is no logprob (Atropos 1.0, most others 0.0); None: nothing."""
    columns: tuple[Column, ...] = ()
    """Every per-token column as recorded: masks, logprobs and all others."""
    finish_reasons: tuple[str | None, ...] = ()
    """Why turns of the row ended, as far as the log says: for its last turns, in order."""
    padding: Padding = NO_PADDING
    """The padding around the row in the log; used only by formats that write rows."""
    hidden: Mask | None = None
    """`[T]` True where an attention mask hides a token that is not padding: visible tokens surround it, or the
    loss mask trains it. None: nothing is hidden."""
    beside: BesideTokens = field(default=NOTHING_BESIDE, compare=False, repr=False)
    """What an engine or a trainer wrote beside its tokens."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One recorded episode."""

    place: Place
    format: str
    """Name of the format that it was read as."""
    messages: tuple[Message, ...] = ()
    """() when the log holds tokens only."""
    tools: tuple[ToolSpec, ...] = ()
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    """Template arguments that the log itself states (`chat_template_kwargs`)."""
    turns: tuple[Turn, ...] = ()
    """() when the log holds a training row or text only."""
    training_row: TrainingRow | None = None
    stated: Stated = NOTHING_STATED
    """What else the log says, and why parts of it were not read."""


def as_training_row(rollout: Rollout) -> Rollout:
    """The rollout with its only call as the training row that the same columns are."""
    return replace(rollout, turns=(), training_row=rollout.turns[0].as_row)


def with_speakers(rollout: Rollout, speakers: Speakers) -> Rollout:
    """The rollout with each message's speaker; the rollout itself if the sampled roles are not stated."""
    if not speakers.stated or not rollout.messages:
        return rollout
    messages = tuple(
        replace(said_by, stated_speaker=speakers.speaker(said_by.role)) for said_by in rollout.messages
    )
    answers = [index for index, said_by in enumerate(messages) if said_by.sampled][-len(rollout.turns) or None :]
    turns = rollout.turns
    nameless = all(turn.message_index is None and turn.prompt_messages is None for turn in turns)
    if turns and nameless and len(answers) == len(turns):
        pairs = zip(turns, answers, strict=True)
        turns = tuple(replace(turn, message_index=index) for turn, index in pairs)
    return replace(rollout, messages=messages, turns=turns)


def hidden_and_trained(row: TrainingRow | None) -> Mask | None:
    """`[T]` tokens that are trained although an attention mask hides them; None if there are none."""
    if row is None or row.hidden is None or row.loss_mask is None:
        return None
    both: Mask = row.hidden & row.loss_mask
    return both if both.any() else None


def seen_by_loss(row: TrainingRow) -> Mask | None:
    """`[T]` trained tokens that are not hidden; None without a mask."""
    if row.loss_mask is None or row.hidden is None:
        return row.loss_mask
    seen: Mask = row.loss_mask & ~row.hidden
    return seen


def visible_part(row: TrainingRow) -> tuple[int, int]:
    """The half-open range of tokens without the hidden ones at both ends."""
    if row.hidden is None or row.hidden.all():
        return 0, len(row.token_ids)
    seen = (~row.hidden).nonzero()[0]
    return int(seen[0]), int(seen[-1]) + 1
