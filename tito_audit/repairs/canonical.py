"""canonical: replaces recorded tokens with today's."""

from __future__ import annotations

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.evidence.model import Evidence
from tito_audit.record.arrays import Ids, Offsets
from tito_audit.record.column import ColumnRole
from tito_audit.record.finding import Finding, Where
from tito_audit.record.move_row import move_row
from tito_audit.repair import Proposal, Safety, repair
from tito_audit.repairs._carry import UNTRAINED, column_of, with_row
from tito_audit.settings.model import RepairChoices
from tito_audit.terminal.words import many


@repair(
    "canonical",
    cures=("TOK", "TPL"),
    safety=Safety.UNSAFE,
    precedence=80,
    fits=lambda evidence, finding: finding.hit.where is Where.ROW and not _has_calls(evidence),
)
def canonical(evidence: Evidence, findings: tuple[Finding, ...], choices: RepairChoices) -> Proposal | None:
    """Adopts the tokens that template and tokenizer write today.

    ## What it does
    If the log holds no calls, the tokens of each difference in the row are replaced with those that the template
    writes for the messages, or that re-encoding the row's text gives. Tokens before the first change keep their
    logprobs. From there on every logprob is unknown and its token leaves the loss: a logprob belongs to a token in
    its context, so logprobs are never added up or copied.

    ## When it is safe
    Never: nothing in such a log says what was sampled, so it needs `--unsafe`. It refuses logs with calls, which
    do say; there, `splice` puts the sampled tokens back.

    ## What it costs
    Every trained token from the first change on; the repair says how many. Values that a trainer computed from the
    old tokens are stale from there on and become null.

    ## Example
    ```text
    row       ▁Skin ny ▁cat <|im_end|>      logprobs  -0.5 -0.1 -0.2 -0.01
    row       ▁Skinny  ▁cat <|im_end|>      logprobs  null null null            out of the loss
    ```
    """
    row = evidence.rollout.training_row
    if row is None:
        return None
    places = {(start, end) for f in findings if f.hit.where is Where.ROW for _, start, end in f.spans()}
    differences = [d for d in evidence.differences if d.where is Where.ROW and (d.start, d.end) in places]
    differences.sort(key=lambda d: (d.start, d.end))
    if _has_calls(evidence):
        if differences or any(finding.hit.where is not Where.ROW for finding in findings):
            raise RecordError("the calls say what was sampled, and a sampled token is never replaced")
        return None
    if not differences:
        return None
    # The ids with each difference replaced, and the old position of each; -1 where it is new.
    pieces: list[Ids] = []
    sources: list[Offsets] = []
    at, first = 0, differences[0].start
    for difference in differences:
        if difference.start < at:
            continue  # inside the difference before it
        pieces += [row.token_ids[at : difference.start], difference.canonical.ids]
        sources += [np.arange(at, difference.start), np.full(len(difference.canonical.ids), -1)]
        at = difference.end
    ids = np.concatenate([*pieces, row.token_ids[at:]]).astype(np.int32)
    source = np.concatenate([*sources, np.arange(at, len(row.token_ids))]).astype(np.int64)
    unknown = np.arange(len(ids)) >= first
    mask = None
    if row.loss_mask is not None and column_of(row, ColumnRole.LOSS_MASK) is not None:
        mask = (source >= 0) & row.loss_mask[source] & ~unknown
    elif row.logprobs is not None or row.loss_mask is not None:
        raise RecordError("there is no loss mask to take the tokens with unknown logprobs out of the loss")
    if mask is not None and not mask.any():
        raise RecordError("nothing would be left to train: the first change comes before every trained token")
    logprobs = None
    if row.logprobs is not None:
        logprobs = np.where(unknown | (source < 0), np.nan, row.logprobs[source])
    moved = move_row(row, ids, source, loss_mask=mask, logprobs=logprobs)
    notes = [f"{many(len(differences), 'span')} of the row replaced"]
    if row.loss_mask is not None and moved.row.loss_mask is not None:
        trained = int(row.loss_mask.sum())
        notes.append(f"{trained - int(moved.row.loss_mask.sum()):,} of {trained:,} trained tokens left the loss")
    return Proposal(
        with_row(evidence, moved.row),
        Safety.UNSAFE,
        reason="no call says what was sampled, so today's tokens may replace sampled ones",
        notes=tuple(notes),
        stale=moved.stale,
        dropped=moved.dropped,
        unknown=moved.unknown,
        adds=UNTRAINED,
    )


def _has_calls(evidence: Evidence) -> bool:
    return any(turn.completion_ids is not None for turn in evidence.rollout.turns)
