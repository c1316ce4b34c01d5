"""Resume: which logs an earlier run finished, whether its results are still theirs, and what they are.

A journal holds results and outcomes as JSON values, which msgspec writes and reads by the types of their fields.
Parts are compressed: most results repeat the skips of the one before.
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
from tito_audit.formats import Detection
from tito_audit.record.finding import Finding, Result
from tito_audit.record.outcome import Outcome
from tito_audit.record.rollout import Place, Rollout
from tito_audit.record.stated import Stated
from tito_audit.run.encoders import Encoded
from tito_audit.run.log_findings import Once
from tito_audit.run.log_groups import RowFlow
from tito_audit.run.rows import LogGroup
from tito_audit.settings.model import RepairSettings, Settings
from tito_audit.storage import Log, RawRow, RowsInMemory, find_logs
from tito_audit.storage.journal import Finished, Journal
from tito_audit.terminal.words import listed, many
from tito_audit.tokens.load import hash_tokenizer
from tito_audit.version import VERSION
from tito_audit.viewer.model import Measures, Observed, View, ViewQuota, observed_of

State = list[Any]
"""What shows that a file is the same: its size and times; what a remote store says about it."""
States = Mapping[Path, State | None]
"""By log: its state before the run; None for a pipe."""

SCAN, REPAIR = "scan", "repair"
"""What was done to a log."""
_NOT_DECIDING = {"jobs", "engine", "address", "limit", "overrides"}
"""Settings that change no result of a log that was read to its end."""
_ROWS = 1 << 31
"""More rows than a log has."""


def identity_of(path: Path) -> State | None:
    """Size, modification time and, of a remote file, its version; None for a pipe, which cannot be read again."""
    if not path.is_file():
        return None
    about = path.stat()
    return [about.st_size, about.st_mtime_ns, getattr(about, "etag", None)]


def states_of(files: Sequence[Path]) -> States:
    """The state of each log; SetupError for rows in memory, which another run cannot be sure to find again."""
    rows = next((file for file in files if isinstance(file, RowsInMemory)), None)
    if rows is not None:
        raise SetupError(f"resume: {rows} are rows in memory, and only files can be resumed.\nLeave out `resume`.")
    return {file: identity_of(file) for file in files}


def logs_hash(states: States) -> str:
    """A hash of all logs of a run."""
    return _hash([(str(file), state) for file, state in states.items()])


def _plain(value: object) -> object:
    """A value whose `repr` is the same for equal values."""
    return sorted(value.items()) if isinstance(value, Mapping) else value


def _hash(value: object) -> str:
    return hashlib.sha256(repr(value).encode("utf-8", "surrogatepass")).hexdigest()[:32]


@cache
def _code() -> str:
    """A hash of this package's code and the versions of what it computes with."""
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
class DoneRow:
    """A row that a run is done with."""

    outcome: Outcome
    """What became of it; a scan is a repair that changes nothing."""
    left_out: int = 0
    """How many rows a sample left out before it."""
    moved: tuple[bytes, ...] = ()
    """The lines that it put into the quarantine."""


class Changed(TypedDict):
    """Rows of a log that a repair changed, as in the JSON report."""

    columns: list[str]
    into: int
    rows: list[list[int]]


@dataclass(frozen=True, slots=True)
class KeptLog:
    """What is recorded of a finished log besides its rows."""

    encoders: tuple[Encoded, ...]
    """What encoded its chunks."""
    left_out: int = 0
    """Rows that a sample left out after the last one."""
    about_log: tuple[Finding, ...] = ()
    """The findings about all of it."""
    changed: tuple[Changed, ...] = ()
    notices: tuple[str, ...] = ()
    """About the new form of a repaired log."""


@dataclass(frozen=True, slots=True)
class _Result:
    """A result without its rollout and view: of the rollout only format and notice are recorded."""

    result: Result
    rollout: tuple[str, str] | None
    measures: tuple[bytes, bytes, dict[str, tuple[int, int]]] | None

    @classmethod
    def of(cls, result: Result) -> _Result:
        rollout, observed = result.rollout, observed_of(result)
        return cls(
            replace(result, rollout=None, observed=None),
            None if rollout is None else (rollout.format, rollout.stated.notice),
            None if observed is None else observed.measures.packed(),
        )

    def read(self, file: Path) -> Result:
        """The result that was recorded; ValueError for one of another file, or of a row that no log has."""
        result, rollout = self.result, None
        if result.place.file != str(file):
            raise ValueError(f"a result of another file than {file}")
        _check_rows(result.place, *(finding.place for finding in (*result.findings, *result.told)))
        for _, row in () if result.trainings is None else result.trainings.calls_at:
            _check_rows(Place(str(file), row))
        if self.rollout is not None:
            rollout = Rollout(result.place, self.rollout[0], stated=Stated(notice=self.rollout[1]))
        observed = None if self.measures is None else Observed(Measures.unpacked(*self.measures))
        return replace(result, rollout=rollout, observed=observed)


@dataclass(frozen=True, slots=True)
class _Row:
    """A row that is done, without rollouts and views."""

    row: DoneRow
    before: tuple[_Result, ...]
    after: tuple[_Result, ...] | None
    """None: those before."""

    @classmethod
    def of(cls, row: DoneRow) -> _Row:
        outcome = row.outcome
        before = tuple(map(_Result.of, outcome.before))
        after = None if outcome.after is outcome.before else tuple(map(_Result.of, outcome.after))
        return cls(replace(row, outcome=replace(outcome, before=(), after=())), before, after)

    def read(self, file: Path) -> DoneRow:
        """The row that was recorded; ValueError for one of another file."""
        outcome = self.row.outcome
        if outcome.place.file != str(file):
            raise ValueError(f"a row of another file than {file}")
        _check_rows(outcome.place)
        before = tuple(result.read(file) for result in self.before)
        after = before if self.after is None else tuple(result.read(file) for result in self.after)
        return replace(self.row, outcome=replace(outcome, before=before, after=after))


def _check_rows(*places: Place) -> None:
    """ValueError for a place that no log has."""
    for place in places:
        if not (0 <= place.row < _ROWS and 0 <= place.item < _ROWS):
            raise ValueError(f"{place} is no place in a log")


_MOST_UNPACKED = 1 << 28
"""Bytes that a part of a journal may unpack to: a forged one could fill the memory."""


def packed(value: object) -> str:
    """A value of dataclasses as text for a journal."""
    import msgspec  # only runs with a journal need it

    # msgspec's own JSON has no half surrogate pairs, infinities or NaN, which logs have.
    plain = msgspec.to_builtins(value, enc_hook=lambda scalar: scalar.item())
    text = json.dumps(plain, separators=(",", ":"))
    return b64encode(zlib.compress(text.encode("ascii"), 1)).decode()


def unpacked(text: str, kind: type[Kind]) -> Kind:
    """The value of this type that was packed; ValueError for any other."""
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
    """Records the rows of each log as they are done, and reads those that an earlier run recorded.

    `kind` says what is done to the logs (SCAN, REPAIR), `more` what decides that besides their settings. `targets`
    are the files that a repair writes, by log. What an earlier run did with other settings is not read.
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
        self._all_logs = logs_hash(states)
        self._more = more
        self._targets = targets or {}
        self._by_group: dict[int, Mapping[str, str]] = {}
        self._differs: dict[str, None] = {}
        self._unused = 0
        self.logs = {file: log for file in flow.files if (log := self._find(file)) is not None}
        """The logs that an earlier run finished; of a repair those whose files are there, unchanged."""
        if targets is not None:
            logs = {}
            for file, log in self.logs.items():
                target, was = targets.get(file), log.more.get("target")
                if (target is None and was is None) or (
                    target is not None and str(target) == was and self.journal.holds(target, log)
                ):
                    logs[file] = log
            joins = {file: join for file in flow.files if (join := flow.groups[str(file)].join) is not None}
            joined = {file: id(join) for file, join in joins.items() if join.joins_logs(file)}
            broken = {join for file, join in joined.items() if file not in logs}
            self.logs = {file: log for file, log in logs.items() if joined.get(file) not in broken}
        self._file: Path | None = None
        self._about_log: tuple[Finding, ...] = ()
        self._encoders: dict[Encoded, None] = {}
        self._rows: list[_Row] = []
        self._results = 0

    def notices(self) -> Iterator[str]:
        """What the journal holds of unchanged logs and cannot be used, for the summary."""
        if self._unused:
            yield (
                f"{self.journal.path}: {many(self._unused, 'log')} had been finished by a run with "
                f"{listed([f'other {name}' for name in self._differs])}; this run did not use that."
            )

    def begin(self, file: Path, about_log: Sequence[Finding] = ()) -> None:
        """Start on a log, with the findings about all of it."""
        self._file, self._about_log, self._encoders = file, tuple(about_log), {}
        self.journal.begin()

    def add(self, row: DoneRow) -> None:
        """Record the next row."""
        self._rows.append(_Row.of(row))
        self._results += len(row.outcome.before) + 1
        if self._results >= 256:
            self._write()

    def encoders(self, encoded: Encoded) -> None:
        """Record what encoded a chunk."""
        self._encoders[encoded] = None

    def finish(
        self, left_out: int = 0, changed: Iterable[Mapping[str, Any]] = (), notices: Iterable[str] = ()
    ) -> None:
        """Record that the log is done. The file of a repaired log is complete and gets its name next."""
        file, self._file = self._file, None
        if file is None:
            return
        self._write()
        state, target = self._states.get(file), self._targets.get(file)
        rows: Any = tuple(changed)
        if state is None or state != identity_of(file):  # it changed since the run began
            return
        log = KeptLog(tuple(self._encoders), left_out, self._about_log, rows, tuple(notices))
        target_name = None if target is None else str(target)
        self.journal.finish(
            self._kind, str(file), state, self._decided(file), target=target_name, kept=packed(log)
        )

    def log(self, file: Path) -> KeptLog:
        """What was recorded of a finished log besides its rows."""
        with self.journal.reading(self.logs[file]):
            log = unpacked(self.logs[file].more["kept"], KeptLog)
            for finding in log.about_log:
                _check_rows(finding.place)
                if finding.place.file != str(file):
                    raise ValueError(f"a finding of another file than {file}")
        return log

    def rows(self, file: Path) -> Iterator[DoneRow]:
        """The rows of a finished log, in order."""
        for part in self.journal.parts(self.logs[file]):
            with self.journal.reading(self.logs[file]):
                rows = [row.read(file) for row in unpacked(part, list[_Row])]
            yield from rows

    def _write(self) -> None:
        if self._rows:
            self.journal.add(packed(self._rows))
        self._rows, self._results = [], 0

    def _find(self, file: Path) -> Finished | None:
        log, state = self.journal.finished(self._kind, str(file)), self._states.get(file)
        if log is None or state is None or log.state != state:
            return None
        decided = self._decided(file)
        differs = [name for name in {**decided, **log.decided} if decided.get(name) != log.decided.get(name)]
        self._differs |= dict.fromkeys(differs)
        self._unused += bool(differs)
        return None if differs else log

    def _decided(self, file: Path) -> Mapping[str, str]:
        """What decides the result of a log, by name, as hashes."""
        group = self._flow.groups[str(file)]
        if id(group) not in self._by_group:
            settings, auditor = group.settings, group.auditor
            # What fails a scan is decided later.
            others = _NOT_DECIDING | ({"fail_on"} if self._kind == SCAN else set())
            names = [field.name for field in fields(Settings) if field.name not in others]
            deciding: dict[str, object] = {
                "code": _code(),
                "settings": [(name, _plain(getattr(settings, name))) for name in names],
            }
            if auditor.tokenizer is not None:
                deciding["tokenizer files"] = hash_tokenizer(auditor.tokenizer)
            if auditor.renderer is not None:
                sources = {name: template.source for name, template in auditor.renderer.templates.items()}
                deciding["chat template"] = _plain(sources)
                if settings.clock is None and any("strftime_now" in source for source in sources.values()):
                    deciding["date (--clock sets it)"] = date.today().isoformat()
            beside = [name for name in (settings.messages, settings.tools_file) if name is not None]
            if beside and group.join is not None:
                files = [(str(path), identity_of(path)) for name in beside for path in find_logs([name])]
                deciding["joined files"] = files, group.join.keys()
            deciding |= self._more
            self._by_group[id(group)] = {name: _hash(value) for name, value in deciding.items()}
        decided = self._by_group[id(group)]
        if group.join is None or not group.join.joins_logs(file):
            return decided
        # With a limit, only so many rows are searched for the calls of a conversation.
        return {**decided, "logs": self._all_logs + str(group.settings.limit)}


def repair_recorder(
    journal: Journal,
    flow: RowFlow,
    states: States,
    repairs: RepairSettings,
    targets: Mapping[Path, Path],
    once: Once | None,
) -> Recorder:
    """The recorder of a repair."""
    names = (field.name for field in fields(repairs) if field.name not in ("force", "quarantine", "choices"))
    deciding = [
        *((name, getattr(repairs, name)) for name in names),
        repairs.quarantine is not None,
        repairs.choices,
    ]
    more: dict[str, object] = {"repairs": deciding}
    if once is not None:
        more["logs"] = logs_hash(states)
    return Recorder(journal, REPAIR, flow, states, more, targets)


def refuse_model(repairs: RepairSettings) -> None:
    """SetupError if a model takes part in the repair: a journal does not keep what it said."""
    if repairs.choices.rescored is not None:
        raise SetupError(
            "--resume: the scores of a model are not kept with a repair.\n"
            "Leave out --with rescore, or fill the logprobs first: tito-audit rescore -o OUT --resume"
        )


def read_again(group: LogGroup, log: Log, numbers: Collection[int]) -> Iterator[RawRow]:
    """Some rows of a log that an earlier run finished: what is shown of them is not recorded."""
    left = set(numbers)
    for raw in group.rows(log) if left else ():
        if raw.index in left:
            left.remove(raw.index)
            yield raw
            if not left:
                return


def rows_with_views(recorder: Recorder, flow: RowFlow, file: Path, views: ViewQuota | None) -> Iterator[DoneRow]:
    """The rows of a log that an earlier scan finished.

    Which rollouts get a view depends on the logs before, so views are not recorded: their rows are audited again.
    """
    group = flow.groups[str(file)]
    if group.join is not None:
        group.join.rows(group.open_quick(file))  # reads the calls of all logs, which the summary tells of
    viewed: dict[int, set[int]] = {}
    for row in recorder.rows(file) if views is not None else ():
        for at, result in enumerate(row.outcome.before):
            if (
                observed_of(result) is not None
                and views is not None
                and views.take(result.findings, result.place.row)
            ):
                viewed.setdefault(result.place.row, set()).add(at)
    shown: dict[tuple[int, int], View] = {}
    size = None if views is None else views.size
    for raw in read_again(group, group.open_quick(file), viewed):
        place = Place(str(file), raw.index)
        for at, result in enumerate(flow.audit(raw, place, Detection(), lambda *_: size)):
            observed = observed_of(result)
            if at in viewed[raw.index] and observed is not None and observed.view is not None:
                shown[raw.index, at] = observed.view
    for row in recorder.rows(file):
        results = list(row.outcome.before)
        for at, result in enumerate(results):
            view, observed = shown.get((result.place.row, at)), observed_of(result)
            if view is not None and observed is not None:
                results[at] = replace(result, observed=replace(observed, view=view))
        yield replace(row, outcome=replace(row.outcome, before=tuple(results)))
