"""What the MSK rules report when a message has an unknown role."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from tito_audit.evidence.model import Evidence
from tito_audit.evidence.unclear import unclear_roles
from tito_audit.record.finding import Hit, Severity, Where
from tito_audit.record.runs import trained_runs
from tito_audit.record.speakers import ASSISTANT
from tito_audit.rules._words import listed, shown

_MOST = 3


def _options(evidence: Evidence, name: str) -> str:
    """The options that name a role as sampled, and with it the roles that already count as sampled."""
    said = [message.role for message in evidence.rollout.messages if message.sampled]
    spoken = [ASSISTANT] if evidence.row is not None and evidence.row.sampled.any() else []
    roles = dict.fromkeys((*(evidence.speakers.stated or said or spoken), name))
    return " ".join(f"--sampled-role {shlex.quote(role)}" for role in roles)


def unknown_role(evidence: Evidence) -> Iterator[Hit]:
    """One hit for a row in which an unknown role leaves open what was sampled."""
    found, row = unclear_roles(evidence), evidence.rollout.training_row
    if found is None or row is None:
        return
    start, end = next(iter(trained_runs(found.tokens)), (0, 0))
    names = [repr(name) for name in found.names[:_MOST]]
    if len(found.names) > _MOST:
        names.append(f"{len(found.names) - _MOST:,} more")
    several = len(found.names) > 1
    wrote = "them" if several else "it"
    options = _options(evidence, found.names[0])
    message = (
        f"cannot tell which tokens were sampled: {'roles' if several else 'role'} {listed(names)} "
        f"{'are' if several else 'is'} not known to be sampled or given; pass {options} "
        f"if the model wrote {wrote}"
    )
    side = shown(evidence, row.token_ids[start:end])
    yield Hit(Where.ROW, start, end, message, None, "unknown role", Severity.WARNING, side)
