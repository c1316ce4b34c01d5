"""Where a row holds what was read from it: the place of each array, every copy of it, and its layout there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tito_audit.record.edits import Path
from tito_audit.record.rollout import Rollout, Turn


class Layout(StrEnum):
    """How the values of an array are laid out in the list at its place."""

    PLAIN = "plain"  # one entry a token
    ENTRIES = "entries"  # objects with a `logprob`
    PARALLEL = "parallel"  # an object of lists, of which `token_logprobs` is this one
    TRIPLES = "triples"  # `[logprob, id, text]`


@dataclass(frozen=True, slots=True)
class Source:
    """One place of an array; a list inside a string is written back into the string."""

    path: Path
    layout: Layout = Layout.PLAIN
    part: tuple[int, int] | None = None
    """The entries that are here, if the array is spread over several places; None: all."""


@dataclass(frozen=True, slots=True)
class Counter:
    """An object that counts the tokens of a call."""

    path: Path
    prefix: str = ""
    """Prefix of the names of its counts."""


@dataclass(frozen=True, slots=True)
class CallSource:
    """Where a row holds one call; every path leads to an existing value."""

    prompts: tuple[Source, ...] = ()
    """Every copy of the prompt's ids."""
    logprobs: tuple[Source, ...] = ()
    """Every copy of the logprobs."""
    columns: Mapping[str, tuple[Source, ...]] = field(default_factory=dict)
    """Every copy of each other column, by the column's name."""
    routing: tuple[Path, ...] = ()
    """Values computed over the old prompt that cannot be rebuilt."""
    blank: tuple[Path, ...] = ()
    """Masks over the prompt, which train nothing."""
    counters: tuple[Counter, ...] = ()
    entry: Path | None = None
    """The object of the call, if it holds all its columns under the names in use."""
    scored: bool = False
    """Whether the server scored the prompt, so that it cannot be replaced."""
    whole: str = "{name} holds the tokens too, so it cannot be left out"
    """Why a column without a place cannot be removed, and why logprobs spread over several places cannot become
    fewer."""
    retries: tuple[tuple[Turn, CallSource], ...] = ()
    """Earlier calls with the same prompt that are not turns: their prompts change with this one's."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Where a row holds one rollout."""

    columns: Mapping[str, tuple[Source, ...]] = field(default_factory=dict)
    """Every place of each column of the training row, by the column's name."""
    calls: tuple[CallSource, ...] = ()
    """One for each turn."""
    told: tuple[Path, ...] = ()
    """Lists that add nothing to the rollout, such as a mask that trains all of a call."""


def places_read(sources: Sequence[Sources], rollouts: Sequence[Rollout]) -> Iterator[Path]:
    """The places of all columns that the rollouts hold; values inside such a place belong to it."""
    # A row without any ids may be read as fewer rollouts, without calls.
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
