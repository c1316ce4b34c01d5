"""Whether a repair would, under any possible reading, give a trained token another token's logprob."""

from __future__ import annotations

import numpy as np

from tito_audit.evidence.fill import IMPOSSIBLE
from tito_audit.evidence.judgement import judgement
from tito_audit.evidence.logprobs import ROUNDING
from tito_audit.evidence.model import Evidence
from tito_audit.record.arrays import Logprobs, Mask
from tito_audit.record.reading import TO_END, Slide
from tito_audit.record.rollout import TrainingRow


def harm(before: Evidence, after: Evidence) -> str | None:
    """Why the row is worse after a repair, token by token with its logprob; None when it is not.

    Only for rows with unchanged tokens; None for others. A pair that was right under some reading of the old row
    must stay or leave the loss, and no reading may find a new wrong pair. Beside calls only theirs counts.
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
        fresh = new.loss_mask & wrong & ~_same_pairs(old, new)
        return (
            "a trained token would get a logprob that is not its own, as the calls show" if fresh.any() else None
        )
    before_repair = judgement(before)
    if before_repair is None:
        return None
    slides = [fit.slide for fit in before_repair.fits]
    for slide in (Slide(), *slides) if before_repair.right or before_repair.missing or not slides else slides:
        sampled = np.zeros(len(old.token_ids), np.bool_)
        for span, end in zip(before_repair.spans, before_repair.ends, strict=True):
            sampled[span.start : span.ends[-1] if end is None else end] = True
        # `[T]` the value of each token if the column slid; NaN where it moved out of the row.
        logprobs = old.logprobs
        own = logprobs
        if logprobs is not None and slide.logprobs:
            own = logprobs.copy()
            for number in range(slide.first, len(before_repair.spans) if slide.last == TO_END else slide.last + 1):
                places = np.arange(before_repair.spans[number].start, before_repair.spans[number].ends[-1])
                source = places + slide.logprobs
                inside = (source >= 0) & (source < len(own))
                own[places] = np.where(inside, logprobs[np.clip(source, 0, len(own) - 1)], np.nan)
        wrong_before = old.loss_mask & ~_right(old, sampled, own)
        wrong_after = new.loss_mask & ~_right(new, sampled, own)
        if bool((wrong_after & ~wrong_before).any()):
            return "a trained token would get a logprob that is not its own, as far as the row shows"
    return None


def _right(row: TrainingRow, sampled: Mask, own: Logprobs | None) -> Mask:
    """`[T]` True for tokens that were sampled and whose logprob is their own."""
    if own is None or row.logprobs is None:
        return sampled
    same = (row.logprobs == own) | (np.isnan(row.logprobs) & np.isnan(own))
    return np.asarray(sampled & (same | np.isclose(row.logprobs, own, rtol=1e-5, atol=1e-8)))


def _same_pairs(old: TrainingRow, new: TrainingRow) -> Mask:
    """`[T]` True for tokens that were trained with the same logprob, or as then with none."""
    assert old.loss_mask is not None
    before, after = old.logprobs, new.logprobs
    if before is None or after is None:
        return old.loss_mask
    none = (*IMPOSSIBLE, 0.0, *(row.sentinel for row in (old, new) if row.sentinel is not None))
    was, now = (np.isnan(values) | np.isin(values, none) for values in (before, after))
    return np.asarray(old.loss_mask & ((before == after) | (was & now)))
