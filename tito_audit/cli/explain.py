"""`tito-audit explain`: the manual of a rule, which is its docstring."""

from __future__ import annotations

import difflib
import sys
from typing import Annotated

import typer

from tito_audit.errors import SetupError

__all__ = ["explain"]


def explain(
    code: Annotated[str, typer.Argument(metavar="CODE", help="A rule's code or name, such as TOK101.")],
) -> None:
    """Print what a rule finds, why it matters, an example and the repair."""
    from tito_audit.rules import all_rules

    wanted = code.strip()
    rules = all_rules()
    for rule in rules:
        if wanted.upper() == rule.code or wanted.lower() == rule.name:
            needs = ", ".join(str(need.name).lower().replace("|", " or ") for need in rule.needs if need)
            head = f"# {rule.code} {rule.name}\n\nSeverity: {rule.severity.word} at most. "
            head += f"Needs: {needs.replace('_', ' ')}.\n\n" if needs else "Needs nothing but the row.\n\n"
            return _print(head + rule.doc)
    names = [rule.code for rule in rules] + [rule.name for rule in rules]
    close = difflib.get_close_matches(wanted.upper(), names, n=3, cutoff=0.4)
    close += difflib.get_close_matches(wanted.lower(), names, n=3, cutoff=0.5)
    hint = f"Nearest: {', '.join(dict.fromkeys(close))}. " if close else ""
    raise SetupError(f"explain {code}: no rule has this code.\n{hint}See tito-audit list rules.")


def _print(manual: str) -> None:
    from tito_audit.cli._terminal import colors, page_width

    if not colors(sys.stdout):
        return print(manual)
    from rich.console import Console
    from rich.markdown import Markdown

    Console(width=min(page_width(), 100)).print(Markdown(manual))
