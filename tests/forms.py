"""Rows read as their format reads them, rollouts with something replaced, and rows as tables hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tests.world import FORMATS
from tito_audit.format import Row
from tito_audit.formats import pick_format
from tito_audit.record.column import Alignment, ColumnRole
from tito_audit.record.edits import edits_between
from tito_audit.record.move_row import move_row
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Place, Rollout, TrainingRow, Turn

PLACE = Place("log.jsonl", 0)
LOGS = sorted(path for path in FORMATS.iterdir() if path.suffix in (".jsonl", ".json", ".parquet"))
"""The example log of each format."""


def read_one(row: Row) -> Rollout:
    """The one rollout of a row."""
    (rollout,) = pick_format(row).read(row, PLACE)
    return rollout


def row_of(row: Row) -> TrainingRow:
    """The training row of the one rollout of a row."""
    trained = read_one(row).training_row
    assert trained is not None
    return trained


def trained_row(row: Row, item: int = 0) -> TrainingRow:
    """The training row of one of the rollouts of a row."""
    trained = pick_format(row).read(row, PLACE)[item].training_row
    assert trained is not None
    return trained


def as_table(value: Any, *, with_lists: bool = False) -> Any:
    """A row as it comes out of a table: lists of numbers are arrays, null among floats is NaN.

    `with_lists`: lists of flags, and of numbers with null among them, stay lists, as some tables give them.
    """
    if isinstance(value, dict):
        return {name: as_table(inner, with_lists=with_lists) for name, inner in value.items()}
    if not isinstance(value, list):
        return value
    kinds = {type(entry) for entry in value}
    if value and kinds <= {float, type(None)} and not (with_lists and type(None) in kinds):
        return np.array([np.nan if entry is None else entry for entry in value], np.float64)
    if value and (kinds == {int} or (kinds == {bool} and not with_lists)):
        return np.array(value)
    return [as_table(entry, with_lists=with_lists) for entry in value]


def plain(value: Any) -> Any:
    """A row with its arrays as lists, for comparing."""
    if isinstance(value, Mapping):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def paths(old: Any, new: Any) -> list[str]:
    """Where two rows differ."""
    return [".".join(map(str, edit.path)) for edit in edits_between(old, new)]


def ids(values: Any) -> list[int] | None:
    """The ids as a list, where there are any."""
    return None if values is None else [int(value) for value in values]


def ids_of_turns(rollout: Rollout) -> list[tuple[Any, Any]]:
    """The ids of each prompt and its completion."""
    return [(ids(turn.prompt_ids), ids(turn.completion_ids)) for turn in rollout.turns]


def spliced(row: TrainingRow, start: int, end: int, ids: Sequence[int], **changes: Any) -> TrainingRow:
    """The training row with other ids in place of `[start, end)`, untrained and without logprobs."""
    source = np.concatenate([np.arange(start), np.full(len(ids), -1), np.arange(end, len(row.token_ids))])
    source = source.astype(np.int64)
    token_ids = np.concatenate([row.token_ids[:start], np.array(ids, np.int32), row.token_ids[end:]])
    blank = np.nan if row.sentinel is None else row.sentinel
    new = {
        "loss_mask": None if row.loss_mask is None else np.where(source >= 0, row.loss_mask[source], False),
        "logprobs": None if row.logprobs is None else np.where(source >= 0, row.logprobs[source], blank),
        **changes,
    }
    return covered(move_row(row, token_ids.astype(np.int32), source, **new).row)


def covered(row: TrainingRow) -> TrainingRow:
    """The row without logprobs where its column has no entries."""
    column = next((column for column in row.columns if column.role is ColumnRole.LOGPROBS), None)
    if column is None or row.logprobs is None:
        return row
    logprobs = row.logprobs.copy()
    if column.alignment is Alignment.RESPONSE:
        logprobs[: row.prompt_length] = np.nan
    elif column.alignment is Alignment.SAMPLED and row.loss_mask is not None:
        logprobs[~row.loss_mask] = np.nan
    return replace(row, logprobs=logprobs)


def with_turns(rollout: Rollout, turns: Mapping[int, Turn], keep: Sequence[int] | None = None) -> RepairedRollout:
    """The rollout with some turns replaced and only those to `keep`."""
    numbers = tuple(range(len(rollout.turns)) if keep is None else keep)
    left = tuple(turns.get(number, rollout.turns[number]) for number in numbers)
    return RepairedRollout(replace(rollout, turns=left), numbers)


def with_prompt(turn: Turn, ids: Sequence[int]) -> Turn:
    """The turn with another prompt."""
    return replace(turn, prompt_ids=np.array(ids, np.int32))


def with_logprobs(turn: Turn, values: Sequence[float]) -> Turn:
    """The turn with other logprobs, also in their column."""
    array = np.array(values, np.float64)
    columns = tuple(replace(c, values=array) if c.role == "logprobs" else c for c in turn.columns)
    return replace(turn, completion_logprobs=array, columns=columns)
