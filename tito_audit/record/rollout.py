"""Place, Turn, TrainingRow, Rollout: what was sampled and what a trainer gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from tito_audit.record.arrays import Ids, Logprobs, Mask
from tito_audit.record.column import Column
from tito_audit.record.message import Message, ToolSpec, sampled_indices
from tito_audit.record.speakers import Speakers
from tito_audit.record.stated import NOTHING_STATED, Stated
from tito_audit.record.token_extras import NO_EXTRAS, TokenExtras


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
    """Token counts that a server reported for a request, and how many ids the log holds for it."""

    counted: int
    """Sampled tokens, over all choices of the request."""
    recorded: int
    """Completion ids in the log, over the same choices."""
    choices: int
    alone: bool
    """Whether the log holds the request too, so that no other choice can have been counted."""
    reasoning: int = 0
    """How many of the counted tokens are reasoning."""
    prompt: tuple[int, ...] = ()
    """Possible token counts of the prompt; () if the count covers other prompts too."""


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
    """Index in `Rollout.messages` of the assistant message it produced; None if the log does not say."""
    prompt_messages: tuple[Message, ...] | None = None
    """The messages this call was sent, if logged per call; None: those of the rollout before `message_index`."""
    prompt_text: str | None = None
    """The rendered prompt as text, if logged; special tokens may be missing."""
    completion_text: str | None = None
    """The decoded completion as logged; special tokens may be missing."""
    answer: Message | None = field(default=None, compare=False, repr=False)
    """The message that the call returned, if logged with the call."""
    usage: Usage | None = field(default=None, compare=False, repr=False)
    """None when the log has no token count, or none for these ids."""
    finish_reason: str | None = None
    """`stop`, `length`, `tool_calls`, …; None when the log does not say."""
    stop_string: str | None = None
    """The stop string that ended it, which servers cut from the text but keep in the ids; None if not logged."""
    weight_versions: tuple[str, ...] = ()
    """Weight versions it was sampled with; () when the log does not say."""
    weight_spans: tuple[tuple[str, int, int], ...] = ()
    """Weight versions with the completion tokens `[start, end)` each sampled; () when the log has no spans."""
    ids_from: IdsFrom = IdsFrom.LOGGED
    token_texts: tuple[TokenText, ...] | None = None
    """Tokens as strings and bytes when the log has no ids; `evidence` recovers ids from them."""
    columns: tuple[Column, ...] = ()
    """Every per-token column of the completion as recorded, logprobs included."""
    as_row: TrainingRow | None = field(default=None, repr=False)
    """The call read as a training row instead, where a response trained as a whole may hold several turns; None
    elsewhere."""
    extras: TokenExtras = field(default=NO_EXTRAS, compare=False, repr=False)
    alternatives: tuple[tuple[float, ...], ...] = field(default=(), repr=False)
    """Distinct top-k logprobs at some of its first tokens; () when the log has one logprob per token."""

    @property
    def seen_ids(self) -> Ids | None:
        """`[P + C]` prompt and completion, which the next prompt should start with; None if either is unknown."""
        if self.prompt_ids is None or self.completion_ids is None:
            return None
        return np.concatenate([self.prompt_ids, self.completion_ids])


@dataclass(frozen=True, slots=True)
class Padding:
    """Padding entries that were cut from each end of all full-length columns."""

    left: int = 0
    right: int = 0


NO_PADDING = Padding()


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """What a trainer reads, one entry for each token, without padding."""

    token_ids: Ids
    """`[T]`"""
    loss_mask: Mask | None
    """`[T]` True where trained; None when the log has no mask that fits."""
    logprobs: Logprobs | None
    """`[T]` as recorded, sentinels included; NaN: not recorded; None when the log has no column that fits."""
    prompt_length: int | None = None
    """How many tokens precede the first sampled one; None if the log does not say."""
    sentinel: float | None = None
    """The value written where there is no logprob (Atropos 1.0, most others 0.0); None if there is none."""
    columns: tuple[Column, ...] = ()
    """Every per-token column as recorded: masks, logprobs and all others."""
    finish_reasons: tuple[str | None, ...] = ()
    """Finish reasons of its last turns, in order, as far as logged."""
    padding: Padding = NO_PADDING
    """Restored by formats that write rows; ignored elsewhere."""
    hidden: Mask | None = None
    """`[T]` True where the attention mask hides a token that is not padding, being trained or between visible
    tokens; None: nothing is hidden."""
    extras: TokenExtras = field(default=NO_EXTRAS, compare=False, repr=False)


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


def with_call_as_row(rollout: Rollout) -> Rollout:
    """The rollout with its only call read as a training row (`Turn.as_row`)."""
    return replace(rollout, turns=(), training_row=rollout.turns[0].as_row)


def with_speakers(rollout: Rollout, speakers: Speakers) -> Rollout:
    """The rollout with `stated_speaker` set on its messages; unchanged if the run does not state sampled roles.

    Turns that name no messages are then paired with the last sampled ones, if there are enough.
    """
    if not speakers.stated or not rollout.messages:
        return rollout
    turns = rollout.turns
    messages = tuple(replace(each, stated_speaker=speakers.speaker(each.role)) for each in rollout.messages)
    answers = sampled_indices(messages)[-len(turns) or None :]
    unpaired = all(turn.message_index is None and turn.prompt_messages is None for turn in turns)
    if turns and unpaired and len(answers) == len(turns):
        turns = tuple(replace(turn, message_index=at) for turn, at in zip(turns, answers, strict=True))
    return replace(rollout, messages=messages, turns=turns)


def hidden_and_trained(row: TrainingRow | None) -> Mask | None:
    """`[T]` tokens that the loss mask trains though the attention mask hides them; None if there are none."""
    if row is None or row.hidden is None or row.loss_mask is None:
        return None
    both: Mask = row.hidden & row.loss_mask
    return both if both.any() else None


def effective_loss_mask(row: TrainingRow) -> Mask | None:
    """`[T]` the loss mask without hidden tokens; None if the row has no mask."""
    if row.loss_mask is None or row.hidden is None:
        return row.loss_mask
    visible: Mask = row.loss_mask & ~row.hidden
    return visible


def visible_range(row: TrainingRow) -> tuple[int, int]:
    """`[start, end)` from the first to the last visible token; the whole row if all are hidden."""
    if row.hidden is None or row.hidden.all():
        return 0, len(row.token_ids)
    visible = (~row.hidden).nonzero()[0]
    return int(visible[0]), int(visible[-1]) + 1
