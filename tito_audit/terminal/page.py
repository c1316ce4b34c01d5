"""Building blocks of terminal pages: console, headings, tables, lists, one finding."""

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
from tito_audit.terminal.boxes import draw_boxes
from tito_audit.terminal.escape import inert, visible
from tito_audit.terminal.place import token_range
from tito_audit.terminal.terminal import colors, page_width
from tito_audit.voice import for_reader

STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold cyan"}
INDENT = 2
T = TypeVar("T")


def console_for(out: TextIO, options: ReportOptions) -> Console:
    """A console that never interprets markup, and writes colours only if `options` ask for them."""
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
    """Print parts of a page; a Text stays on one line, everything else is wrapped."""
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text))


class _PageText(StringIO):
    """A page in memory, with the encoding of the stream it will go to: widths depend on it."""

    encoding = "utf-8"


@contextmanager
def open_page(out: TextIO, options: ReportOptions) -> Iterator[Console]:
    """A console whose page goes to `out` on exit, without trailing blanks and without CI commands."""
    page = _PageText()
    page.encoding = getattr(out, "encoding", None) or "utf-8"
    yield console_for(page, options)
    out.writelines(inert(line.rstrip()) + "\n" for line in page.getvalue().splitlines())


def page_writer(parts: Callable[[T], Iterable[RenderableType]]) -> Callable[[T, TextIO, ReportOptions], None]:
    """A writer of pages, `write(value, out, options)`, made of a function that lists the parts of one."""

    def write(value: T, out: TextIO, options: ReportOptions) -> None:
        with open_page(out, options) as console:
            print_parts(console, parts(value))

    return write


def print_page(
    wrapped: Iterable[RenderableType], unwrapped: Iterable[RenderableType] = (), notice: str | None = None
) -> None:
    """Print a page to stdout: wrapped parts, then parts whose lines stay whole (to paste them), then a notice."""
    with open_page(sys.stdout, ReportOptions(color=colors(sys.stdout), width=page_width())) as console:
        for part in wrapped:
            console.print(part)
        print_parts(console, unwrapped)
        if notice is not None:
            console.print()
            console.print(Text(visible(notice)), soft_wrap=not wrapped)


def wrap(words: Text, console: Console, width: int, first: str, rest: str = "") -> Iterator[Text]:
    """The words wrapped to a width, with `first` before the first line and `rest` (or `first`) before others."""
    for number, line in enumerate(words.wrap(console, width)):
        line.rstrip()
        yield Text(rest if number and rest else first).append_text(line)


def heading(words: str) -> Iterator[Text]:
    """An empty line, then a bold heading."""
    yield Text()
    yield Text(words, style="bold")


def open_table(header_style: str = "underline", *, header: bool = True) -> Table:
    """A table without rules."""
    return Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style=header_style, show_header=header)


def ruled_table() -> Table:
    """A table with a rule below its header."""
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)


def facts_table(facts: Iterable[tuple[str, str]]) -> Table:
    """A table of names and what each means; the second column wraps."""
    table = open_table(header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    for name, words in facts:
        table.add_row(Text(f"  {name}"), Text(words))
    return table


def print_names(heads: Sequence[str], rows: Iterable[tuple[str, ...]]) -> None:
    """Print a table to stdout, wrapped to the terminal; only names in the first column stay whole."""
    table = open_table("bold")
    for index, head in enumerate(heads):
        table.add_column(head, no_wrap=index == 0)
    for row in rows:
        table.add_row(*row)
    print(render_text([table], ReportOptions(width=page_width())))


def render_text(parts: Iterable[RenderableType], options: ReportOptions) -> str:
    """The parts as a console prints them, without trailing blanks."""
    out = StringIO()
    print_parts(console_for(out, options), parts)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def render_line(line: Text, console: Console) -> str:
    """One line as the console prints it, unwrapped, with a line end and without CI commands."""
    if console.color_system is None:
        return inert(line.plain) + "\n"  # thirty times as fast
    with console.capture() as captured:
        console.print(line, soft_wrap=True)
    return inert(captured.get())


def finding_lines(
    finding: Finding, console: Console, *, with_place: bool = True, with_repair: bool = False
) -> Iterator[Text]:
    """One finding: severity, code and place; the message; the tokens of both sides as boxes.

    `with_repair` adds a line with the repair that would fix it and its fingerprint.
    """
    hit = finding.hit
    width = console.width - INDENT
    head = Text()
    head.append(finding.severity.word, style=STYLES[finding.severity])
    head.append(f" {finding.code}", style="bold")
    place = visible(str(finding.place)) if with_place else ""
    for words in (place, "" if hit.turn is None else f"turn {hit.turn}", range_words(finding)):
        head.append(f" {words}" if words else "")
    yield head
    yield from wrap(Text(visible(for_reader(hit.message))), console, width, " " * INDENT)
    for line in draw_boxes(hit, width, console.encoding):
        yield _indent(line)
    if with_repair:
        repair = f"repair {finding.repair} · " if finding.repair else ""
        yield _indent(Text(visible(f"{repair}fingerprint {finding.fingerprint}"), style="dim"))


def print_list(console: Console, title: str, lines: Sequence[str]) -> None:
    """Print lines under a title, wrapped with an indent; nothing without lines."""
    if not lines:
        return
    print_parts(console, heading(title))
    for line in lines:
        print_parts(console, wrap(Text(line), console, console.width - 4, "  ", "    "))


def print_commands(console: Console, title: str, lines: Sequence[str]) -> None:
    """Print `command   what it does` lines under a title; commands are never wrapped, so they can be pasted."""
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
            print_parts(console, wrap(Text(words), console, console.width - 2 * INDENT, " " * 2 * INDENT))


def range_words(finding: Finding) -> str:
    """`completion 12:14`, `the whole log`; empty for a finding about a whole row."""
    if finding.hit.where is Where.LOG:
        return "the whole log"
    tokens = token_range(finding)
    if tokens is None:
        return ""
    start, end = tokens
    return f"{finding.hit.where} {start}:{end}" if end > start else f"{finding.hit.where} at {start}"


def _indent(line: Text) -> Text:
    line.rstrip()
    return Text(" " * INDENT).append_text(line)
