"""The counts of a rescoring, their tables for the terminal, and the HTML page: one file without scripts."""

from __future__ import annotations

import base64
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from string import Template
from typing import NamedTuple

import numpy as np

from tito_audit.record.arrays import Logprobs
from tito_audit.record.finding import Finding
from tito_audit.record.mismatch import LogMismatch, MismatchCause
from tito_audit.record.rollout import Place
from tito_audit.rescore.journal import RequestCounts
from tito_audit.rescore.model import EDGES, NEAR, TOLERANCE, Agreement, Price, RescoredRollout, Sums
from tito_audit.summary import Summary
from tito_audit.terminal.escape import visible
from tito_audit.terminal.mismatch import mismatch_rows
from tito_audit.terminal.words import many, percent, unsigned

LOWEST = -20
"""The lowest logprob of the plot; lower ones are drawn there."""
BINS = 40
WORST = 20
"""How many prices are kept in full."""


@dataclass(slots=True)
class CausePrice:
    """What all findings of one code and cause cost together."""

    code: str
    cause: str
    findings: int = 0
    segments: int = 0
    """How many spans of sampled tokens drifted."""
    sampled_tokens: int = 0
    other_tokens: int = 0
    sampled: float = 0.0
    """The summed logprob of what was sampled."""
    other: float = 0.0
    likelier: int = 0
    """How many segments have likelier other tokens."""
    lowest: float = 0.0
    """The lowest summed logprob of the other tokens of a segment."""
    behind: Sums = field(default_factory=Sums)

    @property
    def title(self) -> str:
        return visible(f"{self.code} {self.cause}".rstrip())

    def add(self, price: Price) -> None:
        self.findings += 1
        self.behind += price.behind
        for segment in price.segments:
            if math.isfinite(segment.difference):
                self.segments += 1
                self.sampled_tokens += len(segment.sampled_ids)
                self.other_tokens += len(segment.other_ids)
                self.sampled += segment.sampled
                self.other += segment.other
                self.likelier += bool(segment.other_ids) and segment.other > segment.sampled
                self.lowest = min(self.lowest, segment.other)


@dataclass(slots=True)
class RescoreSummary:
    """The counts of a run; complete after its last rollout."""

    provider: str
    model: str | None
    tolerance: float = TOLERANCE
    scan: Summary = field(default_factory=Summary)
    """Files, tokenizer and notices."""
    rollouts: int = 0
    scored: int = 0
    """How many rollouts have a token that was scored."""
    scored_tokens: int = 0
    missing: int = 0
    """How many scored tokens have no recorded logprob."""
    unreadable: int = 0
    disagreeing: int = 0
    """How many rollouts disagree with the model."""
    sums: Sums = field(default_factory=Sums)
    by_turn: dict[int, Sums] = field(default_factory=dict)
    plot: Counter[tuple[int, int]] = field(default_factory=Counter)
    """How many tokens are in each bin of recorded and model's logprob; bins count from `LOWEST` up."""
    causes: dict[tuple[str, str], CausePrice] = field(default_factory=dict)
    worst: list[tuple[Place, Price]] = field(default_factory=list)
    unpriced: Counter[str] = field(default_factory=Counter)
    near: list[Sums] = field(default_factory=lambda: [Sums() for _ in NEAR])
    changes: list[float] = field(default_factory=list)
    """How the summed logprob of each turn and row with drift changes."""
    unscored: dict[str, tuple[int, Place]] = field(default_factory=dict)
    """How many calls and rows could not be scored, and the first of them, by reason."""
    findings: list[Finding] = field(default_factory=list)
    """LPR507 and LPR509, judged by the model's logprobs."""
    mismatch: LogMismatch | None = None
    """Why the recorded logprobs differ from the model's; None if none were compared."""
    explanations: Counter[str] = field(default_factory=Counter)
    weight_versions: Counter[str] = field(default_factory=Counter)
    counts: RequestCounts = field(default_factory=RequestCounts)
    seconds: float = 0.0

    @property
    def agreement(self) -> Agreement | None:
        """How all compared tokens agree; None if there are none."""
        return self.sums.agreement(self.tolerance)

    @property
    def sorted_causes(self) -> list[CausePrice]:
        """The causes of each code together, the most frequent first."""
        return sorted(self.causes.values(), key=lambda cause: (cause.code, -cause.findings))

    @property
    def failed(self) -> bool:
        """Whether recorded logprobs disagree with the model's, or something could not be read or scored."""
        whole = self.agreement
        disagrees = self.disagreeing > 0 or (whole is not None and whole.disagrees)
        return disagrees or bool(self.unscored) or self.unreadable > 0

    def add(self, result: RescoredRollout) -> None:
        if result.error:
            self.unreadable += 1
            self._count_unscored(f"the row cannot be read: {result.error}", result.place)
            return
        self.rollouts += 1
        self.scored += result.scored_tokens > 0
        self.scored_tokens += result.scored_tokens
        self.missing += result.missing
        self.disagreeing += result.agreement is not None and result.agreement.disagrees
        for sequence in result.judged:
            undrifted = ~sequence.drifted
            differences = sequence.differences
            self.sums += Sums.of(differences)
            for turn in np.unique(sequence.turns[undrifted]).tolist():
                sums = Sums.of(differences[sequence.turns[undrifted] == turn])
                self.by_turn[turn] = self.by_turn.get(turn, Sums()) + sums
            squares = zip(_bins(sequence.recorded[undrifted]), _bins(sequence.model[undrifted]), strict=True)
            self.plot.update(squares)
        for price in result.prices:
            key = (price.finding.code, price.finding.hit.cause)
            self.causes.setdefault(key, CausePrice(*key)).add(price)
            self.worst.append((result.place, price))
        if len(self.worst) > 4 * WORST:
            self.worst = self.most_expensive(WORST)
        self.unpriced.update(result.unpriced)
        self.near = [a + b for a, b in zip(self.near, result.near, strict=True)]
        self.changes += [swap.other - swap.sampled for swap in result.changed]
        for missing in result.unscored:
            self._count_unscored(missing.because, result.place)
        self.findings += result.findings
        for mismatch in result.mismatches:
            self.mismatch = self.mismatch or LogMismatch(mismatch.sampler)
            self.mismatch.add(mismatch, result.place)
        if result.explanation:
            self.explanations[result.explanation] += 1
        self.weight_versions.update(result.weight_versions)

    def most_expensive(self, most: int) -> list[tuple[Place, Price]]:
        """The `most` findings that change the summed logprob most, the worst first."""

        def size(entry: tuple[Place, Price]) -> float:
            difference = entry[1].difference
            return abs(difference) if math.isfinite(difference) else 0.0

        return sorted(self.worst, key=size, reverse=True)[:most]

    def _count_unscored(self, because: str, place: Place) -> None:
        number, first = self.unscored.get(because, (0, place))
        self.unscored[because] = (number + 1, first)


def _bins(values: Logprobs) -> list[int]:
    width = -LOWEST / BINS
    bins: list[int] = np.clip((values - LOWEST) / width, 0, BINS - 1).astype(int).tolist()
    return bins


# The counts as text cells of tables, for the terminal and the HTML page.


_NEAR = ("1st", "5th", "17th", "65th")
"""The ordinals of `NEAR`, counted from 1."""
Row = tuple[str, ...]


class CountTable(NamedTuple):
    """Counts as text: the heads of the columns, the rows, and what the heads mean."""

    heads: Row
    rows: Sequence[Row]
    legend: str = ""


def agreement_table(summary: RescoreSummary, turns: int) -> CountTable:
    """How recorded logprobs agree with the model's: in all, in each of the first `turns` turns, and after them."""
    by_turn = sorted(summary.by_turn.items())
    named = [("no turn" if turn < 0 else f"turn {turn}", sums) for turn, sums in by_turn[:turns]]
    later = [sums for _, sums in by_turn[turns:]]
    if later:
        named.append((f"later {len(later)}", sum(later, Sums())))
    rows: list[Row] = []
    for name, sums in [("all", summary.sums), *(named if len(by_turn) > 1 else ())]:
        agreement = sums.agreement(summary.tolerance)
        if agreement is not None:
            estimates = (unsigned(f"{value:.4f}") for value in (agreement.k1, agreement.k3))
            sizes = f"{agreement.size:.4f}", f"{agreement.largest:.3f}"
            rows.append((name, f"{agreement.tokens:,}", *sizes, *estimates, *map(percent, agreement.above)))
    edges = tuple(f"> {edge:g}" for edge in EDGES)
    legend = (
        "mean, max: of the absolute difference; k1, k3: estimates of the KL divergence; "
        f"{', '.join(edges)}: tokens that differ by more."
    )
    return CountTable(("", "tokens", "mean", "max", "k1", "k3", *edges), rows, legend)


def mismatch_table(summary: RescoreSummary) -> CountTable:
    """Why the recorded logprobs differ from the model's, which stands where a trainer's would."""
    fine, rows = {MismatchCause.NUMERICS, MismatchCause.COPIED}, []
    if summary.mismatch is not None and not fine.issuperset(summary.mismatch.shares):
        for part, cause, estimate, tokens, worst in mismatch_rows(summary.mismatch):
            estimate = estimate.replace("the trainer's", "the model's")
            words = f"{cause} ({estimate})" if estimate else cause
            rows.append((visible(words), percent(part), f"{tokens:,}", worst))
    return CountTable(("cause", "share", "tokens", "the worst"), rows)


def drifted_table(summary: RescoreSummary) -> CountTable:
    """How the logprobs of the drifted tokens change, by rule and cause."""
    rows = []
    for cause in summary.sorted_causes:
        cells: Row = ("–",) * 5
        if cause.segments:
            pairs = (cause.sampled, cause.sampled_tokens), (cause.other, cause.other_tokens)
            means = (f"{total / tokens:.2f}" if tokens else "–" for total, tokens in pairs)
            change = f"{(cause.other - cause.sampled) / cause.segments:+.2f}"
            tokens = f"{cause.sampled_tokens:,} → {cause.other_tokens:,}"
            cells = tokens, *means, change, percent(cause.likelier / cause.segments)
        rows.append((cause.title, f"{cause.findings:,}", *cells))
    return CountTable(
        ("rule, cause", "findings", "tokens", "sampled", "instead", "change", "likelier"),
        rows,
        "sampled, instead: mean logprob per token of what was sampled, and of what replaced it; change: of the "
        "summed logprob, per span of drifted tokens; likelier: spans whose replacement is more likely.",
    )


def after_table(summary: RescoreSummary) -> CountTable:
    """How the logprobs of equal sampled tokens after the drift change, by rule and cause."""
    afters = [(cause.title, cause.behind) for cause in summary.sorted_causes if cause.behind.tokens]
    rows = [(name, f"{n.tokens:,}", f"{n.size / n.tokens:.3f}", f"{n.largest:.2f}") for name, n in afters]
    legend = "The same tokens in another context, up to the next drift; changes are absolute."
    return CountTable(("rule, cause", "tokens", "mean change", "largest"), rows, legend)


def reach_lines(summary: RescoreSummary) -> Iterator[str]:
    """Sentences on how far the change reaches beyond the drift, and how whole turns change."""
    near = [
        f"{reach.size / reach.tokens:.3f} from the {first} token on"
        for first, reach in zip(_NEAR, summary.near, strict=True)
        if reach.tokens
    ]
    if near:
        yield f"By distance from the drift: {', '.join(near)}."
    if summary.changes:
        mean = sum(summary.changes) / len(summary.changes)
        yield (
            f"The summed logprob of a whole turn or row with drift ({len(summary.changes):,}) changes by "
            f"{mean:+.2f} on average, from {min(summary.changes):+.1f} to {max(summary.changes):+.1f}."
        )


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

    def add(name: str, title: str, table: CountTable, figure: str = "", after: Iterable[str] = ()) -> None:
        """Add a section with a figure, a table, its legend and what comes after, unless the table has no rows."""
        if not table.rows:
            return
        head = "".join(f'<th scope="col">{_escape(name)}</th>' for name in table.heads)
        rows = ("".join(f"<td>{_escape(cell)}</td>" for cell in row) for row in table.rows)
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        whole = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        lines = "".join(f"<p class='quiet'>{_escape(line)}</p>" for line in filter(None, (table.legend, *after)))
        parts.append(_section(name, title, figure + whole + lines))

    by_turn = agreement_table(summary, len(summary.by_turn))
    add("recorded", "Recorded against rescored logprobs", by_turn, _density_plot(summary))
    add("mismatch", "Why they differ: shares of the difference", mismatch_table(summary))
    add("price", "What drift costs, in nats", drifted_table(summary), _cause_bars(summary))
    title = "What drift does to the sampled tokens after it"
    add("after", title, after_table(summary), after=reach_lines(summary))
    prices = [
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
    add("worst", "The most expensive findings", CountTable(heads, prices))
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
