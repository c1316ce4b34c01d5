"""What to score of a rollout, and the results: logprobs beside a model's, and the price of each drift finding."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tito_audit.chains.links import chain_to, parents_of
from tito_audit.evidence.logprob_values import IMPOSSIBLE, LOWEST_LOGPROB
from tito_audit.evidence.model import Evidence
from tito_audit.record.arrays import Ids, Logprobs, Mask
from tito_audit.record.finding import Finding, Where
from tito_audit.record.mismatch import RowMismatch
from tito_audit.record.rollout import Place, TrainingRow, effective_loss_mask
from tito_audit.viewer.replacements import WAS_SAMPLED, WAS_SEEN, Replacement, SequenceKey, find_replacements

DRIFT = ("TOK", "SEQ", "TPL")
"""Families of rules whose findings have a price."""


@dataclass(frozen=True, slots=True)
class ScoreQuery:
    """A sequence to score, and the first position to score."""

    ids: Ids
    """`[T]`"""
    start: int
    """At least 1: nothing comes before the first token."""


@dataclass(frozen=True, slots=True)
class Unscored:
    """A call or row that could not be scored, with the reason."""

    where: Where
    turn: int | None
    because: str


@dataclass(frozen=True, slots=True, eq=False)
class Scorable:
    """A call or the training row as recorded."""

    where: Where
    turn: int | None
    ids: Ids
    """`[T]` the row, or prompt and completion of the call."""
    offset: int
    """Where the completion begins in `ids`; 0 for a row."""
    recorded: Logprobs | None
    """`[T - offset]` the recorded logprobs; None if there are none."""
    sampled: Mask
    """`[T - offset]` the tokens whose logprobs count: those of a completion, or the trained ones of a row."""
    drifted: Mask
    """`[T - offset]` True from the first token that was not sampled on."""
    turns: Ids
    """`[T - offset]` the call that sampled each token; -1 where unknown."""
    sentinel: float | None = None
    """The value that stands for a missing logprob."""

    @property
    def query(self) -> ScoreQuery:
        """The sequence, from its first sampled token on."""
        first = int(self.sampled.argmax()) if self.sampled.any() else len(self.sampled)
        return ScoreQuery(self.ids, max(self.offset + first, 1))


@dataclass(frozen=True, slots=True, eq=False)
class ReplacedSpan:
    """A span of a sequence, and the span of other tokens in its place."""

    start: int
    end: int
    other_start: int
    other_end: int
    sampled: bool
    """Whether the model sampled these tokens."""
    replaced: Replacement
    finding: Finding | None
    """None if its rule is not selected."""


@dataclass(frozen=True, slots=True, eq=False)
class SequencePair:
    """A sequence as recorded, and with the other tokens of its drift."""

    key: SequenceKey
    ids: Ids
    """`[T]` as recorded."""
    other: Ids
    """`[U]` the same with all spans replaced."""
    spans: tuple[ReplacedSpan, ...]
    swapped: bool
    """Whether `other` has what was sampled, because the recorded prompt or row has something else."""
    same: Mask
    """`[T]` True for sampled tokens that both sides have, from the first span on."""

    @property
    def queries(self) -> tuple[ScoreQuery, ScoreQuery]:
        """Both sequences, from the first span on; from the first equal token on if no span was sampled."""
        any_sampled = any(span.sampled for span in self.spans)
        first = self.spans[0].start if any_sampled else int(self.same.argmax())
        other_first = self.spans[0].other_start if any_sampled else int(self.positions[first])
        return ScoreQuery(self.ids, max(first, 1)), ScoreQuery(self.other, max(other_first, 1))

    @property
    def positions(self) -> Ids:
        """`[T]` the position of each equal token in `other`; meaningless inside a span."""
        positions = np.arange(len(self.ids), dtype=np.int64)
        for span in self.spans:
            positions[span.end :] = np.arange(len(self.ids) - span.end) + span.other_end
        return positions.astype(np.int32)


def scorable_parts(evidence: Evidence, vocabulary: int | None) -> tuple[list[Scorable], list[Unscored]]:
    """The calls and the row that can be scored, and those that cannot; `vocabulary` is its size, if known."""
    parts: list[Scorable] = []
    unscored: list[Unscored] = []

    def add(part: Scorable) -> None:
        if not _in_vocabulary(part.ids, vocabulary):
            size = "every vocabulary" if vocabulary is None else f"the vocabulary of {vocabulary:,}"
            unscored.append(Unscored(part.where, part.turn, f"it holds ids outside {size}"))
        elif part.sampled.any():
            parts.append(part)

    for number, turn in enumerate(evidence.rollout.turns):
        if turn.completion_ids is None:
            because = "the log does not hold the ids that were sampled"
            unscored.append(Unscored(Where.COMPLETION, number, because))
        elif turn.prompt_ids is None:
            unscored.append(Unscored(Where.COMPLETION, number, "the log does not hold the prompt"))
        elif len(turn.completion_ids):
            size, start = len(turn.completion_ids), len(turn.prompt_ids)
            ids = np.concatenate([turn.prompt_ids, turn.completion_ids])
            sampled = np.ones(size, np.bool_)
            sampled[: 1 - min(start, 1)] = False  # nothing predicts the first token of a sequence
            drifted, turns = np.zeros(size, np.bool_), np.full(size, number, np.int32)
            sentinel = next((column.sentinel for column in turn.columns if column.role == "logprobs"), None)
            place = (Where.COMPLETION, number, ids, start)
            add(Scorable(*place, turn.completion_logprobs, sampled, drifted, turns, sentinel))
    row, view = evidence.rollout.training_row, evidence.row
    if row is None or not len(row.token_ids):
        return parts, unscored
    in_loss = trained_in_row(evidence, row)
    if in_loss is None:
        unscored.append(Unscored(Where.ROW, None, "neither a mask nor roles say which tokens were sampled"))
        return parts, unscored
    trained = in_loss.copy()
    trained[:1] = False
    drifted = np.zeros(len(trained), np.bool_)
    if view is not None and view.proven:
        drifted = np.logical_or.accumulate(view.drifted)
    turns = view.turn if view is not None else np.full(len(trained), -1, np.int32)
    add(Scorable(Where.ROW, None, row.token_ids, 0, row.logprobs, trained, drifted, turns, row.sentinel))
    return parts, unscored


def trained_in_row(evidence: Evidence, row: TrainingRow) -> Mask | None:
    """`[T]` the tokens of the row that are in the loss; without a mask, those that were sampled."""
    in_loss = effective_loss_mask(row)
    return in_loss if in_loss is not None or evidence.row is None else evidence.row.sampled


def _in_vocabulary(ids: Ids, vocabulary: int | None) -> bool:
    return bool((ids >= 0).all()) and (vocabulary is None or bool((ids < vocabulary).all()))


def drift_pairs(evidence: Evidence, drift: Sequence[Finding], vocabulary: int | None) -> Iterator[SequencePair]:
    """The calls and the row of a rollout in which tokens drifted, each beside the same with other tokens."""
    turns, row = evidence.rollout.turns, evidence.rollout.training_row
    for key, swaps in (find_replacements(evidence, drift) if drift else {}).items():
        # The recorded sequence, a prompt with its completion; where positions count from; what was sampled of it.
        (where, turn), offset = key, 0
        ids: Ids | None = None
        if where is Where.ROW and row is not None:
            ids, trained = row.token_ids, trained_in_row(evidence, row)
            sampled = np.zeros(len(ids), np.bool_) if trained is None else trained.copy()
        elif turn is not None and (prompt := turns[turn].prompt_ids) is not None:
            ids, offset = turns[turn].seen_ids, len(prompt) if where is Where.COMPLETION else 0
            sampled = np.arange(0 if ids is None else len(ids)) >= len(prompt)
        # What comes after a completion is not in its call: it is replaced in the next prompt.
        inside = [swap for swap in swaps if not swap.after]
        for swapped in (False, True):  # replacements that restore what was sampled are a pair of their own
            chosen = [swap for swap in inside if (swap.against in (WAS_SAMPLED, WAS_SEEN)) is swapped]
            if ids is None or not chosen:
                continue
            pair = _sequence_pair(evidence, key, (ids, sampled, offset), chosen, drift, swapped=swapped)
            fits = _in_vocabulary(ids, vocabulary) and _in_vocabulary(pair.other, vocabulary)
            if fits and any(span.finding for span in pair.spans) and not np.array_equal(ids, pair.other):
                yield pair


def _sequence_pair(
    evidence: Evidence,
    key: SequenceKey,
    recorded: tuple[Ids, Mask, int],
    swaps: Sequence[Replacement],
    drift: Sequence[Finding],
    *,
    swapped: bool,
) -> SequencePair:
    (ids, sampled, offset), (where, turn) = recorded, key
    pieces: list[Ids] = []
    places: list[tuple[int, int, int, int]] = []
    at = size = 0
    for swap in swaps:
        start, end = offset + swap.start - swap.before, offset + swap.end
        pieces += [ids[at:start], swap.canonical]
        size += max(start - at, 0) + len(swap.canonical)
        places.append((start, end, size - len(swap.canonical), size))
        at = end
    other = np.concatenate([*pieces, ids[at:]]).astype(np.int32)
    # `[U]` the tokens of a prompt that earlier calls sampled; None if it does not begin with the call before.
    sampled_in_other: Mask | None = None
    link = next((link for link in evidence.links if link.turn == turn), None)
    if swapped and where is Where.PROMPT and link is not None and link.parent is not None:
        turns = evidence.rollout.turns
        seen = turns[link.parent].seen_ids
        if seen is not None and np.array_equal(other[: len(seen)], seen):
            sampled_in_other = np.zeros(len(other), np.bool_)
            for call in chain_to(link.parent, parents_of(evidence.links)):
                prompt, completion = turns[call].prompt_ids, turns[call].completion_ids
                if prompt is not None and completion is not None:
                    sampled_in_other[len(prompt) : len(prompt) + len(completion)] = True
    same = sampled.copy()
    same[: max(places[0][0], 1)] = False
    spans = []
    for (start, end, other_start, other_end), swap in zip(places, swaps, strict=True):
        if swap.against == WAS_SEEN:
            was_sampled = sampled_in_other is not None and _was_sampled(sampled_in_other, other_start, other_end)
        else:
            was_sampled = swap.against == WAS_SAMPLED or _was_sampled(sampled, start, end)
        finding = next((f for f in drift if f.code == swap.code and _is_about(evidence, key, swap, f)), None)
        spans.append(ReplacedSpan(start, end, other_start, other_end, was_sampled, swap, finding))
        same[start:end] = False
    return SequencePair(key, ids, other, tuple(spans), swapped, same)


def _was_sampled(sampled: Mask, start: int, end: int) -> bool:
    """Whether a token of a span was sampled; for an empty span, whether both neighbours were."""
    if start == end:
        return bool(sampled[max(start - 1, 0) : end + 1].all()) and start < len(sampled)
    return bool(sampled[start:end].any())


def _is_about(evidence: Evidence, key: SequenceKey, swap: Replacement, finding: Finding) -> bool:
    hit, (where, turn) = finding.hit, key
    if swap.against == WAS_SEEN:
        return hit.turn == turn
    if swap.against == WAS_SAMPLED:
        # Its tokens were trained in the row after the token before it, or before the token after it.
        view, before, after = evidence.row, swap.start - 1, swap.end
        if view is None or hit.where is not Where.COMPLETION:
            return False
        if before >= 0 and view.turn[before] == hit.turn and view.turn_offset[before] + 1 == hit.start:
            return True
        inside = after < len(view.turn) and view.turn[after] == hit.turn
        return bool(inside and view.turn_offset[after] == hit.end)
    there = where is Where.ROW or hit.turn == turn
    return hit.where is where and there and (hit.start, hit.end) == (swap.start, swap.end)


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
    for base in (2, 10):
        words = f"the recorded logprobs are logarithms of base {base}"
        explanations.append((words, [np.abs(p.model - math.log(base) * p.recorded)[~p.drifted] for p in pairs]))
    words = "the recorded values are probabilities, not logprobs"
    with np.errstate(divide="ignore", invalid="ignore"):
        explanations.append((words, [np.abs(p.model - np.log(p.recorded))[~p.drifted] for p in pairs]))
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
