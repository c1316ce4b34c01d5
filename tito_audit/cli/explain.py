"""`tito-audit explain`: prints the manual of a rule or repair, which is its docstring."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from tito_audit.cli._options import Options
from tito_audit.cli._outputs import print_object
from tito_audit.repairs import all_repairs
from tito_audit.report_objects import pick
from tito_audit.rule import Rule
from tito_audit.rules import FAMILIES, all_rules
from tito_audit.terminal.page import print_names
from tito_audit.terminal.terminal import colors, page_width
from tito_audit.unknown import unknown_name

GUIDES = {
    "ratios-explode": (
        "My ratios explode",
        "TOK101 TOK102 TOK103 SEQ301 LPR501 LPR502 LPR503 LPR504 LPR505 LPR506 LPR507 MSK401",
    ),
    "stripped-reasoning": (
        "The template strips reasoning of earlier turns: what now?",
        "SEQ302 TPL204 TPL205 TPL213",
    ),
    "what-to-log": ("What should my framework log?", "LPR503 LPR505 REC005 REC009 TPL211"),
    "drift-or-numerics": ("Is it drift or numerics?", "LPR507 LPR508 LPR509 REC008"),
}
"""By page of the docs: the question it answers, and the codes of the findings that raise it."""
_FIXES_NOTHING = "Fixes no finding; runs only if named by --with"


def explain(options: Options, name: str | None) -> None:
    """Print the manual of a rule, of a family or of a repair."""
    rules, repairs = all_rules(), all_repairs()
    as_object = options.shape != "text"
    families = {family: [rule for rule in rules if rule.code.startswith(family)] for family in FAMILIES}
    if name is None:
        if as_object:
            own = [pick(repair, "name safety title") for repair in repairs]
            of_families = [_family_object(family, of_it) for family, of_it in families.items()]
            return _print_object({"families": of_families, "repairs": own})
        counts = [(family, f"{len(of_it)}", FAMILIES[family]) for family, of_it in families.items()]
        print_names(("family", "rules", "about"), counts)
        print()
        does = [(each.name, str(each.safety), each.title) for each in repairs]
        print_names(("repair", "safety", "does"), does)
        return print("\nTo read about a family, a rule or a repair: tito-audit explain TOK, TOK101 or splice")
    wanted = name.strip()
    if (family := wanted.upper()) in families:
        if as_object:
            return _print_object(_family_object(family, families[family]))
        shown = [(rule.code, rule.severity.word, rule.title) for rule in families[family]]
        print(f"{family}: {FAMILIES[family]}\n")
        print_names(("code", "severity", "finds"), shown)
        return print(f"\nTo read about one: tito-audit explain {shown[0][0]}")
    for rule in rules:
        if wanted.upper() == rule.code or wanted.lower() == rule.name:
            claimed_by = [repair.name for repair in repairs if repair.claims(rule.code)]
            guides = {f"docs/{page}.md": title for page, (title, codes) in GUIDES.items() if rule.code in codes}
            if as_object:
                value = {**_rule_object(rule), "repairs": claimed_by, "guides": [*guides], "manual": rule.doc}
                return _print_object(value)
            more = "; ".join(f"{title} ({page})" for page, title in guides.items())
            read_also = f"\n\nRead also: {more}" if more else ""
            needs = ", ".join(str(need.name).lower().replace("|", " or ") for need in rule.needs if need)
            severity = f"up to {rule.severity.word}" if rule.severity else rule.severity.word
            head = f"# {rule.code} {rule.name}\n\nSeverity: {severity}. "
            head += f"Needs: {needs.replace('_', ' ')}. " if needs else "Needs only the row. "
            head += f"Repairs: {', '.join(claimed_by)}.\n\n" if claimed_by else "No repair fixes it.\n\n"
            return _print_manual(head + rule.doc.rstrip() + read_also)
    for repair in repairs:
        if wanted.lower() == repair.name:
            value = {"repair": repair.name, **pick(repair, "safety cures title"), "manual": repair.doc}
            fixes = f"Fixes: {', '.join(repair.cures)}" if repair.cures else _FIXES_NOTHING
            head = f"# {repair.name}\n\nSafety: {repair.safety}. {fixes}.\n\n"
            return _print_object(value) if as_object else _print_manual(head + repair.doc)
    names = [*FAMILIES, *(rule.code for rule in rules), *(rule.name for rule in rules)]
    names += [repair.name for repair in repairs]
    raise unknown_name("rule or repair", wanted, names, listed_by="tito-audit explain lists all")


def _print_object(value: dict[str, Any]) -> None:
    print_object({"schema_version": 1, **value})


def _rule_object(rule: Rule) -> dict[str, Any]:
    return {"code": rule.code, "name": rule.name, "severity": rule.severity.word, "title": rule.title}


def _family_object(family: str, rules: Sequence[Rule]) -> dict[str, Any]:
    return {"family": family, "about": FAMILIES[family], "rules": [_rule_object(rule) for rule in rules]}


def _print_manual(manual: str) -> None:
    if not colors(sys.stdout):
        return print(manual)
    Console(width=min(page_width(), 100)).print(Markdown(manual))
