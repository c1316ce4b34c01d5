"""Results to text; one file per report."""

from __future__ import annotations

from functools import cache

from tito_audit.registry import plugin_of_module, plugins
from tito_audit.report import Report
from tito_audit.unknown import unknown

__all__ = ["all_reports", "report_named"]


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
