"""The page of `rescore`: the verdict, recorded against model, and the price of drift by cause."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tito_audit.record.rollout import Place
from tito_audit.rescore.model import Price
from tito_audit.rescore.summary import RescoreSummary
from tito_audit.rescore.tables import (
    AFTER_HEADS,
    AFTER_LEGEND,
    AGREEMENT_HEADS,
    AGREEMENT_LEGEND,
    DRIFTED_HEADS,
    DRIFTED_LEGEND,
    Row,
    after_rows,
    agreement_rows,
    around,
    drifted_rows,
)
from tito_audit.rescore.write import Written
from tito_audit.terminal.cut import elided
from tito_audit.terminal.escape import visible
from tito_audit.terminal.words import decimal, many, percent, small

_PIECES = 36
_REASONS = 8
_FINDINGS = 3
_TURNS = 12
Pieces = Callable[[tuple[int, ...]], str]
"""Ids as text."""


def page_parts(
    summary: RescoreSummary, worst: int, pieces: Pieces, written: Written | None = None
) -> Iterator[RenderableType]:
    """The parts of the page, in order."""
    yield _head(summary)
    yield Text(verdict(summary), style="bold red" if summary.failed else "bold green")
    yield from _agreement(summary)
    if summary.causes:
        yield from _prices(summary)
    shown = [one for one in summary.most_expensive(worst) if math.isfinite(one[1].difference)]
    if shown:
        yield from _title("The most expensive findings")
        yield from _worst(shown, pieces)
    yield from _lists(summary, filled=written is not None)
    if written is not None:
        yield from _title("Written")
        yield from (Text(f"  {line}") for line in _files(written))


def verdict(summary: RescoreSummary) -> str:
    """One sentence: whether the log's logprobs are the model's."""
    whole = summary.agreement
    if whole is None:
        said = f"No recorded logprob to compare; {many(summary.scored_tokens, 'token')} scored."
    elif summary.disagreeing or whole.disagrees:
        said = (
            f"Recorded logprobs disagree with the model: they differ by {small(whole.size)} on average "
            f"(tolerance {decimal(summary.tolerance, 6)}); {summary.disagreeing:,} of "
            f"{many(summary.rollouts, 'rollout')} above it."
        )
    else:
        said = (
            f"Recorded logprobs agree with the model: they differ by {small(whole.size)} on average "
            f"(tolerance {decimal(summary.tolerance, 6)})."
        )
    return said + (" Not everything could be scored." if summary.unscored else "")


def _head(summary: RescoreSummary) -> Text:
    model = f", model {summary.model}" if summary.model else ""
    said = f"{many(summary.rollouts, 'rollout')} · {many(summary.scored_tokens, 'sampled token')} scored by "
    return Text("tito-audit rescore  ", style="bold").append(visible(f"{said}{summary.provider}{model}"), style="")


def _title(words: str) -> Iterator[Text]:
    yield Text("")
    yield Text(words, style="bold")


def _table(heads: Row, rows: Sequence[Row]) -> Table:
    """A table of names and numbers; where it is too wide only names wrap."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False, collapse_padding=True)
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left", no_wrap=number > 0)
    for row in rows:
        table.add_row(*row)
    return table


def _agreement(summary: RescoreSummary) -> Iterator[RenderableType]:
    rows = list(agreement_rows(summary, _TURNS))
    if rows:
        yield from _title("Recorded logprobs against the model's")
        yield from _with_legend(_table(AGREEMENT_HEADS, rows), AGREEMENT_LEGEND)
    for words, number in summary.explanations.most_common():
        yield Text(f"{many(number, 'rollout')}: {visible(words)}.")


def _prices(summary: RescoreSummary) -> Iterator[RenderableType]:
    """What drift costs, by cause: the drifted tokens, then the sampled tokens after them."""
    yield from _title("What drift costs, in nats")
    yield from _with_legend(_table(DRIFTED_HEADS, list(drifted_rows(summary))), DRIFTED_LEGEND)
    after = list(after_rows(summary))
    if after:
        yield from _title("What drift does to the sampled tokens after it")
        yield from _with_legend(_table(AFTER_HEADS, after), AFTER_LEGEND)
    yield from around(summary)


def _with_legend(table: Table, words: str) -> Iterator[RenderableType]:
    yield from (table, Text(""), words)


def _worst(shown: list[tuple[Place, Price]], pieces: Pieces) -> Iterator[Text]:
    """Two lines for each finding: where it is and its price, then the tokens of both sides."""
    for place, price in shown:
        hit, first = price.finding.hit, price.segments[0]
        turn = "" if hit.turn is None else f" turn {hit.turn}"
        share = f", {percent(price.share)} of the change there" if math.isfinite(price.share) else ""
        yield Text(visible(f"  {price.finding.code} {place}{turn} {hit.where} {hit.start}:{hit.end}"))
        more = f" and {len(price.segments) - 1:,} more" if len(price.segments) > 1 else ""
        sides = [elided(visible(pieces(ids)), _PIECES) for ids in (first.sampled_ids, first.other_ids)]
        numbers = f"{price.sampled:.2f} → {price.other:.2f} ({price.difference:+.2f}{share})"
        yield Text(f"    {sides[0]} → {sides[1]}{more}: {numbers}")


def _files(written: Written) -> Iterator[str]:
    for log, target in written.files:
        yield visible(f"{target}, from {log} (unchanged)")
    yield f"logprobs written in {many(written.changed, 'row')} of {written.rows:,}, audited again"
    for because, number in written.refused.most_common():
        yield visible(f"{many(number, 'row')} as they were: {because}")


def _lists(summary: RescoreSummary, *, filled: bool) -> Iterator[RenderableType]:
    if summary.findings:
        yield from _title(f"By the model's values: {many(len(summary.findings), 'finding')}")
        for finding in summary.findings[:_FINDINGS]:
            yield Text(f"  {finding.code} {visible(str(finding.place))}: {visible(finding.hit.message)}")
        if len(summary.findings) > _FINDINGS:
            yield Text(f"  … and {len(summary.findings) - _FINDINGS:,} more; --report json lists all")
    lines = [
        *(
            f"{number:,} not scored: {visible(because)} (first: {visible(str(place))})"
            for because, (number, place) in list(summary.unscored.items())[:_REASONS]
        ),
        *(f"{many(number, 'finding')} without a price: {because}" for because, number in summary.unpriced.items()),
        *(visible(notice) for notice in summary.scan.notices),
    ]
    if summary.missing and not filled:
        lines.append(
            f"{many(summary.missing, 'sampled token')} without a recorded logprob: -o OUT writes the model's"
        )
    if lines:
        yield from _title("Notes")
        yield from (Text(f"  {line}") for line in lines)
