"""The level of each log: how many rollouts have each level, what the next one lacks, and how to log it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tito_audit.levels.facts import (
    ASKED,
    EXPERTS_SEEN,
    Fact,
    RecordLevel,
    all_facts,
    level_of_format,
    level_of_mask,
)
from tito_audit.record.rollout import Place
from tito_audit.settings.model import Settings
from tito_audit.summary import RecordCounts
from tito_audit.terminal.words import listed, many

_APPLYING = {
    "kept_sets": "kept sets (`top_p` is 1 and `top_k` is -1)",
    "experts": "experts (no row holds any or names a model that has them)",
    "images": "images (no message shows one)",
}
"""Facts of L4 that do not apply to every row, with what shows that they do not."""


@dataclass(frozen=True, slots=True)
class LackingFact:
    """A fact that rollouts of a format lack for the next level of their log."""

    fact: Fact
    format: str
    rollouts: int
    first: Place

    @property
    def line(self) -> str:
        """How to log it, an imperative."""
        return level_of_format(self.format).line(self.fact)


@dataclass(frozen=True, slots=True)
class LogRecord:
    """The level of one log, or of several: that which all its rollouts have."""

    file: str
    rollouts: int = 0
    """How many there are; a row that cannot be read counts as one."""
    formats: Mapping[str, int] = field(default_factory=dict)
    """Rollouts of each format."""
    levels: Mapping[RecordLevel, int] = field(default_factory=dict)
    """How many rollouts have each level, from the lowest."""
    firsts: Mapping[RecordLevel, Place] = field(default_factory=dict)
    """The first rollout of each level."""
    lacking: Sequence[LackingFact] = ()
    """What lacks for the next level."""
    unreadable: int = 0
    """Rows that cannot be read, which hold nothing."""
    applies: Mapping[str, int] = field(default_factory=dict)
    """To how many rollouts kept sets, experts and images apply."""

    @classmethod
    def of(cls, file: str, counts: RecordCounts) -> LogRecord:
        """The level of the counted rollouts."""
        experts = all_facts()["experts"].bit
        seen = any(record & EXPERTS_SEEN for _, _, record in counts)
        levels, formats, applies = Counter[RecordLevel](), Counter[str](), Counter[str]()
        firsts: dict[RecordLevel, Place] = {}
        records = []
        for (_, format, record), (number, first) in counts.items():
            if seen and not record & EXPERTS_SEEN:
                record |= experts * ASKED | experts  # the model has experts, as the rows beside it show
            level = level_of_mask(record)
            levels[level] += number
            firsts.setdefault(level, first)
            formats[format] += number
            applies.update({name: number for name in _APPLYING if record & all_facts()[name].bit * ASKED})
            records.append((format, record, number, first))
        lowest = min(levels, default=RecordLevel.NONE)
        lacks: dict[tuple[str, str], tuple[int, Place]] = {}
        for format, record, number, first in records:
            for fact in all_facts().values():
                if format and fact.level == lowest + 1 and fact.bit & record:
                    before, where = lacks.get((fact.name, format), (0, first))
                    lacks[fact.name, format] = before + number, where
        return cls(
            file,
            levels.total(),
            {name: number for name, number in formats.most_common() if name},
            dict(sorted(levels.items())),
            firsts,
            [LackingFact(all_facts()[name], format, *what) for (name, format), what in lacks.items()],
            formats[""],
            dict(applies),
        )

    @property
    def level(self) -> RecordLevel:
        """The level that all rollouts have."""
        return min(self.levels, default=RecordLevel.NONE)

    @property
    def holds(self) -> RecordLevel:
        """The level that rows of these formats have a place for."""
        return min((level_of_format(name).holds for name in self.formats), default=RecordLevel.NONE)

    @property
    def sentence(self) -> str:
        """A sentence on what the next level lacks and how to log it; "" at the highest level."""
        lacks = self.lacks(
            lambda lines: "; and ".join(f"{listed(words)}: {line}" for line, words in lines.items())
        )
        return f"For {RecordLevel(self.level + 1)}, {lacks}." if lacks else ""

    def lacks(self, shown: Callable[[Mapping[str, Sequence[str]]], str]) -> str:
        """What the next level lacks, as part of a sentence; `shown` words facts, by the line that logs them."""
        return "; ".join([*(f"{who} {shown(lines)}" for who, lines in self.groups()), *self.unread])

    def groups(self) -> list[tuple[str, dict[str, list[str]]]]:
        """Who lacks something for the next level (`both rollouts lack`), and what, by the line that logs it."""
        alike: dict[tuple[int, Place], dict[str, list[str]]] = {}
        for lack in self.lacking:
            alike.setdefault((lack.rollouts, lack.first), {}).setdefault(lack.line, []).append(lack.fact.words)
        groups = []
        for (number, first), lines in alike.items():
            who = f"all {number:,} rollouts" if number > 2 else "both rollouts" if number == 2 else "the rollout"
            if number < self.rollouts:
                who = f"{number:,} of {self.rollouts:,} rollouts (first {first})"
            groups.append((f"{who} {'lacks' if number == 1 else 'lack'}", lines))
        return groups

    @property
    def unread(self) -> Sequence[str]:
        """A clause on rows that cannot be read; () if there are none."""
        if not self.unreadable:
            return ()
        place = self.firsts[RecordLevel.NONE]
        return (f"{many(self.unreadable, 'row')} cannot be read (first {place}): `tito-audit scan` says why",)

    @property
    def in_short(self) -> str:
        """The level and what the next one lacks, without how to log it."""
        facts = dict.fromkeys(lack.fact.name.replace("_", " ") for lack in self.lacking)
        lacks = f"; {RecordLevel(self.level + 1)} lacks {', '.join(facts)}" if facts else ""
        level = self.level.in_words if self.level is RecordLevel.NONE else f"level {self.level.in_words}"
        return f"{level}{lacks}"

    @property
    def not_asked(self) -> str:
        """A sentence on what L4 does not ask of these rollouts, and why; "" if it asks for everything."""
        words = [words for name, words in _APPLYING.items() if not self.applies.get(name)]
        return f"Not asked: {listed(words)}." if words and self.rollouts > self.unreadable else ""

    def as_object(self) -> dict[str, Any]:
        """The object of the JSON output."""
        return {
            "file": self.file,
            "level": None if self.level is RecordLevel.NONE else str(self.level),
            "rollouts": self.rollouts,
            "unreadable": self.unreadable,
            "formats": dict(self.formats),
            "holds": None if self.holds is RecordLevel.NONE else str(self.holds),
            "levels": {level.name.lower() if level < 0 else level.name: n for level, n in self.levels.items()},
            "first": {
                level.name.lower() if level < 0 else level.name: self.firsts[level] for level in self.levels
            },
            "lacks": [
                {"fact": lack.fact.name, "level": str(lack.fact.level), "words": lack.fact.words}
                | {"format": lack.format, "rollouts": lack.rollouts, "first": lack.first, "line": lack.line}
                for lack in self.lacking
            ],
            "applies": {name: self.applies.get(name, 0) for name in _APPLYING},
            "sentence": self.sentence,
        }


def log_records(counts: RecordCounts, files: Sequence[str] = ()) -> list[LogRecord]:
    """The level of each log, also of those `files` that hold no rollouts."""
    names = dict.fromkeys((*files, *(file for file, _, _ in counts)))
    return [LogRecord.of(name, {key: what for key, what in counts.items() if key[0] == name}) for name in names]


def level_failures(counts: RecordCounts, files: Sequence[str], settings: Settings) -> Iterator[str]:
    """A sentence for each log below its required level (`Settings.require_level`)."""
    required = {file: level for file in files if (level := settings.at(file).require_level) is not None}
    for record in log_records(counts, list(required)) if required else ():
        wanted = RecordLevel[required.get(record.file) or "L0"]
        if record.file not in required or record.level >= wanted:
            continue
        short = sum(number for level, number in record.levels.items() if level < wanted)
        share = "" if short == record.rollouts else f" in {short:,} of {record.rollouts:,} rollouts"
        lacks = record.lacks(lambda lines: listed([word for words in lines.values() for word in words]))
        lacks += " (`tito-audit validate` says how to log it)" if record.lacking else ""
        yield f"{record.file} has {record.level}{share}, {wanted} required: {lacks or 'there are no rollouts'}"
