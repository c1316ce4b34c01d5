"""Each difference once: what a later prompt and the training row both show is one difference."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tito_audit.evidence.model import Difference


def each_once(differences: Iterable[Difference]) -> list[Difference]:
    """The differences without those that are at the place of an earlier one and show the same tokens instead.

    The earlier one takes over their effect.
    """
    first: dict[tuple[object, ...], Difference] = {}
    for difference in differences:
        old = first.setdefault(_key(difference), difference)
        if difference.effect != old.effect:
            effect = f"{old.effect}; {difference.effect}"
            first[_key(difference)] = replace(old, effect=effect, severity=max(old.severity, difference.severity))
    return list(first.values())


def first_of_each(differences: Iterable[Difference]) -> list[Difference]:
    """The same, where the earlier one stays as it is."""
    first: dict[tuple[object, ...], Difference] = {}
    for difference in differences:
        first.setdefault(_key(difference), difference)
    return list(first.values())


def _key(difference: Difference) -> tuple[object, ...]:
    place = difference.where, difference.turn, difference.start, difference.end
    return *place, difference.canonical.ids.tobytes()
