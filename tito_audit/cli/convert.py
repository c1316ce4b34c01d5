"""`tito-audit convert`: the rollouts of logs in another form, with a list of what is lost."""

from __future__ import annotations

import sys

import typer

from tito_audit.cli._command import command
from tito_audit.cli._given import Given, Logs
from tito_audit.cli._inputs import refuse_inputs
from tito_audit.errors import SetupError


@command("convert")
def convert(
    given: Given,
    logs: Logs,
    to: str,
    out: str | None,
    dry_run: bool,
    lossy: bool,
    force: bool,
    quiet: bool,
) -> None:
    """Write logs in another form, to one file: calls as training rows and back, or as rows of another framework.

    What would be lost is listed first; then nothing is written without --lossy. Each row is read again and
    compared: tokens, masks and logprobs stay the same. Exits 1 if something would be lost and --lossy was not
    passed, or if rows could not be converted.
    """
    from tito_audit.cli._carried import print_survey, why_refused
    from tito_audit.convert.run import Conversion
    from tito_audit.terminal.terminal import RunProgress, with_progress

    if out is None and not dry_run:
        raise SetupError(
            "There is no file to write to: a log is never changed in place.\n"
            "Pass -o OUT, or --dry-run to see what would be kept and lost."
        )
    pace, settings = RunProgress(), given.settings()
    refuse_inputs({"-o": None if dry_run else out}, logs, given.inputs(settings))
    run = Conversion(logs, to, out, settings, overwrite=force or dry_run, progress=pace)
    for _ in with_progress(run.survey(), silent=quiet, pace=pace):
        pass
    carried = run.carried
    if not quiet:
        print_survey(run, sys.stdout, dry_run=dry_run)
        sys.stdout.flush()
    refused = (not carried.lossless and not lossy) or (carried.not_converted and not carried.rows_made)
    if refused and not dry_run:
        from tito_audit.terminal.escape import visible

        print(f"tito-audit: {visible(why_refused(run))}", file=sys.stderr)
    elif not dry_run:
        for _ in with_progress(run.write(), silent=quiet, pace=RunProgress()):
            pass
        if not quiet:
            from tito_audit.terminal.escape import visible

            print(f"\nWritten to {visible(str(run.written))} and verified: every row holds what was converted.")
    if refused or carried.not_converted:
        raise typer.Exit(1)
