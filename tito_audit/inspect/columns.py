"""What is in each column of the first rows, by dotted path, and how its lists relate; no guess about roles."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tito_audit.format import Row
from tito_audit.record.column import MaskEncoding, decode_mask
from tito_audit.record.nesting import load_json

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
            path = (*keys, str(key))
            if isinstance(inner, list | tuple | np.ndarray):
                self._list(into, inner, path, depth)
                continue
            column = self._column(path, into.scope, into.item.row, inner)
            if column is None or inner is None:
                continue
            if len(column.samples) < 3:
                column.samples.append(inner)
            if isinstance(inner, Mapping):
                column.types["object"] += 1
                # Keys that are all numbers, such as the ids in a `logit_bias`, are no column names.
                if not len(inner) or not all(str(name).lstrip("-").isdecimal() for name in inner):
                    self.deeper |= depth >= _DEEP
                    if depth < _DEEP:
                        self._object(into, inner, path, depth + 1)
                continue
            column.types[_scalar_type(inner)] += 1
            if type(inner) is int and 0 <= inner < _LARGEST_COUNT:
                into.item.counts[column.path] = inner
            elif isinstance(inner, str) and (parsed := _json_in(inner)) is not None:
                column.types[_scalar_type(inner)] -= 1
                column.types[f"text of JSON ({'list' if isinstance(parsed, list) else 'object'})"] += 1
                column.samples[-1] = parsed

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
    word = " and ".join(sorted({_PLURAL.get(kind, "values") for kind in kinds}))
    if all(issubclass(kind, Mapping) for kind in kinds):
        word = "objects"
    elif all(issubclass(kind, list | tuple | np.ndarray) for kind in kinds):
        word = "lists"
    return f"list of {word}{with_nulls if len(kinds) > 1 or kinds == {str} else ''}", None


_PLURAL = {str: "texts", int: "integers", float: "numbers", bool: "booleans", dict: "objects", list: "lists"}


def _scalar_type(value: Any) -> str:
    words = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "text"), (bytes, "bytes"))
    return next((word for kind, word in words if isinstance(value, kind)), type(value).__name__)


def _json_in(text: str) -> Any:
    """The list or object in a text of JSON, as in tables; None for any other text."""
    if len(text) > _JSON_TEXT or text.lstrip()[:1] not in ("[", "{"):
        return None
    try:
        value = load_json(text)
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


_MOST = 64
"""Maximum lists compared per object."""
_COUNT = re.compile(r"len|num|count|total|size|tokens", re.IGNORECASE)


class RelationKind(StrEnum):
    """How the lengths of lists are related."""

    EQUAL = "equal"  # all of them, one entry each
    SUM = "sum"  # the first two together are as long as the third
    MINUS_ONE = "minus_one"  # the first is one shorter than the second
    SAMPLED = "sampled"  # the first has an entry for each trained token of the second
    LENGTH = "length"  # the first is a number, the length of the second
    OFFSETS = "offsets"  # the first says where the parts of the second begin


@dataclass(frozen=True, slots=True)
class Relation:
    """A relation between lists that holds in the objects of a scope."""

    kind: RelationKind
    paths: tuple[str, ...]
    items: int
    """In how many objects it holds, not counting empty lists."""
    of: int
    """In how many objects it could hold."""
    except_row: int | None
    """The first row in which it does not hold; None if it always holds."""
    varied: bool
    """Whether lengths vary between objects; if not, the relation may be a coincidence."""


class _Lengths:
    """Lengths of the lists of a scope, `[P, I]` int64, -1 if an object lacks the list; and how they relate.

    `heads` are the rows of number lists that stand for their groups of equal lengths.
    """

    def __init__(self, items: Sequence[Item], paths: Sequence[str], facts: Mapping[str, NumberFacts]) -> None:
        self.items, self.facts = items, facts
        self.paths = list(paths)
        rows = [[item.lengths.get(path, -1) for item in items] for path in paths]
        self.table: NDArray[np.int64] = np.array(rows, dtype=np.int64).reshape(len(paths), len(items))

    def holds(
        self, kind: RelationKind, paths: tuple[str, ...], left: NDArray[np.int64], right: NDArray[np.int64]
    ) -> Relation | None:
        """The relation, if left equals right in most objects that have both; else None.

        A few broken rows must not hide a relation.
        """
        both = (left >= 0) & (right >= 0) & (right > 0)
        same = both & (left == right)
        count, of = int(same.sum()), int(both.sum())
        if not count or count < 0.75 * of or (count < of and count < 3):
            return None
        varied = bool((right[same] != right[same][0]).any())
        broken = np.flatnonzero(both & ~same)
        return Relation(kind, paths, count, of, self.items[broken[0]].row if len(broken) else None, varied)

    def equal(self, group: Sequence[int]) -> Relation | None:
        """The relation of a whole group: it holds in an object if all of its lists have the same length."""
        if len(group) < 2:
            return None
        table = self.table[list(group)]
        there = (table >= 0).sum(axis=0) > 1
        most = table.max(axis=0)
        same = np.where(table < 0, most, table).min(axis=0)
        paths = tuple(self.paths[index] for index in group)
        relation = self.holds(RelationKind.EQUAL, paths, np.where(there, same, -1), np.where(there, most, -1))
        if relation is not None:
            return relation
        # Each list matches the first, but not all in the same rows.
        count, broken = int((there & (same == most)).sum()), np.flatnonzero(there & (same != most))
        row = self.items[broken[0]].row if len(broken) else None
        return Relation(RelationKind.EQUAL, paths, count, int(there.sum()), row, True)

    def parts(self, heads: Sequence[int]) -> Iterator[Relation | None]:
        table = self.table
        ids = {head for head in heads if self.facts[self.paths[head]].look is Look.IDS}
        for a in heads:
            for c in sorted(ids - {a}):
                if table[c].max() > 2 and self.facts[self.paths[a]].look is not Look.OFFSETS:
                    left = np.where(table[a] >= 0, table[a] + 1, -1)
                    paths = (self.paths[a], self.paths[c])
                    yield self.holds(RelationKind.MINUS_ONE, paths, left, table[c])
        for number, a in enumerate(heads):
            for b in heads[number + 1 :]:
                # Prompt, completion and the whole are ids; one of the parts may also be a column as long as it.
                both = np.where((table[a] > 0) & (table[b] > 0), table[a] + table[b], -1)
                for c in sorted(ids - {a, b}) if {a, b} & ids else ():
                    if table[c].max() > 3:
                        parts = (self.paths[a], self.paths[b], self.paths[c])
                        yield self.holds(RelationKind.SUM, parts, both, table[c])

    def offsets(self, heads: Sequence[int]) -> Iterator[Relation | None]:
        for path, fact in self.facts.items():
            if fact.look is not Look.OFFSETS:
                continue
            # Where the last part ends; -1 if that is no place.
            lists = [item.lists.get(path) for item in self.items]
            last = [float(numbers[-1]) if numbers is not None and len(numbers) else -1.0 for numbers in lists]
            ends = np.array([int(place) if 0 <= place < 1 << 60 else -1 for place in last], dtype=np.int64)
            for head in heads:
                if self.paths[head] != path:
                    paths = (path, self.paths[head])
                    yield self.holds(RelationKind.OFFSETS, paths, ends, self.table[head])

    def sampled(self, heads: Sequence[int]) -> Iterator[Relation | None]:
        for path, fact in self.facts.items():
            if fact.look not in (Look.MASK, Look.LABELS) or fact.low == fact.high:
                continue
            encoding = MaskEncoding.LABELS if fact.look is Look.LABELS else MaskEncoding.BINARY
            masks = [item.lists.get(path) for item in self.items]
            counts = [-1 if mask is None else int(decode_mask(mask, encoding).sum()) for mask in masks]
            trained = np.array(counts, dtype=np.int64)
            marks = np.array([item.lengths.get(path, -1) for item in self.items], dtype=np.int64)
            for head in heads:
                paths = (self.paths[head], path)
                row = self.table[head]
                # If everything is trained, any column has one entry per trained token.
                if row.max() > 1 and ((row != marks) & (row == trained)).any():
                    relation = self.holds(RelationKind.SAMPLED, paths, row, np.where(row >= 0, trained, -1))
                    yield relation if relation is not None and relation.varied else None

    def counts(self, heads: Sequence[int]) -> Iterator[Relation | None]:
        names = dict.fromkeys(
            name for item in self.items for name in item.counts if _COUNT.search(name.rsplit(".")[-1])
        )
        for name in list(names)[:_MOST]:
            counts = np.array([item.counts.get(name, -1) for item in self.items], dtype=np.int64)
            for head in heads:
                relation = self.holds(RelationKind.LENGTH, (name, self.paths[head]), counts, self.table[head])
                yield relation
                if relation is not None and relation.items == relation.of:
                    break


def relations_of(items: Sequence[Item], facts: Mapping[str, NumberFacts]) -> list[Relation]:
    """The relations between the lists of these objects; `facts` of their number columns, by path."""
    paths = dict.fromkeys(path for item in items for path in item.lengths)
    # Ids first: they represent their group of equal lengths.
    numeric = sorted((path for path in paths if path in facts), key=lambda path: facts[path].look is not Look.IDS)
    others = [path for path in paths if path not in facts]
    lengths = _Lengths(items, (numeric + others)[:_MOST], facts)
    # Rows of the table grouped by equal length; number lists come first.
    groups: list[list[int]] = []
    for index, row in enumerate(lengths.table):
        path = lengths.paths[index]
        for group in groups:
            head = lengths.paths[group[0]]
            # Short lists of other values have equal lengths by chance.
            if head not in facts or (path not in facts and row.max() <= 3):
                continue
            if lengths.holds(RelationKind.EQUAL, (head, path), row, lengths.table[group[0]]) is not None:
                group.append(index)
                break
        else:
            groups.append([index])
    heads = [group[0] for group in groups if lengths.paths[group[0]] in facts][:24]
    relations = [relation for group in groups if (relation := lengths.equal(group)) is not None]
    for relation in chain(
        lengths.parts(heads), lengths.offsets(heads), lengths.sampled(heads), lengths.counts(heads)
    ):
        relations += [relation] if relation is not None else []
    return relations
