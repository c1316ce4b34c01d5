"""The result of a whole rescoring, counted rollout by rollout."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from tito_audit.record.arrays import Logprobs
from tito_audit.record.finding import Finding
from tito_audit.record.mismatch import Mismatch
from tito_audit.record.rollout import Place
from tito_audit.rescore.compare import Sums, used
from tito_audit.rescore.model import (
    BOUND,
    NEAR,
    Agreement,
    Behind,
    Price,
    RescoredRollout,
)
from tito_audit.rescore.scoring import Counts
from tito_audit.summary import Summary

LOWEST = -20
"""Lower logprobs count as this one in the plot."""
BINS = 40
WORST = 20
"""Prices kept in full."""


@dataclass(slots=True)
class CausePrice:
    """What all findings of one code and cause cost together."""

    code: str
    cause: str
    findings: int = 0
    segments: int = 0
    """Of sampled tokens."""
    sampled_tokens: int = 0
    other_tokens: int = 0
    sampled: float = 0.0
    """The summed logprob of what was sampled."""
    other: float = 0.0
    likelier: int = 0
    """Segments of which the other tokens are likelier."""
    lowest: float = 0.0
    """The lowest logprob of the other tokens of one segment."""
    behind: Behind = field(default_factory=Behind)

    def add(self, price: Price) -> None:
        self.findings += 1
        self.behind += price.behind
        for segment in price.segments:
            if math.isfinite(segment.difference):
                self.segments += 1
                self.sampled_tokens += len(segment.sampled_ids)
                self.other_tokens += len(segment.other_ids)
                self.sampled += segment.sampled
                self.other += segment.other
                self.likelier += bool(segment.other_ids) and segment.other > segment.sampled
                self.lowest = min(self.lowest, segment.other)


@dataclass(slots=True)
class RescoreSummary:
    """The counts of a run; complete after its last rollout."""

    provider: str
    model: str | None
    tolerance: float = BOUND
    scan: Summary = field(default_factory=Summary)
    """Files, tokenizer and notices."""
    rollouts: int = 0
    scored: int = 0
    """Rollouts with something scored."""
    scored_tokens: int = 0
    missing: int = 0
    """Sampled tokens without a recorded logprob that the model scored."""
    unreadable: int = 0
    disagreeing: int = 0
    """Rollouts whose logprobs disagree with the model's."""
    sums: Sums = field(default_factory=Sums)
    by_turn: dict[int, Sums] = field(default_factory=dict)
    plot: Counter[tuple[int, int]] = field(default_factory=Counter)
    """How many tokens lie in each square of recorded and model's logprob, counted from `LOWEST` up."""
    causes: dict[tuple[str, str], CausePrice] = field(default_factory=dict)
    worst: list[tuple[Place, Price]] = field(default_factory=list)
    unpriced: Counter[str] = field(default_factory=Counter)
    near: list[Behind] = field(default_factory=lambda: [Behind() for _ in NEAR])
    changed: int = 0
    """Turns and rows with drift."""
    changes: list[float] = field(default_factory=list)
    """The change of the summed logprob of each of them."""
    unscored: dict[str, tuple[int, Place]] = field(default_factory=dict)
    """By reason: how many calls and rows could not be scored, and where the first is."""
    findings: list[Finding] = field(default_factory=list)
    """LPR507 and LPR509, judged by the model's values."""
    mismatch: Mismatch | None = None
    """Why the recorded logprobs differ from the model's; None if none were compared."""
    explanations: Counter[str] = field(default_factory=Counter)
    weight_versions: Counter[str] = field(default_factory=Counter)
    counts: Counts = field(default_factory=Counts)
    seconds: float = 0.0

    @property
    def agreement(self) -> Agreement | None:
        """How all compared tokens agree; None where none could be compared."""
        return self.sums.agreement(self.tolerance)

    @property
    def failed(self) -> bool:
        """Whether recorded logprobs disagree with the model, or something with ids could not be scored."""
        whole = self.agreement
        disagrees = self.disagreeing > 0 or (whole is not None and whole.disagrees)
        return disagrees or bool(self.unscored) or self.unreadable > 0

    def add(self, result: RescoredRollout) -> None:
        if result.error:
            self.unreadable += 1
            self._unscored(f"the row cannot be read: {result.error}", result.place)
            return
        self.rollouts += 1
        self.scored += result.scored_tokens > 0
        self.scored_tokens += result.scored_tokens
        self.missing += result.missing
        self.disagreeing += result.agreement is not None and result.agreement.disagrees
        for sequence in used(result.compared):
            undrifted = ~sequence.drifted
            differences = (sequence.model - sequence.recorded)[undrifted]
            self.sums.add(differences)
            for turn in np.unique(sequence.turns[undrifted]).tolist():
                self.by_turn.setdefault(turn, Sums()).add(differences[sequence.turns[undrifted] == turn])
            squares = zip(_bins(sequence.recorded[undrifted]), _bins(sequence.model[undrifted]), strict=True)
            self.plot.update(squares)
        for price in result.prices:
            key = (price.finding.code, price.finding.hit.cause)
            self.causes.setdefault(key, CausePrice(*key)).add(price)
            self.worst.append((result.place, price))
        if len(self.worst) > 4 * WORST:
            self.worst = self.most_expensive(WORST)
        self.unpriced.update(result.unpriced)
        if result.near:
            self.near = [a + b for a, b in zip(self.near, result.near, strict=True)]
        self.changed += len(result.changed)
        self.changes += [swap.other - swap.sampled for swap in result.changed]
        for missing in result.unscored:
            self._unscored(missing.because, result.place)
        self.findings += result.findings
        for mismatch in result.mismatches:
            self.mismatch = self.mismatch or Mismatch(mismatch.sampler)
            self.mismatch.add(mismatch, result.place)
        if result.explanation:
            self.explanations[result.explanation] += 1
        self.weight_versions.update(result.weight_versions)

    def most_expensive(self, most: int) -> list[tuple[Place, Price]]:
        """The findings with the largest change, the worst first."""

        def size(entry: tuple[Place, Price]) -> float:
            difference = entry[1].difference
            return abs(difference) if math.isfinite(difference) else 0.0

        return sorted(self.worst, key=size, reverse=True)[:most]

    def _unscored(self, because: str, place: Place) -> None:
        number, first = self.unscored.get(because, (0, place))
        self.unscored[because] = (number + 1, first)


def _bins(values: Logprobs) -> list[int]:
    width = -LOWEST / BINS
    bins: list[int] = np.clip((values - LOWEST) / width, 0, BINS - 1).astype(int).tolist()
    return bins
