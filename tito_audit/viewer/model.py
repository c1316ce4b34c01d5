"""What the HTML report and `show` draw besides findings: token counts, and views of single rollouts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.record.finding import Finding, Result, Severity, Where

STATES = ("same", "note", "warning", "error")
"""States of a generated token: not in any drift finding (TOK, TPL), or the severity of the worst it is in."""
TURNS = 64
"""Turns counted separately; all later ones are counted together in the last place."""
POSITION_EDGES = (0, *(1 << power for power in range(5, 21)))
"""Lower edges of position bins: 0, 32, 64, … 2^20; the last bin has no end."""
LOGPROB_EDGES = (
    -np.inf,
    *(-20.0, -15.0, -10.0, -8.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, -0.2, -0.1, -0.01),
)
"""Lower edges of logprob bins, in nats; the last bin ends at 0 and also holds what is above."""

Counts = NDArray[np.int64]


def _zeros(*bins: int) -> Callable[[], Counts]:
    """A factory of counts by bin and state, all 0."""
    return lambda: np.zeros((*bins, len(STATES)), np.int64)


@dataclass(slots=True)
class Measures:
    """Counts of tokens, of one rollout or of many. All but `roles` count generated tokens."""

    by_turn: Counts = field(default_factory=_zeros(TURNS))
    """`[TURNS, 4]` int64: by the turn that generated them and by state (STATES). If the log has no calls,
    a turn is a run of sampled tokens in the training row."""
    by_position: Counts = field(default_factory=_zeros(len(POSITION_EDGES)))
    """`[len(POSITION_EDGES), 4]` int64: by position from the start of the prompt or row, and by state."""
    by_logprob: Counts = field(default_factory=_zeros(len(LOGPROB_EDGES)))
    """`[len(LOGPROB_EDGES), 4]` int64: by the sampler's logprob, if finite, and by state."""
    without_logprob: Counts = field(default_factory=_zeros())
    """`[4]` int64: tokens without a logprob, by state."""
    roles: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By role in the training row: how many tokens are trained, how many are not."""

    def add(self, other: Measures) -> None:
        self.by_turn += other.by_turn
        self.by_position += other.by_position
        self.by_logprob += other.by_logprob
        self.without_logprob += other.without_logprob
        for role, (trained, untrained) in other.roles.items():
            before = self.roles.get(role, (0, 0))
            self.roles[role] = (before[0] + trained, before[1] + untrained)

    def packed(self) -> tuple[bytes, bytes, dict[str, tuple[int, int]]]:
        """Only what is not 0, a tenth of the arrays' size: where it is (uint16), the counts (int64), the roles."""
        arrays = self.by_turn, self.by_position, self.by_logprob, self.without_logprob
        every = np.concatenate([array.ravel() for array in arrays])
        at = np.flatnonzero(every)
        return at.astype(np.uint16).tobytes(), every[at].tobytes(), self.roles

    @staticmethod
    def unpacked(at: bytes, counts: bytes, roles: dict[str, tuple[int, int]]) -> Measures:
        every = np.zeros(_ENDS[-1], np.int64)
        every[np.frombuffer(at, np.uint16)] = np.frombuffer(counts, np.int64)
        starts = (0, *_ENDS)
        turns, positions, logprobs, rest = (
            every[start:end].reshape(shape) for start, end, shape in zip(starts, _ENDS, _SHAPES, strict=False)
        )
        return Measures(turns, positions, logprobs, rest, roles)

    def __reduce__(self) -> tuple[object, ...]:
        return Measures.unpacked, self.packed()


_SHAPES = (
    (TURNS, len(STATES)),
    (len(POSITION_EDGES), len(STATES)),
    (len(LOGPROB_EDGES), len(STATES)),
    (len(STATES),),
)
_ENDS = tuple(accumulate(prod(shape) for shape in _SHAPES))


@dataclass(frozen=True, slots=True)
class ShownStretch:
    """Consecutive tokens, as columns of the same length; None for what is unknown."""

    start: int
    """Position of the first token in its sequence; what is between two stretches is left out."""
    ids: tuple[int, ...]
    pieces: tuple[str, ...]
    """The text of each token; () without a tokenizer. Raw model output: escape it. Cut after 200 characters
    with `…`. Bytes that are not UTF-8 are written `\\xNN`, as literal text may be too: see `data`."""
    data: tuple[str, ...] = ()
    """The bytes of each token in hexadecimal, cut after 200 bytes with `…`; () without a tokenizer, `""` for an
    id outside the vocabulary."""
    logprobs: tuple[float | None, ...] | None = None
    """In nats, always finite; None if none was recorded or it is not finite."""
    trained: tuple[bool, ...] | None = None
    """The loss mask; None if the sequence has none."""
    roles: tuple[str, ...] | None = None
    """The role of each token; None if unknown."""
    columns: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    """Other numbers that were recorded by token, by name: a trainer's logprobs, advantages; None for what is not
    finite. Raw names: escape them."""


@dataclass(frozen=True, slots=True)
class Swap:
    """The tokens of the template, the tokenizer, a later prompt or the training row that replace recorded ones."""

    start: int
    end: int
    """Half-open range of the recorded sequence; start == end: canonical tokens between two recorded ones."""
    ids: tuple[int, ...]
    """At most the first 512 canonical tokens."""
    pieces: tuple[str, ...]
    data: tuple[str, ...] = ()
    total: int = 0
    """How many canonical tokens there are; more than `ids` when they were cut."""
    code: str = ""
    """The rule that found it; "" if no rule did."""
    against: str = ""
    """Where the other tokens come from: `next prompt`, `training row`, `template` or `re-encoding`; for a prompt
    that breaks its history `what was seen`, the tokens of the previous call; for a training row that holds other
    tokens than the calls generated `what was sampled`.
    """
    before: int = 0
    """Tokens at the end of the preceding sequence (a completion's prompt) that are replaced along with it."""
    after: int = 0
    """Tokens after the end of this sequence that are replaced along with it."""


@dataclass(frozen=True, slots=True)
class ViewSequence:
    """One recorded sequence of a rollout, with the tokens that replace some of its own elsewhere."""

    where: Where
    turn: int | None
    length: int
    """Total tokens; the stretches may show fewer."""
    stretches: tuple[ShownStretch, ...]
    swaps: tuple[Swap, ...] = ()
    """By start, not overlapping; all other tokens are the same on both sides."""
    note: str = ""
    """A note for the reader: `the first 812 tokens are what turn 0 saw and sampled`, `ended by length`."""
    same_as: str = ""
    """If nothing is swapped, the source with the same tokens: `template`, `re-encoding`; "" if the whole sequence
    was not compared.
    """


@dataclass(frozen=True, slots=True)
class View:
    """One rollout for display, bounded in size; its findings are in its result."""

    messages: tuple[str, ...]
    """Roles of the messages in order."""
    sequences: tuple[ViewSequence, ...]
    left_out: int = 0
    """Sequences that are not shown."""
    digest: str = ""
    """16 hexadecimal digits of all recorded tokens: rollouts that share them have the same."""
    row_id: str = ""
    """The id that the row states, by which other runs name the same; "" if it states none. Raw: escape it."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What a graphical report gets for one rollout besides its findings."""

    measures: Measures
    view: View | None = None
    """Only for the first rollouts with each code; None for all others."""


def observed_of(result: Result) -> Observed | None:
    """What was observed of a rollout; None if no report asked for it."""
    return result.observed if isinstance(result.observed, Observed) else None


_IDS = (
    *("rollout_id", "_ng_rollout_id", "id", "uid", "uuid", "trajectory_id", "traj_id", "episode_id", "sample_id"),
    *("request_id", "session_id", "conversation_id", "example_id", "task_id", "instance_id", "problem_id"),
)


def named(result: Result, row: Mapping[str, Any]) -> Result:
    """The result with the id that its row states in its view, if it has one."""
    observed = observed_of(result)
    if observed is None or observed.view is None:
        return result
    ids = (row[name] for name in _IDS if isinstance(row.get(name), str | int) and type(row[name]) is not bool)
    view = replace(observed.view, row_id=str(next(ids, ""))[:200])
    return replace(result, observed=replace(observed, view=view))


VIEWS_PER_CODE = 12
"""How many rollouts of each code and severity get a view: the first of a run."""
MAX_VIEWS = 240
"""How many rollouts of a run get a view."""


@dataclass(frozen=True, slots=True)
class ViewSize:
    """How much a view shows of a rollout at most."""

    tokens: int = 3_000
    """Recorded tokens."""
    sequences: int = 64


REPORTED = ViewSize()
"""In a page that holds all of its rollouts."""


class ViewQuota:
    """Counts rollouts with findings in the order of the logs: the first of each code and severity get a view.

    A process that audits one part of the logs does not know the others. It makes views as if only the parts it
    knows came before, which may be too many but never too few.

    With `rows`, the first rows of each log all get one, which counts for none of these.
    """

    __slots__ = ("_rows", "_seen", "_taken", "size")

    def __init__(self, rows: int = 0, size: ViewSize = REPORTED) -> None:
        self._rows, self.size = rows, size
        self._seen: dict[tuple[str, Severity], int] = {}
        self._taken = 0

    def take(self, findings: Iterable[Finding], row: int) -> ViewSize | None:
        """The size of the view of the next rollout, which has these findings; None if it gets none."""
        size = self.offer(findings, row)
        self._taken += size is not None and row >= self._rows
        return size

    def offer(self, findings: Iterable[Finding], row: int) -> ViewSize | None:
        """The same for the next rollout of a part, which may get a view."""
        if row < self._rows:
            return self.size
        wanted = False
        for key in {(finding.code, finding.severity) for finding in findings}:
            seen = self._seen.get(key, 0)
            if seen < VIEWS_PER_CODE:
                self._seen[key] = seen + 1
                wanted = self._taken < MAX_VIEWS
        return self.size if wanted else None

    def copy(self) -> ViewQuota:
        other = ViewQuota(self._rows, self.size)
        other._seen, other._taken = dict(self._seen), self._taken
        return other
