"""A scan in several processes: chunks of logs go out, results come back in the order of the rows."""

from __future__ import annotations

import gc
import pickle
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from tito_audit.errors import SetupError
from tito_audit.formats import Detection
from tito_audit.record.finding import Result, Skip
from tito_audit.record.outcome import Outcome
from tito_audit.record.rollout import Place, Rollout
from tito_audit.record.stated import Stated
from tito_audit.run.auditor import Viewed
from tito_audit.run.encoders import Encoded
from tito_audit.run.log_findings import Once
from tito_audit.run.log_groups import Garbage, RowFlow
from tito_audit.run.progress import Counted, Progress
from tito_audit.run.resume import FinishedLogs, KeptLog, KeptRow, Recorder, kept_log, kept_rows
from tito_audit.run.row_repair import Again, RepairedRow, RowRepair
from tito_audit.run.workers import Executor, mapped, sendable
from tito_audit.settings.model import RepairSettings, Settings
from tito_audit.storage import Log, RawRow
from tito_audit.storage.chunk import Chunk, Reading
from tito_audit.storage.journal import Finished
from tito_audit.storage.lines import ParseRow
from tito_audit.storage.log import lost_row
from tito_audit.storage.row import parse_row
from tito_audit.summary import Summary
from tito_audit.viewer.model import observed_of
from tito_audit.viewer.selection import ViewQuota

_LARGEST = 8 << 20
_SMALLEST = 1 << 18
_PER_PROCESS = 8
"""Chunks per process in small logs, so no process waits long for the last one."""


def chunk_bytes(total: int, jobs: int) -> int:
    """How large chunks of logs of `total` bytes should be."""
    return min(max(total // (jobs * _PER_PROCESS), _SMALLEST), _LARGEST)


@contextmanager
def engine_of(settings: Settings) -> Iterator[Executor | None]:
    """The executor of the engine that the settings name, for the block; None for the processes of this machine."""
    if settings.engine == "local":
        if settings.address is not None:
            raise SetupError(f"--address {settings.address}: this is for --engine ray; pass that too.")
        yield None
        return
    from tito_audit.run.ray_tasks import ray_tasks  # Ray takes seconds to import

    with ray_tasks(settings.address, settings.jobs) as executor:
        yield executor


def bare(result: Result) -> Result:
    """The result with only place, format and notice of its rollout, which is cheap to pickle."""
    if result.rollout is None:
        return result
    told = Stated(notice=result.rollout.stated.notice)
    return replace(result, rollout=Rollout(result.rollout.place, result.rollout.format, stated=told))


def audit_in_chunks(
    flow: RowFlow,
    executor: Executor,
    chunk: int,
    summary: Summary,
    counted: Counted,
    progress: Progress | None,
    *,
    observe: bool,
    finished: FinishedLogs | None = None,
) -> Generator[Result, None, None]:
    """The results of all rows, with bare rollouts, as one process would give them.

    A chunk has about `chunk` bytes. Files and notices go into the summary, and what other processes used into the
    flow's encoders. A log that cannot be read raises StorageError after the results before it. Logs that were
    `finished` before are not read; their results come from the journal, which gets those of the others.
    """
    views = ViewQuota() if observe else None
    merged = _Merged(flow, summary, counted, views, Recorder(finished) if finished is not None else None)
    total, done = flow.size, 0
    tasks = _planned(flow, chunk, views, finished.found if finished is not None else {})
    with closing(mapped(executor, _AuditChunk(flow), tasks)) as parts:
        for part, answer in parts:
            if isinstance(part, _Begun):
                done += merged.size
                merged.begin(part)
                if part.kept is not None and finished is not None:
                    yield from merged.replayed(kept_rows(finished.journal, part.kept, flow, part.file, views))
                    if merged.stopped:
                        return
                    merged.settle(kept_log(finished.journal, part.kept, part.file))
                continue
            if answer is not None:
                yield from merged.results(answer)
            if merged.stopped:
                return
            if progress is not None:
                progress(counted.rows, done + part.done, total)
        merged.end()


@dataclass(frozen=True, slots=True)
class _Begun:
    """The chunks that follow are those of this file."""

    file: Path
    size: int
    kept: Finished | None = None
    """What an earlier run recorded of the file; no chunks follow."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A chunk in the order of the results; as text, where it is."""

    file: Path
    done: int

    def __str__(self) -> str:
        return f"{self.file}, rows before byte {self.done:,}"


_Task: TypeAlias = tuple[Chunk, ViewQuota | None]
"""A chunk, and the rollouts viewed before it, as far as known when it is handed out."""


def _planned(
    flow: RowFlow, size: int, views: ViewQuota | None, kept: Mapping[Path, Finished]
) -> Iterator[tuple[_Begun | _Part, _Task | None]]:
    """The chunks of all files, except those that are kept."""
    for file in flow.files:
        yield _Begun(file, file.stat().st_size if file.is_file() else 0, kept.get(file)), None
        if file in kept:
            continue
        for chunk in flow.groups[str(file)].chunks(file, size):
            yield _Part(file, chunk.done), (chunk, views.copy() if views is not None else None)


@dataclass(slots=True)
class _Audited:
    """The answer of a process for one chunk."""

    rows: list[tuple[int, tuple[Result, ...]]] = field(default_factory=list)
    """The rows and their results, numbered from 0 at the start of the chunk."""
    left_out: list[int] = field(default_factory=list)
    """With a sample: how many rows of the chunk were left out before each row, then in total."""
    last: int = -1
    """With a sample: the number of the last row of the chunk, left out or not; -1 if it has none."""
    views: dict[int, bytes] = field(default_factory=dict)
    """Views by the number of the result in the chunk; compressed, since most are dropped and chunks wait in
    line."""
    size: int = 0
    damage: str | None = None
    encoders: Encoded = ()
    error: BaseException | None = None

    def add(self, row: int, results: Iterable[Result], passed: int) -> int:
        """Add the results of the next row, after `passed` skipped rows; returns how many there are now."""
        kept = []
        for result in results:
            observed = observed_of(result)
            if observed is not None and observed.view is not None:
                packed = pickle.dumps(observed.view, pickle.HIGHEST_PROTOCOL)
                self.views[passed] = zlib.compress(packed, 1)
                result = replace(result, observed=replace(observed, view=None))
            kept.append(result)
            passed += 1
        self.rows.append((row, tuple(kept)))
        return passed


@dataclass(frozen=True, slots=True)
class _AuditChunk:
    """The work of a process."""

    flow: RowFlow

    def __call__(self, task: _Task) -> _Audited:
        """The results of the chunk; for rows past the limit, only that there is one."""
        chunk, views = task
        found, reading = _Audited(), Reading(chunk)
        try:
            self.flow.check_seen(chunk.path)
            self._audit(chunk, reading, views.offer if views is not None else None, found)
        except Exception as error:
            found.error = sendable(error)
        if reading.sample is not None:
            found.left_out.append(reading.sample.left_out)
            found.last = reading.sample.last
        gc.collect(1)  # as Garbage does
        found.size, found.damage, found.encoders = reading.size, reading.damage, self.flow.encoders.here()
        return found

    def _audit(self, chunk: Chunk, reading: Reading, viewed: Viewed | None, found: _Audited) -> None:
        limit, detection, passed = self.flow.settings.limit, Detection(), 0
        skips: dict[tuple[Skip, ...], tuple[Skip, ...]] = {}
        for raw in reading:
            if limit is not None and len(found.rows) == limit:
                found.rows.append((raw.index, ()))
                return
            place = Place(str(chunk.path), raw.index)
            results = map(bare, self.flow.audit(raw, place, detection, viewed))
            # Most rollouts skip the same rules: one tuple shared by all is pickled once.
            shared = (replace(one, skips=skips.setdefault(one.skips, one.skips)) for one in results)
            passed = found.add(raw.index, shared, passed)
            if reading.sample is not None:
                found.left_out.append(reading.sample.left_out)


class _Merged:
    """The rows of the chunks, counted through each file."""

    def __init__(
        self,
        flow: RowFlow,
        summary: Summary,
        counted: Counted,
        views: ViewQuota | None,
        recorder: Recorder | None = None,
    ) -> None:
        self.size = 0
        """Bytes of the current file."""
        self.stopped = False
        """Whether the limit was reached."""
        self._flow = flow
        self._summary = summary
        self._counts = counted
        self._views = views
        self._recorder = recorder
        self._left_out = 0
        """Rows that a sample left out after the last audited one."""
        self._file = Path()
        self._start = 0
        """The row at which the next chunk starts."""
        self._last = -1
        self._broken = False

    def begin(self, begun: _Begun) -> None:
        """Start on another file."""
        self.end()
        self._summary.files.append(str(begun.file))
        self.size = begun.size
        self._file, self._start, self._last, self._broken = begun.file, 0, -1, False
        if self._recorder is not None and begun.kept is None:
            self._recorder.begin(begun.file)

    def end(self) -> None:
        """Record that the file was read to its end."""
        if self._recorder is not None:
            self._recorder.finish(self._left_out)
        self._counts.left_out += self._left_out
        self._left_out = 0

    def results(self, chunk: _Audited) -> Iterator[Result]:
        """The results of the next chunk of the file."""
        if self._broken:
            return
        before = passed = 0
        left_out = chunk.left_out or repeat(0)
        for (number, results), now in zip(chunk.rows, left_out, strict=False):
            self._left_out += now - before
            before, left = now, self._left_out
            if not self._count_row():
                return
            self._last = self._start + number
            row = []
            for result in results:
                row.append(_moved(self._with_view(result, chunk.views.get(passed)), self._start))
                passed += 1
            yield from self._recorded(left, row)
        self._flow.encoders.add(chunk.encoders, self._summary)
        if self._recorder is not None:
            self._recorder.encoders(chunk.encoders)
        if chunk.error is not None:
            raise chunk.error
        if chunk.left_out:
            self._left_out += chunk.left_out[-1] - before
        if chunk.last >= 0:
            self._last = self._start + chunk.last
        if chunk.damage is not None:
            self._broken = True
            raw, left = lost_row(self._file, self._last, chunk.damage), self._left_out
            if self._count_row():
                place = Place(str(self._file), raw.index)
                row = list(map(bare, self._flow.audit(raw, place, Detection(), None)))
                yield from self._recorded(left, row)
        self._start += chunk.size

    def replayed(self, rows: Iterable[KeptRow]) -> Iterator[Result]:
        """The results of the rows of a kept file."""
        for left, results in rows:
            self._left_out += left
            if not self._count_row():
                return
            yield from results

    def settle(self, log: KeptLog) -> None:
        """Take what else was recorded of a kept file: how many rows were left out at its end, what encoded it."""
        self._left_out += log.left_out
        for encoded in log.encoders:
            self._flow.encoders.add(encoded, self._summary)

    def _recorded(self, left: int, row: Sequence[Result]) -> Sequence[Result]:
        """The results of one row, once they are recorded; `left` rows before it were left out."""
        if self._recorder is not None:
            self._recorder.add(left, row)
        return row

    def _count_row(self) -> bool:
        """Count one more row; False when it is past the limit."""
        counts = self._counts
        self.stopped = counts.full(self._flow.settings.limit, self._summary)
        if self.stopped:
            return False
        counts.rows += 1
        counts.left_out += self._left_out
        self._left_out = 0
        return True

    def _with_view(self, result: Result, packed: bytes | None) -> Result:
        """The result with its view, if it gets one."""
        observed = observed_of(result)
        if self._views is None or observed is None or not self._views.take(result.findings):
            return result
        assert packed is not None, "workers send the view of every rollout that may get one"
        view = pickle.loads(zlib.decompress(packed))  # from a worker of this run, never from a file
        return replace(result, observed=replace(observed, view=view))


def _moved(result: Result, rows: int) -> Result:
    """The result with its row number raised by `rows`."""
    if not rows:
        return result
    place = replace(result.place, row=result.place.row + rows)
    findings = tuple(replace(finding, place=place) for finding in result.findings)
    rollout = replace(result.rollout, place=place) if result.rollout is not None else None
    return replace(result, place=place, rollout=rollout, findings=findings)


@dataclass(frozen=True, slots=True)
class Started:
    """The batches that follow are those of this log."""

    file: Path
    log: Log


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive rows of a log waiting to be written; as text, where they are."""

    file: Path
    rows: Sequence[RawRow]
    position: int
    """Bytes of the log read by then."""

    def __str__(self) -> str:
        return f"{self.file}, rows {self.rows[0].index} to {self.rows[-1].index}"


@dataclass(frozen=True, slots=True)
class Kept:
    """A log that is not repaired again; no batches follow."""

    file: Path
    recorded: Finished
    """What an earlier run recorded of it."""


Part: TypeAlias = Started | Batch | Kept | None
"""A step through the logs; None: the log has no more rows."""


@dataclass(frozen=True, slots=True)
class Task:
    """The rows of a batch as they are sent out."""

    file: Path
    rows: Sequence[RawRow]
    again: Mapping[int, Again]
    """What the run trains more than once, by row."""


@dataclass(frozen=True, slots=True)
class Repaired:
    """The answer for a batch."""

    rows: Sequence[RepairedRow]
    encoders: Encoded


def planned(
    flow: RowFlow,
    size: int | None,
    *,
    once: Once | None = None,
    keep_text: bool,
    kept: Mapping[Path, Finished] | None = None,
) -> Iterator[tuple[Part, Task | None]]:
    """The rows of all logs in batches of about `size` bytes, packed to be sent; None: one by one, as read.

    Logs that are `kept` are not read.
    """
    for file in flow.files:
        if kept is not None and file in kept:
            yield Kept(file, kept[file]), None
            continue
        group = flow.groups[str(file)]
        log = group.open_kept(file) if keep_text or size is not None else group.open(file)
        yield Started(file, log), None
        for rows in _batches(group.rows(log), size or 0):
            again = {} if once is None else once.again(str(file), [raw.index for raw in rows])
            task = Task(file, rows if size is None else [_packed(raw) for raw in rows], again)
            waiting = rows if size is None else [_without_value(raw) for raw in rows]
            yield Batch(file, waiting, log.position), task
        yield None, None


@dataclass(slots=True)
class RepairBatch:
    """The work: repairs batches of rows."""

    flow: RowFlow
    repairs: RepairSettings
    writes: bool
    """Whether rows are written; if not, answers hold only outcomes."""
    bare: bool
    """Whether rollouts of unchanged rows keep only their place and format."""
    _by_group: dict[str, RowRepair] = field(default_factory=dict)
    _garbage: Garbage = field(default_factory=Garbage)

    def __reduce__(self) -> tuple[Any, ...]:
        return RepairBatch, (self.flow, self.repairs, self.writes, self.bare)

    def __call__(self, task: Task) -> Repaired:
        """Every row of the task, repaired."""
        self.flow.check_seen(task.file)
        rows = []
        for raw in task.rows:
            rows.append(self.row(task.file, raw, task.again.get(raw.index, {})))
            self._garbage.passed(_size(raw))
        return Repaired(rows, self.flow.encoders.here())

    def row(self, file: Path, raw: RawRow, again: Again) -> RepairedRow:
        """One row, repaired."""
        repair = self._repair(str(file))
        repaired = repair.repaired(unpacked(raw, repair.parse), Place(str(file), raw.index), again)
        outcome = _bare(repaired.outcome) if self.bare else repaired.outcome
        return replace(repaired, outcome=outcome) if self.writes else RepairedRow(outcome)

    def _repair(self, file: str) -> RowRepair:
        if file not in self._by_group:
            group = self.flow.group(file)
            same = (one for one in self._by_group.values() if one.group is group)
            self._by_group[file] = next(same, None) or RowRepair(group, self.repairs)
        return self._by_group[file]


def _bare(outcome: Outcome) -> Outcome:
    """The outcome with bare rollouts if the row did not change."""
    if outcome.repaired or outcome.quarantined is not None:
        return outcome
    before = tuple(map(bare, outcome.before))
    after = before if outcome.after is outcome.before else tuple(map(bare, outcome.after))
    return replace(outcome, before=before, after=after)


def _batches(rows: Any, size: int) -> Iterator[list[RawRow]]:
    held, bytes_ = [], 0
    for raw in rows:
        held.append(raw)
        bytes_ += _size(raw)
        if bytes_ >= size:
            yield held
            held, bytes_ = [], 0
    if held:
        yield held


def _size(raw: RawRow) -> int:
    return len(raw.text) if raw.text is not None else _weight(raw.value)


def _weight(value: Any) -> int:
    """The rough size of a value in bytes."""
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, Mapping):
        return sum(map(_weight, value.values()))
    if isinstance(value, list | tuple) and value and not isinstance(value[0], int | float):
        return sum(map(_weight, value))
    return 8 * len(value) if isinstance(value, str | bytes | list | tuple) else 8


def _packed(raw: RawRow) -> RawRow:
    """A row as sent out: its text if it has one, else its value, without the surrounding file."""
    if raw.value is not None and raw.text is not None:
        return RawRow(raw.index, None, None, raw.text)
    return RawRow(raw.index, raw.value, raw.error, b"" if raw.of_text else None)


def _without_value(raw: RawRow) -> RawRow:
    """A row as it waits to be written: without its value if the text holds the same."""
    return replace(raw, value=None) if raw.value is not None and raw.text is not None else raw


def unpacked(raw: RawRow, parse: ParseRow = parse_row) -> RawRow:
    """The row with the value that packing or waiting removed."""
    if raw.value is None and raw.error is None:
        read = parse(raw.index, raw.text or b"")
        return replace(raw, value=read.value, spliced=read.spliced)
    return raw
