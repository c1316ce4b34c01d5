"""Parts: which lists of an object are the start, the end or another part of a longer one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tito_audit.align.prefix import starts_with
from tito_audit.inspect.columns import Item, Numbers


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
        held = sum(starts_with(b, a) for a, b in pairs)
        return bool(pairs) and 2 * held > len(pairs)

    def holds(self, whole: str, part: str) -> bool:
        """Whether the whole contains the part in most objects."""
        pairs = self.pairs(part, whole)
        return 2 * sum(_inside(a, b) for a, b in pairs) > len(pairs)

    def is_end(self, part: str, whole: str) -> bool:
        """Whether the whole ends with the part in most objects."""
        pairs = self.pairs(part, whole)
        held = sum(starts_with(b[::-1], a[::-1]) for a, b in pairs)
        return bool(pairs) and 2 * held > len(pairs)


def _inside(part: Numbers, whole: Numbers) -> bool:
    """Whether the whole contains the part."""
    places = np.flatnonzero(whole[: len(whole) - len(part) + 1] == part[0]) if len(part) <= len(whole) else ()
    return any(bool((whole[place : place + len(part)] == part).all()) for place in places)
