"""From logs to repaired logs: rows are read, audited, repaired and written; what was written is scanned."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from tito_audit.errors import SetupError, StorageError
from tito_audit.join import rows_behind
from tito_audit.record.finding import Finding, Result, Severity
from tito_audit.record.outcome import COLUMN, Outcome
from tito_audit.record.rollout import Place
from tito_audit.record.trainings import ONCE
from tito_audit.run.auditor import selected_codes, unreadable_result
from tito_audit.run.log_findings import RunCounts, TrainedOverlaps
from tito_audit.run.log_groups import RowFlow
from tito_audit.run.progress import CHECKING, Progress, follow_counters
from tito_audit.run.resume import FinishedRow, Recorder, log_states, repair_recorder, reread_rows
from tito_audit.run.row_repair import RepairedRow, chosen_repairs, count_failing
from tito_audit.run.rows import without_row_limits
from tito_audit.run.scan import Scan, add_coverage_notices, find_overlaps
from tito_audit.run.tasks import (
    Batch,
    LogStart,
    RepairAnswer,
    RepairBatch,
    Step,
    chunk_bytes,
    open_engine,
    repair_steps,
    with_value,
)
from tito_audit.run.workers import Executor, InProcess, executor_for, is_small, map_in_order
from tito_audit.settings.model import RepairSettings, Settings
from tito_audit.storage import (
    Log,
    Logs,
    MemoryOutput,
    Name,
    Output,
    Quarantine,
    RawRow,
    RowsInMemory,
    dataset_metadata,
    find_logs,
    make_folder,
    memory_targets,
    open_log,
    open_memory_output,
    open_output,
    output_path,
    passed_logs,
    path_identity,
    raise_open_file_limit,
    refuse_existing,
    target_paths,
    write_dataset_metadata,
)
from tito_audit.storage.atomic import OnDone
from tito_audit.storage.journal import Journal
from tito_audit.storage.output import RowChanges
from tito_audit.storage.watch import FileWatch
from tito_audit.summary import Summary
from tito_audit.tables import DisplayableRepairs
from tito_audit.tokens.vocab import Vocabulary


@dataclass(frozen=True, slots=True)
class WritePermissions:
    """Which existing files a run may replace."""

    force: bool
    journal: Journal | None

    def may_replace(self, target: Path) -> bool:
        """Whether a file may be replaced: any with --force, else one that a run with this journal wrote."""
        return self.force or (self.journal is not None and self.journal.is_unchanged_output(target))

    def refuse_existing(self, targets: Mapping[Path, Path]) -> None:
        """Raise StorageError if one of the files to write exists and may not be replaced."""
        for overwrite in (True, False):
            some = {file: target for file, target in targets.items() if self.may_replace(target) is overwrite}
            refuse_existing(some, overwrite=overwrite)

    @property
    def on_done(self) -> OnDone | None:
        """Called for each complete file before it gets its name; records it in the journal."""
        return None if self.journal is None else self.journal.record_written


def output_targets(
    logs: Sequence[Name], files: Sequence[Path], out: Path | None, writes: WritePermissions
) -> Mapping[Path, Path]:
    """By log: the file to write; {} in a dry run. Rows in memory without an `out` are their own target.

    SetupError or StorageError if a file may not be written.
    """
    rows = [file for file in files if isinstance(file, RowsInMemory)]
    if out is None:
        return {file: file for file in rows}
    if rows:
        targets, metadata = memory_targets(rows, out), dict[Path, Path]()
    else:
        names = list(map(str, logs))
        targets = target_paths(names, files, out)
        metadata = dataset_metadata(names, targets)
    writes.refuse_existing({**targets, **metadata})
    return targets


@contextmanager
def open_quarantine(name: str, targets: Mapping[Path, Path], writes: WritePermissions) -> Iterator[Quarantine]:
    """Open the quarantine of a run; SetupError if the run reads or writes the same file otherwise."""
    place = output_path(name)
    if any(path_identity(place) == path_identity(file) for file in (*targets, *targets.values())):
        raise SetupError(f"--quarantine: this run already reads or writes {place}; name another file.")
    with Quarantine.open(place, overwrite=writes.may_replace(place), on_done=writes.on_done) as quarantine:
        raise_open_file_limit(len(targets))
        yield quarantine


def write_row(raw: RawRow, repaired: RepairedRow, out: Output, quarantine: Quarantine | None) -> list[bytes]:
    """Write a repaired row; returns the lines that went to the quarantine instead."""
    moved: list[bytes] = []
    outcome = repaired.outcome
    if outcome.quarantined is not None:
        if quarantine is None:
            raise SetupError(f"{outcome.place}: `drop` removes rows and needs --quarantine FILE to keep them.")
        codes = sorted({f.code for r in outcome.before for f in r.findings if f.severity > Severity.NOTE})
        for line in rows_behind(with_value(raw)):
            why = {COLUMN: {"quarantined": outcome.quarantined, "codes": codes}}
            moved.append(quarantine.add(line, outcome.place, why))
        out.replace(raw, [])
    elif repaired.rows is None:
        out.keep(raw)
    else:
        out.replace(replace(raw, value=repaired.logged), repaired.rows)
    return moved


class Repairs(DisplayableRepairs):
    """The outcome of every row, in order; iterating writes the repaired logs.

    Creating one opens nothing. Iterating raises SetupError or StorageError if the run is impossible, and then
    leaves no file behind: a file gets its name when it is complete. A dry run (no `out`) writes nothing. With more
    than one job (`Settings.jobs`) the rollouts of unchanged rows keep only their place and format.
    """

    def __init__(
        self,
        logs: Sequence[Name],
        out: str | Path | None,
        settings: Settings,
        repairs: RepairSettings,
        progress: Progress | None = None,
        *,
        resume: Path | None = None,
    ) -> None:
        self.logs = logs
        self.out = output_path(out) if out is not None else None
        self.settings = settings
        self.repairs = repairs
        self.progress = progress
        self.resume = resume
        """A journal: logs that were repaired with it before are not repaired again."""
        self.resumed = 0
        """How many logs were repaired before."""
        self.shown = 0
        """For how many changed rows the caller shows whole rollouts, which a journal does not hold."""
        self.before = Summary()
        """The scan of the logs as read."""
        self.after = Summary()
        """The scan of the written files or, in a dry run, of the rows as they would be written."""
        self.failing = 0
        """How many findings in `after` are at or above the `fail_on` of their log."""
        self.vocabulary: Vocabulary | None = None
        """To show tokens of the current log as text; None without a tokenizer and before the first outcome."""
        self.written: list[tuple[Path, Path]] = []
        """(log, file written for it), of each complete file."""
        self.changed: dict[Path, list[dict[str, Any]]] = {}
        """By log: its changed rows and places, as in the JSON report."""
        self.batch_bytes: int | None = None
        """About how many bytes of a log a process gets at once; None: depends on the size of the logs."""
        self.executor: Executor | None = None
        """Runs the work; None: this process, or as many forked ones as `Settings.jobs` says."""
        self.in_memory: dict[Path, MemoryOutput] = {}
        """By log in memory: its repaired rows."""
        self.together: Callable[[list[Any]], Any] | None = None
        """Joins the repaired rows of all logs in memory as the caller had them; None for files."""
        self.dry = False
        """Whether repaired rows are written nowhere; known once the logs are listed."""
        self.watch = FileWatch(())
        """The logs as they were when listed."""

    @property
    def repaired(self) -> Any:
        """Rows passed in memory, repaired, in the form they were passed: a list, a frame, a table, a data set.

        Runs the repair if it has not run. SetupError for logs in files, which are written to `out`, and if the
        outcomes were not iterated to the end. The passed rows are not changed; unchanged rows are shared.
        """
        if self.together is None:
            raise SetupError("repaired: only rows given in memory come back; files are written to `out`.")
        if not self._ended and not self.before.files:
            for _ in self:
                pass
        if not self._ended:
            raise SetupError("repaired: the repair is not done yet; iterate over all outcomes first.")
        return self.together([rows.result.value for rows in self.in_memory.values()])

    def __iter__(self) -> Iterator[Outcome]:
        with ExitStack() as stack:
            engine = stack.enter_context(open_engine(self.settings))
            journal, place = None, self.resume
            if place is not None:
                if self.repairs.choices.rescored is not None:
                    raise SetupError(
                        "--resume: the scores of a model are not kept with a repair.\n"
                        "Leave out --with rescore, or fill the logprobs first: tito-audit rescore -o OUT --resume"
                    )
                # The journal is next to the output folder, which is not made yet.
                if self.out is not None and place.parent == self.out.parent and len(find_logs(self.logs)) > 1:
                    make_folder(place.parent)
                journal = stack.enter_context(closing(Journal(place)))
            yield from self._run(engine, journal)
        self._ended = True

    def _run(self, engine: Executor | None, journal: Journal | None) -> Iterator[Outcome]:
        """Repair and write all logs, then scan what was written."""
        selected_codes(self.settings)
        chosen_repairs(self.repairs)
        files = find_logs(self.logs)
        self.watch = FileWatch(files)
        states = log_states(files) if journal is not None else {}
        writes = WritePermissions(self.repairs.force, journal)
        targets = output_targets(self.logs, files, self.out, writes)
        self.dry = self.out is None and not targets
        flow = RowFlow(files, without_row_limits(self.settings))
        flow.task_counters = follow_counters(self.progress, self.before, self.settings.jobs or 1)
        flow.fill_summary(self.before)
        flow.choose_encoders()
        overlaps = self._find_overlaps(flow)
        recorder = None
        if journal is not None:
            recorder = repair_recorder(journal, flow, states, self.repairs, targets, overlaps)
            self.resumed = len(recorder.finished)
            self.before.notices += recorder.notices()
        before, after, started = RunCounts(self.before), RunCounts(self.after), time.perf_counter()
        # `stack` is closed first: the quarantine is complete before a log without its rows gets its name.
        # A journal holds those rows too, so with one each log gets its name at once.
        with ExitStack() as later, ExitStack() as stack:
            quarantine = None
            if self.repairs.quarantine is not None and self.out is not None:
                quarantine = stack.enter_context(open_quarantine(self.repairs.quarantine, targets, writes))
            writer = _LogWriter(self, targets, writes, quarantine, later, flow.size, overlaps, recorder)
            outcomes = stack.enter_context(closing(self._outcomes(flow, writer, engine)))
            for outcome in outcomes:
                for result in flow.count_joins(outcome.before):
                    before.add(result)
                for result, repaired in zip(outcome.before, outcome.after, strict=False):
                    before.update_repaired(result, repaired)
                self.before.seconds = time.perf_counter() - started
                for result in outcome.after if self.dry else ():
                    after.add(result)
                    self.failing += count_failing(flow, result.place.file, result)
                yield outcome
        codes = {file: group.auditor.codes for file, group in flow.groups.items()}
        before.close_all(codes, run=overlaps is None)  # with `overlaps`, the rows have the findings about the run
        for result in after.close_all(codes, run=overlaps is None):
            self.failing += count_failing(flow, result.place.file, result)
        write_dataset_metadata(
            [*map(str, self.logs)], targets, overwrite=writes.may_replace, on_done=writes.on_done
        )
        flow.report_joins(self.before)
        flow.encoders.report_notices(self.before)
        add_coverage_notices(self.before)
        flow.save()
        if not self.dry:
            _scan_written(self, flow, journal)
        else:
            self.after.files = list(self.before.files)
            self.after.tokenizer = self.before.tokenizer
            self.after.tokenizer_commits = self.before.tokenizer_commits

    def _outcomes(
        self, flow: RowFlow, writer: _LogWriter, engine: Executor | None
    ) -> Generator[Outcome, None, None]:
        """The outcomes of all rows; each row is written before its outcome is yielded."""
        flow.executor, executor = engine, self.executor or engine
        several = executor is not None or (self.settings.jobs or 1) > 1
        if executor is None:
            executor = executor_for(self.settings.jobs or 1, self.before)
            if self.batch_bytes is None and is_small(flow.files):
                executor = InProcess()
        size = None
        if not executor.here:
            flow.load()
            # Several batches per process wait in memory to be written, so they are small.
            size = self.batch_bytes or min(chunk_bytes(flow.size, executor.jobs), 1 << 20)
        writes = bool(writer.targets)
        writer.work = work = RepairBatch(flow, self.repairs, writes=writes, strips_rollouts=several)
        recorded = writer.recorder.finished if writer.recorder is not None else {}
        if self.progress is not None:
            self.progress(0, 0, flow.size)
        steps = repair_steps(flow, size, overlaps=writer.overlaps, keep_text=writes, recorded=recorded)
        with closing(map_in_order(executor, work, steps)) as answers:
            for step, _ in answers:
                if isinstance(step, LogStart) and step.log is not None:
                    yield from writer.write_log(step.file, step.log, answers)
                elif isinstance(step, LogStart):
                    yield from writer.replay_log(step.file)

    def _find_overlaps(self, flow: RowFlow) -> TrainedOverlaps | None:
        """What the logs train more than once, if the repair for that is wanted; else None."""
        if not any(repair.named_only for repair in chosen_repairs(self.repairs)):
            return None
        pipe = next((file for file in flow.files if not file.is_file()), None)
        if pipe is not None:
            raise SetupError(f"--with {ONCE}: {pipe} is a pipe, which cannot be read twice.\nSave it to a file.")
        overlaps = find_overlaps(flow.files, self.settings)
        self.before.notices += overlaps.notices()
        return overlaps


@dataclass(slots=True)
class _LogWriter:
    """Writes the logs of a run, row by row as repairs come back; nothing in a dry run."""

    run: Repairs
    targets: Mapping[Path, Path]
    writes: WritePermissions
    quarantine: Quarantine | None
    later: ExitStack
    """Keeps files without their quarantined rows open until the quarantine is complete."""
    total: int
    """Bytes of all logs that are repaired in this run."""
    overlaps: TrainedOverlaps | None
    """What the rows of all logs train more than once; None if no repair needs it."""
    recorder: Recorder | None
    """None without a journal."""
    work: RepairBatch = field(init=False)
    done: int = 0
    rows: int = 0
    changed: int = 0
    """Rows that were changed or quarantined."""

    def write_log(
        self, file: Path, log: Log, answers: Iterator[tuple[Step, RepairAnswer | None]]
    ) -> Iterator[Outcome]:
        """Write a log and yield its outcomes; `answers` has its batches next."""
        flow, run, recorder, lacks_rows = self.work.flow, self.run, self.recorder, False
        auditor = flow.fitted_group(str(file)).auditor
        self._start_log(file, auditor.vocabulary, auditor.log_findings)
        if recorder is not None:
            recorder.begin(file, auditor.log_findings)
        with ExitStack() as stack:
            changes = RowChanges()
            out = self._open_output(file, log, stack, changes) if self.targets else None
            for step, answer in answers:
                if not isinstance(step, Batch) or answer is None:
                    break
                flow.encoders.add(answer.encoders, run.before)
                if recorder is not None:
                    recorder.add_encoders(answer.encoders)
                for raw, repaired in zip(step.rows, answer.rows, strict=True):
                    moved = write_row(raw, repaired, out, self.quarantine) if out is not None else ()
                    if recorder is not None:
                        recorder.add(FinishedRow(repaired.outcome, moved=tuple(moved)))
                    lacks_rows |= repaired.outcome.quarantined is not None
                    self._count(repaired.outcome)
                    yield repaired.outcome
                if run.progress is not None:
                    run.progress(self.rows, self.done + step.done, self.total)
                if flow.task_counters is not None:
                    flow.task_counters.forget(step.number)
            run.watch.check(file)
            if out is not None:
                out.finish(log)
            run.changed[file] = list(changes.as_objects())
            run.before.notices += changes.notices
            if recorder is not None:
                recorder.finish(changed=run.changed[file], notices=changes.notices)
            elif lacks_rows:
                self.later.push(stack.pop_all())
        self.done += log.size
        self._finish_log(file)

    def replay_log(self, file: Path) -> Iterator[Outcome]:
        """The outcomes of a log that was repaired before; its quarantined rows are quarantined again."""
        flow, run, recorder = self.work.flow, self.run, self.recorder
        assert recorder is not None, "only a journal keeps logs"
        group, log = flow.groups[str(file)], recorder.finished_log(file)
        if group.join is not None:
            group.join.rows(group.open(file))  # reads the calls of all logs, for the summary
        self._start_log(file, group.auditor.vocabulary, log.about_log)
        shown: dict[int, Outcome] = {}
        if (room := run.shown - self.changed) > 0:  # repaired again, as a journal holds no whole rollouts
            outcomes = (row.outcome for row in recorder.finished_rows(file))
            changed = (each.place.row for each in outcomes if each.repaired or each.quarantined is not None)
            numbers = list(islice(changed, room))
            run.vocabulary = flow.fitted_group(str(file)).auditor.vocabulary
            again = {} if self.overlaps is None else self.overlaps.trained_again(str(file), numbers)
            for raw in reread_rows(group, group.open(file, keep_text=True), numbers):
                shown[raw.index] = self.work.repair_row(file, raw, again.get(raw.index, {})).outcome
        for row in recorder.finished_rows(file):
            if self.quarantine is not None:
                for line in row.moved:
                    self.quarantine.write(line)
            self._count(row.outcome)
            yield shown.get(row.outcome.place.row, row.outcome)
        for encoded in log.encoders:
            flow.encoders.add(encoded, run.before)
        run.changed[file] = [dict(rows) for rows in log.changed]
        run.before.notices += log.notices
        self.total -= file.stat().st_size
        self._finish_log(file)

    def _start_log(self, file: Path, vocabulary: Vocabulary | None, about_log: tuple[Finding, ...]) -> None:
        """Start a log, with the findings about it as a whole."""
        run = self.run
        run.before.files.append(str(file))
        run.vocabulary = vocabulary
        if about_log:  # no repair changes these, so they count before and after
            result = Result(about_log[0].place, None, about_log, of_log=True)
            run.before.add(result)
            if run.dry:
                run.after.add(result)
                run.failing += count_failing(self.work.flow, str(file), result)

    def _finish_log(self, file: Path) -> None:
        if self.targets:
            rows = self.run.in_memory.get(file)
            in_memory = rows.result if rows is not None and rows.target is None else None
            self.run.written.append((file, in_memory or self.targets[file]))

    def _open_output(self, file: Path, log: Log, stack: ExitStack, changes: RowChanges) -> Output:
        """Open the output of a log, which `stack` completes when it closes."""
        target, repairs, group = self.targets[file], self.run.repairs, self.work.flow.groups[str(file)]
        if self.run.out is not None and target != self.run.out:  # `out` is a folder
            make_folder(target.parent)
        added = (COLUMN,) if repairs.provenance else ()
        if isinstance(file, RowsInMemory):
            place = None if isinstance(target, RowsInMemory) else target
            memory = open_memory_output(log, file, place, overwrite=repairs.force, added=added)
            self.run.in_memory[file], out = stack.enter_context(memory)
        else:
            overwrite, on_done = self.writes.may_replace(target), self.writes.on_done
            opened = open_output(log, target, added=added, changes=changes, overwrite=overwrite, on_done=on_done)
            out = stack.enter_context(opened)
        return group.output(out, log)

    def _count(self, outcome: Outcome) -> None:
        self.rows += 1
        self.changed += outcome.repaired or outcome.quarantined is not None


def repair_rollouts(
    logs: Logs,
    out: str | Path | None = None,
    settings: Settings | None = None,
    repairs: RepairSettings | None = None,
    progress: Progress | None = None,
    *,
    resume: Path | None = None,
) -> Repairs:
    """Repair logs into `out` (a file for one log, else a folder); iterate to get the outcome of each row.

    Iterating writes; without `out` it is a dry run. Rows in memory (`Logs`) come back as `repaired`, in the form
    they were passed, and are also written if there is an `out`. The logs are never changed. Every row is read,
    whatever `Settings.limit`, `Settings.sample` and `Settings.row` say.

    `resume` is a journal, made if it does not exist. Logs that an earlier run with it repaired are not repaired
    again if log and repaired file are unchanged, and files that it wrote may be replaced. The outcomes are the
    same, but their rollouts keep only place and format.
    """
    settings, repairs = Settings.given(settings), repairs or RepairSettings()
    inputs = passed_logs(logs)
    run = Repairs(inputs.names, out, settings, repairs, progress, resume=resume)
    run.together = inputs.together
    return run


def _scan_written(run: Repairs, flow: RowFlow, journal: Journal | None) -> None:
    """Scan the written files into `run.after`.

    A file that is no log any more is a finding: if a repair moved all but damaged rows, what is left may look like
    other data.
    """
    refused: dict[Path, str] = {}
    for _, target in run.written:
        try:
            open_log(target).kind  # noqa: B018  # reads the beginning of the file
        except StorageError as error:
            refused[target] = f"the repaired file is no log any more: {str(error).splitlines()[0]}"
    logs = {str(target): str(log) for log, target in run.written}
    if (enter := getattr(run.progress, "enter", None)) is not None:
        enter(CHECKING)
    scan = Scan(
        [target for _, target in run.written if target not in refused],
        without_row_limits(replace(run.settings, assume={})),
        run.progress,
    )
    scan.journal = journal
    scan.loader = flow.loader
    scan.standing_for = {target: log for log, target in run.written}
    if scan.logs or not run.written:
        run.failing += sum(count_failing(flow, logs[result.place.file], result) for result in scan)
    run.after = scan.summary
    run.after.gate = None  # `failing` is the verdict on a repair
    for target, why in refused.items():
        log = logs[str(target)]
        result = unreadable_result(Place(str(target), 0), why, flow.groups[log].auditor.codes)
        run.after.files.append(str(target))
        run.after.add(result)
        run.failing += count_failing(flow, log, result)
