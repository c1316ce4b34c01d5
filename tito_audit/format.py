"""The contract of a log format: how its rows are told apart, read and written again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tito_audit.record.mended import Mended
from tito_audit.record.rollout import Place, Rollout

__all__ = ["Format", "Holds", "Maker", "Row", "Sample"]

Row = Mapping[str, Any]
"""One row as storage gives it: a JSON object, or a Parquet row in which a list of numbers is a
one-dimensional numpy array and everything else plain Python values."""


class Holds(StrEnum):
    """What a rollout is in a log."""

    ROWS = "training rows"
    CALLS = "calls"


@dataclass(frozen=True, slots=True)
class Sample:
    """One rollout for a maker: with a training row and no calls, or with calls and no training row."""

    rollout: Rollout
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What its log says of it beside tokens, messages and tools, by the names of the row that is made."""


@dataclass(frozen=True, slots=True)
class Maker:
    """How rollouts that no log of the format held before become a row of it; pure, for `tito-audit convert`."""

    name: str
    """What `--to` takes."""
    title: str
    holds: Holds
    make: Callable[[Sequence[Sample]], Row]
    """One sample, or those of a group where rows hold groups. RecordError when the shape has no place for them.
    Of a sample's columns and facts it writes what it has a place for; reading the row again shows which."""
    own: frozenset[str]
    """Keys of the row that no fact may take."""
    slots: Mapping[str, str] = field(default_factory=dict)
    """Names of facts to the names that the row has for them."""
    wants: tuple[str, ...] = ()
    """Facts of the row that a trainer needs; a log that lacks one is told so, and the row has none or null."""
    takes_facts: bool = True
    """Whether the row has a place for any fact; else only for those of `slots`."""
    grouped: bool = False
    """Whether a row holds a group."""
    tables: bool = False
    """Whether its rows can be read from Parquet, where messages, tools and calls are JSON in a string."""


@dataclass(frozen=True, slots=True)
class Format:
    """One file of `formats/` defines one of these; every function is pure, storage has done the reading."""

    name: str
    title: str
    """What writes it, in a few words, for `tito-audit list formats`."""
    signature: str
    """The keys that tell it, for people."""
    precedence: int
    """Detection order: the lowest that matches wins (formats are tried in this order)."""
    matches: Callable[[Row], bool]
    """Keys first, then a value that confirms them. Cheap: it never walks a token list."""
    read: Callable[[Row, Place], Sequence[Rollout]]
    """RecordError if the shape fits and the sense does not. Several rollouts when a row holds a group;
    their `place.item` counts from 0."""
    update: Callable[[Row, Sequence[Mended]], Sequence[Row]]
    """The row, or several where a repair forked a rollout, with what the rollouts say in every copy that the
    row holds of it. Parts that no rollout changed are the same objects, and a row in which nothing changed
    is the row itself. RecordError when this shape cannot hold what the rollouts say."""
    shows: str = ""
    """What can be audited in it and what cannot, for the README's table."""
    open_object: str = ""
    """The object of a row that may hold keys of anybody, where the row itself may not; "": the row may."""
    makers: tuple[Maker, ...] = ()
    """How rows of it are made of the rollouts of other logs; () when they cannot be."""
