"""Arrow IPC files: streams of record batches, as `datasets` writes, and the format with a footer."""

from __future__ import annotations

import os
import struct
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from tito_audit.errors import StorageError
from tito_audit.storage import lazy_pyarrow as pa
from tito_audit.storage.remote import RemoteFile
from tito_audit.storage.row import seed_of
from tito_audit.storage.streams import Damaged
from tito_audit.storage.table_edit import TableEdit, TableOutput, unwritable
from tito_audit.storage.table_rows import ArrowRows, Block, first_line, refuse_same_names

_STREAM = b"\xff\xff\xff\xff"
_FILE = b"ARROW1"


def is_arrow(head: bytes) -> bool:
    """Whether a file that begins like this is Arrow IPC, of either format."""
    return head.startswith((_STREAM, _FILE))


class ArrowFile:
    """An Arrow IPC file, read one record batch at a time.

    It is not mapped into memory: if it shrank meanwhile, the system would kill the process.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._source = (
            pa.PythonFile(path.open("rb", 0)) if isinstance(path, RemoteFile) else pa.OSFile(os.fspath(path), "rb")
        )
        self.has_footer = self._source.read(len(_FILE)) == _FILE
        """Whether it is the format with a footer, else the stream format."""
        self._size = self._source.size()
        self._reader: Any = None
        """The reader of the format with a footer; None for a stream or if the footer cannot be read."""
        self._broken: str | None = None
        """Why the footer cannot be read."""
        if self.has_footer:
            try:
                self._reader = pa.ipc.open_file(self._source)
            except (pa.ArrowException, OSError, ValueError) as error:
                self._broken = f"the footer of the Arrow file cannot be read ({first_line(error)})"
        self.schema = self._reader.schema if self._reader is not None else self._stream().schema
        """The schema, with all metadata."""

    @property
    def metadata(self) -> Any:
        """The footer's own metadata; None if there is none."""
        return getattr(self._reader, "metadata", None)

    def options(self) -> Any:
        """The options of a writer that writes the same form, as its first record batch says.

        In the format with a footer, only the additions to a growing dictionary are written.
        """
        codec, version = None, pa.ipc.MetadataVersion.V5
        try:
            messages = pa.ipc.MessageReader.open_stream(self._at_start())
            message = next((each for each in messages if each.type == "record batch"), None)
            if message is not None:
                version, header = message.metadata_version, bytes(message.metadata)
                compression = _table(header, _table(header, _table(header, 0), _HEADER), _COMPRESSION)
                at = _field(header, compression, _CODEC) if compression else 0
                codec = ("lz4", "zstd")[header[at] if at else 0] if compression else None
        except (OSError, ValueError, struct.error, IndexError):
            pass  # an Arrow error is one of these; whoever reads the batch says it
        return pa.ipc.IpcWriteOptions(
            metadata_version=version, compression=codec, emit_dictionary_deltas=self.has_footer
        )

    def count(self) -> int:
        """The number of rows; an Arrow error if a record batch cannot be read."""
        return sum(batch[0].num_rows for batch in self._read())

    def batches(self) -> Iterator[tuple[Any, Any, float]]:
        """Each record batch, its metadata and the share of the file read up to its end; raises Damaged."""
        number, read = 0, self._read()
        while True:
            try:
                batch = next(read, None)
            except Exception as error:
                if not _is_of_arrow(error):
                    raise
                raise Damaged(
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
                raise Damaged(
                    f"record batch {number} of the Arrow file cannot be read (it points outside its data)"
                )
            yield batch
            batch = None  # the next is read into its place
            number += 1
        if self._broken is not None:
            raise Damaged(self._broken)

    def close(self) -> None:
        """Close the file; batches already read stay valid."""
        self._source.close()

    def __enter__(self) -> ArrowFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()

    def _read(self) -> Iterator[tuple[Any, Any, float]]:
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
            raise Damaged(
                f"the Arrow stream ends at byte {end:,}, but the file goes on to byte {self._size:,} with "
                "something that is not read"
            )

    @property
    def is_misread(self) -> bool:
        """Whether pyarrow would take compressed bytes for values, and end the process where they point outside.

        It does so with compressed record batches of version 4, which it writes where it is asked to.
        """
        try:
            first = pa.ipc.read_message(self._at_start())
        except (pa.ArrowException, OSError, ValueError, EOFError):
            return False  # whoever reads the batches says that they are damaged
        return first.metadata_version <= pa.ipc.MetadataVersion.V4 and self.options().compression is not None

    def _stream(self) -> Any:
        return pa.ipc.open_stream(self._at_start())

    def _at_start(self) -> Any:
        """The file, positioned at its first message: with a footer, behind the padded magic."""
        self._source.seek(8 if self.has_footer else 0)
        return self._source


def open_arrow(path: Path) -> ArrowFile:
    """The open file; StorageError if it cannot be opened, or if two of its columns have the same name."""
    if not path.is_file():
        raise StorageError(f"{path}: an Arrow file cannot be read from a pipe; save it to a file first.")
    try:
        file = ArrowFile(path)
    except Exception as error:
        if not _is_of_arrow(error):
            raise
        raise StorageError(
            f"{path}: an Arrow file whose schema cannot be read ({first_line(error)}).\n"
            "The copy is incomplete, or the writer was stopped as soon as it began; write it again."
        ) from None
    if file.is_misread:
        file.close()
        raise StorageError(
            f"{path}: compressed record batches of metadata version 4, whose values cannot be read reliably.\n"
            "Write the file again with version 5, the default of pyarrow, or without compression."
        )
    refuse_same_names(path, file.schema)
    return file


def blocks_of_arrow(path: Path) -> Iterator[Block]:
    """Each record batch."""
    first, before = 0, 0.0
    with open_arrow(path) as file:
        for batch, _, after in file.batches():
            seed = seed_of(batch.num_rows, *(column.nbytes for column in batch.columns))
            yield Block(first, batch.num_rows, [ArrowRows.of(batch, copied=True)], seed, before, after)
            first, before = first + batch.num_rows, after
            del batch  # the next is read into its place


def _is_of_arrow(error: Exception) -> bool:
    """Whether pyarrow raised this because the file is damaged."""
    return isinstance(error, pa.ArrowException | OSError | ValueError | NotImplementedError | MemoryError)


def _array_is_sound(array: Any) -> bool:
    """Whether nothing in an array points outside its data; text that is not UTF-8 does not count."""
    try:
        array.validate(full=True)
    except pa.ArrowInvalid as error:
        # The check may have failed at text that is not UTF-8, which only invalidates its own row.
        return "UTF8" in str(error) and _is_sound_but_for_text(array)
    return True


def _is_sound_but_for_text(array: Any) -> bool:
    """The same for an array that contains text that is not UTF-8."""
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
    """An Arrow file with some rows replaced, in the format of the source (stream, or with a footer)."""

    def __init__(self, source: Path, out: BinaryIO, added: tuple[str, ...]) -> None:
        super().__init__(source, out, TableEdit(source, "an Arrow file", added))
        self._dictionaries: dict[int, Any] = {}
        """By column: the dictionary written so far (format with a footer only), as an array without rows."""

    def _writing(self) -> Generator[int, None, None]:
        with open_arrow(self._source) as file:
            options, schema, more = file.options(), self._edit.schema(file.schema), {}
            if file.has_footer and file.metadata is not None:
                more = {"metadata": file.metadata}
            # A Python file: pyarrow would still write to one of its own when dropped unfinished.
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
            except Damaged as damage:
                raise unwritable(self._source, str(damage)) from None
            writer.close()

    def _write(self, writer: Any, batch: Any, metadata: Any, first: int, has_footer: bool) -> None:
        """Write a record batch with its changes, of which nothing is held afterwards."""
        table = self._edit.table(pa.Table.from_batches([batch]), first, self._rows)
        if len(table) or not batch.num_rows:
            columns = table.columns
            if has_footer:
                columns = [self._told_apart(place, column) for place, column in enumerate(columns)]
            # One record batch, or several if one array cannot hold it.
            parts = pa.table(columns, schema=table.schema).combine_chunks().to_batches()
            for part in parts or [pa.RecordBatch.from_pylist([], schema=table.schema)]:
                writer.write_batch(part, metadata)

    def _told_apart(self, place: int, column: Any) -> Any:
        """The column, its dictionary continued from earlier batches: the format with a footer allows only one."""
        if not _has_dictionary(column.type):
            return column
        before = self._dictionaries.get(place)
        chunks = column.chunks if before is None else [before, *column.chunks]
        if not chunks:
            return column
        column = pa.chunked_array(chunks, column.type).unify_dictionaries().combine_chunks()
        column = column if isinstance(column, pa.ChunkedArray) else pa.chunked_array([column])
        self._dictionaries[place] = column.chunk(0).slice(0, 0)
        return column


def _has_dictionary(kind: Any) -> bool:
    """Whether a type, or a part of it, is dictionary-encoded."""
    if isinstance(kind, pa.BaseExtensionType):
        return _has_dictionary(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return True
    return any(_has_dictionary(kind.field(i).type) for i in range(kind.num_fields))


# A message has a header: a flatbuffer (apache/arrow `format/Message.fbs`), tables whose first word says how far
# back the offsets of their fields are. pyarrow reads it, but does not show the codec of a batch.

_HEADER, _COMPRESSION, _CODEC = 2, 3, 0
"""Field numbers: the header of a message; compression of a record batch; codec of a compression."""


def _table(data: bytes, table: int, field: int | None = None) -> int:
    """The position of the table in a field, or of the one that `table` points to if no field is given; 0: none."""
    at = table if field is None else _field(data, table, field)
    if field is not None and not at:
        return 0
    return at + int(struct.unpack_from("<I", data, at)[0])


def _field(data: bytes, table: int, number: int) -> int:
    """The position of a field of a table; 0 if it has its default."""
    offsets = table - int(struct.unpack_from("<i", data, table)[0])
    size = int(struct.unpack_from("<H", data, offsets)[0])
    entry = 4 + 2 * number
    inside = int(struct.unpack_from("<H", data, offsets + entry)[0]) if entry < size else 0
    return table + inside if inside else 0
