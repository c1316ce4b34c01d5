"""Each completion compared with what decoding and re-encoding it gives."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tito_audit.align.drift import align
from tito_audit.evidence.differences import Region, difference, stretches
from tito_audit.evidence.model import Against, Difference
from tito_audit.evidence.reference import Reference
from tito_audit.record.arrays import Ids, empty_ids
from tito_audit.record.finding import Severity
from tito_audit.record.rollout import Rollout

_HARMLESS = "harmless as logged: it would drift if the text were encoded again"


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion after the end of its prompt, from the last control token on.

    No token spans a control token, so this much of the prompt decides how the completion's first characters are
    encoded.
    """

    turn: int
    ids: Ids
    """`[N]` the end of the prompt and the completion."""
    start: int
    """Where the completion starts."""
    text: str
    """What these ids spell."""


def answers_of(rollout: Rollout, reference: Reference) -> list[Answer]:
    """The completions of a rollout that have ids."""
    answers = []
    for number, call in enumerate(rollout.turns):
        if call.completion_ids is None or not len(call.completion_ids):
            continue
        prompt = call.prompt_ids if call.prompt_ids is not None else empty_ids()
        tail = prompt[reference.tail_start(prompt) :]
        ids = np.concatenate([tail, call.completion_ids])
        answers.append(Answer(number, ids, len(tail), reference.text(ids)))
    return answers


def reencoded_differences(rollout: Rollout, answer: Answer, reference: Reference) -> list[Difference]:
    """Where a completion differs from the re-encoding of its own text; severity NOTE."""
    ids, start = answer.ids, answer.start
    encoded = reference.encode_as(answer.text, ids)
    if np.array_equal(encoded, ids):
        return []
    recorded, canonical = reference.pieces(ids), reference.pieces(encoded)
    region = Region(answer.turn, start, len(ids))
    return [
        difference(
            stretch,
            Against.REENCODED,
            Severity.NOTE,
            _HARMLESS,
            regions=(region,),
            turn=answer.turn,
            message_indices=tuple(call.message_index for call in rollout.turns),
        )
        for stretch in stretches(recorded, canonical, align(recorded, canonical))
        if stretch.end > start
    ]
