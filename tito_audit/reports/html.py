"""The `html` report: one self-contained page, from the verdict down to single tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Literal, TextIO

from tito_audit.record.finding import Severity
from tito_audit.record.mismatch import ADVICE, MismatchCause
from tito_audit.report import Report, ReportOptions, ResultSink
from tito_audit.reports._html.page import page_name, render_page
from tito_audit.reports._html.page_findings import PageFindings, headline_label
from tito_audit.reports._html.views import Site as Site
from tito_audit.reports._html.views import ViewBlocks
from tito_audit.summary import Summary
from tito_audit.terminal import verdict as _verdict
from tito_audit.terminal.mismatch import mismatch_rows
from tito_audit.terminal.place import reading_flags, single_tokenizer
from tito_audit.terminal.verdict import MAX_CAUSES, skips_by_reason
from tito_audit.terminal.words import many, percent, share
from tito_audit.terminal.worst import NewFindings, next_steps
from tito_audit.viewer.model import Measures, observed_of

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
    from tito_audit.reports._html.charts import draw_mismatch_charts

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
    from tito_audit.reports._html.charts import draw_charts

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
                views.add(result)
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


HTML = Report(
    "html",
    "one page for a browser: charts, every finding, rollouts token by token",
    write,
    observes=True,
    suffix="html",
)
