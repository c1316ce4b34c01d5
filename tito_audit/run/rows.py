"""The rows of logs: the one place where they are opened, mapped, read and joined."""

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
    """With its columns under our names."""
    format: Format
    rollouts: Sequence[Rollout]


@dataclass(frozen=True, slots=True, eq=False)
class LogGroup:
    """Logs of a run with the same settings, and what reads and audits them."""

    settings: Settings
    auditor: Auditor = READS_ONLY
    join: Join | None = None
    annotations: Annotations | None = None
    """What a trainer wrote about its rows in other files; only scans read it."""
    named: Format | None = field(init=False)
    """The format of all rows; None: detected row by row."""

    def __post_init__(self) -> None:
        named = self.settings.format or ("generic" if self.settings.columns else None)
        object.__setattr__(self, "named", None if named is None else format_named(named))

    def open(self, file: Path, **how: Any) -> Log:
        """A log of the group with all its rows; `how` is passed on to `open_log`."""
        return open_log(file, max_row_bytes=self.settings.max_row_bytes, rows_at=self.settings.rows_at, **how)

    def open_quick(self, file: Path) -> Log:
        """A log opened for an audit: only the wanted rows, long arrays as numpy arrays."""
        log = self.open(file, arrays=number_columns(self.settings.columns), share=share_of(self.settings))
        log.only, log.skip_binary = self.settings.row, True
        return log

    def open_kept(self, file: Path) -> Log:
        """A log opened to be written again: rows keep their text, and long arrays are numpy arrays until a row
        has to be changed.
        """
        return self.open(
            file, keep_text=True, arrays=number_columns(self.settings.columns) if self.splices else None
        )

    @property
    def splices(self) -> bool:
        """Whether rows that keep their text may be read with arrays: each is a text of its own."""
        return self.join is None and self.settings.rows_at is None

    def rows(self, log: Log) -> Iterable[RawRow]:
        """The rows of a log; lines that a join reads as one row are gathered."""
        return log if self.join is None else self.join.rows(log)

    def chunks(self, file: Path, size: int) -> Iterator[Chunk]:
        """The wanted rows of a log in chunks of about `size` bytes."""
        log = self.open_quick(file)
        return chunks_of(log, size) if self.join is None else self.join.chunks(log, size)

    def output(self, out: Output, log: Log) -> Output:
        """An output for the rows that `rows` yields."""
        return out if self.join is None else self.join.output(out, log)

    def read(self, raw: RawRow, place: Place) -> ReadRow:
        """The row and its rollouts; RecordError when it cannot be read."""
        if raw.value is None:
            raise RecordError(raw.error or "the row cannot be read")
        try:
            row = map_columns(raw.value, self.settings.columns) if self.settings.columns else raw.value
            form = format_of_row(row, self.named)
            whole = row if self.annotations is None else self.annotations.apply_to(form, row)
            return ReadRow(row, form, self.read_again(form, whole, place, raw.value))
        except TitoAuditError:
            raise
        except ODD_VALUES as error:
            raise RecordError(f"the row cannot be read: {describe_error(error)}") from error

    def read_again(self, form: Format, row: Row, place: Place, logged: Row) -> Sequence[Rollout]:
        """The rollouts of a row with our column names, joined by the ids of the logged row."""
        rollouts = with_sampling_settings(row, form.read(row, place))
        if (kind := self.settings.kind) != "auto":
            rollouts = [replace(each, stated=replace(each.stated, kind=kind)) for each in rollouts]
        return rollouts if self.join is None else self.join.apply(rollouts, logged)

    def rows_behind(self, raw: RawRow, read: ReadRow) -> Sequence[Row]:
        """The rows that hold its rollouts: itself, or each call of a conversation."""
        return [line.value or {} for line in rows_behind(raw)] if gathered_calls(raw) is not None else [read.row]

    def as_logged(self, logged: Row, row: Row) -> Row:
        """The row with the column names of the log that it is written to."""
        return unmap_columns(logged, row, self.settings.columns) if self.settings.columns else row

    @property
    def joins_files(self) -> bool:
        """Whether messages or tools of other files are joined."""
        return self.join is not None and not (self.settings.messages is self.settings.tools_file is None)

    def head(self, file: Path, rows: int, *, joined: bool = False) -> Iterator[Rollout]:
        """The rollouts of the first readable rows of a log; `joined`: with what other files have for them."""
        settings = replace(self.settings, row=None, sample=None)
        first = replace(self, settings=settings, join=self.join if joined else None)
        with suppress(StorageError):
            for raw in islice(first.open_quick(file), rows):
                with suppress(RecordError):
                    yield from first.read(raw, Place(str(file), raw.index)).rollouts


def every_row(settings: Settings) -> Settings:
    """The settings for every row of a log, as what writes whole logs reads them."""
    return replace(settings, limit=None, sample=None, row=None)


def share_of(settings: Settings) -> float | None:
    """The share of the rows to audit, None for all; SetupError unless it is above 0 and at most 1."""
    share = settings.sample
    if share is None:
        return None
    if not 0 < share <= 1:
        raise SetupError(
            f"--sample {share:g}: a share of the rows is above 0 and at most 1.\n"
            "Pass --sample 0.1 for about one row in ten."
        )
    return share if share < 1 and settings.row is None else None
