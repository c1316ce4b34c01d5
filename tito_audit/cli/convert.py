"""`tito-audit convert`: writes rollouts in another form, after listing what would be lost."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import typer

from tito_audit.cli._options import Options
from tito_audit.cli._outputs import refuse_overwriting
from tito_audit.convert.run import Conversion
from tito_audit.errors import SetupError
from tito_audit.terminal.escape import inert, visible
from tito_audit.terminal.terminal import RunProgress, with_progress
from tito_audit.terminal.words import many

_MOST_LOST = 4
_MOST_REFUSED = 20
"""How many rows that could not be converted are listed; the others are counted."""


def convert(options: Options, logs: list[str]) -> None:
    """Write logs in another form, to one file."""
    if options.out is None and not options.dry_run:
        raise SetupError(
            "There is no file to write to: a log is never changed in place.\n"
            "Pass -o OUT, or --dry-run to see what would be kept and lost."
        )
    pace, settings = RunProgress(phase="reading (1 of 2)"), options.settings()
    refuse_overwriting({"-o": None if options.dry_run else options.out}, logs, options.input_files(settings))
    run = Conversion(
        logs, options.to, options.out, settings, overwrite=options.force or options.dry_run, progress=pace
    )
    for _ in with_progress(run.survey(), pace, silent=options.quiet):
        pass
    carried = run.carried
    if not options.quiet:
        for line in _page_lines(run, dry_run=options.dry_run):
            print(inert(visible(line)))
        sys.stdout.flush()
    refused = (not carried.lossless and not options.lossy) or (carried.not_converted and not carried.rows_made)
    if refused and not options.dry_run:
        print(f"tito-audit: {visible(refusal_words(run))}", file=sys.stderr)
    elif not options.dry_run:
        pace.enter("writing (2 of 2)")
        for _ in with_progress(run.write(), pace, silent=options.quiet):
            pass
        if not options.quiet:
            print(f"\nWritten to {visible(str(run.written))} and verified: every row holds what was converted.")
    if refused or carried.not_converted:
        raise typer.Exit(1)


def refusal_words(conversion: Conversion) -> str:
    """Why nothing was written, and what to do."""
    carried = conversion.carried
    parts = []
    if carried.lost:
        shown = ", ".join([*carried.lost][:_MOST_LOST]) + (", …" if len(carried.lost) > _MOST_LOST else "")
        parts.append(f"{shown} would be lost")
    if carried.not_converted:
        what = "row or rollout" if carried.not_converted == 1 else "rows or rollouts"
        parts.append(f"{carried.not_converted:,} {what} would be left out")
    way_out = "Pass --lossy to write the rest, or choose another --to."
    if not carried.rows_made:
        way_out = "Choose another --to, or a log with token ids."
    why = f"as {conversion.maker.name} {' and '.join(parts)}"
    return f"{conversion.named}: nothing was written, because {why}. {way_out}"


def _page_lines(conversion: Conversion, *, dry_run: bool) -> Iterator[str]:
    """What the conversion keeps and loses."""
    carried, maker = conversion.carried, conversion.maker
    yield f"{conversion.named} as {maker.name}: {maker.title}"
    read = f"{many(carried.rows_read, 'row')}, {many(carried.rollouts, 'rollout')}"
    yield f"{read} → {many(carried.rows_made, 'row')}{', a dry run: nothing is written' if dry_run else ''}"
    yield from conversion.notices
    if carried.forked:
        yield (
            f"{many(carried.forked, 'rollout')} became several rows each: "
            "not every call continues the one before it"
        )
    those = "rows and conversations" if carried.joined else "rows"
    for title, counts in (
        (f"Lost, with the number of {those} that have it", carried.lost),
        ("Repeated in several rows, with the number of cases", carried.repeated),
        ("Not in the log, so left out or null, with the number of rollouts", carried.missing),
    ):
        yield from ("", title) if counts else ()
        width = max(map(len, counts), default=0)
        yield from (f"  {name:<{width}}  {count:,}" for name, count in counts.items())
    if carried.not_converted:
        yield from ("", "Not converted")
        for place, reason in carried.refused[:_MOST_REFUSED]:
            yield f"  {place}  {reason}"
        if carried.not_converted > _MOST_REFUSED:
            yield f"  … and {carried.not_converted - _MOST_REFUSED:,} more"
    if carried.lossless:
        yield "Nothing is lost."
