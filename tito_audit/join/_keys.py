"""Rows of other files, found by id columns that they share with a log."""

from __future__ import annotations

import difflib
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tito_audit.errors import SetupError, StorageError
from tito_audit.format import Row
from tito_audit.join.history import CallsByValue
from tito_audit.join.traces import hash_text
from tito_audit.record.rollout import Place
from tito_audit.storage import open_log, path_from_name
from tito_audit.storage.chunks import RandomAccess
from tito_audit.storage.spool import Spool
from tito_audit.terminal.escape import elided

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
"""Ids, the likeliest first: for each its columns, and for each column its possible names."""
_Names: TypeAlias = tuple[tuple[str, ...], tuple[str, ...]]
_BETWEEN = "\x1f"
_TASK, _ROLLOUT, _ATTEMPT = "_ng_task_index", "_ng_rollout_index", "_ng_attempt_index"
_SUFFIXES = (".gz", ".zst", ".jsonl", ".ndjson", ".json", ".parquet")
_OF_ROLLOUT = re.compile(r"rollout_((?:eval_)?\d+)")
"""How miles names the Parquet file of a rollout; the number alone names the file of its messages."""
_ROLLOUT_ID = re.compile(r"(?:eval_)?\d+")


@dataclass(frozen=True, slots=True)
class JoinKeys:
    """The id columns of the log, and their names in the other file."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    scoped: bool = False
    """Whether the rollout ids in file names must match too, as miles numbers samples from 0 in each rollout."""
    occurrences: Mapping[str, NDArray[np.int64]] | None = field(default=None, repr=False)
    """By log, `[rows]` how many rows before each have its `sample_index`: miles' `sample_occurrence`; None where
    the other file has no such column."""

    def id_in_log(self, row: Row, file: str, index: int) -> str | None:
        """The id of a row of the log; None if it has none."""
        parts = [id_text(value_at(row, name)) for name in self.ours]
        if self.occurrences is not None:
            counts = self.occurrences.get(file)
            parts.append(str(counts[index]) if counts is not None and index < len(counts) else "0")
        return _compose_id([_rollout_of_log(path_from_name(file)), *parts] if self.scoped else parts)

    def id_in_other(self, row: Row, file: Path) -> str | None:
        """The id of a row of the other file; None if it has none."""
        parts = [id_text(value_at(row, name)) for name in self.theirs]
        if self.occurrences is not None:
            parts.append(id_text(row.get("sample_occurrence")) or "0")
        return _compose_id([_bare_name(file), *parts] if self.scoped else parts)

    def __str__(self) -> str:
        return " + ".join(
            own if own == other else f"{own} = {other}" for own, other in zip(self.ours, self.theirs, strict=True)
        )


def choose_keys(
    option: str,
    on: Mapping[str, str],
    logs: Sequence[Path],
    others: Sequence[Path],
    max_row_bytes: int,
    rows_at: str | None = None,
) -> JoinKeys | None:
    """The columns named with `--on`, else the first id that both have; None if there is no row to join.

    `rows_at` applies to the logs only. SetupError if a column is missing, or the files share no id.
    """
    own, theirs = _first_columns(logs, max_row_bytes, rows_at), _first_columns(others, max_row_bytes)
    if not own or not theirs:
        return None
    if on:
        _refuse_missing(on.keys(), own, f"{logs[0]}")
        _refuse_missing(on.values(), theirs, f"{others[0]}")
        names = tuple(on.keys()), tuple(on.values())
    else:
        # The columns of the first id that both have, by their names in the log and in the other file.
        for columns in _IDS:
            sides: list[tuple[str, ...]] = []
            for row in (own, theirs):
                named = (next((name for name in names if id_text(row.get(name))), None) for names in columns)
                sides.append(tuple(name for name in named if name is not None))
            if len(sides[0]) == len(sides[1]) == len(columns):
                names = sides[0], sides[1]
                break
        else:
            raise SetupError(
                f"{option} {others[0]}: it and the log have no id column in common.\n"
                f"The log has {_list_columns(own)}; the file has {_list_columns(theirs)}.\n"
                "Name the columns to join on with --on LOG_COLUMN=FILE_COLUMN."
            )
    keys = JoinKeys(*names)
    if names[0] != ("sample_index",) or names[1] != ("sample_index",):
        return keys
    scoped = all(map(_rollout_of_log, logs)) and all(_ROLLOUT_ID.fullmatch(_bare_name(file)) for file in others)
    counted = _count_occurrences(logs) if "sample_occurrence" in theirs and rows_at is None else None
    return JoinKeys(*names, scoped=scoped, occurrences=counted)


def first_row(files: Iterable[Path], max_row_bytes: int, rows_at: str | None = None) -> Row | None:
    """The first row of these files that can be read; None if there is none."""
    return next(_readable_rows(files, max_row_bytes, rows_at), None)


def _readable_rows(files: Iterable[Path], max_row_bytes: int, rows_at: str | None) -> Iterator[Row]:
    for file in files:
        for raw in open_log(file, max_row_bytes=max_row_bytes, rows_at=rows_at):
            if raw.value is not None:
                yield raw.value


def _first_columns(files: Sequence[Path], max_row_bytes: int, rows_at: str | None = None) -> dict[str, Any]:
    """The columns of the first 16 rows, each with its first value that is not null."""
    columns: dict[str, Any] = {}
    for row, _ in zip(_readable_rows(files, max_row_bytes, rows_at), range(16), strict=False):
        for name, value in row.items():
            if columns.get(name) is None:
                columns[name] = value
        if value_at(row, "_ng_rollout_id") is not None:
            columns.setdefault("_ng_rollout_id", value_at(row, "_ng_rollout_id"))
    return columns


def _refuse_missing(names: Iterable[str], columns: Mapping[str, Any], file: str) -> None:
    for name in names:
        if value_at(columns, name) is not None or name in columns:
            continue
        close = difflib.get_close_matches(name, columns, n=2)
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        raise SetupError(f"--on {name}: {file} has no such column.{hint}\nIt has {_list_columns(columns)}.")


def _list_columns(columns: Mapping[str, Any]) -> str:
    names = [name for name in columns if id_text(columns[name])] or list(columns)
    return ", ".join(names[:16]) + (", …" if len(names) > 16 else "")


def value_at(row: Mapping[str, Any], name: str) -> Any:
    """The value of a column, or of a path into nested objects (`info.id`); None if there is none."""
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


def _compose_id(parts: Sequence[str | None]) -> str | None:
    texts = [part for part in parts if part is not None]
    return _BETWEEN.join(texts) if len(texts) == len(parts) else None


def _bare_name(file: Path) -> str:
    name = file.name
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    return name


def _rollout_of_log(file: Path) -> str | None:
    match = _OF_ROLLOUT.fullmatch(_bare_name(file))
    return match[1] if match else None


def _count_occurrences(logs: Sequence[Path]) -> dict[str, NDArray[np.int64]]:
    """`JoinKeys.occurrences`, for logs of Parquet and frames in which a sample occurs twice."""
    from pyarrow import parquet

    by_log: dict[str, NDArray[np.int64]] = {}
    for file in logs:
        log = open_log(file)
        column: Sequence[Any]
        if log.kind == "frame":
            column = [(raw.value or {}).get("sample_index") for raw in log]
        elif log.kind == "parquet":
            column = parquet.read_table(log.path, columns=["sample_index"]).column(0).to_pylist()
        else:
            continue
        seen: dict[Any, int] = {}
        counts = np.zeros(len(column), np.int64)
        for number, value in enumerate(column):
            counts[number] = seen.get(value, 0)
            seen[value] = int(counts[number]) + 1
        if counts.any():
            by_log[str(file)] = counts
    return by_log


class Partners:
    """Finds the rows of some files by their ids; StorageError or SetupError if they cannot be used.

    Keeps some 30 bytes a row: its place and a hash of its id. Rows of files other than plain JSONL go into a
    temporary file. Processes forked afterwards share both.
    """

    def __init__(self, option: str, name: str, files: Sequence[Path], keys: JoinKeys, max_row_bytes: int) -> None:
        self.option = option
        self.name = name
        self.files = files
        self.keys = keys
        self.rows = 0
        self.without_id = 0
        self.unreadable = 0
        self.first_bad: Place | None = None
        """The first row that has no id or cannot be read."""
        self.first_id: str | None = None
        spool = Spool()
        self._readers = [RandomAccess(file, max_row_bytes=max_row_bytes, spool=spool) for file in files]
        hashes, self._file_of, self._index_of, self._at = array("Q"), array("I"), array("Q"), array("Q")
        for number, reader in enumerate(self._readers):
            for ticket, raw in reader:
                self.rows += 1
                key = keys.id_in_other(raw.value, reader.path) if raw.value is not None else None
                if key is None:
                    self.unreadable += raw.value is None
                    self.without_id += raw.value is not None
                    self.first_bad = self.first_bad or Place(str(reader.path), raw.index)
                    continue
                self.first_id = self.first_id or readable_id(key)
                hashes.append(hash_text(key))
                self._file_of.append(number)
                self._index_of.append(ticket[0])
                self._at.append(ticket[1])
        self._by_id = CallsByValue(np.frombuffer(hashes, np.uint64))
        values, rows = self._by_id.values, self._by_id.calls
        for at in np.flatnonzero(values[1:] == values[:-1]).tolist():
            (place, _, key), (other, _, again) = self._read_row(int(rows[at])), self._read_row(int(rows[at + 1]))
            if key != again:
                continue
            columns = ", ".join(self.keys.theirs)
            raise SetupError(
                f"{self.option}: {place} and {other} have the same id ({columns}: {readable_id(key)}), so which "
                "one belongs to a rollout is unknown.\n"
                "Name columns that tell them apart with --on LOG_COLUMN=FILE_COLUMN, several if need be."
            )

    def __len__(self) -> int:
        """How many rows have an id."""
        return len(self._at)

    def find(self, key: str) -> tuple[int, Place, Row] | None:
        """The row with this id, as (number, place, value); None if there is none."""
        for number in self._by_id.calls_with(hash_text(key)).tolist():
            place, row, own_key = self._read_row(number)
            if own_key == key:
                return number, place, row
        return None

    def _read_row(self, number: int) -> tuple[Place, Row, str]:
        """A row, read again, with its place and id; StorageError if the file has changed."""
        reader, index = self._readers[self._file_of[number]], self._index_of[number]
        raw = reader.row((index, self._at[number]))
        key = self.keys.id_in_other(raw.value, reader.path) if raw.value is not None else None
        if raw.value is None or key is None or number not in self._by_id.calls_with(hash_text(key)):
            raise StorageError(f"{self.option} {reader.path}: row {index} has changed since the run started.")
        return Place(str(reader.path), index), raw.value, key


def readable_id(key: str) -> str:
    """An id for people, short enough for a line."""
    return elided(" + ".join(key.split("\x1f")), 60)


NO_ROW, NO_ID, OWN, EMPTY, MISFIT, UNREADABLE, NO_TOOLS, NO_ANSWER = -1, -2, -3, -4, -5, -6, -7, -8

_WHY = {
    NO_ROW: "found no row with their id",
    NO_ID: "without an id",
    OWN: "with {word} of their own, which were kept",
    EMPTY: "found a row without {word}",
    MISFIT: "share a row of the log, and the row found for it has another number of conversations",
    UNREADABLE: "found a row that cannot be read",
    NO_ANSWER: "found {word} without the answer that is trained",
    NO_TOOLS: "found {word} that call tools listed nowhere, so no template was applied; pass --tools FILE",
}


class PartnerTally:
    """Counts rollouts by what was found for them in one file."""

    def __init__(self, word: str, partners: Partners, first_id: str | None) -> None:
        self.word = word
        self.partners = partners
        self._first_id = first_id
        self._joined = 0
        self._missed: dict[int, tuple[int, Place]] = {}
        self._user = np.zeros(len(partners), np.int64)
        """By row, the number (from 1) of the row of the log that used it; 0 if none did."""
        self._row: tuple[str, int] | None = None
        self._rows = 0
        self._twice = 0
        self._first_twice: Place | None = None

    def add(self, place: Place, counts: Mapping[str, int]) -> None:
        """Count a rollout by the counts that the join left in it."""
        code, row = counts.get(f"{self.word}_from"), counts.get(f"{self.word}_row", NO_ROW)
        if code is None:
            return
        if code < 0:
            count, first = self._missed.get(code, (0, place))
            self._missed[code] = count + 1, first
        else:
            self._joined += 1
        if row < 0:
            return
        if self._row != (place.file, place.row):
            self._row = (place.file, place.row)
            self._rows += 1
        if self._user[row] not in (0, self._rows):
            self._twice += 1
            self._first_twice = self._first_twice or place
        self._user[row] = self._user[row] or self._rows

    def notices(self, *, whole: bool) -> Iterator[str]:
        """The notices, the most important first; `whole` says that the whole log was read."""
        partners = self.partners
        everything = self._joined + sum(count for count, _ in self._missed.values())
        parts = [
            f"{count} {_WHY[code].format(word=self.word)} (first {first})"
            for code, (count, first) in sorted(self._missed.items(), reverse=True)
        ]
        missed = f"; {'; '.join(parts)}" if parts else ""
        yield (
            f"{partners.option} {partners.name}, joined on {partners.keys}: {self._joined} of {everything} "
            f"rollouts found their {self.word}{missed}."
        )
        if not self._joined and NO_ROW in self._missed and self._first_id and partners.first_id:
            yield (
                f"{partners.option}: no id of the log is in {partners.name}: the log's first is {self._first_id}, "
                f"the file's {partners.first_id}. Name other columns with --on."
            )
        if self._twice:
            yield (
                f"{partners.option}: rows of {partners.name} found for more than one row of the log: "
                f"{self._twice} times (first {self._first_twice}). If they are not one conversation, name "
                "columns that tell them apart with --on."
            )
        unused = len(partners) - int(np.count_nonzero(self._user))
        bad = [
            f"{count} {what}"
            for count, what in (
                (unused if whole else 0, "that match no rollout of the log"),
                (partners.without_id, "without an id"),
                (partners.unreadable, "that cannot be read"),
            )
            if count
        ]
        if bad:
            first = f" (first {partners.first_bad})" if partners.first_bad is not None else ""
            yield f"{partners.option} {partners.name}: {'; '.join(bad)}, of its {partners.rows} rows{first}."
