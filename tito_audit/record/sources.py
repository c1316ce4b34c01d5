"""Where a row holds what was read: the place of each array, every copy of it, and how it is written there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tito_audit.record.edits import Path
from tito_audit.record.rollout import Rollout, Turn


class Layout(StrEnum):
    """How the values of an array lie in the list at its place."""

    PLAIN = "plain"  # one entry a token
    ENTRIES = "entries"  # objects with a `logprob`
    PARALLEL = "parallel"  # an object of lists, of which `token_logprobs` is this one
    TRIPLES = "triples"  # `[logprob, id, text]`


@dataclass(frozen=True, slots=True)
class Source:
    """One place of an array; a list in a string is written into the string."""

    path: Path
    layout: Layout = Layout.PLAIN
    part: tuple[int, int] | None = None
    """Which of the entries are here, where the array is spread over several places; None: all."""


@dataclass(frozen=True, slots=True)
class Counter:
    """An object that counts the tokens of a call."""

    path: Path
    prefix: str = ""
    """In front of the names of its counts."""


@dataclass(frozen=True, slots=True)
class CallSource:
    """Where a row holds one call; every path leads to a value that is there."""

    prompts: tuple[Source, ...] = ()
    """Every copy of the prompt's ids."""
    logprobs: tuple[Source, ...] = ()
    """Every copy of the logprobs."""
    columns: Mapping[str, tuple[Source, ...]] = field(default_factory=dict)
    """Every copy of each other column, by the name of the column."""
    routing: tuple[Path, ...] = ()
    """What was computed over the prompt as it was and cannot be rebuilt."""
    blank: tuple[Path, ...] = ()
    """Masks over the prompt, of which nothing is trained."""
    counters: tuple[Counter, ...] = ()
    entry: Path | None = None
    """The object that is the call, all its columns under names in use."""
    scored: bool = False
    """The server scored the prompt as it was, so there can be no other."""
    whole: str = "{name} holds the tokens too, so it cannot be left out"
    """Why a column without a place cannot go, and logprobs that are spread over several places cannot be fewer."""
    retries: tuple[tuple[Turn, CallSource], ...] = ()
    """Calls that asked the same before and are no turns: their prompts change with this one's."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Where a row holds one rollout."""

    columns: Mapping[str, tuple[Source, ...]] = field(default_factory=dict)
    """Every place of each column of the training row, by the name of the column."""
    calls: tuple[CallSource, ...] = ()
    """One for each turn."""
    told: tuple[Path, ...] = ()
    """Lists that say no more than what the rollout is: a mask that trains all of a call."""


def places_read(sources: Sequence[Sources], rollouts: Sequence[Rollout]) -> Iterator[Path]:
    """The places of all columns that rollouts hold; what is inside of one belongs to it."""
    # What holds no ids at all may be read as fewer rollouts, and as none of its calls.
    for own, rollout in zip(sources, rollouts, strict=False):
        yield from own.told
        row = rollout.training_row
        for column in row.columns if row is not None else ():
            yield from (source.path for source in own.columns.get(column.name, ()))
        for call, turn in zip(own.calls, rollout.turns, strict=False):
            yield from _places_of_call(call, turn)


def _places_of_call(call: CallSource, turn: Turn) -> Iterator[Path]:
    yield from (source.path for source in call.logprobs if source.layout is Layout.PLAIN)
    for column in turn.columns:
        yield from (source.path for source in call.columns.get(column.name, ()))
        if call.entry is not None:
            yield (*call.entry, column.name)
