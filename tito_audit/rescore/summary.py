"""The counts of a rescoring, and their tables for the terminal and the HTML page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tito_audit.record.arrays import Logprobs
from tito_audit.record.finding import Finding
from tito_audit.record.mismatch import LogMismatch, MismatchCause
from tito_audit.record.rollout import Place
from tito_audit.rescore.journal import RequestCounts
from tito_audit.rescore.model import EDGES, NEAR, TOLERANCE, Agreement, Price, RescoredRollout, Sums
from tito_audit.summary import Summary
from tito_audit.terminal.escape import visible
from tito_audit.terminal.mismatch import mismatch_rows
from tito_audit.terminal.words import percent, unsigned

LOWEST = -20
"""The lowest logprob of the plot; lower ones are drawn there."""
BINS = 40
WORST = 20
"""How many prices are kept in full."""


@dataclass(slots=True)
class CausePrice:
    """What all findings of one code and cause cost together."""

    code: str
    cause: str
    findings: int = 0
    segments: int = 0
    """How many spans of sampled tokens drifted."""
    sampled_tokens: int = 0
    other_tokens: int = 0
    sampled: float = 0.0
    """The summed logprob of what was sampled."""
    other: float = 0.0
    likelier: int = 0
    """How many segments have likelier other tokens."""
    lowest: float = 0.0
    """The lowest summed logprob of the other tokens of a segment."""
    behind: Sums = field(default_factory=Sums)

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
    tolerance: float = TOLERANCE
    scan: Summary = field(default_factory=Summary)
    """Files, tokenizer and notices."""
    rollouts: int = 0
    scored: int = 0
    """How many rollouts have a token that was scored."""
    scored_tokens: int = 0
    missing: int = 0
    """How many scored tokens have no recorded logprob."""
    unreadable: int = 0
    disagreeing: int = 0
    """How many rollouts disagree with the model."""
    sums: Sums = field(default_factory=Sums)
    by_turn: dict[int, Sums] = field(default_factory=dict)
    plot: Counter[tuple[int, int]] = field(default_factory=Counter)
    """How many tokens are in each bin of recorded and model's logprob; bins count from `LOWEST` up."""
    causes: dict[tuple[str, str], CausePrice] = field(default_factory=dict)
    worst: list[tuple[Place, Price]] = field(default_factory=list)
    unpriced: Counter[str] = field(default_factory=Counter)
    near: list[Sums] = field(default_factory=lambda: [Sums() for _ in NEAR])
    changed: int = 0
    """How many turns and rows have drift."""
    changes: list[float] = field(default_factory=list)
    """How the summed logprob of each of them changes."""
    unscored: dict[str, tuple[int, Place]] = field(default_factory=dict)
    """How many calls and rows could not be scored, and the first of them, by reason."""
    findings: list[Finding] = field(default_factory=list)
    """LPR507 and LPR509, judged by the model's logprobs."""
    mismatch: LogMismatch | None = None
    """Why the recorded logprobs differ from the model's; None if none were compared."""
    explanations: Counter[str] = field(default_factory=Counter)
    weight_versions: Counter[str] = field(default_factory=Counter)
    counts: RequestCounts = field(default_factory=RequestCounts)
    seconds: float = 0.0

    @property
    def agreement(self) -> Agreement | None:
        """How all compared tokens agree; None if there are none."""
        return self.sums.agreement(self.tolerance)

    @property
    def failed(self) -> bool:
        """Whether recorded logprobs disagree with the model's, or something could not be read or scored."""
        whole = self.agreement
        disagrees = self.disagreeing > 0 or (whole is not None and whole.disagrees)
        return disagrees or bool(self.unscored) or self.unreadable > 0

    def add(self, result: RescoredRollout) -> None:
        if result.error:
            self.unreadable += 1
            self._count_unscored(f"the row cannot be read: {result.error}", result.place)
            return
        self.rollouts += 1
        self.scored += result.scored_tokens > 0
        self.scored_tokens += result.scored_tokens
        self.missing += result.missing
        self.disagreeing += result.agreement is not None and result.agreement.disagrees
        for sequence in result.judged:
            undrifted = ~sequence.drifted
            differences = sequence.differences
            self.sums += Sums.of(differences)
            for turn in np.unique(sequence.turns[undrifted]).tolist():
                own = Sums.of(differences[sequence.turns[undrifted] == turn])
                self.by_turn[turn] = self.by_turn.get(turn, Sums()) + own
            squares = zip(_bins(sequence.recorded[undrifted]), _bins(sequence.model[undrifted]), strict=True)
            self.plot.update(squares)
        for price in result.prices:
            key = (price.finding.code, price.finding.hit.cause)
            self.causes.setdefault(key, CausePrice(*key)).add(price)
            self.worst.append((result.place, price))
        if len(self.worst) > 4 * WORST:
            self.worst = self.most_expensive(WORST)
        self.unpriced.update(result.unpriced)
        self.near = [a + b for a, b in zip(self.near, result.near, strict=True)]
        self.changed += len(result.changed)
        self.changes += [swap.other - swap.sampled for swap in result.changed]
        for missing in result.unscored:
            self._count_unscored(missing.because, result.place)
        self.findings += result.findings
        for mismatch in result.mismatches:
            self.mismatch = self.mismatch or LogMismatch(mismatch.sampler)
            self.mismatch.add(mismatch, result.place)
        if result.explanation:
            self.explanations[result.explanation] += 1
        self.weight_versions.update(result.weight_versions)

    def most_expensive(self, most: int) -> list[tuple[Place, Price]]:
        """The `most` findings that change the summed logprob most, the worst first."""

        def size(entry: tuple[Place, Price]) -> float:
            difference = entry[1].difference
            return abs(difference) if math.isfinite(difference) else 0.0

        return sorted(self.worst, key=size, reverse=True)[:most]

    def _count_unscored(self, because: str, place: Place) -> None:
        number, first = self.unscored.get(because, (0, place))
        self.unscored[because] = (number + 1, first)


def _bins(values: Logprobs) -> list[int]:
    width = -LOWEST / BINS
    bins: list[int] = np.clip((values - LOWEST) / width, 0, BINS - 1).astype(int).tolist()
    return bins


# The counts as text cells of tables, for the terminal and the HTML page.


_EDGES = tuple(f"> {edge:g}" for edge in EDGES)
_NEAR = ("1st", "5th", "17th", "65th")
"""The ordinals of `NEAR`, counted from 1."""
Row = tuple[str, ...]

AGREEMENT_HEADS: Row = ("", "tokens", "mean", "max", "k1", "k3", *_EDGES)
AGREEMENT_LEGEND = (
    "mean, max: of the absolute difference; k1, k3: estimates of the KL divergence; "
    f"{', '.join(_EDGES)}: tokens that differ by more."
)
DRIFTED_HEADS: Row = ("rule, cause", "findings", "tokens", "sampled", "instead", "change", "likelier")
DRIFTED_LEGEND = (
    "sampled, instead: mean logprob per token of what was sampled, and of what replaced it; change: of the summed "
    "logprob, per span of drifted tokens; likelier: spans whose replacement is more likely."
)
AFTER_HEADS: Row = ("rule, cause", "tokens", "mean change", "largest")
AFTER_LEGEND = "The same tokens in another context, up to the next drift; changes are absolute."

MISMATCH_HEADS: Row = ("cause", "share", "tokens", "the worst")


def mismatch_cells(summary: RescoreSummary) -> Iterator[Row]:
    """Why the recorded logprobs differ from the model's, which stands where a trainer's would."""
    fine = {MismatchCause.NUMERICS, MismatchCause.COPIED}
    if summary.mismatch is not None and not fine.issuperset(summary.mismatch.shares):
        for part, cause, estimate, tokens, worst in mismatch_rows(summary.mismatch):
            estimate = estimate.replace("the trainer's", "the model's")
            words = f"{cause} ({estimate})" if estimate else cause
            yield visible(words), percent(part), f"{tokens:,}", worst


def agreement_rows(summary: RescoreSummary, turns: int) -> Iterator[Row]:
    """How recorded logprobs agree with the model's: in all, in each of the first `turns` turns, and after them."""
    by_turn = sorted(summary.by_turn.items())
    named = [("no turn" if turn < 0 else f"turn {turn}", sums) for turn, sums in by_turn[:turns]]
    later = [sums for _, sums in by_turn[turns:]]
    if later:
        named.append((f"later {len(later)}", sum(later, Sums())))
    for name, sums in [("all", summary.sums), *(named if len(by_turn) > 1 else ())]:
        agreement = sums.agreement(summary.tolerance)
        if agreement is not None:
            estimates = (unsigned(f"{value:.4f}") for value in (agreement.k1, agreement.k3))
            sizes = f"{agreement.size:.4f}", f"{agreement.largest:.3f}"
            yield name, f"{agreement.tokens:,}", *sizes, *estimates, *map(percent, agreement.above)


def drifted_rows(summary: RescoreSummary) -> Iterator[Row]:
    """How the logprobs of the drifted tokens change, by rule and cause."""
    for cause in _sorted_causes(summary):
        cells: Row = ("–",) * 5
        if cause.segments:
            cells = (
                f"{cause.sampled_tokens:,} → {cause.other_tokens:,}",
                _mean(cause.sampled, cause.sampled_tokens),
                _mean(cause.other, cause.other_tokens),
                f"{(cause.other - cause.sampled) / cause.segments:+.2f}",
                percent(cause.likelier / cause.segments),
            )
        yield _title(cause), f"{cause.findings:,}", *cells


def after_rows(summary: RescoreSummary) -> Iterator[Row]:
    """How the logprobs of equal sampled tokens after the drift change, by rule and cause."""
    for cause in _sorted_causes(summary):
        after = cause.behind
        if after.tokens:
            yield _title(cause), f"{after.tokens:,}", f"{after.size / after.tokens:.3f}", f"{after.largest:.2f}"


def reach_lines(summary: RescoreSummary) -> Iterator[str]:
    """Sentences on how far the change reaches beyond the drift, and how whole turns change."""
    near = [
        f"{reach.size / reach.tokens:.3f} from the {first} token on"
        for first, reach in zip(_NEAR, summary.near, strict=True)
        if reach.tokens
    ]
    if near:
        yield f"By distance from the drift: {', '.join(near)}."
    if summary.changes:
        mean = sum(summary.changes) / len(summary.changes)
        yield (
            f"The summed logprob of a whole turn or row with drift ({summary.changed:,}) changes by {mean:+.2f} "
            f"on average, from {min(summary.changes):+.1f} to {max(summary.changes):+.1f}."
        )


def _sorted_causes(summary: RescoreSummary) -> list[CausePrice]:
    return sorted(summary.causes.values(), key=lambda cause: (cause.code, -cause.findings))


def _title(cause: CausePrice) -> str:
    return visible(f"{cause.code} {cause.cause}".rstrip())


def _mean(total: float, tokens: int) -> str:
    return f"{total / tokens:.2f}" if tokens else "–"
