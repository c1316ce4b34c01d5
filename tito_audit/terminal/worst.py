"""Which findings to show when there are many, and which commands to run next."""

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
from tito_audit.terminal.place import option_flags, show_command, tokenizer_flag
from tito_audit.terminal.verdict import NOT_APPEND_ONLY, REASONING_CODES

LOG_DOUBTS = "REC007", "REC011", "TPL210", "TPL212"
"""Rules that doubt the tokenizer or template of a whole log; as all others depend on them, they come first."""
_UNREADABLE = "REC001"
"""Rows that cannot be read."""
_MISFIT = "REC007"
"""A log that another tokenizer or chat template wrote."""
_RENDERING = frozenset(("--chat-template", "--template-name", "--template-arg", "--tool-arguments", "--clock"))
"""Flags on how prompts are rendered; `identify` is not passed them, since it finds them out."""
_VALUES = re.compile(r"near .*\Z|\d[\d,]*|'[^']*'|\"[^\"]*\"", re.DOTALL)
"""The parts of a message that differ between rows unreadable for the same reason."""
_UNREADABLE_SHOWN = 2
"""Maximum unreadable rows shown, as their reasons differ; of other headlines one finding is shown."""

_EntryKey = tuple[str, str, str]
"""Code, file and cause of a finding; of an unreadable row the reason instead of the cause."""
_HeadlineKey = tuple[str, str]
"""A headline and what it counts."""
T = TypeVar("T")


@dataclass(slots=True)
class _GroupCount:
    findings: int = 0
    rows: int = 0
    places: list[str] = field(default_factory=list)
    last_row: int = -1

    def add(self, finding: Finding) -> None:
        self.findings += finding.times
        place = finding.place
        if place.row == self.last_row:
            return
        self.rows, self.last_row = self.rows + 1, place.row
        if len(self.places) < 5:
            self.places.append(f"{place.row}[{place.item}]" if place.item else f"{place.row}")


@dataclass(frozen=True, slots=True)
class WorstEntry:
    """A finding that stands for all with its code, log, cause and severity."""

    finding: Finding
    findings: int = 1
    """How many findings it stands for."""
    rows: int = 1
    """In how many rows of the log they are."""
    places: tuple[str, ...] = ()
    """The first of those rows."""


class WorstFindings:
    """A bounded selection of findings: one per code, log and cause, with a count of all like it.

    A finding that follows from another (`because_of`) is left out.
    """

    def __init__(self) -> None:
        self._kept: dict[_HeadlineKey, dict[Hashable, Finding]] = {}
        self._groups: dict[tuple[_EntryKey, Severity], _GroupCount] = {}

    def add(self, findings: Iterable[Finding]) -> None:
        """Offer the findings of one rollout; those that may be among the worst are kept."""
        several = list(findings)
        roots: dict[str | None, _EntryKey] = {}
        if len(several) > 1:
            roots = {finding.fingerprint: _entry_key(finding) for finding in several if finding.because_of is None}
        for finding in several:
            key = _entry_key(finding)
            group = self._groups.get((key, finding.severity))
            if finding.because_of in roots:
                if group is not None and roots[finding.because_of] == key:
                    group.add(finding)  # one more of its root's kind
                continue
            if group is None and len(self._groups) < 4_096:
                group = self._groups[key, finding.severity] = _GroupCount()
            if group is not None:
                group.add(finding)
            # At most eight of each headline, so that memory stays bounded: a more severe one replaces the mildest.
            like = self._kept.setdefault(_headline_key(finding), {})
            before = like.get(key)
            if before is None and len(like) >= 8:
                mildest = min(like, key=lambda other: like[other].severity)
                if like[mildest].severity >= finding.severity:
                    continue
                del like[mildest]
            if before is None or before.severity < finding.severity:
                like[key] = finding

    def pick(self, number: int, least: Severity = Severity.NOTE) -> list[WorstEntry]:
        """At most `number` findings from `least` up: those about a whole log, then errors, warnings, notes.

        Within a severity, headlines take turns.
        """
        left = dict.fromkeys(self._kept, _UNREADABLE_SHOWN)
        picked: list[WorstEntry] = []
        counts = {}
        for headline, findings in self._kept.items():
            entries = (self._groups.get((_entry_key(each), each.severity)) for each in findings.values())
            counts[headline] = sum(entry.findings for entry in entries if entry is not None)
        groups = sorted(self._kept, key=lambda group: (-counts[group], group[0]))
        shown = [severity for severity in sorted(Severity, reverse=True) if severity >= least]
        ranked = [[self._ranked_findings(group, severity) for group in groups] for severity in shown]
        for columns in ([self._ranked_findings(group, None) for group in groups], *ranked):
            for finding in chain.from_iterable(zip_longest(*columns)):
                group = None if finding is None else _headline_key(finding)
                if finding is None or group is None or finding.severity < least:
                    continue
                if left[group] > 0 and len(picked) < number:
                    left[group] -= 1 if finding.code == _UNREADABLE else _UNREADABLE_SHOWN
                    picked.append(self._entry(finding))
        return picked

    def _ranked_findings(self, group: _HeadlineKey, severity: Severity | None) -> list[Finding]:
        """A headline's findings with a severity, the most frequent first; None: those of `doubts_log`."""
        findings = sorted(self._kept[group].values(), key=lambda finding: -self._entry(finding).findings)
        if severity is None:
            return [finding for finding in findings if doubts_log(finding)]
        return [finding for finding in findings if finding.severity is severity and not doubts_log(finding)]

    def _entry(self, finding: Finding) -> WorstEntry:
        group = self._groups.get((_entry_key(finding), finding.severity))
        if group is None:
            return WorstEntry(finding)
        return WorstEntry(finding, group.findings, group.rows, tuple(group.places))


def log_codes_first(codes: Iterable[str]) -> list[str]:
    """The codes in order, after those that only find what a whole log has (REC007, REC011)."""
    return sorted(codes, key=lambda code: (code not in LOG_DOUBTS[:2], code))


def rule_numbers(
    summary: Summary, least: Severity = Severity.NOTE, *, with_known: bool
) -> Iterator[tuple[str, Severity, list[str]]]:
    """A code, the worst severity that is new, and counts: new ones by severity down to `least`, known ones (if
    `with_known`), rollouts and tokens."""
    shown = [severity for severity in sorted(Severity, reverse=True) if severity >= least]
    for code in log_codes_first(summary.findings):
        count = summary.findings[code]
        worst = max((severity for severity in Severity if count.new[severity]), default=Severity.NOTE)
        in_baseline = [count.known] if with_known else []
        numbers = (*(count.new[severity] for severity in shown), *in_baseline, count.rollouts, count.tokens)
        yield code, worst, [f"{number:,}" for number in numbers]


def doubts_log(finding: Finding) -> bool:
    """Whether a finding doubts the tokenizer or template of a whole log."""
    return finding.code in LOG_DOUBTS and finding.hit.where is Where.LOG


def more_words(entry: WorstEntry) -> str:
    """`119 like this in 12 rows: 0, 3, 4, 7, 9, …`; "" if there is only one."""
    if entry.findings < 2 or entry.finding.hit.where is Where.LOG:
        return ""
    places = ", ".join([*entry.places, *(["…"] if entry.rows > len(entry.places) else [])])
    rows = f"row {places}" if entry.rows == 1 else f"{entry.rows:,} rows: {places}"
    return f"{entry.findings:,} like this in {rows}"


def entry_lines(entry: WorstEntry, width: int, *, with_repair: bool = False) -> Iterator[str]:
    """The finding as the terminal shows it, without colours, and how many are like it."""
    from tito_audit.terminal.page import console_for, finding_lines

    console = console_for(StringIO(), ReportOptions(width=width))
    for line in finding_lines(entry.finding, console, with_repair=with_repair):
        yield line.plain.rstrip()
    if more := more_words(entry):
        yield f"  {visible(more)}"


def _headline_key(finding: Finding) -> _HeadlineKey:
    if finding.code in REASONING_CODES:
        return NOT_APPEND_ONLY, ""
    return finding.headline or finding.code, finding.unit


def _entry_key(finding: Finding) -> _EntryKey:
    hit = finding.hit
    # Unreadable rows share one cause; their messages tell the reasons apart, once places and values are gone.
    why = _VALUES.sub("#", hit.message) if finding.code == _UNREADABLE else hit.cause
    return finding.code, finding.place.file, why


class Shortlist(Generic[T]):
    """Keeps the highest-ranked `limit` of all values offered.

    Within a rank all kinds get the same room, and the first values of each kind are kept.
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
        if self._size == self._limit:
            lowest = min(self._ranks, default=rank + 1)
            if rank < lowest:
                return
            # Drop a value of the kind that has most of the lowest rank, unless the offered kind has as many.
            kinds = self._ranks[lowest]
            fullest = max(kinds, key=lambda name: len(kinds[name]))
            if rank == lowest and len(kinds.get(kind, ())) + 1 >= len(kinds[fullest]):
                return
            kinds[fullest].pop()
            if not kinds[fullest]:
                del kinds[fullest]
            if not kinds:
                del self._ranks[lowest]
            self._size -= 1
        self._ranks.setdefault(rank, {}).setdefault(kind, []).append((self.offered, value))
        self._size += 1

    def __iter__(self) -> Iterator[T]:
        """The highest rank first; within a rank in the order offered."""
        for rank in sorted(self._ranks, reverse=True):
            entries = chain.from_iterable(self._ranks[rank].values())
            yield from (value for _, value in sorted(entries, key=itemgetter(0)))

    def __len__(self) -> int:
        return self._size


@dataclass(slots=True)
class NewFindings:
    """The findings of a scan that are not in the baseline: the worst, and what repairs may fix."""

    worst: WorstFindings = field(default_factory=WorstFindings)
    repairable_by_name: Severity | None = None
    """The worst severity that `once` may fix, a repair that runs only if named by --with; None without any."""
    _repairable: dict[str, Severity] = field(default_factory=dict)
    """By log, the worst severity that any other repair fits."""
    _repaired: set[str] = field(default_factory=set)
    """Logs with rows that a repair wrote: it has already tried what is left in them."""

    def add(self, result: Result) -> None:
        new = [finding for finding in result.findings if not finding.known]
        self.worst.add(new)
        if result.counts.get("repaired"):
            self._repaired.add(result.place.file)
        for finding in new:
            if finding.repair == ONCE:
                self.repairable_by_name = max(self.repairable_by_name or Severity.NOTE, finding.severity)
            elif finding.repair is not None:
                worst = self._repairable.get(result.place.file, Severity.NOTE)
                self._repairable[result.place.file] = max(worst, finding.severity)

    @property
    def repairable(self) -> Severity | None:
        """The worst severity that a repair fits and none has tried; None without any."""
        return max((worst for log, worst in self._repairable.items() if log not in self._repaired), default=None)

    @property
    def worst_finding(self) -> Finding | None:
        """The worst finding; None without any."""
        return next((entry.finding for entry in self.worst.pick(1)), None)


@dataclass(frozen=True, slots=True)
class NextCommand:
    """A command to run next, and what it does."""

    command: str
    says: str


def next_steps(
    worst: Finding | None,
    new: NewFindings,
    summary: Summary,
    *,
    browse: bool = False,
    least: Severity = Severity.NOTE,
) -> Iterator[NextCommand]:
    """Commands that explain and show the worst finding, then those that repair; `browse` adds the html report."""
    misfit = worst is not None and worst.code == _MISFIT
    if worst is not None and misfit:
        # `identify` finds out what wrote the log; where only the template is in doubt, it keeps the tokenizer.
        words = "" if "tokenizer" in worst.hit.cause else tokenizer_flag(summary)
        pairs = zip(summary.reading[::2], summary.reading[1::2], strict=True)
        flags = [word for pair in pairs if pair[0] not in _RENDERING for word in pair] + list(summary.joining)
        words += "".join(f" {shell_word(word)}" for word in flags)
        says = "finds what wrote it; -t DIR names a tokenizer to try"
        yield NextCommand(f"tito-audit identify {shell_word(worst.place.file)}{words}", says)
    if worst is not None:
        if worst.code == _UNREADABLE:
            look = f"tito-audit inspect {shell_word(worst.place.file)}{tokenizer_flag(summary)}"
            yield NextCommand(look, "its columns, and a mapping to paste")
        yield NextCommand(f"tito-audit explain {worst.code}", "what it means, and what fixes it")
        # A wrong tokenizer shows no token as it is, and without ids there are none.
        if worst.code != _UNREADABLE and not misfit and (summary.compared or summary.uncompared):
            yield NextCommand(show_command(worst.place, summary), "that rollout, token by token")
    if misfit or not summary.rollouts:  # with the right tokenizer there are other findings
        return
    log = shell_word(summary.files[0]) if len(summary.files) == 1 else "…"
    repair = f"tito-audit repair {log} -o OUT{option_flags(summary)}"
    if new.repairable is not None and new.repairable >= least:
        # By default a repair leaves warnings alone.
        bar = "" if new.repairable is Severity.ERROR else " --fail-on warning"
        yield NextCommand(f"{repair}{bar}", "repairs what it can prove; --dry-run tells what, and writes nothing")
    if new.repairable_by_name is not None and new.repairable_by_name >= least:
        yield NextCommand(f"{repair} --with {ONCE}", "takes repeated training out of the loss where it is certain")
    if worst is not None and browse:
        yield NextCommand("tito-audit scan … --report html=report.html", "every finding, in a browser")
    gate = summary.gate
    # What was not checked, a baseline cannot accept.
    if gate is not None and gate.baseline and (gate.failing or any(rate.failed for rate in gate.rates)):
        yield NextCommand("tito-audit scan … --update-baseline", "accept what is new")
