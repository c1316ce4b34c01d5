"""Read, check, repair, write, check again: the flow from logs to repaired logs."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from tito_audit.chains.ledger import Ledger
from tito_audit.errors import SetupError
from tito_audit.record.finding import Finding, Result
from tito_audit.record.outcome import COLUMN, Outcome
from tito_audit.record.testimony import Testimony
from tito_audit.record.trainings import ONCE
from tito_audit.run.auditor import selected_codes
from tito_audit.run.closing_scan import closing_scan, count_trained_again
from tito_audit.run.executor import Executor, InProcess, engine_of, executor_for, is_small, mapped
from tito_audit.run.log_findings import count_logs, note_witness
from tito_audit.run.log_groups import RowFlow
from tito_audit.run.once import Once
from tito_audit.run.parallel import chunk_bytes
from tito_audit.run.progress import Progress
from tito_audit.run.repair_in_memory import InMemory, repaired_rows
from tito_audit.run.repair_output import Writes, opened_quarantine, targets_of, write_row
from tito_audit.run.repair_tasks import Batch, Kept, Part, RepairBatch, Repaired, Started, planned
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
from tito_audit.run.scan import conclude, once_of
from tito_audit.settings.model import RepairSettings, Settings
from tito_audit.storage import (
    Log,
    Logs,
    Name,
    Output,
    Quarantine,
    RawRow,
    RowsInMemory,
    find_logs,
    make_folder,
    open_output,
    output_path,
    passed_logs,
    write_dataset_metadata,
)
from tito_audit.storage.journal import Journal
from tito_audit.storage.output import Changes
from tito_audit.storage.watch import Watch
from tito_audit.summary import Summary
from tito_audit.tables import ShownRepairs
from tito_audit.tokens.vocab import Vocabulary

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
    found = passed_logs(logs)
    run = Repairs(found.names, out, settings, repairs, progress, resume=resume)
    run.in_memory.together = found.together
    return run
