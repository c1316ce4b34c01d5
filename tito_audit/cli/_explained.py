"""What `explain` prints for a family of rules, and without a name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tito_audit.cli._tables import print_table
from tito_audit.repair import Repair
from tito_audit.repairs import all_repairs
from tito_audit.rule import Rule
from tito_audit.rules import FAMILIES, all_rules

SCHEMA_VERSION = 1


def rules_of(family: str) -> list[Rule]:
    """The rules whose codes begin with the letters of a family."""
    return [rule for rule in all_rules() if rule.code.startswith(family)]


def print_family(family: str) -> None:
    """The rules of a family, and how to read about one."""
    rules = rules_of(family)
    print(f"{family}: {FAMILIES[family]}\n")
    print_table(("code", "severity", "finds"), [(one.code, one.severity.word, one.title) for one in rules])
    print(f"\nTo read about one: tito-audit explain {rules[0].code}")


def print_all() -> None:
    """The families and the repairs, and how to read about one."""
    families = [(family, f"{len(rules_of(family))}", about) for family, about in FAMILIES.items()]
    print_table(("family", "rules", "about"), families)
    print()
    print_table(("repair", "safety", "does"), [(one.name, str(one.safety), one.title) for one in all_repairs()])
    print("\nTo read about a family, a rule or a repair: tito-audit explain TOK, TOK101 or splice")


def family_object(family: str) -> dict[str, Any]:
    """A family and its rules."""
    rules = [
        {"code": one.code, "name": one.name, "severity": one.severity.word, "title": one.title}
        for one in rules_of(family)
    ]
    return {"family": family, "about": FAMILIES[family], "rules": rules}


def all_object() -> dict[str, Any]:
    """The families and the repairs."""
    repairs = [{"name": one.name, "safety": str(one.safety), "title": one.title} for one in all_repairs()]
    return {"families": [family_object(one) for one in FAMILIES], "repairs": repairs}


def rule_object(rule: Rule, claimed_by: Sequence[str]) -> dict[str, Any]:
    """A rule with its manual."""
    return {
        "code": rule.code,
        "name": rule.name,
        "severity": rule.severity.word,
        "title": rule.title,
        "repairs": list(claimed_by),
        "manual": rule.doc,
    }


def repair_object(repair: Repair) -> dict[str, Any]:
    """A repair with its manual."""
    return {
        "repair": repair.name,
        "safety": str(repair.safety),
        "cures": list(repair.cures),
        "title": repair.title,
        "manual": repair.doc,
    }
