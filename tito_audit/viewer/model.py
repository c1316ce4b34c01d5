"""What the html report and `show` draw besides findings: token counts, and views of single rollouts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.record.finding import Finding, Result, Severity, Where

STATES = ("same", "note", "warning", "error")
"""States of a generated token: in no drift finding (TOK, TPL), or the severity of the worst one it is in."""
TURNS = 64
"""Number of bins by turn; the last one counts all later turns together."""
POSITION_EDGES = (0, *(1 << power for power in range(5, 21)))
"""Lower edges of position bins: 0, 32, 64, … 2^20; the last bin has no end."""
LOGPROB_EDGES = (
    -np.inf,
    *(-20.0, -15.0, -10.0, -8.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, -0.2, -0.1, -0.01),
)
"""Lower edges of logprob bins, in nats; the last bin ends at 0 and also holds what is above."""

Counts = NDArray[np.int64]


_LOGPROBS_AT = TURNS + len(POSITION_EDGES)
_BINS = _LOGPROBS_AT + len(LOGPROB_EDGES) + 1


@dataclass(slots=True)
class Measures:
    """Token counts of one or many rollouts. All but `roles` count generated tokens."""

    counts: Counts = field(default_factory=lambda: np.zeros((_BINS, len(STATES)), np.int64))
    """`[_BINS, 4]` int64 by bin and state (STATES): the bins of the properties below, one after the other."""
    roles: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By role in the training row: how many tokens are trained, how many are not."""

    @property
    def by_turn(self) -> Counts:
        """`[TURNS, 4]` by the turn that generated them, or without calls by run of sampled tokens; a view."""
        return self.counts[:TURNS]

    @property
    def by_position(self) -> Counts:
        """`[len(POSITION_EDGES), 4]` by position from the start of the prompt or row; a view."""
        return self.counts[TURNS:_LOGPROBS_AT]

    @property
    def by_logprob(self) -> Counts:
        """`[len(LOGPROB_EDGES), 4]` by the sampler's logprob, if finite; a view."""
        return self.counts[_LOGPROBS_AT:-1]

    @property
    def without_logprob(self) -> Counts:
        """`[4]` tokens without a finite logprob; a view."""
        last: Counts = self.counts[-1]
        return last

    def add(self, other: Measures) -> None:
        """Add the counts of another."""
        self.counts += other.counts
        for role, (trained, untrained) in other.roles.items():
            before = self.roles.get(role, (0, 0))
            self.roles[role] = (before[0] + trained, before[1] + untrained)

    def packed(self) -> tuple[bytes, bytes, dict[str, tuple[int, int]]]:
        """What is not 0, a tenth of the array: flat indices (uint16), counts (int64), and the roles."""
        at = np.flatnonzero(self.counts)
        return at.astype(np.uint16).tobytes(), self.counts.ravel()[at].tobytes(), self.roles

    @staticmethod
    def unpacked(at: bytes, counts: bytes, roles: dict[str, tuple[int, int]]) -> Measures:
        """The measures of which `packed` returned these."""
        measures = Measures(roles=roles)
        measures.counts.ravel()[np.frombuffer(at, np.uint16)] = np.frombuffer(counts, np.int64)
        return measures

    def __reduce__(self) -> tuple[object, ...]:
        return Measures.unpacked, self.packed()


@dataclass(frozen=True, slots=True)
class ShownStretch:
    """Consecutive tokens of a sequence, as columns of equal length."""

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
    """Recorded tokens, and those that another source (see `against`) has in their place."""

    start: int
    end: int
    """Half-open range of the recorded sequence; start == end: canonical tokens between two recorded ones."""
    ids: tuple[int, ...]
    """The canonical tokens, cut after 512."""
    pieces: tuple[str, ...]
    data: tuple[str, ...] = ()
    total: int = 0
    """Number of canonical tokens before the cut."""
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
    """One recorded sequence of a rollout: the tokens to show, and where another source has others."""

    where: Where
    turn: int | None
    length: int
    """Number of its tokens; the stretches may show fewer."""
    stretches: tuple[ShownStretch, ...]
    swaps: tuple[Swap, ...] = ()
    """By start, not overlapping; all other tokens are the same on both sides."""
    note: str = ""
    """A note for the reader: `the first 812 tokens are what turn 0 saw and sampled`, `ended by length`."""
    same_as: str = ""
    """The source that has the same tokens throughout: `template` or `re-encoding`; "" if there are swaps, or if
    the whole sequence was not compared.
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
    """16 hexadecimal digits; equal for rollouts with the same recorded tokens."""
    row_id: str = ""
    """The id that the row states, by which other runs name the same; "" if it states none. Raw: escape it."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What a graphical report gets of one rollout besides its findings."""

    measures: Measures
    view: View | None = None
    """Only for the first rollouts with each code; None for all others."""


def observed_of(result: Result) -> Observed | None:
    """The observations in a result; None if no report asked for them."""
    return result.observed if isinstance(result.observed, Observed) else None


_IDS = (
    *("rollout_id", "_ng_rollout_id", "id", "uid", "uuid", "trajectory_id", "traj_id", "episode_id", "sample_id"),
    *("request_id", "session_id", "conversation_id", "example_id", "task_id", "instance_id", "problem_id"),
)


def with_row_id(result: Result, row: Mapping[str, Any]) -> Result:
    """The result with the id that its row states set in its view; unchanged if it has no view."""
    observed = observed_of(result)
    if observed is None or observed.view is None:
        return result
    ids = (row[name] for name in _IDS if isinstance(row.get(name), str | int) and type(row[name]) is not bool)
    view = replace(observed.view, row_id=str(next(ids, ""))[:200])
    return replace(result, observed=replace(observed, view=view))


VIEWS_PER_CODE = 12
"""Rollouts of each code and severity that get a view: the first of a run."""
MAX_VIEWS = 240
"""Rollouts of a run that get a view."""


@dataclass(frozen=True, slots=True)
class ViewSize:
    """The most that a view shows of a rollout."""

    tokens: int = 3_000
    """Recorded tokens."""
    sequences: int = 64


REPORT_SIZE = ViewSize()
"""The size in a page that holds all of its rollouts."""


class ViewQuota:
    """Decides which rollouts get a view: the first with each code and severity, in the order of the logs.

    `offer` is for a process that audits one part of the logs: as it does not know the other parts, it makes too
    many views, never too few. `take` then decides in the order of all logs.

    The first `rows` of each log get a view in any case, outside of these limits.
    """

    __slots__ = ("_rows", "_seen", "_taken", "size")

    def __init__(self, rows: int = 0, size: ViewSize = REPORT_SIZE) -> None:
        self._rows, self.size = rows, size
        self._seen: dict[tuple[str, Severity], int] = {}
        self._taken = 0

    def take(self, findings: Iterable[Finding], row: int) -> ViewSize | None:
        """The size of the view of the next rollout with these findings; None if it gets none."""
        size = self.offer(findings, row)
        self._taken += size is not None and row >= self._rows
        return size

    def offer(self, findings: Iterable[Finding], row: int) -> ViewSize | None:
        """The same for the next rollout of a part, whose view may not be taken in the end."""
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
        """An independent quota with the same counts."""
        other = ViewQuota(self._rows, self.size)
        other._seen, other._taken = dict(self._seen), self._taken
        return other
