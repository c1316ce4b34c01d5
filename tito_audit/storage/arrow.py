"""Arrow IPC files in both formats: streams of record batches, as `datasets` writes, and files with a footer."""

from __future__ import annotations

import os
import struct
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tito_audit.errors import StorageError
from tito_audit.storage import lazy_pyarrow as pa
from tito_audit.storage.remote import RemoteFile
from tito_audit.storage.row import block_seed
from tito_audit.storage.streams import Damage
from tito_audit.storage.table_edit import TableOutput, unwritable_error
from tito_audit.storage.table_rows import ArrowRows, Block, first_line, refuse_duplicate_names

_STREAM = b"\xff\xff\xff\xff"
_FILE = b"ARROW1"


def is_arrow(head: bytes) -> bool:
    """Whether a file that begins so is Arrow IPC of either format."""
    return head.startswith((_STREAM, _FILE))


class ArrowFile(AbstractContextManager["ArrowFile"]):
    """An Arrow IPC file, read one record batch at a time.

    It is not mapped into memory: a mapped file that shrinks would kill the process.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._source = (
            pa.PythonFile(path.open("rb", 0)) if isinstance(path, RemoteFile) else pa.OSFile(os.fspath(path), "rb")
        )
        self.has_footer = self._source.read(len(_FILE)) == _FILE
        """Whether it has the format with a footer; else it is a stream."""
        self._size = self._source.size()
        self._reader: Any = None
        """The reader by footer; None for a stream, or if the footer cannot be read."""
        self._broken: str | None = None
        """Why the footer cannot be read; None if it can."""
        if self.has_footer:
            try:
                self._reader = pa.ipc.open_file(self._source)
            except (pa.ArrowException, OSError, ValueError) as error:
                self._broken = f"the footer of the Arrow file cannot be read ({first_line(error)})"
        self.schema = self._reader.schema if self._reader is not None else self._stream().schema
        """The schema with all its metadata."""

    @property
    def metadata(self) -> Any:
        """The metadata of the footer itself; None if there are none."""
        return getattr(self._reader, "metadata", None)

    def options(self) -> Any:
        """Options for a writer of the same metadata version and codec, as the first record batch has.

        With a footer, a growing dictionary is written as its additions, as it cannot be replaced.
        """
        codec, version = None, pa.ipc.MetadataVersion.V5
        try:
            messages = pa.ipc.MessageReader.open_stream(self._rewind())
            message = next((each for each in messages if each.type == "record batch"), None)
            if message is not None:
                version, header = message.metadata_version, bytes(message.metadata)
                batch = _table_at(header, _field_at(header, _table_at(header, 0), _HEADER))
                if compression := _field_at(header, batch, _COMPRESSION):
                    at = _field_at(header, _table_at(header, compression), _CODEC)
                    codec = ("lz4", "zstd")[header[at] if at else 0]
        except (OSError, ValueError, struct.error, IndexError):
            pass  # Arrow errors are among these; reading the batch will raise one
        return pa.ipc.IpcWriteOptions(
            metadata_version=version, compression=codec, emit_dictionary_deltas=self.has_footer
        )

    def count(self) -> int:
        """Number of rows; an Arrow error if a record batch cannot be read."""
        return sum(batch[0].num_rows for batch in self._read())

    def batches(self) -> Iterator[tuple[Any, Any, float]]:
        """Each record batch, its metadata, and the share of the file up to its end; Damage at damage."""
        number, read = 0, self._read()
        while True:
            try:
                batch = next(read, None)
            except Exception as error:
                if not _is_read_error(error):
                    raise
                raise Damage(
                    f"record batch {number} of the Arrow file cannot be read ({first_line(error)})"
                ) from None
            if batch is None:
                break
            try:
                batch[0].validate()
                sound = all(map(_array_is_sound, batch[0].columns))
            except (pa.ArrowException, OSError, ValueError, IndexError):
                sound = False
            if not sound:
                raise Damage(
                    f"record batch {number} of the Arrow file cannot be read (it points outside its data)"
                )
            yield batch
            batch = None  # the next is read into its place
            number += 1
        if self._broken is not None:
            raise Damage(self._broken)

    def __exit__(self, *_: object) -> None:
        """Close the file; its batches stay valid."""
        self._source.close()

    def _read(self) -> Iterator[tuple[Any, Any, float]]:
        """The same as `batches`, unchecked, with the errors of Arrow."""
        if self._reader is not None:
            count = self._reader.num_record_batches
            for place in range(count):
                yield (*self._reader.get_batch_with_custom_metadata(place), (place + 1) / count)
            return
        stream = self._stream()
        with suppress(StopIteration):
            while True:
                yield (*stream.read_next_batch_with_custom_metadata(), self._source.tell() / self._size)
        if self._broken is None and (end := self._source.tell()) < self._size:
            raise Damage(
                f"the Arrow stream ends at byte {end:,}, but the file goes on to byte {self._size:,} with "
                "something that is not read"
            )

    @property
    def is_misread(self) -> bool:
        """Whether pyarrow would take compressed bytes for values, which can end the process.

        It does so for compressed record batches of version 4, though it writes such itself on request.
        """
        try:
            first = pa.ipc.read_message(self._rewind())
        except (pa.ArrowException, OSError, ValueError, EOFError):
            return False  # damaged, which reading the batches will show
        return first.metadata_version <= pa.ipc.MetadataVersion.V4 and self.options().compression is not None

    def _stream(self) -> Any:
        return pa.ipc.open_stream(self._rewind())

    def _rewind(self) -> Any:
        """The file at its first message, which follows the padded magic if there is a footer."""
        self._source.seek(8 if self.has_footer else 0)
        return self._source


def open_arrow(path: Path) -> ArrowFile:
    """The open file; StorageError if it cannot be read safely, or two of its columns have the same name."""
    if not path.is_file():
        raise StorageError(f"{path}: an Arrow file cannot be read from a pipe; save it to a file first.")
    try:
        file = ArrowFile(path)
    except Exception as error:
        if not _is_read_error(error):
            raise
        raise StorageError(
            f"{path}: an Arrow file whose schema cannot be read ({first_line(error)}).\n"
            "The copy is incomplete, or the writer was stopped as soon as it began; write it again."
        ) from None
    if file.is_misread:
        with file:
            raise StorageError(
                f"{path}: compressed record batches of metadata version 4, whose values cannot be read reliably.\n"
                "Write the file again with version 5, the default of pyarrow, or without compression."
            )
    refuse_duplicate_names(path, file.schema)
    return file


def arrow_blocks(path: Path) -> Iterator[Block]:
    """Each record batch as a block."""
    first, before = 0, 0.0
    with open_arrow(path) as file:
        for batch, _, after in file.batches():
            seed = block_seed(batch.num_rows, *(column.nbytes for column in batch.columns))
            yield Block(first, batch.num_rows, [ArrowRows.of(batch, copied=True)], seed, before, after)
            first, before = first + batch.num_rows, after
            del batch  # the next is read into its place


def _is_read_error(error: Exception) -> bool:
    """Whether pyarrow raises such an error for damaged files."""
    return isinstance(error, pa.ArrowException | OSError | ValueError | NotImplementedError | MemoryError)


def _array_is_sound(array: Any) -> bool:
    """Whether nothing in an array points outside its data; text that is not UTF-8 is allowed."""
    try:
        array.validate(full=True)
    except pa.ArrowInvalid as error:
        # Text that is not UTF-8 only spoils its own row, but ended the check.
        return "UTF8" in str(error) and _is_sound_but_for_text(array)
    return True


def _is_sound_but_for_text(array: Any) -> bool:
    """The same, without checking text."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _is_sound_but_for_text(array.storage)
    if pa.types.is_string(kind):
        array.view(pa.binary()).validate(full=True)
        return True
    if pa.types.is_large_string(kind):
        array.view(pa.large_binary()).validate(full=True)
        return True
    if pa.types.is_struct(kind):
        return all(_array_is_sound(array.field(i)) for i in range(kind.num_fields))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        offsets = array.offsets.to_numpy(zero_copy_only=False)
        inside = len(offsets) == 0 or (offsets[0] >= 0 and offsets[-1] <= len(array.values))
        return bool(inside and (np.diff(offsets) >= 0).all()) and _array_is_sound(array.values)
    return pa.types.is_fixed_size_list(kind) and _array_is_sound(array.values)


class ArrowOutput(TableOutput):
    """Writes an Arrow file again with some rows replaced, in the format of the source."""

    what = "an Arrow file"

    def __init__(self, source: Path, out: BinaryIO, added: tuple[str, ...]) -> None:
        super().__init__(source, out, added)
        self._dictionaries: dict[int, Any] = {}
        """By column, for files with a footer: an empty array with the dictionary that was written so far."""

    def _batch_writer(self) -> Generator[int, None, None]:
        with open_arrow(self._source) as file:
            options, schema, more = file.options(), self._edit.edit_schema(file.schema), {}
            if file.has_footer and file.metadata is not None:
                more = {"metadata": file.metadata}
            # To a Python file: into one of its own, pyarrow would still write when it is dropped unfinished.
            new = pa.ipc.new_file if file.has_footer else pa.ipc.new_stream
            writer = new(self._out, schema, options=options, **more)
            first = 0
            try:
                for batch, metadata, _ in file.batches():
                    stop = first + batch.num_rows
                    yield stop
                    self._write(writer, batch, metadata, first, file.has_footer)
                    first = stop
                    del batch  # the next is read into its place
            except Damage as damage:
                raise unwritable_error(self._source, str(damage)) from None
            writer.close()

    def _write(self, writer: Any, batch: Any, metadata: Any, first: int, has_footer: bool) -> None:
        """Write a record batch with its changes, unless all of its rows are dropped."""
        table = self._edit.edit_table(pa.Table.from_batches([batch]), first, self._rows)
        if batch.num_rows and not len(table):
            return
        columns = []
        for place, column in enumerate(table.columns):
            if has_footer and _has_dictionary(column.type):
                # A footer allows one dictionary for each column: that of earlier batches is extended.
                before = self._dictionaries.get(place)
                chunks = column.chunks if before is None else [before, *column.chunks]
                if chunks:
                    joined = pa.chunked_array(chunks, column.type).unify_dictionaries().combine_chunks()
                    column = joined if isinstance(joined, pa.ChunkedArray) else pa.chunked_array([joined])
                    self._dictionaries[place] = column.chunk(0).slice(0, 0)
            columns.append(column)
        # Usually one record batch, more if one array cannot hold it all.
        parts = pa.table(columns, schema=table.schema).combine_chunks().to_batches()
        for part in parts or [pa.RecordBatch.from_pylist([], schema=table.schema)]:
            writer.write_batch(part, metadata)


def _has_dictionary(kind: Any) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return _has_dictionary(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return True
    return any(_has_dictionary(kind.field(i).type) for i in range(kind.num_fields))


# pyarrow does not show the codec of a batch, which is in the header of its message. That is a flatbuffer
# (apache/arrow `format/Message.fbs`): tables whose first word says how far back the offsets of their fields are.

_HEADER, _COMPRESSION, _CODEC = 2, 3, 0
"""Field numbers: header of a message, compression of a record batch, codec of a compression."""


def _table_at(data: bytes, at: int) -> int:
    """Position of the table to which the word at a position leads."""
    return at + int(struct.unpack_from("<I", data, at)[0])


def _field_at(data: bytes, table: int, number: int) -> int:
    """Position of a field of a table; 0 if it has its default or is none."""
    offsets = table - int(struct.unpack_from("<i", data, table)[0])
    size = int(struct.unpack_from("<H", data, offsets)[0])
    entry = 4 + 2 * number
    inside = int(struct.unpack_from("<H", data, offsets + entry)[0]) if entry < size else 0
    return table + inside if inside else 0
