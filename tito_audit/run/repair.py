"""Read, check, repair, write, check again: the flow from logs to repaired logs."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from tito_audit.chains.ledger import Ledger
from tito_audit.errors import SetupError, StorageError
from tito_audit.join import lines_of
from tito_audit.record.finding import Finding, Result, Severity
from tito_audit.record.outcome import COLUMN, Outcome
from tito_audit.record.rollout import Place
from tito_audit.record.testimony import Testimony
from tito_audit.record.trainings import ONCE
from tito_audit.run.auditor import selected_codes, unreadable
from tito_audit.run.log_findings import Once, count_logs, note_witness
from tito_audit.run.log_groups import RowFlow
from tito_audit.run.progress import CHECKING, Progress, entered
from tito_audit.run.resume import (
    KeptOutcome,
    Recorder,
    kept_log,
    kept_outcomes,
    refuse_model,
    repair_recorder,
    states_of,
)
from tito_audit.run.row_repair import RepairedRow, failing, strategies
from tito_audit.run.rows import every_row
from tito_audit.run.scan import Scan, conclude, once_of
from tito_audit.run.tasks import (
    Batch,
    Kept,
    Part,
    RepairBatch,
    Repaired,
    Started,
    chunk_bytes,
    engine_of,
    planned,
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
    given,
    make_folder,
    memory_targets,
    open_log,
    open_memory_output,
    open_output,
    output_path,
    refuse_taken,
    same_place,
    target_paths,
    write_dataset_metadata,
)
from tito_audit.storage.atomic import Sealed
from tito_audit.storage.changes import Changes
from tito_audit.storage.journal import Journal
from tito_audit.storage.watch import Watch
from tito_audit.summary import Summary
from tito_audit.tables import ShownRepairs
from tito_audit.tokens.vocab import Vocabulary


def closing_scan(
    written: Sequence[tuple[Path, Path]],
    settings: Settings,
    progress: Progress | None,
    flow: RowFlow,
    journal: Journal | None,
) -> tuple[Summary, int]:
    """The counts of the files that were written, each with its log before it, and how many findings fail the run.

    A file that is no log any more is a finding, since it was written: if a repair moves all rows but damaged ones,
    what is left may look like other data.
    """
    refused = {target: why for _, target in written if (why := _refused(target)) is not None}
    logs = {str(target): str(log) for log, target in written}
    scan = Scan(
        [one for _, one in written if one not in refused], every_row(settings), entered(progress, CHECKING)
    )
    scan.journal = journal
    scan.loader = flow.loader
    scan.standing_for = {target: log for log, target in written}
    failed = 0
    if scan.logs or not written:
        failed = sum(failing(flow, logs[result.place.file], result) for result in scan)
    for target, why in refused.items():
        group = flow.groups[logs[str(target)]]
        result = unreadable(Place(str(target), 0), why, group.auditor.codes)
        scan.summary.files.append(str(target))
        scan.summary.add(result)
        failed += failing(flow, logs[str(target)], result)
    return scan.summary, failed


def count_trained_again(ledger: Ledger, summary: Summary) -> Sequence[Result]:
    """Count what the rows of a run train more than once, or never; the findings, as a scan has them."""
    if not len(ledger):
        return ()
    once = Once.of(ledger)
    results = tuple(once.results())
    for result in results:
        summary.add(result)
    summary.notices += once.notices()
    return results


def _refused(target: Path) -> str | None:
    """Why a written file cannot be read as a log; None where it can."""
    try:
        open_log(target).kind  # noqa: B018  # reads the beginning of the file
    except StorageError as error:
        return f"the repaired file is no log any more: {str(error).splitlines()[0]}"
    return None


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
        ours = {file: target for file, target in targets.items() if self.replaces(target)}
        others = {file: target for file, target in targets.items() if file not in ours}
        for mine, overwrite in ((ours, True), (others, False)):
            refuse_taken(mine, overwrite=overwrite)

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
    if any(same_place(place, one) for one in (*targets, *targets.values())):
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
            said = {COLUMN: {"quarantined": outcome.quarantined, "codes": codes}}
            moved.append(quarantine.add(line, outcome.place, said))
        out.replace(raw, [])
    elif repaired.rows is None:
        out.keep(raw)
    else:
        out.replace(replace(raw, value=repaired.logged), repaired.rows)
    return moved


class InMemory:
    """The repaired rows of the logs of a run that are in memory."""

    def __init__(self) -> None:
        self.together: Callable[[list[Any]], Any] | None = None
        """Puts the rows of all logs together as the caller had them; None for files."""
        self.outputs: dict[Path, MemoryOutput] = {}
        """By log, what holds its repaired rows."""
        self.complete = False
        """Whether all logs are repaired and were scanned again."""

    @contextmanager
    def opened(self, log: Log, file: RowsInMemory, target: Path, repairs: RepairSettings) -> Iterator[Output]:
        """An output for the rows of a log; `target` is a file, or the log itself to keep them in memory."""
        added = (COLUMN,) if repairs.provenance else ()
        place = None if isinstance(target, RowsInMemory) else target
        with open_memory_output(log, file, place, overwrite=repairs.force, added=added) as (kept, out):
            self.outputs[file] = kept
            yield out

    def path(self, file: Path) -> Path | None:
        """The repaired rows of a log as a path; None if they are in a file."""
        kept = self.outputs.get(file)
        return kept.result if kept is not None and kept.target is None else None


class _Run(Protocol):
    in_memory: InMemory
    before: Summary

    def __iter__(self) -> Iterator[Outcome]: ...


def repaired_rows(run: _Run) -> Any:
    """Rows that were given in memory, repaired, as the caller had them: a list, a frame, a table, a data set.

    Repairs them if that was not done yet. SetupError for logs in files, which are written to `out`, and if the
    outcomes were not iterated to the end. What was given is not changed; rows without repairs are shared with it.
    """
    held = run.in_memory
    if held.together is None:
        raise SetupError("repaired: only rows given in memory come back; files are written to `out`.")
    if not held.complete and not run.before.files:
        for _ in run:
            pass
    if not held.complete:
        raise SetupError("repaired: the repair is not done yet; iterate over all outcomes first.")
    return held.together([output.result.value for output in held.outputs.values()])


_LARGEST = 1 << 20
"""The most bytes in a batch: a few batches per process wait in memory to be written."""


class Repairs(ShownRepairs):
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
        self.in_memory = InMemory()
        """Repaired rows of the logs in memory."""
        self.dry = False
        """Whether repaired rows go nowhere; known once logs are read."""
        self.watch = Watch(())
        """The logs as they were when they were listed."""
        self._engine: Executor | None = None

    repaired = property(repaired_rows)

    def __iter__(self) -> Iterator[Outcome]:
        with ExitStack() as stack:
            self._engine = stack.enter_context(engine_of(self.settings))
            yield from self._all(None if self.resume is None else self._journal(self.resume, stack))
        self._ended = True

    def _all(self, journal: Journal | None) -> Iterator[Outcome]:
        selected_codes(self.settings)
        strategies(self.repairs)
        files = find_logs(self.logs)
        self.watch = Watch(files)
        states = states_of(files) if journal is not None else {}
        writes = Writes(self.repairs.force, journal)
        targets = targets_of(self.logs, files, self.out, writes)
        self.dry = self.out is None and not targets
        flow = RowFlow(files, every_row(self.settings))
        flow.begin(self.before)
        flow.choose_encoders()
        once = self._once(flow)
        recorder = None
        if journal is not None:
            recorder = repair_recorder(journal, flow, states, self.repairs, targets, once)
            self.resumed = len(recorder.kept)
            self.before.notices += recorder.finished.notices()
        trained, testimonies = (Ledger(), Ledger()), (dict[str, Testimony](), dict[str, Testimony]())
        started = time.perf_counter()
        # The quarantine is closed first: its file is complete before any log without those rows gets its name.
        # A journal holds those rows, so with one each log gets its name at once.
        with ExitStack() as later, ExitStack() as stack:
            quarantine = None
            if self.repairs.quarantine is not None and self.out is not None:
                quarantine = stack.enter_context(opened_quarantine(self.repairs.quarantine, targets, writes))
            writing = _Writing(self, targets, writes, quarantine, later, flow.size, once, recorder)
            outcomes = stack.enter_context(closing(self._outcomes(flow, writing)))
            for outcome in outcomes:
                for result in flow.noted(outcome.before):
                    self.before.add(result)
                    note_witness(result, testimonies[0])
                    trained[0].note(result)
                self.before.seconds = time.perf_counter() - started
                for result in outcome.after if self.dry else ():
                    self.after.add(result)
                    note_witness(result, testimonies[1])
                    trained[1].note(result)
                    self.failing += failing(flow, result.place.file, result)
                yield outcome
        codes = {file: group.auditor.codes for file, group in flow.groups.items()}
        for result in count_logs(testimonies[0], self.before, codes):
            self.before.add(result)
        for result in count_logs(testimonies[1], self.after, codes):
            self.after.add(result)
            self.failing += failing(flow, result.place.file, result)
        if once is None:  # else the rows themselves had these findings
            count_trained_again(trained[0], self.before)
            for result in count_trained_again(trained[1], self.after):
                self.failing += failing(flow, result.place.file, result)
        write_dataset_metadata(list(map(str, self.logs)), targets, overwrite=writes.replaces, sealed=writes.sealed)
        flow.say_joined(self.before)
        flow.encoders.warn(self.before)
        conclude(self.before)
        flow.save()
        if not self.dry:
            settings = replace(self.settings, assume={})
            self.after, failed = closing_scan(self.written, settings, self.progress, flow, journal)
            self.failing += failed
        else:
            self.after.files = list(self.before.files)
            self.after.tokenizer = self.before.tokenizer
            self.after.tokenizer_commits = self.before.tokenizer_commits
        self.in_memory.complete = True

    def tell(self, flow: RowFlow, file: Path, told: tuple[Finding, ...]) -> None:
        """Count the findings about a whole log, which no repair changes."""
        if not told:
            return
        result = Result(told[0].place, None, told, of_log=True)
        self.before.add(result)
        if self.dry:
            self.after.add(result)
            self.failing += failing(flow, str(file), result)

    def _journal(self, place: Path, stack: ExitStack) -> Journal:
        """The journal, open until `stack` closes; it may be beside a folder that is yet to be made."""
        refuse_model(self.repairs)
        if self.out is not None and place.parent == self.out.parent and len(find_logs(self.logs)) > 1:
            make_folder(place.parent)
        return stack.enter_context(closing(Journal(place)))

    def _outcomes(self, flow: RowFlow, writing: _Writing) -> Generator[Outcome, None, None]:
        """The outcomes; each row is written before its outcome is yielded."""
        given = self.executor or self._engine
        several = given is not None or (self.settings.jobs or 1) > 1
        executor = given or self._executor(flow)
        recorder, writes = writing.recorder, bool(writing.targets)
        flow.executor = self._engine
        size = None
        if not executor.here:
            flow.load()
            size = self.batch_bytes or min(chunk_bytes(flow.size, executor.jobs), _LARGEST)
        writing.work = work = RepairBatch(flow, self.repairs, writes=writes, bare=several)
        kept = recorder.kept if recorder is not None else {}
        tasks = planned(flow, size, once=writing.once, keep_text=writes, kept=kept)
        with closing(mapped(executor, work, tasks)) as parts:
            for part, _ in parts:
                if isinstance(part, Kept):
                    yield from writing.replayed(part)
                    continue
                assert isinstance(part, Started), "the rows of a log are taken before the next one starts"
                yield from writing.outcomes(part.file, part.log, parts)

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

    def _executor(self, flow: RowFlow) -> Executor:
        """The executor that repairs the batches."""
        executor = executor_for(self.settings.jobs or 1, self.before)
        return InProcess() if self.batch_bytes is None and is_small(flow.files) else executor


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
    """Bytes of all logs."""
    once: Once | None
    """What the rows of all logs train more than once; None if no repair needs it."""
    recorder: Recorder | None
    """Records what was done; None without a journal."""
    work: RepairBatch = field(init=False)
    done: int = 0
    rows: int = 0
    changed: int = 0
    """Rows that were changed or put into the quarantine."""

    def outcomes(self, file: Path, log: Log, parts: Iterator[tuple[Part, Repaired | None]]) -> Iterator[Outcome]:
        """The outcomes of one log, whose batches come next in `parts`."""
        flow, run, recorder, lacks_rows = self.work.flow, self.run, self.recorder, False
        run.before.files.append(str(file))
        auditor = flow.group(str(file)).auditor
        run.vocabulary = auditor.vocabulary
        run.tell(flow, file, auditor.told)
        if recorder is not None:
            recorder.begin(file, auditor.told)
        with ExitStack() as stack:
            changes = Changes()
            out = self._output(file, log, stack, changes) if self.targets else None
            for part, answer in parts:
                if not isinstance(part, Batch) or answer is None:
                    break
                flow.encoders.add(answer.encoders, run.before)
                if recorder is not None:
                    recorder.encoders(answer.encoders)
                for raw, repaired in zip(part.rows, answer.rows, strict=True):
                    moved = write_row(raw, repaired, out, self.quarantine) if out is not None else ()
                    if recorder is not None:
                        recorder.add_outcome(repaired.outcome, moved)
                    lacks_rows |= repaired.outcome.quarantined is not None
                    self._passed(repaired.outcome, part.position)
                    yield repaired.outcome
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
        if self.targets:
            run.written.append((file, run.in_memory.path(file) or self.targets[file]))

    def replayed(self, part: Kept) -> Iterator[Outcome]:
        """The outcomes of a log that was repaired before; what they put into the quarantine is put there again."""
        flow, run, file, recorder = self.work.flow, self.run, part.file, self.recorder
        assert recorder is not None, "only a journal keeps logs"
        group = flow.groups[str(file)]
        if group.join is not None:
            group.join.rows(group.open(file))  # reads the calls of all logs, which the summary tells of
        run.before.files.append(str(file))
        run.vocabulary = group.auditor.vocabulary
        log = kept_log(recorder.journal, part.recorded, file)
        run.tell(flow, file, log.told)
        whole = self._whole(file, kept_outcomes(recorder.journal, part.recorded, file))
        for outcome, moved in kept_outcomes(recorder.journal, part.recorded, file):
            if self.quarantine is not None:
                for line in moved:
                    self.quarantine.write(line)
            self._passed(outcome, 0)
            yield whole.get(outcome.place.row, outcome)
        for encoded in log.encoders:
            flow.encoders.add(encoded, run.before)
        run.changed[file] = [dict(rows) for rows in log.changed]
        run.before.notices += log.notices
        self.done += file.stat().st_size
        if self.targets:
            run.written.append((file, self.targets[file]))

    def _whole(self, file: Path, outcomes: Iterable[KeptOutcome]) -> Mapping[int, Outcome]:
        """By row, the outcomes that are shown with whole rollouts: their rows are repaired again."""
        room = self.run.shown - self.changed
        if room <= 0:
            return {}
        flow = self.work.flow
        rows = (one.place.row for one, _ in outcomes if one.repaired or one.quarantined is not None)
        wanted, found, group = set(islice(rows, room)), {}, flow.groups[str(file)]
        self.run.vocabulary = flow.group(str(file)).auditor.vocabulary
        for raw in group.rows(group.open(file, keep_text=True)) if wanted else ():
            if raw.index in wanted:
                wanted.remove(raw.index)
                found[raw.index] = self._again(file, raw).outcome
                if not wanted:
                    break
        return found

    def _output(self, file: Path, log: Log, stack: ExitStack, changes: Changes) -> Output:
        target, repairs, group = self.targets[file], self.run.repairs, self.work.flow.groups[str(file)]
        if self.run.out is not None and target != self.run.out:  # in a folder, which is made as needed
            make_folder(target.parent)
        if isinstance(file, RowsInMemory):
            return group.output(stack.enter_context(self.run.in_memory.opened(log, file, target, repairs)), log)
        opened = partial(open_output, log, target, added=(COLUMN,) if repairs.provenance else (), changes=changes)
        out = opened(overwrite=self.writes.replaces(target), sealed=self.writes.sealed)
        return group.output(stack.enter_context(out), log)

    def _again(self, file: Path, raw: RawRow) -> RepairedRow:
        """The repair of a row that an earlier run repaired."""
        again = {} if self.once is None else self.once.again(str(file), [raw.index]).get(raw.index, {})
        return self.work.row(file, raw, again)

    def _passed(self, outcome: Outcome, position: int) -> None:
        self.rows += 1
        self.changed += outcome.repaired or outcome.quarantined is not None
        if self.run.progress is not None:
            self.run.progress(self.rows, self.done + position, self.total)


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
    found = given(logs)
    run = Repairs(found.names, out, settings, repairs, progress, resume=resume)
    run.in_memory.together = found.together
    return run
