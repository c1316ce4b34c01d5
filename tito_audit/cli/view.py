"""`tito-audit view`: writes a site of many logs, to browse, search and compare."""

from __future__ import annotations

import sys
from contextlib import closing, nullcontext
from pathlib import Path

from tito_audit.cli._options import Options, skipped_words
from tito_audit.errors import SetupError
from tito_audit.gate import gate_rollouts
from tito_audit.report import ReportOptions
from tito_audit.reports.html import Site, write_page
from tito_audit.rules import all_rules
from tito_audit.run.auditor import Loader
from tito_audit.run.workers import all_cores
from tito_audit.storage import find_logs
from tito_audit.storage.remote import is_url
from tito_audit.terminal.encoding import prepare_stdout
from tito_audit.terminal.escape import visible
from tito_audit.terminal.terminal import RunProgress, show_progress
from tito_audit.terminal.words import many
from tito_audit.viewer.model import ViewQuota, ViewSize


def view(options: Options, logs: list[str]) -> None:
    """Write a site of logs."""
    if is_url(options.out):
        raise SetupError(
            f"-o {options.out}: a site is written to disk.\nName a folder on disk, and copy it from there."
        )
    files = find_logs(logs)
    pace = RunProgress()
    with closing(Site(Path(options.out), write_page)) as site:
        with nullcontext() if options.quiet else show_progress(pace):
            settings, loader = all_cores(options.settings()), Loader()
            titles = {rule.code: rule.title for rule in all_rules()}
            docs = {rule.code: rule.doc for rule in all_rules()}
            folders = [folder for folder in map(Path, logs) if folder.is_dir()]
            for number, file in enumerate(files, 1):
                folder = next((folder for folder in folders if file.is_relative_to(folder)), None)
                inside = file.name if folder is None else file.relative_to(folder).as_posix()
                name = inside if folder is None or len(logs) == 1 else f"{folder.resolve().name}/{inside}"
                pace.enter(f"{name} ({number:,} of {len(files):,})" if len(files) > 1 else "")
                quota = ViewQuota(options.show_rows, ViewSize(tokens=20_000, sequences=512))
                run = gate_rollouts([str(file)], settings, None, pace, observe=quota)
                run.scan.loader = loader
                run.summary.notices += filter(None, [options.config_notice()])
                site.add(
                    run, run.summary, name, ReportOptions(titles=titles, docs=docs, ran=run.codes, fails=run.fails)
                )
        counts = site.finish()
    if options.quiet:
        return
    prepare_stdout("text")
    left_out = (
        (counts.rollouts - counts.shown, "without their tokens (--show-rows)"),
        (counts.findings - counts.listed, "findings counted, not listed"),
    )
    shown = f"{many(counts.logs, 'log')}, {many(counts.rollouts, 'rollout')}, {counts.size / 1e6:,.1f} MB"
    words = [shown, *(f"{number:,} {what}" for number, what in left_out if number)]
    words += filter(None, [skipped_words(logs)])
    sys.stdout.write(visible(f"{Path(options.out) / 'index.html'}: {'; '.join(words)}") + "\n")
