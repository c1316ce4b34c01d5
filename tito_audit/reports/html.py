"""The `html` report: one self-contained page, from the verdict down to single tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from typing import TextIO

from tito_audit.record.finding import Result, Severity
from tito_audit.report import Report, ReportOptions
from tito_audit.reports._html.overview import facts, headlines, rules, skips, verdict
from tito_audit.reports._html.page import block
from tito_audit.reports._html.page_findings import BOUND, PageFindings
from tito_audit.reports._html.views import ViewBlocks
from tito_audit.reports._verdict import LINES
from tito_audit.reports._worst import Curable, next_steps
from tito_audit.summary import Summary
from tito_audit.terminal.place import one_tokenizer, with_reading
from tito_audit.viewer.model import Measures, observed_of

_NOTICES = 50
_FIXED = 200
"""Maximum fixed baseline findings listed."""
_FILES = 100


def write(results: Iterable[Result], summary: Summary, out: TextIO, options: ReportOptions) -> None:
    """Read all results, then write one page; its findings and views wait on disk."""
    from tito_audit.reports._html.charts import charts
    from tito_audit.reports._html.page import page, short_name

    seen: Counter[Severity] = Counter()
    curable, with_findings, measures = Curable(), 0, None
    with closing(PageFindings(BOUND)) as page_findings, closing(ViewBlocks()) as views:
        for result in results:
            seen.update(finding.severity for finding in result.findings)
            with_findings += bool(result.findings) and not result.of_log
            curable.add(result)
            page_findings.add(result.findings)
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
            joining=with_reading(summary),
            verdict=verdict(summary),
            steps=list(next_steps(curable.first, curable, summary)),
            headlines=headlines(summary),
            causes=len(summary.ranked_headlines()),
            first_headlines=LINES,
            facts=list(facts(summary)),
            counts=[
                (severity.word, sum(count.new[severity] for count in summary.findings.values()))
                for severity in sorted(Severity, reverse=True)
            ],
            rules=rules(summary, options),
            skips=skips(summary),
            notices=summary.notices[:_NOTICES],
            fixed=summary.gate.fixed[:_FIXED] if summary.gate is not None else (),
            gone=summary.gate.gone if summary.gate is not None else 0,
            observed=measures is not None,
            charts=charts(measures) if measures is not None else [],
            findings=seen.total(),
            kept=page_findings.number,
            views=len(views.index),
            with_findings=with_findings,
        )
        out.write(before)
        for chunk in page_findings.chunks():
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
