"""gate_rollouts: a scan with a verdict."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from tito_audit.errors import SetupError
from tito_audit.gate.watch import Terms, Watch
from tito_audit.record.finding import Finding, Result
from tito_audit.run.progress import Progress
from tito_audit.run.scan import Scan, names_of, scan_rollouts
from tito_audit.settings.model import GateSettings, Settings
from tito_audit.storage import find_logs
from tito_audit.summary import Summary

__all__ = ["GatedScan", "gate_rollouts"]


def gate_rollouts(
    logs: str | Path | Sequence[str | Path],
    settings: Settings | None = None,
    gate: GateSettings | None = None,
    progress: Progress | None = None,
    *,
    observe: bool = False,
) -> GatedScan:
    """The audit of logs as `scan_rollouts` gives it, with `summary.gate` once its results are used up.

    Findings that the baseline holds come marked `known`. A baseline that lies in a folder of logs is none of them.
    """
    gate = gate or GateSettings()
    names = names_of(logs)
    if gate.baseline is not None:
        names = _beside(names, Path(gate.baseline))
    return GatedScan(scan_rollouts(names, settings, progress, observe=observe), gate)


class GatedScan:
    """Results of a scan as they pass the gate; what it says is `summary.gate`, set once they are used up.

    A baseline that is to be updated is written then, and not when the run ends early. Iterating raises SetupError
    when the baseline cannot be read.
    """

    def __init__(self, scan: Scan, gate: GateSettings) -> None:
        self.scan = scan
        self.gate = gate
        self._terms = Terms(scan.settings, gate)

    @property
    def summary(self) -> Summary:
        """Counts of the scan; complete once its results are used up."""
        return self.scan.summary

    def __iter__(self) -> Iterator[Result]:
        watch = Watch(list(self.scan.logs), self.scan.settings, self.gate, self._terms, self.summary)
        for result in self.scan:
            yield watch.judged(result)
        self.summary.gate = watch.verdict()

    def codes(self, file: str) -> frozenset[str]:
        """The codes that are asked for of a log."""
        return self._terms.codes(file)

    def fails(self, finding: Finding) -> bool:
        """Whether a finding fails by itself: severe enough, not known, not judged by a rate, not accepted now."""
        return self._terms.fails(finding) and not (finding.known or self.gate.update_baseline)


def _beside(logs: Sequence[str], baseline: Path) -> list[str]:
    """The logs without the baseline, which may lie in one of their folders; SetupError when it is one itself."""
    place = os.path.realpath(baseline)
    for log in logs:
        if os.path.realpath(log) == place:
            raise SetupError(f"--baseline {baseline}: this is one of the logs. Name another file.")
    files = find_logs(logs)
    others = [str(file) for file in files if os.path.realpath(file) != place]
    return list(logs) if len(others) == len(files) else others
