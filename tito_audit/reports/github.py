"""The `github` report: GitHub Actions annotations, as workflow commands on stdout.

    ::error file=logs/run.jsonl,line=5,title=TOK101 …::row 4, turn 1: …

GitHub shows the first ten annotations of each kind that a step prints, cuts messages at 4,096 characters and
silently drops the rest. So this prints the worst ten; if there are more, the tenth counts them.
"""

from __future__ import annotations

from typing import TextIO

from tito_audit.record.finding import Finding, Severity
from tito_audit.report import Report, ReportOptions, ResultSink
from tito_audit.summary import Summary
from tito_audit.terminal.escape import cut, visible
from tito_audit.terminal.place import line_number, place_words
from tito_audit.terminal.verdict import baseline_words
from tito_audit.terminal.words import many
from tito_audit.terminal.worst import Shortlist, doubts_log

PER_KIND = 10
"""Annotations of one kind that GitHub accepts from a step."""
_KINDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}
_MESSAGE = 2000
_REASONS = 10
"""Maximum reasons listed for a failed gate."""


def write(summary: Summary, out: TextIO, options: ReportOptions) -> ResultSink[None]:
    """Read all results, then write the worst annotations, at most ten of each kind."""
    shortlists: dict[Severity, Shortlist[Finding]] = {severity: Shortlist(PER_KIND) for severity in _KINDS}
    while (result := (yield)) is not None:
        for finding in result.findings:
            if not finding.known:
                fails = options.fails is not None and options.fails(finding)
                shortlists[finding.severity].offer(2 * doubts_log(finding) + fails, finding.code, finding)
    for severity in sorted(_KINDS, reverse=True):
        # The gate's verdict, the worst findings, the count of the others.
        kind, gate, room = _KINDS[severity], summary.gate, PER_KIND
        if severity is Severity.ERROR and gate is not None and gate.failed:
            lines = [cut(visible(reason), _MESSAGE // _REASONS) for reason in gate.because[:_REASONS]]
            if len(gate.because) > _REASONS:
                lines.append(f"and {many(len(gate.because) - _REASONS, 'more reason')}")
            out.write(_annotation(kind, "tito-audit: failed", "\n".join(lines) or "the gate failed"))
            room -= 1
        if severity is Severity.NOTE and gate is not None and (gate.known or gate.fixed) and baseline_words(gate):
            out.write(_annotation(kind, "tito-audit: baseline", cut(visible(baseline_words(gate)), _MESSAGE)))
            room -= 1
        shown = list(shortlists[severity])[: room if shortlists[severity].offered <= room else room - 1]
        for finding in shown:
            title = f"{finding.code} {options.titles.get(finding.code, '')}".strip()
            repair = f"\nIts repair: tito-audit repair --with {finding.repair}" if finding.repair else ""
            message = cut(f"{place_words(finding)}: {visible(finding.hit.message)}", _MESSAGE) + repair
            out.write(_annotation(kind, title, message, finding))
        left = shortlists[severity].offered - len(shown)
        if left:
            words = f"{many(left, 'more finding')} of severity {severity.word}; GitHub shows {PER_KIND} of each."
            more = "Other reports list them all: --report json=findings.json, --report concise."
            out.write(_annotation(kind, "tito-audit: not all are shown", f"{words}\n{more}"))


def _annotation(kind: str, title: str, message: str, finding: Finding | None = None) -> str:
    """One workflow command; nothing in it can end the line or begin another command."""
    properties = []
    if finding is not None:
        properties.append(f"file={_escape_property(visible(finding.place.file))}")
        line = line_number(finding.place)
        if line is not None:
            properties.append(f"line={line}")
    properties.append(f"title={_escape_property(cut(visible(title), 200))}")
    return f"::{kind} {','.join(properties)}::{_escape_message(message)}\n"


def _escape_message(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape_message(text).replace(":", "%3A").replace(",", "%2C")


GITHUB = Report("github", "GitHub Actions annotations: the ten worst of each kind, the others counted", write)
