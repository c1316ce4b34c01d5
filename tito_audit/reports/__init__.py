"""Results to text; one file per report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from tito_audit.registry import plugin_of_module, plugins
from tito_audit.report import Report
from tito_audit.unknown import unknown
from tito_audit.voice import spoken

if TYPE_CHECKING:
    from pathlib import Path

    from tito_audit.reports._html.views import Site as Site
    from tito_audit.reports._notebook import NotebookPage as NotebookPage
    from tito_audit.summary import Summary

__all__ = [
    "all_reports",
    "notebook_comparison",
    "notebook_error",
    "notebook_page",
    "report_named",
    "site_in",
    "verdict_line",
    "verdict_lines",
    "verdict_word",
]


@cache
def all_reports() -> tuple[Report, ...]:
    """Every report, by name."""
    return plugins(__name__, Report, lambda report: report.name)


def report_named(name: str) -> Report:
    """The report with that name; SetupError with the known names if there is none."""
    alone = plugin_of_module(__name__, Report, name)  # importing all takes long because of `text`
    if alone is not None and alone.name == name:
        return alone
    for report in all_reports():
        if report.name == name:
            return report
    raise unknown("report", name, [report.name for report in all_reports()], flag="--report")


def verdict_line(summary: Summary) -> str:
    """The verdict on a whole scan in one line: `findings: errors in 2 of 6 rollouts (33 %): …`."""
    from tito_audit.reports._verdict import verdict
    from tito_audit.terminal.escape import visible

    return visible(spoken(verdict(summary).line))


def verdict_word(summary: Summary) -> str:
    """`passed`, `failed`, `nothing audited` or `nothing compared`; without a gate `findings` or `clean`."""
    from tito_audit.reports._verdict import verdict_word

    return verdict_word(summary)


def verdict_lines(summary: Summary) -> list[str]:
    """The verdict on a whole scan, then a line for each of its causes with the rules that found it."""
    from tito_audit.reports._verdict import cause_lines
    from tito_audit.terminal.escape import visible

    lines = [verdict_line(summary)]
    for cause in cause_lines(summary):
        word = "" if cause.severity is None else cause.severity.word
        lines.append(visible("  " + " ".join(filter(None, (word, cause.words, ", ".join(cause.codes))))))
    return lines


def notebook_page(titles: Callable[[], Mapping[str, str]]) -> NotebookPage:
    """A page that collects findings and displays them in a notebook; `titles` gives what each rule finds."""
    from tito_audit.reports._notebook import NotebookPage

    return NotebookPage(titles)


def notebook_comparison(before: Summary, after: Summary) -> str:
    """What a notebook displays of a repair: the scan of the logs as read, and of what was written."""
    from tito_audit.reports._notebook import comparison_html

    return comparison_html(before, after)


def notebook_error(title: str, message: str) -> str:
    """What a notebook displays of a run that did not happen."""
    from tito_audit.reports._notebook import error_html

    return error_html(title, message)


def site_in(folder: Path, write_page: Callable[..., Any]) -> Site:
    """A site to write into a folder, with the pages of `reports.html`; SetupError if it holds anything else."""
    from tito_audit.reports._html.views import Site

    return Site(folder, write_page)
