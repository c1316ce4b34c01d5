"""The contract of a maker: rollouts in, a new row of a format out."""

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
class MakerInput:
    """One rollout for a maker: with a training row and no calls, or with calls and no training row."""

    rollout: Rollout
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What its log says besides tokens, messages and tools, by its name in the new row."""
    of_calls: Sequence[Mapping[str, Any]] = ()
    """What its log says about each single call; () unless calls were joined and the row has a place for it."""


@dataclass(frozen=True, slots=True)
class Maker:
    """How rollouts of any log become a row of a format, for `tito-audit convert`; pure functions."""

    name: str
    """What `--to` takes."""
    format: str
    """The name of the format that reads the row."""
    title: str
    holds: Holds
    make: Callable[[Sequence[MakerInput]], Row]
    """The row of one sample, or of a group where rows hold groups; RecordError when the row cannot hold them. It
    writes the columns and facts that it has a place for; reading the row back shows which."""
    own: frozenset[str]
    """Keys of the row that no fact may use."""
    slots: Mapping[str, str] = field(default_factory=dict)
    """Names of facts to their names in the row."""
    wants: tuple[str, ...] = ()
    """Facts that a trainer needs; those that the log lacks are reported, and are missing or null in the row."""
    takes_facts: bool = True
    """Whether the row has a place for any fact, or only for those in `slots`."""
    own_of_calls: frozenset[str] | None = None
    """Keys of its calls that no fact of a call may use; None: calls have no place for facts."""
    grouped: bool = False
    """Whether a row holds a group."""
    tables: bool = False
    """Whether its rows can be stored as Parquet, with messages, tools and calls as JSON strings."""
