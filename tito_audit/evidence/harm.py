"""Checks that a repair gives no trained token the logprob of another one, under any reading of the row."""

from __future__ import annotations

import numpy as np

from tito_audit.evidence.judgement import judgement
from tito_audit.evidence.logprob_values import IMPOSSIBLE
from tito_audit.evidence.logprobs import ROUNDING
from tito_audit.evidence.model import Evidence
from tito_audit.record.arrays import Logprobs, Mask
from tito_audit.record.reading import TO_END, Slide
from tito_audit.record.rollout import TrainingRow


def find_harm(before: Evidence, after: Evidence) -> str | None:
    """Why the row is worse after a repair; None if it is not, or if its tokens changed.

    A token with its logprob that is right under some reading of the old row must stay so or leave the loss. Where
    calls show what was sampled, theirs is the only reading.
    """
    old, new = before.rollout.training_row, after.rollout.training_row
    if old is None or old.loss_mask is None or new is None or new.loss_mask is None:
        return None
    if not np.array_equal(old.token_ids, new.token_ids):
        return None
    view = before.row
    if view is not None and view.proven:
        # Trained tokens that no call sampled, drift aside, or with another logprob than the call's.
        wrong, expected = ~view.sampled & ~view.drifted, view.expected_logprobs
        if expected is not None and new.logprobs is not None:
            wrong |= np.isfinite(expected) & ~(np.abs(new.logprobs - expected) <= ROUNDING)
        same = old.loss_mask
        if old.logprobs is not None and new.logprobs is not None:
            # Tokens trained before keep their logprob, or go on without one.
            none = (*IMPOSSIBLE, 0.0, *(row.sentinel for row in (old, new) if row.sentinel is not None))
            was, now = (np.isnan(column) | np.isin(column, none) for column in (old.logprobs, new.logprobs))
            same = old.loss_mask & ((old.logprobs == new.logprobs) | (was & now))
        if not (new.loss_mask & wrong & ~same).any():
            return None
        return "a trained token would get a logprob that is not its own, as the calls show"
    judged = judgement(before)
    if judged is None:
        return None
    slides = [fit.slide for fit in judged.fits]
    if judged.is_plausible or judged.may_lack_values or not slides:
        slides = [Slide(), *slides]
    sampled = np.zeros(len(old.token_ids), np.bool_)
    for span, end in zip(judged.spans, judged.ends, strict=True):
        sampled[span.start : span.ends[-1] if end is None else end] = True
    for slide in slides:
        # `[T]` the value of each token if the column slid; NaN where it moved out of the row.
        own = logprobs = old.logprobs
        if logprobs is not None and slide.logprobs:
            own = logprobs.copy()
            for span in judged.spans[slide.first : None if slide.last == TO_END else slide.last + 1]:
                places = np.arange(span.start, span.ends[-1])
                source = places + slide.logprobs
                inside = (source >= 0) & (source < len(own))
                own[places] = np.where(inside, logprobs[np.clip(source, 0, len(own) - 1)], np.nan)
        wrong_before = old.loss_mask & ~_have_own_logprob(old, sampled, own)
        wrong_after = new.loss_mask & ~_have_own_logprob(new, sampled, own)
        if bool((wrong_after & ~wrong_before).any()):
            return "a trained token would get a logprob that is not its own, as far as the row shows"
    return None


def _have_own_logprob(row: TrainingRow, sampled: Mask, own: Logprobs | None) -> Mask:
    """`[T]` True for sampled tokens whose logprob is `own`; any logprob is, if `own` is None."""
    if own is None or row.logprobs is None:
        return sampled
    same = (row.logprobs == own) | (np.isnan(row.logprobs) & np.isnan(own))
    return np.asarray(sampled & (same | np.isclose(row.logprobs, own, rtol=1e-5, atol=1e-8)))
