"""Each completion compared with what decoding and re-encoding it gives."""

from __future__ import annotations

import numpy as np

from tito_audit.align.drift import align
from tito_audit.evidence.differences import Region, difference, stretches
from tito_audit.evidence.model import Against, Difference
from tito_audit.evidence.reference import Reference
from tito_audit.record.arrays import Ids, empty_ids
from tito_audit.record.finding import Severity
from tito_audit.record.rollout import Rollout

_HARMLESS = "harmless as logged: it would drift if the text were encoded again"


def tail_and_completion(rollout: Rollout, turn: int, reference: Reference) -> tuple[Ids, int] | None:
    """The end of a prompt, from its last control token on, with the completion after it; and where that starts.

    No token spans a control token, so this much of the prompt decides how the completion's first characters are
    encoded. None when the log has no completion ids.
    """
    call = rollout.turns[turn]
    if call.completion_ids is None or not len(call.completion_ids):
        return None
    prompt = call.prompt_ids if call.prompt_ids is not None else empty_ids()
    tail = prompt[reference.tail_start(prompt) :]
    return np.concatenate([tail, call.completion_ids]), len(tail)


def reencoded_differences(rollout: Rollout, turn: int, reference: Reference) -> list[Difference]:
    """Where a completion differs from the re-encoding of its own text; severity NOTE."""
    found = tail_and_completion(rollout, turn, reference)
    if found is None:
        return []
    ids, start = found
    # With messages, rendering encodes the same segments, so this encoding costs nothing more.
    encoded = reference.encode_as(reference.text(ids), ids) if rollout.messages else reference.reencoded(ids)
    if np.array_equal(encoded, ids):
        return []
    recorded, canonical = reference.pieces(ids), reference.pieces(encoded)
    region = Region(turn, start, len(ids))
    return [
        difference(
            stretch,
            Against.REENCODED,
            Severity.NOTE,
            _HARMLESS,
            regions=(region,),
            turn=turn,
            message_indices=tuple(call.message_index for call in rollout.turns),
        )
        for stretch in stretches(recorded, canonical, align(recorded, canonical))
        if stretch.end > start
    ]
