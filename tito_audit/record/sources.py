"""Where a row of a log holds what was read: paths of each array and its copies, and how each is stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tito_audit.record.edits import Path
from tito_audit.record.rollout import Rollout, Turn


class Layout(StrEnum):
    """How an array is stored in the list at its path."""

    PLAIN = "plain"  # one entry per token
    ENTRIES = "entries"  # objects with a `logprob`
    PARALLEL = "parallel"  # an object of lists; `token_logprobs` is the array
    TRIPLES = "triples"  # `[logprob, id, text]`


_INSIDE: Mapping[Layout, Path] = {Layout.PLAIN: (), Layout.PARALLEL: ("token_logprobs",)}
"""The path below `Source.path` of the list that is the array; other layouts have no such list."""


@dataclass(frozen=True, slots=True)
class Source:
    """One place of an array; if the list is stored as a JSON string, it is rewritten in the string."""

    path: Path
    layout: Layout = Layout.PLAIN
    part: tuple[int, int] | None = None
    """The entries `[start, end)` stored here, if the array is split; None: all."""


@dataclass(frozen=True, slots=True)
class Counter:
    """An object that counts the tokens of a call."""

    path: Path
    prefix: str = ""
    """Precedes the names of its counts."""


@dataclass(frozen=True, slots=True)
class CallSource:
    """Where a row holds one call; every path exists in the row."""

    prompts: tuple[Source, ...] = ()
    """Every copy of the prompt's ids."""
    logprobs: tuple[Source, ...] = ()
    """Every copy of the logprobs."""
    columns: Mapping[str, tuple[Source, ...]] = field(default_factory=dict)
    """Every copy of each other column, by its name."""
    routing: tuple[Path, ...] = ()
    """Values computed from the old prompt, which cannot be rebuilt."""
    blank: tuple[Path, ...] = ()
    """Masks over the prompt that train nothing."""
    counters: tuple[Counter, ...] = ()
    entry: Path | None = None
    """The object that is the call, if all its columns have known names."""
    scored: bool = False
    """Whether the server scored the prompt, so that it must not change."""
    whole: str = "{name} holds the tokens too, so it cannot be left out"
    """The error when a column without a source would be dropped, or logprobs in several places would get fewer."""
    retries: tuple[tuple[Turn, CallSource], ...] = ()
    """Earlier calls with the same prompt that are no turns; their prompts change along."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Where a row holds one rollout."""

    columns: Mapping[str, tuple[Source, ...]] = field(default_factory=dict)
    """Every place of each column of the training row, by its name."""
    calls: tuple[CallSource, ...] = ()
    """One per turn."""
    implied: tuple[Path, ...] = ()
    """Lists that follow from the rollout, such as a mask that trains a whole call."""


def paths_read(sources: Sequence[Sources], rollouts: Sequence[Rollout]) -> Iterator[Path]:
    """The paths of all columns that the rollouts of a row hold; what lies below a path is read too."""
    # A row without ids may be read as fewer rollouts, and without calls.
    for own, rollout in zip(sources, rollouts, strict=False):
        yield from own.implied
        row = rollout.training_row
        for column in row.columns if row is not None else ():
            yield from (source.path for source in own.columns.get(column.name, ()))
        for call, turn in zip(own.calls, rollout.turns, strict=False):
            for source in call.logprobs:
                if source.layout in _INSIDE:
                    yield (*source.path, *_INSIDE[source.layout])
            for column in turn.columns:
                yield from (source.path for source in call.columns.get(column.name, ()))
                if call.entry is not None:
                    yield (*call.entry, column.name)
