"""One pass over logs: batches of rows go to an executor as tasks; answers come back in the order of the rows.

A scan sends chunks, which its processes read; a repair sends rows, since it writes their text again.
"""

from __future__ import annotations

import copyreg
import gc
import pickle
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import count, repeat
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from tito_audit.errors import SetupError
from tito_audit.formats import MatchedKeys
from tito_audit.record.finding import Finding, FoldedFindings, Hit, Result, Side, Skip
from tito_audit.record.outcome import Outcome
from tito_audit.record.rollout import Place, Rollout
from tito_audit.record.stated import Stated
from tito_audit.record.testimony import Witness
from tito_audit.record.trainings import Trainings
from tito_audit.run.encoders import EncodersUsed
from tito_audit.run.log_findings import TrainedOverlaps
from tito_audit.run.log_groups import GarbageCollector, RowFlow
from tito_audit.run.progress import Progress, RowCounts
from tito_audit.run.resume import FinishedRow, Recorder, replay_rows
from tito_audit.run.workers import Executor, map_in_order, picklable_error
from tito_audit.settings.model import RepairSettings, Settings
from tito_audit.storage import Log, RawRow
from tito_audit.storage.chunks import Chunk, ChunkReader
from tito_audit.storage.journal import JournaledLog
from tito_audit.storage.log import damage_row
from tito_audit.storage.row import parse_row
from tito_audit.storage.streams import ParseRow
from tito_audit.summary import Summary
from tito_audit.viewer.model import ViewQuota, observed_of

if TYPE_CHECKING:
    from tito_audit.run.row_repair import Again, RepairedRow, RowRepair


def chunk_bytes(total: int, jobs: int) -> int:
    """The size of the chunks of logs of `total` bytes."""
    # Several chunks a process, so that none waits long for the last one.
    return min(max(total // (jobs * 8), 1 << 18), 8 << 20)


@contextmanager
def open_engine(settings: Settings) -> Iterator[Executor | None]:
    """The executor of `Settings.engine` for the block; None for the processes of this machine."""
    if settings.engine == "local":
        if settings.address is not None:
            raise SetupError(f"--address {settings.address}: this is for --engine ray; pass that too.")
        yield None
        return
    from tito_audit.run.ray_tasks import ray_tasks  # Ray takes seconds to import

    with ray_tasks(settings.address, settings.jobs) as executor:
        yield executor


def strip_rollout(result: Result) -> Result:
    """The result with only place, format and notice of its rollout, cheap to pickle and to keep."""
    rollout = result.rollout
    if rollout is None:
        return result
    stated = Stated(notice=rollout.stated.notice)
    return replace(result, rollout=Rollout(rollout.place, rollout.format, stated=stated))


_SENT_TYPES: tuple[type[Any], ...]
_SENT_TYPES = (Finding, FoldedFindings, Hit, Place, Result, Rollout, Side, Skip, Stated, Trainings, Witness)
_ARGUMENTS = {kind: attrgetter(*[each.name for each in fields(kind)]) for kind in _SENT_TYPES}
"""By class: the field values as arguments of its constructor, which pickle several times as fast as a frozen
dataclass does by default."""
_RESULT_FIELDS = attrgetter(*[each.name for each in fields(Result)[3:]])
_FINDING_FIELDS = attrgetter(*[each.name for each in fields(Finding)[3:]])
"""The fields of a finding after its severity, and of a result after its findings."""
for _kind in _SENT_TYPES:
    copyreg.pickle(_kind, lambda sent: (type(sent), _ARGUMENTS[type(sent)](sent)))


@dataclass(frozen=True, slots=True)
class LogStart:
    """A step to the next log; its batches follow."""

    file: Path
    log: Log | None = None
    """The open log, if its rows are written again."""
    recorded: JournaledLog | None = None
    """What an earlier run recorded of the log; then no batches follow."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive rows of a log that are one task. `str()` names them in errors."""

    file: Path
    done: int
    """Bytes of the log up to the end of the batch."""
    rows: Sequence[RawRow] = ()
    """In a repair: the rows, which wait to be written."""
    number: int = 0
    """The number of the batch, over all logs."""

    def __str__(self) -> str:
        if not self.rows:
            return f"{self.file}, rows before byte {self.done:,}"
        return f"{self.file}, rows {self.rows[0].index} to {self.rows[-1].index}"


Step: TypeAlias = LogStart | Batch | None
"""A step through the logs; None: the end of a log."""
Steps: TypeAlias = Iterator[tuple[Step, Any]]
"""Steps, each batch with its task."""


def _steps_through_logs(
    flow: RowFlow, recorded: Mapping[Path, JournaledLog], steps_of: Callable[[Path], Steps]
) -> Steps:
    """The steps through all logs; logs that an earlier run `recorded` are not read."""
    for file in flow.files:
        if file in recorded:
            yield LogStart(file, recorded=recorded[file]), None
        else:
            yield from steps_of(file)
        yield None, None


# A scan.


_ScanTask: TypeAlias = tuple[int, Chunk, ViewQuota | None]
"""A task: its number, a chunk, and the views given away before it is handed out."""
_PackedResult: TypeAlias = tuple[int, tuple[str, str] | None, Sequence[tuple[Any, ...]], tuple[Any, ...]]
"""A result without its place: its item; format and notice of its rollout, if there is one; code, severity and all
behind the place of its findings, after a place of their own, if they have one; and all behind its findings."""


@dataclass(slots=True)
class _ChunkAnswer:
    """The answer of a process for one chunk."""

    rows: list[tuple[int, tuple[_PackedResult, ...]]] = field(default_factory=list)
    """The audited rows: number, counted from 0 at the start of the chunk, and results."""
    left_out: list[int] = field(default_factory=list)
    """With a sample: how many rows of the chunk were left out before each audited row, then in total."""
    last: int = -1
    """With a sample: the number of the last row of the chunk, left out or not; -1 if it has none."""
    views: dict[int, bytes] = field(default_factory=dict)
    """By the number of the result in the chunk: its view, compressed, since most views are dropped again."""
    size: int = 0
    tokens: int = 0
    damage: str | None = None
    encoders: EncodersUsed = ()
    error: BaseException | None = None

    def add(self, row: int, results: Iterable[Result], passed: int) -> int:
        """Add the results of the next row, after `passed` results; returns the new number of results."""
        packed_results: list[_PackedResult] = []
        for result in results:
            observed = observed_of(result)
            if observed is not None and observed.view is not None:
                packed = pickle.dumps(observed.view, pickle.HIGHEST_PROTOCOL)
                self.views[passed] = zlib.compress(packed, 1)
                result = replace(result, observed=replace(observed, view=None))
            place, rollout = result.place, result.rollout
            of_rollout = None if rollout is None else (rollout.format, rollout.stated.notice)
            findings = []
            for each in result.findings:
                own = None if each.place is place or each.place == place else each.place
                findings.append((own, each.code, each.severity, *_FINDING_FIELDS(each)))
            packed_results.append((place.item, of_rollout, findings, _RESULT_FIELDS(result)))
            self.tokens += result.counts.get("tokens", 0)
            passed += 1
        self.rows.append((row, tuple(packed_results)))
        return passed


@dataclass(frozen=True, slots=True)
class _AuditChunk:
    """The work of a process in a scan."""

    flow: RowFlow

    def __call__(self, task: _ScanTask) -> _ChunkAnswer:
        """Audit a chunk, up to the limit; a further row is added without results."""
        number, chunk, views = task
        answer, reading = _ChunkAnswer(), ChunkReader(chunk)
        try:
            self.flow.check_same_size(chunk.path)
            limit, detection, passed = self.flow.settings.limit, MatchedKeys(), 0
            viewed, counts = None if views is None else views.offer, self.flow.counts_of(number)
            for raw in reading:
                if limit is not None and len(answer.rows) == limit:
                    answer.rows.append((raw.index, ()))
                    break
                results = self.flow.audit_row(raw, Place(str(chunk.path), raw.index), detection, viewed)
                passed = answer.add(raw.index, results, passed)
                counts[0] += 1
                counts[1] = reading.bytes * (raw.index + 1) // max(reading.size, 1)
                counts[2] = answer.tokens
                if reading.sample is not None:
                    answer.left_out.append(reading.sample.left_out)
        except Exception as error:
            answer.error = picklable_error(error)
        if reading.sample is not None:
            answer.left_out.append(reading.sample.left_out)
            answer.last = reading.sample.last
        gc.collect(1)  # as GarbageCollector does
        answer.size, answer.damage, answer.encoders = reading.size, reading.damage, self.flow.encoders.used_here()
        return answer


@dataclass(slots=True)
class ChunkedScan:
    """A scan whose chunks are audited by an executor."""

    flow: RowFlow
    summary: Summary
    """Gets files and notices."""
    counted: RowCounts
    views: ViewQuota | None
    """None: no views are made."""
    recorder: Recorder | None
    """None without a journal."""
    _stopped: bool = False
    """Whether the limit was reached."""
    _left_out: int = 0
    """Rows that a sample left out after the last audited one."""
    _file: Path = field(default_factory=Path)
    _start: int = 0
    """The number of the first row of the next chunk."""
    _last: int = -1
    """The number of the last row."""
    _broken: bool = False
    """Whether the log is damaged, so that the rest of it is not read."""

    def results(self, executor: Executor, size: int, progress: Progress | None) -> Generator[Result, None, None]:
        """The results of all rows in order, their rollouts stripped.

        A chunk has about `size` bytes. StorageError, after the results before, if a log cannot be read.
        """
        flow, recorder, numbers = self.flow, self.recorder, count()

        def steps_of(file: Path) -> Steps:
            yield LogStart(file), None
            for chunk in flow.groups[str(file)].chunks(file, size):
                number, views = next(numbers), self.views.copy() if self.views is not None else None
                yield Batch(file, chunk.done, number=number), (number, chunk, views)

        total, done, log_size = flow.size, 0, 0
        if progress is not None:
            progress(0, 0, total)
        steps = _steps_through_logs(flow, {} if recorder is None else recorder.finished, steps_of)
        with closing(map_in_order(executor, _AuditChunk(flow), steps)) as answers:
            for step, answer in answers:
                if step is None:  # the file was read to its end
                    if recorder is not None:
                        recorder.finish(self._left_out)
                    self.counted.left_out += self._left_out
                    self._left_out = 0
                    done += log_size
                elif isinstance(step, LogStart):
                    log_size = step.file.stat().st_size if step.file.is_file() else 0
                    self.summary.files.append(str(step.file))
                    self._file, self._start, self._last, self._broken = step.file, 0, -1, False
                    if recorder is not None and step.recorded is None:
                        recorder.begin(step.file)
                    elif recorder is not None:
                        yield from self._replay_log(recorder, step.file)
                        total, log_size = total - log_size, 0
                elif answer is not None:
                    yield from self._chunk_results(answer)
                if self._stopped:
                    return
                if progress is not None and isinstance(step, Batch):
                    progress(self.counted.rows, done + step.done, total)
                if flow.task_counters is not None and isinstance(step, Batch):
                    flow.task_counters.forget(step.number)

    def _chunk_results(self, chunk: _ChunkAnswer) -> Iterator[Result]:
        """The results of a chunk, counted and recorded row by row, up to the limit."""
        if self._broken:
            return
        counted = passed = 0  # rows of the chunk that were left out and are counted already, and results
        file, views = str(self._file), self.views
        for (number, results), left_out in zip(chunk.rows, chunk.left_out or repeat(0), strict=False):
            self._left_out += left_out - counted
            counted, before_row = left_out, self._left_out
            if not self._count_row():
                return
            self._last = self._start + number
            row: list[Result] = []
            for item, of_rollout, of_row, rest in results:
                place, rollout = Place(file, self._last, item), None
                if of_rollout is not None:
                    rollout = Rollout(place, of_rollout[0], stated=Stated(notice=of_rollout[1]))
                findings = [Finding(code, severity, own or place, *more) for own, code, severity, *more in of_row]
                result = Result(place, rollout, tuple(findings), *rest)
                observed = observed_of(result)
                if observed is not None and views is not None and views.take(findings, self._last):
                    # From a worker of this run, which sends the view of every rollout that may get one.
                    view = pickle.loads(zlib.decompress(chunk.views[passed]))
                    result = replace(result, observed=replace(observed, view=view))
                row.append(result)
                passed += 1
            yield from self._record_row(row, before_row)
        self.flow.encoders.add(chunk.encoders, self.summary)
        if self.recorder is not None:
            self.recorder.add_encoders(chunk.encoders)
        if chunk.error is not None:
            raise chunk.error
        if chunk.left_out:
            self._left_out += chunk.left_out[-1] - counted
        if chunk.last >= 0:
            self._last = self._start + chunk.last
        if chunk.damage is not None:
            self._broken = True
            raw, before_row = damage_row(self._file, self._last, chunk.damage), self._left_out
            if self._count_row():
                self._last = raw.index
                place = Place(file, raw.index)
                lost = map(strip_rollout, self.flow.audit_row(raw, place, MatchedKeys(), None))
                yield from self._record_row(list(lost), before_row)
        self._start += chunk.size

    def _replay_log(self, recorder: Recorder, file: Path) -> Iterator[Result]:
        """The results of a log that an earlier run recorded."""
        for row in replay_rows(recorder, self.flow, file, self.views):
            self._left_out += row.left_out
            if not self._count_row():
                return
            yield from row.outcome.before
        log = recorder.finished_log(file)
        self._left_out += log.left_out
        for encoded in log.encoders:
            self.flow.encoders.add(encoded, self.summary)

    def _record_row(self, results: Sequence[Result], left_out: int) -> Sequence[Result]:
        """Record the results of the last row, before which a sample left out some rows, and return them."""
        if self.recorder is not None:
            row, place = tuple(results), Place(str(self._file), self._last)
            self.recorder.add(FinishedRow(Outcome(place, row, row), left_out))
        return results

    def _count_row(self) -> bool:
        """Count one more row; False if it is past the limit."""
        counts = self.counted
        self._stopped = counts.is_full(self.flow.settings.limit, self.summary)
        if self._stopped:
            return False
        counts.rows += 1
        counts.left_out += self._left_out
        self._left_out = 0
        return True


# A repair.


@dataclass(frozen=True, slots=True)
class RepairTask:
    """The rows of a batch as they are sent to a process."""

    file: Path
    rows: Sequence[RawRow]
    again: Mapping[int, Again]
    """By row: what it trains that another row of the run trains too."""
    number: int
    """The number of the batch."""


@dataclass(frozen=True, slots=True)
class RepairAnswer:
    """The answer for a batch."""

    rows: Sequence[RepairedRow]
    encoders: EncodersUsed


def repair_steps(
    flow: RowFlow,
    size: int | None,
    *,
    overlaps: TrainedOverlaps | None = None,
    keep_text: bool,
    recorded: Mapping[Path, JournaledLog] | None = None,
) -> Steps:
    """The rows of all logs in batches of about `size` bytes, reduced to what is sent; None: one by one."""
    numbers = count()

    def steps_of(file: Path) -> Steps:
        group = flow.groups[str(file)]
        log = group.open_for_rewrite(file) if keep_text or size is not None else group.open(file)
        yield LogStart(file, log), None
        for rows in _batch_rows(group.rows(log), size or 0):
            again = {} if overlaps is None else overlaps.trained_again(str(file), [raw.index for raw in rows])
            sent = waiting = rows
            if size is not None:
                # Only the text of a row if it has one, else only its value.
                sent = [
                    RawRow(raw.index, None, None, raw.text)
                    if raw.value is not None and raw.text is not None
                    else RawRow(raw.index, raw.value, raw.error, b"" if raw.accepts_new_keys else None)
                    for raw in rows
                ]
                waiting = [replace(raw, value=None) if raw.text is not None else raw for raw in rows]
            number = next(numbers)
            yield Batch(file, log.position, waiting, number), RepairTask(file, sent, again, number)

    return _steps_through_logs(flow, recorded or {}, steps_of)


@dataclass(slots=True)
class RepairBatch:
    """The work of a process in a repair."""

    flow: RowFlow
    repairs: RepairSettings
    writes: bool
    """Whether rows are written; if not, answers hold outcomes without rows."""
    strips_rollouts: bool
    """Whether rollouts of unchanged rows keep only their place and format."""
    _by_file: dict[str, RowRepair] = field(default_factory=dict)
    _garbage: GarbageCollector = field(default_factory=GarbageCollector)

    def __reduce__(self) -> tuple[Any, ...]:
        return RepairBatch, (self.flow, self.repairs, self.writes, self.strips_rollouts)

    def __call__(self, task: RepairTask) -> RepairAnswer:
        """Repair every row of a task."""
        self.flow.check_same_size(task.file)
        rows, counts = [], self.flow.counts_of(task.number)
        for raw in task.rows:
            rows.append(row := self.repair_row(task.file, raw, task.again.get(raw.index, {})))
            self._garbage.count_bytes(_row_bytes(raw))
            counts[0] += 1
            counts[2] += sum(result.counts.get("tokens", 0) for result in row.outcome.before)
        return RepairAnswer(rows, self.flow.encoders.used_here())

    def repair_row(self, file: Path, raw: RawRow, again: Again) -> RepairedRow:
        """Repair one row."""
        from tito_audit.run.row_repair import RepairedRow, RowRepair

        name = str(file)
        repair = self._by_file.get(name)
        if repair is None:
            group = self.flow.fitted_group(name)
            same = (other for other in self._by_file.values() if other.group is group)
            repair = self._by_file[name] = next(same, None) or RowRepair(group, self.repairs)
        repaired = repair.repair_row(with_value(raw, repair.parse), Place(name, raw.index), again)
        outcome = repaired.outcome
        if self.strips_rollouts and not outcome.repaired and outcome.quarantined is None:
            before = tuple(map(strip_rollout, outcome.before))
            after = before if outcome.after is outcome.before else tuple(map(strip_rollout, outcome.after))
            outcome = replace(outcome, before=before, after=after)
        return replace(repaired, outcome=outcome) if self.writes else RepairedRow(outcome)


def _batch_rows(rows: Iterable[RawRow], size: int) -> Iterator[list[RawRow]]:
    batch, bytes_ = list[RawRow](), 0
    for raw in rows:
        batch.append(raw)
        bytes_ += _row_bytes(raw)
        if bytes_ >= size:
            yield batch
            batch, bytes_ = [], 0
    if batch:
        yield batch


def _row_bytes(raw: RawRow) -> int:
    return len(raw.text) if raw.text is not None else _rough_bytes(raw.value)


def _rough_bytes(value: Any) -> int:
    """The size of a row's value in bytes, roughly."""
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, Mapping):
        return sum(map(_rough_bytes, value.values()))
    if isinstance(value, list | tuple) and value and not isinstance(value[0], int | float):
        return sum(map(_rough_bytes, value))
    return 8 * len(value) if isinstance(value, str | bytes | list | tuple) else 8


def with_value(raw: RawRow, parse: ParseRow = parse_row) -> RawRow:
    """The row with its value, parsed from its text if it was removed to send or keep the row."""
    if raw.value is None and raw.error is None:
        read = parse(raw.index, raw.text or b"")
        return replace(raw, value=read.value, has_arrays=read.has_arrays)
    return raw
