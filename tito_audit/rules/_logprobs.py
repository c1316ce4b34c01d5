"""The logprobs of sampled tokens, in the form that the LPR rules check."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tito_audit.evidence.logprob_values import IMPOSSIBLE, LOWEST_LOGPROB
from tito_audit.evidence.logprobs import ROUNDING, logprob_shifts
from tito_audit.evidence.model import Evidence
from tito_audit.record.arrays import Ids, Logprobs, Mask
from tito_audit.record.column import ColumnRole
from tito_audit.record.finding import Hit, Severity, Where
from tito_audit.record.memo import memoized
from tito_audit.record.rollout import effective_loss_mask
from tito_audit.record.runs import Run, trained_runs
from tito_audit.rules._words import head

_GRIDS = (0.125, 0.1, 0.0625, 0.03125, 0.01, 0.001, 0.0001)
"""Steps to which logs round: decimals, or what half precision leaves."""
LONG_RUN = 8
"""A run of exact zeros this long is more than the near-certain end of an answer (`"}]<|im_end|>`)."""
MAX_CHANCE = -6
"""Decimal logarithm of the chance below which a run of zeros is reported, given how rare the other zeros are."""


@dataclass(frozen=True)
class Certainty:
    """How often the model was certain in a rollout: exact zeros are natural only if others come near zero."""

    near: float
    """The magnitude up to which a value counts as near zero; 0 if no value of the rollout does."""
    close: int
    """How many values are near zero, zeros included."""
    zeros: int
    inner_runs: Sequence[int]
    """Lengths of the runs of zeros inside of answers; () if short ones are rare, as they never are in samples."""

    def is_like_others(self, values: SampledValues, start: int, end: int) -> bool:
        """Whether a run of values near zero lies next to another, or is like runs of zeros inside of answers."""
        if not self.near or values.logprobs[start] < -self.near:
            return False
        beside = values.logprobs[[at for at in (start - 1, end) if 0 <= at < len(values.logprobs)]]
        alike = [run for run in self.inner_runs if 4 * run >= end - start]
        return bool(((beside < 0) & (beside >= -self.near)).any()) or len(alike) > (end - start in alike)

    def may_be_sampled(self, values: SampledValues, start: int, end: int) -> bool:
        """Whether a model that is certain as often as this one may sample a run of values near zero."""
        run = end - start
        if not self.near or values.logprobs[start] < -self.near:
            return False
        # At least this often a certain token follows another: loops, copies and markup are certain for long.
        often = max((self.zeros - run + 1) / max(self.close - run + 2, 1), 0.8)
        return self.is_like_others(values, start, end) or run * math.log10(often) >= MAX_CHANCE


@memoized
def certainty(evidence: Evidence) -> Certainty:
    """How often the model was certain in the calls of a rollout, else in its row."""
    parts = sampled_values(evidence)
    parts = [part for part in parts if part.where is Where.COMPLETION] or parts
    pooled = np.concatenate([np.empty(0), *(part.in_loss for part in parts)])
    below = -pooled[(pooled < 0) & (pooled > LOWEST_LOGPROB)]
    lengths: list[int] = []
    inside: list[int] = []
    for part in parts:
        edges = {edge for run in part.runs for edge in run}
        for start, end in trained_runs(part.zeros & part.trained):
            lengths.append(end - start)
            if edges.isdisjoint((start, end)):
                inside.append(end - start)
    short = sum(length < LONG_RUN for length in lengths)
    near = 1e-5  # values this near to 0 show a model that was certain at times: float32 has only 0.0 below 6e-8
    if short and len(below) and below.min() > near and len(np.unique(below)) >= 8:
        # Rounding makes lone zeros too; if there are only long runs, no sampler wrote them. Fewer values may be
        # round by chance.
        for step in _GRIDS:
            steps = below / step
            if (np.abs(steps - np.rint(steps)) <= 1e-6 * (1 + steps)).all():
                near = 3 * step
                break
    if not len(below) or below.min() > near:
        return Certainty(0.0, 0, 0, ())
    close = int((below <= near).sum()) + sum(lengths)
    return Certainty(near, close, sum(lengths), inside if 2 * short >= len(lengths) else ())


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
    """Half-open runs of trained tokens, each sampled without a break."""
    sentinel: float | None
    expected: Logprobs | None
    """`[N]` what the calls recorded, NaN where they recorded nothing; None for a call, or a row without calls."""
    shifted: bool
    """Whether the column is shifted against its tokens: then only LPR502 reports."""

    def hit(
        self, evidence: Evidence, start: int, end: int, message: str, cause: str, severity: Severity | None = None
    ) -> Hit:
        """A hit on a range of these tokens."""
        recorded = head(evidence, self.ids[start:end])
        return Hit(self.where, start, end, message, self.turn, cause, severity, recorded)

    @cached_property
    def in_loss(self) -> Logprobs:
        """`[S]` the values that enter the loss, in order."""
        whole = len(self.runs) == 1 and self.runs[0] == (0, len(self.logprobs))
        return self.logprobs if whole else self.logprobs[self.trained]

    @cached_property
    def all_plausible(self) -> bool:
        """Whether every value in the loss may be a logprob: none missing, infinite, positive or a placeholder."""
        values = self.in_loss
        return len(values) > 0 and bool(values.max() <= 0) and bool(values.min() > LOWEST_LOGPROB)

    @cached_property
    def placeholders(self) -> Mask:
        """`[N]` True where a value is a placeholder: 1.0, -9999, or the format's sentinel."""
        sentinels = [*IMPOSSIBLE]
        if self.sentinel is not None and (self.sentinel > 0 or self.sentinel <= LOWEST_LOGPROB):
            sentinels.append(self.sentinel)
        others = self.logprobs[self.trained & np.isfinite(self.logprobs) & (self.logprobs != 1.0)]
        if len(others) and (others > ROUNDING).mean() > 0.5:  # most values are above zero, so 1.0 is none
            sentinels = [value for value in sentinels if value < 0]
        return np.asarray(np.isin(self.logprobs, sentinels))

    @cached_property
    def zeros(self) -> Mask:
        """`[N]` True where a value is exactly 0.0, but not -0.0, which only arithmetic produces."""
        return np.asarray((self.logprobs == 0) & ~np.signbit(self.logprobs))

    @cached_property
    def constant_groups(self) -> list[Sequence[Run]]:
        """Groups of runs in which all values are equal: one group of all runs, or one for each constant run."""
        if self.runs and _are_constant(self, self.runs):
            return [self.runs]
        return [[run] for run in self.runs if _are_constant(self, [run])]


@memoized
def sampled_values(evidence: Evidence) -> list[SampledValues]:
    """The logprobs of every completion, then of the training row, except columns that do not fit the tokens."""
    parts: list[SampledValues] = []
    for number, turn in enumerate(evidence.rollout.turns):
        values, ids = turn.completion_logprobs, turn.completion_ids
        if values is None or ids is None or not len(ids):
            continue
        sentinel = next((c.sentinel for c in turn.columns if c.role is ColumnRole.LOGPROBS), None)
        trained, runs = np.ones(len(ids), np.bool_), ((0, len(ids)),)
        parts.append(SampledValues(Where.COMPLETION, number, ids, values, trained, runs, sentinel, None, False))
    row, view = evidence.rollout.training_row, evidence.row
    if row is None or row.logprobs is None:
        return parts
    # By the mask, else by what was sampled.
    in_loss = effective_loss_mask(row) if row.loss_mask is not None else view.sampled if view is not None else None
    if in_loss is not None:
        spans = trained_runs(in_loss if view is None else in_loss & view.sampled)
        expected, shifted = view.expected_logprobs if view is not None else None, bool(logprob_shifts(evidence))
        ids, values = row.token_ids, row.logprobs
        parts.append(SampledValues(Where.ROW, None, ids, values, in_loss, spans, row.sentinel, expected, shifted))
    return parts


def _are_constant(values: SampledValues, runs: Sequence[Run]) -> bool:
    """Whether all values of these runs are equal, and enough of them for that to mean something."""
    start, end = runs[0]
    if end - start > 1 and values.logprobs[start] != values.logprobs[start + 1]:
        return False  # the quick exit: most runs differ at once
    where = np.concatenate([np.arange(start, end) for start, end in runs])
    logprobs = values.logprobs[where]
    if len(logprobs) < 4 or not np.isfinite(logprobs).all():
        return False
    if not values.all_plausible and values.placeholders[where].any():
        return False
    if logprobs[0] == 0:
        return len(logprobs) >= 8 and bool(values.zeros[where].all())
    return bool((logprobs == logprobs[0]).all())
