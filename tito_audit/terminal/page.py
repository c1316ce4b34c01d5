"""Parts of a page for a terminal: the console, token ranges in words, one finding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.text import Text

from tito_audit.record.finding import Finding, Severity, Where
from tito_audit.report import ReportOptions
from tito_audit.terminal.boxes import boxes
from tito_audit.terminal.escape import inert, visible
from tito_audit.terminal.place import range_of

STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold cyan"}
INDENT = 2


def console_for(out: TextIO, options: ReportOptions) -> Console:
    """A console that writes plain text unless colour is wanted, and never interprets markup."""
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
    """The parts as a console prints them, without the trailing blanks of tables."""
    out = StringIO()
    console = console_for(out, options)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def line_printed(line: Text, console: Console) -> str:
    """One line as the console prints it, however long, with its line end; no CI runner reads it as a command."""
    if console.color_system is None:
        return inert(line.plain) + "\n"  # thirty times as fast
    with console.capture() as captured:
        console.print(line, soft_wrap=True)
    return inert(captured.get())


def finding_lines(
    finding: Finding, console: Console, *, placed: bool = True, named: bool = False
) -> Iterator[Text]:
    """One finding: severity, code and (if `placed`) place; the message; the tokens of both sides.

    If `named`, also the repair that would fix it and its fingerprint.
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
    for line in boxes(hit, width):
        yield _indented(line)
    if named:
        repair = f"repair {finding.repair} · " if finding.repair else ""
        yield _indented(Text(visible(f"{repair}fingerprint {finding.fingerprint}"), style="dim"))


def print_list(console: Console, title: str, lines: Sequence[str]) -> None:
    """Print the lines under a title, wrapped lines indented; nothing if there are no lines."""
    if not lines:
        return
    console.print()
    console.print(Text(title, style="bold"))
    for line in lines:
        wrapped = Text(line).wrap(console, console.width - 4)
        for index, part in enumerate(wrapped):
            console.print(Text("  " if index == 0 else "    ").append_text(part), soft_wrap=True)


def print_commands(console: Console, title: str, lines: Sequence[str]) -> None:
    """Print `command   what it does` lines under a title; a command stays on one line, ready to paste."""
    if not lines:
        return
    console.print()
    console.print(Text(title, style="bold"))
    for line in lines:
        for part in _command_lines(line, console):
            console.print(part, soft_wrap=True)


def _command_lines(line: str, console: Console) -> Iterator[Text]:
    """The lines of one `command   what it does`, indented; if they do not fit, the words go below the command."""
    command, between, words = line.rpartition("   ")
    if cell_len(line) <= console.width - INDENT or not between:
        yield Text(" " * INDENT + line)
        return
    yield Text(" " * INDENT + command)
    for part in Text(words).wrap(console, console.width - 2 * INDENT):
        yield Text(" " * 2 * INDENT).append_text(part)


def range_words(finding: Finding) -> str:
    """`completion 12:14`, `the whole log`; empty for a finding about the whole row."""
    if finding.hit.where is Where.LOG:
        return "the whole log"
    tokens = range_of(finding)
    if tokens is None:
        return ""
    start, end = tokens
    return f"{finding.hit.where} {start}:{end}" if end > start else f"{finding.hit.where} at {start}"


def _indented(line: Text) -> Text:
    line.rstrip()
    return Text(" " * INDENT).append_text(line)
