"""`tito-audit explain`: the manual of a rule or repair, from its docstring."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from tito_audit.cli import _complete
from tito_audit.cli._command import command
from tito_audit.unknown import unknown

if TYPE_CHECKING:
    from tito_audit.repair import Repair
    from tito_audit.rule import Rule


@command("explain")
def explain(
    shape: str,
    name: Annotated[
        Optional[str],  # noqa: UP045 - read by Typer
        typer.Argument(
            metavar="[CODE|FAMILY|REPAIR]",
            help="A rule's code or name (TOK101), the letters of a family (TOK), or a repair's name (splice); "
            "without one, the list of all.",
            autocompletion=_complete.manuals,
        ),
    ] = None,
) -> None:
    """Print the manual of a rule (what it finds, why it matters, how to repair it), of a family or of a repair."""
    from tito_audit.cli._explained import all_object, print_all

    if name is None:
        print_all() if shape == "text" else _print_object(all_object())
    else:
        _explain(name.strip(), as_object=shape == "json")


def _explain(wanted: str, *, as_object: bool) -> None:
    from tito_audit.cli._explained import family_object, print_family, repair_object, rule_object
    from tito_audit.repairs import all_repairs
    from tito_audit.rules import FAMILIES, all_rules

    rules, repairs = all_rules(), all_repairs()
    if (family := wanted.upper()) in FAMILIES:
        return _print_object(family_object(family)) if as_object else print_family(family)
    for rule in rules:
        if wanted.upper() == rule.code or wanted.lower() == rule.name:
            claimed_by = [one.name for one in repairs if one.claims(rule.code)]
            if as_object:
                return _print_object(rule_object(rule, claimed_by))
            return _print(_rule_head(rule, claimed_by) + rule.doc)
    for repair in repairs:
        if wanted.lower() == repair.name:
            return _print_object(repair_object(repair)) if as_object else _print(_repair_head(repair) + repair.doc)
    names = [*FAMILIES, *(rule.code for rule in rules), *(rule.name for rule in rules)]
    names += [one.name for one in repairs]
    raise unknown("rule or repair", wanted, names, listed_by="tito-audit explain lists all")


def _print_object(found: dict[str, Any]) -> None:
    from tito_audit.cli._explained import SCHEMA_VERSION
    from tito_audit.report_objects import as_json

    print(as_json({"schema_version": SCHEMA_VERSION, **found}))


def _rule_head(rule: Rule, claimed_by: list[str]) -> str:
    """Title, severity, needs, and the repairs that claim its findings."""
    needs = ", ".join(str(need.name).lower().replace("|", " or ") for need in rule.needs if need)
    head = f"# {rule.code} {rule.name}\n\nSeverity: {_severity(rule)}. "
    head += f"Needs: {needs.replace('_', ' ')}. " if needs else "Needs only the row. "
    return head + (f"Repairs: {', '.join(claimed_by)}.\n\n" if claimed_by else "No repair fixes it.\n\n")


def _severity(rule: Rule) -> str:
    """`up to error`; the lowest severity alone."""
    return f"up to {rule.severity.word}" if rule.severity else rule.severity.word


def _repair_head(repair: Repair) -> str:
    """Title, safety, and what it claims."""
    cures = (
        f"Fixes: {', '.join(repair.cures)}." if repair.cures else "Fixes no finding; runs only if named by --with."
    )
    return f"# {repair.name}\n\nSafety: {repair.safety}. {cures}\n\n"


def _print(manual: str) -> None:
    from tito_audit.terminal.terminal import colors, page_width

    if not colors(sys.stdout):
        return print(manual)
    from rich.console import Console
    from rich.markdown import Markdown

    Console(width=min(page_width(), 100)).print(Markdown(manual))
