"""Tables of names for a terminal, and the same as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

Rows: TypeAlias = Sequence[tuple[str, ...]]


def print_table(head: Sequence[str], rows: Rows) -> None:
    """Print a table without lines, wrapped to the terminal."""
    from rich.table import Table

    from tito_audit.report import ReportOptions
    from tito_audit.terminal.page import printed
    from tito_audit.terminal.terminal import page_width

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for index, name in enumerate(head):
        table.add_column(name, no_wrap=index == 0)
    for row in rows:
        table.add_row(*row)
    print(printed([table], ReportOptions(width=page_width())))


def markdown_table(head: Sequence[str], rows: Rows) -> str:
    """The table as Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
