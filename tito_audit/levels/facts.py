"""Levels of a record, the facts that each asks for, and where formats keep them: what `levels.toml` says."""

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
        return _data().words[self]


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that a record may hold."""

    name: str
    bit: int
    """Its bit in the mask of what a rollout lacks."""
    level: RecordLevel
    """The level that asks for it."""
    words: str
    """What is lacking, to be read after "lacks"."""
    line: str
    """How to log it where the framework has no line of its own; an imperative."""
    names: tuple[str, ...] = ()
    """Keys that state it."""


@dataclass(frozen=True, slots=True)
class FormatLevel:
    """What a log format has a place for."""

    holds: RecordLevel
    """The level that its rows can have; for a dense model of text."""
    holders: tuple[str, ...] = ()
    """Paths of objects that state facts; `calls[]`: each entry of a list, `steps[metrics]`: each with that key."""
    stops: tuple[str, ...] = ()
    """Paths of objects that state why calls ended, if the format does not read that."""
    others: bool = False
    """Whether rows that hold no tokens are other events, such as rewards, and no rollouts."""
    lines: Mapping[str, str] = field(default_factory=dict)
    """By fact: what logs it in its framework, an imperative."""

    def line(self, fact: Fact) -> str:
        """What logs a fact."""
        return self.lines.get(fact.name, fact.line)


@dataclass(frozen=True, slots=True)
class _Data:
    words: Mapping[RecordLevel, str]
    facts: Mapping[str, Fact]
    formats: Mapping[str, FormatLevel]
    with_experts: re.Pattern[str]


@cache
def _data() -> _Data:
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
    return _Data(words, facts, formats, re.compile(table["with_experts"], re.IGNORECASE))


def all_facts() -> Mapping[str, Fact]:
    """Every fact by name, in the order of levels."""
    return _data().facts


def level_of_format(name: str) -> FormatLevel:
    """What the format of that name has a place for; that of `generic` for a format that is not listed."""
    formats = _data().formats
    return formats.get(name, formats["generic"])


def has_experts(model: str) -> bool:
    """Whether the name of a model is that of a mixture of experts, such as `Qwen3-30B-A3B`."""
    return _data().with_experts.search(model) is not None


ASKED = 1 << 16
"""A fact that is asked of a rollout only if it applies has its bit in a mask times this as well."""
EXPERTS_SEEN = 1 << 30
"""In a mask: the record holds experts, so the rows beside it should too."""
NOTHING = ASKED - 1
"""The mask of a row that cannot be read: it holds nothing."""


def level_of(record: int) -> RecordLevel:
    """The level of a record, by its mask."""
    missing = [fact.level for fact in all_facts().values() if fact.bit & record]
    return RecordLevel(min(missing) - 1) if missing else RecordLevel.L4
