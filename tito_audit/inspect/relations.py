"""Relations between the lists of an object: equally long, one shorter, or one a part of another."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from tito_audit.inspect.columns import Item, Look, NumberFacts, Numbers
from tito_audit.record.column import MaskEncoding, trained_of
from tito_audit.record.prefix import starts_with

_MOST = 64
"""Maximum lists compared per object."""
_MOST_OF = 0.75
"""Share of the objects in which a relation has to hold."""
_SEVERAL = 3
"""The least number of objects in which a relation must hold if it fails in others."""
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
    """Lengths of the lists of a scope, `[P, I]` int64; -1 if an object lacks the list."""

    def __init__(self, items: Sequence[Item], paths: Sequence[str]) -> None:
        self.items = items
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
        if not count or count < _MOST_OF * of or (count < of and count < _SEVERAL):
            return None
        varied = bool((right[same] != right[same][0]).any())
        broken = np.flatnonzero(both & ~same)
        return Relation(kind, paths, count, of, self.items[broken[0]].row if len(broken) else None, varied)


def relations_of(items: Sequence[Item], facts: Mapping[str, NumberFacts]) -> list[Relation]:
    """The relations between the lists of these objects; `facts` of their number columns, by path."""
    paths = dict.fromkeys(path for item in items for path in item.lengths)
    # Ids first: they represent their group of equal lengths.
    numeric = sorted((path for path in paths if path in facts), key=lambda path: facts[path].look is not Look.IDS)
    others = [path for path in paths if path not in facts]
    lengths = _Lengths(items, (numeric + others)[:_MOST])
    groups = _groups(lengths, set(numeric))
    heads = [group[0] for group in groups if lengths.paths[group[0]] in facts][:24]
    relations = [relation for group in groups if (relation := _equal(lengths, group)) is not None]
    relations += filter(None, _parts(lengths, heads, facts))
    relations += filter(None, _offsets(items, lengths, heads, facts))
    relations += filter(None, _sampled(items, lengths, heads, facts))
    relations += filter(None, _counts(items, lengths, heads))
    return relations


def _groups(lengths: _Lengths, numeric: set[str]) -> list[list[int]]:
    """Rows of the table grouped by equal length; number lists come first."""
    groups: list[list[int]] = []
    for index, row in enumerate(lengths.table):
        path = lengths.paths[index]
        for group in groups:
            head = lengths.paths[group[0]]
            # Short lists of other values have equal lengths by chance.
            if head not in numeric or (path not in numeric and row.max() <= 3):
                continue
            if lengths.holds(RelationKind.EQUAL, (head, path), row, lengths.table[group[0]]) is not None:
                group.append(index)
                break
        else:
            groups.append([index])
    return groups


def _equal(lengths: _Lengths, group: Sequence[int]) -> Relation | None:
    """The relation of a whole group: it holds in an object if all of its lists have the same length."""
    if len(group) < 2:
        return None
    table = lengths.table[list(group)]
    there = (table >= 0).sum(axis=0) > 1
    most = table.max(axis=0)
    same = np.where(table < 0, most, table).min(axis=0)
    paths = tuple(lengths.paths[index] for index in group)
    relation = lengths.holds(RelationKind.EQUAL, paths, np.where(there, same, -1), np.where(there, most, -1))
    if relation is not None:
        return relation
    # Each list matches the first, but not all in the same rows.
    count, broken = int((there & (same == most)).sum()), np.flatnonzero(there & (same != most))
    row = lengths.items[broken[0]].row if len(broken) else None
    return Relation(RelationKind.EQUAL, paths, count, int(there.sum()), row, True)


def _parts(lengths: _Lengths, heads: Sequence[int], facts: Mapping[str, NumberFacts]) -> Iterator[Relation | None]:
    table = lengths.table
    ids = {head for head in heads if facts[lengths.paths[head]].look is Look.IDS}
    for a in heads:
        for c in sorted(ids - {a}):
            if table[c].max() > 2 and facts[lengths.paths[a]].look is not Look.OFFSETS:
                left = np.where(table[a] >= 0, table[a] + 1, -1)
                paths = (lengths.paths[a], lengths.paths[c])
                yield lengths.holds(RelationKind.MINUS_ONE, paths, left, table[c])
    for number, a in enumerate(heads):
        for b in heads[number + 1 :]:
            # Prompt, completion and the whole are ids; one of the parts may also be a column as long as it.
            both = np.where((table[a] > 0) & (table[b] > 0), table[a] + table[b], -1)
            for c in sorted(ids - {a, b}) if {a, b} & ids else ():
                if table[c].max() > 3:
                    parts = (lengths.paths[a], lengths.paths[b], lengths.paths[c])
                    yield lengths.holds(RelationKind.SUM, parts, both, table[c])


def _offsets(
    items: Sequence[Item], lengths: _Lengths, heads: Sequence[int], facts: Mapping[str, NumberFacts]
) -> Iterator[Relation | None]:
    for path, fact in facts.items():
        if fact.look is not Look.OFFSETS:
            continue
        # Where the last part ends; -1 if that is no place.
        lists = [item.lists.get(path) for item in items]
        last = [float(numbers[-1]) if numbers is not None and len(numbers) else -1.0 for numbers in lists]
        ends = np.array([int(place) if 0 <= place < 1 << 60 else -1 for place in last], dtype=np.int64)
        for head in heads:
            if lengths.paths[head] != path:
                paths = (path, lengths.paths[head])
                yield lengths.holds(RelationKind.OFFSETS, paths, ends, lengths.table[head])


def _sampled(
    items: Sequence[Item], lengths: _Lengths, heads: Sequence[int], facts: Mapping[str, NumberFacts]
) -> Iterator[Relation | None]:
    for path, fact in facts.items():
        if fact.look not in (Look.MASK, Look.LABELS) or fact.low == fact.high:
            continue
        encoding = MaskEncoding.LABELS if fact.look is Look.LABELS else MaskEncoding.BINARY
        masks = [item.lists.get(path) for item in items]
        counts = [-1 if mask is None else int(trained_of(mask, encoding).sum()) for mask in masks]
        trained = np.array(counts, dtype=np.int64)
        marks = np.array([item.lengths.get(path, -1) for item in items], dtype=np.int64)
        for head in heads:
            paths = (lengths.paths[head], path)
            row = lengths.table[head]
            # If everything is trained, any column has one entry per trained token.
            if row.max() > 1 and ((row != marks) & (row == trained)).any():
                relation = lengths.holds(RelationKind.SAMPLED, paths, row, np.where(row >= 0, trained, -1))
                yield relation if relation is not None and relation.varied else None


def _counts(items: Sequence[Item], lengths: _Lengths, heads: Sequence[int]) -> Iterator[Relation | None]:
    names = dict.fromkeys(name for item in items for name in item.counts if _COUNT.search(name.rsplit(".")[-1]))
    for name in list(names)[:_MOST]:
        counts = np.array([item.counts.get(name, -1) for item in items], dtype=np.int64)
        for head in heads:
            relation = lengths.holds(RelationKind.LENGTH, (name, lengths.paths[head]), counts, lengths.table[head])
            yield relation
            if relation is not None and relation.items == relation.of:
                break


@dataclass(frozen=True, slots=True)
class Parts:
    """Compares the lists of the objects of a scope."""

    items: Sequence[Item]

    def is_next(self, path: str, other: str) -> bool:
        """Whether a list is another one shifted by one token, as loss targets are.

        The other may also be a completion, and the list the shifted prompt and completion.
        """
        pairs = [(a, b) for a, b in self.pairs(path, other) if len(a) > 2 and len(b) > 1]
        ends = [(a[:-1], b[1:] if len(a) == len(b) else b) for a, b in pairs if len(b) <= len(a)]
        return 0 < len(pairs) == sum(starts_with(a[::-1], b[::-1]) for a, b in ends) and not all(
            (a[1:] == a[0]).all() for a, _ in pairs
        )

    def pairs(self, part: str, whole: str) -> list[tuple[Numbers, Numbers]]:
        """The two lists of each object that has both, if the first is not empty."""
        lists = ((item.lists.get(part), item.lists.get(whole)) for item in self.items)
        return [(a, b) for a, b in lists if a is not None and b is not None and len(a)]

    def is_longer(self, whole: str, part: str) -> bool:
        """Whether the whole is never shorter than the part, and at least once longer."""
        pairs = self.pairs(part, whole)
        return bool(pairs) and all(len(b) >= len(a) for a, b in pairs) and any(len(b) > len(a) for a, b in pairs)

    def is_start(self, part: str, whole: str) -> bool:
        """Whether the whole starts with the part in most objects; a few may have drifted."""
        pairs = self.pairs(part, whole)
        return 2 * sum(starts_with(b, a) for a, b in pairs) > len(pairs)

    def holds(self, whole: str, part: str) -> bool:
        """Whether the whole contains the part in most objects."""
        pairs, count = self.pairs(part, whole), 0
        for a, b in pairs:
            places = np.flatnonzero(b[: len(b) - len(a) + 1] == a[0]) if len(a) <= len(b) else ()
            count += any(bool((b[place : place + len(a)] == a).all()) for place in places)
        return 2 * count > len(pairs)

    def is_end(self, part: str, whole: str) -> bool:
        """Whether the whole ends with the part in most objects."""
        pairs = self.pairs(part, whole)
        return 2 * sum(starts_with(b[::-1], a[::-1]) for a, b in pairs) > len(pairs)
