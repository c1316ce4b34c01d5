"""Why a sampler's logprobs and a trainer's of the same tokens differ: shares of the total by cause."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from tito_audit.record.rollout import Place

MISMATCH = "mismatch"
"""The key of a rollout's mismatches in the memo of its evidence."""
EDGES = (1e-5, 1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Edges of the histogram of |logit difference|; one bin more on either side."""


class MismatchCause(StrEnum):
    """Why the sampler's and the trainer's logprob of a token differ."""

    DRIFT = "drift"
    PLACEHOLDER = "placeholder"
    ROUTING = "routing"
    TEMPERATURE = "temperature"
    TRUNCATED = "truncated sampling"
    TEMPERED = "temperature and truncated sampling"
    STALE = "stale weights"
    SHIFTED = "shifted column"
    COPIED = "equal to the bit"
    NUMERICS = "numerics"
    UNKNOWN = "cannot tell"


ADVICE = {
    MismatchCause.DRIFT: "pass ids on instead of text, and repair the log with `splice` or `fork`",
    MismatchCause.PLACEHOLDER: "write null where there is no logprob, and leave these tokens out of the loss",
    MismatchCause.ROUTING: "replay the sampler's experts in the trainer, or leave these tokens out of the loss",
    MismatchCause.TEMPERATURE: "divide the trainer's logits by the sampling temperature, or log the sampler's "
    "processed logprobs",
    MismatchCause.TRUNCATED: "log the sampler's raw logprobs, hand the kept set to the trainer, or sample with "
    "top-p 1 and without top-k",
    MismatchCause.TEMPERED: "apply both in the trainer, or log the sampler's raw logprobs",
    MismatchCause.STALE: "update the sampler's weights more often, or mask tokens by their age",
    MismatchCause.SHIFTED: "log each value beside its own token",
    MismatchCause.COPIED: "compute one of the columns by the other engine: as logged, the ratio is 1 at every "
    "token and the clip never acts",
    MismatchCause.NUMERICS: "importance ratios correct for it",
    MismatchCause.UNKNOWN: "`rescore` tells which side is right; log token versions and calls to tell more",
}
"""What to do for each cause."""


@dataclass(frozen=True, slots=True)
class CauseShare:
    """The tokens that differ for one cause."""

    tokens: int = 0
    size: float = 0.0
    """The sum of their |trainer logprob - sampler logprob|."""

    @property
    def mean(self) -> float:
        """Their mean |difference|; 0 without tokens."""
        return self.size / self.tokens if self.tokens else 0.0

    def is_staler(self, newest: CauseShare) -> bool:
        """Whether these tokens of older weights differ half as much again as those of the newest."""
        return min(self.tokens, newest.tokens) >= 16 and self.mean >= 1.5 * newest.mean + 1e-3

    def __neg__(self) -> CauseShare:
        return CauseShare(-self.tokens, -self.size)

    def __add__(self, other: CauseShare) -> CauseShare:
        return CauseShare(self.tokens + other.tokens, self.size + other.size)


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate, and the range of values that fit the tokens."""

    best: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class WorstToken:
    """The token that differs most for one cause."""

    cause: str
    turn: int | None
    at: int
    """Its position in the completion or the row."""
    token_id: int
    sampler: float
    trainer: float

    @property
    def size(self) -> float:
        """|trainer - sampler|."""
        return abs(self.trainer - self.sampler)


@dataclass(frozen=True, slots=True)
class RowMismatch:
    """Why a sampler's and a trainer's logprobs of one rollout differ."""

    sampler: str
    """The name of the column; so for `trainer`."""
    trainer: str
    tokens: int
    shares: tuple[tuple[str, CauseShare], ...]
    """By cause, the largest first."""
    confident: int = 0
    """Tokens with a probability above 0.99 for the sampler and below 0.01 for the trainer."""
    histogram: tuple[int, ...] = ()
    """`[len(EDGES) + 1]` tokens by |logit difference|; () where the rollout is within the bounds."""
    temperature: Interval | None = None
    """The sampler's temperature if the trainer's is 1; the log only shows their ratio."""
    mass: Interval | None = None
    """The least probability mass that truncated sampling kept, where a threshold shows it."""
    truncation: str = ""
    """`top-p`, `top-k`, `min-p`, or "" if the log does not tell which."""
    versions: tuple[tuple[int, CauseShare, CauseShare], ...] = ()
    """(weight version, its tokens explained by NUMERICS, its tokens of UNKNOWN cause)."""
    rerouted: tuple[CauseShare, CauseShare] | None = None
    """The same two shares of tokens routed to other experts; None if the log lacks the experts of either side."""
    worst: tuple[WorstToken, ...] = ()
    notes: tuple[tuple[str, str], ...] = ()
    """(cause, what else the log says about it)."""
    points: tuple[tuple[float, float, bool], ...] = ()
    """Some tokens: (trainer's logprob, sampler's minus trainer's, whether that is numerics)."""

    @property
    def size(self) -> float:
        """The sum of |trainer minus sampler|."""
        return sum(share.size for _, share in self.shares)


@dataclass(slots=True)
class LogMismatch:
    """Why two columns of a log differ: sums over its rollouts."""

    sampler: str
    rollouts: int = 0
    tokens: int = 0
    _shares: dict[str, CauseShare] = field(default_factory=dict)
    confident: int = 0
    """Tokens that the sampler gave more than 0.99 and the trainer less than 0.01."""
    histogram: list[int] = field(default_factory=lambda: [0] * (len(EDGES) + 1))
    temperatures: list[Interval] = field(default_factory=list)
    """From the first 1,024 rollouts that show one; so for `masses`."""
    masses: list[Interval] = field(default_factory=list)
    truncations: Counter[str] = field(default_factory=Counter)
    """Rollouts by `RowMismatch.truncation`."""
    _versions: dict[int, tuple[CauseShare, CauseShare]] = field(default_factory=dict)
    notes: dict[str, Counter[str]] = field(default_factory=dict)
    """By cause, the rollouts with each note."""
    _rerouted: tuple[CauseShare, CauseShare] = CauseShare(), CauseShare()
    worst: dict[str, tuple[Place, WorstToken]] = field(default_factory=dict)
    points: list[tuple[float, float, bool]] = field(default_factory=list)
    """Every n-th of the rollouts' points."""
    _seen: int = 0
    _every: int = 1

    def add(self, row: RowMismatch, place: Place) -> None:
        """Count a rollout."""
        self.rollouts += 1
        self.tokens += row.tokens
        self.confident += row.confident
        for cause, share in row.shares:
            self._shares[cause] = self._shares.get(cause, CauseShare()) + share
        if row.histogram:
            self.histogram = [a + b for a, b in zip(self.histogram, row.histogram, strict=True)]
        for estimates, value in ((self.temperatures, row.temperature), (self.masses, row.mass)):
            if value is not None and len(estimates) < 1024:
                estimates.append(value)
        for point in row.points:
            if self._seen % self._every == 0:
                self.points.append(point)
            self._seen += 1
        if len(self.points) > 800:
            self.points, self._every = self.points[::2], 2 * self._every
        for cause, words in row.notes:
            self.notes.setdefault(cause, Counter())[words] += 1
        if row.truncation:
            self.truncations[row.truncation] += 1
        for version, numerics, unknown in row.versions:
            before = self._versions.get(version, (CauseShare(), CauseShare()))
            self._versions[version] = before[0] + numerics, before[1] + unknown
        if row.rerouted is not None:
            self._rerouted = self._rerouted[0] + row.rerouted[0], self._rerouted[1] + row.rerouted[1]
        for token in row.worst:
            if token.cause not in self.worst or token.size > self.worst[token.cause][1].size:
                self.worst[token.cause] = place, token

    @property
    def shares(self) -> dict[str, CauseShare]:
        """By cause, the largest first.

        Unexplained tokens of older weights that differ more than those of the newest count as STALE; tokens with
        other experts that differ twice as much as the others count as ROUTING.
        """
        shares = dict(self._shares)

        def move(parts: tuple[CauseShare, CauseShare], cause: MismatchCause) -> None:
            for source, part in zip((MismatchCause.NUMERICS, MismatchCause.UNKNOWN), parts, strict=True):
                if part.tokens:
                    shares[source] += -part
                    shares[cause] = shares.get(cause, CauseShare()) + part

        wholes = {version: numerics + unknown for version, (numerics, unknown) in self._versions.items()}
        newest = max(wholes, default=0)
        for version, whole in wholes.items():
            if version < newest and whole.is_staler(wholes[newest]):
                move(self._versions[version], MismatchCause.STALE)
        rerouted = self._rerouted[0] + self._rerouted[1]
        others = shares.get(MismatchCause.NUMERICS, CauseShare()) + shares.get(MismatchCause.UNKNOWN, CauseShare())
        others += -rerouted
        enough = MismatchCause.STALE not in shares and min(rerouted.tokens, others.tokens) >= 16
        if enough and rerouted.mean >= 2 * others.mean:
            move(self._rerouted, MismatchCause.ROUTING)
        shares = {cause: share for cause, share in shares.items() if share.tokens}
        return dict(sorted(shares.items(), key=lambda item: (-item[1].size, item[0])))

    @property
    def temperature(self) -> Interval | None:
        """The median of the rollouts' estimates."""
        return _median(self.temperatures)

    @property
    def mass(self) -> Interval | None:
        """The median of the rollouts' estimates."""
        return _median(self.masses)


def _median(intervals: list[Interval]) -> Interval | None:
    if not intervals:
        return None
    best, low, high = (
        sorted(values)[len(values) // 2]
        for values in zip(*((i.best, i.low, i.high) for i in intervals), strict=True)
    )
    return Interval(best, low, high)
