"""Results to text; one file per report."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from tito_audit.registry import plugin_of_module, plugins
from tito_audit.report import Report
from tito_audit.unknown import unknown

if TYPE_CHECKING:
    from pathlib import Path

    from tito_audit.reports._html.views import Site as Site

__all__ = ["all_reports", "report_named", "site_in"]


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


def site_in(folder: Path, write_page: Callable[..., Any]) -> Site:
    """A site to write into a folder, with the pages of `reports.html`; SetupError if it holds anything else."""
    from tito_audit.reports._html.views import Site

    return Site(folder, write_page)
