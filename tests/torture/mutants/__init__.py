"""Mutators: functions of dice and a source that return a `Mutant`, one file a kind. `all_mutators` has them all.

To add one, write a function `(dice, source) -> Mutant` into a file of its kind and add it to that file's
`MUTATORS`, with its weight. It may draw only from `dice`, so that a seed and a number make the same mutant again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from random import Random

from tests.torture.attack import Mutant
from tests.torture.mutants import bytes_, compressed, large, pickles, structure, tables, text
from tests.torture.sources import Source

__all__ = ["KINDS", "Mutator", "mutant_of"]

Mutator = Callable[[Random, Source], Mutant]
KINDS = {
    "structure": (40, structure.MUTATORS),
    "bytes": (16, bytes_.MUTATORS),
    "tables": (22, tables.MUTATORS),
    "text": (10, text.MUTATORS),
    "compressed": (7, compressed.MUTATORS),
    "pickles": (2, pickles.MUTATORS),
    "large": (0.15, large.MUTATORS),
}
"""How often each kind is drawn, and its mutators with their weights."""


@cache
def _weights() -> tuple[list[str], list[float]]:
    return list(KINDS), [weight for weight, _ in KINDS.values()]


def mutant_of(dice: Random, source: Source) -> Mutant:
    """A mutant of a source, drawn."""
    names, weights = _weights()
    kind = dice.choices(names, weights)[0]
    mutators = KINDS[kind][1]
    return dice.choices(list(mutators), list(mutators.values()))[0](dice, source)
