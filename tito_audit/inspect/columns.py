"""Columns: what the first rows of a log hold, by dotted path, and facts of their numbers; no guess about roles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tito_audit.format import Row
from tito_audit.record.nesting import parsed_json

Numbers: TypeAlias = NDArray[Any]
"""`[N]` bool, int64 or float64; NaN for null."""

MOST_COLUMNS = 20_000
"""Maximum columns listed; further ones are only counted."""
_DEEP = 10
_ENTRIES = 256
"""Maximum objects examined per list."""
_LARGEST_COUNT = 1 << 60
_JSON_TEXT = 4 << 20
"""Texts longer than this are not tried as JSON."""


@dataclass(slots=True)
class Item:
    """One object: the row or an entry of a list of objects; with nested objects, without nested lists of
    objects.
    """

    row: int
    lists: dict[str, Numbers | None] = field(default_factory=dict)
    """By path; None for a list that does not hold numbers."""
    lengths: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    """Scalar integers, which may be lengths."""


@dataclass(slots=True)
class Column:
    """Everything seen under one path."""

    path: str
    """`calls[].prompt_ids`: `.` leads into an object, `[]` into the entries of a list."""
    keys: tuple[str, ...]
    """The path as keys, `[]` for the entries of a list."""
    scope: str
    """The path of the objects it belongs to: "" for the row."""
    rows: int = 0
    """Rows in which it exists and is not null."""
    nulls: int = 0
    types: Counter[str] = field(default_factory=Counter)
    lengths: list[int] = field(default_factory=list)
    arrays: list[Numbers] = field(default_factory=list)
    """Its lists of numbers."""
    samples: list[Any] = field(default_factory=list)
    """A few of its other values."""
    storage_type: str | None = None
    """Its type in the schema of a Parquet file."""
    last_row: int = -1

    @property
    def name(self) -> str:
        """Its own key, without the path to it."""
        return next((key for key in reversed(self.keys) if key != "[]"), "")

    @property
    def top(self) -> bool:
        """Whether `--map` can name it: it is in the row or in objects of the row."""
        return "[]" not in self.keys

    @property
    def present(self) -> int:
        """Rows that have it, null or not; meaningful only if `top`."""
        return self.rows + self.nulls


@dataclass(frozen=True, slots=True)
class _Target:
    """Collects the lists and counts of one object."""

    item: Item
    scope: str
    nested: dict[str, Sequence[Any]] = field(default_factory=dict)
    """By path: lists of lists, whose entries at one place are a sample of a batch."""


class Columns:
    """The columns of rows, added row by row."""

    def __init__(self) -> None:
        self.by_path: dict[str, Column] = {}
        self.items: dict[str, list[Item]] = {}
        """By scope: "" is the row itself, `calls[]` the entries of a list of objects, and `[*]` after a path the
        samples of a batch: the same position in several lists of lists."""
        self.more = 0
        """Values in columns beyond the maximum listed."""
        self.deeper = False
        """Whether a value is nested too deeply to be listed."""

    def add(self, number: int, row: Row) -> None:
        """Add one row."""
        self._item(number, row, (), "", 0)

    def _item(self, number: int, value: Mapping[str, Any], keys: tuple[str, ...], scope: str, depth: int) -> None:
        into = _Target(Item(number), scope)
        self._object(into, value, keys, depth)
        self.items.setdefault(scope, []).append(into.item)
        width = max(map(len, into.nested.values()), default=0)
        for place in range(min(width, _ENTRIES)):
            sample = _Target(Item(number), f"{scope}[*]")
            for path, lists in into.nested.items():
                if place < len(lists):
                    self._list(sample, lists[place], (*self.by_path[path].keys, "[]"), depth + 1)
            self.items.setdefault(sample.scope, []).append(sample.item)

    def _object(self, into: _Target, value: Mapping[str, Any], keys: tuple[str, ...], depth: int) -> None:
        for key, inner in value.items():
            self._value(into, inner, (*keys, str(key)), depth)

    def _value(self, into: _Target, value: Any, keys: tuple[str, ...], depth: int) -> None:
        if isinstance(value, list | tuple | np.ndarray):
            self._list(into, value, keys, depth)
            return
        column = self._column(keys, into.scope, into.item.row, value)
        if column is None or value is None:
            return
        if len(column.samples) < 3:
            column.samples.append(value)
        if isinstance(value, Mapping):
            column.types["object"] += 1
            # Keys that are all numbers, such as the ids in a `logit_bias`, are no column names.
            if len(value) > 0 and all(str(key).lstrip("-").isdecimal() for key in value):
                return
            if depth >= _DEEP:
                self.deeper = True
            else:
                self._object(into, value, keys, depth + 1)
            return
        column.types[_scalar_type(value)] += 1
        if type(value) is int and 0 <= value < _LARGEST_COUNT:
            into.item.counts[column.path] = value
        elif isinstance(value, str) and (inner := _json_in(value)) is not None:
            column.types[_scalar_type(value)] -= 1
            column.types[f"text of JSON ({'list' if isinstance(inner, list) else 'object'})"] += 1
            column.samples[-1] = inner

    def _list(self, into: _Target, value: Any, keys: tuple[str, ...], depth: int) -> None:
        column = self._column(keys, into.scope, into.item.row, value)
        if column is None or value is None:
            return
        if not isinstance(value, list | tuple | np.ndarray):  # an entry that is not a list
            column.types[_scalar_type(value)] += 1
            return
        word, numbers = as_numbers(value)
        column.types[word] += 1
        column.lengths.append(len(value))
        into.item.lengths[column.path] = len(value)
        into.item.lists[column.path] = numbers
        if numbers is not None:
            column.arrays.append(numbers)
            return
        if len(column.samples) < 3 and len(value):
            column.samples.append(value)
        if not len(value) or depth >= _DEEP:
            self.deeper |= bool(len(value)) and word in ("list of objects", "list of lists")
        elif word == "list of lists" and keys[-1] != "[]":
            into.nested[column.path] = list(value)
        elif word == "list of objects":
            for entry in value[:_ENTRIES]:
                if isinstance(entry, Mapping):
                    self._item(into.item.row, entry, (*keys, "[]"), f"{column.path}[]", depth + 1)

    def _column(self, keys: tuple[str, ...], scope: str, row: int, value: Any) -> Column | None:
        path = path_of(keys)
        column = self.by_path.get(path)
        if column is None:
            if len(self.by_path) >= MOST_COLUMNS:
                self.more += 1
                return None
            column = self.by_path[path] = Column(path, keys, scope)
        if value is None:
            column.nulls += 1
        elif column.last_row != row:
            column.last_row = row
            column.rows += 1
        return column


def path_of(keys: Sequence[str]) -> str:
    """Keys as one path: `calls[].prompt_ids`."""
    path = ""
    for key in keys:
        path += key if key == "[]" or not path else f".{key}"
    return path


def as_numbers(values: Any) -> tuple[str, Numbers | None]:
    """What a list holds, in words, and its numbers as an array; None if it holds anything else."""
    if isinstance(values, np.ndarray):
        word = {"b": "booleans", "i": "integers", "u": "integers", "f": "numbers"}.get(values.dtype.kind)
        return (f"list of {word}", values) if word else ("list of values", None)
    if not values:
        return "empty list", None
    kinds = set(map(type, values))
    nulls = type(None) in kinds
    kinds.discard(type(None))
    with_nulls = " and nulls" if nulls else ""
    try:
        if kinds == {bool} and not nulls:
            return "list of booleans", np.array(values, dtype=bool)
        if kinds == {int} and not nulls:
            return "list of integers", np.array(values, dtype=np.int64)
        if kinds and kinds <= {int, float}:
            word = "numbers" if float in kinds else "integers"
            return f"list of {word}{with_nulls}", np.array(values, dtype=np.float64)
    except OverflowError:
        return "list of integers beyond 64 bits", None
    if not kinds:
        return "list of nulls", None
    return f"list of {_entries_word(kinds)}{with_nulls if len(kinds) > 1 or kinds == {str} else ''}", None


def _entries_word(kinds: set[type]) -> str:
    if kinds == {str}:
        return "texts"
    if all(issubclass(kind, Mapping) for kind in kinds):
        return "objects"
    if all(issubclass(kind, list | tuple | np.ndarray) for kind in kinds):
        return "lists"
    return " and ".join(sorted({_PLURAL.get(kind, "values") for kind in kinds}))


_PLURAL = {str: "texts", int: "integers", float: "numbers", bool: "booleans", dict: "objects", list: "lists"}


def _scalar_type(value: Any) -> str:
    words = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "text"), (bytes, "bytes"))
    return next((word for kind, word in words if isinstance(value, kind)), type(value).__name__)


def _json_in(text: str) -> Any:
    """The list or object in a text of JSON, as in tables; None for any other text."""
    if len(text) > _JSON_TEXT or text.lstrip()[:1] not in ("[", "{"):
        return None
    try:
        value = parsed_json(text)
    except ValueError:
        return None
    return value if isinstance(value, list | dict) and value else None


_LARGEST_VOCABULARY = 2_000_000
_FLOOR = -100.0
"""Values below this are placeholders for a missing logprob."""


class Look(StrEnum):
    """What the values of a list of numbers look like."""

    IDS = "ids"  # integers in the range of a vocabulary
    MASK = "mask"  # 0 and 1, or booleans
    LABELS = "labels"  # -100 and ids
    LOGPROBS = "logprobs"  # not above 0, except values that mean "none"
    POSITIONS = "positions"  # 0, 1, 2, …
    OFFSETS = "offsets"  # from 0, never decreasing
    NUMBERS = "numbers"


@dataclass(frozen=True, slots=True)
class NumberFacts:
    """Statistics of all numbers of a column."""

    look: Look
    count: int
    nulls: int
    low: float
    high: float
    distinct: int
    """How many distinct numbers there are, counted up to 64."""
    shares: tuple[tuple[float, float], ...]
    """Up to four special values (-100, 0, 1, -9999, …), each with its share."""
    constant: bool
    """Whether every list repeats one number."""
    whole: bool
    """Whether all are whole numbers."""


def facts_of(arrays: Sequence[Numbers]) -> NumberFacts | None:
    """The facts of a column of number lists; None if it has no number."""
    filled = [array for array in arrays if len(array)]
    if not filled:
        return None
    every = np.concatenate([array.astype(np.float64) for array in filled])
    finite = every[np.isfinite(every)]
    if not len(finite):
        return NumberFacts(Look.NUMBERS, len(every), len(every), np.nan, np.nan, 0, (), False, False)
    values, counts = np.unique(finite, return_counts=True)
    kind = "b" if all(array.dtype.kind == "b" for array in filled) else "i"
    if any(array.dtype.kind == "f" for array in filled):
        kind = "f"
    whole = bool((finite == np.floor(finite)).all())
    look = _look(filled, values, counts, kind, whole)
    signs = [i for i, value in enumerate(values) if value in (-100.0, 0.0, 1.0) or value < _FLOOR][:4]
    return NumberFacts(
        look,
        len(every),
        len(every) - len(finite),
        float(values[0]),
        float(values[-1]),
        min(len(values), 64),
        tuple((float(values[i]), float(counts[i] / len(every))) for i in signs),
        all(len(array) > 1 and bool((array == array[0]).all()) for array in filled),
        whole,
    )


def _look(arrays: Sequence[Numbers], values: Numbers, counts: Numbers, kind: str, whole: bool) -> Look:
    if kind == "b" or (len(values) <= 2 and set(values.tolist()) <= {0.0, 1.0}):
        return Look.MASK
    if kind != "f" or whole:
        if all(len(array) > 1 and bool((np.diff(array) == 1).all()) and array[0] == 0 for array in arrays):
            return Look.POSITIONS
        if values[0] == -100 and (len(values) == 1 or (values[1] >= 0 and values[-1] < _LARGEST_VOCABULARY)):
            return Look.LABELS
        rising = [array for array in arrays if len(array) > 1]
        if rising and all(array[0] == 0 and bool((np.diff(array) >= 0).all()) for array in rising):
            return Look.OFFSETS
        # Lists of one number are scalars, not sequences.
        if kind != "f" and values[0] >= 0 and 2 <= values[-1] < _LARGEST_VOCABULARY and rising:
            return Look.IDS
    # Atropos writes 1.0 for a missing logprob; a few other values above 0 are tolerated.
    above = counts[(values > 0) & (values != 1.0)].sum()
    if kind == "f" and values[0] < 0 and above <= counts.sum() / 50:
        return Look.LOGPROBS
    return Look.NUMBERS
