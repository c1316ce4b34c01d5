"""Shares and axes in words."""

from __future__ import annotations

import math

from tito_audit.terminal.words import percent


def share(part: float, whole: float) -> str:
    """`3.1 %`; `–` if `whole` is 0."""
    return percent(part / whole) if whole else "–"


def nice_steps(top: float) -> list[float]:
    """A few round numbers from 0 to well above `top`, for an axis that no bar reaches the end of."""
    room = 1.04 * top
    for step in _round_steps(room):
        if step * 5 > room:
            return [number * step for number in range(math.floor(room / step) + 2)]
    return [0.0, 1.0]


def _round_steps(top: float) -> list[float]:
    size = 10.0 ** (math.floor(math.log10(top)) - 1) if top > 0 else 1.0
    return [factor * size for factor in (1, 2, 2.5, 5, 10, 20, 25, 50)]
