"""The rules on drifted logprobs (LPR507) and on two engines (LPR509), applied to the model's values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tito_audit.evidence.judgement import JUDGEMENT
from tito_audit.evidence.model import Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.arrays import Logprobs
from tito_audit.record.by_name import RESCORED, TRAINERS
from tito_audit.record.column import Alignment, Column, ColumnRole, MovePolicy
from tito_audit.record.finding import Finding, Where
from tito_audit.record.rollout import Rollout
from tito_audit.rescore.plan import Part
from tito_audit.rule import Rule
from tito_audit.run.check import check_explained

CODES = frozenset(("LPR507", "LPR509"))
"""Rules that compare a second engine's logprobs with the sampler's."""


def judged_by_model(
    evidence: Evidence, scored: Sequence[tuple[Part, Logprobs]], rules: Sequence[Rule], codes: frozenset[str]
) -> tuple[Finding, ...]:
    """What these rules find with the model's values as the second engine's; each message names
    `rescored_logprobs`.

    Columns of a trainer in the log are left out: a scan judges those.
    """
    asked = codes & CODES
    if not asked or not scored:
        return ()
    memo = {JUDGEMENT: evidence.memo[JUDGEMENT]} if JUDGEMENT in evidence.memo else {}
    seen = replace(
        evidence,
        rollout=with_model(evidence.rollout, scored),
        present=evidence.present | Needs.TRAINER_LOGPROBS,
        memo=memo,
    )
    mine = [rule for rule in rules if rule.code in CODES]
    findings, _ = check_explained(replace(seen, explained=()), mine, asked)
    return tuple(one for one in findings if f"`{RESCORED}`" in one.hit.message)


def with_model(rollout: Rollout, scored: Sequence[tuple[Part, Logprobs]]) -> Rollout:
    """The rollout with the model's logprobs as the trainer's column."""
    row, turns = rollout.training_row, list(rollout.turns)
    if row is not None:
        row = replace(row, columns=_others(row.columns))
    turns = [replace(turn, columns=_others(turn.columns)) for turn in turns]
    for part, scores in scored:
        values = np.where(part.sampled, scores[part.offset :], np.nan)
        if part.where is Where.ROW and row is not None:
            row = replace(row, columns=(*row.columns, _column(values, Alignment.FULL)))
        elif part.turn is not None:
            turn = turns[part.turn]
            turns[part.turn] = replace(turn, columns=(*turn.columns, _column(values, Alignment.CALL)))
    return replace(rollout, training_row=row, turns=tuple(turns))


def _column(values: Logprobs, alignment: Alignment) -> Column:
    return Column(RESCORED, ColumnRole.OTHER, values, alignment, MovePolicy.STALE)


def _others(columns: Sequence[Column]) -> tuple[Column, ...]:
    return tuple(one for one in columns if one.role is not ColumnRole.OTHER or one.name not in TRAINERS)
