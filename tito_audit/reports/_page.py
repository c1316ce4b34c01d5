"""Pieces of a page for a terminal: the console, a place in words, one finding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from io import StringIO
from typing import TextIO

from rich.console import Console, RenderableType
from rich.text import Text

from tito_audit.record.finding import Finding, Severity, Where
from tito_audit.report import ReportOptions
from tito_audit.reports._boxes import boxes
from tito_audit.reports._visible import visible

__all__ = ["STYLES", "console_for", "finding_lines", "printed", "range_words"]

STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold cyan"}
INDENT = 2


def console_for(out: TextIO, options: ReportOptions) -> Console:
    """A console that writes plain text unless colour is wanted, and never reads markup."""
    return Console(
        file=out,
        width=options.width,
        force_terminal=options.color,
        color_system="standard" if options.color else None,
        no_color=not options.color,
        legacy_windows=False,
        markup=False,
        highlight=False,
        emoji=False,
    )


def printed(parts: Iterable[RenderableType], options: ReportOptions) -> str:
    """What a console makes of the parts, without the blanks that tables leave at the ends of lines."""
    out = StringIO()
    console = console_for(out, options)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def finding_lines(
    finding: Finding, console: Console, *, placed: bool = True, named: bool = False
) -> Iterator[Text]:
    """One finding: severity, code and (if `placed`) where; the message; recorded over canonical.

    If `named`, the repair that would cure it and its fingerprint as well.
    """
    hit = finding.hit
    width = console.width - INDENT
    head = Text()
    head.append(finding.severity.word, style=STYLES[finding.severity])
    head.append(f" {finding.code}", style="bold")
    place = visible(str(finding.place)) if placed else ""
    for words in (place, "" if hit.turn is None else f"turn {hit.turn}", range_words(finding)):
        head.append(f" {words}" if words else "")
    yield head
    message = Text(visible(hit.message))
    for line in message.wrap(console, width):
        yield _indented(line)
    for line in boxes(hit.recorded, hit.canonical, width):
        yield _indented(line)
    if named:
        repair = f"repair {finding.repair} · " if finding.repair else ""
        yield _indented(Text(visible(f"{repair}fingerprint {finding.fingerprint}"), style="dim"))


def range_words(finding: Finding) -> str:
    """`completion 12:14`; empty for a finding about the whole row."""
    hit = finding.hit
    if hit.start == hit.end:
        if hit.where is Where.ROW and finding.code.startswith("REC"):
            return ""
        return f"{hit.where} at {hit.start}"
    return f"{hit.where} {hit.start}:{hit.end}"


def _indented(line: Text) -> Text:
    line.rstrip()
    return Text(" " * INDENT).append_text(line)
