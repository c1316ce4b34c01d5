"""The findings worth showing, bounded lists of them, and what to do next."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from io import StringIO
from itertools import chain, zip_longest
from operator import itemgetter
from typing import Generic, TypeVar

from tito_audit.record.finding import Finding, Result, Severity, Where
from tito_audit.record.trainings import ONCE
from tito_audit.report import ReportOptions
from tito_audit.summary import Summary
from tito_audit.terminal.escape import shell_word, visible
from tito_audit.terminal.place import show_command, with_options, with_tokenizer
from tito_audit.terminal.verdict import NOT_APPEND_ONLY, OF_REASONING

FIRST = "REC007", "REC011", "TPL210", "TPL212"
"""The codes whose findings about a whole log are shown first, because all others depend on them."""
_UNREADABLE = "REC001"
"""The code of rows that cannot be read."""
_MISFIT = "REC007"
"""The code of a log of another tokenizer or chat template."""
_RENDERING = frozenset(("--chat-template", "--template-name", "--template-arg", "--tool-arguments", "--clock"))
"""Flags that say how prompts are rendered, which `identify` finds out."""
_VALUES = re.compile(r"near .*\Z|\d[\d,]*|'[^']*'|\"[^\"]*\"", re.DOTALL)
"""What differs between messages of one reason: numbers, names and what is near."""
_UNREADABLE_SHOWN = 2
"""Maximum findings shown of rows that cannot be read, which have many reasons; one of every other headline."""

_Key = tuple[str, str, str]
"""Code, file and cause, or the reason of a row that cannot be read: what identifies an entry."""
_GroupKey = tuple[str, str]
"""A headline and what it counts."""
T = TypeVar("T")


@dataclass(slots=True)
class _WorstGroup:
    findings: int = 0
    rows: int = 0
    places: list[str] = field(default_factory=list)
    last: int = -1

    def add(self, finding: Finding) -> None:
        self.findings += finding.times
        place = finding.place
        if place.row == self.last:
            return
        self.rows, self.last = self.rows + 1, place.row
        if len(self.places) < 5:
            self.places.append(f"{place.row}[{place.item}]" if place.item else f"{place.row}")


@dataclass(frozen=True, slots=True)
class WorstEntry:
    """One finding that represents all with its code, log, cause and severity."""

    finding: Finding
    findings: int = 1
    """How many findings it represents."""
    rows: int = 1
    """In how many rows of the log they are."""
    places: tuple[str, ...] = ()
    """The first of those rows."""


class Worst:
    """A bounded selection of findings: one per code, log and cause, with a count of all like it.

    Findings that follow from another are left out.
    """

    def __init__(self) -> None:
        self._kept: dict[_GroupKey, dict[Hashable, Finding]] = {}
        self._groups: dict[tuple[_Key, Severity], _WorstGroup] = {}

    def add(self, findings: Iterable[Finding]) -> None:
        """Keep those findings of a rollout that may be among the worst."""
        several = list(findings)
        roots: dict[str | None, _Key] = {}
        if len(several) > 1:
            roots = {finding.fingerprint: _key(finding) for finding in several if finding.because_of is None}
        for finding in several:
            key = _key(finding)
            group = self._groups.get((key, finding.severity))
            if finding.because_of in roots:
                if group is not None and roots[finding.because_of] == key:
                    group.add(finding)  # one more of its root's kind
                continue
            if group is None and len(self._groups) < 4_096:
                group = self._groups[key, finding.severity] = _WorstGroup()
            if group is not None:
                group.add(finding)
            # Of each headline a few, so that memory stays bounded: the most severe; a milder one makes room.
            like = self._kept.setdefault(_group(finding), {})
            before = like.get(key)
            if before is None and len(like) >= 8:
                mildest = min(like, key=lambda other: like[other].severity)
                if like[mildest].severity >= finding.severity:
                    continue
                del like[mildest]
            if before is None or before.severity < finding.severity:
                like[key] = finding

    def pick(self, number: int, least: Severity = Severity.NOTE) -> list[WorstEntry]:
        """At most `number` findings from `least` up: errors, warnings, notes, alternating between headlines.

        Findings about what wrote the log come first.
        """
        left = dict.fromkeys(self._kept, _UNREADABLE_SHOWN)
        picked: list[WorstEntry] = []
        groups = sorted(self._kept, key=lambda group: (-self._findings_of(group), group[0]))
        shown = [severity for severity in sorted(Severity, reverse=True) if severity >= least]
        ranked = [[self._of(group, severity) for group in groups] for severity in shown]
        for columns in ([self._of(group, None) for group in groups], *ranked):
            for finding in chain.from_iterable(zip_longest(*columns)):
                group = None if finding is None else _group(finding)
                if finding is None or group is None or finding.severity < least:
                    continue
                if left[group] > 0 and len(picked) < number:
                    left[group] -= 1 if finding.code == _UNREADABLE else _UNREADABLE_SHOWN
                    picked.append(self._entry(finding))
        return picked

    def _findings_of(self, group: _GroupKey) -> int:
        entries = (self._groups.get((_key(finding), finding.severity)) for finding in self._kept[group].values())
        return sum(entry.findings for entry in entries if entry is not None)

    def _of(self, group: _GroupKey, severity: Severity | None) -> list[Finding]:
        """The findings of a headline with this severity; None: those about what wrote the log."""
        findings = sorted(self._kept[group].values(), key=lambda finding: -self._entry(finding).findings)
        if severity is None:
            return [finding for finding in findings if leads(finding)]
        return [finding for finding in findings if finding.severity is severity and not leads(finding)]

    def _entry(self, finding: Finding) -> WorstEntry:
        group = self._groups.get((_key(finding), finding.severity))
        if group is None:
            return WorstEntry(finding)
        return WorstEntry(finding, group.findings, group.rows, tuple(group.places))


def by_weight(codes: Iterable[str]) -> list[str]:
    """Codes sorted, with those that are only about a whole log and come first at the front."""
    return sorted(codes, key=lambda code: (code not in FIRST[:2], code))


def leads(finding: Finding) -> bool:
    """Whether a finding is about what wrote the whole log."""
    return finding.code in FIRST and finding.hit.where is Where.LOG


def more_words(entry: WorstEntry) -> str:
    """`119 more like it, in rows 0, 3, 4, 7, 9, …`; empty if there is only one."""
    if entry.findings < 2 or entry.finding.hit.where is Where.LOG:
        return ""
    named = ", ".join([*entry.places, *(["…"] if entry.rows > len(entry.places) else [])])
    row = f"row {named}" if entry.rows == 1 else f"{entry.rows:,} rows: {named}"
    return f"{entry.findings:,} like this in {row}"


def entry_lines(entry: WorstEntry, width: int, *, named: bool = False) -> Iterator[str]:
    """The lines of a finding as the terminal shows it, without colours, and how many are like it."""
    from tito_audit.terminal.page import console_for, finding_lines

    for line in finding_lines(entry.finding, console_for(StringIO(), ReportOptions(width=width)), named=named):
        yield line.plain.rstrip()
    if more := more_words(entry):
        yield f"  {visible(more)}"


def _group(finding: Finding) -> _GroupKey:
    if finding.code in OF_REASONING:
        return NOT_APPEND_ONLY, ""
    return finding.headline or finding.code, finding.unit


def _key(finding: Finding) -> _Key:
    hit = finding.hit
    # Rows that cannot be read have one cause and many reasons, each with its own places and values.
    why = _VALUES.sub("#", hit.message) if finding.code == _UNREADABLE else hit.cause
    return finding.code, finding.place.file, why


class Shortlist(Generic[T]):
    """Keeps up to `limit` of all values offered.

    A value of higher rank replaces one of the lowest rank. Within a rank the kinds share the room, and the first
    of each kind are kept.
    """

    def __init__(self, limit: int) -> None:
        self.offered = 0
        self._limit = limit
        self._size = 0
        self._ranks: dict[int, dict[str, list[tuple[int, T]]]] = {}

    @property
    def left_out(self) -> int:
        """How many of the offered values are not kept."""
        return self.offered - self._size

    def offer(self, rank: int, kind: str, value: T) -> None:
        """Keep the value if there is room, or if it ranks above one that is kept."""
        self.offered += 1
        if self._size == self._limit and not self._made_room(rank, kind):
            return
        self._ranks.setdefault(rank, {}).setdefault(kind, []).append((self.offered, value))
        self._size += 1

    def __iter__(self) -> Iterator[T]:
        """The highest rank first; within a rank in the order offered."""
        for rank in sorted(self._ranks, reverse=True):
            entries = chain.from_iterable(self._ranks[rank].values())
            yield from (value for _, value in sorted(entries, key=itemgetter(0)))

    def __len__(self) -> int:
        return self._size

    def _made_room(self, rank: int, kind: str) -> bool:
        """Whether a value worth less was dropped."""
        if not self._limit:
            return False
        lowest = min(self._ranks)
        if rank < lowest:
            return False
        kinds = self._ranks[lowest]
        fullest = max(kinds, key=lambda name: len(kinds[name]))
        if rank == lowest and len(kinds.get(kind, ())) + 1 >= len(kinds[fullest]):
            return False
        kinds[fullest].pop()
        if not kinds[fullest]:
            del kinds[fullest]
        if not kinds:
            del self._ranks[lowest]
        self._size -= 1
        return True


@dataclass(slots=True)
class Curable:
    """New findings: the worst, and whether a repair may fix some."""

    worst: Worst = field(default_factory=Worst)
    again: Severity | None = None
    """The worst of those with a repair that has to be named by --with; None without any."""
    _repairable: dict[str, Severity] = field(default_factory=dict)
    """By log, the worst of its findings that another repair fits."""
    _repaired: set[str] = field(default_factory=set)
    """Logs with rows that a repair wrote: what is left in them, it has tried."""

    def add(self, result: Result) -> None:
        new = [finding for finding in result.findings if not finding.known]
        self.worst.add(new)
        if result.counts.get("repaired"):
            self._repaired.add(result.place.file)
        for finding in new:
            if finding.repair == ONCE:
                self.again = max(self.again or Severity.NOTE, finding.severity)
            elif finding.repair is not None:
                worst = self._repairable.get(result.place.file, Severity.NOTE)
                self._repairable[result.place.file] = max(worst, finding.severity)

    @property
    def repairable(self) -> Severity | None:
        """The worst of the findings that a repair fits and that none has tried; None without any."""
        return max((worst for log, worst in self._repairable.items() if log not in self._repaired), default=None)

    @property
    def first(self) -> Finding | None:
        """The worst finding; None without any."""
        return next((entry.finding for entry in self.worst.pick(1)), None)


@dataclass(frozen=True, slots=True)
class NextCommand:
    """A command, and what it does."""

    command: str
    says: str


def next_steps(
    worst: Finding | None,
    curable: Curable,
    summary: Summary,
    *,
    browse: bool = False,
    least: Severity = Severity.NOTE,
) -> Iterator[NextCommand]:
    """Commands that explain and show the worst finding and repair all; `browse`: also one that shows all."""
    misfit = worst is not None and worst.code == _MISFIT
    if worst is not None and misfit:
        # The command that finds what wrote a log that the tokenizer or the template did not write.
        # With another template, the tokenizer is not in doubt.
        words = "" if "tokenizer" in worst.hit.cause else with_tokenizer(summary)
        pairs = zip(summary.reading[::2], summary.reading[1::2], strict=True)
        flags = [word for pair in pairs if pair[0] not in _RENDERING for word in pair] + list(summary.joining)
        words += "".join(f" {shell_word(word)}" for word in flags)
        says = "finds what wrote it; -t DIR names a tokenizer to try"
        yield NextCommand(f"tito-audit identify {shell_word(worst.place.file)}{words}", says)
    if worst is not None:
        if worst.code == _UNREADABLE:
            look = f"tito-audit inspect {shell_word(worst.place.file)}{with_tokenizer(summary)}"
            yield NextCommand(look, "its columns, and a mapping to paste")
        yield NextCommand(f"tito-audit explain {worst.code}", "what it means, and what fixes it")
        # A wrong tokenizer shows no token as it is, and without ids there are none.
        if worst.code != _UNREADABLE and not misfit and (summary.compared or summary.uncompared):
            yield NextCommand(show_command(worst.place, summary), "that rollout, token by token")
    if misfit or not summary.rollouts:  # with the right tokenizer there are other findings
        return
    log = shell_word(summary.files[0]) if len(summary.files) == 1 else "…"
    repair = f"tito-audit repair {log} -o OUT{with_options(summary)}"
    if curable.repairable is not None and curable.repairable >= least:
        # By default a repair leaves warnings alone.
        bar = "" if curable.repairable is Severity.ERROR else " --fail-on warning"
        yield NextCommand(f"{repair}{bar}", "repairs what it can prove; --dry-run tells what, and writes nothing")
    if curable.again is not None and curable.again >= least:
        yield NextCommand(f"{repair} --with {ONCE}", "takes repeated training out of the loss where it is certain")
    if worst is not None and browse:
        yield NextCommand("tito-audit scan … --report html=report.html", "every finding, in a browser")
    gate = summary.gate
    # What was not checked, a baseline cannot accept.
    if gate is not None and gate.baseline and (gate.failing or any(rate.failed for rate in gate.rates)):
        yield NextCommand("tito-audit scan … --update-baseline", "accept what is new")
