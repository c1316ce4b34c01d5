"""The HTML page of `rescore`: one file without scripts, with a plot of recorded against rescored logprobs."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files
from string import Template

from tito_audit.record.rollout import Place
from tito_audit.rescore.model import Price
from tito_audit.rescore.summary import (
    AFTER_HEADS,
    AFTER_LEGEND,
    AGREEMENT_HEADS,
    AGREEMENT_LEGEND,
    BINS,
    DRIFTED_HEADS,
    DRIFTED_LEGEND,
    LOWEST,
    MISMATCH_HEADS,
    RescoreSummary,
    after_rows,
    agreement_rows,
    drifted_rows,
    mismatch_cells,
    reach_lines,
)
from tito_audit.terminal.escape import visible
from tito_audit.terminal.words import many, percent

_SQUARE = 9
"""Width of a square of the plot, in pixels."""
_MARGIN = 34
_SHADES = 8
_MAX_BARS = 24
"""How many causes have a bar; the table has all."""
_BAR_WIDTH = 360
Pieces = Callable[[tuple[int, ...]], str]


def page(summary: RescoreSummary, verdict: str, worst: int, pieces: Pieces) -> str:
    """The HTML page, with every text from a log escaped; `pieces` writes ids as text."""
    assets = files("tito_audit.rescore").joinpath("assets")
    style, html = (assets.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.html"))
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    model = f", model {summary.model}" if summary.model else ""
    parts = [
        f"<h1>tito-audit rescore</h1><p class='quiet'>{_escape(summary.provider + model)}</p>",
        f"<p class='verdict {'bad' if summary.failed else 'good'}'>{_escape(verdict)}</p>",
        f"<p class='quiet'>{_escape(', '.join(map(str, summary.scan.files)))}</p>",
    ]

    def add(name: str, title: str, heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], *more: str) -> None:
        """Add a section with a table, unless it has no rows. `more`: a figure before it, and legends after it."""
        if not rows:
            return
        head = "".join(f'<th scope="col">{_escape(name)}</th>' for name in heads)
        body = "".join("<tr>" + "".join(f"<td>{_escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        legend = "".join(f"<p class='quiet'>{_escape(line)}</p>" for line in more[1:])
        parts.append(_section(name, title, "".join(more[:1]) + table + legend))

    rows = list(agreement_rows(summary, len(summary.by_turn)))
    add(
        *("recorded", "Recorded against rescored logprobs", AGREEMENT_HEADS, rows),
        *(_density_plot(summary), AGREEMENT_LEGEND),
    )
    shares = list(mismatch_cells(summary))
    add("mismatch", "Why they differ: shares of the difference", MISMATCH_HEADS, shares)
    priced = list(drifted_rows(summary))
    add("price", "What drift costs, in nats", DRIFTED_HEADS, priced, _cause_bars(summary), DRIFTED_LEGEND)
    title, after = "What drift does to the sampled tokens after it", list(after_rows(summary))
    add("after", title, AFTER_HEADS, after, "", AFTER_LEGEND, *reach_lines(summary))
    rows = [
        (
            describe_place(place, price),
            pieces(price.segments[0].sampled_ids),
            f"{price.sampled:.2f}",
            pieces(price.segments[0].other_ids),
            f"{price.other:.2f}",
            f"{price.difference:+.2f}",
            percent(price.share),
        )
        for place, price in most_expensive(summary, worst)
    ]
    heads = ("finding", "sampled", "logprob", "instead", "logprob", "difference", "share of the change")
    add("worst", "The most expensive findings", heads, rows)
    several = summary.findings[8:]
    notes = [
        *(f"{many(number, 'rollout')}: {words}." for words, number in summary.explanations.most_common()),
        *(f"{finding.code} {finding.place}: {finding.hit.message}" for finding in summary.findings[:8]),
        *([f"{len(several):,} more findings of LPR507 and LPR509 by the model's values"] if several else ()),
        *(f"{count:,} not scored: {why} (first: {first})" for why, (count, first) in summary.unscored.items()),
        *(f"{many(count, 'finding')} without a price: {why}" for why, count in summary.unpriced.items()),
        *summary.scan.notices,
    ]
    if notes:
        items = "".join(f"<li>{_escape(note)}</li>" for note in notes)
        parts.append(_section("notes", "Notes", f"<ul>{items}</ul>"))
    shown = _escape(summary.model or summary.provider)
    return Template(html).substitute(policy=policy, model=shown, style=style, body="\n".join(parts))


def most_expensive(summary: RescoreSummary, worst: int) -> list[tuple[Place, Price]]:
    """The findings with the highest prices that are known, and their places."""
    return [(at, price) for at, price in summary.most_expensive(worst) if math.isfinite(price.difference)]


def describe_place(place: Place, price: Price) -> str:
    """`TOK101 run.jsonl:3 turn 2 completion 14:16`."""
    hit = price.finding.hit
    turn = "" if hit.turn is None else f" turn {hit.turn}"
    return f"{price.finding.code} {place}{turn} {hit.where} {hit.start}:{hit.end}"


def _section(name: str, title: str, inside: str) -> str:
    return (
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{title}</h2>{inside}</section>'
    )


def _density_plot(summary: RescoreSummary) -> str:
    """How many tokens have each pair of logprobs, as a heat map with a line where both are equal."""
    size = BINS * _SQUARE
    most = math.log1p(max(summary.plot.values(), default=0))
    squares = "".join(
        f'<rect class="shade{1 + min(int(math.log1p(number) / most * _SHADES), _SHADES - 1)}" '
        f'x="{_MARGIN + x * _SQUARE}" y="{(BINS - 1 - y) * _SQUARE}" width="{_SQUARE}" height="{_SQUARE}">'
        f"<title>recorded {_bin_range(x)}, rescored {_bin_range(y)}: {many(number, 'token')}</title></rect>"
        for (x, y), number in sorted(summary.plot.items())
    )
    marks = "".join(
        f'<text x="{_MARGIN + at * size // 4}" y="{size + 16}" text-anchor="middle">{value}</text>'
        f'<text x="{_MARGIN - 6}" y="{size - at * size // 4 + 4}" text-anchor="end">{value}</text>'
        for at, value in enumerate(range(LOWEST, 1, -LOWEST // 4))
    )
    return (
        f'<figure><svg viewBox="0 0 {_MARGIN + size + 16} {size + 40}" role="img" '
        f'aria-label="Recorded logprobs across, rescored ones up">'
        f'<rect class="frame" x="{_MARGIN}" y="0" width="{size}" height="{size}"/>{squares}'
        f'<path class="equal" d="M{_MARGIN} {size}L{_MARGIN + size} 0"/>{marks}'
        f'<text x="{_MARGIN + size // 2}" y="{size + 34}" text-anchor="middle">recorded logprob, nats</text></svg>'
        "<figcaption>Tokens by recorded logprob (across) and the model's (up); on the line both are equal. "
        f"Darker: more tokens (logarithmic). Values below {LOWEST} count as {LOWEST}.</figcaption></figure>"
    )


def _bin_range(square: int) -> str:
    width = -LOWEST / BINS
    return f"{LOWEST + square * width:g} to {LOWEST + (square + 1) * width:g}"


def _cause_bars(summary: RescoreSummary) -> str:
    """A bar for each cause, as long as the change of the summed logprob; "" where nothing changes."""
    changes = [(cause, cause.other - cause.sampled) for cause in summary.causes.values() if cause.segments]
    ranked = sorted(changes, key=lambda pair: -abs(pair[1]))[:_MAX_BARS]
    most = max((abs(change) for _, change in ranked), default=0)
    if not most:
        return ""
    rows = []
    for number, (cause, change) in enumerate(ranked):
        label = f"{cause.code} {visible(cause.cause)}"
        name = _escape(label if len(label) <= 34 else label[:33] + "…")
        width = max(round(_BAR_WIDTH * abs(change) / most), 1)
        y = number * 24
        rows.append(
            f'<text x="236" y="{y + 15}" text-anchor="end">{name}</text>'
            f'<rect class="{"loss" if change < 0 else "gain"}" x="244" y="{y + 4}" width="{width}" height="14">'
            f"<title>{name}: {change:+.2f} nats</title></rect>"
            f'<text x="{250 + width}" y="{y + 15}">{change:+.1f}</text>'
        )
    return (
        f'<figure><svg viewBox="0 0 {260 + _BAR_WIDTH + 60} {24 * len(ranked)}" role="img" '
        f'aria-label="Change of the summed logprob by cause">{"".join(rows)}</svg><figcaption>Change of '
        "the summed logprob of all drifted tokens, in nats: of what replaced them, minus of what was "
        "sampled.</figcaption></figure>"
    )


def _escape(text: str) -> str:
    return escape(visible(text))
