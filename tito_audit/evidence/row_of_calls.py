"""The training row compared with the calls beside it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tito_audit.align.blocks import BlockKind, Blocks, GrowingBlocks
from tito_audit.align.drift import align
from tito_audit.align.pieces import Pieces
from tito_audit.chains.links import LinkKind, last_calls
from tito_audit.evidence.belonging import (
    TRAINING_ROW,
    Unrelated,
    common_offset,
    share_words,
    shares_answer,
    spoken,
)
from tito_audit.evidence.chains import Chains
from tito_audit.evidence.differences import (
    Region,
    Stretch,
    difference,
    first_of_each,
    region_of,
    starting_before,
    stretches,
)
from tito_audit.evidence.model import Against, Difference, RowFound, RowView
from tito_audit.evidence.reference import Reference, pieces_of
from tito_audit.evidence.roles import TURN_END, token_roles, unknown_roles
from tito_audit.record.arrays import Ids
from tito_audit.record.finding import Severity
from tito_audit.record.rollout import Rollout, TrainingRow
from tito_audit.record.runs import trained_runs
from tito_audit.record.speakers import ASSISTANT

_Laid = tuple[int, Pieces, Blocks]
"""The last call of a chain, what it saw and sampled, and the row aligned with that."""


def row_against_calls(rollout: Rollout, chains: Chains, reference: Reference | None) -> RowFound:
    """Which row tokens were sampled according to the calls, and where the row holds others."""
    row = rollout.training_row
    assert row is not None
    pieces = _pieces(row.token_ids, reference)
    aligned = _align_chains(chains, pieces, reference)
    unrelated = _not_of_calls(row, pieces, aligned, chains, texts=reference is not None)
    if unrelated is not None:
        return RowFound(unrelated=unrelated)
    view = _RowColumns(rollout, row, pieces, reference)
    out: list[Difference] = []
    windowed = any(link.kind is LinkKind.REWRITTEN for link in chains.links)
    for leaf, recorded, blocks in aligned:
        unclaimed = [
            stretch
            for stretch in starting_before(stretches(recorded, pieces, blocks), len(recorded))
            if not view.claimed(stretch.canonical_start, stretch.canonical_end)
        ]
        if not view.take(blocks, chains.regions[leaf]):
            continue  # the row belongs to another chain and holds little of this one
        for stretch in unclaimed:
            region = region_of(stretch, chains.regions[leaf])
            if windowed and stretch.canonical_start == stretch.canonical_end:
                continue  # an answer dropped from the history on purpose is not drift
            severity, effect = _effect(row, region, stretch, view.end_ids)
            out.append(difference(stretch, Against.ROW, severity, effect, leaf, chains.regions[leaf]))
    return RowFound(view.finish(), first_of_each(out))


def _effect(
    row: TrainingRow, region: Region | None, stretch: Stretch, end_ids: frozenset[int]
) -> tuple[Severity, str]:
    """What a difference from the calls did: ERROR where the row trains on what was not sampled, WARNING for
    drifted context, and NOTE where the row ends early and lacks more than the end of a turn."""
    place, mask = slice(stretch.canonical_start, stretch.canonical_end), row.loss_mask
    lacking, lacked = place.start == place.stop, stretch.recorded
    if (
        lacking
        and place.start == len(row.token_ids)
        and lacked.data.strip()
        and not end_ids.issuperset(lacked.ids.tolist())
    ):
        return Severity.NOTE, "the row ends before these tokens; what it holds was sampled"
    # For tokens that the row lacks, their neighbors show whether the answer is trained there.
    around = slice(max(place.start - 1, 0), place.stop + 1) if lacking else place
    severity = Severity.ERROR if mask is None or mask[around].any() else Severity.WARNING
    if region is None or place.stop == 0:
        severity = Severity.WARNING  # also an answer that the start of the row was cut out of
    if lacking:
        return severity, f"the row lacks tokens that were {'given' if region is None else 'sampled'}"
    if stretch.start == stretch.end and mask is not None and not mask[place].any():
        return severity, "the row holds tokens that were neither given nor sampled"
    return severity, "the trainer would learn from tokens that were not sampled"


def _not_of_calls(
    row: TrainingRow, pieces: Pieces, aligned: Sequence[_Laid], chains: Chains, *, texts: bool
) -> Unrelated | None:
    """Why a row that trains something is not of the calls beside it; None if it may be.

    `texts` says whether pieces are texts. Drift changes tokens, and some words of an answer. A row with none of
    the answers, nor most of the words of what it trains, is of other calls.
    """
    runs = [(0, len(pieces))] if row.loss_mask is None else trained_runs(row.loss_mask)
    if not len(runs) or not aligned or any(seen is None for seen in chains.seen):
        return None
    span = runs[0][0], runs[-1][1]
    offset = next((far for _, seen, _ in aligned if (far := common_offset(row.token_ids, seen.ids))), 0)
    if offset:
        what = f"its ids are those of its calls {'plus' if offset > 0 else 'minus'} {abs(offset):,}"
        return Unrelated(TRAINING_ROW, "ids at an offset", f"{what}: every token is another one", span)
    answers = {leaf: [(region.start, region.end) for region in chains.regions[leaf]] for leaf, _, _ in aligned}
    if any(shares_answer(seen, answers[leaf], pieces, runs, blocks) for leaf, seen, blocks in aligned):
        return None
    if texts:
        sampled = b" ".join(spoken(seen, answers[leaf]) for leaf, seen, _ in aligned)
        if share_words(sampled, spoken(pieces, runs)):
            return None
    elif any(2 * len(blocks.matched()[0]) >= len(seen) for _, seen, blocks in aligned):
        return None  # without a tokenizer, drift of a whole answer looks like another answer
    what = "nothing that it trains was sampled by the calls beside it"
    return Unrelated(TRAINING_ROW, "row of other calls", f"the training row is not of these calls: {what}", span)


def _align_chains(chains: Chains, pieces: Pieces, reference: Reference | None) -> list[_Laid]:
    """The chain of every leaf aligned with the row, starting with the one that the row holds most of."""
    aligned = []
    # Turns that no later turn continues: their prompt + completion holds a whole chain.
    parents = {
        link.turn: link.parent
        for link in chains.links
        if link.kind is LinkKind.CONTINUES and link.parent is not None
    }
    for leaf in last_calls((k for k, seen in enumerate(chains.seen) if seen is not None), parents):
        seen = chains.seen[leaf]
        assert seen is not None
        recorded = _pieces(seen, reference)
        at = _start_inside(seen, pieces.ids)
        if at is None:
            blocks = align(recorded, pieces, open_end=True)
        else:
            growing = GrowingBlocks()
            growing.block(BlockKind.MISSING, at, 0)
            growing.block(BlockKind.SAME, len(pieces), len(pieces))
            growing.block(BlockKind.MISSING, len(seen) - at - len(pieces), 0)
            blocks = growing.done()
        aligned.append((leaf, recorded, blocks))
    return sorted(aligned, key=lambda laid: -len(laid[2].matched()[0]))


def _start_inside(seen: Ids, ids: Ids) -> int | None:
    """Where in what a chain saw a row of these ids begins, if it was cut at its start; else None.

    A row that was cut keeps the end of its chain, so of several places the last.
    """
    if not 0 < len(ids) < len(seen) or np.array_equal(seen[: len(ids)], ids):
        return None
    starts = (seen[: len(seen) - len(ids) + 1] == ids[0]).nonzero()[0].tolist()
    return next((at for at in reversed(starts) if np.array_equal(seen[at : at + len(ids)], ids)), None)


def _pieces(ids: Ids, reference: Reference | None) -> Pieces:
    """The pieces of these ids; without a tokenizer, pieces that compare ids."""
    return pieces_of(ids, reference.vocabulary if reference is not None else None)


class _RowColumns:
    """The columns of a RowView, filled chain by chain."""

    def __init__(self, rollout: Rollout, row: TrainingRow, pieces: Pieces, reference: Reference | None) -> None:
        size = len(row.token_ids)
        self.turns = rollout.turns
        self.ids = row.token_ids
        self.end_ids = reference.end_ids() if reference else frozenset()
        self.roles = token_roles(pieces, self.end_ids) if reference else unknown_roles(size)
        self.turn = np.full(size, -1, np.int32)
        self.offset = np.full(size, -1, np.int32)
        self.expected = np.full(size, np.nan)
        self.drifted = np.zeros(size, np.bool_)
        self.any_logprobs = False
        self.laid = False

    def take(self, blocks: Blocks, regions: Sequence[Region]) -> bool:
        """Fill in the first chain, or one that the row holds half of; False, filling in nothing, for others."""
        recorded, pieces = blocks.matched()
        if not regions or (self.laid and len(recorded) * 2 < regions[-1].end):
            return False
        self.laid = True
        for _, start, _, first, last in blocks.differing():
            if start < regions[-1].end and not self.claimed(first, last):
                self.drifted[first:last] = True
        unclaimed = self.turn[pieces] < 0
        bounds = recorded.searchsorted([(region.start, region.end) for region in regions])
        for region, (first, last) in zip(regions, bounds.tolist(), strict=True):
            inside = unclaimed[first:last].nonzero()[0] + first
            where, offset = pieces[inside], recorded[inside] - region.start
            self.turn[where] = region.turn
            self.offset[where] = offset
            logprobs = self.turns[region.turn].completion_logprobs
            if logprobs is not None:
                self.expected[where] = logprobs[offset]
                self.any_logprobs = True
        return True

    def claimed(self, start: int, end: int) -> bool:
        """Whether an earlier filled-in call sampled these row tokens; for an empty range, those on both sides."""
        if start == end:
            start, end = start - 1, end + 1
        return start >= 0 and end <= len(self.turn) and bool((self.turn[start:end] >= 0).all())

    def finish(self) -> RowView | None:
        """The view; None when no chain was found in the row."""
        if not self.laid:
            return None
        sampled = self.turn >= 0
        ends = sampled & np.isin(self.ids, list(self.end_ids))
        roles = self.roles.with_role(ASSISTANT, sampled).with_role(TURN_END, ends)
        expected = self.expected if self.any_logprobs else None
        return RowView(sampled, True, roles, self.turn, self.offset, expected, self.drifted)
