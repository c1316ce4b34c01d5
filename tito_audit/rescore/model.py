"""Results of rescoring: a model's values compared with the recorded ones, and the price of each drift finding."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tito_audit.record.arrays import Ids, Logprobs, Mask
from tito_audit.record.finding import Finding, Where
from tito_audit.record.mismatch import RowMismatch
from tito_audit.record.rollout import Place

BOUND = 0.05
"""The mean |difference| up to which two engines with the same weights agree: NeMo-RL's tests hold the mean of
exp(|difference|) below 1.05 (`token_mult_prob_error`)."""
FEWEST = 8
"""The fewest tokens whose mean is judged."""
EDGES = (0.1, 1.0)
"""Differences above these are counted."""
NEAR = (0, 4, 16, 64)
"""Distances in tokens after a difference; each counts up to the next."""


@dataclass(frozen=True, slots=True)
class Want:
    """A sequence to score, and from which position on."""

    ids: Ids
    """`[T]`"""
    start: int
    """At least 1: nothing comes before the first token."""


@dataclass(frozen=True, slots=True)
class Unscored:
    """A sequence that could not be scored, with the reason."""

    where: Where
    turn: int | None
    because: str


@dataclass(frozen=True, slots=True, eq=False)
class ScorePair:
    """Recorded and model logprobs of one call or row; only tokens that have both."""

    where: Where
    turn: int | None
    at: Ids
    """`[N]` positions in the completion or the row."""
    turns: Ids
    """`[N]` the call that sampled each token; -1 where unknown."""
    recorded: Logprobs
    """`[N]`"""
    model: Logprobs
    """`[N]`"""
    drifted: Mask
    """`[N]` True from the first token that was not sampled on: there the model sees another context."""

    @property
    def differences(self) -> Logprobs:
        """Model minus recorded, before any drift."""
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
    """Whether the mean |difference|, less two standard errors, is above the tolerance."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Sums over the differences of logprobs, the model's or other side's minus the recorded ones."""

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
    def of(cls, differences: Logprobs) -> Changes:
        sizes = np.abs(differences)
        if not len(sizes):
            return cls()
        above = tuple(int((sizes > edge).sum()) for edge in EDGES)
        with np.errstate(over="ignore"):
            k3 = float((np.expm1(differences) - differences).sum())
        sums = float(differences.sum()), float(sizes.sum()), float(sizes.max())
        return cls(len(sizes), *sums, above, float((sizes**2).sum()), k3)

    def __add__(self, other: Changes) -> Changes:
        return Changes(
            self.tokens + other.tokens,
            self.total + other.total,
            self.size + other.size,
            max(self.largest, other.largest),
            tuple(a + b for a, b in zip(self.above, other.above, strict=True)),
            self.squares + other.squares,
            self.k3 + other.k3,
        )

    def agreement(self, tolerance: float = BOUND) -> Agreement | None:
        """How the two columns agree; None without any token."""
        n = self.tokens
        if not n:
            return None
        mean, size = self.total / n, self.size / n
        spread = math.sqrt(max(self.squares - n * size * size, 0) / (n - 1)) if n > 1 else 0.0
        above = n >= FEWEST and size - 2 * spread / math.sqrt(n) > tolerance
        shares = tuple(count / n for count in self.above)
        return Agreement(n, mean, size, self.largest, -mean, self.k3 / n, shares, above)


@dataclass(frozen=True, slots=True)
class Segment:
    """One span of tokens that differ, with the summed logprob of each side in its own context."""

    sampled_ids: tuple[int, ...]
    other_ids: tuple[int, ...]
    sampled: float
    """Of what was sampled; NaN where these tokens were not sampled but given."""
    other: float
    """Of the tokens in the training row, the next prompt, the template's text or the re-encoded text."""

    @property
    def difference(self) -> float:
        """Other minus sampled."""
        return self.other - self.sampled


@dataclass(frozen=True, slots=True)
class Price:
    """What one drift finding costs."""

    finding: Finding
    against: str
    """Where the other tokens come from: `re-encoding`, `next prompt`, `training row`, `template`."""
    segments: tuple[Segment, ...]
    behind: Changes
    """Of the equal sampled tokens after it, up to the next difference."""
    share: float
    """The finding's share of all that its turn or row changes: the absolute differences of its segments among
    those of all segments and of all equal tokens; NaN where nothing changes."""

    @property
    def sampled(self) -> float:
        """The summed logprob of what was sampled; NaN where these tokens were given."""
        return float(sum(segment.sampled for segment in self.segments))

    @property
    def other(self) -> float:
        """The summed logprob of the other tokens; NaN where they replace tokens that were given."""
        return float(sum(segment.other for segment in self.segments))

    @property
    def difference(self) -> float:
        """Other minus sampled."""
        return self.other - self.sampled


@dataclass(frozen=True, slots=True)
class ChangedSum:
    """A whole turn or row with drift: the summed logprob of everything sampled in it, and of what replaced it."""

    where: Where
    turn: int | None
    sampled: float
    other: float


@dataclass(slots=True, eq=False)
class RescoredRollout:
    """A rollout with a model's logprobs, and what its drift costs."""

    place: Place
    error: str = ""
    """Why the row could not be read; else "" """
    compared: Sequence[ScorePair] = ()
    agreement: Agreement | None = None
    """Over all compared tokens before any drift; None without any."""
    prices: list[Price] = field(default_factory=list)
    unpriced: Counter[str] = field(default_factory=Counter)
    """By reason: drift findings without a price."""
    changed: list[ChangedSum] = field(default_factory=list)
    """The turns and rows in which tokens drifted."""
    near: list[Changes] = field(default_factory=lambda: [Changes() for _ in NEAR])
    """How equal sampled tokens change, by their distance from the last difference before them: see `NEAR`."""
    unscored: list[Unscored] = field(default_factory=list)
    findings: Sequence[Finding] = ()
    """LPR507 and LPR509, judged by the model's values."""
    mismatches: Sequence[RowMismatch] = ()
    """Why the recorded logprobs differ from the model's."""
    explanation: str = ""
    """The proven explanation of a disagreement; else "" """
    scored_tokens: int = 0
    """Recorded tokens with a value of the model."""
    weight_versions: Sequence[str] = ()

    @property
    def missing(self) -> int:
        """Sampled tokens with a value of the model and without a recorded one."""
        return self.scored_tokens - sum(len(pair.at) for pair in self.compared)
