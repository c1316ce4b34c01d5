"""What to score of a rollout: calls and row as recorded, and with the other tokens of each drift."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tito_audit.chains.links import chain_to, parents_of
from tito_audit.evidence.model import Evidence
from tito_audit.record.arrays import Ids, Logprobs, Mask
from tito_audit.record.finding import Finding, Where
from tito_audit.record.rollout import TrainingRow, effective_loss_mask
from tito_audit.viewer.replacements import SAMPLED, SEEN, Key, Replaced, replaced

DRIFT = ("TOK", "SEQ", "TPL")
"""Families of findings that have a price."""


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
class Scorable:
    """A call or the training row as recorded."""

    where: Where
    turn: int | None
    ids: Ids
    """`[T]` of a call, its prompt and its completion."""
    offset: int
    """Where the completion begins in `ids`; 0 for a row."""
    recorded: Logprobs | None
    """`[T - offset]`; None if nothing was recorded."""
    sampled: Mask
    """`[T - offset]` the tokens whose logprobs count: a completion's, or a row's trained tokens."""
    drifted: Mask
    """`[T - offset]` True from the first token that was not sampled on."""
    turns: Ids
    """`[T - offset]` the call that sampled each token; -1 where unknown."""
    sentinel: float | None = None
    """The placeholder for a missing logprob."""

    @property
    def want(self) -> Want:
        """The sequence, from its first sampled token on."""
        first = int(self.sampled.argmax()) if self.sampled.any() else len(self.sampled)
        return Want(self.ids, max(self.offset + first, 1))


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """A span of a sequence and its replacement on the other side."""

    start: int
    end: int
    other_start: int
    other_end: int
    sampled: bool
    """Whether these tokens were sampled."""
    replaced: Replaced
    finding: Finding | None
    """None where its rule is not selected."""


@dataclass(frozen=True, slots=True, eq=False)
class OtherTokens:
    """A recorded sequence, and the same with other tokens."""

    key: Key
    ids: Ids
    """`[T]` as recorded."""
    other: Ids
    """`[U]` with every difference applied."""
    cuts: tuple[Cut, ...]
    swapped: bool
    """Whether the other tokens are the sampled ones, because the recorded prompt or row holds something else."""
    same: Mask
    """`[T]` True for equal tokens that were sampled, from the first difference on."""

    @property
    def wants(self) -> tuple[Want, Want]:
        """Both sequences, from the first difference or the first equal sampled token on."""
        whole = any(cut.sampled for cut in self.cuts)
        first = self.cuts[0].start if whole else int(self.same.argmax())
        moved = self.cuts[0].other_start if whole else int(self.positions[first])
        return Want(self.ids, max(first, 1)), Want(self.other, max(moved, 1))

    @property
    def positions(self) -> Ids:
        """`[T]` the position of each equal token on the other side; values inside a difference are meaningless."""
        moved = np.arange(len(self.ids), dtype=np.int64)
        for cut in self.cuts:
            moved[cut.end :] = np.arange(len(self.ids) - cut.end) + cut.other_end
        return moved.astype(np.int32)


def parts_of(evidence: Evidence, vocabulary: int | None) -> tuple[list[Scorable], list[Unscored]]:
    """The calls and the row of a rollout that can be scored, and those that cannot; `vocabulary` is the number of
    ids that there are, if known."""
    parts: list[Scorable] = []
    unscored: list[Unscored] = []

    def add(part: Scorable) -> None:
        if not _in_range(part.ids, vocabulary):
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
            sampled[: 1 - min(start, 1)] = False  # nothing predicts the first token of all
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
    inside = effective_loss_mask(row)
    return inside if inside is not None or evidence.row is None else evidence.row.sampled


def _in_range(ids: Ids, vocabulary: int | None) -> bool:
    return bool((ids >= 0).all()) and (vocabulary is None or bool((ids < vocabulary).all()))


def pairs_of(evidence: Evidence, drift: Sequence[Finding], vocabulary: int | None) -> Iterator[OtherTokens]:
    """The calls and the row of a rollout in which tokens drifted, each with the other tokens."""
    turns, row = evidence.rollout.turns, evidence.rollout.training_row
    for key, several in (replaced(evidence, drift) if drift else {}).items():
        # The recorded sequence of a key, with the completion after a prompt; where positions count from; which of
        # its tokens were sampled.
        (where, turn), offset = key, 0
        ids: Ids | None = None
        if where is Where.ROW and row is not None:
            ids, trained = row.token_ids, trained_in_row(evidence, row)
            sampled = np.zeros(len(ids), np.bool_) if trained is None else trained.copy()
        elif turn is not None and (prompt := turns[turn].prompt_ids) is not None:
            ids, offset = turns[turn].seen_ids, len(prompt) if where is Where.COMPLETION else 0
            sampled = np.arange(0 if ids is None else len(ids)) >= len(prompt)
        # Tokens after a completion are not in its call: such a difference shows in the next prompt.
        inside = [swap for swap in several if not swap.after]
        # Split by whether they restore what was sampled.
        for swapped in (False, True):
            swaps = [swap for swap in inside if (swap.against in (SAMPLED, SEEN)) is swapped]
            if ids is None or not swaps:
                continue
            pair = _pair(evidence, key, (ids, sampled, offset), swaps, drift, swapped=swapped)
            fits = _in_range(ids, vocabulary) and _in_range(pair.other, vocabulary)
            if fits and any(cut.finding for cut in pair.cuts) and not np.array_equal(ids, pair.other):
                yield pair


def _pair(
    evidence: Evidence,
    key: Key,
    recorded: tuple[Ids, Mask, int],
    swaps: Sequence[Replaced],
    drift: Sequence[Finding],
    *,
    swapped: bool,
) -> OtherTokens:
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
    theirs = _sampled_before(evidence, turn, other) if swapped and where is Where.PROMPT else None
    same = sampled.copy()
    same[: max(places[0][0], 1)] = False
    cuts = []
    for (start, end, other_start, other_end), swap in zip(places, swaps, strict=True):
        if swap.against == SEEN:
            was_sampled = theirs is not None and _touched(theirs, other_start, other_end)
        else:
            was_sampled = swap.against == SAMPLED or _touched(sampled, start, end)
        finding = next((f for f in drift if f.code == swap.code and _belongs(evidence, key, swap, f)), None)
        cuts.append(Cut(start, end, other_start, other_end, was_sampled, swap, finding))
        same[start:end] = False
    return OtherTokens(key, ids, other, tuple(cuts), swapped, same)


def _sampled_before(evidence: Evidence, turn: int | None, other: Ids) -> Mask | None:
    """`[U]` the sampled tokens of a prompt as the call saw it; None if it is not what the previous call saw."""
    link = next((link for link in evidence.links if link.turn == turn), None)
    if link is None or link.parent is None:
        return None
    turns = evidence.rollout.turns
    seen = turns[link.parent].seen_ids
    if seen is None or not np.array_equal(other[: len(seen)], seen):
        return None
    out = np.zeros(len(other), np.bool_)
    for call in chain_to(link.parent, parents_of(evidence.links)):
        prompt, completion = turns[call].prompt_ids, turns[call].completion_ids
        if prompt is not None and completion is not None:
            out[len(prompt) : len(prompt) + len(completion)] = True
    return out


def _touched(sampled: Mask, start: int, end: int) -> bool:
    """Whether tokens of a span were sampled; a place between two tokens counts as its neighbours do."""
    if start == end:
        return bool(sampled[max(start - 1, 0) : end + 1].all()) and start < len(sampled)
    return bool(sampled[start:end].any())


def _belongs(evidence: Evidence, key: Key, swap: Replaced, finding: Finding) -> bool:
    hit, (where, turn) = finding.hit, key
    if swap.against == SEEN:
        return hit.turn == turn
    if swap.against == SAMPLED:
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
