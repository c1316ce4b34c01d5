"""map_columns: a user's own column names turned into ours, for `--map token_ids=tokens`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tito_audit.errors import RecordError, SetupError
from tito_audit.format import Row

__all__ = ["CANONICAL_COLUMNS", "map_columns"]

CANONICAL_COLUMNS = (
    "token_ids",
    "loss_mask",
    "logprobs",
    "prompt_ids",
    "completion_ids",
    "completion_logprobs",
    "messages",
    "tools",
    "calls",
    "model",
    "finish_reason",
    "text",
)
"""The names that `--map` knows, all read by the format `generic`."""


def map_columns(row: Row, mapping: Mapping[str, str]) -> Row:
    """The row with columns under our names: `mapping` is ours -> the log's.

    A dot in the log's name leads into an object (`extra.tokens`) unless a column is called so with its
    dot. A mapped column at the top of the row no longer appears under its old name, or it would be read
    twice. SetupError for a name that is not ours, RecordError for one that the row does not have.
    """
    unknown = [name for name in mapping if name not in CANONICAL_COLUMNS]
    if unknown:
        raise SetupError(
            f"--map {unknown[0]}=…: no such column here. The names on the left are ours: "
            f"{', '.join(CANONICAL_COLUMNS)}; the log's own name goes to the right."
        )
    found = {ours: _value_at(row, theirs) for ours, theirs in mapping.items()}
    rest = {name: value for name, value in row.items() if name not in set(mapping.values())}
    return {**rest, **found}


def _value_at(row: Row, path: str) -> Any:
    if path in row:
        return row[path]
    value: Any = row
    names = path.split(".")
    for depth, name in enumerate(names):
        if not isinstance(value, Mapping) or name not in value:
            place = ".".join(names[:depth])
            have = ", ".join(sorted(map(str, value))) if isinstance(value, Mapping) else ""
            raise RecordError(
                f"the row has no column {path!r}, which --map names; "
                + (f"{place!r} has" if place else "it has")
                + (f": {have}" if have else " no columns")
            )
        value = value[name]
    return value
