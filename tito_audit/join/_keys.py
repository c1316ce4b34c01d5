"""The id columns that match rows of a log with rows of another file."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.errors import SetupError
from tito_audit.format import Row
from tito_audit.storage import Log, open_log, path_of

_IDS: tuple[tuple[tuple[str, ...], ...], ...] = (
    (("sample_index",),),
    (("rollout_id", "_ng_rollout_id"),),
    (("id",),),
    (("uid", "uuid"),),
    (("request_id",),),
    (("trajectory_id", "traj_id"),),
    (("session_id",),),
    (("episode_id",),),
    (("trace_id",),),
    (("conversation_id",),),
    (("sample_id",),),
    (("response_id",),),
    (("example_id", "task_id", "problem_id"), ("rollout_number", "rollout_index", "rollout_idx", "rollout")),
    (("group_index", "group_id"), ("index", "sample")),
    (("example_id",),),
    (("index",),),
    (("idx",),),
)
"""Ids, most likely first; for each, its columns, with every name of each column."""
_SEEN = 16
"""How many rows are read to find a file's columns."""
_BETWEEN = "\x1f"
_TASK, _ROLLOUT, _ATTEMPT = "_ng_task_index", "_ng_rollout_index", "_ng_attempt_index"
_SUFFIXES = (".gz", ".zst", ".jsonl", ".ndjson", ".json", ".parquet")
_OF_ROLLOUT = re.compile(r"rollout_((?:eval_)?\d+)")
"""How miles names a rollout's Parquet file; the file of its messages is named by the number alone."""
_ROLLOUT_ID = re.compile(r"(?:eval_)?\d+")


@dataclass(frozen=True, slots=True)
class Keys:
    """The id columns of the log and their names in the other file."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    scoped: bool = False
    """Whether file names hold a rollout id that must match too (miles numbers samples from 0 in each rollout)."""
    occurrences: Mapping[str, NDArray[np.int64]] | None = field(default=None, repr=False)
    """By log, `[rows]` how many rows before each have the same `sample_index`, which miles writes
    with the messages as `sample_occurrence`; None where the other file has no such column."""

    def of_log(self, row: Row, file: str, index: int) -> str | None:
        """The id of a row of the log as text; None when it has none."""
        parts = [id_text(value_at(row, name)) for name in self.ours]
        if self.occurrences is not None:
            counts = self.occurrences.get(file)
            parts.append(str(counts[index]) if counts is not None and index < len(counts) else "0")
        return _joined([_scope_of_log(path_of(file)), *parts] if self.scoped else parts)

    def of_other(self, row: Row, file: Path) -> str | None:
        """The id of a row of the other file as text; None when it has none."""
        parts = [id_text(value_at(row, name)) for name in self.theirs]
        if self.occurrences is not None:
            parts.append(id_text(row.get("sample_occurrence")) or "0")
        return _joined([_stem(file), *parts] if self.scoped else parts)

    def __str__(self) -> str:
        return " + ".join(
            own if own == other else f"{own} = {other}" for own, other in zip(self.ours, self.theirs, strict=True)
        )


def keys_for(
    option: str,
    on: Mapping[str, str],
    logs: Sequence[Path],
    others: Sequence[Path],
    max_row_bytes: int,
    rows_at: str | None = None,
) -> Keys | None:
    """The columns named with `--on`, else the first id that both have; None when there is no row to join.

    `rows_at` says where the rows of the logs are; it does not apply to the other files.

    SetupError when a column is missing, or the files share no id.
    """
    own, theirs = _columns(logs, max_row_bytes, rows_at), _columns(others, max_row_bytes)
    if not own or not theirs:
        return None
    if on:
        _refuse_missing(on.keys(), own, f"{logs[0]}")
        _refuse_missing(on.values(), theirs, f"{others[0]}")
        names = tuple(on.keys()), tuple(on.values())
    else:
        common = _common(own, theirs)
        if common is None:
            raise SetupError(
                f"{option} {others[0]}: it and the log have no id column in common.\n"
                f"The log has {_listed(own)}; the file has {_listed(theirs)}.\n"
                "Name the columns to join on with --on LOG_COLUMN=FILE_COLUMN."
            )
        names = common
    keys = Keys(*names)
    if names[0] != ("sample_index",) or names[1] != ("sample_index",):
        return keys
    scoped = all(_scope_of_log(file) for file in logs) and all(map(_ROLLOUT_ID.fullmatch, map(_stem, others)))
    counted = _occurrences(logs) if "sample_occurrence" in theirs and rows_at is None else None
    return Keys(*names, scoped=scoped, occurrences=counted)


def first_row(files: Iterable[Path], max_row_bytes: int, rows_at: str | None = None) -> Row | None:
    """The first row of these files that can be read; None when there is none."""
    return next(_rows(files, max_row_bytes, rows_at), None)


def _rows(files: Iterable[Path], max_row_bytes: int, rows_at: str | None) -> Iterator[Row]:
    for file in files:
        for raw in open_log(file, max_row_bytes=max_row_bytes, rows_at=rows_at):
            if raw.value is not None:
                yield raw.value


def _columns(files: Sequence[Path], max_row_bytes: int, rows_at: str | None = None) -> dict[str, Any]:
    """The columns of the first rows, each with its first value that is not null."""
    columns: dict[str, Any] = {}
    for row, _ in zip(_rows(files, max_row_bytes, rows_at), range(_SEEN), strict=False):
        for name, value in row.items():
            if columns.get(name) is None:
                columns[name] = value
        if value_at(row, "_ng_rollout_id") is not None:
            columns.setdefault("_ng_rollout_id", value_at(row, "_ng_rollout_id"))
    return columns


def _common(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    for columns in _IDS:
        sides: list[tuple[str, ...]] = []
        for row in (own, theirs):
            named = [next((name for name in names if id_text(row.get(name))), None) for names in columns]
            sides.append(tuple(name for name in named if name is not None))
        if len(sides[0]) == len(sides[1]) == len(columns):
            return sides[0], sides[1]
    return None


def _refuse_missing(names: Iterable[str], columns: Mapping[str, Any], file: str) -> None:
    for name in names:
        if value_at(columns, name) is not None or name in columns:
            continue
        close = difflib.get_close_matches(name, columns, n=2)
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        raise SetupError(f"--on {name}: {file} has no such column.{hint}\nIt has {_listed(columns)}.")


def _listed(columns: Mapping[str, Any]) -> str:
    names = [name for name in columns if id_text(columns[name])] or list(columns)
    return ", ".join(names[:16]) + (", …" if len(names) > 16 else "")


def value_at(row: Mapping[str, Any], name: str) -> Any:
    """The value of a column, or of a path in nested objects (`info.id`)."""
    if name == "_ng_rollout_id":
        # NeMo-Gym's name for the token capture of a rollout row (`maybe_rollout_id_from_run_body`).
        named, task, rollout, attempt = (
            id_text(row.get(name)) for name in ("_ng_rollout_id", _TASK, _ROLLOUT, _ATTEMPT)
        )
        if named is None and (task is None or rollout is None):
            return None
        return (named or f"{task}-{rollout}") + (f"-a{attempt}" if attempt not in (None, "0") else "")
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def id_text(value: object) -> str | None:
    """An id as text, the same for a whole number as int or float; None if it is not an id."""
    if isinstance(value, str):
        return value or None
    if isinstance(value, bool | np.bool_):
        return None
    if isinstance(value, int | np.integer):
        return str(int(value))
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    return None


def _joined(parts: Sequence[str | None]) -> str | None:
    texts = [part for part in parts if part is not None]
    return _BETWEEN.join(texts) if len(texts) == len(parts) else None


def _stem(file: Path) -> str:
    name = file.name
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    return name


def _scope_of_log(file: Path) -> str | None:
    match = _OF_ROLLOUT.fullmatch(_stem(file))
    return match[1] if match else None


def _samples(log: Log) -> Sequence[Any] | None:
    """The `sample_index` of each row of a table; None for other logs."""
    if log.kind == "frame":
        return [(raw.value or {}).get("sample_index") for raw in log]
    if log.kind != "parquet":
        return None
    from pyarrow import parquet

    column: Sequence[Any] = parquet.read_table(log.path, columns=["sample_index"]).column(0).to_pylist()
    return column


def _occurrences(logs: Sequence[Path]) -> dict[str, NDArray[np.int64]]:
    """By Parquet log, how many rows before each have its sample; only logs in which a sample occurs twice."""
    by_log: dict[str, NDArray[np.int64]] = {}
    for file in logs:
        column = _samples(open_log(file))
        if column is None:
            continue
        seen: dict[Any, int] = {}
        counts = np.zeros(len(column), np.int64)
        for number, value in enumerate(column):
            counts[number] = seen.get(value, 0)
            seen[value] = int(counts[number]) + 1
        if counts.any():
            by_log[str(file)] = counts
    return by_log
