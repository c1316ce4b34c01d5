"""The loss mask of a row compared with what was sampled, judged once for all MSK rules."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tito_audit.evidence.judgement import judgement, row_slide
from tito_audit.evidence.masks import is_end, left_out, sampled_turns, trained_as_sampled, whole_mask
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
from tito_audit.rules._words import shown


@dataclass(frozen=True, slots=True)
class JudgedMask:
    """Where mask and sampling disagree; each token belongs to one rule. All masks are `[T]`."""

    ids: Ids
    trained: Mask
    view: RowView
    slide: int
    """By how many places trained runs are late (+) or early (-); 0 when no slide is proven."""
    slid: str
    """The slide as a clause, ` from answer 2 on` included; "" when none is proven."""
    off: Mask
    """Where trained runs are off, if a slide is proven."""
    among: tuple[str, ...]
    """What explains a faulty row, where the row alone does not show which."""
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
        recorded = shown(evidence, self.ids[start:end])
        return Hit(Where.ROW, start, end, message, turn, cause, severity, recorded, headline=headline)


def shifted(row: TrainingRow, role: ColumnRole) -> bool:
    """Whether the row's column of this role has an entry for every token except the first, as in tinker's
    datums."""
    return any(column.role is role and column.alignment is Alignment.SHIFTED for column in row.columns)


@memoized
def judged_mask(evidence: Evidence) -> JudgedMask | None:
    """The parts of the mask that are wrong; None without mask or sampling, or when none or all of the mask is
    wrong."""
    row, view = evidence.rollout.training_row, evidence.row
    if row is None or row.loss_mask is None or view is None:
        return None
    if row.hidden is None and trained_as_sampled(evidence):
        return None
    if whole_mask(evidence) is not None or (unclear_roles(evidence) is not None and not view.sampled.any()):
        return None
    trained = row.loss_mask if row.hidden is None else row.loss_mask & ~row.hidden
    slide = row_slide(evidence)
    missing = added = np.zeros(len(trained), np.bool_)
    judged, left = judgement(evidence), left_out(evidence)
    # `[T]` the answers that a proven slide of the mask is in, with what lies around them.
    off = np.full(len(view.sampled), bool(slide))
    if slide and not view.proven and judged is not None and judged.fit is not None and not judged.slide.whole_row:
        spans = [judged.spans[number] for number in judged.fit.answers]
        off[: max(spans[0].start + min(slide, 0), 0)] = False
        off[spans[-1].ends[-1] + max(slide, 0) :] = False
    slid = ""
    if slide:
        by_part = judged is not None and not view.proven and not judged.slide.whole_row
        where = judged.slide.where if judged is not None and by_part else ""
        slid = f"{'the trained runs are' if by_part else 'every trained run is'} {shift_in_words(slide)}{where}"
    # Whether several faults explain the row, one of them a slid mask.
    several = judged is not None and not view.proven and judged.several and any(f.slide.mask for f in judged.fits)
    on_purpose = missing if left is None else left.tokens & ~off
    rewritten = _rewritten(view, trained)
    if not off.all():
        missing = _ends_not_trained(row.token_ids, trained, view, evidence) & ~on_purpose & ~off
        ids = row.token_ids
        out = np.zeros(len(ids), np.bool_)
        follows = np.concatenate(([False], view.sampled[:-1]))
        for position in (trained & ~view.sampled & follows).nonzero()[0].tolist():
            out[position] = is_end(position, ids, view, evidence.end_ids)
        added = out & ~rewritten & ~off
    return JudgedMask(
        ids=row.token_ids,
        trained=trained,
        view=view,
        slide=slide,
        slid=slid,
        off=off,
        among=tuple(describe_slides(fit.slide for fit in judged.fits)) if judged is not None and several else (),
        end_not_trained=missing,
        end_not_sampled=added,
        not_sampled=trained & ~view.sampled & ~added & ~rewritten & ~unclear_tokens(evidence),
        not_trained=view.sampled & ~trained & ~missing & ~on_purpose,
    )


def _ends_not_trained(ids: Ids, trained: Mask, view: RowView, evidence: Evidence) -> Mask:
    out = np.zeros(len(ids), np.bool_)
    for _, spans in sampled_turns(evidence):
        last = spans[-1][1] - 1
        if trained[last] or not is_end(last, ids, view, evidence.end_ids):
            continue
        out[last] = any(trained[start:end].any() for start, end in spans)
    return out


def _rewritten(view: RowView, trained: Mask) -> Mask:
    """Trained answer tokens that drifted: re-encoded forms of sampled ones, which belong to the TOK and TPL
    rules."""
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
