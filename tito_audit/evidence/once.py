"""Each difference once: what a later prompt and the training row both show is one difference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from tito_audit.evidence.many import ManyDifferences
from tito_audit.evidence.model import Difference
from tito_audit.evidence.stretches import AT_ONCE

_Numbered = tuple[int, Difference]


def each_once(differences: Sequence[Difference]) -> Sequence[Difference]:
    """The differences without those that are at the place of an earlier one and show the same tokens instead.

    The earlier one takes over their effect.
    """
    if not isinstance(differences, ManyDifferences):
        return [one for _, one in _merged(enumerate(differences))]
    kept, changed = np.ones(len(differences), np.bool_), {}
    for numbers in _doubled(differences):
        kept[numbers] = False
        for number, one in _merged((number, differences[number]) for number in numbers):
            kept[number] = True
            if one.effect != differences[number].effect:
                changed[number] = one
    if changed:
        differences = differences.with_shared(changed)
    return differences if kept.all() else differences.part(kept)


def first_of_each(differences: Sequence[Difference]) -> Sequence[Difference]:
    """The same, where the earlier one stays as it is."""
    if not isinstance(differences, ManyDifferences):
        first: dict[tuple[object, ...], Difference] = {}
        for one in differences:
            first.setdefault(_key(one), one)
        return list(first.values())
    kept = np.ones(len(differences), np.bool_)
    for numbers in _doubled(differences):
        keys = [_key(differences[number]) for number in numbers]
        kept[numbers] = [key not in keys[:at] for at, key in enumerate(keys)]
    return differences if kept.all() else differences.part(kept)


def _merged(numbered: Iterable[_Numbered]) -> Iterable[_Numbered]:
    """Each place once, with the number of the first."""
    kept: dict[tuple[object, ...], _Numbered] = {}
    for number, one in numbered:
        key = _key(one)
        if key not in kept:
            kept[key] = number, one
            continue
        first, old = kept[key]
        if one.effect != old.effect:
            effect, severity = f"{old.effect}; {one.effect}", max(old.severity, one.severity)
            kept[key] = first, replace(old, effect=effect, severity=severity)
    return kept.values()


def _key(one: Difference) -> tuple[object, ...]:
    return one.where, one.turn, one.start, one.end, one.canonical.ids.tobytes()


def _doubled(differences: ManyDifferences) -> Iterator[list[int]]:
    """The numbers of those at one place, in order, for each place with several."""
    places = differences.places()
    order = np.lexsort(places[::-1])
    same = np.ones(len(order) - 1, np.bool_)
    for column in places:
        there = column[order]
        same &= there[1:] == there[:-1]
    edges = np.diff(same, prepend=False, append=False).nonzero()[0].reshape(-1, 2)
    for at in range(0, len(edges), AT_ONCE):
        for first, last in edges[at : at + AT_ONCE].tolist():
            yield order[first : last + 1].tolist()
