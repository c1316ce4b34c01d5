"""How right writers write a row: which sampled tokens they train, and where they write a logprob."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from .source import Chat

__all__ = ["CONVENTIONS", "Convention", "Observed", "Values", "combined", "written"]

Values = list[float | None]


@dataclass(frozen=True)
class Observed:
    """A row's columns; None stands for the form's fill."""

    mask: list[bool]
    values: Values


@dataclass(frozen=True)
class Convention:
    """What a writer does in all answers of a row."""

    name: str
    first: int = 0
    """How many first tokens of each answer stay out of the loss."""
    prefill: bool = False
    """Whether the harness wrote these, so that they have no logprob; else the model sampled them."""
    certain: bool = False
    """Whether the first token that was sampled has a logprob of exactly 0.0."""
    end: str = "trained"
    """`kept`: a sampled end token is out of the loss with its logprob; `filled`: without it."""
    recomputed: bool = False
    """Whether every token of the row has a logprob."""
    turns: str = "all"
    """Which answers are trained: `all`, `last`, `some`, or `uncut`, those that the model ended."""
    filled: bool = False
    """Whether the other answers have no logprobs."""

    def __str__(self) -> str:
        return self.name


CONVENTIONS = (
    Convention("whole"),
    *(Convention(f"prefill:{size}", size, prefill=True) for size in (1, 2, 3)),
    *(Convention(f"left-out:{size}", size) for size in (1, 2, 3)),
    Convention("first 0.0", certain=True),
    Convention("end kept", end="kept"),
    Convention("end filled", end="filled"),
    Convention("recomputed", recomputed=True),
    Convention("last turn", turns="last"),
    Convention("last, filled", turns="last", filled=True),
    Convention("some turns", turns="some"),
    Convention("some, filled", turns="some", filled=True),
    Convention("uncut turns", turns="uncut"),
    Convention("uncut, filled", turns="uncut", filled=True),
)


def combined(dice: random.Random) -> Convention:
    """Any of what writers do, several at once."""
    recomputed = dice.random() < 0.1
    return Convention(
        "combined",
        first=dice.choice((0, 1, 2, 3)),
        prefill=dice.random() < 0.5,
        # Where all tokens have a logprob, one of 0.0 would be a token that has none.
        certain=not recomputed and dice.random() < 0.3,
        end=dice.choice(("trained", "kept", "filled")),
        recomputed=recomputed,
        turns=dice.choice(("all", "all", "last", "some", "uncut")),
        filled=dice.random() < 0.5,
    )


def written(chat: Chat, convention: Convention, low: int, dice: random.Random) -> tuple[Chat, Observed]:
    """The conversation with what it sampled by this convention, and its row as it should be.

    Columns begin at `low`.
    """
    truth = list(chat.truth)
    for turn in chat.turns:
        sampled = turn.start + convention.first * convention.prefill
        truth[turn.start : sampled] = [None] * (sampled - turn.start)
        if convention.certain:
            truth[sampled] = 0.0
    mask, values = [value is not None for value in truth], list(truth)
    trained = _trained(chat, convention, dice)
    for number, turn in enumerate(chat.turns):
        mask[turn.start : turn.start + convention.first] = [False] * convention.first
        final = turn.end - 1
        if convention.end != "trained" and chat.ids[final] in chat.model.ends:
            mask[final] = False
            values[final] = None if convention.end == "filled" else truth[final]
        if number not in trained:
            size = turn.end - turn.start
            mask[turn.start : turn.end] = [False] * size
            if convention.filled:
                values[turn.start : turn.end] = [None] * size
    if convention.recomputed:
        for at in range(low, len(values)):
            if values[at] is None:
                values[at] = -dice.expovariate(1.5) - 1e-6 if truth[at] is None else truth[at]
    return replace(chat, truth=truth), Observed(mask, values)


def _trained(chat: Chat, convention: Convention, dice: random.Random) -> set[int]:
    """The numbers of the turns in the loss."""
    every = range(len(chat.turns))
    if convention.turns == "last":
        return {every[-1]}
    if convention.turns == "some":
        return set(dice.sample(every, dice.randint(1, max(1, len(every) - 1))))
    if convention.turns == "uncut":
        return {at for at in every if chat.turns[at].reason != "length"}
    return set(every)
