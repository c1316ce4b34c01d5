"""How a log format's rows are recognized, read and written back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Place, Rollout
from tito_audit.record.sources import Sources
from tito_audit.signature import Signature

__all__ = ["Format", "Row", "SourcesOf"]

Row = Mapping[str, Any]
"""One row as storage gives it: a JSON object, or a Parquet row in which a list of numbers is a
one-dimensional numpy array and everything else plain Python values."""
SourcesOf = Callable[[Row, Sequence[Rollout]], Sequence[Sources]]
"""For each rollout that was read of a row, in order, where the row holds it."""


@dataclass(frozen=True, slots=True)
class Format:
    """One file of `formats/` defines one of these; every function is pure, storage has done the reading."""

    name: str
    title: str
    """What writes it, in a few words, for `tito-audit list formats`."""
    signature: Signature
    """The keys that show it."""
    precedence: int
    """Detection order: the lowest that matches wins (formats are tried in this order)."""
    matches: Callable[[Row], bool]
    """Keys first, then a value that confirms them. Cheap: it never walks a token list."""
    read: Callable[[Row, Place], Sequence[Rollout]]
    """RecordError if the shape fits and the sense does not. Several rollouts when a row holds a group;
    their `place.item` counts from 0."""
    update: Callable[[Row, Sequence[RepairedRollout]], Sequence[Row]]
    """The row, or several where a repair forked a rollout, with what the rollouts say in every copy that the
    row holds of it. Parts that no rollout changed are the same objects, and a row in which nothing changed
    is the row itself. RecordError when this shape cannot hold what the rollouts say."""
    sources: SourcesOf | None = None
    """Where the row holds the arrays of its rollouts; None: the format does not say."""
    shows: str = ""
    """What can be audited in it and what cannot, for the README's table."""
    open_object: str = ""
    """The object of a row that may hold keys of anybody, where the row itself may not; "": the row may."""
