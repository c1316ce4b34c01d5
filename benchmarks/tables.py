"""Tables and figures as Markdown shows them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

__all__ = ["spread", "table"]


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def spread(values: Sequence[float], digits: int = 0) -> str:
    """The median of several values, with their minimum and maximum."""

    def shown(value: float) -> str:
        return f"{value:,.0f}" if not digits or value >= 100 else f"{value:.{digits}f}"

    middle = shown(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} [{shown(min(values))} to {shown(max(values))}]"
