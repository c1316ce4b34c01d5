"""Columns known by name: the weight version that sampled each token, and a trainer's own logprobs."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tito_audit.record.arrays import Logprobs
from tito_audit.record.column import Alignment, Column, ColumnRole, expand
from tito_audit.record.rollout import Rollout, TrainingRow, Turn

VERSION_COLUMNS = frozenset(
    ("versions", "output_versions", "token_versions", "token_weight_versions", "weight_versions")
)
"""Columns with the weight version that sampled each token; -1 where nothing was sampled (AReaL)."""
WeightSpans: TypeAlias = tuple[tuple[str, int, int], ...]
"""Weight versions, each with the tokens `[start, end)` of an answer that it sampled."""
WEIGHTS = "weight_versions"
"""The column that logs write as spans; a record holds it expanded, one version per token."""
SAMPLING = "sampling"
"""The fact of a rollout with its temperature, top-p, top-k and min-p, as far as logged."""
RESCORED_LOGPROBS = "rescored_logprobs"
"""The column in which `rescore` writes a model's logprobs."""
TRAINER_COLUMNS = frozenset(
    (
        RESCORED_LOGPROBS,
        "actor_log_probs",
        "log_probs",
        "old_log_prob",
        "old_log_probs",
        "old_logprobs",
        "old_per_token_logps",
        "policy_logprobs",
        "prev_logprobs",
        "prox_logp",
        "prox_logprobs",
        "proximal_logprobs",
        "train_log_probs",
        "trainer_logprobs",
    )
)
"""Columns in which a trainer wrote the policy's own logprobs, next to the sampler's in another column.

verl, TRL and rLLM write `old_…` before the update, NeMo-RL `prev_logprobs`, prime-rl `trainer_logprobs`, slime and
miles `log_probs`, AReaL `prox_logp`. Reference models and teachers are other policies.
"""


def versions_to_column(spans: Iterable[tuple[str, int, int]], size: int) -> Column:
    """Spans as a column over `size` tokens: each token's weight version, None where unknown."""
    values = np.full(size, None, object)
    for version, start, end in spans:
        values[start:end] = version
    return Column(WEIGHTS, ColumnRole.OTHER, values, Alignment.FULL)


def versions_to_spans(values: NDArray[Any]) -> tuple[tuple[str, int, int], ...]:
    """The spans of a column of weight versions; unknown tokens are left out."""
    names = [None if value is None or value != value else str(value) for value in values.tolist()]
    cuts = [0, *(at for at in range(1, len(names)) if names[at] != names[at - 1]), len(names)]
    return tuple((name, a, b) for a, b in pairwise(cuts) if a < b and (name := names[a]) is not None)


def version_column(columns: Iterable[Column]) -> Column | None:
    """The column with each token's weight version; None if there is none."""
    return next((column for column in columns if column.name in VERSION_COLUMNS and _has_versions(column)), None)


def trainer_columns(columns: Iterable[Column]) -> list[Column]:
    """The columns with a trainer's logprobs."""
    return [column for column in columns if column.name in TRAINER_COLUMNS and _is_aligned_number(column)]


def versions_and_trainers_logged(rollout: Rollout) -> tuple[bool, bool]:
    """Whether a rollout names the weights that sampled it, and whether it holds a trainer's logprobs."""
    row, stated, trainers = rollout.training_row, rollout.stated, False
    facts = stated.facts
    versions = bool(stated.policy_versions) or WEIGHTS in facts or "weight_spans" in facts
    # Called for every rollout: plain loops, no generators.
    holders: tuple[TrainingRow | Turn, ...] = rollout.turns if row is None else (row, *rollout.turns)
    for holder in holders:
        for column in holder.columns:
            if column.name in TRAINER_COLUMNS:
                trainers = trainers or _is_aligned_number(column)
            elif column.name in VERSION_COLUMNS:
                versions = versions or _has_versions(column)
    for turn in rollout.turns:
        if turn.weight_versions:
            return True, trainers
    return versions, trainers


def expand_to_row(column: Column, row: TrainingRow) -> Logprobs:
    """`[T]` a numeric column of a training row with an entry per token, NaN where it has none."""
    assert column.alignment is not None
    values = column.values.astype(np.float64)
    return expand(
        values, column.alignment, full=len(row.token_ids), prompt_length=row.prompt_length, trained=row.loss_mask
    )


def _has_versions(column: Column) -> bool:
    return _is_aligned_number(column) or (column.name == WEIGHTS and column.alignment is not None)


def _is_aligned_number(column: Column) -> bool:
    return column.role is ColumnRole.OTHER and column.alignment is not None and column.values.dtype.kind in "iuf"
