"""`tito-audit scan`: audits logs and writes reports."""

from __future__ import annotations

import sys
from contextlib import closing

import typer

from tito_audit.cli._exit import FAILED
from tito_audit.cli._options import Options, gate_settings_of, skipped_words
from tito_audit.cli._outputs import (
    ReportTarget,
    journal_path,
    print_resumed,
    refuse_overwriting,
    wanted_reports,
    write_reports,
)
from tito_audit.gate import gate_rollouts
from tito_audit.report import ReportOptions
from tito_audit.reports import report_named
from tito_audit.rules import all_rules
from tito_audit.run.workers import all_cores
from tito_audit.terminal.terminal import RunProgress, colors, compute_first, page_width, with_progress

_AT_ONCE = ("concise", "github", "jsonl")
"""Reports that print each finding immediately."""


def scan(options: Options, logs: list[str]) -> None:
    """Audit logs."""
    settings = all_cores(options.settings())
    gate = gate_settings_of(**options.values)
    read = options.input_files(settings)
    refuse_overwriting(
        {"--journal": options.journal, "--baseline": options.baseline if gate.update_baseline else None},
        logs,
        read,
    )
    written = [file for file in (options.baseline, options.journal) if file is not None]
    places = wanted_reports(options, logs, written, read)
    wanted = [ReportTarget(report_named(name), path) for name, path in places]
    named = next((str(each.path) for each in wanted if each.path is not None), None)
    place = journal_path(options, named, "write a report to a file: -r json=FILE")
    # The progress line and the printed findings would overwrite each other.
    live = any(each.path is None and each.report.name in _AT_ONCE for each in wanted) and sys.stdout.isatty()
    pace = RunProgress(limit=settings.limit)
    observe = any(each.report.observes for each in wanted)
    run = gate_rollouts(logs, settings, gate, pace, observe=observe, resume=place)
    run.summary.notices += filter(None, [options.config_notice(), skipped_words(logs)])
    page = ReportOptions(
        color=colors(sys.stdout),
        width=page_width(),
        worst=options.worst,
        notes=options.notes or any(override.changes.get("fail_on") == "note" for override in settings.overrides),
        not_checked=options.not_checked,
        titles={rule.code: rule.title for rule in all_rules()},
        docs={rule.code: rule.doc for rule in all_rules()},
        ran=run.codes,
        fails=run.fails,
    )
    with closing(compute_first(with_progress(run, pace, silent=options.quiet or live))) as results:
        write_reports(results, run.summary, wanted, page)
    print_resumed(run.scan.resumed, len(run.summary.files), place, silent=options.quiet)
    if run.summary.gate is not None and run.summary.gate.failed:
        raise typer.Exit(FAILED)
