"""Where the answers of a training row begin, and whether logprobs prove that their tokens were sampled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tito_audit.align.blocks import BlockKind, Blocks
from tito_audit.align.pieces import Pieces
from tito_audit.evidence.model import RowView
from tito_audit.evidence.reference import Reference
from tito_audit.evidence.roles import GENERATION_PROMPT, TEMPLATE, TURN_END, Roles
from tito_audit.evidence.stretches import Stretch
from tito_audit.evidence.unmatched import holds_marker
from tito_audit.record.arrays import Logprobs, Mask
from tito_audit.record.rollout import Rollout, TrainingRow
from tito_audit.record.speakers import ASSISTANT


def has_template_markers(held: Pieces, canonical: Pieces, reference: Reference) -> bool:
    """Whether a row has any template marker other than BOS and turn ends; also True if the template writes
    none."""
    return not _has_markers(canonical, reference) or _has_markers(held, reference)


def _has_markers(pieces: Pieces, reference: Reference) -> bool:
    first = 1 if len(pieces) and int(pieces.ids[0]) == reference.tokenizer.bos_id else 0
    rest = pieces.part(first, len(pieces))
    if (rest.control & ~np.isin(rest.ids, list(reference.end_ids()))).any():
        return True
    return holds_marker(reference.text(rest.ids[~rest.control]))


def with_answer_starts(view: RowView, rollout: Rollout, held: Pieces, blocks: Blocks) -> RowView:
    """The view with the tokens between a generation prompt and the template's first answer token assigned.

    The template writes nothing there, so they belong to the answer, unless they repeat the header or are white
    space that nothing shows to be sampled.
    """
    mine = np.zeros(len(held), np.bool_)
    lone = np.zeros(len(held), np.bool_)
    for kind, start, end, _, _ in blocks.differing():
        if kind is BlockKind.EXTRA and _is_answer_start(view, start, end):
            own = mine if _was_sampled(view, rollout, held, start, end) else lone
            own[start:end] = True
        if kind is BlockKind.MISSING:
            lone |= _lone_end(view, start)
    if not mine.any() and not lone.any():
        return view
    sampled = (view.sampled | mine) & ~lone
    roles = view.roles
    assert isinstance(roles, Roles)
    roles = roles.with_role(ASSISTANT, mine).with_role(TEMPLATE, lone)
    return replace(view, sampled=sampled, roles=roles, spans=())


def answer_at(view: RowView | None, written: Mask | None, stretch: Stretch) -> slice | None:
    """The row tokens of a stretch in an answer; for an empty stretch, the sampled tokens next to it.

    `written`, `[N]`, marks the canonical tokens that a model would sample. None when the stretch touches no
    answer.
    """
    if view is None:
        return None
    start, end = stretch.start, stretch.end
    if start < end:
        return slice(start, end) if view.sampled[start:end].any() else None
    around = slice(max(start - 1, 0), start + 1)
    if written is not None:
        inside = bool(written[stretch.canonical_start : stretch.canonical_end].all())
    else:
        inside = start > 0 and bool(view.sampled[around].all())
    return around if inside and view.sampled[around].any() else None


def logprobs_prove_sampled(row: TrainingRow, view: RowView, where: slice) -> bool:
    """Whether logprobs prove that the answer tokens in `where` were sampled: none is missing, and not all are
    fill.

    The fill is the most common value outside the loss, or the format's own. The judgement's fill is not available
    yet: it needs the spans of the view that is being made.
    """
    if row.logprobs is None:
        return False
    mine = view.sampled[where]
    if row.loss_mask is not None and (mine & row.loss_mask[where]).any():
        mine = mine & row.loss_mask[where]  # tokens outside the loss may have lost their logprob
    return _real(row, row.logprobs[where][mine])


def _real(row: TrainingRow, values: Logprobs) -> bool:
    """Whether these logprobs come from a sampler: all finite, none above 0, and at least one is not fill."""
    if not len(values) or not np.isfinite(values).all() or (values > 0).any():
        return False
    real = values < 0
    for fill in (_commonest_outside(row), row.sentinel):
        if fill is not None:
            real &= values != fill
    return bool(real.any())


def _commonest_outside(row: TrainingRow) -> float | None:
    """The most common logprob outside the loss; None without a mask, or where none is a number."""
    if row.loss_mask is None or row.logprobs is None:
        return None
    outside = ~row.loss_mask
    first = float(row.logprobs[outside.argmax()])
    alike = int(np.count_nonzero((row.logprobs == first) & outside))
    if np.isfinite(first) and 2 * alike > np.count_nonzero(outside):
        return first  # more than half, so none is more common
    entries = row.logprobs[outside]
    values, counts = np.unique(entries[np.isfinite(entries)], return_counts=True)
    return float(values[counts.argmax()]) if len(values) else None


def _is_answer_start(view: RowView, start: int, end: int) -> bool:
    """Whether a stretch lies between a generation prompt and an answer."""
    after = end == len(view.sampled) or bool(view.sampled[end])
    return start > 0 and view.roles[start - 1] == GENERATION_PROMPT and after


def _was_sampled(view: RowView, rollout: Rollout, held: Pieces, start: int, end: int) -> bool:
    """Whether tokens after a generation prompt were sampled, as far as the row and its messages show."""
    data = held.bytes_of(start, end)
    if data.strip():
        return not held.control[start:end].any() and not _header(view, held, start).endswith(data.strip())
    row = rollout.training_row
    assert row is not None
    if row.loss_mask is not None and row.loss_mask[start:end].all():
        return True
    if row.logprobs is not None and _real(row, row.logprobs[start:end]):
        return True
    begun = data.decode("utf-8", "replace") + held.bytes_of(end, min(end + 4, len(held))).decode("utf-8", "ignore")
    return any(one.role == ASSISTANT and one.text.startswith(begun) for one in rollout.messages)


def _header(view: RowView, held: Pieces, start: int) -> bytes:
    """The bytes of the generation prompt before a token, stripped of white space."""
    first = start
    while first and view.roles[first - 1] == GENERATION_PROMPT:
        first -= 1
    return held.bytes_of(first, start).strip()


def _lone_end(view: RowView, place: int) -> Mask:
    """`[T]` True for a turn end next to `place` whose answer is missing from the row."""
    out = np.zeros(len(view.sampled), np.bool_)
    for at in (place - 1, place):
        if 0 <= at < len(out) and view.sampled[at] and view.roles[at] == TURN_END:
            before = at > 0 and view.sampled[at - 1]
            after = at + 1 < len(out) and view.sampled[at + 1]
            opened = at > 0 and view.roles[at - 1] == GENERATION_PROMPT
            out[at] = not before and not after and not opened
    return out
