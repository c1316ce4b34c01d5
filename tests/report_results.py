"""One fixed set of made-up results, everything a report has to show once; and what a report writes of them."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

from tests.tables import stored
from tito_audit.record.finding import Finding, Hit, Result, Severity, Side, Skip, Where
from tito_audit.record.rollout import Place, Rollout
from tito_audit.report import Report, ReportOptions, feed_results
from tito_audit.run.headlines import with_headline
from tito_audit.summary import CoverageCount, Fixed, Gate, RateCount, SampleCount, Summary

TITLES: dict[str, str] = stored(__file__, "TITLES")
DOCS = {code: f"{title}.\n\n## What it finds\nMore of it,\nin `words`." for code, title in TITLES.items()}


def gate_of(rates: Any, required: Any, min_audited: Any, fixed: Any, because: Any, **rest: Any) -> Gate:
    """The gate that is written down with the other data."""
    firsts = [Place("logs/run.jsonl", count.pop("first")) if "first" in count else None for count in required]
    return Gate(
        because=tuple(because),
        rates=tuple(RateCount(**rate) for rate in rates),
        required=tuple(CoverageCount(**count, first=first) for count, first in zip(required, firsts, strict=True)),
        min_audited=CoverageCount(**min_audited),
        fixed=tuple(Fixed(**finding) for finding in fixed),
        **rest,
    )


GATE = gate_of(**deepcopy(stored(__file__, "GATE")))
SAMPLED = SampleCount(share=0.25, rows=9, of=36)
ODD = "logs/ép`i|s @nobody [x](#1).parquet"
TRAPS = (
    "</script><script>alert(1)</script> ]]> <!-- --> <img src=x onerror=alert(2)>",
    "![a](http://evil.example/a.png) [b](https://evil.example) www.evil.example me@evil.example",
    "@nobody #1 GH-1 someone/thing#2 | pipe | ``` `tick` ```` **bold** </details> &lt;b&gt; \\",
    "\n::error::forged\r\n::set-output name=a::b\n::stop-commands::z ##[error]c ##vso[task.x]d %0A::debug::e",
    "\0 \x08 \x1b[2J \x1b]0;title\x07 \x9b \u202eturned\u202c \u2028 \ufffe \ud83d \udcff \U000e0041 {0} %s",
)
"""What a model may say to make a report do something."""


def finding(code: str, severity: Severity, place: Place, **hit: object) -> Finding:
    fields: dict[str, object] = {"where": Where.COMPLETION, "start": 0, "end": 0, "message": "", **hit}
    return with_headline(Finding(code, severity, place, Hit(**fields)))  # type: ignore[arg-type]


def merge(place: Place, severity: Severity, start: int = 12) -> Finding:
    return written_down("MERGE", severity, place, start=start, end=start + 2)


def tool_call(place: Place) -> Finding:
    return written_down("TOOL_CALL", Severity.WARNING, place)


def written_down(name: str, severity: Severity, place: Place, **hit: object) -> Finding:
    """The finding that stands under this name in the data."""
    values: dict[str, Any] = {**stored(__file__, name), **hit}
    sides = {side: Side(*map(tuple, values.pop(side))) for side in ("recorded", "canonical")}
    return finding(values.pop("code"), severity, place, **sides, **values)


def result(
    row: int, *findings: Finding, skips: tuple[Skip, ...] = (), tokens: int = 120, file: str = "logs/run.jsonl"
) -> Result:
    place = Place(file, row)
    counts = {"turns": 2, "tokens": tokens, "generated_tokens": tokens // 3}
    return Result(place, Rollout(place, "slime"), findings, skips, counts)


def results() -> Iterator[Result]:
    """One fixed set of made-up results: everything a report has to show once."""
    no_logprobs = tuple(Skip(f"LPR50{digit}", "no logprobs") for digit in range(1, 7))
    skips = (*no_logprobs, Skip("TPL203", "no messages"))
    places = [Place("logs/run.jsonl", row) for row in range(6)]
    yield result(0, merge(places[0], Severity.ERROR), merge(places[0], Severity.NOTE, 40))
    yield result(1, tool_call(places[1]), skips=no_logprobs)
    yield result(2, skips=skips)
    unreadable = "The line is no JSON: it ends inside a string at byte 812."
    bad = finding("REC001", Severity.ERROR, places[3], where=Where.ROW, message=unreadable, cause="no JSON")
    yield Result(places[3], None, (bad,))
    sentinel = finding(
        "LPR505",
        Severity.ERROR,
        places[4],
        where=Where.ROW,
        start=100,
        end=140,
        cause="0.0",
        message="40 trained tokens carry the logprob 0.0, which stands for 'none' in this log. " * 2,
        recorded=Side(tuple(range(1000, 1040)), tuple(f" word{n}" for n in range(40))),
    )
    yield result(4, sentinel, merge(places[4], Severity.ERROR))
    yield result(5, hostile(places[5]), tokens=0)
    in_baseline = replace(tool_call(Place(ODD, 6, 2)), known=True)
    yield result(6, in_baseline, *traps(Place(ODD, 6, 2)), file=ODD)
    yield result(7, replace(merge(Place(ODD, 7), Severity.ERROR), known=True), file=ODD)


def hostile(place: Place) -> Finding:
    """A finding whose text tries to act on the terminal."""
    return finding(
        "TOK101",
        Severity.NOTE,
        place,
        turn=0,
        end=3,
        cause="[bold red]merge[/]",
        message="[red]not red[/red] \x1b[31mnot red\x1b[0m \x07 \u202egnihton\u202c line\nforged \ud83d",
        recorded=Side((1, 2, 3), ("\x1b]0;owned\x07", " \n", "\u202e[bold]")),
        canonical=Side((4,), ("\x1b]0;owned\x07 \n\u202e[bold]",)),
    )


def traps(place: Place) -> Iterator[Finding]:
    """Findings whose every text tries to act on what shows it."""
    for number, trap in enumerate(TRAPS):
        yield finding(
            "TPL203",
            Severity.WARNING,
            place,
            turn=0,
            start=number,
            end=number + 2,
            cause=trap,
            message=trap,
            recorded=Side((1, 2), (trap, trap[::-1])),
            canonical=Side((3,), (trap,)),
        )


def tally(of: Iterable[Result], summary: Summary, gate: Gate | None) -> Iterator[Result]:
    for row_result in of:
        summary.add(row_result)
        yield row_result
    summary.gate = gate


def written(
    report: Report,
    of: Iterable[Result],
    *,
    gate: Gate | None = None,
    sampled: SampleCount | None = None,
    files: tuple[str, ...] = ("logs/run.jsonl",),
    notices: tuple[str, ...] = ("no chat template: the TPL rules were skipped",),
    **options: Any,
) -> str:
    """What a report writes of results, within a run that is the same each time."""
    summary = Summary(files=list(files), tokenizer="toy_bpe", encoder="tokenizers", seconds=2.0, sampled=sampled)
    summary.notices += notices
    out = io.StringIO()
    feed_results(
        tally(of, summary, gate), report.write(summary, out, ReportOptions(**{"titles": TITLES, **options}))
    )
    return out.getvalue()


def golden(report: Report) -> str:
    """What a report writes of the fixed results: all of them, through a gate that failed."""
    return written(
        report,
        results(),
        gate=GATE,
        sampled=SAMPLED,
        files=("logs/run.jsonl", ODD),
        notices=("no chat template: the TPL rules were skipped", TRAPS[2]),
        notes=True,
        not_checked=True,
        docs=DOCS,
        ran=lambda file: TITLES,
        fails=lambda finding: finding.severity is Severity.ERROR,
    )
