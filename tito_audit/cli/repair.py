"""`tito-audit repair`: writes repaired copies of logs, and reports what was repaired."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from tito_audit.cli._command import command
from tito_audit.cli._deliver import deliver_finished, wanted_reports
from tito_audit.cli._options import Logs, Options, skipped
from tito_audit.cli._outs import journal_place, refuse_inputs, say_resumed
from tito_audit.errors import SetupError

if TYPE_CHECKING:
    from tito_audit.record.outcome import Outcome
    from tito_audit.report import ReportOptions
    from tito_audit.run.repair import Repairs
    from tito_audit.settings.model import RepairSettings, Settings


@command("repair")
def repair(
    options: Options,
    logs: Logs,
) -> None:
    """Write repaired copies of logs; a row changes only if a repair is proven on it.

    The logs themselves are never changed. Exits 1 if findings at or above --fail-on are left, or rows that may
    have the fault that other rows of their log prove.
    """
    from tito_audit.cli._repaired import REPORTS, RepairRun, RowTally
    from tito_audit.record.finding import Severity
    from tito_audit.report import ReportOptions
    from tito_audit.rules import all_rules
    from tito_audit.run.progress import REPAIRING, TRYING
    from tito_audit.run.repair import repair_rollouts
    from tito_audit.run.workers import all_cores
    from tito_audit.terminal.terminal import RunProgress, colors, page_width, with_progress

    if options.out is None and not options.dry_run and not options.diff:
        raise SetupError(
            "There is no file to write to: a log is never changed in place.\n"
            "Pass -o OUT, or --dry-run to see what would be repaired, or --diff to see every change."
        )
    settings, how = all_cores(options.settings()), options.repair()
    target = None if options.dry_run else options.out
    place = journal_place(options, target and target.rstrip("/"), "pass -o OUT")
    written = [path for path in (target, how.quarantine, options.journal) if path]
    read = options.inputs(settings)
    refuse_inputs({"--quarantine": how.quarantine, "--journal": options.journal}, logs, read)
    refuse_inputs({"-o": target}, (), read)  # whether it is a log is looked at for each log
    wanted = wanted_reports(options, logs, written, read, REPORTS)
    for name, path in wanted if options.diff else ():
        if name != "text" and path is None:
            raise SetupError(
                f"--report {name}: --diff prints to stdout too, and the two would mix.\n"
                f"Name a file for the report: --report {name}=FILE"
            )
    if options.provider is not None:
        settings, how = scored(logs, settings, how, options.provider, silent=options.quiet)
    tally = RowTally(Severity.bar(settings.fail_on), settings)
    pace = RunProgress(phase=TRYING if target is None else REPAIRING)
    run = repair_rollouts(logs, target, settings, how, pace, resume=place)
    run.shown = options.worst if options.diff else 0
    run.before.notices += [notice for notice in (options.notice(), skipped(logs)) if notice is not None]
    titles = {rule.code: rule.title for rule in all_rules()}
    page = ReportOptions(color=colors(sys.stdout), width=page_width(), notes=options.notes, titles=titles)
    # Lines printed one by one and the progress line would overwrite each other.
    silent = options.quiet or (options.diff and sys.stdout.isatty())
    with closing(with_progress(run, pace, silent=silent)) as outcomes:
        for outcome in _printed(outcomes, run, page, options.worst) if options.diff else outcomes:
            tally.add(outcome)
    say_resumed(run.resumed, len(run.before.files), place, silent=options.quiet)
    done = RepairRun(tally, run.before, run.after, run.written, settings, how, target, run.changed)
    deliver_finished(done, REPORTS, wanted, page)
    if run.failing or run.before.open_beside_faults:
        raise typer.Exit(1)


def _printed(outcomes: Iterable[Outcome], run: Repairs, page: ReportOptions, most: int) -> Iterator[Outcome]:
    """The outcomes; the changes of the first `most` changed rows are printed as they pass."""
    from tito_audit.cli._diff import diff_lines
    from tito_audit.terminal.page import console_for, line_printed

    console = console_for(sys.stdout, page)
    changed = 0
    for outcome in outcomes:
        if outcome.repaired or outcome.quarantined is not None:
            changed += 1
            if changed <= most:
                piece = run.vocabulary.piece if run.vocabulary is not None else None
                sys.stdout.writelines(line_printed(line, console) for line in diff_lines(outcome, piece))
                console.print()
        yield outcome
    if changed > most:
        console.print(f"… and {changed - most:,} more changed rows; --worst {changed} shows all\n")
    elif not changed:
        console.print("no row changed\n")


def scored(
    logs: Sequence[str], settings: Settings, how: RepairSettings, provider: str | None, *, silent: bool
) -> tuple[Settings, RepairSettings]:
    """The settings with a model's scores of every rollout, if `rescore` is among the repairs and a model is
    given.
    """
    if provider is None or "rescore" not in how.strategies:
        return settings, how
    from tito_audit.provider import ProviderOptions
    from tito_audit.providers import key_of, open_provider
    from tito_audit.rescore.journal import ScoreJournal
    from tito_audit.rescore.run import RescoreChoices, Rescoring
    from tito_audit.rescore.write import scores_of
    from tito_audit.terminal.terminal import RunProgress, with_progress

    if settings.engine != "local":
        raise SetupError(
            f"--engine {settings.engine}: one process uses a model's scores, so --with rescore runs without it.\n"
            "Leave out --engine, or fill the logprobs first: tito-audit rescore LOG -o OUT"
        )
    scorer = open_provider(provider, ProviderOptions(api_key=key_of(provider)))
    journal, pace = ScoreJournal(None, scorer.name), RunProgress()
    run = Rescoring(logs, settings, scorer, RescoreChoices(keeps=True), journal=journal, progress=pace)
    for _ in with_progress(run, pace, silent=silent):
        pass
    values = scores_of(logs, journal, f"{journal.model or 'the model'} ({scorer.name})")
    # Threads that the provider left running must not be forked.
    return replace(settings, jobs=1), replace(how, choices=replace(how.choices, rescored=values))
