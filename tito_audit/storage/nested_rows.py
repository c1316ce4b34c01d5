"""Rows nested in a wrapper, at a path in each document or line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tito_audit.errors import SetupError
from tito_audit.record.edits import Path
from tito_audit.storage import lazy_pyarrow as pa
from tito_audit.storage.row import Nesting, RawRow, RowSample, dump_row

_EACH_ENTRY = "*"
"""The step of a path to each entry of a list."""
_LIST = re.compile(r"\[\*?\]")
_MOST_KEYS = 12


@dataclass(frozen=True, slots=True)
class _NestedValue:
    """A row at the path, or why there is none."""

    path: Path
    value: Any = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RowPath:
    """Where the rows are in each document or line of a log."""

    path: str
    """As the user wrote it."""
    steps: tuple[str, ...]

    def rows(self, row: Mapping[str, Any]) -> Iterator[_NestedValue]:
        """The rows in one row of the file, and why there is none where one should be."""
        return _find_rows(row, self.steps, ())

    def columns(self, names: Mapping[str, str]) -> dict[str, str]:
        """Columns of the rows as columns of the file, for `ArrayParser`; each step may also hold a list."""
        places = [""]
        for step in self.steps:
            if step != _EACH_ENTRY:
                joined = [f"{place}.{step}" if place else step for place in places]
                places = [*joined, *(f"{place}[]" for place in joined)]
        return {f"{place}.{name}": kinds for place in places for name, kinds in names.items()}

    def schema(self, schema: Any) -> Any:
        """The Arrow schema of the nested rows, from that of the file; empty if it lacks the path."""
        kind = pa.struct(list(schema))
        for step in (*self.steps, _EACH_ENTRY):
            while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
                kind = kind.value_type
            at = kind.get_field_index(step) if pa.types.is_struct(kind) and step != _EACH_ENTRY else -1
            kind = kind.field(at).type if at >= 0 else kind if step == _EACH_ENTRY else pa.null()
        return pa.schema(list(kind) if pa.types.is_struct(kind) else [])

    def refuse_missing_path(self, raws: Iterable[RawRow], file: object) -> None:
        """SetupError, with the keys that exist, if some rows can be read and none of them has the path."""
        first: Mapping[str, Any] | None = None
        for raw in raws:
            if raw.value is None:
                continue
            places = list(self.rows(raw.value))
            if not places or any(place.error is None for place in places):
                return
            first = raw.value if first is None else first
        if first is not None:
            raise self.missing_path_error(first, file)

    def missing_path_error(self, row: Mapping[str, Any], file: object) -> SetupError:
        """The error for a log that lacks the path, explained by its first row."""
        why = next((place.error for place in self.rows(row) if place.error is not None), "")
        why = why.removeprefix(f"--rows-at {self.path}: ")
        return SetupError(f"{file}: --rows-at {self.path}: no row has this path; in the first, {why}.")


class NestedRowReader:
    """Reads the rows nested in the rows of a file, numbered as they are found."""

    def __init__(self, row_path: RowPath, sample: RowSample | None = None, *, keep: bool = False) -> None:
        self.count = 0
        """Nested rows found, sampled or not."""
        self.rows_without: list[RawRow] = []
        """With `keep`, the rows of the file since the last nested row, which contain none."""
        self.first_without_path: Mapping[str, Any] | None = None
        """The first row of the file; None once a row had the path."""
        self._path_found = False
        self._keep = keep
        self._row_path = row_path
        self._sample = sample

    def rows(self, raws: Iterable[RawRow]) -> Iterator[RawRow]:
        """Each nested row; error rows for rows that cannot be read, and for what should be a row and is none."""
        for raw in raws:
            places = [_NestedValue((), error=raw.error)] if raw.value is None else self._row_path.rows(raw.value)
            start = self.count
            for number, place in enumerate(places):
                self._note(raw, place.error)
                index, self.count = self.count, self.count + 1
                if self._sample is not None and not raw.lost:
                    # A row is sampled by its content and its position in its wrapper.
                    data = dump_row(place.value) if place.error is None else place.error.encode("utf-8", "replace")
                    if not self._sample.takes(index, number, data, len(data)):
                        continue
                nesting = Nesting(raw, place.path, tuple(self.rows_without))
                self.rows_without.clear()
                error = place.error
                if error is not None and raw.value is not None:
                    error = f"--rows-at {self._row_path.path}: {error}"
                yield RawRow(index, place.value if error is None else None, error, lost=raw.lost, nesting=nesting)
            if self.count == start:
                self._note(raw, None)
                self.rows_without += [raw] if self._keep else []

    def _note(self, raw: RawRow, error: str | None) -> None:
        self._path_found |= error is None
        self.first_without_path = None if self._path_found else self.first_without_path or raw.value


def parse_row_path(path: str) -> RowPath:
    """Parse keys joined by dots, with optional `*` or `[]` for the entries of a list; SetupError without a key."""
    steps = tuple(_LIST.sub(f".{_EACH_ENTRY}", path.strip()).removeprefix(".").split("."))
    if not all(steps) or all(step == _EACH_ENTRY for step in steps):
        raise SetupError(
            f"--rows-at {path}: a path is keys joined by dots, such as data.rollouts, with * for the entries of a "
            "list."
        )
    return RowPath(path, steps)


def wrapper_keys(raw: RawRow) -> Iterator[str]:
    """The dotted paths of keys that a row's wrapper has beside the row, without positions in lists."""
    if raw.nesting is None or raw.nesting.outer.value is None:
        return
    value: Any = raw.nesting.outer.value
    keys: list[str] = []
    for step in raw.nesting.path:
        if isinstance(value, Mapping):
            yield from (".".join([*keys, str(name)]) for name in value if name != step)
            keys.append(str(step))
        value = value[step]


def _find_rows(value: Any, steps: tuple[str, ...], path: Path) -> Iterator[_NestedValue]:
    """The rows that the remaining steps lead to from a value, which is at `path` in the row of the file."""
    if isinstance(value, list | tuple):
        rest = steps[1:] if steps[:1] == (_EACH_ENTRY,) else steps
        for index, entry in enumerate(value):
            yield from _find_rows(entry, rest, (*path, index))
    elif not steps and isinstance(value, Mapping):
        yield _NestedValue(path, value)
    elif not steps:
        error = f"{_path_text(path)} is {_kind_text(value)}, not an object with named columns"
        yield _NestedValue(path, error=error)
    elif not isinstance(value, Mapping):
        yield _NestedValue(path, error=f"{_path_text(path)} is {_kind_text(value)}, and has no {steps[0]!r}")
    else:
        # The longest key that joins several steps by dots, or the first step.
        starts = (steps[:count] for count in range(len(steps), 0, -1))
        joined = (".".join(start) for start in starts if _EACH_ENTRY not in start)
        key = next((key for key in joined if key in value), None)
        if key is not None:
            yield from _find_rows(value[key], steps[key.count(".") + 1 :], (*path, key))
        elif steps[0] == _EACH_ENTRY:
            error = f"{_path_text(path)} is an object, not a list; {_keys_text(value, path)}"
            yield _NestedValue(path, error=error)
        else:
            close = difflib.get_close_matches(steps[0], [str(name) for name in value], n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            yield _NestedValue(path, error=f"there is no {steps[0]!r}{hint}; {_keys_text(value, path)}")


def _path_text(path: Path) -> str:
    if not path:
        return "the row"
    return repr("".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix("."))


def _keys_text(value: Mapping[str, Any], path: Path) -> str:
    names = [str(name) for name in value] or ["no keys"]
    more = f" and {len(names) - _MOST_KEYS} more" if len(names) > _MOST_KEYS else ""
    return f"{_path_text(path)} has {', '.join(names[:_MOST_KEYS])}{more}"


def _kind_text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, str):
        return "a text"
    return "a list of numbers" if hasattr(value, "dtype") and getattr(value, "ndim", None) else "a single value"
