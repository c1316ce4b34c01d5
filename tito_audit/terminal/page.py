"""The kit of pages for a terminal: console, headings, tables, lists, one finding."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from typing import TextIO, TypeVar

from rich import box
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from tito_audit.record.finding import Finding, Severity, Where
from tito_audit.report import ReportOptions
from tito_audit.terminal.boxes import boxes
from tito_audit.terminal.escape import inert, visible
from tito_audit.terminal.place import range_of
from tito_audit.terminal.terminal import colors, page_width
from tito_audit.voice import spoken

STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold cyan"}
INDENT = 2
T = TypeVar("T")


def console_for(out: TextIO, options: ReportOptions) -> Console:
    """A console that writes plain text unless colour is wanted, and never interprets markup."""
    return Console(
        file=out,
        width=options.width,
        force_terminal=options.color,
        force_jupyter=False,  # in a notebook rich would display what is meant for `out`
        color_system="standard" if options.color else None,
        no_color=not options.color,
        legacy_windows=False,
        markup=False,
        highlight=False,
        emoji=False,
    )


def print_parts(console: Console, parts: Iterable[RenderableType]) -> None:
    """Print parts of a page; texts stay on one line each, everything else is wrapped."""
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text))


class _PageText(StringIO):
    """What is printed, measured as the stream shows it that it is for."""

    encoding = "utf-8"


@contextmanager
def page_to(out: TextIO, options: ReportOptions) -> Iterator[Console]:
    """A console whose page is written at its end: without trailing blanks, and so that no CI runner obeys it."""
    page = _PageText()
    page.encoding = getattr(out, "encoding", None) or "utf-8"
    yield console_for(page, options)
    out.writelines(inert(line.rstrip()) + "\n" for line in page.getvalue().splitlines())


def as_page(parts: Callable[[T], Iterable[RenderableType]]) -> Callable[[T, TextIO, ReportOptions], None]:
    """What writes the parts of a page of something."""

    def write(of: T, out: TextIO, options: ReportOptions) -> None:
        with page_to(out, options) as console:
            print_parts(console, parts(of))

    return write


def print_page(
    folded: Iterable[RenderableType], whole: Iterable[RenderableType] = (), notice: str | None = None
) -> None:
    """Print a page to stdout: parts that are wrapped, then parts with lines to paste, then a notice."""
    with page_to(sys.stdout, ReportOptions(color=colors(sys.stdout), width=page_width())) as console:
        for part in folded:
            console.print(part)
        print_parts(console, whole)
        if notice is not None:
            console.print()
            console.print(Text(visible(notice)), soft_wrap=not folded)


def wrapped(words: Text, console: Console, width: int, first: str, rest: str = "") -> Iterator[Text]:
    """The words wrapped to a width, behind `first`, and from the second line on behind `rest` if it is given."""
    for number, line in enumerate(words.wrap(console, width)):
        line.rstrip()
        yield Text(rest if number and rest else first).append_text(line)


def heading(words: str) -> Iterator[Text]:
    """A heading, after an empty line."""
    yield Text()
    yield Text(words, style="bold")


def open_table(header_style: str = "underline", *, header: bool = True) -> Table:
    """A table without lines."""
    return Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style=header_style, show_header=header)


def ruled_table() -> Table:
    """A table with a line below its heads."""
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)


def facts_table(facts: Iterable[tuple[str, str]]) -> Table:
    """Names and what is to say about each."""
    table = open_table(header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    for name, words in facts:
        table.add_row(Text(f"  {name}"), Text(words))
    return table


def print_names(heads: Sequence[str], rows: Iterable[tuple[str, ...]]) -> None:
    """Print a table of names to stdout, wrapped to the terminal."""
    table = open_table("bold")
    for index, head in enumerate(heads):
        table.add_column(head, no_wrap=index == 0)
    for row in rows:
        table.add_row(*row)
    print(printed([table], ReportOptions(width=page_width())))


def printed(parts: Iterable[RenderableType], options: ReportOptions) -> str:
    """The parts as a console prints them, without the trailing blanks of tables."""
    out = StringIO()
    print_parts(console_for(out, options), parts)
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
    yield from wrapped(Text(visible(spoken(hit.message))), console, width, " " * INDENT)
    for line in boxes(hit, width, console.encoding):
        yield _indented(line)
    if named:
        repair = f"repair {finding.repair} · " if finding.repair else ""
        yield _indented(Text(visible(f"{repair}fingerprint {finding.fingerprint}"), style="dim"))


def print_list(console: Console, title: str, lines: Sequence[str]) -> None:
    """Print the lines under a title, wrapped lines indented; nothing if there are no lines."""
    if not lines:
        return
    print_parts(console, heading(title))
    for line in lines:
        print_parts(console, wrapped(Text(line), console, console.width - 4, "  ", "    "))


def print_commands(console: Console, title: str, lines: Sequence[str]) -> None:
    """Print `command   what it does` lines under a title; a command stays on one line, ready to paste."""
    if not lines:
        return
    print_parts(console, heading(title))
    for line in lines:
        command, between, words = line.rpartition("   ")
        if cell_len(line) <= console.width - INDENT or not between:
            command, words = line, ""
        console.print(Text(" " * INDENT + command), soft_wrap=True)
        # Words that do not fit beside their command go below it.
        if words:
            print_parts(console, wrapped(Text(words), console, console.width - 2 * INDENT, " " * 2 * INDENT))


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
