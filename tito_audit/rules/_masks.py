"""Compares the loss mask of a row with what was sampled, once for all MSK rules."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tito_audit.evidence.judgement import judgement, row_mask_slide
from tito_audit.evidence.masks import is_turn_end, left_out, sampled_turns, trained_as_sampled, whole_mask
from tito_audit.evidence.model import Evidence, RowView
from tito_audit.evidence.roles import GENERATION_PROMPT, TURN_END, UNKNOWN, unclear_roles, unclear_tokens
from tito_audit.record.arrays import Ids, Mask
from tito_audit.record.column import Alignment, ColumnRole
from tito_audit.record.finding import Hit, Severity, Where
from tito_audit.record.memo import memoized
from tito_audit.record.reading import describe_slides, shift_in_words
from tito_audit.record.rollout import TrainingRow
from tito_audit.record.runs import trained_runs
from tito_audit.record.speakers import ASSISTANT
from tito_audit.rules._words import head


@dataclass(frozen=True, slots=True)
class JudgedMask:
    """Where the loss mask and what was sampled disagree; each token belongs to one rule. All masks are `[T]`."""

    ids: Ids
    trained: Mask
    view: RowView
    slide: int
    """By how many places trained runs are late (+) or early (-); 0 if no slide is proven."""
    slide_words: str
    """The slide as a clause, including ` from answer 2 on`; "" if none is proven."""
    in_slide: Mask
    """The answers in which a proven slide put trained runs off, with what lies around them."""
    readings: tuple[str, ...]
    """The readings of a faulty row, in words, if several explain it."""
    end_not_trained: Mask
    """Sampled turn ends outside the loss, in turns that are in it."""
    end_not_sampled: Mask
    """Trained turn ends that were not sampled, directly after a sampled token."""
    not_sampled: Mask
    """Other trained tokens that were not sampled."""
    not_trained: Mask
    """Other sampled tokens that are not trained, and that no convention of the row leaves out."""

    def hit(
        self,
        evidence: Evidence,
        start: int,
        end: int,
        message: str,
        cause: str,
        turn: int | None = None,
        severity: Severity | None = None,
        headline: str = "",
    ) -> Hit:
        """A hit on a range of the row."""
        recorded = head(evidence, self.ids[start:end])
        return Hit(Where.ROW, start, end, message, turn, cause, severity, recorded, headline=headline)


def has_shifted_column(row: TrainingRow, role: ColumnRole) -> bool:
    """Whether a column of this role has an entry for every token except the first, as in tinker's datums."""
    return any(column.role is role and column.alignment is Alignment.SHIFTED for column in row.columns)


@memoized
def judged_mask(evidence: Evidence) -> JudgedMask | None:
    """The parts of the mask that are wrong; None if none or all of it is, or without a mask or a view."""
    row, view = evidence.rollout.training_row, evidence.row
    if row is None or row.loss_mask is None or view is None:
        return None
    if row.hidden is None and trained_as_sampled(evidence):
        return None
    if whole_mask(evidence) is not None or (unclear_roles(evidence) is not None and not view.sampled.any()):
        return None
    trained = row.loss_mask if row.hidden is None else row.loss_mask & ~row.hidden
    slide = row_mask_slide(evidence)
    missing = added = np.zeros(len(trained), np.bool_)
    judged, left = judgement(evidence), left_out(evidence)
    in_slide = np.full(len(view.sampled), bool(slide))
    if slide and not view.proven and judged is not None and judged.fit is not None and not judged.slide.whole_row:
        spans = [judged.spans[number] for number in judged.fit.answers]
        in_slide[: max(spans[0].start + min(slide, 0), 0)] = False
        in_slide[spans[-1].ends[-1] + max(slide, 0) :] = False
    slide_words = ""
    if slide:
        by_part = judged is not None and not view.proven and not judged.slide.whole_row
        where = judged.slide.where if judged is not None and by_part else ""
        slide_words = (
            f"{'the trained runs are' if by_part else 'every trained run is'} {shift_in_words(slide)}{where}"
        )
    readings: list[str] = []
    if judged is not None and not view.proven and judged.is_ambiguous:
        slides = [fit.slide for fit in judged.fits]
        readings = describe_slides(slides) if any(slide.mask for slide in slides) else []
    on_purpose = missing if left is None else left.tokens & ~in_slide
    rewritten = _rewritten(view, trained)
    if not in_slide.all():
        missing, added = np.zeros(len(trained), np.bool_), np.zeros(len(trained), np.bool_)
        for _, ranges in sampled_turns(evidence):
            last = ranges[-1][1] - 1
            if not trained[last] and is_turn_end(last, row.token_ids, view, evidence.end_ids):
                missing[last] = any(trained[start:end].any() for start, end in ranges)
        missing &= ~on_purpose & ~in_slide
        follows = np.concatenate(([False], view.sampled[:-1]))
        for position in (trained & ~view.sampled & follows).nonzero()[0].tolist():
            added[position] = is_turn_end(position, row.token_ids, view, evidence.end_ids)
        added &= ~rewritten & ~in_slide
    return JudgedMask(
        ids=row.token_ids,
        trained=trained,
        view=view,
        slide=slide,
        slide_words=slide_words,
        in_slide=in_slide,
        readings=tuple(readings),
        end_not_trained=missing,
        end_not_sampled=added,
        not_sampled=trained & ~view.sampled & ~added & ~rewritten & ~unclear_tokens(evidence),
        not_trained=view.sampled & ~trained & ~missing & ~on_purpose,
    )


def _rewritten(view: RowView, trained: Mask) -> Mask:
    """Trained answer tokens that drifted: the TOK and TPL rules report them."""
    out = view.drifted & trained & ~view.sampled
    for start, end in trained_runs(view.drifted & ~view.sampled):
        # The text of an answer may now encode as a control token, whose role is no longer the answer's.
        if start > 0 and end < len(out) and view.turn[start - 1] == view.turn[end] >= 0:
            continue
        for position in (out[start:end].nonzero()[0] + start).tolist():
            role = view.roles[position]
            # A token that merges the end of a header with the first sampled token has the header's role.
            seam = role == GENERATION_PROMPT and position + 1 < len(out) and view.turn[position + 1] >= 0
            out[position] = seam or role in (ASSISTANT, UNKNOWN, TURN_END)
    return out
