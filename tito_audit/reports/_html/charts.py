"""Charts of token counts: each a drawing, its numbers, and a sentence that says what it shows."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from tito_audit.terminal.cut import elided
from tito_audit.terminal.escape import visible
from tito_audit.viewer.model import LOGPROB_EDGES, POSITION_EDGES, STATES, TURNS, Counts, Measures

WIDTH, HEIGHT = 560, 220
_ROLES = 12
"""Maximum roles drawn; rarer ones are counted together."""
_NAME = 18
"""Maximum characters of a role's name in the drawing."""
_DRAWN = {"svg", "g", "rect", "path", "text"}
_KEPT = {"viewBox", "class", "transform", "x", "y", "width", "height", "d"}
_LEFT_OUT = {"tooltip-overlay", "text-overlay", "overlay", "legends"}
_DRIFT = ("error", "warning", "note")
_WORDS = {"error": "drifted, error", "warning": "drifted, warning", "note": "would drift (note)"}


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart of the page."""

    name: str
    title: str
    says: str
    """What it shows, in a sentence."""
    kind: str
    """`severity` or `pair`: how its series are coloured."""
    legend: tuple[str, ...]
    """Names of the series."""
    svg: str
    """Empty if all values are zero."""
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """The numbers, as a table under `head`."""


def charts(measures: Measures) -> list[Chart]:
    """The charts, without those for which no token was counted."""
    drawn = (_turns(measures), _positions(measures), _logprobs(measures), _roles(measures))
    return [chart for chart in drawn if chart is not None]


def _turns(measures: Measures) -> Chart | None:
    names = [*(str(turn) for turn in range(TURNS - 1)), f"{TURNS - 1}+"]
    says = "Share of the generated tokens of each turn that drifted."
    return _shares("turns", "Drift by turn", says, "turn", names, measures.by_turn)


def _positions(measures: Measures) -> Chart | None:
    names = [f"{_short(edge)}+" for edge in POSITION_EDGES]
    says = "Share of the generated tokens that drifted, by position in the conversation."
    return _shares("positions", "Drift by token position", says, "from token", names, measures.by_position)


def _shares(name: str, title: str, says: str, of: str, names: Sequence[str], counts: Counts) -> Chart | None:
    """Stacked shares of drifted tokens; empty bins at the end are left out."""
    filled = np.flatnonzero(counts.sum(axis=1))
    if not len(filled):
        return None
    names, counts = names[: filled[-1] + 1], counts[: filled[-1] + 1]
    totals = counts.sum(axis=1)
    drifted = counts[:, [STATES.index(state) for state in _DRIFT]].any()
    if not drifted:
        says = f"None of the {int(totals.sum()):,} generated tokens drifted."
    series = []
    for state in _DRIFT:
        column = counts[:, STATES.index(state)]
        points = [
            _point(value, total, f"{of} {label}", f"tokens {_WORDS[state]}")
            for label, value, total in zip(names, column.tolist(), totals.tolist(), strict=True)
        ]
        series.append((_WORDS[state], points))
    rows = [
        (
            label,
            f"{total:,}",
            *(f"{row[STATES.index(state)]:,}" for state in _DRIFT),
            _percent(total - row[0], total),
        )
        for label, row, total in zip(names, counts.tolist(), totals.tolist(), strict=True)
    ]
    head = (of, "generated tokens", *(_WORDS[state] for state in _DRIFT), "share")
    legend = tuple(_WORDS[state] for state in _DRIFT)
    svg = _bars(names, series) if drifted else ""
    return Chart(name, title, says, "severity", legend, svg, head, tuple(rows))


def _logprobs(measures: Measures) -> Chart | None:
    same, drifted = measures.by_logprob[:, 0], measures.by_logprob[:, 1:].sum(axis=1)
    filled = np.flatnonzero(measures.by_logprob.sum(axis=1))
    if not len(filled):
        return None
    span = slice(filled[0], len(LOGPROB_EDGES))
    names = [f"<{LOGPROB_EDGES[1]:g}" if edge == -np.inf else f"{edge:g}" for edge in LOGPROB_EDGES][span]
    groups = (("drifted", drifted), ("not drifted", same))
    series = []
    for word, column in groups:
        total = int(column.sum())
        points = [
            _point(value, total, label, f"{word} tokens")
            for label, value in zip(names, column[span].tolist(), strict=True)
        ]
        series.append((word, points))
    rows = [
        (label, f"{a:,}", _percent(a, int(drifted.sum())), f"{b:,}", _percent(b, int(same.sum())))
        for label, a, b in zip(names, drifted[span].tolist(), same[span].tolist(), strict=True)
    ]
    head = ("logprob, nats", "drifted", "share", "not drifted", "share")
    says = f"Share of each kind of token at each logprob that the sampler gave. {_medians(drifted, same)}"
    unknown = int(measures.without_logprob.sum())
    if unknown:
        says += f" {unknown:,} tokens without a logprob are left out."
    svg, title = _bars(names, series, stacked=False), "Logprob of drifted and other tokens"
    return Chart("logprobs", title, says, "pair", ("drifted", "not drifted"), svg, head, tuple(rows))


def _medians(drifted: Counts, same: Counts) -> str:
    """`The median of the 612 drifted tokens is between -1 and -0.5, of the others between -0.1 and -0.01.`"""
    if not drifted.sum() or not same.sum():
        return ""
    one, other = _median(drifted), _median(same)
    return f"The median of the {int(drifted.sum()):,} drifted tokens is {one}, of the others {other}."


def _median(counts: Counts) -> str:
    at = int(np.searchsorted(counts.cumsum(), counts.sum() / 2))
    if at == 0:
        return f"below {LOGPROB_EDGES[1]:g}"
    if at + 1 == len(LOGPROB_EDGES):
        return f"above {LOGPROB_EDGES[-1]:g}"
    return f"between {LOGPROB_EDGES[at]:g} and {LOGPROB_EDGES[at + 1]:g}"


def _roles(measures: Measures) -> Chart | None:
    counts = {visible(role): pair for role, pair in measures.roles.items() if sum(pair)}
    if not counts or (len(counts) == 1 and not next(iter(counts.values()))[1]):
        return None  # a log of calls alone: everything is generated
    ranked = sorted(counts.items(), key=lambda item: (-sum(item[1]), item[0]))
    if len(ranked) > _ROLES:
        rest = [pair for _, pair in ranked[_ROLES:]]
        others = (f"{len(rest)} other roles", (sum(a for a, _ in rest), sum(b for _, b in rest)))
        ranked = [*ranked[:_ROLES], others]
    series: list[tuple[str, list[Any]]] = []
    for at, word in enumerate(("trained", "not trained")):
        points = [_point(pair[at], sum(pair), role, f"tokens {word}") for role, pair in reversed(ranked)]
        series.append((word, points))
    names = [elided(role, _NAME) for role, _ in reversed(ranked)]
    svg = _bars(names, series, across=True)
    rows = [(role, f"{a:,}", f"{b:,}", _percent(a, a + b)) for role, (a, b) in ranked]
    head = ("role", "trained", "not trained", "share trained")
    says = "Share of the tokens of each role that the loss mask trains. Only sampled tokens should be trained."
    return Chart("roles", "Loss mask by role", says, "pair", ("trained", "not trained"), svg, head, tuple(rows))


def _point(part: int, whole: int, of: str, what: str) -> dict[str, Any] | None:
    """A bar: the share, and `turn 2: 3 of 120 tokens drifted (2.5 %)`; None if there is nothing to share."""
    if not whole:
        return None
    return {"value": part / whole, "label": f"{of}: {part:,} of {whole:,} {what} ({_percent(part, whole)})"}


def _bars(
    names: Sequence[str], series: Iterable[tuple[str, list[Any]]], *, stacked: bool = True, across: bool = False
) -> str:
    """A bar chart as an `<svg>` with shapes, labels and a title for each bar; the page's style colours it."""
    pygal = _pygal()
    kind = pygal.HorizontalStackedBar if across else pygal.StackedBar if stacked else pygal.Bar
    every = max(1, -(-len(names) // 18))
    chart = kind(
        width=WIDTH,
        height=48 + 26 * len(names) if across else HEIGHT,
        js=[],
        style=pygal.style.Style(label_font_size=12, major_label_font_size=12),
        show_legend=False,
        margin=8,
        margin_right=24 if across else 8,
        spacing=8,
        value_formatter=_axis,
        min_scale=3,
        max_scale=5,
        truncate_label=-1,
        x_labels_major_every=every,
        show_minor_x_labels=every == 1,
        range=(0, 1) if across else None,
    )
    chart.x_labels = list(names)
    for name, points in series:
        chart.add(name, points)
    return "".join(_written(chart.render_tree(), root=True))


def _pygal() -> Any:
    """The drawing library, without the import hook for maps that it installs globally."""
    import pygal
    import pygal.style

    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "pygal"]
    return pygal


def _written(node: Any, *, root: bool = False) -> Iterator[str]:
    """The drawing without ids, styles, scripts, links and comments, which do not belong in the page."""
    if not isinstance(node.tag, str):
        return  # a comment: it says when it was written
    tag = node.tag.rpartition("}")[2]
    classes = (node.get("class") or "").split()
    if tag not in _DRAWN or _LEFT_OUT.intersection(classes):
        return
    kept = [(name, value) for name, value in node.items() if name in _KEPT]
    attributes = "".join(f' {name}="{escape(value)}"' for name, value in kept)
    hidden = ' aria-hidden="true" focusable="false"' if root else ""
    yield f"<{tag}{attributes}{hidden}>{escape(node.text or '')}"
    for child in node:
        if child.tag == "desc" and child.get("class") == "label":
            yield f"<title>{escape(child.text or '')}</title>"
        else:
            yield from _written(child)
    yield f"</{tag}>"


def _axis(value: float) -> str:
    percent = 100 * value
    return f"{percent:.0f} %" if percent >= 10 or percent == int(percent) else f"{percent:.2g} %"


def _percent(part: int, whole: int) -> str:
    """`3.1 %`; `–` if `whole` is 0."""
    if not whole:
        return "–"
    percent = 100 * part / whole
    return f"{percent:.0f} %" if part in (0, whole) else f"{percent:.2g} %" if percent < 1 else f"{percent:.1f} %"


def _short(number: int) -> str:
    for size, unit in ((1 << 20, "M"), (1 << 10, "k")):
        if number >= size:
            return f"{number // size}{unit}"
    return str(number)
