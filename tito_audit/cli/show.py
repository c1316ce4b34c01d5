"""`tito-audit show`: one rollout as tokens, with the findings below each sequence."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Annotated

import typer

from tito_audit.cli._command import command
from tito_audit.cli._options import Options, one_log
from tito_audit.cli._outs import print_object
from tito_audit.errors import SetupError

if TYPE_CHECKING:
    from pathlib import Path

    from tito_audit.cli._shown import ToShow
    from tito_audit.record.finding import Result
    from tito_audit.run.scan import Scan
    from tito_audit.settings.model import Settings


@command("show")
def show(
    options: Options,
    log: Annotated[
        str,
        typer.Argument(
            metavar="LOG[:ROW[:TURN]]",
            help="One file, or a place in it as printed in reports; - for standard input.",
        ),
    ],
) -> None:
    """Show one rollout as tokens, with both sides of each difference and its findings below.

    A row that is one call of a conversation shows all of it, with the row of each call.
    """
    from rich.text import Text

    from tito_audit.cli._shown import marked_call, page_lines, rollout_object, spots_of, wanted_place
    from tito_audit.report import ReportOptions
    from tito_audit.run.scan import scan_rollouts
    from tito_audit.terminal.escape import visible
    from tito_audit.terminal.page import console_for, line_printed
    from tito_audit.terminal.pager import show_page
    from tito_audit.terminal.sequence import DrawOptions
    from tito_audit.terminal.terminal import colors, page_width

    settings = replace(options.settings(), encoder="tokenizers")  # for one row, loading a second one takes longer
    wanted = wanted_place(log, row=options.row, item=options.item, turn=options.turn)
    file = one_log(wanted.log)
    wanted = replace(wanted, row=_row(file, settings) if wanted.row is None else wanted.row)
    run = scan_rollouts([str(file)], replace(settings, row=wanted.row))
    result, items = _result(run, file, wanted, settings)
    spots = spots_of(options.around, wanted, result.findings)
    if options.as_json or options.shape == "json":
        if spots is not None:
            raise SetupError("-f json writes whole sequences; leave out --around, and the tokens of the place.")
        piece = run.vocabulary.piece if run.vocabulary is not None else None
        print_object(rollout_object(result, piece, wanted.turn, row=wanted.row))
        return
    look = DrawOptions(
        width=page_width(),
        encoding=sys.stdout.encoding or "utf-8",
        piece=run.vocabulary.piece if run.vocabulary is not None else None,
        control=run.vocabulary.special_ids if run.vocabulary is not None else frozenset(),
        context=options.nearby,
        full=options.full,
        ids=options.ids,
        logprobs=options.logprobs,
    )
    console = console_for(sys.stdout, ReportOptions(color=colors(sys.stdout), width=look.width))
    call = marked_call(result, result.place.file, wanted.row)
    lines = page_lines(result, look, console, wanted.turn, spots, marked=call)
    remarks = [Text(visible(remark)) for remark in _remarks(run, items, result)]
    page = chain(
        (line_printed(line, console) for line in lines),
        ("\n" + line_printed(remark, console) for remark in remarks),
    )
    show_page(page, sys.stdout, paged=not options.no_pager)


def _count(file: Path, settings: Settings) -> int:
    from tito_audit.storage import open_log

    return open_log(file, rows_at=settings.at(file).rows_at).count()


def _row(file: Path, settings: Settings) -> int:
    """The row to show if none was named: the only one; SetupError if there are more."""
    from tito_audit.storage import RemoteFile

    # To count the rows of a large remote log, all of it would be fetched.
    far = isinstance(file, RemoteFile) and file.stat().st_size > (8 << 20)
    rows = _count(file, settings) if file.is_file() and not far else None
    if rows == 1:
        return 0
    size = f"; it holds {rows:,} rows, counted from 0" if rows is not None else ""
    raise SetupError(f"{file}: no row was named{size}.\nPass --row N, or write {file}:N.")


def _result(run: Scan, file: Path, wanted: ToShow, settings: Settings) -> tuple[Result, int]:
    """The result to show, and how many results its row has."""
    of_row = [result for result in run if not result.of_log]
    for result in of_row:
        if result.place.item == wanted.item:
            return result, len(of_row)
    if of_row:
        raise SetupError(
            f"{file}: row {wanted.row} holds {len(of_row)} rollouts, counted from 0; --item {wanted.item} is past "
            "the end."
        )
    rows = _count(file, settings) if file.is_file() else 0
    if wanted.row is not None and wanted.row < rows:
        raise SetupError(f"{file}: row {wanted.row} is a blank line or holds no rollout.")
    raise SetupError(f"{file}: there is no row {wanted.row}; it holds {rows:,} rows, counted from 0.")


def _remarks(run: Scan, items: int, result: Result) -> list[str]:
    from tito_audit.run.rewriting import CODE

    remarks = [notice for notice in run.summary.notices if notice.startswith(("--messages", "--tools"))]
    if items > 1:
        remarks.append(f"The row holds {items} rollouts: --item 0 to --item {items - 1}.")
    for finding in result.told:
        # That the template rewrites history changes nothing of how the row is audited.
        if finding.code != CODE or finding.place.row == result.place.row:
            remarks.append(f"{finding.severity.word} {finding.code}: {finding.hit.message}")
    return remarks
