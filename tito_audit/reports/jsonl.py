"""The `jsonl` report: one finding per line as it is found, the summary last."""

from __future__ import annotations

from typing import TextIO

from tito_audit.report import Report, ReportOptions, ResultSink
from tito_audit.report_objects import as_json, finding_object, summary_object
from tito_audit.summary import Summary


def write(summary: Summary, out: TextIO, options: ReportOptions) -> ResultSink[None]:
    """Write each finding immediately, then `{"summary": …}`."""
    while (result := (yield)) is not None:
        for finding in result.findings:
            out.write(as_json(finding_object(finding)) + "\n")
    out.write(as_json({"summary": summary_object(summary)}) + "\n")


JSONL = Report("jsonl", "one finding per line, the summary on the last", write)
