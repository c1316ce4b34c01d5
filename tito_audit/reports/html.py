"""The `html` report: one page that needs nothing else, from the verdict down to the single token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TextIO

from tito_audit.record.finding import Result, Severity
from tito_audit.report import Report, ReportOptions
from tito_audit.reports._html.carried import BOUND, ConversionOutcome
from tito_audit.reports._html.facts import facts, rules, skips, verdict
from tito_audit.reports._html.packed import block
from tito_audit.reports._html.views import ViewBlocks
from tito_audit.reports._verdict import Seen
from tito_audit.summary import Summary
from tito_audit.terminal.place import one_tokenizer
from tito_audit.viewer.model import Measures, observed_of

__all__ = ["HTML"]

_NOTICES = 50
_FIXED = 200
"""Findings of a baseline that are gone, as far as they are listed."""
_FILES = 100


def write(results: Iterable[Result], summary: Summary, out: TextIO, options: ReportOptions) -> None:
    """Read all results, then write one page; what it will carry of them waits on disk."""
    from tito_audit.reports._html.charts import charts
    from tito_audit.reports._html.page import page, short_name

    seen, measures = Seen(), None
    with ConversionOutcome(BOUND) as carried, ViewBlocks() as views:
        for result in results:
            seen.add(result)
            for finding in result.findings:
                carried.add(finding)
            observed = observed_of(result)
            if observed is not None:
                measures = measures or Measures()
                measures.add(observed.measures)
                views.add(result)
        before, after = page(
            name=short_name(summary.files),
            files=summary.files[:_FILES],
            summary=summary,
            tokenizer=one_tokenizer(summary) or "",
            verdict=verdict(summary, seen),
            facts=list(facts(summary)),
            counts=[(severity.word, seen.findings[severity]) for severity in sorted(Severity, reverse=True)],
            rules=rules(summary, options),
            skips=skips(summary),
            notices=summary.notices[:_NOTICES],
            fixed=summary.gate.fixed[:_FIXED] if summary.gate is not None else (),
            gone=summary.gate.gone if summary.gate is not None else 0,
            observed=measures is not None,
            charts=charts(measures) if measures is not None else [],
            findings=seen.findings.total(),
            kept=carried.number,
            views=len(views.index),
            with_findings=seen.with_findings,
        )
        out.write(before)
        for chunk in carried.chunks():
            out.write(block("findings", chunk))
        out.write(block("views", views.index))
        views.copy(out)
        out.write(after)


HTML = Report(
    "html",
    "one page for a browser: charts, every finding, rollouts token by token",
    write,
    observes=True,
    suffix="html",
)
