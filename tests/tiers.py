"""How many examples a test tries: few in `make test`, all in `make deep`. The properties are the same."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle, islice, product
from typing import Any, TypeVar

from hypothesis import settings

__all__ = ["DEEP", "crossed", "examples", "one_in", "some"]

DEEP = os.environ.get("TITO_AUDIT_TIER") == "deep"
"""Whether every example is tried: `make deep`."""
_QUICK_EXAMPLES = 10

T = TypeVar("T")


def examples(quick: int, deep: int) -> int:
    """How many examples to try: `quick` in `make test`, `deep` in `make deep`."""
    return deep if DEEP else quick


def some(values: Sequence[T], quick: int) -> Sequence[T]:
    """All values in `make deep`; in `make test` at most `quick`, spread evenly from the first to the last."""
    if DEEP or len(values) <= quick:
        return values
    if quick == 1:
        return values[:1]
    return [values[number * (len(values) - 1) // (quick - 1)] for number in range(quick)]


def one_in(step: int, values: Iterable[T]) -> Iterator[T]:
    """All values in `make deep`; in `make test` one of so many."""
    return islice(values, 0, None, examples(step, 1))


def crossed(*several: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Every combination of values in `make deep`; in `make test` as few as have every value of each."""
    if DEEP:
        return list(product(*several))
    return list(islice(zip(*map(cycle, several), strict=False), max(map(len, several))))


# What `make test` tries is the same each time, so that it fails for a change and never by chance.
settings.register_profile("quick", max_examples=_QUICK_EXAMPLES, deadline=None, derandomize=True, database=None)
settings.register_profile("deep", deadline=None)
settings.load_profile("deep" if DEEP else "quick")
