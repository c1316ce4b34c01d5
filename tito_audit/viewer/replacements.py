"""Finds where another source has other tokens than a recorded sequence."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from tito_audit.chains.links import LinkKind
from tito_audit.evidence.chains import stretches_in_history
from tito_audit.evidence.model import Against, Difference, Evidence
from tito_audit.evidence.reference import pieces_of
from tito_audit.record.arrays import Ids, empty_ids
from tito_audit.record.finding import Finding, Severity, Where
from tito_audit.record.rollout import Rollout

SequenceKey = tuple[Where, int | None]
"""A recorded sequence: its kind and its turn (None for the training row)."""
_DifferenceKey = tuple[Where, int | None, int, int, bytes]

WAS_SEEN = "what was seen"
"""`against` of a prompt that breaks its history: prompt and completion of the previous call."""
WAS_SAMPLED = "what was sampled"
"""`against` of a training row with other tokens: the completions of the calls."""
_IN_ROW = (Against.NEXT_PROMPT, Against.ROW)
"""Sources whose tokens the training row may hold."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """A half-open range of a recorded sequence, and the tokens that another source has there; as `Swap`, uncut."""

    start: int
    end: int
    canonical: Ids
    code: str
    against: str
    severity: Severity
    before: int = 0
    after: int = 0
    same_text: bool = False
    """Whether both are the same text."""

    @property
    def rank(self) -> tuple[int, int, bool, int]:
        """Sort key: the most severe first, then the longest, then those that differ in text."""
        return -self.severity, self.start - self.end, self.same_text, self.start

    def overlaps(self, other: Replacement) -> bool:
        """Whether both replace the same token, or insert at the same place."""
        if (self.start, self.end) == (other.start, other.end):
            return True
        return self.start < other.end and other.start < self.end


def find_replacements(evidence: Evidence, findings: Sequence[Finding]) -> dict[SequenceKey, list[Replacement]]:
    """The replacements in each recorded sequence, in order and without overlaps: of two, `rank` decides.

    They come from the differences of the evidence, from prompts that break their history (SEQ findings), and from
    a training row that holds other tokens than the calls generated.
    """
    swaps: dict[SequenceKey, list[Replacement]] = {}
    codes = {_difference_key(explained.difference): explained.code for explained in evidence.explained}
    for difference in evidence.differences:
        key = (difference.where, None if difference.where is Where.ROW else difference.turn)
        code = codes.get(_difference_key(difference), "")
        before = _tokens_before(difference, evidence.rollout)
        inside = difference.end - difference.start
        swaps.setdefault(key, []).append(
            Replacement(
                difference.start,
                difference.end,
                difference.canonical.ids,
                code,
                difference.against.value,
                difference.severity,
                before,
                len(difference.recorded.ids) - inside - before,
                difference.recorded.data == difference.canonical.data,
            )
        )
    of_turn = {f.hit.turn: f for f in findings if f.code.startswith("SEQ")}
    for link in evidence.links:
        finding = of_turn.get(link.turn)
        if finding is None or link.parent is None or not link.kind.breaks:
            continue
        parent = evidence.rollout.turns[link.parent]
        seen, prompt = parent.seen_ids, evidence.rollout.turns[link.turn].prompt_ids
        if seen is None or prompt is None or parent.prompt_ids is None:
            continue
        whole = link.kind is LinkKind.RETOKENIZED
        for stretch in stretches_in_history(
            pieces_of(seen, evidence.vocabulary),
            pieces_of(prompt, evidence.vocabulary),
            0 if whole else len(parent.prompt_ids),
            frozenset() if whole else evidence.end_ids,
        ):
            start, end, others = stretch.canonical_start, stretch.canonical_end, stretch.recorded.ids
            swap = Replacement(start, end, others, finding.code, WAS_SEEN, finding.severity)
            swaps.setdefault((Where.PROMPT, link.turn), []).append(swap)
    for swap in _replacements_in_row(evidence, codes):
        swaps.setdefault((Where.ROW, None), []).append(swap)
    for key, several in swaps.items():
        apart: list[Replacement] = []
        for swap in sorted(several, key=attrgetter("rank")):
            at = bisect_left(apart, (swap.start, swap.end), key=attrgetter("start", "end"))
            # As those in `apart` do not overlap each other, only its neighbours can overlap it.
            if not any(swap.overlaps(other) for other in apart[max(at - 1, 0) : at + 1]):
                apart.insert(at, swap)
        swaps[key] = apart
    return swaps


def _difference_key(difference: Difference) -> _DifferenceKey:
    """A key that tells all differences of a rollout apart."""
    return difference.where, difference.turn, difference.start, difference.end, difference.canonical.ids.tobytes()


def same_as(evidence: Evidence, key: SequenceKey) -> str:
    """The source that has the same tokens as the whole sequence; "" if one differs or nothing was compared.

    A prompt repeats earlier tokens, whose drift is shown at their own place: it equals the template's only if
    nothing before it drifted either.
    """
    where, turn = key
    places = {(difference.where, difference.turn) for difference in evidence.differences}
    if evidence.vocabulary is None or key in places:
        return ""
    if where is Where.COMPLETION:
        return str(Against.REENCODED)
    if where is Where.PROMPT:
        before = any(at is not None and turn is not None and at < turn for _, at in places)
        return str(Against.TEMPLATE) if turn in evidence.rendered and not before else ""
    if evidence.rollout.turns:
        return ""
    return str(Against.TEMPLATE if None in evidence.rendered else Against.REENCODED)


def _tokens_before(difference: Difference, rollout: Rollout) -> int:
    """How many recorded tokens of a difference belong to the prompt before its completion."""
    recorded, inside = difference.recorded.ids, difference.end - difference.start
    outside = len(recorded) - inside
    if not outside or difference.start or difference.turn is None:
        return 0
    call = rollout.turns[difference.turn]
    prompt = empty_ids() if call.prompt_ids is None else call.prompt_ids
    completion = empty_ids() if call.completion_ids is None else call.completion_ids[:inside]
    for before in range(min(outside, len(prompt)), 0, -1):
        here = recorded[: before + inside]
        if np.array_equal(here[:before], prompt[-before:]) and np.array_equal(here[before:], completion):
            return before
    return 0


def _replacements_in_row(evidence: Evidence, codes: Mapping[_DifferenceKey, str]) -> Iterator[Replacement]:
    """The places of the training row with other tokens than the calls sampled, where positions are proven."""
    row, columns = evidence.rollout.training_row, evidence.row
    if row is None or columns is None or not columns.proven:
        return
    places: dict[int, dict[int, int]] = {}
    for difference in evidence.differences:
        turn, ids = difference.turn, difference.canonical.ids
        if turn is None or difference.where is not Where.COMPLETION or difference.against not in _IN_ROW:
            continue
        if turn not in places:
            of_turn = (columns.turn == turn).nonzero()[0]
            places[turn] = dict(zip(columns.turn_offset[of_turn].tolist(), of_turn.tolist(), strict=True))
        # The row positions of the tokens on both sides tell where the row holds the others.
        at, size = places[turn], len(ids)
        before, after = at.get(difference.start - 1), at.get(difference.end)
        start = before + 1 if before is not None else after - size if after is not None else -1
        if start < 0 or (after is not None and after != start + size):
            continue
        inside = any(offset in at for offset in range(difference.start, difference.end))
        if inside or not np.array_equal(row.token_ids[start : start + size], ids):
            continue
        code, severity = codes.get(_difference_key(difference), ""), difference.severity
        yield Replacement(start, start + size, difference.recorded.ids, code, WAS_SAMPLED, severity)
