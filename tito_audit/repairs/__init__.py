"""Findings to repaired rollouts; one file per repair."""

from __future__ import annotations

from functools import cache

from tito_audit.registry import load_plugins
from tito_audit.repair import Repair
from tito_audit.unknown import unknown_name

__all__ = ["all_repairs", "repair_named"]


@cache
def all_repairs() -> tuple[Repair, ...]:
    """Every repair, in the order in which they are tried."""
    repairs = load_plugins(__name__, Repair, lambda repair: repair.name)
    return tuple(sorted(repairs, key=lambda repair: (repair.precedence, repair.name)))


def repair_named(name: str) -> Repair:
    """The repair of that name; SetupError, with similar names, when there is none."""
    names = {repair.name: repair for repair in all_repairs()}
    if name in names:
        return names[name]
    raise unknown_name("repair", name, names, flag="--with")
