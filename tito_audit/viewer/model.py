"""What reports that draw need beyond findings: counts of tokens, and one rollout as a person looks at it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from math import prod

import numpy as np
from numpy.typing import NDArray

from tito_audit.record.finding import Result, Where

STATES = ("same", "note", "warning", "error")
"""What a generated token is to the findings of drift (TOK, TPL) it lies in: none, or the worst of them."""
TURNS = 64
"""Turns counted each for itself; all later ones are counted together in the last place."""
POSITION_EDGES = (0, *(1 << power for power in range(5, 21)))
"""Lower edges of the bins of positions in a conversation: 0, 32, 64, … 2^20; the last bin has no end."""
LOGPROB_EDGES = (
    -np.inf,
    -20.0,
    -15.0,
    -10.0,
    -8.0,
    -6.0,
    -5.0,
    -4.0,
    -3.0,
    -2.0,
    -1.5,
    -1.0,
    -0.5,
    -0.2,
    -0.1,
    -0.01,
)
"""Lower edges of the bins of logprobs, in nats; the last bin ends at 0 and holds what is above it, too."""

Counts = NDArray[np.int64]


def _turns() -> Counts:
    return np.zeros((TURNS, len(STATES)), dtype=np.int64)


def _positions() -> Counts:
    return np.zeros((len(POSITION_EDGES), len(STATES)), dtype=np.int64)


def _logprobs() -> Counts:
    return np.zeros((len(LOGPROB_EDGES), len(STATES)), dtype=np.int64)


def _unknown() -> Counts:
    return np.zeros(len(STATES), dtype=np.int64)


@dataclass(slots=True)
class Measures:
    """Counts of tokens, of one rollout or of many. All but `roles` count generated tokens."""

    by_turn: Counts = field(default_factory=_turns)
    """`[TURNS, 4]` int64: by the turn that generated them and their state (STATES). Where the log has no calls,
    a turn is a run of sampled tokens in the training row."""
    by_position: Counts = field(default_factory=_positions)
    """`[len(POSITION_EDGES), 4]` int64: by where they stand, counted from the start of the prompt or row."""
    by_logprob: Counts = field(default_factory=_logprobs)
    """`[len(LOGPROB_EDGES), 4]` int64: by the logprob that the sampler gave them, where it is a finite number."""
    without_logprob: Counts = field(default_factory=_unknown)
    """`[4]` int64: those whose logprob is unknown."""
    roles: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By role of the token in the training row: how many are trained, how many are not."""

    def add(self, other: Measures) -> None:
        """Count those of another as well."""
        self.by_turn += other.by_turn
        self.by_position += other.by_position
        self.by_logprob += other.by_logprob
        self.without_logprob += other.without_logprob
        for role, (trained, untrained) in other.roles.items():
            before = self.roles.get(role, (0, 0))
            self.roles[role] = (before[0] + trained, before[1] + untrained)

    def __reduce__(self) -> tuple[object, ...]:
        """For a pickle: what is not 0, a tenth of what the arrays take."""
        arrays = self.by_turn, self.by_position, self.by_logprob, self.without_logprob
        every = np.concatenate([array.ravel() for array in arrays])
        at = np.flatnonzero(every)
        return _measures, (at.astype(np.uint16).tobytes(), every[at].tobytes(), self.roles)


_SHAPES = (
    (TURNS, len(STATES)),
    (len(POSITION_EDGES), len(STATES)),
    (len(LOGPROB_EDGES), len(STATES)),
    (len(STATES),),
)
_ENDS = tuple(accumulate(prod(shape) for shape in _SHAPES))


def _measures(at: bytes, counts: bytes, roles: dict[str, tuple[int, int]]) -> Measures:
    """Measures out of a pickle."""
    every = np.zeros(_ENDS[-1], np.int64)
    every[np.frombuffer(at, np.uint16)] = np.frombuffer(counts, np.int64)
    starts = (0, *_ENDS)
    turns, positions, logprobs, rest = (
        every[start:end].reshape(shape) for start, end, shape in zip(starts, _ENDS, _SHAPES, strict=False)
    )
    return Measures(turns, positions, logprobs, rest, roles)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens that follow one another, as columns of one length; what is unknown is None."""

    start: int
    """Position of the first in its sequence; what lies before it and after the stretch before is left out."""
    ids: tuple[int, ...]
    pieces: tuple[str, ...]
    """How each reads; () without a tokenizer. Raw text of a model: escape it. At most 200 characters, a longer
    one ends with `…`; bytes that are no text read as `\\xNN`, as text may do that says just that: `data` tells."""
    data: tuple[str, ...] = ()
    """The bytes of each as hexadecimal digits, cut after 200 bytes with `…`; () without a tokenizer, `""` for an
    id outside the vocabulary."""
    logprobs: tuple[float | None, ...] | None = None
    """In nats, always finite; None where no sampler scored the token or what it wrote is no finite number."""
    trained: tuple[bool, ...] | None = None
    """The loss mask; None where the sequence has none."""
    roles: tuple[str, ...] | None = None
    """Whose token each is; None where that is not known."""


@dataclass(frozen=True, slots=True)
class Swap:
    """What template and tokenizer, a later prompt or the row write in place of recorded tokens."""

    start: int
    end: int
    """Half-open range of the recorded sequence; start == end: canonical tokens stand between two recorded ones."""
    ids: tuple[int, ...]
    """At most the first 512 canonical tokens."""
    pieces: tuple[str, ...]
    data: tuple[str, ...] = ()
    total: int = 0
    """How many canonical tokens there are; more than `ids` when they were cut."""
    code: str = ""
    """The rule that names it; "" when none was asked."""
    against: str = ""
    """Where the other tokens stand: `next prompt`, `training row`, `template`, `re-encoding`; of a prompt that
    breaks its history `what was seen`, what the call before it saw and said there; of a training row that holds
    other tokens than the calls generated `what was sampled`."""
    before: int = 0
    """Tokens at the end of the sequence before this one (a completion's prompt) that are replaced with it."""
    after: int = 0
    """Tokens behind the end of this sequence that are replaced with it."""


@dataclass(frozen=True, slots=True)
class ViewSequence:
    """One recorded sequence of a rollout and what stands in its place today."""

    where: Where
    turn: int | None
    length: int
    """Tokens in all; the stretches may show fewer."""
    stretches: tuple[Stretch, ...]
    swaps: tuple[Swap, ...] = ()
    """In order of start, not overlapping; everything else is the same on both sides."""
    note: str = ""
    """What a reader should know of it: `the first 812 tokens as seen before`, `ended by length`."""
    same_as: str = ""
    """Where nothing is swapped, what was found to hold the same tokens: `template`, `re-encoding`; "" when nothing
    was compared with the whole of it."""


@dataclass(frozen=True, slots=True)
class View:
    """A rollout as a person looks at it, bounded; its findings are those of its result."""

    messages: tuple[str, ...]
    """Roles of the messages in order."""
    sequences: tuple[ViewSequence, ...]
    left_out: int = 0
    """Sequences that are not shown."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What was observed of one rollout beside its findings, where a report asked for it."""

    measures: Measures
    view: View | None = None
    """Of the first rollouts with each finding only; None of all others."""


def observed_of(result: Result) -> Observed | None:
    """What was observed of a rollout; None where no report asked for it."""
    return result.observed if isinstance(result.observed, Observed) else None
