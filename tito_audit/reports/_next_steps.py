"""What to do after a scan: commands to paste, each with what it does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tito_audit.record.finding import Finding, Result
from tito_audit.record.trainings import ONCE
from tito_audit.reports._gate_words import accept_lines
from tito_audit.reports._worst import Worst
from tito_audit.summary import Summary
from tito_audit.terminal.place import show_command, with_options, with_tokenizer
from tito_audit.terminal.shell import shell_word
from tito_audit.terminal.words import many

_UNREADABLE = "REC001"


@dataclass(slots=True)
class Curable:
    """New findings: the worst, and how many have a repair."""

    worst: Worst = field(default_factory=Worst)
    curable: int = 0
    """Findings that have a repair."""
    again: int = 0
    """Findings whose repair has to be named by --with."""

    def add(self, result: Result) -> None:
        """Count the findings of one result."""
        new = [finding for finding in result.findings if not finding.known]
        self.worst.add(new)
        self.curable += sum(finding.repair not in (None, ONCE) for finding in new)
        self.again += sum(finding.repair == ONCE for finding in new)

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
        steps = [
            Step(f"tito-audit explain {worst.code}", "what it means, and what fixes it"),
            _look(worst, summary),
        ]
        yield from reversed(steps) if worst.code == _UNREADABLE else steps
    if not summary.rollouts:
        return
    log = shell_word(summary.files[0]) if len(summary.files) == 1 else "…"
    for number, named in ((found.curable, ""), (found.again, f" --with {ONCE}")):
        if number:
            command = f"tito-audit repair {log}{named} -o OUT{with_options(summary)}"
            yield Step(command, f"may fix {many(number, 'finding')}")
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
