"""The training row compared with messages as they were sent: without the answer to them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tito_audit.evidence.belonging import said, share_words, spoken
from tito_audit.evidence.model import RowFound, RowView
from tito_audit.evidence.reference import Reference
from tito_audit.evidence.rendered import render_conversation
from tito_audit.evidence.roles import Roles
from tito_audit.evidence.row import OTHER_MESSAGES, row_against_itself, row_against_template
from tito_audit.record.message import as_message
from tito_audit.record.rollout import Rollout
from tito_audit.record.runs import trained_runs
from tito_audit.record.speakers import ASSISTANT


def is_as_sent(rollout: Rollout) -> bool:
    """Whether the messages end with one that was given, as a sampler gets them."""
    return bool(rollout.messages) and rollout.messages[-1].given


def answer_to(rollout: Rollout, reference: Reference) -> tuple[int, int] | None:
    """The tokens of the row that answer its messages; None where neither its headers nor its mask show them.

    A row with fewer answers lacks an exchange, unless its last one is that of the messages: then it was cut.
    """
    row, answers = rollout.training_row, sum(message.sampled for message in rollout.messages)
    assert row is not None
    view = row_against_itself(rollout, reference).view
    by_headers = [] if view is None else trained_runs(view.sampled)
    by_mask = [] if row.loss_mask is None else trained_runs(row.loss_mask)
    span = next((runs[answers] for runs in (by_headers, by_mask) if len(runs) > answers), None)
    fewer = by_headers or by_mask
    if span is None and len(fewer):
        last = next((said(message) for message in reversed(rollout.messages) if message.sampled), "")
        cut = share_words(
            last.encode("utf-8", "surrogatepass"), spoken(reference.pieces(row.token_ids), fewer[-1:])
        )
        span = None if cut else fewer[-1]
    return span


def row_against_request(rollout: Rollout, reference: Reference) -> RowFound | None:
    """The row compared up to the answer to its messages, and its roles by its headers; None if that is not shown.

    The messages are rendered with the answer that the row holds, which is not compared.
    """
    row, answer = rollout.training_row, answer_to(rollout, reference)
    if row is None or answer is None:
        return None
    itself, (start, end) = row_against_itself(rollout, reference), answer
    before = reference.text(row.token_ids[:start])
    questions = [said(message).strip() for message in rollout.messages if message.speaker in ("user", "tool")]
    if questions and not any(
        question in before
        or share_words(question.encode("utf-8", "surrogatepass"), before.encode("utf-8", "surrogatepass"))
        for question in questions
        if question
    ):
        return itself._replace(unrelated=OTHER_MESSAGES)
    text_end = end
    while text_end > start and int(row.token_ids[text_end - 1]) in reference.end_ids():
        text_end -= 1
    role = next((message.role for message in rollout.messages if message.sampled), "assistant")
    wire = {"role": role, "content": reference.text(row.token_ids[start:text_end])}
    view = itself.view
    headless = (view is None or not view.sampled[start]) and end == len(row.token_ids)
    closing = row.token_ids[:0]
    if headless and text_end == end:
        # A cut answer gets the end of the others: between two gaps its tokens would be taken for other text.
        ends = row.token_ids[:start]
        closing = ends[np.isin(ends, sorted(reference.end_ids()))][:1]
    more = len(closing)
    cut = replace(
        row,
        token_ids=np.concatenate((row.token_ids[:end], closing)),
        loss_mask=None if row.loss_mask is None else np.append(row.loss_mask[:end], np.zeros(more, np.bool_)),
        logprobs=None if row.logprobs is None else np.append(row.logprobs[:end], np.full(more, np.nan)),
        columns=(),
        hidden=None,
    )
    whole = replace(rollout, messages=(*rollout.messages, as_message(wire, "the answer")), training_row=cut)
    written, error = render_conversation(whole, reference)
    if written is None:
        return itself._replace(error=error)
    compared = row_against_template(whole, written, reference)
    if headless:  # the header of the answer is missing from the row
        view = view if more and view is not None else compared.view
    if more and view is not None:
        answered = np.arange(end) >= start
        view = RowView(
            view.sampled[:end] | answered,
            view.proven,
            Roles.of([*view.roles[:start], *[ASSISTANT] * (end - start)]),
            view.turn[:end],
            view.turn_offset[:end],
            None,
            view.drifted[:end] & ~answered,
        )
    differences = [
        difference
        for difference in compared.differences
        if difference.start < start or difference.start == difference.end == start
    ]
    return RowFound(
        view, [*differences, *(difference for difference in itself.differences if difference.start >= start)]
    )
