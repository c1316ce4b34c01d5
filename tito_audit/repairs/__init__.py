"""Findings to repaired rollouts; one file a repair."""

from __future__ import annotations

import difflib
from functools import cache

from tito_audit.errors import SetupError
from tito_audit.registry import plugins
from tito_audit.repair import Repair

__all__ = ["all_repairs", "repair_named"]


@cache
def all_repairs() -> tuple[Repair, ...]:
    """Every repair, in the order in which they are tried."""
    found = plugins(__name__, Repair, lambda repair: repair.name)
    return tuple(sorted(found, key=lambda repair: (repair.precedence, repair.name)))


def repair_named(name: str) -> Repair:
    """The repair of that name; SetupError, with similar names, when there is none."""
    names = {repair.name: repair for repair in all_repairs()}
    if name in names:
        return names[name]
    close = difflib.get_close_matches(name, names, n=3)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    raise SetupError(
        f"--with {name}: no such repair.{hint}\nRepairs: {', '.join(names)} (tito-audit list repairs)."
    )
