"""The `json` report: one object with the summary first, then every finding."""

from __future__ import annotations

import shutil
import tempfile
from typing import TextIO

from tito_audit.report import Report, ReportOptions, ResultSink
from tito_audit.report_objects import as_json, finding_object, summary_object
from tito_audit.summary import Summary


def write(summary: Summary, out: TextIO, options: ReportOptions) -> ResultSink[None]:
    """Write `{"summary": …, "findings": […]}`, one finding per line.

    The summary comes first but is known last, so findings wait in a temporary file, not in memory.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8") as waiting:
        between = "\n"
        while (result := (yield)) is not None:
            for finding in result.findings:
                waiting.write(between + as_json(finding_object(finding)))
                between = ",\n"
        out.write('{"summary":' + as_json(summary_object(summary)) + ',\n"findings":[')
        waiting.seek(0)
        shutil.copyfileobj(waiting, out)
        out.write("\n]}\n")


JSON = Report("json", "one object: the summary, then every finding", write)
