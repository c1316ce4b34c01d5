"""A user's column names mapped to ours and back, for `--map token_ids=tokens`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tito_audit.errors import RecordError, SetupError
from tito_audit.format import Row
from tito_audit.formats._columns import is_list
from tito_audit.formats._values import equal_values
from tito_audit.unknown import did_you_mean

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
"""The names that `--map` accepts, all read by the format `generic`."""
_TRIED = 100
"""How many columns of a row a misspelt name is compared with."""


def map_columns(row: Row, mapping: Mapping[str, str]) -> Row:
    """The row with columns under our names: `mapping` is ours -> the log's.

    A dot in the log's name leads into an object (`extra.tokens`), unless a column has that name with the
    dot. A mapped top-level column no longer appears under its old name, or it would be read twice.
    SetupError for a name that is not ours, RecordError for one that the row does not have.
    """
    unknown = [name for name in mapping if name not in CANONICAL_COLUMNS]
    if unknown:
        raise SetupError(
            f"--map {unknown[0]}=…: no such column. The name on the left is one of "
            f"{', '.join(CANONICAL_COLUMNS)}; the log's own name goes on the right."
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
            raise RecordError(
                f"the row has no column {path!r}, which --map refers to" + _columns_there(value, name, place)
            )
        value = value[name]
    return value


def _columns_there(value: Any, wanted: str, place: str) -> str:
    """For a missing column, the ones that exist, and the one that may be meant."""
    columns = sorted(map(str, value)) if isinstance(value, Mapping) else []
    close = did_you_mean(wanted, columns[:_TRIED])
    has = f"{place!r} has" if place else "It has" if close else "it has"
    return (f": {close} " if close else "; ") + has + (f": {', '.join(columns)}" if columns else " no columns")


def unmap_columns(original_row: Row, mapped_row: Row, mapping: Mapping[str, str]) -> Row:
    """The log's row with the changes made to its mapped form; the same object if nothing changed.

    Mapped columns go back to the log's names, dotted ones into their objects; unchanged objects are
    shared. RecordError if two of our names map to one column and now differ.
    """
    before = map_columns(original_row, mapping)
    row: Row = original_row
    for name, value in mapped_row.items():
        if name not in mapping and value is not before.get(name, mapped_row):
            row = {**row, name: value}
    written: dict[str, Any] = {}
    for ours, path in mapping.items():
        value = mapped_row.get(ours)
        if value is before[ours]:
            continue
        other = written.get(path, value)
        if other is not value and not (is_list(other) and is_list(value) and equal_values(other, value)):
            raise RecordError(f"--map maps two columns to {path!r}, and they differ after the repair")
        written[path] = value
        row = _with_value_at(row, path, value)
    return row


def _with_value_at(row: Mapping[str, Any], path: str, value: Any) -> Mapping[str, Any]:
    """The row with a value at a path that exists in it; objects off the path are shared."""
    if path in row or "." not in path:
        return {**row, path: value}
    name, rest = path.split(".", 1)
    return {**row, name: _with_value_at(row[name], rest, value)}
