"""How an Arrow IPC file was written, according to the headers of its messages.

A header is a flatbuffer (apache/arrow `format/Message.fbs`): tables whose first word says how far back the
offsets of their fields are. pyarrow reads it but does not expose these fields.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_HEADER, _LENGTH, _COMPRESSION, _CODEC = 2, 0, 3, 0
"""Field numbers: the header of a message; length and compression of a record batch; codec of a compression."""
_CODECS = ("lz4", "zstd")


@dataclass(frozen=True, slots=True)
class ArrowForm:
    """The options a writer needs to write the same form."""

    compression: str | None = None
    """How the buffers of record batches are compressed."""
    version: int = 4
    """The metadata version, as pyarrow counts."""

    def options(self, *, deltas: bool) -> Any:
        """Options for a pyarrow writer; with `deltas`, only the additions to a growing dictionary are written."""
        import pyarrow as pa

        return pa.ipc.IpcWriteOptions(
            metadata_version=pa.ipc.MetadataVersion(self.version),
            compression=self.compression,
            emit_dictionary_deltas=deltas,
        )


def form_of(source: Any) -> ArrowForm:
    """The form of the messages from here on, by the first record batch; the usual form if that cannot be read."""
    try:
        message = next(_record_batches(source), None)
    except (
        OSError,
        ValueError,
    ):  # an Arrow error is one of these; whoever reads the batch says that it is damaged
        message = None
    if message is None:
        return ArrowForm()
    return ArrowForm(_codec(bytes(message.metadata)), int(message.metadata_version))


def lengths_of(source: Any) -> list[int]:
    """The number of rows of each record batch from here on."""
    return [_rows(bytes(message.metadata)) for message in _record_batches(source)]


def _record_batches(source: Any) -> Iterator[Any]:
    import pyarrow as pa

    for message in pa.ipc.MessageReader.open_stream(source):
        if message.type == "record batch":
            yield message


def _codec(header: bytes) -> str | None:
    try:
        found = _table(header, _table(header, _table(header, 0), _HEADER), _COMPRESSION)
        if not found:
            return None
        at = _field(header, found, _CODEC)
        return _CODECS[header[at] if at else 0]
    except (struct.error, IndexError):
        return None


def _rows(header: bytes) -> int:
    try:
        at = _field(header, _table(header, _table(header, 0), _HEADER), _LENGTH)
        return int(struct.unpack_from("<q", header, at)[0]) if at else 0
    except struct.error:
        return 0


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
