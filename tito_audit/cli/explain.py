"""`tito-audit explain`: the manual of a rule or repair, which is its docstring."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from tito_audit.cli import _complete
from tito_audit.errors import SetupError

if TYPE_CHECKING:
    from tito_audit.repair import Repair
    from tito_audit.rule import Rule


def explain(
    name: Annotated[
        str,
        typer.Argument(
            metavar="CODE|REPAIR",
            help="A rule's code or name (TOK101), or a repair's (splice).",
            autocompletion=_complete.manuals,
        ),
    ],
) -> None:
    """Print the manual of a rule (what it finds, why it matters, how to repair it) or of a repair."""
    from tito_audit.repairs import all_repairs
    from tito_audit.rules import all_rules

    wanted = name.strip()
    rules, repairs = all_rules(), all_repairs()
    for rule in rules:
        if wanted.upper() == rule.code or wanted.lower() == rule.name:
            return _print(_rule_head(rule, [one.name for one in repairs if one.claims(rule.code)]) + rule.doc)
    for repair in repairs:
        if wanted.lower() == repair.name:
            return _print(_repair_head(repair) + repair.doc)
    import difflib  # slow to load, and used only here

    names = [rule.code for rule in rules] + [rule.name for rule in rules]
    names += [one.name for one in repairs]
    close = difflib.get_close_matches(wanted.upper(), names, n=3, cutoff=0.4)
    close += difflib.get_close_matches(wanted.lower(), names, n=3, cutoff=0.5)
    hint = f"Nearest: {', '.join(dict.fromkeys(close))}. " if close else ""
    raise SetupError(
        f"explain {name}: no rule has this code, and no repair has this name.\n"
        f"{hint}See tito-audit list rules and tito-audit list repairs."
    )


def _rule_head(rule: Rule, claimed_by: list[str]) -> str:
    """Title, severity, needs, and the repairs that claim its findings."""
    needs = ", ".join(str(need.name).lower().replace("|", " or ") for need in rule.needs if need)
    head = f"# {rule.code} {rule.name}\n\nSeverity: {rule.severity.word} at most. "
    head += f"Needs: {needs.replace('_', ' ')}. " if needs else "Needs only the row. "
    return head + (f"Repairs: {', '.join(claimed_by)}.\n\n" if claimed_by else "No repair claims it.\n\n")


def _repair_head(repair: Repair) -> str:
    """Title, safety, and what it claims."""
    cures = (
        f"Cures: {', '.join(repair.cures)}." if repair.cures else "Cures nothing by itself; it runs when asked."
    )
    return f"# {repair.name}\n\nSafety: {repair.safety}. {cures}\n\n"


def _print(manual: str) -> None:
    from tito_audit.terminal.terminal import colors, page_width

    if not colors(sys.stdout):
        return print(manual)
    from rich.console import Console
    from rich.markdown import Markdown

    Console(width=min(page_width(), 100)).print(Markdown(manual))
