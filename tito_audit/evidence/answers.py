"""Where the answers of a training row begin, and what proves that they were sampled so."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tito_audit.align.blocks import BlockKind, Blocks
from tito_audit.align.pieces import Pieces
from tito_audit.evidence.model import RowView
from tito_audit.evidence.roles import ASSISTANT, GENERATION_PROMPT, TEMPLATE, TURN_END, Roles
from tito_audit.evidence.scene import holds_marker
from tito_audit.record.arrays import Mask
from tito_audit.record.rollout import Rollout, TrainingRow

__all__ = ["answers_begun", "inside_answer", "logprobs_prove", "marked"]


def marked(held: Pieces, canonical: Pieces) -> bool:
    """Whether a row has any of the control tokens or markers that the template writes inside its text."""
    wanted = canonical.control[1:-1].any() or holds_marker(canonical.data.decode("utf-8", "replace"))
    if not wanted or not len(held):
        return True
    inner = held.part(1, len(held))
    return bool(inner.control[:-1].any()) or holds_marker(inner.data.decode("utf-8", "replace"))


def answers_begun(view: RowView, rollout: Rollout, held: Pieces, blocks: Blocks) -> RowView:
    """The view with what stands between a whole generation prompt and the template's first token of an answer.

    The template writes nothing there, so its header ends in front of it: it is the answer's, unless it is the
    header once more, or white space of which nothing says that it was sampled.
    """
    mine = np.zeros(len(held), np.bool_)
    lone = np.zeros(len(held), np.bool_)
    for kind, start, end, _, _ in blocks.differing():
        if kind is BlockKind.EXTRA and _begins(view, start, end) and _sampled(view, rollout, held, start, end):
            mine[start:end] = True
        if kind is BlockKind.MISSING:
            lone |= _lone_end(view, start)
    if not mine.any() and not lone.any():
        return view
    sampled = (view.sampled | mine) & ~lone
    roles = view.roles
    assert isinstance(roles, Roles)
    return replace(view, sampled=sampled, roles=roles.given(ASSISTANT, mine).given(TEMPLATE, lone))


def inside_answer(view: RowView, start: int, end: int) -> bool:
    """Whether recorded tokens are of an answer; of a place between two, whether both sides of it are."""
    if start == end:
        return 0 < start < len(view.sampled) and bool(view.sampled[start - 1 : start + 1].all())
    return bool(view.sampled[start:end].any())


def logprobs_prove(row: TrainingRow, start: int, end: int) -> bool:
    """Whether logprobs say that tokens were sampled: all are there, and not only the row's fill.

    The fill is the commonest value outside the loss, else what the format writes. Of a place between two
    tokens, its neighbours tell.
    """
    if row.logprobs is None:
        return False
    around = slice(max(start - 1, 0), end + 1) if start == end else slice(start, end)
    values = row.logprobs[around]
    if not len(values) or not np.isfinite(values).all() or (values > 0).any():
        return False
    real = values < 0
    for fill in (_fill(row), row.sentinel):
        if fill is not None:
            real &= values != fill
    return bool(real.any())


def _fill(row: TrainingRow) -> float | None:
    """The commonest logprob outside the loss; None without a mask, or where none is a number."""
    if row.loss_mask is None or row.logprobs is None:
        return None
    outside = row.logprobs[~row.loss_mask]
    values, counts = np.unique(outside[np.isfinite(outside)], return_counts=True)
    return float(values[counts.argmax()]) if len(values) else None


def _begins(view: RowView, start: int, end: int) -> bool:
    """Whether a stretch stands between a generation prompt and an answer."""
    after = end == len(view.sampled) or bool(view.sampled[end])
    return start > 0 and view.roles[start - 1] == GENERATION_PROMPT and after


def _sampled(view: RowView, rollout: Rollout, held: Pieces, start: int, end: int) -> bool:
    """Whether what stands behind a generation prompt was sampled, as far as the row and its messages say."""
    data = held.bytes_of(start, end)
    if data.strip():
        return not held.control[start:end].any() and not _header(view, held, start).endswith(data.strip())
    row = rollout.training_row
    assert row is not None
    if row.loss_mask is not None and row.loss_mask[start:end].all():
        return True
    if logprobs_prove(row, start, end):
        return True
    begun = data.decode("utf-8", "replace") + held.bytes_of(end, min(end + 4, len(held))).decode("utf-8", "ignore")
    return any(one.role == ASSISTANT and one.text.startswith(begun) for one in rollout.messages)


def _header(view: RowView, held: Pieces, start: int) -> bytes:
    """The generation prompt in front of a token, without white space around it."""
    first = start
    while first and view.roles[first - 1] == GENERATION_PROMPT:
        first -= 1
    return held.bytes_of(first, start).strip()


def _lone_end(view: RowView, place: int) -> Mask:
    """`[T]` True for the end of a turn beside tokens that the row lacks, of whose answer nothing else is there."""
    out = np.zeros(len(view.sampled), np.bool_)
    for at in (place - 1, place):
        if 0 <= at < len(out) and view.sampled[at] and view.roles[at] == TURN_END:
            before = at > 0 and view.sampled[at - 1]
            after = at + 1 < len(out) and view.sampled[at + 1]
            opened = at > 0 and view.roles[at - 1] == GENERATION_PROMPT
            out[at] = not before and not after and not opened
    return out
