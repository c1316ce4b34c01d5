"""The loss mask that messages and role headers prove together in a row without logprobs."""

from __future__ import annotations

import numpy as np

from tito_audit.evidence.model import Evidence
from tito_audit.evidence.reference import headers_in, pieces_of
from tito_audit.evidence.roles import TURN_END, token_roles
from tito_audit.evidence.unclear import unclear_roles
from tito_audit.record.arrays import Mask
from tito_audit.record.memo import memoized
from tito_audit.record.runs import trained_runs
from tito_audit.record.speakers import ASSISTANT, unknown_role_name


@memoized
def agreed_mask(evidence: Evidence) -> Mask | None:
    """`[T]` the loss mask on which messages and role headers agree; None if they do not, or if there are logprobs.

    Every answer must follow its header and have the text of its message. The end of a turn counts as sampled
    where the row's mask trains it. Rows with logprobs are left to `judgement`.
    """
    row, view, vocabulary = evidence.rollout.training_row, evidence.row, evidence.vocabulary
    if row is None or row.loss_mask is None or row.logprobs is not None or view is None or vocabulary is None:
        return None
    messages = evidence.rollout.messages
    if (
        any(unknown_role_name(message.speaker) is not None for message in messages)
        or unclear_roles(evidence) is not None
    ):
        return None
    pieces = pieces_of(row.token_ids, vocabulary)
    roles = token_roles(pieces, evidence.end_ids, headers_in(vocabulary, "", evidence.speakers))
    sampled = roles.among((ASSISTANT, TURN_END))
    answers = [message for message in messages if message.sampled]
    by_messages = np.zeros_like(sampled)
    for span in view.spans:
        by_messages[span.start : span.ends[-1]] = True
    runs = trained_runs(sampled)
    if not answers or not np.array_equal(sampled, by_messages) or len(runs) != len(answers):
        return None
    for (start, end), message in zip(runs, answers, strict=True):
        text = vocabulary.text(row.token_ids[start:end])
        if not all(part in text for part in (message.text.strip(), *(call.name for call in message.tool_calls))):
            return None
    return sampled & (~roles.among((TURN_END,)) | row.loss_mask)
