"""What a row's messages, the headers in its tokens and its logprobs together prove to have been sampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tito_audit.evidence.model import Evidence
from tito_audit.evidence.reference import heads_in, pieces_of
from tito_audit.evidence.roles import ASSISTANT, TURN_END, token_roles
from tito_audit.evidence.unclear import unclear_roles
from tito_audit.record.arrays import Logprobs, Mask
from tito_audit.record.message import Message
from tito_audit.record.rollout import TrainingRow, trained_runs
from tito_audit.record.speakers import told_name
from tito_audit.tokens.vocab import Vocabulary

__all__ = ["agreed_mask"]


def agreed_mask(evidence: Evidence) -> Mask | None:
    """`[T]` the loss mask on which messages, role headers and logprobs agree; None where one of them does not.

    Every answer has to be where its header is and to say what its message says. Logprobs, if there are any,
    have to be real on every answer and one and the same fill everywhere else; the end of a turn counts as
    sampled where its logprob is real, and without logprobs where the mask of the row has it.
    """
    return evidence.once("agreed mask", _agreed_mask)


def _agreed_mask(evidence: Evidence) -> Mask | None:
    row, view, vocabulary = evidence.rollout.training_row, evidence.row, evidence.vocabulary
    if row is None or row.loss_mask is None or view is None or view.proven or vocabulary is None:
        return None
    messages = evidence.rollout.messages
    if any(told_name(one.speaker) is not None for one in messages) or unclear_roles(evidence) is not None:
        return None
    pieces = pieces_of(row.token_ids, vocabulary)
    heads = token_roles(pieces, evidence.end_ids, heads_in(vocabulary, "", evidence.speakers))
    sampled = heads.among((ASSISTANT, TURN_END))
    answers = [message for message in messages if message.sampled]
    told = np.zeros_like(sampled)
    for span in view.spans:
        told[span.start : span.ends[-1]] = True
    if not answers or not np.array_equal(sampled, told) or not _said(row, sampled, answers, vocabulary):
        return None
    ends = heads.among((TURN_END,))
    return _by_logprobs(row, sampled, ends) if _any_logprobs(row) else sampled & (~ends | row.loss_mask)


def _said(row: TrainingRow, sampled: Mask, answers: Sequence[Message], vocabulary: Vocabulary) -> bool:
    """Whether each stretch says what its message says."""
    runs = trained_runs(sampled)
    if len(runs) != len(answers):
        return False
    for (start, end), message in zip(runs, answers, strict=True):
        text = vocabulary.text(row.token_ids[start:end])
        named = [call.name for call in message.tool_calls]
        if not all(part in text for part in (message.text.strip(), *named)):
            return False
    return True


def _any_logprobs(row: TrainingRow) -> bool:
    return row.logprobs is not None and bool(np.isfinite(row.logprobs).any())


def _by_logprobs(row: TrainingRow, sampled: Mask, ends: Mask) -> Mask | None:
    """What of the answers has a logprob; None where anything else has one, or part of an answer has none."""
    logprobs = row.logprobs
    assert logprobs is not None
    outside = logprobs[~sampled]
    fill = outside[0] if len(outside) else np.nan
    if not _same(outside, fill).all():
        return None
    filled = _same(logprobs, fill)
    mine: Mask = sampled & ~(ends & filled)
    # A token that was certain has 0.0 as well, but no answer is certain all through.
    bare = filled & mine if fill != 0.0 else _all_filled(filled, mine)
    real = np.isfinite(logprobs) & (logprobs <= 0.0)
    return None if bare.any() or not real[mine].all() else mine


def _same(values: Logprobs, fill: float) -> Mask:
    same: Mask = np.isnan(values) if np.isnan(fill) else values == fill
    return same


def _all_filled(filled: Mask, mine: Mask) -> Mask:
    """`[T]` the stretches of which every token is filled."""
    out = np.zeros(len(mine), np.bool_)
    for start, end in trained_runs(mine):
        out[start:end] = filled[start:end].all()
    return out
