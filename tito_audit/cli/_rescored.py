"""The reports of `rescore`: a page to read, one JSON object, one HTML page."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from tito_audit.cli._outs import opened
from tito_audit.cli._rescored_object import rollout_object, summary_object, written_object
from tito_audit.cli._rescored_page import page_parts, verdict
from tito_audit.report import ReportOptions
from tito_audit.report_objects import as_json
from tito_audit.rescore.model import RescoredRollout
from tito_audit.rescore.summary import RescoreSummary
from tito_audit.rescore.write import Written
from tito_audit.terminal.page import printed


@dataclass(slots=True)
class Details:
    """The rollouts of a run as JSON, which wait in a temporary file until the summary is known."""

    file: TextIO | None = None
    """None where no report wants them."""
    number: int = 0

    @classmethod
    @contextmanager
    def opened(cls, wanted: bool) -> Iterator[Details]:
        """Details for a run; kept only if `wanted`."""
        if not wanted:
            yield cls()
            return
        with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
            yield cls(file)

    def add(self, result: RescoredRollout) -> None:
        """Keep one rollout."""
        if self.file is not None:
            self.file.write((",\n" if self.number else "\n") + as_json(rollout_object(result)))
            self.number += 1

    def copy_to(self, out: TextIO) -> None:
        """Write all of them."""
        if self.file is not None:
            self.file.seek(0)
            shutil.copyfileobj(self.file, out)


@dataclass(frozen=True, slots=True)
class Rescored:
    """A finished run."""

    summary: RescoreSummary
    details: Details
    worst: int
    """How many findings are shown with their price."""
    pieces: Callable[[tuple[int, ...]], str]
    """Ids as text."""
    written: Written | None = None
    """What was written; None without -o."""


def _write_text(run: Rescored, out: TextIO, options: ReportOptions) -> None:
    from tito_audit.terminal.escape import inert

    text = printed(page_parts(run.summary, run.worst, run.pieces, run.written), options)
    out.write("".join(inert(line) + "\n" for line in text.split("\n")))


def _write_json(run: Rescored, out: TextIO, options: ReportOptions) -> None:
    summary = {**summary_object(run.summary), "written": written_object(run.written)}
    out.write('{"summary":' + as_json(summary) + ',\n"rollouts":[')
    run.details.copy_to(out)
    out.write("\n]}\n")


def _write_html(run: Rescored, out: TextIO, options: ReportOptions) -> None:
    from tito_audit.rescore.html import page

    out.write(page(run.summary, verdict(run.summary), run.worst, run.pieces))


REPORTS = {"text": _write_text, "json": _write_json, "html": _write_html}


def write_reports(run: Rescored, wanted: Sequence[tuple[str, Path | None]], page: ReportOptions) -> None:
    """Write every report of a finished run."""
    for name, path in wanted:
        with opened(path) as file:
            REPORTS[name](run, file, page if path is None else replace(page, color=False))
