"""Resume: which logs an earlier run finished, whether its results still hold, and what they are.

A journal holds outcomes as JSON, which msgspec converts by the types of their fields, in compressed parts: most
results repeat the skips of the one before.
"""

from __future__ import annotations

import hashlib
import json
import sys
import zlib
from base64 import b64decode, b64encode
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from tito_audit.errors import SetupError
from tito_audit.formats import MatchedKeys
from tito_audit.record.finding import Finding, Result
from tito_audit.record.outcome import Outcome
from tito_audit.record.rollout import Place, Rollout
from tito_audit.record.stated import Stated
from tito_audit.run.encoders import EncodersUsed
from tito_audit.run.log_findings import TrainedOverlaps
from tito_audit.run.log_groups import RowFlow
from tito_audit.run.rows import LogGroup
from tito_audit.settings.model import RepairSettings, Settings
from tito_audit.storage import Log, RawRow, RowsInMemory, find_logs
from tito_audit.storage.journal import Journal, JournaledLog
from tito_audit.terminal.words import listed, many
from tito_audit.tokens.load import hash_tokenizer
from tito_audit.version import VERSION
from tito_audit.viewer.model import Measures, Observed, View, ViewQuota, observed_of

State = list[Any]
"""What shows that a file is unchanged: size, modification time and, of a remote file, its version."""
States = Mapping[Path, State | None]
"""By log: its state before the run; None for a pipe."""

SCAN, REPAIR = "scan", "repair"
"""What was done to a log."""
_NOT_DECIDING = {"jobs", "engine", "address", "limit", "overrides"}
"""Settings that do not change the results of a log read to its end."""
_MOST_ROWS = 1 << 31
"""No log has as many rows."""


def file_state(path: Path) -> State | None:
    """The state of a file; None for a pipe, which cannot be read again."""
    if not path.is_file():
        return None
    about = path.stat()
    return [about.st_size, about.st_mtime_ns, getattr(about, "etag", None)]


def log_states(files: Sequence[Path]) -> States:
    """The state of each log; SetupError for rows in memory, which another run cannot recognize."""
    rows = next((file for file in files if isinstance(file, RowsInMemory)), None)
    if rows is not None:
        raise SetupError(f"resume: {rows} are rows in memory, and only files can be resumed.\nLeave out `resume`.")
    return {file: file_state(file) for file in files}


def hash_states(states: States) -> str:
    """A hash of all logs of a run."""
    return _hash([(str(file), state) for file, state in states.items()])


def _sorted_items(value: object) -> object:
    """The sorted items of a mapping, whose `repr` is the same for equal mappings; any other value unchanged."""
    return sorted(value.items()) if isinstance(value, Mapping) else value


def _hash(value: object) -> str:
    return hashlib.sha256(repr(value).encode("utf-8", "surrogatepass")).hexdigest()[:32]


@cache
def _code_hash() -> str:
    """A hash of this package's code and of the versions of the libraries that results depend on."""
    from importlib.metadata import PackageNotFoundError, version

    code = hashlib.sha256(f"{VERSION} {sys.version}".encode())
    for name in ("tokenizers", "fastokens", "jinja2", "numpy", "orjson", "pyarrow"):
        with suppress(PackageNotFoundError):
            code.update(f"{name} {version(name)}\n".encode())
    folder = Path(__file__).parents[1]
    for file in sorted((*folder.rglob("*.py"), *folder.rglob("*.json"), *folder.rglob("*.toml"))):
        code.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return code.hexdigest()


Kind = TypeVar("Kind")


@dataclass(frozen=True, slots=True)
class FinishedRow:
    """A finished row."""

    outcome: Outcome
    """What became of it; a scan is a repair that changes nothing."""
    left_out: int = 0
    """How many rows a sample left out before this one."""
    moved: tuple[bytes, ...] = ()
    """Its lines in the quarantine."""


class ChangedRows(TypedDict):
    """Rows of a log that were changed alike, as in the JSON report of a repair."""

    columns: list[str]
    into: int
    rows: list[list[int]]


@dataclass(frozen=True, slots=True)
class FinishedLog:
    """What is recorded of a finished log besides its rows."""

    encoders: tuple[EncodersUsed, ...]
    left_out: int = 0
    """How many rows a sample left out after the last one."""
    about_log: tuple[Finding, ...] = ()
    """The findings about the log as a whole."""
    changed: tuple[ChangedRows, ...] = ()
    notices: tuple[str, ...] = ()
    """Notices about how the repaired log was written."""


@dataclass(frozen=True, slots=True)
class _StoredResult:
    """A result as it is stored: without view, and of its rollout only format and notice."""

    result: Result
    rollout: tuple[str, str] | None
    measures: tuple[bytes, bytes, dict[str, tuple[int, int]]] | None

    @classmethod
    def store(cls, result: Result) -> _StoredResult:
        rollout, observed = result.rollout, observed_of(result)
        return cls(
            replace(result, rollout=None, observed=None),
            None if rollout is None else (rollout.format, rollout.stated.notice),
            None if observed is None else observed.measures.packed(),
        )

    def restore(self, file: Path) -> Result:
        """The result; ValueError if it is of another file or an impossible place."""
        result, rollout = self.result, None
        if result.place.file != str(file):
            raise ValueError(f"a result of another file than {file}")
        _check_places(result.place, *(finding.place for finding in (*result.findings, *result.told)))
        for _, row in () if result.trainings is None else result.trainings.calls_at:
            _check_places(Place(str(file), row))
        if self.rollout is not None:
            rollout = Rollout(result.place, self.rollout[0], stated=Stated(notice=self.rollout[1]))
        observed = None if self.measures is None else Observed(Measures.unpacked(*self.measures))
        return replace(result, rollout=rollout, observed=observed)


@dataclass(frozen=True, slots=True)
class _StoredRow:
    """A finished row as it is stored."""

    row: FinishedRow
    before: tuple[_StoredResult, ...]
    after: tuple[_StoredResult, ...] | None
    """None: the same as `before`."""

    @classmethod
    def store(cls, row: FinishedRow) -> _StoredRow:
        outcome = row.outcome
        before = tuple(map(_StoredResult.store, outcome.before))
        after = None if outcome.after is outcome.before else tuple(map(_StoredResult.store, outcome.after))
        return cls(replace(row, outcome=replace(outcome, before=(), after=())), before, after)

    def restore(self, file: Path) -> FinishedRow:
        """The row; ValueError if it is of another file or an impossible place."""
        outcome = self.row.outcome
        if outcome.place.file != str(file):
            raise ValueError(f"a row of another file than {file}")
        _check_places(outcome.place)
        before = tuple(result.restore(file) for result in self.before)
        after = before if self.after is None else tuple(result.restore(file) for result in self.after)
        return replace(self.row, outcome=replace(outcome, before=before, after=after))


def _check_places(*places: Place) -> None:
    """Raise ValueError for a place that no log has."""
    for place in places:
        if not (0 <= place.row < _MOST_ROWS and 0 <= place.item < _MOST_ROWS):
            raise ValueError(f"{place} is no place in a log")


_MOST_UNPACKED = 1 << 28
"""The most bytes that a part of a journal may unpack to: a forged one could fill the memory."""


def pack(value: object) -> str:
    """A value of dataclasses, packed as text for a journal."""
    import msgspec  # only runs with a journal need it

    # Not msgspec's JSON: it has no lone surrogates, infinities and NaN, which logs have.
    plain = msgspec.to_builtins(value, enc_hook=lambda scalar: scalar.item())
    text = json.dumps(plain, separators=(",", ":"))
    return b64encode(zlib.compress(text.encode("ascii"), 1)).decode()


def unpack(text: str, kind: type[Kind]) -> Kind:
    """The value of this type that was packed; ValueError if the text holds something else."""
    import msgspec

    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(b64decode(text, validate=True), _MOST_UNPACKED)
        if unpacker.unconsumed_tail or not unpacker.eof:
            raise zlib.error(f"it is cut, or holds more than {_MOST_UNPACKED >> 20:,} MiB")
        return msgspec.convert(json.loads(data), kind)
    except (msgspec.MsgspecError, zlib.error) as error:
        raise ValueError(str(error)) from error


class Recorder:
    """Records the finished rows of each log, and reads those that an earlier run recorded.

    `kind` is SCAN or REPAIR. `more` is what results depend on besides settings, by name. `targets` are the files
    that a repair writes, by log. Results of an earlier run with other settings are not used.
    """

    def __init__(
        self,
        journal: Journal,
        kind: str,
        flow: RowFlow,
        states: States,
        more: Mapping[str, object],
        targets: Mapping[Path, Path] | None = None,
    ) -> None:
        self.journal = journal
        self._kind = kind
        self._flow = flow
        self._states = states
        self._all_logs = hash_states(states)
        self._more = more
        self._targets = targets or {}
        self._by_group: dict[int, Mapping[str, str]] = {}
        self._differs: dict[str, None] = {}
        self._unused = 0
        self.finished: dict[Path, JournaledLog] = {}
        """The logs that an earlier run finished; of a repair, those whose written files are unchanged."""
        for file in flow.files:
            log, state = journal.find_finished(kind, str(file)), states.get(file)
            if log is None or state is None or log.state != state:
                continue
            decided = self._deciding_hashes(file)
            differs = [name for name in {**decided, **log.decided} if decided.get(name) != log.decided.get(name)]
            self._differs |= dict.fromkeys(differs)
            if differs:
                self._unused += 1
            else:
                self.finished[file] = log
        if targets is not None:
            logs = {}
            for file, log in self.finished.items():
                target, was = targets.get(file), log.more.get("target")
                if (target is None and was is None) or (
                    target is not None and str(target) == was and self.journal.is_output_of(target, log)
                ):
                    logs[file] = log
            joins = {file: join for file in flow.files if (join := flow.groups[str(file)].join) is not None}
            joined = {file: id(join) for file, join in joins.items() if join.joins_logs(file)}
            broken = {join for file, join in joined.items() if file not in logs}
            self.finished = {file: log for file, log in logs.items() if joined.get(file) not in broken}
        self._file: Path | None = None
        self._about_log: tuple[Finding, ...] = ()
        self._encoders: dict[EncodersUsed, None] = {}
        self._rows: list[_StoredRow] = []
        self._results = 0

    def notices(self) -> Iterator[str]:
        """For the summary: how many finished logs cannot be used because of other settings, and of which."""
        if self._unused:
            yield (
                f"{self.journal.path}: {many(self._unused, 'log')} had been finished by a run with "
                f"{listed([f'other {name}' for name in self._differs])}; this run did not use that."
            )

    def begin(self, file: Path, about_log: Sequence[Finding] = ()) -> None:
        """Start a log, with the findings about it as a whole."""
        self._file, self._about_log, self._encoders = file, tuple(about_log), {}
        self.journal.begin_log()

    def add(self, row: FinishedRow) -> None:
        """Record the next row."""
        self._rows.append(_StoredRow.store(row))
        self._results += len(row.outcome.before) + 1
        if self._results >= 256:
            self._write()

    def add_encoders(self, encoded: EncodersUsed) -> None:
        """Record which encoders a process used for the log."""
        self._encoders[encoded] = None

    def finish(
        self, left_out: int = 0, changed: Iterable[Mapping[str, Any]] = (), notices: Iterable[str] = ()
    ) -> None:
        """Record that the log is finished; a repaired log's file is complete and gets its name after this call."""
        file, self._file = self._file, None
        if file is None:
            return
        self._write()
        state, target = self._states.get(file), self._targets.get(file)
        rows: Any = tuple(changed)
        if state is None or state != file_state(file):  # it changed since the run began
            return
        log = FinishedLog(tuple(self._encoders), left_out, self._about_log, rows, tuple(notices))
        target_name = None if target is None else str(target)
        self.journal.finish_log(
            self._kind, str(file), state, self._deciding_hashes(file), target=target_name, kept=pack(log)
        )

    def finished_log(self, file: Path) -> FinishedLog:
        """What was recorded of a finished log besides its rows; the journal's error if that is damaged."""
        with self.journal.checking_records(self.finished[file]):
            log = unpack(self.finished[file].more["kept"], FinishedLog)
            for finding in log.about_log:
                _check_places(finding.place)
                if finding.place.file != str(file):
                    raise ValueError(f"a finding of another file than {file}")
        return log

    def finished_rows(self, file: Path) -> Iterator[FinishedRow]:
        """The rows of a finished log, in order."""
        for part in self.journal.read_parts(self.finished[file]):
            with self.journal.checking_records(self.finished[file]):
                rows = [row.restore(file) for row in unpack(part, list[_StoredRow])]
            yield from rows

    def _write(self) -> None:
        if self._rows:
            self.journal.add_part(pack(self._rows))
        self._rows, self._results = [], 0

    def _deciding_hashes(self, file: Path) -> Mapping[str, str]:
        """By name: a hash of each thing that the results of a log depend on."""
        group = self._flow.groups[str(file)]
        if id(group) not in self._by_group:
            settings, auditor = group.settings, group.auditor
            # Which findings fail a scan is decided after the audit.
            excluded = _NOT_DECIDING | ({"fail_on"} if self._kind == SCAN else set())
            names = [field.name for field in fields(Settings) if field.name not in excluded]
            deciding: dict[str, object] = {
                "code": _code_hash(),
                "settings": [(name, _sorted_items(getattr(settings, name))) for name in names],
            }
            if auditor.tokenizer is not None:
                deciding["tokenizer files"] = hash_tokenizer(auditor.tokenizer)
            if auditor.renderer is not None:
                sources = {name: template.source for name, template in auditor.renderer.templates.items()}
                deciding["chat template"] = _sorted_items(sources)
                if settings.clock is None and any("strftime_now" in source for source in sources.values()):
                    deciding["date (--clock sets it)"] = date.today().isoformat()
            beside = [name for name in (settings.messages, settings.tools_file) if name is not None]
            if beside and group.join is not None:
                files = [(str(path), file_state(path)) for name in beside for path in find_logs([name])]
                deciding["joined files"] = files, group.join.key_columns()
            deciding |= self._more
            self._by_group[id(group)] = {name: _hash(value) for name, value in deciding.items()}
        decided = self._by_group[id(group)]
        if group.join is None or not group.join.joins_logs(file):
            return decided
        # The limit too: only so many rows are searched for the calls of a conversation.
        return {**decided, "logs": self._all_logs + str(group.settings.limit)}


def repair_recorder(
    journal: Journal,
    flow: RowFlow,
    states: States,
    repairs: RepairSettings,
    targets: Mapping[Path, Path],
    overlaps: TrainedOverlaps | None,
) -> Recorder:
    """The recorder of a repair."""
    names = (field.name for field in fields(repairs) if field.name not in ("force", "quarantine", "choices"))
    deciding = [
        *((name, getattr(repairs, name)) for name in names),
        repairs.quarantine is not None,
        repairs.choices,
    ]
    more: dict[str, object] = {"repairs": deciding}
    if overlaps is not None:
        more["logs"] = hash_states(states)
    return Recorder(journal, REPAIR, flow, states, more, targets)


def reread_rows(group: LogGroup, log: Log, numbers: Collection[int]) -> Iterator[RawRow]:
    """Read some rows of a finished log again, to show what is not recorded of them."""
    left = set(numbers)
    for raw in group.rows(log) if left else ():
        if raw.index in left:
            left.remove(raw.index)
            yield raw
            if not left:
                return


def replay_rows(recorder: Recorder, flow: RowFlow, file: Path, views: ViewQuota | None) -> Iterator[FinishedRow]:
    """The rows of a log that an earlier scan finished.

    Which rollouts get a view depends on the logs before, so views are not recorded: these rows are audited again.
    """
    group = flow.groups[str(file)]
    if group.join is not None:
        group.join.rows(group.open_for_audit(file))  # reads the calls of all logs, for the summary
    viewed: dict[int, set[int]] = {}
    for row in recorder.finished_rows(file) if views is not None else ():
        for at, result in enumerate(row.outcome.before):
            if (
                observed_of(result) is not None
                and views is not None
                and views.take(result.findings, result.place.row)
            ):
                viewed.setdefault(result.place.row, set()).add(at)
    shown: dict[tuple[int, int], View] = {}
    size = None if views is None else views.size
    for raw in reread_rows(group, group.open_for_audit(file), viewed):
        place = Place(str(file), raw.index)
        for at, result in enumerate(flow.audit_row(raw, place, MatchedKeys(), lambda *_: size)):
            observed = observed_of(result)
            if at in viewed[raw.index] and observed is not None and observed.view is not None:
                shown[raw.index, at] = observed.view
    for row in recorder.finished_rows(file):
        results = list(row.outcome.before)
        for at, result in enumerate(results):
            view, observed = shown.get((result.place.row, at)), observed_of(result)
            if view is not None and observed is not None:
                results[at] = replace(result, observed=replace(observed, view=view))
        yield replace(row, outcome=replace(row.outcome, before=tuple(results)))
