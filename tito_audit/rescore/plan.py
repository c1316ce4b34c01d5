"""What to score of a rollout: its calls and row as recorded, and with the tokens that drift put in their place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tito_audit.chains.links import chain_to, parents_of
from tito_audit.evidence.model import Evidence
from tito_audit.record.arrays import Ids, Logprobs, Mask
from tito_audit.record.finding import Finding, Where
from tito_audit.record.rollout import TrainingRow, effective_loss_mask
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
    """Whether a finding reports this replacement."""
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
