"""What each drift finding costs: the logprobs of both sides, each in its own context."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from tito_audit.record.arrays import Ids, Logprobs
from tito_audit.record.finding import Finding, Where
from tito_audit.rescore.model import NEAR, Behind, Changed, Price, Segment
from tito_audit.rescore.plan import Cut, Pair
from tito_audit.viewer.replacements import SAMPLED, SEEN

PairScores: TypeAlias = tuple[Logprobs, Logprobs]
"""`[T]` and `[U]` the logprobs of a pair's sequences; NaN where nothing was scored."""
_AGAINST = {SAMPLED: "training row", SEEN: "next prompt"}


@dataclass(slots=True)
class Priced:
    """The prices of one rollout."""

    prices: list[Price] = field(default_factory=list)
    changed: list[Changed] = field(default_factory=list)
    near: list[Behind] = field(default_factory=lambda: [Behind() for _ in NEAR])
    unpriced: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Piece:
    """One cut of a pair, priced."""

    finding: Finding
    against: str
    segment: Segment
    behind: Behind
    pair: Pair
    total: float
    """What the whole pair changes, in absolute differences."""


def priced(pairs: Iterable[tuple[Pair, PairScores | None]], drift: Sequence[Finding]) -> Priced:
    """The price of every drift finding; findings with a side that could not be scored are counted as unpriced."""
    out = Priced()
    pieces: list[_Piece] = []
    failed: set[int] = set()
    for pair, scores in pairs:
        if scores is None:
            failed.update(id(cut.finding) for cut in pair.cuts)
        else:
            pieces += _pieces(pair, scores, out)
    found = _by_finding(pieces)
    for finding in drift:
        mine = found.get(id(finding))
        if mine is not None:
            out.prices.append(_price(finding, mine))
        else:
            why = "could not be scored" if id(finding) in failed else "the log does not hold the other tokens"
            out.unpriced[why] = out.unpriced.get(why, 0) + 1
    return out


def _by_finding(pieces: Sequence[_Piece]) -> Mapping[int, list[_Piece]]:
    """The pieces of each finding: those of the row in which its tokens were trained, if there are any."""
    found: dict[int, list[_Piece]] = {}
    for piece in pieces:
        found.setdefault(id(piece.finding), []).append(piece)
    return {key: _in_own_context(mine) for key, mine in found.items()}


def _in_own_context(pieces: list[_Piece]) -> list[_Piece]:
    """The pieces as the training row holds them, with what was sampled scored in its call."""
    row = [one for one in pieces if one.pair.key[0] is Where.ROW]
    call = [one for one in pieces if one.pair.key[0] is not Where.ROW]
    if len(row) != 1 or len(call) != 1:
        return row or call
    trained, said = row[0], call[0].segment
    return [replace(trained, segment=replace(trained.segment, sampled=said.sampled))]


def _price(finding: Finding, pieces: Sequence[_Piece]) -> Price:
    behind = sum((one.behind for one in pieces), Behind())
    total = sum({id(one.pair): one.total for one in pieces}.values())
    mine = float(np.nansum([abs(one.segment.difference) for one in pieces]))
    share = mine / total if total else float("nan")
    segments = tuple(one.segment for one in pieces)
    return Price(finding, pieces[0].against, segments, behind, share)


def _pieces(pair: Pair, scores: PairScores, out: Priced) -> Iterator[_Piece]:
    recorded, other = scores
    moved = pair.positions
    change = np.full(len(pair.ids), np.nan)
    same = pair.same & (moved < len(other))
    change[same] = other[moved[same]] - recorded[same]
    if pair.swapped:
        change = -change
    equal = np.isfinite(change)
    segments = [_segment(pair, cut, recorded, other) for cut in pair.cuts]
    apart = [abs(one.difference) for one in segments]
    total = float(np.nansum(apart) + np.abs(change[equal]).sum())
    _note_whole(pair, segments, recorded, other, equal, out)
    for number, (cut, segment) in enumerate(zip(pair.cuts, segments, strict=True)):
        end = pair.cuts[number + 1].start if number + 1 < len(pair.cuts) else len(pair.ids)
        behind = change[cut.end : end]
        if pair.key[0] is not Where.PROMPT:  # its completion comes much later, and changes with the whole history
            _note_near(behind, out.near)
        if cut.finding is not None:
            against = _AGAINST.get(cut.replaced.against, cut.replaced.against)
            yield _Piece(cut.finding, against, segment, Behind.of(behind[np.isfinite(behind)]), pair, total)


def _segment(pair: Pair, cut: Cut, recorded: Logprobs, other: Logprobs) -> Segment:
    """Both sides of a cut, what was sampled first; NaN for tokens that were given."""
    mine, theirs = pair.ids[cut.start : cut.end], pair.other[cut.other_start : cut.other_end]
    sums = (_sum(recorded, cut.start, cut.end), _sum(other, cut.other_start, cut.other_end))
    if not cut.sampled:
        sums = (float("nan"), float("nan"))
    if pair.swapped:
        return Segment(_tuple(theirs), _tuple(mine), sums[1], sums[0])
    return Segment(_tuple(mine), _tuple(theirs), *sums)


def _sum(scores: Logprobs, start: int, end: int) -> float:
    """The summed logprob; the first token of a sequence has none."""
    return float(scores[max(start, 1) : end].sum())


def _tuple(ids: Ids) -> tuple[int, ...]:
    return tuple(ids.tolist())


def _note_whole(
    pair: Pair,
    segments: Sequence[Segment],
    recorded: Logprobs,
    other: Logprobs,
    equal: np.ndarray[tuple[int], np.dtype[np.bool_]],
    out: Priced,
) -> None:
    """Note what the whole turn or row changes."""
    where, turn = pair.key
    if where is Where.PROMPT:
        return
    sides = float(recorded[equal].sum()), float(other[pair.positions[equal]].sum())
    sampled, instead = sides[::-1] if pair.swapped else sides
    sampled += float(np.nansum([one.sampled for one in segments]))
    instead += float(np.nansum([one.other for one in segments]))
    out.changed.append(Changed(where, turn, sampled, instead))


def _note_near(behind: Logprobs, near: list[Behind]) -> None:
    for number, first in enumerate(NEAR):
        last = NEAR[number + 1] if number + 1 < len(NEAR) else len(behind)
        mine = behind[first:last]
        near[number] += Behind.of(mine[np.isfinite(mine)])
