"""How far two token sequences agree."""

from __future__ import annotations

from tito_audit.record.arrays import Ids

__all__ = ["agreement"]


def agreement(a: Ids, b: Ids) -> int:
    """How many tokens two arrays start with in common."""
    n = min(len(a), len(b))
    unequal = a[:n] != b[:n]
    return int(unequal.argmax()) if unequal.any() else n
