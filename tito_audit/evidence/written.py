"""The whole conversation as the template writes it, with whose byte each byte is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tito_audit.align.pieces import Pieces
from tito_audit.errors import RenderError
from tito_audit.evidence.reference import Reference
from tito_audit.evidence.roles import ASSISTANT, GENERATION_PROMPT, TEMPLATE, TURN_END, UNKNOWN
from tito_audit.record.arrays import Mask, empty_ids
from tito_audit.record.rollout import Rollout
from tito_audit.render.marks import SpanKind
from tito_audit.render.spans import Rendering, spans, spans_fast

__all__ = ["Written", "write_conversation"]


@dataclass(frozen=True, slots=True)
class Written:
    """A rendered conversation, encoded."""

    pieces: Pieces
    names: tuple[str, ...] = ()
    """Role names that `roles` counts in."""
    roles: NDArray[np.int16] | None = None
    """`[bytes]` the role of each byte; None when the spans are unknown."""
    sampled: Mask | None = None
    """`[bytes]` True where the model would have generated it; None when unknown."""


def write_conversation(rollout: Rollout, reference: Reference) -> tuple[Written | None, str | None]:
    """All messages as the template writes them today; or None and why it cannot."""
    assert reference.renderer is not None
    recorded = rollout.training_row.token_ids if rollout.training_row is not None else empty_ids()
    rendering = spans_fast(reference.renderer, rollout.messages, rollout.tools, rollout.template_kwargs)
    if rendering is not None and reference.leads_to(rendering.text, recorded):
        return _written(rollout, rendering, reference.pieces(recorded)), None
    try:
        rendering = spans(reference.renderer, rollout.messages, rollout.tools, rollout.template_kwargs)
    except RenderError as error:
        return None, str(error)
    return _written(rollout, rendering, reference.pieces(reference.encode_as(rendering.text, recorded))), None


def _written(rollout: Rollout, rendering: Rendering, pieces: Pieces) -> Written:
    """A rendered conversation with its tokens."""
    text = rendering.text.encode("utf-8", "surrogatepass")
    answers = [i for i, message in enumerate(rollout.messages) if message.role == ASSISTANT]
    ranges = [rendering.sampled.get(i) for i in answers]
    if pieces.data != text or not answers or any(found is None for found in ranges):
        return Written(pieces)  # a normaliser changed the text, or its spans are not known
    offset = _byte_offsets(rendering.text)
    names, roles = _roles(rendering, offset)
    sampled = np.zeros(len(text), np.bool_)
    for found in ranges:
        if found is not None:
            sampled[offset[found[0]] : offset[found[1]]] = True
    return Written(pieces, names, roles, sampled)


def _roles(rendering: Rendering, offset: NDArray[np.int64]) -> tuple[tuple[str, ...], NDArray[np.int16]]:
    """Role names, and the number of the name for each byte."""
    names: dict[str, int] = {}
    roles = np.zeros(int(offset[-1]), np.int16)
    for span in rendering.spans:
        name = _role_name(span.kind, span.role)
        roles[offset[span.start] : offset[span.end]] = names.setdefault(name, len(names))
    return tuple(names), roles


def _role_name(kind: SpanKind, role: str | None) -> str:
    if kind is SpanKind.GENERATION_PROMPT:
        return GENERATION_PROMPT
    if kind is SpanKind.TURN_END:
        return TURN_END if role == ASSISTANT else TEMPLATE
    if kind is SpanKind.SCAFFOLD:
        return TEMPLATE
    return role or UNKNOWN


def _byte_offsets(text: str) -> NDArray[np.int64]:
    """`[len(text) + 1]` the byte at which each character starts in UTF-8."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    widths = 1 + (points > 0x7F).astype(np.int64) + (points > 0x7FF) + (points > 0xFFFF)
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(widths)))
