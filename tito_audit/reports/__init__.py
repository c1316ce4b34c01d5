"""Results to text; one file per report."""

from __future__ import annotations

from functools import cache

from tito_audit.registry import load_plugin, load_plugins
from tito_audit.report import Report
from tito_audit.unknown import unknown_name

__all__ = ["all_reports", "report_named"]


@cache
def all_reports() -> tuple[Report, ...]:
    """Every report, by name."""
    return load_plugins(__name__, Report, lambda report: report.name)


def report_named(name: str) -> Report:
    """The report with that name; SetupError with the known names if there is none."""
    alone = load_plugin(__name__, Report, name)  # importing all takes long: `text` needs rich
    if alone is not None and alone.name == name:
        return alone
    for report in all_reports():
        if report.name == name:
            return report
    raise unknown_name("report", name, [report.name for report in all_reports()], flag="--report")
