"""MemoryOutput: rows in memory with some of them changed, in memory again or in a new file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from tito_audit.errors import SetupError, StorageError
from tito_audit.format import Row
from tito_audit.storage._arrow_edit import changes_between
from tito_audit.storage._table_edit import Copies
from tito_audit.storage.atomic import new_file, refuse_target
from tito_audit.storage.given import is_a
from tito_audit.storage.held import ArrowRows, Content
from tito_audit.storage.in_memory import RowsInMemory, spans
from tito_audit.storage.log import Log
from tito_audit.storage.new_log import ColumnTypes, kind_of_name, new_log, writer_of
from tito_audit.storage.output import Output, nested_output
from tito_audit.storage.rebuilt import rebuilt
from tito_audit.storage.remote import RemoteFile
from tito_audit.storage.row import RawRow


class MemoryOutput:
    """Collects the changes of rows in memory; `result` is set by `finish`."""

    def __init__(
        self,
        path: RowsInMemory,
        added: tuple[str, ...],
        target: Path | None,
        write: Callable[[RowsInMemory], None],
    ) -> None:
        self.changed = False
        self.result = path
        """The repaired rows, as a path."""
        self._path = path
        self._added = added
        self.target = target
        """The file to write; None: the rows stay in memory."""
        self._write = write
        self._rows: dict[int, Copies] = {}

    def keep(self, raw: RawRow) -> None:
        """Keep the row as it is."""

    def replace(self, raw: RawRow, rows: Sequence[Row]) -> None:
        """Put these rows in the place of one: none drops it, several are a fork."""
        copies = [changes_between(raw.value, row) for row in rows]
        if copies != [[]]:
            self.changed = True
            self._rows[raw.index] = copies

    def finish(self, log: Log) -> None:
        """Make the repaired rows, and write them to the target if there is one."""
        made = rebuilt(self._path, self._rows, self._added)
        self.result = RowsInMemory.of(str(self._path), made.content, made.value)
        if self.target is not None:
            self._write(self.result)


@contextmanager
def open_memory_output(
    log: Log, path: RowsInMemory, target: Path | None, *, overwrite: bool, added: tuple[str, ...]
) -> Iterator[tuple[MemoryOutput, Output]]:
    """An output for rows in memory, and the output to give its rows to.

    With a `target`, a file of the kind that its suffix names appears when the block ends, or never.
    """
    if target is not None and not isinstance(target, RemoteFile):
        refuse_target(target, overwrite=overwrite)
    with contextlib.ExitStack() as stack:

        def write(rows: RowsInMemory) -> None:
            assert target is not None, "rows are written where there is a file"
            _write(rows, target, stack, overwrite=overwrite)

        whole = MemoryOutput(path, added, target, write)
        moved = added if log.kind == "frame" else ()
        yield whole, whole if log.inside is None else nested_output(whole, moved)


def memory_targets(files: Sequence[RowsInMemory], out: Path) -> Mapping[Path, Path]:
    """The file to write for each log in memory: `out` itself for a single one, else a file in the folder `out`.

    SetupError if the suffix of a file is not one that can be written.
    """
    if len(files) == 1 and not out.is_dir():
        kind_of_name(out)
        return {files[0]: out}
    if out.exists() and not out.is_dir():
        raise SetupError(f"-o {out}: {len(files)} logs go into a folder, and this is a file.\nName a folder.")
    return {file: out / _file_name(file) for file in files}


def _file_name(file: RowsInMemory) -> str:
    """The name of the file for a log in memory; objects go into JSONL, tables into Parquet."""
    name = str(file.name).strip("<>").replace(" ", "-")
    with contextlib.suppress(SetupError):
        kind_of_name(Path(name))
        return name
    return name + (".jsonl" if file.content.kind == "objects" else ".parquet")


def _write(rows: RowsInMemory, target: Path, stack: ExitStack, *, overwrite: bool) -> None:
    """Write rows as the kind of file that the suffix names."""
    table = None if kind_of_name(target)[0] != "table" else _whole_table(rows)
    if table is not None:
        out: BinaryIO = stack.enter_context(new_file(target, overwrite=overwrite))
        writer = writer_of(out, table.table(0, 0).schema, target.suffix.lower())
        for start, stop in spans(table):
            writer.write_table(table.table(start, stop))
        writer.close()
        return
    shapes = ColumnTypes()
    if kind_of_name(target)[0] == "table":
        for row in _plain_rows(rows):
            shapes.learn(row)
    log = stack.enter_context(new_log(target, overwrite=overwrite, shapes=shapes))
    for row in _plain_rows(rows):
        try:
            log.add(row)
        except TypeError as error:
            raise StorageError(
                f"{rows}: the rows cannot be written to {target} ({error}), so nothing was written.\n"
                "Name it .parquet, or convert that column first."
            ) from error
    log.finish()


def _plain_rows(rows: RowsInMemory) -> Iterator[Row]:
    content: Content = rows.content
    for start, stop in spans(content):
        for raw in content.part(start, stop).rows(range(start, stop), 1 << 62):
            if raw.value is None:
                raise StorageError(
                    f"{rows}: row {raw.index} cannot be written, so nothing was written: {raw.error}."
                )
            yield raw.value


def _whole_table(rows: RowsInMemory) -> ArrowRows | None:
    """The rows as Arrow tables; None if they are not held as a table that Arrow can hold."""
    import pyarrow as pa

    if isinstance(rows.content, ArrowRows):
        return rows.content
    if not is_a(rows.value, "pandas", "DataFrame"):
        return None
    frame: Any = rows.value
    try:
        table = pa.Table.from_pandas(frame, preserve_index=False)
    except (pa.ArrowException, TypeError):  # a column of several types
        return None
    return ArrowRows(len(table), table.nbytes, lambda start, stop: table.slice(start, stop - start))
