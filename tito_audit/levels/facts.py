"""What `levels.toml` says: the levels of a record, the facts that each asks for, and where formats keep them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from importlib.resources import files


class RecordLevel(IntEnum):
    """How much of a rollout a record holds; each level includes those below it."""

    NONE = -1
    L0 = 0
    L1 = 1
    L2 = 2
    L3 = 3
    L4 = 4

    def __str__(self) -> str:
        return "no level" if self is RecordLevel.NONE else self.name

    @property
    def in_words(self) -> str:
        """`L2, mask and logprobs`"""
        return "no level" if self is RecordLevel.NONE else f"{self.name}, {self.words}"

    @property
    def words(self) -> str:
        """What a record of this level holds, in a few words."""
        return _read_levels().words[self]


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that the record of a rollout may hold."""

    name: str
    bit: int
    """Its bit in the mask of what a rollout lacks."""
    level: RecordLevel
    """The level that asks for it."""
    words: str
    """What is lacking, read after "lacks"."""
    line: str
    """How to log it if the framework has no line of its own; an imperative."""
    names: tuple[str, ...] = ()
    """Keys that state it."""


@dataclass(frozen=True, slots=True)
class FormatLevel:
    """What a log format has a place for."""

    holds: RecordLevel
    """The highest level that its rows can have, for a dense model of text."""
    holders: tuple[str, ...] = ()
    """Paths of objects with facts: `calls[]` is each entry of a list, `steps[metrics]` each with that key."""
    stops: tuple[str, ...] = ()
    """Paths of objects that state why calls ended, if the format itself does not read that."""
    others: bool = False
    """Whether rows without tokens are other events, such as rewards, instead of rollouts."""
    lines: Mapping[str, str] = field(default_factory=dict)
    """By fact: how to log it in the format's framework, an imperative."""

    def line(self, fact: Fact) -> str:
        """How to log a fact."""
        return self.lines.get(fact.name, fact.line)


@dataclass(frozen=True, slots=True)
class _LevelTable:
    words: Mapping[RecordLevel, str]
    facts: Mapping[str, Fact]
    formats: Mapping[str, FormatLevel]
    with_experts: re.Pattern[str]


@cache
def _read_levels() -> _LevelTable:
    """The content of `levels.toml`."""
    text = files("tito_audit").joinpath("levels/levels.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
    words = {RecordLevel[name]: words for name, words in table["levels"].items()}
    facts = {
        name: Fact(
            name, 1 << at, RecordLevel[fact["level"]], fact["lacks"], fact["line"], tuple(fact.get("names", ()))
        )
        for at, (name, fact) in enumerate(table["facts"].items())
    }
    formats = {
        name: FormatLevel(
            RecordLevel[entry["holds"]],
            (*table["holders"], *entry.get("holders", ())),
            tuple(entry.get("stops", ())),
            entry.get("others", False),
            entry.get("lines", {}),
        )
        for name, entry in table["formats"].items()
    }
    return _LevelTable(words, facts, formats, re.compile(table["with_experts"], re.IGNORECASE))


def all_facts() -> Mapping[str, Fact]:
    """Every fact by name, in the order of levels."""
    return _read_levels().facts


def level_of_format(name: str) -> FormatLevel:
    """What a format has a place for; for a format that is not listed, as `generic`."""
    formats = _read_levels().formats
    return formats.get(name, formats["generic"])


def is_mixture_of_experts(model: str) -> bool:
    """Whether a model's name tells that it is a mixture of experts, as `Qwen3-30B-A3B` does."""
    return _read_levels().with_experts.search(model) is not None


ASKED = 1 << 16
"""In a mask, `bit * ASKED` is set for a fact of L4 that applies to the rollout and is asked of it."""
EXPERTS_SEEN = 1 << 30
"""In a mask: the record holds experts, so other rows of its log should too."""
LACKS_ALL = ASKED - 1
"""The mask of a row that cannot be read."""


def level_of_mask(mask: int) -> RecordLevel:
    """The level of a record that lacks these facts."""
    missing = [fact.level for fact in all_facts().values() if fact.bit & mask]
    return RecordLevel(min(missing) - 1) if missing else RecordLevel.L4
