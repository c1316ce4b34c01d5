"""Rows nested in a wrapper: found at a path in each document or line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tito_audit.errors import SetupError
from tito_audit.record.edits import Path
from tito_audit.storage import lazy_pyarrow as pa
from tito_audit.storage.row import RawRow, RowSample, Within, dump_row

_ANY = "*"
"""The path step for the entries of a list."""
_LIST = re.compile(r"\[\*?\]")
_SHOWN = 12


@dataclass(frozen=True, slots=True)
class _RowPlace:
    """A place where a row is, or should be."""

    path: Path
    value: Any = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RowPath:
    """Where the rows are in each document or line of a log."""

    path: str
    """As the user wrote it."""
    steps: tuple[str, ...]

    def rows(self, row: Mapping[str, Any]) -> Iterator[_RowPlace]:
        """The rows in a row of the file, or why there is none where one should be."""
        return _walk(row, self.steps, ())

    def columns(self, names: Mapping[str, str]) -> dict[str, str]:
        """Columns of rows as paths from the top of a line, for `Splicer`, with and without lists on the way."""
        places = [""]
        for step in self.steps:
            if step != _ANY:
                joined = [f"{place}.{step}" if place else step for place in places]
                places = [*joined, *(f"{place}[]" for place in joined)]
        return {f"{place}.{name}": kinds for place in places for name, kinds in names.items()}

    def schema(self, schema: Any) -> Any:
        """The Arrow schema of the nested rows, given the file's; empty if the path is not in it."""
        kind = pa.struct(list(schema))
        for step in (*self.steps, _ANY):
            while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
                kind = kind.value_type
            at = kind.get_field_index(step) if pa.types.is_struct(kind) and step != _ANY else -1
            kind = kind.field(at).type if at >= 0 else kind if step == _ANY else pa.null()
        return pa.schema(list(kind) if pa.types.is_struct(kind) else [])

    def refuse_nowhere(self, raws: Iterable[RawRow], file: object) -> None:
        """Raise SetupError, with the keys that exist, if rows can be read and none of them has the path."""
        first: Mapping[str, Any] | None = None
        for raw in raws:
            if raw.value is None:
                continue
            places = list(self.rows(raw.value))
            if not places or any(place.error is None for place in places):
                return
            first = raw.value if first is None else first
        if first is not None:
            raise self.nowhere(first, file)

    def nowhere(self, row: Mapping[str, Any], file: object) -> SetupError:
        """The error for a log in which no row has the path; `row` is its first."""
        why = next((place.error for place in self.rows(row) if place.error is not None), "")
        why = why.removeprefix(f"--rows-at {self.path}: ")
        return SetupError(f"{file}: --rows-at {self.path}: no row has this path; in the first, {why}.")


class Unwrapped:
    """The rows nested in the rows of a file, numbered as they are found."""

    def __init__(self, inside: RowPath, sample: RowSample | None = None, *, keep: bool = False) -> None:
        self.count = 0
        """How many were found, sampled or not."""
        self.passed: list[RawRow] = []
        """Rows of the file after the last nested row that contain none, if `keep`."""
        self.first_without: Mapping[str, Any] | None = None
        """The first row of the file, as long as no row has had the path."""
        self._met = False
        self._keep = keep
        self._inside = inside
        self._sample = sample

    def rows(self, raws: Iterable[RawRow]) -> Iterator[RawRow]:
        """Each nested row with its place; error rows for what cannot be read or should be a row and is not."""
        for raw in raws:
            places = [_RowPlace((), error=raw.error)] if raw.value is None else self._inside.rows(raw.value)
            start = self.count
            for number, place in enumerate(places):
                self._note(raw, place.error)
                index, self.count = self.count, self.count + 1
                if self._sample is not None and not raw.lost:
                    # A sample takes a row by its content and its place in its wrapper.
                    data = dump_row(place.value) if place.error is None else place.error.encode("utf-8", "replace")
                    if not self._sample.takes(index, number, data, len(data)):
                        continue
                within = Within(raw, place.path, tuple(self.passed))
                self.passed.clear()
                error = place.error
                if error is not None and raw.value is not None:
                    error = f"--rows-at {self._inside.path}: {error}"
                yield RawRow(index, place.value if error is None else None, error, lost=raw.lost, within=within)
            if self.count == start:
                self._note(raw, None)
                self.passed += [raw] if self._keep else []

    def _note(self, raw: RawRow, error: str | None) -> None:
        self._met |= error is None
        self.first_without = None if self._met else self.first_without or raw.value


def parse_row_path(path: str) -> RowPath:
    """The parsed path: keys joined by dots, with optional `*` or `[]` for the entries of a list.

    SetupError if it has no key.
    """
    steps = tuple(_LIST.sub(f".{_ANY}", path.strip()).removeprefix(".").split("."))
    if not all(steps) or all(step == _ANY for step in steps):
        raise SetupError(
            f"--rows-at {path}: a path is keys joined by dots, such as data.rollouts, with * for the entries of a "
            "list."
        )
    return RowPath(path, steps)


def wrapper_keys(raw: RawRow) -> Iterator[str]:
    """The paths of keys that are in the wrapper of a row and not in the row itself; list positions left out."""
    if raw.within is None or raw.within.outer.value is None:
        return
    value: Any = raw.within.outer.value
    keys: list[str] = []
    for step in raw.within.path:
        if isinstance(value, Mapping):
            yield from (".".join([*keys, str(name)]) for name in value if name != step)
            keys.append(str(step))
        value = value[step]


def _walk(value: Any, steps: tuple[str, ...], path: Path) -> Iterator[_RowPlace]:
    if isinstance(value, list | tuple):
        rest = steps[1:] if steps[:1] == (_ANY,) else steps
        for index, entry in enumerate(value):
            yield from _walk(entry, rest, (*path, index))
    elif not steps and isinstance(value, Mapping):
        yield _RowPlace(path, value)
    elif not steps:
        yield _RowPlace(path, error=f"{_named(path)} is {_kind(value)}, not an object with named columns")
    elif isinstance(value, Mapping) and (key := _key(value, steps)) is not None:
        yield from _walk(value[key], steps[key.count(".") + 1 :], (*path, key))
    elif isinstance(value, Mapping) and steps[0] == _ANY:
        yield _RowPlace(path, error=f"{_named(path)} is an object, not a list; {_keys(value, path)}")
    elif isinstance(value, Mapping):
        close = difflib.get_close_matches(steps[0], [str(name) for name in value], n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        yield _RowPlace(path, error=f"there is no {steps[0]!r}{hint}; {_keys(value, path)}")
    else:
        yield _RowPlace(path, error=f"{_named(path)} is {_kind(value)}, and has no {steps[0]!r}")


def _key(value: Mapping[str, Any], steps: tuple[str, ...]) -> str | None:
    """The key that the next steps name: a key that contains the dots itself, or the first step."""
    joined = (".".join(steps[:count]) for count in range(len(steps), 0, -1) if _ANY not in steps[:count])
    return next((key for key in joined if key in value), None)


def _named(path: Path) -> str:
    if not path:
        return "the row"
    return repr("".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix("."))


def _keys(value: Mapping[str, Any], path: Path) -> str:
    names = [str(name) for name in value]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{_named(path)} has {', '.join(names[:_SHOWN])}{more}" if names else f"{_named(path)} has no keys"


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, str):
        return "a text"
    return "a list of numbers" if hasattr(value, "dtype") and getattr(value, "ndim", None) else "a single value"
