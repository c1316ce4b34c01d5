"""The `concise` report: one finding per line, for grep and for editors.

    file:row:turn:start-end CODE severity: message

Rows, turns and tokens count from 0, as everywhere; `-` means that the finding has no turn or no tokens.
"""

from __future__ import annotations

from typing import TextIO

from tito_audit.record.finding import Severity
from tito_audit.report import Report, ReportOptions, ResultSink
from tito_audit.summary import Summary
from tito_audit.terminal.escape import inert, visible
from tito_audit.terminal.place import token_range
from tito_audit.terminal.verdict import verdict

_COLORS = {Severity.ERROR: 31, Severity.WARNING: 33, Severity.NOTE: 36}


def write(summary: Summary, out: TextIO, options: ReportOptions) -> ResultSink[None]:
    """Write each new finding immediately, without those in the baseline, then the verdict."""
    while (result := (yield)) is not None:
        for finding in result.findings:
            if not finding.known:
                hit = finding.hit
                tokens = token_range(finding)
                turn = "-" if hit.turn is None else hit.turn
                place = (
                    f"{visible(str(finding.place))}:{turn}:{'-' if tokens is None else f'{tokens[0]}-{tokens[1]}'}"
                )
                word = finding.severity.word
                if options.color:
                    word = f"\x1b[{_COLORS[finding.severity]}m{word}\x1b[0m"
                    line = f"\x1b[1m{place}\x1b[0m {finding.code} {word}: {visible(hit.message)}"
                else:
                    line = inert(f"{place} {finding.code} {word}: {visible(hit.message)}")
                out.write(line + "\n")
    out.write(visible(f"tito-audit: {verdict(summary).line}") + "\n")


CONCISE = Report("concise", "one line per finding, file:row:turn:start-end CODE, for grep and editors", write)
