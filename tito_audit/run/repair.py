"""Read, check, repair, write, check again: the flow from logs to logs that hold the claim."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

from tito_audit.errors import SetupError
from tito_audit.join import lines_of
from tito_audit.record.finding import Result, Severity
from tito_audit.record.outcome import Outcome
from tito_audit.record.testimony import Testimony
from tito_audit.run.auditor import selected_codes
from tito_audit.run.executor import Executor, InProcess, executor_for, is_small
from tito_audit.run.log_groups import RowFlow
from tito_audit.run.parallel import chunk_bytes
from tito_audit.run.progress import Progress
from tito_audit.run.repair_tasks import Batch, Part, RepairBatch, Repaired, Started, planned, unpacked
from tito_audit.run.row_repair import COLUMN, Proven, RepairedRow, fails, strategies
from tito_audit.run.scan import Scan, conclude, names_of, testimony_of
from tito_audit.settings.model import RepairSettings, Settings
from tito_audit.storage import (
    Log,
    Output,
    Quarantine,
    RawRow,
    allow_open_files,
    dataset_metadata,
    find_logs,
    make_folder,
    open_output,
    refuse_taken,
    same_place,
    target_paths,
    write_dataset_metadata,
)
from tito_audit.summary import Summary
from tito_audit.tokens.vocab import Vocabulary

__all__ = ["COLUMN", "Repairs", "repair_rollouts"]

_LARGEST = 1 << 20
"""Bytes of a batch at most: rows wait to be written, a few batches for each process."""


class Repairs:
    """Outcomes of the rows of logs, one after the other, written while they are computed.

    Making one opens nothing. Iterating raises SetupError or StorageError when the run cannot be made, and
    then no file is left behind; each file takes its name when it is whole. A dry run (no `out`) writes none. With
    more than one job (`Settings.jobs`) the rollouts of a row that stays as it is hold their place and format only.
    """

    def __init__(
        self,
        logs: Sequence[str],
        out: str | Path | None,
        settings: Settings,
        repairs: RepairSettings,
        progress: Progress | None = None,
    ) -> None:
        self.logs = logs
        self.out = Path(out) if out is not None else None
        self.settings = settings
        self.repairs = repairs
        self.progress = progress
        self.before = Summary()
        """Of the logs as read."""
        self.after = Summary()
        """Of the written files, scanned again; of the proven rows in a dry run."""
        self.failing = 0
        """Findings in what `after` is of, at or above `fail_on` of their log."""
        self.vocabulary: Vocabulary | None = None
        """For showing pieces of the log at work; None without a tokenizer, set once iteration has started."""
        self.written: list[tuple[Path, Path]] = []
        """(log, file written in its place), as far as they are complete."""
        self.batch_bytes: int | None = None
        """How much of a log a process is given at once, about; None: as fits the logs."""
        self.executor: Executor | None = None
        """What runs the work of several jobs; None: processes of this machine."""

    def __iter__(self) -> Iterator[Outcome]:
        selected_codes(self.settings)
        strategies(self.repairs)
        files = find_logs(self.logs)
        targets = target_paths(self.logs, files, self.out) if self.out is not None else {}
        refuse_taken({**targets, **dataset_metadata(self.logs, targets)}, overwrite=self.repairs.force)
        flow = RowFlow(files, _whole(self.settings))
        flow.begin(self.before)
        flow.choose_encoders()
        started = time.perf_counter()
        # The quarantine ends first: no log that lacks rows gets its name before they have theirs.
        with ExitStack() as later, ExitStack() as stack:
            quarantine = self._quarantine(files, targets, stack)
            outcomes = stack.enter_context(closing(self._outcomes(flow, targets, quarantine, later)))
            for outcome in outcomes:
                for result in flow.noted(outcome.before):
                    self.before.add(result)
                self.before.seconds = time.perf_counter() - started
                for result in outcome.after if self.out is None else ():
                    self.after.add(result)
                    self.failing += _failing(flow, result.place.file, result)
                yield outcome
        write_dataset_metadata(self.logs, targets, overwrite=self.repairs.force)
        self.before.notices += flow.join_notices()
        flow.encoders.warn(self.before)
        conclude(self.before)
        flow.save()
        if self.out is not None:
            self._scan_again(flow)
        else:
            self.after.files = list(self.before.files)
            self.after.tokenizer = self.before.tokenizer

    def _quarantine(
        self, files: Sequence[Path], targets: Mapping[Path, Path], stack: ExitStack
    ) -> Quarantine | None:
        if self.repairs.quarantine is None or self.out is None:
            return None
        place = Path(self.repairs.quarantine)
        _refuse_same(place, [*files, *targets.values()])
        quarantine = stack.enter_context(Quarantine.opened(place, overwrite=self.repairs.force))
        allow_open_files(len(files))
        return quarantine

    def _outcomes(
        self, flow: RowFlow, targets: Mapping[Path, Path], quarantine: Quarantine | None, later: ExitStack
    ) -> Generator[Outcome, None, None]:
        """The outcomes, written as they come."""
        several = self.executor is not None or (self.settings.jobs or 1) > 1
        executor, known = self._executor(flow), dict[Path, Proven]()
        size = None
        if not executor.here:
            flow.load()
            size = self.batch_bytes or min(chunk_bytes(flow.size, executor.jobs), _LARGEST)
        work = RepairBatch(flow, self.repairs, writes=bool(targets), bare=several)
        tasks = planned(flow, known, size, keep_text=bool(targets))
        with closing(executor.map(work, tasks)) as parts:
            yield from _Writing(self, work, targets, quarantine, later, known, flow.size).outcomes(parts)

    def _executor(self, flow: RowFlow) -> Executor:
        """What repairs batches of rows."""
        if self.executor is not None:
            return self.executor
        executor = executor_for(self.settings.jobs or 1, self.before)
        return InProcess() if self.batch_bytes is None and is_small(flow.files) else executor

    def _scan_again(self, flow: RowFlow) -> None:
        """The written files as a scan sees them."""
        scan = Scan([str(target) for _, target in self.written], _whole(self.settings))
        scan.standing_for = {target: log for log, target in self.written}
        logs = {str(target): str(log) for log, target in self.written}
        self.after = scan.summary
        for result in scan:
            self.failing += _failing(flow, logs[result.place.file], result)


@dataclass(slots=True)
class _Writing:
    """The logs of a repair while they are written; in a dry run nothing is."""

    run: Repairs
    work: RepairBatch
    targets: Mapping[Path, Path]
    quarantine: Quarantine | None
    later: ExitStack
    """Where files in which rows are left out wait for their names."""
    known: dict[Path, Proven]
    """What logs prove, of those that were asked."""
    total: int
    """Bytes of all logs."""
    done: int = 0
    rows: int = 0

    def outcomes(self, parts: Iterator[tuple[Part, Repaired | None]]) -> Iterator[Outcome]:
        """The outcomes of all logs."""
        for part, _ in parts:
            if isinstance(part, Exception):
                raise part
            if isinstance(part, Started):
                yield from self._log(part.file, part.log, parts)

    def _log(self, file: Path, log: Log, parts: Iterator[tuple[Part, Repaired | None]]) -> Iterator[Outcome]:
        flow, run, parted = self.work.flow, self.run, False
        run.before.files.append(str(file))
        run.vocabulary = flow.group(str(file)).auditor.vocabulary
        with ExitStack() as stack:
            out = self._output(file, log, stack) if self.targets else None
            for part, answer in parts:
                if isinstance(part, Exception):
                    raise part
                if not isinstance(part, Batch) or answer is None:
                    break
                flow.encoders.hear(answer.encoders, run.before)
                for raw, given in zip(part.rows, answer.rows, strict=True):
                    repaired = given or self._asked(file, raw)
                    if out is not None:
                        _write(raw, repaired, out, self.quarantine)
                    parted |= repaired.outcome.quarantined is not None
                    self._progress(part.position)
                    yield repaired.outcome
            if out is not None:
                out.finish(log)
            if parted:
                self.later.push(stack.pop_all())
        self.done += log.size
        if self.targets:
            run.written.append((file, self.targets[file]))

    def _output(self, file: Path, log: Log, stack: ExitStack) -> Output:
        target, repairs = self.targets[file], self.run.repairs
        if target != self.run.out:  # a folder, whose parts are made as needed
            make_folder(target.parent)
        added = (COLUMN,) if repairs.provenance else ()
        out = stack.enter_context(open_output(log, target, overwrite=repairs.force, added=added))
        return self.work.flow.groups[str(file)].output(out, log)

    def _asked(self, file: Path, raw: RawRow) -> RepairedRow:
        """What becomes of a row that its log has to settle, which is asked once."""
        if file not in self.known:
            settings = self.work.flow.groups[str(file)].settings
            common = testimony_of([str(file)], settings).get(str(file), Testimony()).common()
            self.known[file] = Proven(next(iter(common)) if len(common) == 1 else None)
        repaired = self.work.row(file, raw, self.known[file])
        assert repaired is not None, "a row waits for its log only"
        return repaired

    def _progress(self, position: int) -> None:
        self.rows += 1
        if self.run.progress is not None:
            self.run.progress(self.rows, self.done + position, self.total)


def repair_rollouts(
    logs: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    settings: Settings | None = None,
    repairs: RepairSettings | None = None,
    progress: Progress | None = None,
) -> Repairs:
    """The repair of logs into `out` (a file for one log, else a folder), as outcomes one a row of the logs.

    Nothing is written before they are iterated; `out` None is a dry run. The logs are never changed. Every row of
    them is read, whatever `Settings.limit` and `Settings.sample` say.
    """
    return Repairs(names_of(logs), out, settings or Settings(), repairs or RepairSettings(), progress)


def _write(raw: RawRow, repaired: RepairedRow, out: Output, quarantine: Quarantine | None) -> None:
    outcome = repaired.outcome
    if outcome.quarantined is not None:
        if quarantine is None:
            raise SetupError(
                f"{outcome.place}: `drop` leaves rows out and needs --quarantine FILE to keep them in."
            )
        codes = sorted({f.code for r in outcome.before for f in r.findings if f.severity > Severity.NOTE})
        for line in lines_of(unpacked(raw)):
            quarantine.add(line, outcome.place, {COLUMN: {"quarantined": outcome.quarantined, "codes": codes}})
        out.replace(raw, [])
    elif repaired.rows is None:
        out.keep(raw)
    else:
        out.replace(replace(raw, value=repaired.logged), repaired.rows)


def _whole(settings: Settings) -> Settings:
    """The same for every row of the logs: all are read, repaired or not."""
    return replace(settings, limit=None, sample=None, row=None)


def _failing(flow: RowFlow, file: str, result: Result) -> int:
    """How many findings of a result fail the run, by the settings of a log."""
    return sum(1 for _ in fails(flow.groups[file].settings, result))


def _refuse_same(place: Path, taken: Sequence[Path]) -> None:
    if any(same_place(place, one) for one in taken):
        raise SetupError(f"--quarantine: {place} is read or written by this run already; name another file.")
