"""Whether a scan passes: known findings (baseline), rates and required coverage."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tito_audit.errors import SetupError
from tito_audit.gate.judge import Judge
from tito_audit.record.finding import Finding, Result
from tito_audit.run.progress import Progress
from tito_audit.run.scan import Scan, scan_rollouts
from tito_audit.settings.model import GateSettings, Settings
from tito_audit.storage import Logs, Name, RowsInMemory, find_logs, log_names
from tito_audit.summary import Summary
from tito_audit.tables import Shown
from tito_audit.viewer.model import ViewQuota

__all__ = ["GatedScan", "gate_rollouts"]


def gate_rollouts(
    logs: Logs,
    settings: Settings | None = None,
    gate: GateSettings | None = None,
    progress: Progress | None = None,
    *,
    observe: bool | ViewQuota = False,
    resume: Path | None = None,
) -> GatedScan:
    """Scan logs as `scan_rollouts` does, and judge the results; `summary.gate` is set once all were iterated.

    Findings in the baseline are marked `known`. A baseline in a folder of logs is not read as a log.
    """
    gate = gate or GateSettings()
    names = log_names(logs)
    if gate.baseline is not None:
        # Leave the baseline out of the logs, as it may be in one of their folders.
        baseline = Path(gate.baseline)
        place = os.path.realpath(baseline)
        for log in names:
            if not isinstance(log, RowsInMemory) and os.path.realpath(log) == place:
                raise SetupError(f"--baseline {baseline}: this is one of the logs. Name another file.")
        files = find_logs(names)
        others: list[Name] = [file for file in files if os.path.realpath(file) != place]
        names = list(names) if len(others) == len(files) else others
    return GatedScan(scan_rollouts(names, settings, progress, observe=observe, resume=resume), gate)


class GatedScan(Shown):
    """The results of a scan, judged; `summary.gate` is set once all were iterated.

    Only then a baseline is updated. Iterating raises SetupError if the baseline cannot be read.
    """

    def __init__(self, scan: Scan, gate: GateSettings) -> None:
        self.scan = scan
        self.gate = gate
        self._judge = Judge(scan.settings, gate)
        self._judged = False

    @property
    def summary(self) -> Summary:
        """The counts of the scan; complete once all results were iterated."""
        return self.scan.summary

    def __iter__(self) -> Iterator[Result]:
        self.scan.restart()
        self._judged = False
        self._judge = judge = Judge(self.scan.settings, self.gate)
        judge.begin(list(self.scan.logs), self.summary)
        for result in self.scan:
            yield judge.judge_result(result)
        self.summary.gate = judge.verdict()
        self._judged = True

    def codes(self, file: str) -> frozenset[str]:
        """The codes selected for a log."""
        return self._judge.codes(file)

    def _finished_summary(self) -> Summary | None:
        return self.summary if self._judged else None

    def _why_not_run(self) -> str:
        return "Iterating it rewrites the baseline." if self.gate.update_baseline else ""

    def fails(self, finding: Finding) -> bool:
        """Whether a finding fails by itself: severe enough, new, not accepted now, and under no rate limit."""
        return self._judge.fails(finding)
