"""Log groups: the one place where logs are opened, and where rows are mapped, read and joined."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from tito_audit.errors import ODD_VALUES, RecordError, SetupError, StorageError, TitoAuditError, describe_error
from tito_audit.format import Format, Row
from tito_audit.formats import format_named, map_columns, number_columns, unmap_columns, with_sampling_settings
from tito_audit.join import Annotations, Join, format_of_row, gathered_calls, rows_behind
from tito_audit.record.rollout import Place, Rollout
from tito_audit.run.auditor import READS_ONLY, Auditor
from tito_audit.settings.model import Settings
from tito_audit.storage import Log, Output, RawRow, open_log
from tito_audit.storage.chunks import Chunk, chunks_of


@dataclass(frozen=True, slots=True)
class ReadRow:
    """A row of a log and the rollouts read from it."""

    row: Row
    """With the columns renamed by `Settings.columns`."""
    format: Format
    rollouts: Sequence[Rollout]


@dataclass(frozen=True, slots=True, eq=False)
class LogGroup:
    """Logs of a run with the same settings, and how they are read and audited."""

    settings: Settings
    auditor: Auditor = READS_ONLY
    join: Join | None = None
    annotations: Annotations | None = None
    """What a trainer wrote about the rows in other files; only scans read it."""
    named: Format | None = field(init=False)
    """The format of all rows, if the settings name it; None: detected row by row."""

    def __post_init__(self) -> None:
        named = self.settings.format or ("generic" if self.settings.columns else None)
        object.__setattr__(self, "named", None if named is None else format_named(named))

    def open(self, file: Path, **how: Any) -> Log:
        """Open a log of the group with all its rows; `how` is passed on to `open_log`."""
        return open_log(file, max_row_bytes=self.settings.max_row_bytes, rows_at=self.settings.rows_at, **how)

    def open_for_audit(self, file: Path) -> Log:
        """Open a log for an audit: only the wanted rows, long arrays as numpy arrays."""
        log = self.open(file, arrays=number_columns(self.settings.columns), share=sample_share(self.settings))
        log.only, log.skip_binary = self.settings.row, True
        return log

    def open_for_rewrite(self, file: Path) -> Log:
        """Open a log to write it again: rows keep their text, and long arrays are numpy arrays."""
        return self.open(
            file, keep_text=True, arrays=number_columns(self.settings.columns) if self.can_splice else None
        )

    @property
    def can_splice(self) -> bool:
        """Whether long arrays of rows that keep their text may be numpy arrays: each row is a text of its own."""
        return self.join is None and self.settings.rows_at is None

    def rows(self, log: Log) -> Iterable[RawRow]:
        """The rows of a log; the calls that a join puts together are one row."""
        return log if self.join is None else self.join.rows(log)

    def chunks(self, file: Path, size: int) -> Iterator[Chunk]:
        """The wanted rows of a log in chunks of about `size` bytes."""
        log = self.open_for_audit(file)
        return chunks_of(log, size) if self.join is None else self.join.chunks(log, size)

    def output(self, out: Output, log: Log) -> Output:
        """An output that takes the rows that `rows` yields."""
        return out if self.join is None else self.join.output(out, log)

    def read_row(self, raw: RawRow, place: Place) -> ReadRow:
        """Read a row and its rollouts; RecordError if it cannot be read."""
        if raw.value is None:
            raise RecordError(raw.error or "the row cannot be read")
        try:
            row = map_columns(raw.value, self.settings.columns) if self.settings.columns else raw.value
            form = format_of_row(row, self.named)
            whole = row if self.annotations is None else self.annotations.apply_to(form, row)
            return ReadRow(row, form, self.read_rollouts(form, whole, place, raw.value))
        except TitoAuditError:
            raise
        except ODD_VALUES as error:
            raise RecordError(f"the row cannot be read: {describe_error(error)}") from error

    def read_rollouts(self, form: Format, row: Row, place: Place, logged: Row) -> Sequence[Rollout]:
        """The rollouts of a mapped row; what is joined to them is found by the ids of the `logged` row."""
        rollouts = with_sampling_settings(row, form.read(row, place))
        if (kind := self.settings.kind) != "auto":
            rollouts = [replace(each, stated=replace(each.stated, kind=kind)) for each in rollouts]
        return rollouts if self.join is None else self.join.apply(rollouts, logged)

    def logged_rows(self, raw: RawRow, read: ReadRow) -> Sequence[Row]:
        """The rows that the rollouts were read from: the row itself, or one for each joined call."""
        return [line.value or {} for line in rows_behind(raw)] if gathered_calls(raw) is not None else [read.row]

    def with_log_columns(self, logged: Row, row: Row) -> Row:
        """The row with the column names of the log that it is written to."""
        return unmap_columns(logged, row, self.settings.columns) if self.settings.columns else row

    @property
    def joins_files(self) -> bool:
        """Whether messages or tools from other files are joined."""
        return self.join is not None and not (self.settings.messages is self.settings.tools_file is None)

    def first_rollouts(self, file: Path, rows: int, *, joined: bool = False) -> Iterator[Rollout]:
        """The rollouts of a log's first readable rows; `joined`: with messages and tools of other files."""
        settings = replace(self.settings, row=None, sample=None)
        first = replace(self, settings=settings, join=self.join if joined else None)
        with suppress(StorageError):
            for raw in islice(first.open_for_audit(file), rows):
                with suppress(RecordError):
                    yield from first.read_row(raw, Place(str(file), raw.index)).rollouts


def without_row_limits(settings: Settings) -> Settings:
    """The settings for reading every row, without --limit, --sample and --row."""
    return replace(settings, limit=None, sample=None, row=None)


def sample_share(settings: Settings) -> float | None:
    """The share of the rows to audit; None for all. SetupError unless it is above 0 and at most 1."""
    share = settings.sample
    if share is None:
        return None
    if not 0 < share <= 1:
        raise SetupError(
            f"--sample {share:g}: a share of the rows is above 0 and at most 1.\n"
            "Pass --sample 0.1 for about one row in ten."
        )
    return share if share < 1 and settings.row is None else None
