"""Token sequences with the values logged beside them: routed experts, kept sets, advantages, rewards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tito_audit.evidence.model import Evidence
from tito_audit.record.arrays import Ids, Mask, Offsets
from tito_audit.record.column import Column
from tito_audit.record.finding import Hit, Severity, Where
from tito_audit.record.policy_columns import version_column
from tito_audit.record.token_extras import NO_EXTRAS, TokenExtras


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """The tokens of a row or a call, and the values beside them."""

    ids: Ids
    """`[T]` all tokens of a row; of a call its prompt, if logged, and its completion."""
    sampled: Mask
    """`[T]` True where a row is trained, or a call sampled."""
    response: int | None
    """Where the response begins; None if nothing says."""
    fed: int | None
    """How many tokens the previous call was fed, all but its last one; None for a row and for the first call."""
    beside: TokenExtras
    columns: tuple[Column, ...]
    """The columns of the row or of the call."""
    where: Where
    turn: int | None = None

    @property
    def resumed_at(self) -> list[int]:
        """The tokens at which newer weights went on with what older ones had begun to sample."""
        column = version_column(self.columns)
        if column is None or len(column.values) > len(self.ids):
            return []
        start = len(self.ids) - len(column.values)
        both = self.sampled[start + 1 :] & self.sampled[start:-1]
        cuts = (both & (column.values[1:] != column.values[:-1])).nonzero()[0]
        return [start + 1 + cut for cut in cuts.tolist()]

    def hit(self, message: str, cause: str, at: Offsets | None = None, severity: Severity | None = None) -> Hit:
        """A hit from the first to the last of these positions, on all tokens if `at` is None."""
        start, end = (0, len(self.ids)) if at is None else (int(at[0]), int(at[-1]) + 1)
        prompt = 0 if self.where is Where.ROW else self.response or 0
        return Hit(self.where, max(start - prompt, 0), max(end - prompt, 0), message, self.turn, cause, severity)


def token_sequences(evidence: Evidence) -> Iterator[TokenSequence]:
    """The training row, and each call with a completion, if values are logged beside them."""
    row, fed = evidence.rollout.training_row, None
    if row is not None and row.extras is not NO_EXTRAS:
        sampled = np.zeros(len(row.token_ids), np.bool_) if row.loss_mask is None else row.loss_mask
        yield TokenSequence(row.token_ids, sampled, row.prompt_length, None, row.extras, row.columns, Where.ROW)
    for number, turn in enumerate(evidence.rollout.turns):
        seen = turn.seen_ids
        if turn.completion_ids is not None and turn.extras is not NO_EXTRAS:
            ids = turn.completion_ids if seen is None else seen
            start = len(ids) - len(turn.completion_ids)
            sampled = np.arange(len(ids)) >= start
            yield TokenSequence(ids, sampled, start, fed, turn.extras, turn.columns, Where.COMPLETION, number)
        fed = None if seen is None else len(seen) - 1
