"""What each column of the first rows holds, and how the lengths of lists relate; its use is guessed in `roles`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tito_audit.format import Row
from tito_audit.record.column import MaskEncoding, decode_mask
from tito_audit.record.nesting import load_json

Numbers: TypeAlias = NDArray[Any]
"""`[N]` bool, int64 or float64; NaN stands for null."""

MOST_COLUMNS = 20_000
"""Columns listed at most; the values of further ones are only counted."""
_MOST_LEVELS = 10
_MOST_ENTRIES = 256
"""Objects of one list that are read at most."""
_LARGEST_COUNT = 1 << 60
_JSON_TEXT = 4 << 20
"""Bytes: longer texts are not parsed as JSON."""


@dataclass(slots=True)
class Item:
    """A row, or an entry of a list of objects, with nested objects; entries of nested lists are other items."""

    row: int
    lists: dict[str, Numbers | None] = field(default_factory=dict)
    """By path: the numbers of each list; None for a list of anything else."""
    lengths: dict[str, int] = field(default_factory=dict)
    integers: dict[str, int] = field(default_factory=dict)
    """By path: its scalar integers, which may be lengths of lists."""


@dataclass(slots=True)
class LogColumn:
    """All values seen under one path."""

    path: str
    """`calls[].prompt_ids`: `.` leads into an object, `[]` into the entries of a list."""
    keys: tuple[str, ...]
    """The path as keys, `[]` for the entries of a list."""
    scope: str
    """The path of the objects it is a column of: "" for rows."""
    rows: int = 0
    """Rows in which it has a value that is not null."""
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
        """Its last key."""
        return next((key for key in reversed(self.keys) if key != "[]"), "")

    @property
    def is_mappable(self) -> bool:
        """Whether `--map` can name it: no list of objects is on the way to it."""
        return "[]" not in self.keys

    @property
    def rows_with_key(self) -> int:
        """Rows that have the key, null or not; only meaningful if `is_mappable`."""
        return self.rows + self.nulls


@dataclass(frozen=True, slots=True)
class _Target:
    """Where the values of an object are collected."""

    item: Item
    scope: str
    nested: dict[str, Sequence[Any]] = field(default_factory=dict)
    """By path: lists of lists. Their entries at one position are a sample of a batch."""


class Columns:
    """The columns of a log, collected row by row."""

    def __init__(self) -> None:
        self.by_path: dict[str, LogColumn] = {}
        self.items: dict[str, list[Item]] = {}
        """The objects by scope: "" is the rows, `calls[]` the entries of a list of objects, and what ends in `[*]`
        the samples of a batch: one position in several lists of lists."""
        self.unlisted = 0
        """Values in columns past the first `MOST_COLUMNS`."""
        self.has_deeper_values = False
        """Whether some values are nested more deeply than is read."""

    def add(self, number: int, row: Row) -> None:
        self._add_item(number, row, (), "", 0)

    def _add_item(self, row: int, value: Mapping[str, Any], keys: tuple[str, ...], scope: str, depth: int) -> None:
        """Collect the values of an object, and of the samples of a batch that it holds, as new items."""
        target = _Target(Item(row), scope)
        self._add_object(target, value, keys, depth)
        self.items.setdefault(scope, []).append(target.item)
        width = max(map(len, target.nested.values()), default=0)
        for place in range(min(width, _MOST_ENTRIES)):
            sample = _Target(Item(row), f"{scope}[*]")
            for path, lists in target.nested.items():
                if place < len(lists):
                    self._add_list(sample, lists[place], (*self.by_path[path].keys, "[]"), depth + 1)
            self.items.setdefault(sample.scope, []).append(sample.item)

    def _add_object(self, target: _Target, value: Mapping[str, Any], keys: tuple[str, ...], depth: int) -> None:
        for key, inner in value.items():
            path = (*keys, str(key))
            if isinstance(inner, list | tuple | np.ndarray):
                self._add_list(target, inner, path, depth)
                continue
            column = self._count_value(path, target.scope, target.item.row, inner)
            if column is None or inner is None:
                continue
            if len(column.samples) < 3:
                column.samples.append(inner)
            if isinstance(inner, Mapping):
                column.types["object"] += 1
                # Keys that are all numbers, such as the ids in a `logit_bias`, are no column names.
                if not len(inner) or not all(str(name).lstrip("-").isdecimal() for name in inner):
                    self.has_deeper_values |= depth >= _MOST_LEVELS
                    if depth < _MOST_LEVELS:
                        self._add_object(target, inner, path, depth + 1)
                continue
            column.types[_scalar_type(inner)] += 1
            if type(inner) is int and 0 <= inner < _LARGEST_COUNT:
                target.item.integers[column.path] = inner
            elif isinstance(inner, str) and len(inner) <= _JSON_TEXT and inner.lstrip()[:1] in ("[", "{"):
                # A list or an object written as text, as tables often hold them.
                with suppress(ValueError):
                    if parsed := load_json(inner):
                        column.types[_scalar_type(inner)] -= 1
                        column.types[f"text of JSON ({'list' if isinstance(parsed, list) else 'object'})"] += 1
                        column.samples[-1] = parsed

    def _add_list(self, target: _Target, value: Any, keys: tuple[str, ...], depth: int) -> None:
        column = self._count_value(keys, target.scope, target.item.row, value)
        if column is None or value is None:
            return
        if not isinstance(value, list | tuple | np.ndarray):  # an entry that is not a list
            column.types[_scalar_type(value)] += 1
            return
        word, numbers = classify_list(value)
        column.types[word] += 1
        column.lengths.append(len(value))
        target.item.lengths[column.path] = len(value)
        target.item.lists[column.path] = numbers
        if numbers is not None:
            column.arrays.append(numbers)
            return
        if len(column.samples) < 3 and len(value):
            column.samples.append(value)
        if not len(value) or depth >= _MOST_LEVELS:
            self.has_deeper_values |= bool(len(value)) and word in ("list of objects", "list of lists")
        elif word == "list of lists" and keys[-1] != "[]":
            target.nested[column.path] = list(value)
        elif word == "list of objects":
            for entry in value[:_MOST_ENTRIES]:
                if isinstance(entry, Mapping):
                    self._add_item(target.item.row, entry, (*keys, "[]"), f"{column.path}[]", depth + 1)

    def _count_value(self, keys: tuple[str, ...], scope: str, row: int, value: Any) -> LogColumn | None:
        """Count a value in its column, which is returned; None for columns past `MOST_COLUMNS`."""
        path = dotted_path(keys)
        column = self.by_path.get(path)
        if column is None:
            if len(self.by_path) >= MOST_COLUMNS:
                self.unlisted += 1
                return None
            column = self.by_path[path] = LogColumn(path, keys, scope)
        if value is None:
            column.nulls += 1
        elif column.last_row != row:
            column.last_row = row
            column.rows += 1
        return column


def dotted_path(keys: Sequence[str]) -> str:
    """Keys joined to a path: `calls[].prompt_ids`."""
    path = ""
    for key in keys:
        path += key if key == "[]" or not path else f".{key}"
    return path


def classify_list(values: Any) -> tuple[str, Numbers | None]:
    """What a list holds, in words, and its numbers as an array; None unless all its entries are numbers."""
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


_LARGEST_VOCABULARY = 2_000_000
_FLOOR = -100.0
"""Lower values are placeholders for a missing logprob."""


class Look(StrEnum):
    """What the values of a list of numbers look like."""

    IDS = "ids"  # integers in the range of vocabularies
    MASK = "mask"  # 0 and 1, or booleans
    LABELS = "labels"  # -100 and ids
    LOGPROBS = "logprobs"  # 0 or less, except for values that mean "none"
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
    """Distinct numbers, counted up to 64."""
    shares: tuple[tuple[float, float], ...]
    """Up to four special values (-100, 0, 1, -9999, …), each with its share of all numbers."""
    constant: bool
    """Whether every list repeats one number."""
    whole: bool
    """Whether no number has a fraction."""


def number_facts(arrays: Sequence[Numbers]) -> NumberFacts | None:
    """Statistics of all lists of a column; None if they hold no number."""
    filled = [array for array in arrays if len(array)]
    if not filled:
        return None
    every = np.concatenate([array.astype(np.float64) for array in filled])
    finite = every[np.isfinite(every)]
    if not len(finite):
        return NumberFacts(Look.NUMBERS, len(every), len(every), np.nan, np.nan, 0, (), False, False)
    values, counts = np.unique(finite, return_counts=True)
    low, high = values[0], values[-1]
    kinds = {array.dtype.kind for array in filled}
    whole = bool((finite == np.floor(finite)).all())
    longer = [array for array in filled if len(array) > 1]
    steps = [np.diff(array) for array in longer if whole and array[0] == 0]
    if kinds == {"b"} or (len(values) <= 2 and set(values.tolist()) <= {0.0, 1.0}):
        look = Look.MASK
    elif len(steps) == len(filled) and all(bool((step == 1).all()) for step in steps):
        look = Look.POSITIONS
    elif whole and low == -100 and (len(values) == 1 or (values[1] >= 0 and high < _LARGEST_VOCABULARY)):
        look = Look.LABELS
    elif 0 < len(steps) == len(longer) and all(bool((step >= 0).all()) for step in steps):
        look = Look.OFFSETS
    elif "f" not in kinds and low >= 0 and 2 <= high < _LARGEST_VOCABULARY and longer:
        look = Look.IDS  # lists of one number are scalars, not sequences
    elif "f" in kinds and low < 0 and counts[(values > 0) & (values != 1.0)].sum() <= counts.sum() / 50:
        look = Look.LOGPROBS  # Atropos writes 1.0 for a missing one; a few other values above 0 are tolerated
    else:
        look = Look.NUMBERS
    signs = [i for i, value in enumerate(values) if value in (-100.0, 0.0, 1.0) or value < _FLOOR][:4]
    return NumberFacts(
        look,
        len(every),
        len(every) - len(finite),
        float(low),
        float(high),
        min(len(values), 64),
        tuple((float(values[i]), float(counts[i] / len(every))) for i in signs),
        all(len(array) > 1 and bool((array == array[0]).all()) for array in filled),
        whole,
    )


_MOST_LISTS = 64
"""Lists of an object that are compared at most."""
_LENGTH_NAME = re.compile(r"len|num|count|total|size|tokens", re.IGNORECASE)


class RelationKind(StrEnum):
    """How the lengths of lists relate."""

    EQUAL = "equal"  # all of them, one entry each
    SUM = "sum"  # the first two together are as long as the third
    MINUS_ONE = "minus_one"  # the first is one shorter than the second
    SAMPLED = "sampled"  # the first has an entry for each trained token of the second
    LENGTH = "length"  # the first is a number, the length of the second
    OFFSETS = "offsets"  # the first says where the parts of the second begin


@dataclass(frozen=True, slots=True)
class Relation:
    """A relation between the lengths of lists, which holds in most objects of a scope."""

    kind: RelationKind
    paths: tuple[str, ...]
    items: int
    """Objects in which it holds, without those whose lists are empty."""
    of: int
    """Objects that have both lists."""
    except_row: int | None
    """The first row in which it fails; None if it never does."""
    varied: bool
    """Whether lengths differ between objects; if not, the relation may be a coincidence."""


class _Lengths:
    """The lengths of all lists of a scope, and how they relate.

    Of equally long lists only the first is compared with others: these are the `heads`, rows of the table.
    """

    def __init__(self, items: Sequence[Item], paths: Sequence[str], facts: Mapping[str, NumberFacts]) -> None:
        self.items, self.facts = items, facts
        self.paths = list(paths)
        rows = [[item.lengths.get(path, -1) for item in items] for path in paths]
        # [paths, items]; -1 where an object lacks the list.
        self.table: NDArray[np.int64] = np.array(rows, dtype=np.int64).reshape(len(paths), len(items))

    def relation(
        self, kind: RelationKind, paths: tuple[str, ...], left: NDArray[np.int64], right: NDArray[np.int64]
    ) -> Relation | None:
        """The relation between these paths, if left equals right in most objects; else None.

        `left` and `right` are `[items]`, -1 where there is no length. A few broken rows must not hide a relation.
        """
        both = (left >= 0) & (right >= 0) & (right > 0)
        same = both & (left == right)
        count, of = int(same.sum()), int(both.sum())
        if not count or count < 0.75 * of or (count < of and count < 3):
            return None
        varied = bool((right[same] != right[same][0]).any())
        broken = np.flatnonzero(both & ~same)
        return Relation(kind, paths, count, of, self.items[broken[0]].row if len(broken) else None, varied)

    def equal_relation(self, group: Sequence[int]) -> Relation | None:
        """The relation of a group of lists; it holds in an object if all of them are equally long there."""
        if len(group) < 2:
            return None
        table = self.table[list(group)]
        there = (table >= 0).sum(axis=0) > 1
        most = table.max(axis=0)
        same = np.where(table < 0, most, table).min(axis=0)
        paths = tuple(self.paths[index] for index in group)
        relation = self.relation(RelationKind.EQUAL, paths, np.where(there, same, -1), np.where(there, most, -1))
        if relation is not None:
            return relation
        # Each list matches the first, but not all in the same rows.
        count, broken = int((there & (same == most)).sum()), np.flatnonzero(there & (same != most))
        row = self.items[broken[0]].row if len(broken) else None
        return Relation(RelationKind.EQUAL, paths, count, int(there.sum()), row, True)

    def sum_relations(self, heads: Sequence[int]) -> Iterator[Relation | None]:
        """Lists that are one shorter than a list of ids, and pairs that together are as long as one."""
        table = self.table
        ids = {head for head in heads if self.facts[self.paths[head]].look is Look.IDS}
        for a in heads:
            for c in sorted(ids - {a}):
                if table[c].max() > 2 and self.facts[self.paths[a]].look is not Look.OFFSETS:
                    left = np.where(table[a] >= 0, table[a] + 1, -1)
                    paths = (self.paths[a], self.paths[c])
                    yield self.relation(RelationKind.MINUS_ONE, paths, left, table[c])
        for number, a in enumerate(heads):
            for b in heads[number + 1 :]:
                # Prompt, completion and the whole are ids; one of the parts may also be a column as long as it.
                both = np.where((table[a] > 0) & (table[b] > 0), table[a] + table[b], -1)
                for c in sorted(ids - {a, b}) if {a, b} & ids else ():
                    if table[c].max() > 3:
                        parts = (self.paths[a], self.paths[b], self.paths[c])
                        yield self.relation(RelationKind.SUM, parts, both, table[c])

    def offset_relations(self, heads: Sequence[int]) -> Iterator[Relation | None]:
        """Offsets that end at the length of a list, such as `cu_seqlens`."""
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
                    yield self.relation(RelationKind.OFFSETS, paths, ends, self.table[head])

    def sampled_relations(self, heads: Sequence[int]) -> Iterator[Relation | None]:
        """Lists with one entry for each token that a mask trains."""
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
                    relation = self.relation(RelationKind.SAMPLED, paths, row, np.where(row >= 0, trained, -1))
                    yield relation if relation is not None and relation.varied else None

    def length_relations(self, heads: Sequence[int]) -> Iterator[Relation | None]:
        """Integers that are named and valued like the length of a list."""
        names = dict.fromkeys(
            name for item in self.items for name in item.integers if _LENGTH_NAME.search(name.rsplit(".")[-1])
        )
        for name in list(names)[:_MOST_LISTS]:
            counts = np.array([item.integers.get(name, -1) for item in self.items], dtype=np.int64)
            for head in heads:
                relation = self.relation(RelationKind.LENGTH, (name, self.paths[head]), counts, self.table[head])
                yield relation
                if relation is not None and relation.items == relation.of:
                    break


def find_relations(items: Sequence[Item], facts: Mapping[str, NumberFacts]) -> list[Relation]:
    """How the lengths of the lists of these objects relate; `facts` are those of their number columns, by path."""
    paths = dict.fromkeys(path for item in items for path in item.lengths)
    # Ids first: they represent their group of equal lengths.
    numeric = sorted((path for path in paths if path in facts), key=lambda path: facts[path].look is not Look.IDS)
    others = [path for path in paths if path not in facts]
    lengths = _Lengths(items, (numeric + others)[:_MOST_LISTS], facts)
    # Rows of the table grouped by equal length; number lists come first.
    groups: list[list[int]] = []
    for index, row in enumerate(lengths.table):
        path = lengths.paths[index]
        for group in groups:
            head = lengths.paths[group[0]]
            # Short lists of other values have equal lengths by chance.
            if head not in facts or (path not in facts and row.max() <= 3):
                continue
            if lengths.relation(RelationKind.EQUAL, (head, path), row, lengths.table[group[0]]) is not None:
                group.append(index)
                break
        else:
            groups.append([index])
    heads = [group[0] for group in groups if lengths.paths[group[0]] in facts][:24]
    relations = [relation for group in groups if (relation := lengths.equal_relation(group)) is not None]
    kinds = (lengths.sum_relations, lengths.offset_relations, lengths.sampled_relations, lengths.length_relations)
    for find in kinds:
        relations += [relation for relation in find(heads) if relation is not None]
    return relations
