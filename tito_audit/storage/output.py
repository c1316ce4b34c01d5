"""open_output: a log of any kind written again under another name, row by row; and what a run leaves out of it."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import shutil
from array import array
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias, cast

import orjson

from tito_audit.errors import SetupError, StorageError
from tito_audit.format import Row
from tito_audit.record.edits import Edit, edits_between
from tito_audit.record.edits import Path as Steps
from tito_audit.record.json_text import rewrite_json
from tito_audit.record.rollout import Place
from tito_audit.storage import lazy_pyarrow as pa
from tito_audit.storage.arrow import ArrowOutput, open_arrow
from tito_audit.storage.atomic import Sealed, new_file
from tito_audit.storage.log import BINARY, TABLES, Kind, Log
from tito_audit.storage.parquet import ParquetOutput
from tito_audit.storage.row import RawRow, dump_row, json_form
from tito_audit.storage.streams import Compression
from tito_audit.storage.torch_files import TorchOutput
from tito_audit.terminal.words import listed

_Kind: TypeAlias = tuple[tuple[str, ...], int]
"""The places that change, and how many rows are written for one."""


class Changes:
    """The changed rows of one log, grouped by what changed in them; in little memory, whatever their number."""

    def __init__(self) -> None:
        self.notices: list[str] = []
        """What of the log's form could not be kept."""
        self._rows: dict[_Kind, array[int]] = {}

    def add(self, number: int, old: Row | None, rows: Sequence[Row]) -> None:
        """Note that a row is written as these rows: none if it is left out, several if it is forked."""
        edits = [edit for row in rows for edit in edits_between(old, row)] if old is not None else []
        kind = tuple(dict.fromkeys(place_of(edit.path) for edit in edits)), len(rows)
        spans = self._rows.setdefault(kind, array("q"))
        if spans and spans[-1] == number:
            spans[-1] = number + 1
        else:
            spans.extend((number, number + 1))

    def objects(self) -> Iterator[dict[str, Any]]:
        """Each kind of change for the JSON report: `{"columns", "into", "rows": [[start, stop], …]}`."""
        for (columns, into), spans in self._rows.items():
            pairs = [list(pair) for pair in zip(spans[::2], spans[1::2], strict=True)]
            yield {"columns": list(columns), "into": into, "rows": pairs}


def place_of(path: Steps) -> str:
    """`messages[].ids`: a path in a row as one name, the same for all entries of a list."""
    steps = ("[]" if isinstance(step, int) else f".{step}" for step in path)
    return "".join(steps).removeprefix(".")


_TEXT_SUFFIXES = {".jsonl", ".ndjson", ".json"}
_OWN = {".parquet", ".pt", ".arrow", ".arrows", ".feather"}
PACKED: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}
"""Compressions by the suffix that names them."""
_LINE_END = re.compile(rb"\r?\n")


class Output(Protocol):
    """A log that is being written again: one call per row of the log, in order, then `finish`."""

    changed: bool
    """Whether any row was changed, forked or dropped."""

    def keep(self, raw: RawRow) -> None:
        """Write the row as it was, byte for byte."""

    def replace(self, raw: RawRow, rows: Sequence[Row]) -> None:
        """Write these rows instead of one: none drops it, several are a fork.

        They share every unchanged object with `raw.value`.
        """

    def finish(self, log: Log) -> None:
        """Write what follows the last row; if this is not called, the file does not appear."""


@contextmanager
def open_output(
    log: Log,
    target: Path,
    *,
    overwrite: bool,
    added: tuple[str, ...] = ("tito_audit",),
    sealed: Sealed | None = None,
    changes: Changes | None = None,
) -> Iterator[Output]:
    """An output for the rows of a log that keeps its text; `target` appears when the block ends, or never.

    If no row changed, it is a copy of the log's file. The suffix of `target` decides how JSON is compressed;
    without one, or with that of the log, as the log is. `added` names columns that rows may have although the log
    does not. `sealed` is called once the file is complete, just before it appears. `changes` takes down which rows
    change. SetupError if the suffix is that of another kind; StorageError if the file cannot be written, or the
    log has a row that cannot be carried over.
    """
    if log.path.exists() and not log.path.is_file():
        raise SetupError(
            f"{log.path}: this is a pipe or a device, which cannot be repaired; save it to a file first."
        )
    if log.kind not in BINARY and not log.keep_text:
        raise ValueError("a log can only be written again when it was opened with keep_text")
    compression = _compression_for(log, target)
    with (
        new_file(target, overwrite=overwrite, source=log.path, sealed=sealed) as out,
        contextlib.ExitStack() as stack,
    ):
        inner: _Inner
        if log.kind in ("parquet", "arrow"):
            kind: type[ParquetOutput | ArrowOutput] = ParquetOutput if log.kind == "parquet" else ArrowOutput
            inner = table = kind(log.path, out, added)
            stack.callback(table.abandon)
        elif log.kind == "torch":
            inner = TorchOutput(log.path, out)
        else:
            inner = text = TextOutput(out, log.kind, compression)
            stack.callback(text.abandon)
        whole = _CheckedOutput(log, out, inner, changes or Changes(), may_copy=compression == log.compression)
        yield whole if log.inside is None else NestedOutput(whole, added if log.kind in TABLES else ())
        if not whole.finished:
            raise RuntimeError("an output has to be finished before its block ends")


class _Inner(Output, Protocol):
    """An output of one kind of file; one that is binary is not finished if no row was changed."""

    not_kept: Sequence[str]
    """What of the log's form the written file does not have, in words; known once it is complete."""


class _CheckedOutput:
    """An output that refuses to lose rows, and copies the file if nothing changed."""

    def __init__(self, log: Log, out: BinaryIO, inner: _Inner, changes: Changes, *, may_copy: bool) -> None:
        self.changed = False
        self.finished = False
        self._path = log.path
        self._out = out
        self._inner = inner
        self._changes = changes
        self._may_copy = may_copy
        self._text = log.kind not in BINARY
        self._state = _state(log.path)

    def keep(self, raw: RawRow) -> None:
        """Write the row as it was; StorageError if that is impossible."""
        self._refuse_lost(raw)
        if raw.value is None and raw.text is None and self._text:
            raise StorageError(
                f"{self._path}: row {raw.index} cannot be carried over, so its file was not written: {raw.error}."
            )
        self._inner.keep(raw)

    def replace(self, raw: RawRow, rows: Sequence[Row]) -> None:
        """Write rows instead of one; StorageError if the file cannot be read to its end."""
        self._refuse_lost(raw)
        if len(rows) == 1 and next(edits_between(raw.value, rows[0]), None) is None:
            self._inner.keep(raw)
            return
        self.changed = True
        self._changes.add(raw.index, raw.value, rows)
        self._inner.replace(raw, rows)

    def finish(self, log: Log) -> None:
        """Write the end; if nothing changed, copy the file."""
        if self.changed or self._text:
            self._inner.finish(log)
        # If the log was modified meanwhile, a text is no longer what was read.
        if not self.changed and (not self._text or (self._may_copy and self._state == _state(self._path))):
            self._out.seek(0)
            self._out.truncate()
            try:
                with self._path.open("rb") as source:
                    shutil.copyfileobj(source, self._out, 1 << 20)
            except OSError as error:
                raise StorageError(
                    f"{self._path}: it can no longer be read ({error.strerror or error}), so its file was not "
                    "written."
                ) from error
        elif self.changed and self._inner.not_kept:
            lost = listed(list(self._inner.not_kept))
            self._changes.notices.append(f"{self._path}: the repaired file is stored in another form: {lost}.")
        # The file may get its name much later; report a full disk now.
        self._out.flush()
        os.fsync(self._out.fileno())
        self.finished = True

    def _refuse_lost(self, raw: RawRow) -> None:
        if raw.lost:
            raise StorageError(
                f"{self._path}: {raw.error}; the output would lack the rows after it, so its file was not written."
                " Copy the log again, or write it again."
            )


def _state(path: Path) -> tuple[int, int]:
    about = path.stat()
    return about.st_size, about.st_mtime_ns


def _compression_for(log: Log, target: Path) -> Compression:
    """How to compress the target; SetupError if its suffix is that of another kind of file."""
    suffixes = [suffix.lower() for suffix in target.suffixes[-2:]]
    last = suffixes[-1] if suffixes else ""
    if log.kind in BINARY:
        name, own = ("Parquet", [".parquet"]) if log.kind == "parquet" else ("a Torch file", [".pt"])
        if log.kind == "arrow":
            with open_arrow(log.path) as file:
                footer = file.has_footer
            name, own = (
                "an Arrow file" if footer else "an Arrow stream",
                [".arrow", ".feather" if footer else ".arrows"],
            )
        if last in {*PACKED, *_TEXT_SUFFIXES, *_OWN} - {*own}:
            raise SetupError(
                f"{target}: {log.path} is {name} and stays {name}, but this suffix is of another kind; "
                f"name it {' or '.join(own)}."
            )
        return None
    if last in _OWN:
        raise SetupError(
            f"{target}: {log.path} is JSON and stays JSON, but this suffix is of another kind; "
            "name it .jsonl or .json."
        )
    if last == log.path.suffix.lower():
        return log.compression
    if last in PACKED:
        return PACKED[last]
    return None if last in _TEXT_SUFFIXES else log.compression


class TextOutput:
    """JSONL, JSON documents or an array, with the bytes between rows as in the log.

    A dropped row takes its lead with it; the first row written gets the lead of the log's first row.
    """

    def __init__(self, out: BinaryIO, kind: Kind, compression: Compression) -> None:
        self.changed = False
        self.not_kept: Sequence[str] = ()
        self._kind = kind
        self._compression = compression
        self._out = Compressor(out, compression)
        self._first: bytes | None = None
        """The lead of the log's first row, while every row so far was dropped."""
        self._written = False
        self._waiting: list[bytes] = []
        """Rows of a fork waiting for the next lead, which shows how rows are separated."""
        self._lead = b""
        """The lead of the last row written."""
        self._closing = b""
        """The lead of a dropped row after the end of an array: the bracket that closes it is there."""
        self._read: int | None = 0
        """Bytes of the log's text so far; None past a row that was not read."""

    def keep(self, raw: RawRow) -> None:
        self._count(raw)
        self._put(raw.lead, _text_of(raw))

    def replace(self, raw: RawRow, rows: Sequence[Row]) -> None:
        """Write these rows instead of one, each as its text with the differences edited in."""
        texts = []
        self._count(raw)
        for row in rows:
            edits = list(edits_between(raw.value, row))
            text = _text_of(raw)
            texts.append(rewrite_json(text.decode("utf-8"), edits).encode("utf-8") if edits else text)
        self.changed |= texts != [raw.text]
        if texts:
            self._put(raw.lead, texts[0])
            self._waiting += texts[1:]
        elif not self._written and self._first is None:
            self._first = raw.lead
        elif self._kind == "array" and b"]" in raw.lead:
            self._closing = raw.lead

    def finish(self, log: Log) -> None:
        """Write what follows the last row, and end the compressed stream."""
        tail = self._closing + log.tail
        self._separate(tail)
        if self._compression == log.compression == "gzip" and self._read is not None:
            with log.path.open("rb") as file:
                file.seek(-4, os.SEEK_END)
                # A member ends with the size of its own text.
                if int.from_bytes(file.read(4), "little") != (self._read + len(log.tail)) % (1 << 32):
                    self.not_kept = ("one gzip member, not several",)
        if not self._written and self._first is not None:
            # A dropped line takes its line end with it.
            tail = self._first + (tail if self._kind == "array" else _LINE_END.sub(b"", tail, count=1))
        self._out.write(tail)
        self._out.finish()

    def abandon(self) -> None:
        """Close the compressor; what it still writes is discarded."""
        self._out.abandon()

    def _count(self, raw: RawRow) -> None:
        if raw.text is None or self._read is None:
            self._read = None
        else:
            self._read += len(raw.lead) + len(raw.text)

    def _put(self, lead: bytes, text: bytes) -> None:
        self._separate(lead)
        if not self._written and self._first is not None:
            # If something follows the end of an array, the closing bracket is in the lead.
            lead = self._first + (lead if self._kind == "array" and b"]" in lead else b"")
        self._out.write(lead)
        self._out.write(text)
        self._written, self._lead = True, lead

    def _separate(self, following: bytes) -> None:
        """Write the rows that were held back, separated as in the file."""
        if not self._waiting:
            return
        if self._kind == "array":
            space = self._lead[self._lead.rfind(b"[") + 1 :]
            between = b"," + (space or (b" " if b'": ' in self._waiting[0] else b""))
            for lead in (following, self._lead):
                if lead.lstrip().startswith(b",") or lead.rstrip().endswith(b","):
                    between = lead
        else:
            end = _LINE_END.search(following) or _LINE_END.search(self._lead)
            between = end[0] if end else b"\n"
        for text in self._waiting:
            self._out.write(between)
            self._out.write(text)
        self._waiting.clear()


def _text_of(raw: RawRow) -> bytes:
    if raw.text is None:
        raise ValueError(f"row {raw.index} has no text: open the log with keep_text")
    return raw.text


class Compressor:
    """What is written to a file, compressed; the bytes depend on the input alone, and the file stays open."""

    def __init__(self, out: BinaryIO, compression: Compression) -> None:
        self._compression = compression
        self._sink = _Sink(out)
        self._stream: Any = out
        if compression == "gzip":
            self._stream = gzip.GzipFile("", "wb", 6, cast(BinaryIO, self._sink), mtime=0)
        elif compression == "zstd":
            self._stream = pa.CompressedOutputStream(pa.PythonFile(self._sink, "w"), "zstd")

    def write(self, data: bytes) -> None:
        self._stream.write(data)

    def finish(self) -> None:
        if self._compression is not None and not self._stream.closed:
            self._stream.close()

    def abandon(self) -> None:
        """Discard what is not written yet."""
        self._sink.closed = True
        self.finish()


class _Sink:
    """The file a compressor writes to, which it cannot close; writes after `close` are discarded."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self.closed = False

    def write(self, data: bytes) -> int:
        return len(data) if self.closed else self._out.write(data)

    def flush(self) -> None:
        pass

    def tell(self) -> int:
        return self._out.tell()

    def close(self) -> None:
        self.closed = True


_Change = tuple[Steps, Sequence[Row]]
"""A path, and the rows that replace the row there."""


class NestedOutput:
    """An output that takes nested rows and writes the rows of the file around them.

    A row that forks becomes several entries of the list it is in, or several rows of the file if it is in no list;
    a dropped row takes its entry or its row of the file with it.
    """

    def __init__(self, out: Output, moved: Sequence[str]) -> None:
        self.changed = False
        self._out = out
        self._moved = moved
        """New columns, which a table can take only at its top level, so they move to the row of the file."""
        self._outer: RawRow | None = None
        self._changes: list[_Change] = []

    def keep(self, raw: RawRow) -> None:
        self._go_to(raw)

    def replace(self, raw: RawRow, rows: Sequence[Row]) -> None:
        self._go_to(raw)
        if raw.within is not None:
            self._changes.append((raw.within.path, rows))

    def finish(self, log: Log) -> None:
        self._write()
        for empty in log.passed:
            self._out.keep(empty)
        self._out.finish(log)

    def _go_to(self, raw: RawRow) -> None:
        if raw.within is None:
            raise ValueError(f"row {raw.index} is in no wrapper")
        if raw.within.outer is self._outer:
            return
        self._write()
        for empty in raw.within.before:
            self._out.keep(empty)
        self._outer = raw.within.outer

    def _write(self) -> None:
        """Write the row of the file whose nested rows were all seen."""
        outer, changes = self._outer, self._changes
        self._outer, self._changes = None, []
        if outer is None:
            return
        if not changes:
            self._out.keep(outer)
            return
        rows = _with_moved(outer.value, changes, self._moved) if outer.value is not None else []
        self._out.replace(outer, rows)
        self.changed = self._out.changed


def _with_moved(outer: Row, changes: Sequence[_Change], moved: Sequence[str]) -> list[Row]:
    """The rows of the file, with the moved columns at their top level: as `{"rows": […]}` for rows from a list."""
    values: list[tuple[Steps, dict[str, Any]]] = []
    bare: list[_Change] = []
    for path, rows in changes:
        values += [(path, {name: row[name] for name in moved if name in row}) for row in rows]
        bare.append((path, [{name: row[name] for name in row if name not in moved} for row in rows]))
    whole: list[Row] = _rebuilt(outer, bare if moved else changes, 0)
    for name in moved:
        named = [(path, row[name]) for path, row in values if name in row]
        if not named:
            continue
        before = {"before": outer[name]} if outer.get(name) is not None else {}
        if any(isinstance(step, int) for step in named[0][0]):
            entries = [
                {"entry": next(step for step in path[::-1] if isinstance(step, int)), **value}
                for path, value in named
            ]
            whole = [{**row, name: {"rows": entries, **before}} for row in whole]
        else:
            whole = [{**row, name: {**value, **before}} for row, (_, value) in zip(whole, named, strict=True)]
    return whole


def _rebuilt(value: Any, changes: Sequence[_Change], depth: int) -> list[Any]:
    """What replaces a value `depth` steps down, given the changes below it: one value, several or none."""
    here = next((rows for path, rows in changes if len(path) == depth), None)
    if here is not None:
        return list(here)
    below: dict[Any, list[_Change]] = {}
    for change in changes:
        below.setdefault(change[0][depth], []).append(change)
    if isinstance(value, Mapping):
        ((key, inner),) = below.items()
        return [{**value, key: entry} for entry in _rebuilt(value[key], inner, depth + 1)]
    entries: list[Any] = []
    for index, entry in enumerate(value):
        entries += _rebuilt(entry, below[index], depth + 1) if index in below else [entry]
    return [entries]


class Quarantine:
    """One file for the rows of all logs of a run."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self.rows = 0

    @classmethod
    @contextmanager
    def opened(cls, path: Path, *, overwrite: bool, sealed: Sealed | None = None) -> Iterator[Quarantine]:
        """A quarantine whose file appears when the run is over; StorageError if it cannot be written."""
        with new_file(path, overwrite=overwrite, sealed=sealed) as out:
            yield cls(out)

    def add(self, raw: RawRow, place: Place, columns: Mapping[str, Mapping[str, Any]]) -> bytes:
        """Write a row as it was, plus one column; a row that is not an object goes into that column as `text`,
        and as `base64` if it is not UTF-8.

        Returns what was written.
        """
        (column, about), *_ = columns.items()
        about = {**about, "file": place.file, "row": place.row}
        if raw.value is None:
            data = raw.text or b""
            try:
                about["text"] = data.decode("utf-8")
            except UnicodeDecodeError:
                about |= {
                    "text": data.decode("utf-8", "backslashreplace"),
                    "base64": b64encode(data).decode("ascii"),
                }
            line = orjson.dumps({column: about})
        elif raw.text is not None:
            # A row of a document may span lines; here each row is one line.
            text = " ".join(raw.text.decode("utf-8").split("\n")).strip()
            line = rewrite_json(text, [Edit((column,), about)]).encode("utf-8")
        elif raw.of_text:
            # As Python writes it, NaN and lone surrogates included.
            line = json.dumps({**raw.value, column: about}, default=json_form).encode("ascii")
        else:
            line = dump_row({**raw.value, column: about})
        self.write(line)
        return line

    def write(self, line: bytes) -> None:
        """Write a row as `add` returned it."""
        self._out.write(line + b"\n")
        self.rows += 1
