"""Read, check, repair, write, check again: the flow from logs to repaired logs."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from tito_audit.errors import SetupError, StorageError
from tito_audit.join import lines_of
from tito_audit.record.finding import Finding, Result, Severity
from tito_audit.record.outcome import COLUMN, Outcome
from tito_audit.record.rollout import Place
from tito_audit.record.trainings import ONCE
from tito_audit.run.auditor import selected_codes, unreadable
from tito_audit.run.log_findings import Once, RunCounts
from tito_audit.run.log_groups import RowFlow
from tito_audit.run.progress import CHECKING, Progress, entered, followed
from tito_audit.run.resume import DoneRow, Recorder, read_again, refuse_model, repair_recorder, states_of
from tito_audit.run.row_repair import RepairedRow, failing, strategies
from tito_audit.run.rows import every_row
from tito_audit.run.scan import Scan, conclude, once_of
from tito_audit.run.tasks import (
    Batch,
    Begun,
    RepairBatch,
    Repaired,
    Step,
    chunk_bytes,
    engine_of,
    repair_steps,
    unpacked,
)
from tito_audit.run.workers import Executor, InProcess, executor_for, is_small, mapped
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
    allow_open_files,
    dataset_metadata,
    find_logs,
    make_folder,
    memory_targets,
    open_log,
    open_memory_output,
    open_output,
    output_path,
    passed_logs,
    refuse_taken,
    same_place,
    target_paths,
    write_dataset_metadata,
)
from tito_audit.storage.atomic import Sealed
from tito_audit.storage.journal import Journal
from tito_audit.storage.output import Changes
from tito_audit.storage.watch import Watch
from tito_audit.summary import Summary
from tito_audit.tables import DisplayableRepairs
from tito_audit.tokens.vocab import Vocabulary


@dataclass(frozen=True, slots=True)
class Writes:
    """Which files a run may replace, and a record of those that it writes."""

    force: bool
    journal: Journal | None

    def replaces(self, target: Path) -> bool:
        """Whether a file may be replaced: any if forced, else one that this journal's runs wrote."""
        return self.force or (self.journal is not None and self.journal.is_ours(target))

    def refuse_taken(self, targets: Mapping[Path, Path]) -> None:
        """StorageError if one of the files to write exists and may not be replaced."""
        ours = {file for file, target in targets.items() if self.replaces(target)}
        for overwrite in (True, False):
            some = {file: target for file, target in targets.items() if (file in ours) is overwrite}
            refuse_taken(some, overwrite=overwrite)

    @property
    def sealed(self) -> Sealed | None:
        """What is called for each file that is complete, before it gets its name."""
        return None if self.journal is None else self.journal.wrote


def targets_of(
    logs: Sequence[Name], files: Sequence[Path], out: Path | None, writes: Writes
) -> Mapping[Path, Path]:
    """The file to write for each log; rows in memory without an `out` are their own target.

    {} in a dry run. SetupError or StorageError if a file may not be written.
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
    writes.refuse_taken({**targets, **metadata})
    return targets


@contextmanager
def opened_quarantine(name: str, targets: Mapping[Path, Path], writes: Writes) -> Iterator[Quarantine]:
    """The quarantine of a run; SetupError if the run reads or writes that file."""
    place = output_path(name)
    if any(same_place(place, file) for file in (*targets, *targets.values())):
        raise SetupError(f"--quarantine: this run already reads or writes {place}; name another file.")
    with Quarantine.opened(place, overwrite=writes.replaces(place), sealed=writes.sealed) as quarantine:
        allow_open_files(len(targets))
        yield quarantine


def write_row(raw: RawRow, repaired: RepairedRow, out: Output, quarantine: Quarantine | None) -> list[bytes]:
    """Write a row as repaired; the lines that went to the quarantine instead."""
    moved: list[bytes] = []
    outcome = repaired.outcome
    if outcome.quarantined is not None:
        if quarantine is None:
            raise SetupError(f"{outcome.place}: `drop` removes rows and needs --quarantine FILE to keep them.")
        codes = sorted({f.code for r in outcome.before for f in r.findings if f.severity > Severity.NOTE})
        for line in lines_of(unpacked(raw)):
            why = {COLUMN: {"quarantined": outcome.quarantined, "codes": codes}}
            moved.append(quarantine.add(line, outcome.place, why))
        out.replace(raw, [])
    elif repaired.rows is None:
        out.keep(raw)
    else:
        out.replace(replace(raw, value=repaired.logged), repaired.rows)
    return moved


class Repairs(DisplayableRepairs):
    """The outcome of every row, in order; the repaired logs are written while these are computed.

    Creating one opens nothing. Iterating raises SetupError or StorageError when the run is impossible, and leaves
    no file behind; each file gets its name when it is complete. A dry run (no `out`) writes none. With more than
    one job (`Settings.jobs`) the rollouts of unchanged rows keep only their place and format.
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
        """A journal: logs that it says are repaired and that were written are not repaired again."""
        self.resumed = 0
        """How many logs were repaired before."""
        self.shown = 0
        """How many of the first changed rows need whole rollouts, also if they were repaired before."""
        self.before = Summary()
        """The scan of the logs as read."""
        self.after = Summary()
        """The scan of the written files or, in a dry run, of the rows as they would be written."""
        self.failing = 0
        """How many findings counted in `after` are at or above the `fail_on` of their log."""
        self.vocabulary: Vocabulary | None = None
        """To show tokens of the current log as text; None without a tokenizer and before the first outcome."""
        self.written: list[tuple[Path, Path]] = []
        """(log, file written for it), once each file is complete."""
        self.changed: dict[Path, list[dict[str, Any]]] = {}
        """By log: its changed rows and places, as in the JSON report."""
        self.batch_bytes: int | None = None
        """Roughly how many bytes of a log a process gets at once; None: depends on the size of the logs."""
        self.executor: Executor | None = None
        """What runs the work; None: this process, or as many forked ones as `Settings.jobs` says."""
        self.in_memory: dict[Path, MemoryOutput] = {}
        """By log in memory: what holds its repaired rows."""
        self.together: Callable[[list[Any]], Any] | None = None
        """Puts the rows of all logs in memory together as the caller had them; None for files."""
        self.dry = False
        """Whether repaired rows go nowhere; known once logs are read."""
        self.watch = Watch(())
        """The logs as they were when they were listed."""

    @property
    def repaired(self) -> Any:
        """Rows that were given in memory, repaired, as the caller had them: a list, a frame, a table, a data set.

        Repairs them if that was not done yet. SetupError for logs in files, which are written to `out`, and if the
        outcomes were not iterated to the end. What was given is not changed; rows without repairs are shared with
        it.
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
            engine = stack.enter_context(engine_of(self.settings))
            journal, place = None, self.resume
            if place is not None:
                refuse_model(self.repairs)
                # It may be beside a folder that is yet to be made.
                if self.out is not None and place.parent == self.out.parent and len(find_logs(self.logs)) > 1:
                    make_folder(place.parent)
                journal = stack.enter_context(closing(Journal(place)))
            yield from self._all(engine, journal)
        self._ended = True

    def _all(self, engine: Executor | None, journal: Journal | None) -> Iterator[Outcome]:
        selected_codes(self.settings)
        strategies(self.repairs)
        files = find_logs(self.logs)
        self.watch = Watch(files)
        states = states_of(files) if journal is not None else {}
        writes = Writes(self.repairs.force, journal)
        targets = targets_of(self.logs, files, self.out, writes)
        self.dry = self.out is None and not targets
        flow = RowFlow(files, every_row(self.settings))
        flow.in_flight = followed(self.progress, self.before, self.settings.jobs or 1)
        flow.begin(self.before)
        flow.choose_encoders()
        once = self._once(flow)
        recorder = None
        if journal is not None:
            recorder = repair_recorder(journal, flow, states, self.repairs, targets, once)
            self.resumed = len(recorder.logs)
            self.before.notices += recorder.notices()
        before, after, started = RunCounts(self.before), RunCounts(self.after), time.perf_counter()
        # The quarantine is closed first: its file is complete before any log without those rows gets its name.
        # A journal holds those rows, so with one each log gets its name at once.
        with ExitStack() as later, ExitStack() as stack:
            quarantine = None
            if self.repairs.quarantine is not None and self.out is not None:
                quarantine = stack.enter_context(opened_quarantine(self.repairs.quarantine, targets, writes))
            writing = _Writing(self, targets, writes, quarantine, later, flow.size, once, recorder)
            outcomes = stack.enter_context(closing(self._outcomes(flow, writing, engine)))
            for outcome in outcomes:
                for result in flow.noted(outcome.before):
                    before.add(result)
                for result, repaired in zip(outcome.before, outcome.after, strict=False):
                    before.repaired(result, repaired)
                self.before.seconds = time.perf_counter() - started
                for result in outcome.after if self.dry else ():
                    after.add(result)
                    self.failing += failing(flow, result.place.file, result)
                yield outcome
        codes = {file: group.auditor.codes for file, group in flow.groups.items()}
        before.whole(codes, run=once is None)  # else the rows themselves had the findings about the run
        for result in after.whole(codes, run=once is None):
            self.failing += failing(flow, result.place.file, result)
        write_dataset_metadata(list(map(str, self.logs)), targets, overwrite=writes.replaces, sealed=writes.sealed)
        flow.say_joined(self.before)
        flow.encoders.warn(self.before)
        conclude(self.before)
        flow.save()
        if not self.dry:
            _closing_scan(self, flow, journal)
        else:
            self.after.files = list(self.before.files)
            self.after.tokenizer = self.before.tokenizer
            self.after.tokenizer_commits = self.before.tokenizer_commits

    def _outcomes(
        self, flow: RowFlow, writing: _Writing, engine: Executor | None
    ) -> Generator[Outcome, None, None]:
        """The outcomes; each row is written before its outcome is yielded."""
        flow.executor, executor = engine, self.executor or engine
        several = executor is not None or (self.settings.jobs or 1) > 1
        if executor is None:
            executor = executor_for(self.settings.jobs or 1, self.before)
            if self.batch_bytes is None and is_small(flow.files):
                executor = InProcess()
        size = None
        if not executor.here:
            flow.load()
            # A few batches per process wait in memory to be written.
            size = self.batch_bytes or min(chunk_bytes(flow.size, executor.jobs), 1 << 20)
        writes = bool(writing.targets)
        writing.work = work = RepairBatch(flow, self.repairs, writes=writes, bare=several)
        recorded = writing.recorder.logs if writing.recorder is not None else {}
        if self.progress is not None:
            self.progress(0, 0, flow.size)
        steps = repair_steps(flow, size, once=writing.once, keep_text=writes, recorded=recorded)
        with closing(mapped(executor, work, steps)) as answers:
            for step, _ in answers:
                if isinstance(step, Begun) and step.log is not None:
                    yield from writing.outcomes(step.file, step.log, answers)
                elif isinstance(step, Begun):
                    yield from writing.recorded(step.file)

    def _once(self, flow: RowFlow) -> Once | None:
        """What the logs train more than once, if the repair for that was named."""
        if not any(repair.named_only for repair in strategies(self.repairs)):
            return None
        pipe = next((file for file in flow.files if not file.is_file()), None)
        if pipe is not None:
            raise SetupError(f"--with {ONCE}: {pipe} is a pipe, which cannot be read twice.\nSave it to a file.")
        once = once_of(flow.files, self.settings)
        self.before.notices += once.notices()
        return once


@dataclass(slots=True)
class _Writing:
    """Writes the rows of the logs as their repairs come back; nothing in a dry run."""

    run: Repairs
    targets: Mapping[Path, Path]
    writes: Writes
    quarantine: Quarantine | None
    later: ExitStack
    """Holds the files that lack rows until the quarantine has its name."""
    total: int
    """Bytes of all logs that are repaired in this run."""
    once: Once | None
    """What the rows of all logs train more than once; None if no repair needs it."""
    recorder: Recorder | None
    """Records what was done; None without a journal."""
    work: RepairBatch = field(init=False)
    done: int = 0
    rows: int = 0
    changed: int = 0
    """Rows that were changed or put into the quarantine."""

    def outcomes(self, file: Path, log: Log, answers: Iterator[tuple[Step, Repaired | None]]) -> Iterator[Outcome]:
        """The outcomes of one log, whose batches come next in `answers`."""
        flow, run, recorder, lacks_rows = self.work.flow, self.run, self.recorder, False
        auditor = flow.group(str(file)).auditor
        self._begin(file, auditor.vocabulary, auditor.told)
        if recorder is not None:
            recorder.begin(file, auditor.told)
        with ExitStack() as stack:
            changes = Changes()
            out = self._output(file, log, stack, changes) if self.targets else None
            for step, answer in answers:
                if not isinstance(step, Batch) or answer is None:
                    break
                flow.encoders.add(answer.encoders, run.before)
                if recorder is not None:
                    recorder.encoders(answer.encoders)
                for raw, repaired in zip(step.rows, answer.rows, strict=True):
                    moved = write_row(raw, repaired, out, self.quarantine) if out is not None else ()
                    if recorder is not None:
                        recorder.add(DoneRow(repaired.outcome, moved=tuple(moved)))
                    lacks_rows |= repaired.outcome.quarantined is not None
                    self._count(repaired.outcome)
                    yield repaired.outcome
                if run.progress is not None:
                    run.progress(self.rows, self.done + step.done, self.total)
                if flow.in_flight is not None:
                    flow.in_flight.passed(step.number)
            run.watch.check(file)
            if out is not None:
                out.finish(log)
            run.changed[file] = list(changes.objects())
            run.before.notices += changes.notices
            if recorder is not None:
                recorder.finish(changed=run.changed[file], notices=changes.notices)
            elif lacks_rows:
                self.later.push(stack.pop_all())
        self.done += log.size
        self._end(file)

    def recorded(self, file: Path) -> Iterator[Outcome]:
        """The outcomes of a log that was repaired before; what they put into the quarantine is put there again."""
        flow, run, recorder = self.work.flow, self.run, self.recorder
        assert recorder is not None, "only a journal keeps logs"
        group, log = flow.groups[str(file)], recorder.log(file)
        if group.join is not None:
            group.join.rows(group.open(file))  # reads the calls of all logs, which the summary tells of
        self._begin(file, group.auditor.vocabulary, log.about_log)
        shown = self._shown(file, recorder)
        for row in recorder.rows(file):
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
        self._end(file)

    def _begin(self, file: Path, vocabulary: Vocabulary | None, about_log: tuple[Finding, ...]) -> None:
        run = self.run
        run.before.files.append(str(file))
        run.vocabulary = vocabulary
        if about_log:  # no repair changes what is so of the whole log
            result = Result(about_log[0].place, None, about_log, of_log=True)
            run.before.add(result)
            if run.dry:
                run.after.add(result)
                run.failing += failing(self.work.flow, str(file), result)

    def _end(self, file: Path) -> None:
        if self.targets:
            rows = self.run.in_memory.get(file)
            in_memory = rows.result if rows is not None and rows.target is None else None
            self.run.written.append((file, in_memory or self.targets[file]))

    def _shown(self, file: Path, recorder: Recorder) -> Mapping[int, Outcome]:
        """By row, the outcomes that are shown with whole rollouts: their rows are repaired again."""
        room = self.run.shown - self.changed
        if room <= 0:
            return {}
        flow = self.work.flow
        outcomes = (row.outcome for row in recorder.rows(file))
        changed = (each.place.row for each in outcomes if each.repaired or each.quarantined is not None)
        numbers, group, shown = list(islice(changed, room)), flow.groups[str(file)], dict[int, Outcome]()
        self.run.vocabulary = flow.group(str(file)).auditor.vocabulary
        for raw in read_again(group, group.open(file, keep_text=True), numbers):
            again = {} if self.once is None else self.once.again(str(file), [raw.index]).get(raw.index, {})
            shown[raw.index] = self.work.row(file, raw, again).outcome
        return shown

    def _output(self, file: Path, log: Log, stack: ExitStack, changes: Changes) -> Output:
        target, repairs, group = self.targets[file], self.run.repairs, self.work.flow.groups[str(file)]
        if self.run.out is not None and target != self.run.out:  # in a folder, which is made as needed
            make_folder(target.parent)
        added = (COLUMN,) if repairs.provenance else ()
        if isinstance(file, RowsInMemory):
            place = None if isinstance(target, RowsInMemory) else target
            memory = open_memory_output(log, file, place, overwrite=repairs.force, added=added)
            self.run.in_memory[file], out = stack.enter_context(memory)
        else:
            overwrite, sealed = self.writes.replaces(target), self.writes.sealed
            opened = open_output(log, target, added=added, changes=changes, overwrite=overwrite, sealed=sealed)
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
    """Repairs logs into `out` (a file for one log, else a folder); yields one outcome per row.

    Nothing is written until the outcomes are iterated; without `out` it is a dry run. Rows in memory (`Logs`) come
    back as `repaired`, of the same kind, and are also written if there is an `out`. The logs are never changed.
    Every row is read, whatever `Settings.limit`, `Settings.sample` and `Settings.row` say.

    With `resume`, a journal that is made if it does not exist, logs that an earlier run repaired are not repaired
    again if log and repaired file are unchanged, and files that runs with this journal wrote may be replaced. The
    outcomes are the same; their rollouts keep only place and format.
    """
    settings, repairs = Settings.given(settings), repairs or RepairSettings()
    inputs = passed_logs(logs)
    run = Repairs(inputs.names, out, settings, repairs, progress, resume=resume)
    run.together = inputs.together
    return run


def _closing_scan(run: Repairs, flow: RowFlow, journal: Journal | None) -> None:
    """Scan what was written, read like any log, into the counts after the repair.

    A file that is no log any more is a finding, since it was written: if a repair moves all rows but damaged ones,
    what is left may look like other data.
    """
    refused: dict[Path, str] = {}
    for _, target in run.written:
        try:
            open_log(target).kind  # noqa: B018  # reads the beginning of the file
        except StorageError as error:
            refused[target] = f"the repaired file is no log any more: {str(error).splitlines()[0]}"
    logs = {str(target): str(log) for log, target in run.written}
    scan = Scan(
        [target for _, target in run.written if target not in refused],
        every_row(replace(run.settings, assume={})),
        entered(run.progress, CHECKING),
    )
    scan.journal = journal
    scan.loader = flow.loader
    scan.standing_for = {target: log for log, target in run.written}
    if scan.logs or not run.written:
        run.failing += sum(failing(flow, logs[result.place.file], result) for result in scan)
    run.after = scan.summary
    run.after.gate = None  # `failing` is the verdict on a repair
    for target, why in refused.items():
        log = logs[str(target)]
        result = unreadable(Place(str(target), 0), why, flow.groups[log].auditor.codes)
        run.after.files.append(str(target))
        run.after.add(result)
        run.failing += failing(flow, log, result)
