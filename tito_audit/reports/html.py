"""The `html` report: one self-contained page, from the verdict down to single tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from html import escape
from typing import Any, Literal, TextIO

import numpy as np

from tito_audit.record.finding import Severity
from tito_audit.record.mismatch import ADVICE, EDGES, LogMismatch, MismatchCause
from tito_audit.report import Report, ReportOptions, ResultSink
from tito_audit.reports._html.page import page_name, render_page
from tito_audit.reports._html.page_findings import PageFindings, headline_label
from tito_audit.reports._html.views import Site as Site
from tito_audit.reports._html.views import ViewBlocks
from tito_audit.summary import Summary
from tito_audit.terminal import verdict as _verdict
from tito_audit.terminal.escape import elided, visible
from tito_audit.terminal.mismatch import mismatch_rows
from tito_audit.terminal.place import reading_flags, single_tokenizer
from tito_audit.terminal.verdict import MAX_CAUSES, skips_by_reason
from tito_audit.terminal.words import many, percent, share
from tito_audit.terminal.worst import NewFindings, next_steps
from tito_audit.viewer.model import (
    LOGPROB_EDGES,
    POSITION_EDGES,
    STATES,
    TURNS,
    Counts,
    Measures,
    observed_of,
)

# The top of the page: the verdict, facts about the log, how often each rule found something.

_CAUSES = 12
"""Maximum causes listed for one rule."""
_FORMATS = 4

State = Literal["fail", "warn", "info", "pass", "none"]


@dataclass(frozen=True, slots=True)
class HtmlVerdict:
    """The verdict as the page shows it; `state` decides its colour."""

    state: State
    word: str
    line: str
    """What was found, as a sentence."""
    because: tuple[str, ...] = ()
    """Why the gate failed besides single findings."""


def page_verdict(summary: Summary) -> HtmlVerdict:
    """The verdict of every report, as the page shows it."""
    judged = _verdict.verdict(summary)
    state: State = _STATES.get(judged.word, "none")
    if judged.word == "findings":
        state = _STATES_FOUND.get(summary.worst(), "info")
    gate = summary.gate
    # The first reason counts findings that fail by themselves, as the line does.
    because = gate.because[bool(gate.failing) :] if gate is not None and gate.failed else ()
    line = "; ".join(judged.parts)
    return HtmlVerdict(state, judged.word[:1].upper() + judged.word[1:], f"{line[:1].upper()}{line[1:]}.", because)


_STATES: dict[str, State] = {"failed": "fail", "passed": "pass", "clean": "pass"}
_STATES_FOUND: dict[Severity | None, State] = {Severity.ERROR: "fail", Severity.WARNING: "warn"}


def run_facts(summary: Summary) -> Iterator[tuple[str, str]]:
    """What was audited, as (name, value) pairs."""
    yield "rollouts", f"{summary.rollouts:,}"
    if summary.rows_unreadable:
        yield "unreadable rows", f"{summary.rows_unreadable:,}"
    yield "turns", f"{summary.turns:,}"
    yield "tokens", f"{summary.tokens:,}"
    yield "generated tokens", f"{summary.generated_tokens:,}"
    if summary.sampled is not None:
        of = summary.sampled
        yield "sampled", f"{of.rows:,} of {of.of:,} rows ({100 * of.share:g} %)"
    ranked = summary.formats.most_common()
    formats = ", ".join(f"{name} {number:,}" for name, number in ranked[:_FORMATS])
    more = f" and {many(len(ranked) - _FORMATS, 'other format')}" if len(ranked) > _FORMATS else ""
    yield "formats", formats + more or "none"
    yield "tokenizer", summary.tokenizer_words or "none"
    yield "encoder", summary.encoder or "none"
    yield "took", f"{summary.seconds:.1f} s"


def headline_rows(summary: Summary) -> list[dict[str, Any]]:
    """At most 200 causes as ranked: each is a row of the first chart, with the width of its bar."""
    ranked = summary.ranked_headlines()
    most = max((headline.times for headline in ranked), default=1)
    rows = summary.rollouts + summary.rows_unreadable
    return [
        {
            "words": headline.words or ", ".join(sorted(headline.codes)),
            "name": headline_label(headline.text, headline.unit),
            "severity": headline.severity.word,
            "bar": _css_percent(headline.times, most),
            "rollouts": f"{many(n, 'rollout')} ({share(n, rows)})" if (n := headline.rollouts) else "",
            "findings": headline.codes.total(),
            "codes": [(code, number) for code, number in sorted(headline.codes.items()) if number],
        }
        for headline in ranked[:200]
    ]


def rule_rows(summary: Summary, options: ReportOptions) -> list[dict[str, Any]]:
    """What the page shows of every rule that found something, by code."""
    totals = {code: count.new.total() for code, count in summary.findings.items()}
    most, rows = max(totals.values(), default=1), summary.rollouts + summary.rows_unreadable
    facts = []
    for code, total in sorted(totals.items()):
        counts = summary.findings[code]
        new = {severity.word: counts.new[severity] for severity in sorted(Severity, reverse=True)}
        unaccepted = replace(counts, error=new["error"], warning=new["warning"], note=new["note"])
        every = counts.error + counts.warning + counts.note
        bars, start = [], 0
        for word, number in new.items():
            if number:
                bars.append((word, _css_percent(start, most), _css_percent(number, most)))
            start += number
        named = [(cause, number) for cause, number in summary.causes.get(code, {}).items() if cause]
        ranked = sorted(named, key=lambda item: (-item[1], item[0]))
        facts.append(
            {
                "code": code,
                "title": options.titles.get(code, ""),
                "worst": bars[0][0] if bars else "note",
                "counts": unaccepted,
                "findings": total,
                "bars": bars,
                "per_token": share(total, summary.generated_tokens),  # as for `--max-rate`
                "per_rollout": share(counts.rollouts, rows),
                "causes": [
                    {"name": cause, "findings": number, "share": _css_percent(number, every)}
                    for cause, number in ranked[:_CAUSES]
                ],
                "more_causes": max(len(ranked) - _CAUSES, 0),
                "manual": list(_manual_sections(options.docs.get(code, ""))),
            }
        )
    return facts


def _manual_sections(doc: str) -> Iterator[tuple[str, list[list[str]]]]:
    """Each heading of a Markdown manual with its paragraphs, a paragraph as lines; only examples have several."""
    for part in doc.split("\n## ")[1:]:
        heading, _, text = part.partition("\n")
        paragraphs: list[list[str]] = []
        for at, section in enumerate(text.split("```")):
            if at % 2:
                paragraphs.append([*section.partition("\n")[2].rstrip().splitlines(), ""])
            else:
                paragraphs += [[" ".join(words.split())] for words in section.split("\n\n") if words.strip()]
        yield heading.strip(), paragraphs


def mismatch_sections(summary: Summary) -> Iterator[dict[str, Any]]:
    """What the page shows of every trainer's column that was compared."""
    for number, (column, mismatch) in enumerate(summary.mismatches.items()):
        says = f"{many(mismatch.tokens, 'token')} of {many(mismatch.rollouts, 'rollout')}"
        if mismatch.confident:
            says += (
                f", of which {mismatch.confident:,} have more than 0.99 at the sampler and less than 0.01 at the "
                "trainer: no arithmetic does that"
            )
        # Share, width of its bar, cause, estimate, tokens, the worst token, what to do.
        causes = [
            (
                percent(part),
                f"{100 * part:.2f}%",
                cause,
                estimate,
                f"{tokens:,}",
                worst,
                ADVICE[MismatchCause(cause)],
            )
            for part, cause, estimate, tokens, worst in mismatch_rows(mismatch)
        ]
        yield {
            "title": f"{column} against {mismatch.sampler}",
            "says": f"{says}.",
            "rows": causes,
            "charts": draw_mismatch_charts(number, mismatch),
        }


def _css_percent(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.2f}%"


def write(summary: Summary, out: TextIO, options: ReportOptions) -> ResultSink[None]:
    """Read all results, then write one page; until then, findings and views wait on disk."""
    with closing(ViewBlocks()) as views:
        yield from write_page(summary, out, options, views)


def write_page(
    summary: Summary, out: TextIO, options: ReportOptions, views: ViewBlocks, name: str = ""
) -> ResultSink[HtmlVerdict]:
    """Read all results, write one page with its data where `views` puts it, and return its verdict."""
    seen: Counter[Severity] = Counter()
    new_findings, with_findings, measures = NewFindings(), 0, None
    with closing(PageFindings(views.max_findings)) as page_findings:
        while (result := (yield)) is not None:
            seen.update(finding.severity for finding in result.findings)
            with_findings += bool(result.findings) and not result.of_log
            new_findings.add(result)
            page_findings.add(result.findings)
            observed = observed_of(result)
            if observed is not None:
                measures = measures or Measures()
                measures.add(observed.measures)
                if observed.view is not None:
                    views.add(observed.view, result)
        before, after = render_page(
            name=name or page_name(summary.files),
            site=views.site,
            files=summary.files[:100],
            summary=summary,
            tokenizer=single_tokenizer(summary) or "",
            joining=reading_flags(summary),
            verdict=(judged := page_verdict(summary)),
            steps=list(next_steps(new_findings.worst_finding, new_findings, summary)),
            headlines=headline_rows(summary),
            causes=len(summary.ranked_headlines()),
            first_headlines=MAX_CAUSES,
            facts=list(run_facts(summary)),
            counts=[
                (severity.word, sum(count.new[severity] for count in summary.findings.values()))
                for severity in sorted(Severity, reverse=True)
            ],
            rules=rule_rows(summary, options),
            mismatches=list(mismatch_sections(summary)),
            skips=[(because, codes, many(count, "rollout")) for because, codes, count in skips_by_reason(summary)],
            notices=summary.notices[:50],
            fixed=summary.gate.fixed[:200] if summary.gate is not None else (),
            gone=summary.gate.gone if summary.gate is not None else 0,
            observed=measures is not None,
            charts=draw_charts(measures) if measures is not None else [],
            findings=seen.total(),
            kept=page_findings.number,
            views=len(views.index),
            with_findings=with_findings,
        )
        out.write(before)
        views.write(page_findings.chunks(), out)
        out.write(after)
        return judged


# Charts of token counts: an `<svg>` of any width, the numbers as a table, and a caption.

_ROLES = 12
"""Maximum roles drawn; rarer ones are counted together."""
_DRIFT = ("error", "warning", "note")
_WORDS = {"error": "drifted, error", "warning": "drifted, warning", "note": "would drift (note)"}
_TOP, _BASE, _LOW = 10, 170, 190
"""The y of the highest line, of the base line and of the labels below it."""
_LINE = 30
"""Height of a horizontal bar with its gap."""
_LABELS = 8
"""Maximum labels below the bars of a narrow page; a wide one shows all."""
_FULL = 0.72
"""The share of its place that a bar takes."""


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart of the page."""

    name: str
    title: str
    caption: str
    """A sentence on what it shows."""
    kind: str
    """`severity`, `pair` or `scatter`: how its series are coloured."""
    legend: tuple[str, ...]
    """Names of the series."""
    svg: str
    """The drawings, as markup; empty if all values are zero."""
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """The numbers, as a table under `head`."""
    horizontal: bool = False
    """Whether its bars are horizontal."""


def draw_charts(measures: Measures) -> list[Chart]:
    """The charts of token counts; those without a token are left out."""
    names = [*(str(turn) for turn in range(TURNS - 1)), f"{TURNS - 1}+"]
    by_turn = "Share of the generated tokens of each turn that drifted."
    edges = [
        f"{edge >> 20}M+" if edge >= 1 << 20 else f"{edge >> 10}k+" if edge >= 1 << 10 else f"{edge}+"
        for edge in POSITION_EDGES
    ]
    along = "Share of the generated tokens that drifted, by position in the conversation."
    drawn = (
        _drift_chart("turns", "Drift by turn", by_turn, "turn", names, measures.by_turn),
        _drift_chart("positions", "Drift by token position", along, "from token", edges, measures.by_position),
        _logprob_chart(measures),
        _role_chart(measures),
    )
    return [chart for chart in drawn if chart is not None]


def _drift_chart(
    name: str, title: str, caption: str, of: str, names: Sequence[str], counts: Counts
) -> Chart | None:
    """The share of drifted tokens in each bin, stacked by severity; empty bins at the end are left out."""
    filled = np.flatnonzero(counts.sum(axis=1))
    if not len(filled):
        return None
    names, counts = names[: filled[-1] + 1], counts[: filled[-1] + 1]
    totals = counts.sum(axis=1)
    drifted = counts[:, [STATES.index(state) for state in _DRIFT]].any()
    if not drifted:
        caption = f"None of the {int(totals.sum()):,} generated tokens drifted."
    series = []
    for state in _DRIFT:
        column = counts[:, STATES.index(state)]
        points = [
            _share_bar(value, total, f"{of} {label}", f"tokens {_WORDS[state]}")
            for label, value, total in zip(names, column.tolist(), totals.tolist(), strict=True)
        ]
        series.append(points)
    rows = [
        (
            label,
            f"{total:,}",
            *(f"{row[STATES.index(state)]:,}" for state in _DRIFT),
            share(total - row[0], total),
        )
        for label, row, total in zip(names, counts.tolist(), totals.tolist(), strict=True)
    ]
    head = (of, "generated tokens", *(_WORDS[state] for state in _DRIFT), "share")
    legend = tuple(_WORDS[state] for state in _DRIFT)
    svg = _columns(names, series) if drifted else ""
    return Chart(name, title, caption, "severity", legend, svg, head, tuple(rows))


def _logprob_chart(measures: Measures) -> Chart | None:
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
            _share_bar(value, total, label, f"{word} tokens")
            for label, value in zip(names, column[span].tolist(), strict=True)
        ]
        series.append(points)
    rows = [
        (label, f"{a:,}", share(a, int(drifted.sum())), f"{b:,}", share(b, int(same.sum())))
        for label, a, b in zip(names, drifted[span].tolist(), same[span].tolist(), strict=True)
    ]
    head = ("logprob, nats", "drifted", "share", "not drifted", "share")
    caption = "Share of drifted and other tokens at each sampler logprob. "
    if drifted.sum() and same.sum():
        of_drifted = f"{int(drifted.sum()):,} drifted tokens is {_median_bin(drifted)}"
        caption += f"The median of the {of_drifted}, of the others {_median_bin(same)}."
    unknown = int(measures.without_logprob.sum())
    if unknown:
        caption += f" {unknown:,} tokens without a logprob are left out."
    svg, title = _columns(names, series, stacked=False), "Logprob of drifted and other tokens"
    return Chart("logprobs", title, caption, "pair", ("drifted", "not drifted"), svg, head, tuple(rows))


def draw_mismatch_charts(number: int, mismatch: LogMismatch) -> list[Chart]:
    """A scatter plot of single tokens and a histogram of differences, of a trainer's column."""
    charts = []
    if mismatch.points:
        caption = (
            f"{len(mismatch.points):,} tokens of the log, by the trainer's logprob (across) and by how much "
            "higher the sampler's is (up)."
        )
        legend = ("numerics", "another cause")
        counts = [sum(point[2] is is_numerics for point in mismatch.points) for is_numerics in (True, False)]
        rows = tuple((word, f"{count:,}") for word, count in zip(legend, counts, strict=True))
        # Tokens by the trainer's logprob (x) and by how much higher the sampler's is (y), clamped to the edges.
        least, far = -8.0, 1.0
        words = "".join(f'<text x="100%" y="{_y_of(value, far) + 4:g}">{value:+g}</text>' for value in (-far, far))
        zero = _y_of(0.0, far)
        parts = [f'<line class="base line" x1="0" x2="100%" y1="{zero:g}" y2="{zero:g}"/>']
        parts += [
            f'<text x="{100 - 100 * value / least:g}%" y="{_LOW}">{value:g}</text>' for value in (-6.0, -4.0, -2.0)
        ]
        for color, is_numerics in enumerate((True, False)):
            dots = "".join(
                f'<circle cx="{100 - 100 * max(trainer, least) / least:.1f}%" '
                f'cy="{_y_of(min(max(higher, -far), far), far):.0f}" r="2"/>'
                for trainer, higher, of_numerics in mismatch.points
                if of_numerics is is_numerics
            )
            parts.append(f'<g class="dots color-{color}">{dots}</g>')
        axis, plot = _svg(_LOW + 8, [words]), _svg(_LOW + 8, parts)
        svg = f'<div class="axis">{axis}</div><div class="plot">{plot}</div>'
        name, title = f"mismatch-{number}", "Single tokens"
        charts.append(Chart(name, title, caption, "scatter", legend, svg, ("tokens of", "drawn"), rows))
    total = sum(mismatch.histogram)
    if total:
        names = ["0+", *(f"{edge:g}+" for edge in EDGES)]
        points = [
            _share_bar(count, total, name, "tokens") for name, count in zip(names, mismatch.histogram, strict=True)
        ]
        caption = (
            "Share of the tokens by the size of the difference, in logits; numerics stays below about 0.4 in "
            "bfloat16 and 0.0001 in float32. Only rollouts beyond the bounds."
        )
        counted = zip(names, mismatch.histogram, strict=True)
        table = tuple((name, f"{count:,}", share(count, total)) for name, count in counted)
        name, title, head = f"histogram-{number}", "How far tokens are apart", ("from", "tokens", "share")
        charts.append(Chart(name, title, caption, "pair", (), _columns(names, [points]), head, table))
    return charts


def _y_of(value: float, far: float) -> float:
    return (_TOP + _BASE) / 2 - value / far * (_BASE - _TOP) / 2


def _median_bin(counts: Counts) -> str:
    """The logprob bin that holds the median, in words."""
    at = int(np.searchsorted(counts.cumsum(), counts.sum() / 2))
    if at == 0:
        return f"below {LOGPROB_EDGES[1]:g}"
    if at + 1 == len(LOGPROB_EDGES):
        return f"above {LOGPROB_EDGES[-1]:g}"
    return f"between {LOGPROB_EDGES[at]:g} and {LOGPROB_EDGES[at + 1]:g}"


def _role_chart(measures: Measures) -> Chart | None:
    counts = {visible(role): pair for role, pair in measures.roles.items() if sum(pair)}
    if not counts or (len(counts) == 1 and not next(iter(counts.values()))[1]):
        return None  # a log of calls alone: everything is generated
    ranked = sorted(counts.items(), key=lambda item: (-sum(item[1]), item[0]))
    if len(ranked) > _ROLES:
        rest = [pair for _, pair in ranked[_ROLES:]]
        others = (f"{len(rest)} other roles", (sum(a for a, _ in rest), sum(b for _, b in rest)))
        ranked = [*ranked[:_ROLES], others]
    series = [
        [_share_bar(pair[at], sum(pair), role, f"tokens {word}") for role, pair in ranked]
        for at, word in enumerate(("trained", "not trained"))
    ]
    # A name and a bar on each line.
    names = [elided(role, 18) for role, _ in ranked]
    drawn = zip(names, horizontal_bars(series), strict=True)
    svg = "".join(f'<span class="name">{escape(name)}</span><div class="plot">{bar}</div>' for name, bar in drawn)
    rows = [(role, f"{a:,}", f"{b:,}", share(a, a + b)) for role, (a, b) in ranked]
    head = ("role", "trained", "not trained", "share trained")
    caption = "Share of the tokens of each role that the loss mask trains. Only sampled tokens should be trained."
    legend = ("trained", "not trained")
    return Chart("roles", "Loss mask by role", caption, "pair", legend, svg, head, tuple(rows), horizontal=True)


def _share_bar(part: int, whole: int, of: str, what: str) -> Bar | None:
    """The bar of a share, labelled `turn 2: 3 of 120 tokens drifted (2.5 %)`; None if `whole` is 0."""
    words = f"{of}: {part:,} of {whole:,} {what} ({share(part, whole)})"
    return Bar(part / whole, words) if whole else None


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: its share, from 0 to 1, and its tooltip."""

    value: float
    label: str


Series = Sequence[Sequence[Bar | None]]
"""For each series its bars, one per name; None if the total is 0."""


def _columns(names: Sequence[str], series: Series, *, stacked: bool = True) -> str:
    """The markup of vertical bars over `names`: an axis at the left, and a drawing as wide as its place."""
    heights = [[bar.value if bar else 0.0 for bar in column] for column in zip(*series, strict=True)]
    top = max(sum(column) if stacked else max(column) for column in heights)
    steps = nice_steps(top)
    places = [(_BASE + 4 - _height(step, steps[-1]), round(100 * step, 6)) for step in steps]
    words = [f'<text x="100%" y="{y}">{share:g} %</text>' for y, share in places]
    lines = []
    for step in steps:
        y = _BASE - _height(step, steps[-1])
        kind = "line" if step else "base line"
        lines.append(f'<line class="{kind}" x1="0" x2="100%" y1="{y}" y2="{y}"/>')
    every, labels = -(-len(names) // _LABELS), []
    for at, name in enumerate(names):
        kind = ' class="minor"' if at % every else ""
        labels.append(f'<text{kind} x="{100 * (at + 0.5) / len(names):.3f}%" y="{_LOW}">{escape(name)}</text>')
    # Each bar in its place; several that do not stack share the width of one.
    place, bars = 100 / len(names), []
    width = place * _FULL / (1 if stacked else len(series))
    below = [0.0] * len(names)
    for number, column in enumerate(series):
        beside = 0 if stacked else number * width
        for at, bar in enumerate(column):
            if bar is not None and bar.value:
                x, height = at * place + place * (1 - _FULL) / 2 + beside, _height(bar.value, steps[-1])
                bars.append(_bar(number, bar, f"{x:.3f}%", _BASE - height - below[at], f"{width:.3f}%", height))
                below[at] += height if stacked else 0
    drawing = _svg(_LOW + 8, [*lines, *bars, *labels])
    return f'<div class="axis">{_svg(_LOW + 8, words)}</div><div class="plot">{drawing}</div>'


def _height(value: float, top: float) -> float:
    return round((_BASE - _TOP) * value / top, 2)


def horizontal_bars(series: Series) -> list[str]:
    """Horizontal stacked bars as wide as the page, one `<svg>` per name."""
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


def nice_steps(top: float) -> list[float]:
    """A few round numbers from 0 to above `top`, for an axis longer than every bar."""
    room = 1.04 * top
    size = 10.0 ** (math.floor(math.log10(room)) - 1) if room > 0 else 1.0
    for step in [factor * size for factor in (1, 2, 2.5, 5, 10, 20, 25, 50)]:
        if step * 5 > room:
            return [number * step for number in range(math.floor(room / step) + 2)]
    return [0.0, 1.0]


HTML = Report(
    "html",
    "one page for a browser: charts, every finding, rollouts token by token",
    write,
    observes=True,
    suffix="html",
)
