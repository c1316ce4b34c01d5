"""The logprobs of sampled tokens, in the form the LPR rules check."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tito_audit.evidence.fill import IMPOSSIBLE
from tito_audit.evidence.logprobs import ROUNDING, shifts
from tito_audit.evidence.model import Evidence, RowView
from tito_audit.record.arrays import Ids, Logprobs, Mask
from tito_audit.record.column import ColumnRole
from tito_audit.record.finding import Hit, Severity, Where
from tito_audit.record.rollout import TrainingRow, seen_by_loss
from tito_audit.record.runs import ManyRuns, Run, trained_runs
from tito_audit.rules._words import shown

_EQUAL = 4
_EQUAL_ZERO = 8
_SENTINELS_BELOW = -1000
"""A value this low is a format's sentinel: no sampled token has such a logprob."""


@dataclass(frozen=True)
class SampledValues:
    """The logprobs of one completion, or of the tokens of the row that are in the loss."""

    where: Where
    turn: int | None
    ids: Ids
    """`[N]`"""
    logprobs: Logprobs
    """`[N]`"""
    trained: Mask
    """`[N]` tokens whose logprob enters the loss; in a completion, all."""
    runs: Sequence[Run]
    """Runs `[start, end)` of trained tokens, each sampled without a break."""
    sentinel: float | None
    expected: Logprobs | None
    """`[N]` what the calls recorded, for a row whose calls are known; NaN where they recorded nothing."""
    shifted: bool
    """True when the column is shifted against its tokens: then only LPR502 reports."""

    def hit(
        self, evidence: Evidence, start: int, end: int, message: str, cause: str, severity: Severity | None = None
    ) -> Hit:
        """A hit on a range of its tokens."""
        recorded = shown(evidence, self.ids[start:end])
        return Hit(self.where, start, end, message, self.turn, cause, severity, recorded)

    @cached_property
    def in_loss(self) -> Logprobs:
        """`[S]` the values that enter the loss, in order."""
        whole = len(self.runs) == 1 and self.runs[0] == (0, len(self.logprobs))
        return self.logprobs if whole else self.logprobs[self.trained]

    @cached_property
    def ordinary(self) -> bool:
        """True when every value in the loss is one that a probability can have.

        That is, none is missing, infinite, above zero or a placeholder; 0.0 counts as ordinary.
        """
        # Most columns are ordinary everywhere, and checking all is cheaper than selecting the trained part.
        return _ordinary(self.logprobs) or _ordinary(self.in_loss)

    @cached_property
    def placeholders(self) -> Mask:
        """`[N]` True where a value is a sentinel, not the logarithm of a probability."""
        return _placeholders(self)

    @cached_property
    def zeros(self) -> Mask:
        """`[N]` True where a value is exactly 0.0; not for -0.0, which only arithmetic produces."""
        return np.asarray((self.logprobs == 0) & ~np.signbit(self.logprobs))

    @cached_property
    def constant_stretches(self) -> list[Sequence[Run]]:
        """Groups of runs in which all values are equal: one group of all runs, or one for each constant run."""
        runs = self.runs
        if runs and _constant(self, runs):
            return [runs]
        runs = runs.long(_EQUAL) if isinstance(runs, ManyRuns) else runs
        return [[run] for run in runs if _constant(self, [run])]


def sampled_values(evidence: Evidence) -> list[SampledValues]:
    """The logprobs of every completion, then of the training row; without columns that fit no tokens."""
    return evidence.once("sampled values", lambda evidence: list(_sampled_values(evidence)))


def _sampled_values(evidence: Evidence) -> Iterator[SampledValues]:
    for number, turn in enumerate(evidence.rollout.turns):
        values, ids = turn.completion_logprobs, turn.completion_ids
        if values is None or ids is None or not len(ids):
            continue
        sentinel = next((c.sentinel for c in turn.columns if c.role is ColumnRole.LOGPROBS), None)
        everything = np.ones(len(ids), np.bool_)
        yield SampledValues(
            Where.COMPLETION, number, ids, values, everything, ((0, len(ids)),), sentinel, None, False
        )
    row = evidence.rollout.training_row
    if row is None or row.logprobs is None:
        return
    trained = _trained(row, evidence.row)
    if trained is not None:
        runs = trained_runs(trained if evidence.row is None else trained & evidence.row.sampled)
        expected = evidence.row.expected_logprobs if evidence.row is not None else None
        shifted = bool(shifts(evidence))
        yield SampledValues(
            Where.ROW, None, row.token_ids, row.logprobs, trained, runs, row.sentinel, expected, shifted
        )


def _ordinary(logprobs: Logprobs) -> bool:
    """True when there are values and each lies above the sentinels and not above 0; False if any is NaN."""
    return len(logprobs) > 0 and bool(logprobs.max() <= 0) and bool(logprobs.min() > _SENTINELS_BELOW)


def _placeholders(values: SampledValues) -> Mask:
    """`[N]` True where a value is a sentinel: 1.0, -9999, or the format's own.

    1.0 does not count when most other values are above zero: then the column has the wrong unit or sign. 0.0 never
    counts, since a certain token reaches it.
    """
    marks = [*IMPOSSIBLE]
    if values.sentinel is not None and (values.sentinel > 0 or values.sentinel <= _SENTINELS_BELOW):
        marks.append(values.sentinel)
    others = values.logprobs[values.trained & np.isfinite(values.logprobs) & (values.logprobs != 1.0)]
    if len(others) and (others > ROUNDING).mean() > 0.5:
        marks = [mark for mark in marks if mark < 0]
    return np.asarray(np.isin(values.logprobs, marks))


def _constant(values: SampledValues, parts: Sequence[Run]) -> bool:
    """True when all values of these runs are equal, and enough of them for that to mean something."""
    start, end = parts[0]
    if end - start > 1 and values.logprobs[start] != values.logprobs[start + 1]:
        return False  # the quick exit: most runs differ at once
    if isinstance(parts, ManyRuns):
        where = np.flatnonzero(parts.moved(0, len(values.logprobs)))
    else:
        where = np.concatenate([np.arange(start, end) for start, end in parts])
    mine = values.logprobs[where]
    if len(mine) < _EQUAL or not np.isfinite(mine).all():
        return False
    if not values.ordinary and values.placeholders[where].any():
        return False
    if mine[0] == 0:
        return len(mine) >= _EQUAL_ZERO and bool(values.zeros[where].all())
    return bool((mine == mine[0]).all())


def _trained(row: TrainingRow, view: RowView | None) -> Mask | None:
    """`[T]` what enters the loss, by the mask or else by what was sampled; None if neither is known."""
    if row.loss_mask is not None:
        return seen_by_loss(row)
    return view.sampled if view is not None else None
