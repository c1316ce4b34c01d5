"""`tito-audit convert`: a log in, the same rollouts in another form out, and what could not come along."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tito_audit.cli._command import command
from tito_audit.cli._given import Given
from tito_audit.errors import SetupError

__all__ = ["convert"]


@command("convert")
def convert(
    given: Given,
    log: Annotated[
        str, typer.Argument(metavar="LOG", help="A file: .jsonl, .json, .parquet, .arrow, .pt, .gz, .zst.")
    ],
    to: str,
    out: str | None,
    dry_run: bool,
    lossy: bool,
    force: bool,
    quiet: bool,
) -> None:
    """Write a log in another form: calls as training rows and back, or as rows of another framework.

    What cannot be carried is listed before anything is written, and unless --lossy is given nothing is. Each
    row is read again and compared: tokens, masks and logprobs are the same. Exits 1 if something would be lost
    and --lossy does not allow it, or if rows could not be converted.
    """
    from tito_audit.cli._carried import print_survey, why_refused
    from tito_audit.convert.run import Conversion
    from tito_audit.terminal.terminal import RunProgress, with_progress

    if out is None and not dry_run:
        raise SetupError(
            "There is nowhere to write to: a log is never changed in place.\n"
            "Pass -o OUT, or --dry-run to see what would be carried."
        )
    settings = given.settings().at(log)
    pace = RunProgress()
    run = Conversion(log, to, out, settings, overwrite=force or dry_run, progress=pace)
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

            print(
                f"\nWritten to {visible(str(run.written))}, read again and compared: every row says what was read."
            )
    if refused or carried.not_converted:
        raise typer.Exit(1)
