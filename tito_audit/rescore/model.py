"""Results of rescoring: recorded logprobs compared with a model's, and the price of each drift finding."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from tito_audit.evidence.logprob_values import IMPOSSIBLE, LOWEST_LOGPROB
from tito_audit.record.arrays import Ids, Logprobs, Mask
from tito_audit.record.finding import Finding, Where
from tito_audit.record.mismatch import RowMismatch
from tito_audit.record.rollout import Place
from tito_audit.rescore.plan import Scorable, Unscored

TOLERANCE = 0.05
"""The mean |difference| up to which two engines with the same weights agree: NeMo-RL's tests hold the mean of
exp(|difference|) below 1.05 (`token_mult_prob_error`)."""
MIN_TOKENS = 8
"""With fewer tokens no disagreement is reported."""
EDGES = (0.1, 1.0)
"""The differences above each of these are counted."""
NEAR = (0, 4, 16, 64)
"""Distances from the last drifted token, in tokens; each stands for those up to the next."""


@dataclass(frozen=True, slots=True, eq=False)
class RescoredLogprobs:
    """The recorded and the model's logprobs of those tokens of a call or row that have both."""

    where: Where
    turn: int | None
    positions: Ids
    """`[N]` positions in the completion or the row."""
    turns: Ids
    """`[N]` the call that sampled each token; -1 where unknown."""
    recorded: Logprobs
    """`[N]`"""
    model: Logprobs
    """`[N]`"""
    drifted: Mask
    """`[N]` True from the first token that was not sampled on: from there the model saw another context."""

    @property
    def differences(self) -> Logprobs:
        """`[M]` model minus recorded, of the tokens before any drift."""
        return (self.model - self.recorded)[~self.drifted]


@dataclass(frozen=True, slots=True)
class Agreement:
    """How two columns of logprobs of the same tokens agree; differences are model minus recorded."""

    tokens: int
    mean: float
    size: float
    """The mean of the absolute differences."""
    largest: float
    k1: float
    """Schulman's estimates of the divergence of what sampled from the model (joschu.net/blog/kl-approx.html)."""
    k3: float
    above: tuple[float, ...]
    """The share of tokens that differ by more than each of `EDGES`."""
    disagrees: bool
    """Whether the mean |difference| is above the tolerance by two standard errors."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over differences of logprobs: the model's, or those of other tokens, minus the recorded ones."""

    tokens: int = 0
    total: float = 0.0
    size: float = 0.0
    """The sum of the absolute differences."""
    largest: float = 0.0
    above: tuple[int, ...] = (0,) * len(EDGES)
    """How many differences are above each of `EDGES`."""
    squares: float = 0.0
    k3: float = 0.0

    @classmethod
    def of(cls, differences: Logprobs) -> Sums:
        sizes = np.abs(differences)
        if not len(sizes):
            return cls()
        above = tuple(int((sizes > edge).sum()) for edge in EDGES)
        with np.errstate(over="ignore"):
            k3 = float((np.expm1(differences) - differences).sum())
        sums = float(differences.sum()), float(sizes.sum()), float(sizes.max())
        return cls(len(sizes), *sums, above, float((sizes**2).sum()), k3)

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.tokens + other.tokens,
            self.total + other.total,
            self.size + other.size,
            max(self.largest, other.largest),
            tuple(a + b for a, b in zip(self.above, other.above, strict=True)),
            self.squares + other.squares,
            self.k3 + other.k3,
        )

    def agreement(self, tolerance: float = TOLERANCE) -> Agreement | None:
        """How the two columns agree; None without any token."""
        n = self.tokens
        if not n:
            return None
        mean, size = self.total / n, self.size / n
        spread = math.sqrt(max(self.squares - n * size * size, 0) / (n - 1)) if n > 1 else 0.0
        above = n >= MIN_TOKENS and size - 2 * spread / math.sqrt(n) > tolerance
        shares = tuple(count / n for count in self.above)
        return Agreement(n, mean, size, self.largest, -mean, self.k3 / n, shares, above)


@dataclass(frozen=True, slots=True)
class Segment:
    """One span of drifted tokens, with the summed logprob of each side in its own context."""

    sampled_ids: tuple[int, ...]
    other_ids: tuple[int, ...]
    sampled: float
    """Of what was sampled; NaN if the model did not sample these tokens."""
    other: float
    """Of the tokens that the training row, next prompt, template or re-encoding has instead."""

    @property
    def difference(self) -> float:
        return self.other - self.sampled


@dataclass(frozen=True, slots=True)
class Price:
    """What one drift finding costs."""

    finding: Finding
    against: str
    """Where the other tokens come from: `re-encoding`, `next prompt`, `training row`, `template`."""
    segments: tuple[Segment, ...]
    behind: Sums
    """Of the equal sampled tokens after it, up to the next drifted token."""
    share: float
    """The share of the finding in all that its turn or row changes: the absolute differences of its segments among
    those of all segments and equal tokens; NaN where nothing changes."""

    @property
    def sampled(self) -> float:
        """The summed logprob of what was sampled; NaN if the model did not sample some of it."""
        return float(sum(segment.sampled for segment in self.segments))

    @property
    def other(self) -> float:
        """The summed logprob of the other tokens; NaN if they replace tokens that were not sampled."""
        return float(sum(segment.other for segment in self.segments))

    @property
    def difference(self) -> float:
        return self.other - self.sampled


@dataclass(frozen=True, slots=True)
class ChangedSum:
    """A turn or row with drift: the summed logprob of all that was sampled in it, and of what replaced it."""

    where: Where
    turn: int | None
    sampled: float
    other: float


@dataclass(slots=True, eq=False)
class RescoredRollout:
    """A rollout with a model's logprobs, and what its drift costs."""

    place: Place
    error: str = ""
    """Why the row could not be read; "" if it was."""
    compared: Sequence[RescoredLogprobs] = ()
    agreement: Agreement | None = None
    """Over all compared tokens before any drift; None if there are none."""
    prices: list[Price] = field(default_factory=list)
    unpriced: Counter[str] = field(default_factory=Counter)
    """How many drift findings have no price, by reason."""
    changed: list[ChangedSum] = field(default_factory=list)
    near: list[Sums] = field(default_factory=lambda: [Sums() for _ in NEAR])
    """How equal sampled tokens change, by their distance from the last drifted token (`NEAR`)."""
    unscored: list[Unscored] = field(default_factory=list)
    findings: Sequence[Finding] = ()
    """LPR507 and LPR509, judged by the model's logprobs."""
    mismatches: Sequence[RowMismatch] = ()
    """Why the recorded logprobs differ from the model's."""
    explanation: str = ""
    """The proven explanation of a disagreement; "" if there is none."""
    scored_tokens: int = 0
    """How many sampled tokens the model scored."""
    weight_versions: Sequence[str] = ()

    @property
    def missing(self) -> int:
        """How many tokens the model scored that have no recorded logprob."""
        return self.scored_tokens - sum(len(pair.positions) for pair in self.compared)

    @property
    def judged(self) -> list[RescoredLogprobs]:
        """The calls whose logprobs are judged; the row only if no call has logprobs."""
        calls = [pair for pair in self.compared if pair.where is Where.COMPLETION and len(pair.positions)]
        return calls or [pair for pair in self.compared if pair.where is Where.ROW]


# Recorded logprobs compared with a model's: how well they agree, and what explains it if they do not.

_ROUNDING = 1e-3
_ALMOST_CERTAIN = -1.0
"""A recorded 0.0 is taken for a placeholder unless the model's logprob is above this."""


def pair_logprobs(part: Scorable, scores: Logprobs) -> RescoredLogprobs:
    """Pair the recorded logprobs of a call or row with the model's, `scores` `[T]` of `part.ids`."""
    model = scores[part.offset :]
    recorded = part.recorded if part.recorded is not None else np.full(len(model), np.nan)
    at = np.flatnonzero(part.sampled & is_logprob(recorded, model, part.sentinel) & np.isfinite(model))
    return RescoredLogprobs(
        part.where, part.turn, at.astype(np.int32), part.turns[at], recorded[at], model[at], part.drifted[at]
    )


def is_logprob(recorded: Logprobs, model: Logprobs, sentinel: float | None) -> Mask:
    """`[N]` which recorded values are logprobs: not missing, impossible or a placeholder.

    A 0.0 is a logprob where the model is nearly certain of the token.
    """
    with np.errstate(invalid="ignore"):
        out = np.isfinite(recorded) & (recorded <= _ROUNDING) & (recorded > LOWEST_LOGPROB)
        certain = ~(model <= _ALMOST_CERTAIN)
    for fill in (*IMPOSSIBLE, *(() if sentinel is None else (sentinel,))):
        out &= (recorded != fill) | ((fill == 0) & certain)
    return np.asarray(out & ((recorded != 0) | certain))


def explain_disagreement(pairs: Sequence[RescoredLogprobs], tolerance: float = TOLERANCE) -> str:
    """A mistake in the recorded logprobs which, undone, brings them within the tolerance; "" if there is none."""
    explanations = []
    for shift in (1, -1, 2, -2):
        place = "place" if abs(shift) == 1 else "places"
        side = "behind" if shift > 0 else "ahead of"
        words = f"the recorded logprobs are {abs(shift)} {place} {side} their tokens"
        here = slice(max(-shift, 0), -shift if shift > 0 else None)
        there = slice(max(shift, 0), shift if shift < 0 else None)
        # The differences if each recorded logprob belonged to the token `shift` places before it.
        differences = []
        for pair in pairs:
            gap = np.abs(pair.positions[there] - pair.positions[here])
            inside = (gap == abs(shift)) & (pair.turns[here] == pair.turns[there]) & ~pair.drifted[here]
            differences.append(np.abs(pair.model[here] - pair.recorded[there])[inside])
        explanations.append((words, differences))
    conversions: list[tuple[str, Callable[[Logprobs], Logprobs]]] = [
        ("the recorded logprobs are logarithms of base 2", partial(np.multiply, math.log(2))),
        ("the recorded logprobs are logarithms of base 10", partial(np.multiply, math.log(10))),
        ("the recorded values are probabilities, not logprobs", np.log),
    ]
    with np.errstate(divide="ignore", invalid="ignore"):
        for words, convert in conversions:
            explanations.append((words, [np.abs(p.model - convert(p.recorded))[~p.drifted] for p in pairs]))
    for words, parts in explanations:
        sizes = np.concatenate(parts)
        if len(sizes) >= MIN_TOKENS and sizes.mean() <= tolerance:
            return words
    return ""


_COARSE = np.arange(0.1, 2.55, 0.05)
_FINE = np.arange(-0.05, 0.055, 0.01)
_VOCABULARY = 2**18
"""More tokens than any model has."""


def fit_temperature(recorded: Logprobs, model: Logprobs, top: Logprobs, tolerance: float) -> float | None:
    """The temperature at which the model gives the recorded logprobs within the tolerance; None if none is proved.

    `recorded` and `model` `[N]` are logprobs of the same tokens, the model's at temperature 1; `top` `[N, K]` are
    those of the likeliest tokens, -inf where there are fewer.

    The mass outside the likeliest tokens bounds the normalization from both sides. A temperature is proved only if
    these bounds are within the tolerance of each other, and temperature 1 does not fit.
    """
    agreement = Sums.of(model - recorded).agreement(tolerance)
    if agreement is None or not agreement.disagrees:
        return None
    coarse = min(_COARSE.tolist(), key=lambda t: _fit_error(recorded, model, top, t)[0])
    best = min((coarse + _FINE).tolist(), key=lambda t: _fit_error(recorded, model, top, t)[0])
    error, width = _fit_error(recorded, model, top, best)
    return round(best, 2) if error <= tolerance and width <= tolerance else None


def _fit_error(recorded: Logprobs, model: Logprobs, top: Logprobs, temperature: float) -> tuple[float, float]:
    """The mean |difference| from the middle of the possible logprobs, and the mean width of their range."""
    power = 1 / temperature
    rest = np.clip(1 - np.exp(top).sum(axis=1), 0, 1)
    inside = np.exp(top * power).sum(axis=1)
    if power >= 1:
        least = np.zeros_like(rest)
        most = rest * np.exp(top.min(axis=1, initial=0, where=np.isfinite(top))) ** (power - 1)
    else:
        least, most = rest**power, rest**power * _VOCABULARY ** (1 - power)
    low, high = model * power - np.log(inside + most), model * power - np.log(inside + least)
    return float(np.abs(recorded - (low + high) / 2).mean()), float((high - low).mean())
