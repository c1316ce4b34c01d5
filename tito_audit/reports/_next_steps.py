"""What to do after a scan: commands to paste, each with what it does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tito_audit.record.finding import Finding, Result, Severity
from tito_audit.record.trainings import ONCE
from tito_audit.reports._gate_words import accept_lines
from tito_audit.reports._worst import Worst
from tito_audit.summary import Summary
from tito_audit.terminal.place import show_command, with_options, with_tokenizer
from tito_audit.terminal.shell import shell_word

_UNREADABLE = "REC001"


@dataclass(slots=True)
class Curable:
    """New findings: the worst, and whether a repair may fix some."""

    worst: Worst = field(default_factory=Worst)
    again: bool = False
    """Whether some have a repair that has to be named by --with."""
    _repairable: dict[str, Severity] = field(default_factory=dict)
    """By log, the worst of its findings that another repair fits."""
    _repaired: set[str] = field(default_factory=set)
    """Logs with rows that a repair wrote: what is left in them, it has tried."""

    def add(self, result: Result) -> None:
        """Take in the findings of one result."""
        new = [finding for finding in result.findings if not finding.known]
        self.worst.add(new)
        if result.counts.get("repaired"):
            self._repaired.add(result.place.file)
        for finding in new:
            self.again |= finding.repair == ONCE
            if finding.repair not in (None, ONCE):
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
class Step:
    """A command, and what it does."""

    command: str
    says: str


def next_steps(worst: Finding | None, found: Curable, summary: Summary, *, browse: bool = False) -> Iterator[Step]:
    """Commands that explain and show the worst finding and repair all; `browse`: also one that shows all."""
    if worst is not None:
        steps = [Step(f"tito-audit explain {worst.code}", "what it means, and what fixes it")]
        if worst.code == _UNREADABLE or summary.compared or summary.uncompared:  # else there are no tokens to show
            steps.append(_look(worst, summary))
        yield from reversed(steps) if worst.code == _UNREADABLE else steps
    if not summary.rollouts:
        return
    log = shell_word(summary.files[0]) if len(summary.files) == 1 else "…"
    repair = f"tito-audit repair {log} -o OUT{with_options(summary)}"
    if found.repairable is not None:
        # By default a repair leaves warnings alone.
        bar = "" if found.repairable is Severity.ERROR else " --fail-on warning"
        yield Step(f"{repair}{bar}", "repairs what it can prove; --dry-run tells what, and writes nothing")
    if found.again:
        yield Step(f"{repair} --with {ONCE}", "takes repeated training out of the loss where it is certain")
    if worst is not None and browse:
        yield Step("tito-audit scan … --report html=report.html", "every finding, in a browser")
    for line in accept_lines(summary):
        command, _, says = line.partition("   ")
        yield Step(command, says)


def _look(finding: Finding, summary: Summary) -> Step:
    """The command that shows where a finding is; an unreadable row has no tokens to show."""
    if finding.code == _UNREADABLE:
        command = f"tito-audit inspect {shell_word(finding.place.file)}{with_tokenizer(summary)}"
        return Step(command, "its columns, and a mapping to paste")
    return Step(show_command(finding.place, summary), "that rollout, token by token")
