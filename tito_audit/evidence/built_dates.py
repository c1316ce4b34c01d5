"""Prompts rendered on the date that they hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tito_audit.evidence.model import Construction
from tito_audit.evidence.own_date import at, has_clock
from tito_audit.evidence.unmatched import Candidate, UnmatchedSequence
from tito_audit.render.dates import Probe, date_in
from tito_audit.render.renderer import Renderer


def dates(sequence: UnmatchedSequence) -> Iterator[Candidate]:
    """The messages rendered on the date that the recorded text holds where the template writes one."""
    renderer = sequence.reference.renderer
    if renderer is None or not has_clock(renderer):
        return
    probed = _written(sequence, replace(renderer, clock=Probe()))
    moment = date_in(probed, sequence.text) if probed is not None else None
    text = _written(sequence, at(renderer, moment)) if moment is not None else None
    if moment is not None and text is not None:
        yield Candidate(
            text, Construction("TPL210", "another date", f"the prompt was written on {moment:%Y-%m-%d}")
        )


def _written(sequence: UnmatchedSequence, renderer: Renderer) -> str | None:
    """What another renderer writes for the sequence."""
    sequence.left -= 1
    other = replace(sequence, reference=replace(sequence.reference, renderer=renderer), left=1)
    return other.write(sequence.messages, sequence.rollout.tools)
