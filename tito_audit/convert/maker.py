"""The contract of a maker: rollouts in, a row of a format out that none of its logs held before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tito_audit.format import Row
from tito_audit.record.rollout import Rollout


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
    format: str
    """The name of the format that reads the row."""
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
