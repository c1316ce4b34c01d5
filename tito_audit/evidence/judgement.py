"""What all witnesses of a training row say together: how far its mask and its logprobs lie off their tokens."""

from __future__ import annotations

from tito_audit.evidence.model import Evidence
from tito_audit.record.testimony import Witness

__all__ = ["witness"]


def witness(evidence: Evidence) -> Witness | None:
    """What the training row leaves open; None without one, without sampling, or where calls prove all of it."""
    return None
