"""Unknown roles in a training row, whose tokens may or may not have been sampled."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tito_audit.evidence.model import Evidence
from tito_audit.evidence.roles import Roles
from tito_audit.record.arrays import Mask
from tito_audit.record.memo import memoized
from tito_audit.record.speakers import unknown_role_name


@dataclass(frozen=True, slots=True)
class Unclear:
    """Roles that are not known to be sampled or given."""

    names: tuple[str, ...]
    """As logged, those of trained tokens first."""
    tokens: Mask
    """`[T]` the trained tokens of the row in such a role."""


@memoized
def unclear_tokens(evidence: Evidence) -> Mask:
    """`[T]` bool, True where the role of a row token is unknown, including the end of its turn."""
    view, row = evidence.row, evidence.rollout.training_row
    if view is None or view.proven or row is None or not isinstance(view.roles, Roles):
        return np.zeros(len(row.token_ids) if row is not None else 0, np.bool_)
    unclear = view.roles.unclear()
    if not unclear.any():
        return unclear
    ends = np.isin(row.token_ids, np.fromiter(evidence.end_ids, np.int64)) & ~view.sampled
    follows = np.concatenate((np.zeros(1, np.bool_), unclear[:-1]))
    return unclear | (ends & follows)


@memoized
def unclear_roles(evidence: Evidence) -> Unclear | None:
    """The roles that leave open which row tokens were sampled; None if there are none, or calls prove it."""
    view, row = evidence.row, evidence.rollout.training_row
    if view is None or view.proven or row is None or row.loss_mask is None:
        return None
    unknown = [
        unknown_role_name(speaker) for speaker in dict.fromkeys(m.speaker for m in evidence.rollout.messages)
    ]
    unclear = unclear_tokens(evidence)
    if not unclear.any() and all(name is None for name in unknown):
        return None
    tokens = unclear & row.loss_mask
    in_row = [unknown_role_name(view.roles[at]) for at in tokens.nonzero()[0].tolist()]
    names = tuple(dict.fromkeys(name for name in (*in_row, *unknown) if name is not None))
    return Unclear(names, tokens) if names else None
