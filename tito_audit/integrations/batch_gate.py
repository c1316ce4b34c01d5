"""The gate of a training loop: which batches are audited, and what happens to their failing rows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import orjson

from tito_audit.errors import GateError, SetupError
from tito_audit.format import Row
from tito_audit.formats import all_formats
from tito_audit.record.arrays import Mask
from tito_audit.record.finding import Finding
from tito_audit.run.batch import BatchAudit, BatchAuditor
from tito_audit.settings.model import Settings
from tito_audit.terminal.words import many, percent

FITS: Mapping[str, tuple[str, str]] = {
    "trl": ("1.0", "2"),
    "verl": ("0.7.1", "0.10"),
    "slime": ("0.2.4", "0.4"),
    "miles": ("0.1", "0.2"),
    "nemo-rl": ("0.5", "0.8"),
    "prime-rl": ("0.6", "0.9"),
}
"""By package of a trainer: the first version that its adapter fits, and the first that it does not."""
_REASON_COLUMN = "tito_gate"
"""The column of a quarantined row that says why it failed."""
_EQUAL_ROWS = "REC009"
"""The rule on equal rows, off by default: samples of one prompt may well be equal, and each is trained."""
_GATE_OPTIONS = ("mask", "max_rate", "first", "every", "quarantine")


@dataclass(frozen=True, slots=True)
class GatedBatch:
    """What a gate did with one batch."""

    audit: BatchAudit
    """What the audit found; `finding.place.row` is the row in the batch."""
    failing: Mask
    """`[B]` True for rows with a finding at or above `Settings.fail_on`."""
    masked: Mask
    """`[B]` True for rows to take out of the loss: those that fail, or none if the gate does not mask."""
    metrics: dict[str, float]
    """Numbers for the tracker; their names begin with `tito/`."""


class BatchGate:
    """Audits the batches of a training loop, takes failing rows out of the loss, and stops when too many fail.

    `settings` decide what is audited and which findings fail a row (`fail_on`). Those for reading files have no
    effect, and equal rows (REC009) are found only if `select` names that rule. The first `first` steps are
    audited, then every step that `every` divides. Of an audited batch,

    - failing rows leave the loss, unless `mask=False`;
    - failing rows are appended to the file `quarantine`, as JSON lines that `tito-audit scan` and `show` read; the
      column `tito_gate` says at which step, and why;
    - the counts go to the tracker, also those of the error below (`GateError.metrics`);
    - GateError is raised if the share of failing rows is above `max_rate`; None: never.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        mask: bool = True,
        max_rate: float | None = 0.05,
        first: int = 0,
        every: int = 1,
        quarantine: str | Path | None = None,
    ) -> None:
        if every < 1 or first < 0 or (max_rate is not None and not 0 <= max_rate <= 1):
            raise SetupError(
                f"BatchGate(first={first}, every={every}, max_rate={max_rate}): "
                "`every` is 1 or more, `first` 0 or more, and `max_rate` a share between 0 and 1, or None."
            )
        if quarantine is not None and Path(quarantine).suffix != ".jsonl":
            raise SetupError(f"quarantine: {quarantine} gets JSON lines: name a file that ends in .jsonl.")
        settings = Settings.given(settings)
        if _EQUAL_ROWS not in settings.select:
            settings = replace(settings, ignore=(*settings.ignore, _EQUAL_ROWS))
        self._auditor = BatchAuditor(settings)
        all_formats()  # load them now, not in the first step
        self.mask, self.max_rate, self.first, self.every = mask, max_rate, first, every
        self.quarantine = None if quarantine is None else Path(quarantine)
        self.rows = 0
        """How many rows were audited, over all processes."""
        self.failed = 0
        """How many of them failed."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> BatchGate:
        """A gate from the options of a configuration file: those of `BatchGate` and of `Settings`."""
        names = {*_GATE_OPTIONS, *(field.name for field in fields(Settings))}
        if unknown := [name for name in options if name not in names]:
            raise SetupError(
                f"tito_audit: there is no option {', '.join(unknown)}; there are {', '.join(sorted(names))}."
            )
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in options.items()
        }
        own = {name: values.pop(name) for name in _GATE_OPTIONS if name in values}
        return cls(Settings(**values), **own)

    def due(self, step: int) -> bool:
        return step < self.first or step % self.every == 0

    def check(
        self,
        step: int,
        rows: Sequence[Row],
        *,
        process: int | None = None,
        summed: Callable[[Sequence[int]], Sequence[int]] = list,
    ) -> GatedBatch:
        """Audit the batch of a step, with rows as in a log of any known format; GateError if too many fail.

        Where several processes train, `process` is the number of this one, which quarantines to a file of its own,
        and `summed` adds counts up over all processes, so that they stop together.
        """
        audit = self._auditor.audit_rows(rows)
        failing = audit.failing_rows
        if self.quarantine is not None and failing.any():
            self._write_quarantine(step, rows, audit, process)
        total, failed = (int(count) for count in summed([len(rows), int(failing.sum())]))
        self.rows += total
        self.failed += failed
        # The numbers for the tracker: counts of rows over all processes, counts of findings of this one.
        counted = {name.removeprefix("tito_audit/"): value for name, value in audit.metrics().items()}
        # How many rows have each cause of a mismatch.
        causes = Counter(finding.hit.cause for finding in audit.findings if finding.code == "LPR509")
        metrics = {
            "rows": total,
            "failing_rows": failed,
            "failing_share": failed / total if total else 0.0,
            "masked_rows": failed if self.mask else 0,
            "failing_rows_so_far": self.failed,
            **{name: counted[name] for name in ("errors", "warnings", "notes", "seconds")},
            "mismatch/rows": sum(causes.values()),
            **{f"mismatch/{re.sub(r'[^a-z0-9]+', '_', cause or 'other')}": n for cause, n in causes.items()},
            **{name: value for name, value in counted.items() if name.startswith("findings/")},
        }
        metrics = {f"tito/{name}": float(value) for name, value in metrics.items()}
        masked = failing if self.mask else failing & False
        gated = GatedBatch(audit, failing, masked, metrics)
        if self.max_rate is not None and failed > self.max_rate * total:
            where = f"; they are in {self._quarantine_file(process)}" if self.quarantine is not None else ""
            raise GateError(
                f"step {step}: {failed:,} of {many(total, 'row')} fail ({percent(failed / total)}), more than "
                f"max_rate={self.max_rate} allows{where}: {audit}",
                step=step,
                metrics=gated.metrics,
            )
        return gated

    def _quarantine_file(self, process: int | None) -> Path:
        assert self.quarantine is not None
        return self.quarantine if process is None else self.quarantine.with_suffix(f".{process}.jsonl")

    def _write_quarantine(self, step: int, rows: Sequence[Row], audit: BatchAudit, process: int | None) -> None:
        by_row: dict[int, list[Finding]] = {}
        for finding in audit.findings:
            by_row.setdefault(finding.place.row, []).append(finding)

        def plain(value: Any) -> Any:
            return value.tolist() if hasattr(value, "tolist") else repr(value)

        json_options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
        lines = []
        for number in audit.failing_rows.nonzero()[0].tolist():
            why = [{"code": finding.code, "message": finding.hit.message} for finding in by_row.get(number, [])]
            row = {**rows[number], _REASON_COLUMN: {"step": step, "row": number, "findings": why}}
            lines.append(orjson.dumps(row, default=plain, option=json_options))
        file = self._quarantine_file(process)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as log:
            log.write(b"".join(lines))


def require_version(package: str) -> None:
    """SetupError unless a version of this trainer is installed that its adapter fits."""
    lowest, below = FITS[package]
    fitting = f"{package} from {lowest} on, below {below}"
    try:
        installed = version(package)
    except PackageNotFoundError:
        raise SetupError(
            f"The gate for {package} fits {fitting}, which is not installed in this Python."
        ) from None
    if not _release(lowest) <= _release(installed) < _release(below):
        raise SetupError(f"The gate for {package} fits {fitting}; {installed} is installed.")


def _release(text: str) -> tuple[int, ...]:
    """The release that a version belongs to: (0, 8, 1) for `0.8.1.dev7`."""
    return tuple(int(part) for part in re.match(r"\d+(?:\.\d+)*", text + "x")[0].split("."))  # type: ignore[index]
