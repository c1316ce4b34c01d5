"""Bars as `<svg>` of any width: horizontal places are shares of it, text keeps its size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from tito_audit.reports._html.numbers import nice_steps

_TOP, _BASE, _LOW = 10, 170, 190
"""Heights of the highest line, of the base line and of the labels below it."""
_LINE = 30
"""Height of a horizontal bar, with its gap."""
_LABELS = 8
"""Maximum labels below bars on a narrow page; the others are shown only on a wide one."""
_FULL = 0.72
"""How much of its place a bar takes."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: its share of 1, and its tooltip."""

    value: float
    label: str


Series = Sequence[Sequence[Bar | None]]
"""By series: the bar at each name; None if the total is 0."""


def upright(names: Sequence[str], series: Series, *, stacked: bool = True) -> tuple[str, str]:
    """Upright bars at `names`: the axis at their left, and the drawing, which grows with its place."""
    heights = [[bar.value if bar else 0.0 for bar in column] for column in zip(*series, strict=True)]
    top = max(sum(column) if stacked else max(column) for column in heights)
    steps = nice_steps(top)
    return _axis(steps), _svg(_LOW + 8, [*_lines(steps), *_columns(series, steps[-1], stacked), *_names(names)])


def _height(value: float, top: float) -> float:
    return round((_BASE - _TOP) * value / top, 2)


def _axis(steps: Sequence[float]) -> str:
    words = [f'<text x="100%" y="{_BASE + 4 - _height(step, steps[-1])}">{_step(step)}</text>' for step in steps]
    return _svg(_LOW + 8, words)


def _lines(steps: Sequence[float]) -> Iterator[str]:
    for step in steps:
        y = _BASE - _height(step, steps[-1])
        kind = "line" if step else "base line"
        yield f'<line class="{kind}" x1="0" x2="100%" y1="{y}" y2="{y}"/>'


def _columns(series: Series, top: float, stacked: bool) -> Iterator[str]:
    """The bars, each in its place; several that do not stack share the width of one."""
    place = 100 / len(series[0])
    width = place * _FULL / (1 if stacked else len(series))
    below = [0.0] * len(series[0])
    for number, bars in enumerate(series):
        beside = 0 if stacked else number * width
        for at, bar in enumerate(bars):
            if bar is None or not bar.value:
                continue
            x, height = at * place + place * (1 - _FULL) / 2 + beside, _height(bar.value, top)
            yield _bar(number, bar, f"{x:.3f}%", _BASE - height - below[at], f"{width:.3f}%", height)
            below[at] += height if stacked else 0


def _names(names: Sequence[str]) -> Iterator[str]:
    every = -(-len(names) // _LABELS)
    for at, name in enumerate(names):
        kind = ' class="minor"' if at % every else ""
        yield f'<text{kind} x="{100 * (at + 0.5) / len(names):.3f}%" y="{_LOW}">{escape(name)}</text>'


def lying(series: Series) -> list[str]:
    """Horizontal stacked bars, one drawing for each name, as wide as the page."""
    out = []
    for bars in zip(*series, strict=True):
        x, parts = 0.0, []
        for number, bar in enumerate(bars):
            if bar is not None and bar.value:
                parts.append(_bar(number, bar, f"{100 * x:.3f}%", 0, f"{100 * bar.value:.3f}%", _LINE - 12))
                x += bar.value
        out.append(_svg(_LINE - 12, parts))
    return out


def _bar(number: int, bar: Bar, x: str, y: float, width: str, height: float) -> str:
    box = f'<rect class="rect" x="{x}" y="{round(y, 2)}" width="{width}" height="{height}"/>'
    return f'<g class="column color-{number}">{box}<title>{escape(bar.label)}</title></g>'


def _svg(height: int, parts: Sequence[str]) -> str:
    return f'<svg width="100%" height="{height}" aria-hidden="true" focusable="false">{"".join(parts)}</svg>'


def _step(value: float) -> str:
    return f"{round(100 * value, 6):g} %"
