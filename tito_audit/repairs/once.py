"""once: takes what other rows of the run train first out of the loss."""

from __future__ import annotations

from tito_audit.errors import RecordError
from tito_audit.evidence.model import Evidence
from tito_audit.record.column import ColumnRole
from tito_audit.record.finding import Finding
from tito_audit.repair import Proposal, Safety, repair
from tito_audit.repairs._carry import UNTRAINED, column_of, edit_row, with_row
from tito_audit.settings.model import RepairChoices

_EMPTY = frozenset({*UNTRAINED, "MSK403"})
"""Rules that report that a mask was reduced, or that nothing of it is left."""


@repair(
    "once",
    cures=("REC009",),
    safety=Safety.SAFE,
    precedence=45,
    fits=lambda evidence, finding: (
        finding.hit.turn is None
        and (row := evidence.rollout.training_row) is not None
        and column_of(row, ColumnRole.LOSS_MASK) is not None
    ),
    named_only=True,
)
def once(evidence: Evidence, findings: tuple[Finding, ...], choices: RepairChoices) -> Proposal | None:
    """Takes out of the loss what another row of the run trains first.

    ## What it does
    Before the repair all logs are read once, as for REC009. In each row the mask is set to "not trained" where
    another row is proven to train the same sampling event first (labels become -100, weights 0). Ids and logprobs
    stay. A row that only repeats others trains nothing afterwards and can be left out.

    It only runs when named (`--with once`): some trainers weight rows by their number of steps on purpose.

    ## When it is safe
    Always: each token that leaves the loss of one row stays in the loss of another row of the same run. So logs
    that are trained together must be repaired together.

    ## What it costs
    No training signal: the tokens are in the loss elsewhere. A call has no mask, so a call that was logged twice
    stays; leave its row out.

    ## Example
    ```text
    row 3   prompt  answer 1                    row 3 trains answer 1
    mask       0       1
    row 4   prompt  answer 1  tool  answer 2    before: row 4 trains it again
    mask       0       1       0       1
    mask       0       0       0       1        after
    ```
    """
    row = evidence.rollout.training_row
    again = [run for again_run in evidence.trained_again if again_run.turn is None for run in again_run.runs]
    if any(finding.hit.turn is not None for finding in findings) and not again:
        raise RecordError("a call has no mask, so leave its row out instead")
    if row is None or row.loss_mask is None or not findings:
        return None
    if column_of(row, ColumnRole.LOSS_MASK) is None:
        raise RecordError("the row has no mask of its own, so leave it out instead")
    left = row.loss_mask.copy()
    for start, end in again:
        left[start:end] = False
    count = int(row.loss_mask.sum()) - int(left.sum())
    if not count:
        return None
    notes = [f"{count:,} of {int(row.loss_mask.sum()):,} trained tokens left the loss, as another row trains them"]
    if not left.any():
        notes.append("the row trains nothing now and can be left out")
    adds = UNTRAINED if left.any() else _EMPTY
    return Proposal(with_row(evidence, edit_row(row, loss_mask=left)), notes=tuple(notes), adds=adds)
