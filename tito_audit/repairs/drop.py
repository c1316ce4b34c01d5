"""drop: leaves the rollout out."""

from __future__ import annotations

from tito_audit.evidence.model import Evidence
from tito_audit.record.finding import Finding
from tito_audit.repair import Proposal, Safety, repair
from tito_audit.settings.model import RepairChoices


@repair(
    "drop",
    cures=("REC", "TOK", "TPL", "SEQ", "MSK", "LPR"),
    safety=Safety.UNSAFE,
    precedence=90,
    removes_rows=True,
)
def drop(evidence: Evidence, findings: tuple[Finding, ...], choices: RepairChoices) -> Proposal | None:
    """Leaves the rollout out, with the reason.

    ## What it does
    The row is not written. With a quarantine file it goes there, unchanged, with the codes that were found.

    ## When it is safe
    Never: it needs `--unsafe`, since only the user can decide that a rollout is worthless. It runs last, for what
    no other repair could fix.

    ## What it costs
    A rollout, and the balance of its group: an advantage computed over the group no longer fits the rollouts that
    are left. Dropping rollouts for what they contain (long answers, tool calls) biases the rest.

    ## Example
    ```text
    completion_ids  0 0 0 0      REC004: placeholders, the sampled tokens were never recorded
    written         nothing; the row goes to the quarantine
    ```
    """
    if not findings:
        return None
    codes = ", ".join(sorted({finding.code for finding in findings}))
    return Proposal((), Safety.UNSAFE, reason=f"{codes} and no other repair fixed it")
