"""open_output: a log of any kind written again under another name, row by row. Quarantine: the rows left out."""

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
from dataclasses import dataclass, field
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
from tito_audit.storage.atomic import OnDone, new_file
from tito_audit.storage.log import BINARY, TABLES, Kind, Log
from tito_audit.storage.parquet import ParquetOutput
from tito_audit.storage.row import RawRow, dump_row, json_default
from tito_audit.storage.streams import Compression
from tito_audit.storage.table_edit import FileOutput
from tito_audit.storage.torch_files import TorchOutput
from tito_audit.terminal.words import listed

_ChangeKind: TypeAlias = tuple[tuple[str, ...], int]
"""The paths that change in a row, and the number of rows that are written for it."""


class RowChanges:
    """The changed rows of one log, grouped by what changed in them; takes little memory for any number of rows."""

    def __init__(self) -> None:
        self.notices: list[str] = []
        """Sentences on what of the log's storage format was not kept."""
        self._rows: dict[_ChangeKind, array[int]] = {}

    def add(self, number: int, old: Row | None, rows: Sequence[Row]) -> None:
        """Add a row that is written as these rows: none drops it, several are a fork."""
        edits = [edit for row in rows for edit in edits_between(old, row)] if old is not None else []
        kind = tuple(dict.fromkeys(path_name(edit.path) for edit in edits)), len(rows)
        spans = self._rows.setdefault(kind, array("q"))
        if spans and spans[-1] == number:
            spans[-1] = number + 1
        else:
            spans.extend((number, number + 1))

    def as_objects(self) -> Iterator[dict[str, Any]]:
        """The changes by kind, for the JSON report: `{"columns", "into", "rows": [[start, stop], …]}`."""
        for (columns, into), spans in self._rows.items():
            pairs = [list(pair) for pair in zip(spans[::2], spans[1::2], strict=True)]
            yield {"columns": list(columns), "into": into, "rows": pairs}


def path_name(path: Steps) -> str:
    """A path as one name, the same for all entries of a list: `messages[].ids`."""
    steps = ("[]" if isinstance(step, int) else f".{step}" for step in path)
    return "".join(steps).removeprefix(".")


_TEXT_SUFFIXES = {".jsonl", ".ndjson", ".json"}
_BINARY_SUFFIXES = {".parquet", ".pt", ".arrow", ".arrows", ".feather"}
COMPRESSION_SUFFIXES: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}
"""Compressions by suffix."""
_LINE_END = re.compile(rb"\r?\n")


class Output(Protocol):
    """A log that is being written again: one call for each of its rows, in order, then `finish`."""

    changed: bool
    """Whether any row was changed, forked or dropped."""

    def keep(self, raw: RawRow) -> None:
        """Write the row as it is, byte for byte."""

    def replace(self, raw: RawRow, rows: Sequence[Row]) -> None:
        """Write these rows instead: none drops it, several fork it. They share unchanged parts of `raw.value`."""

    def finish(self, log: Log) -> None:
        """Write what follows the last row; without this call the file does not appear."""


@contextmanager
def open_output(
    log: Log,
    target: Path,
    *,
    overwrite: bool,
    added: tuple[str, ...] = ("tito_audit",),
    on_done: OnDone | None = None,
    changes: RowChanges | None = None,
) -> Iterator[Output]:
    """An output for the rows of a log that keeps its text; `target` appears when the block ends, or never.

    If no row changed, it is a copy of the log's file. The suffix of `target` decides how JSON is compressed;
    without one, or with that of the log, as the log is. `added` names columns that rows may have although the log
    does not. `on_done` is called once the file is complete, just before it appears. `changes` takes down which
    rows change. SetupError if the suffix is that of another kind; StorageError if the file cannot be written, or
    the log has a row that cannot be carried over.
    """
    if log.path.exists() and not log.path.is_file():
        raise SetupError(
            f"{log.path}: this is a pipe or a device, which cannot be repaired; save it to a file first."
        )
    if log.kind not in BINARY and not log.keep_text:
        raise ValueError("a log can only be written again when it was opened with keep_text")
    compression = _compression_for(log, target)
    with (
        new_file(target, overwrite=overwrite, source=log.path, on_done=on_done) as out,
        contextlib.ExitStack() as stack,
    ):
        inner: FileOutput
        if log.kind in ("parquet", "arrow"):
            inner = (ParquetOutput if log.kind == "parquet" else ArrowOutput)(log.path, out, added)
        elif log.kind == "torch":
            inner = TorchOutput(log.path, out)
        else:
            inner = TextOutput(out, log.kind, compression)
        stack.callback(inner.abandon)
        whole = _CheckedOutput(
            log.path, out, inner, changes or RowChanges(), log.kind not in BINARY, compression == log.compression
        )
        yield whole if log.row_path is None else NestedOutput(whole, added if log.kind in TABLES else ())
        if not whole.finished:
            raise RuntimeError("an output has to be finished before its block ends")


@dataclass
class _CheckedOutput:
    """An output that refuses to lose rows, and copies the log's file if no row changes."""

    path: Path
    out: BinaryIO
    inner: FileOutput
    changes: RowChanges
    is_text: bool
    may_copy: bool
    changed: bool = False
    finished: bool = False

    def __post_init__(self) -> None:
        self.stamp = _stamp(self.path)

    def keep(self, raw: RawRow) -> None:
        """Write the row as it is; StorageError if that is impossible."""
        self._refuse_lost(raw)
        if raw.value is None and raw.text is None and self.is_text:
            raise StorageError(
                f"{self.path}: row {raw.index} cannot be carried over, so its file was not written: {raw.error}."
            )
        self.inner.keep(raw)

    def replace(self, raw: RawRow, rows: Sequence[Row]) -> None:
        """Write rows instead of one; StorageError if the log cannot be read to its end."""
        self._refuse_lost(raw)
        if len(rows) == 1 and next(edits_between(raw.value, rows[0]), None) is None:
            self.inner.keep(raw)
            return
        self.changed = True
        self.changes.add(raw.index, raw.value, rows)
        self.inner.replace(raw, rows)

    def finish(self, log: Log) -> None:
        """Write the end, or copy the file if no row changed."""
        if self.changed or self.is_text:
            self.inner.finish(log)
        # A text that was modified meanwhile is no longer what was read: keep what was written.
        if not self.changed and (not self.is_text or (self.may_copy and self.stamp == _stamp(self.path))):
            self.out.seek(0)
            self.out.truncate()
            try:
                with self.path.open("rb") as source:
                    shutil.copyfileobj(source, self.out, 1 << 20)
            except OSError as error:
                raise StorageError(
                    f"{self.path}: it can no longer be read ({error.strerror or error}), so its file was not "
                    "written."
                ) from error
        elif self.changed and self.inner.lost_features:
            lost = listed(list(self.inner.lost_features))
            self.changes.notices.append(f"{self.path}: the repaired file is stored in another form: {lost}.")
        # The file may get its name much later; a full disk is reported now.
        self.out.flush()
        os.fsync(self.out.fileno())
        self.finished = True

    def _refuse_lost(self, raw: RawRow) -> None:
        if raw.lost:
            raise StorageError(
                f"{self.path}: {raw.error}; the output would lack the rows after it, so its file was not written."
                " Copy the log again, or write it again."
            )


def _stamp(path: Path) -> tuple[int, int]:
    about = path.stat()
    return about.st_size, about.st_mtime_ns


def _compression_for(log: Log, target: Path) -> Compression:
    """The compression of the target; SetupError if its suffix is of another kind of file."""
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
        if last in {*COMPRESSION_SUFFIXES, *_TEXT_SUFFIXES, *_BINARY_SUFFIXES} - {*own}:
            raise SetupError(
                f"{target}: {log.path} is {name} and stays {name}, but this suffix is of another kind; "
                f"name it {' or '.join(own)}."
            )
        return None
    if last in _BINARY_SUFFIXES:
        raise SetupError(
            f"{target}: {log.path} is JSON and stays JSON, but this suffix is of another kind; "
            "name it .jsonl or .json."
        )
    if last == log.path.suffix.lower():
        return log.compression
    if last in COMPRESSION_SUFFIXES:
        return COMPRESSION_SUFFIXES[last]
    return None if last in _TEXT_SUFFIXES else log.compression


class TextOutput(FileOutput):
    """Writes JSONL, documents or an array, with the bytes between rows as they are in the log.

    A dropped row takes its lead with it, but the first row that is written gets the lead of the log's first row.
    """

    def __init__(self, out: BinaryIO, kind: Kind, compression: Compression) -> None:
        self._kind = kind
        self._compression = compression
        self._out = Compressor(out, compression)
        self._first: bytes | None = None
        """The lead of the log's first row, if all rows so far were dropped; else None."""
        self._written = False
        self._waiting: list[bytes] = []
        """Further rows of a fork, which wait for the next lead: it shows what separates rows."""
        self._lead = b""
        """The lead of the row that was written last."""
        self._closing = b""
        """The lead of a dropped row that follows the array, as that has the array's closing bracket."""
        self._read: int | None = 0
        """Bytes of text in the log so far; None past a row without text."""

    def keep(self, raw: RawRow) -> None:
        assert raw.text is not None, "the log keeps its text"
        self._count_text(raw)
        self._write_row(raw.lead, raw.text)

    def replace(self, raw: RawRow, rows: Sequence[Row]) -> None:
        """Write these rows instead, each as the text of the row with the differences edited in."""
        texts, text = [], raw.text or b""
        self._count_text(raw)
        for row in rows:
            edits = list(edits_between(raw.value, row))
            texts.append(rewrite_json(text.decode("utf-8"), edits).encode("utf-8") if edits else text)
        self.changed |= texts != [raw.text]
        if texts:
            self._write_row(raw.lead, texts[0])
            self._waiting += texts[1:]
        elif not self._written and self._first is None:
            self._first = raw.lead
        elif self._kind == "array" and b"]" in raw.lead:
            self._closing = raw.lead

    def finish(self, log: Log) -> None:
        """Write what follows the last row, and the end of the compressed stream."""
        tail = self._closing + log.tail
        self._write_waiting(tail)
        if self._compression == log.compression == "gzip" and self._read is not None:
            with log.path.open("rb") as file:
                file.seek(-4, os.SEEK_END)
                # A gzip member ends with the size of its own text.
                if int.from_bytes(file.read(4), "little") != (self._read + len(log.tail)) % (1 << 32):
                    self.lost_features = ("one gzip member, not several",)
        if not self._written and self._first is not None:
            # A dropped line took its line end with it.
            tail = self._first + (tail if self._kind == "array" else _LINE_END.sub(b"", tail, count=1))
        self._out.write(tail)
        self._out.finish()

    def abandon(self) -> None:
        self._out.abandon()

    def _count_text(self, raw: RawRow) -> None:
        if raw.text is None or self._read is None:
            self._read = None
        else:
            self._read += len(raw.lead) + len(raw.text)

    def _write_row(self, lead: bytes, text: bytes) -> None:
        self._write_waiting(lead)
        if not self._written and self._first is not None:
            # The lead of what follows an array has its closing bracket.
            lead = self._first + (lead if self._kind == "array" and b"]" in lead else b"")
        self._out.write(lead)
        self._out.write(text)
        self._written, self._lead = True, lead

    def _write_waiting(self, following: bytes) -> None:
        """Write the waiting rows of a fork, separated as rows are in the log."""
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


class Compressor:
    """Compresses what is written to a file, with the same bytes for the same input; leaves the file open."""

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
        """Close the stream without writing more."""
        self._sink.closed = True
        self.finish()


@dataclass
class _Sink:
    """A file that a compressor cannot close; what it writes after its own `close` is discarded."""

    out: BinaryIO
    closed: bool = False

    def write(self, data: bytes) -> int:
        return len(data) if self.closed else self.out.write(data)

    def flush(self) -> None:
        pass

    def tell(self) -> int:
        return self.out.tell()

    def close(self) -> None:
        self.closed = True


_Change = tuple[Steps, Sequence[Row]]
"""The path of a nested row, and the rows that replace it."""


@dataclass
class NestedOutput:
    """An output for nested rows, which writes the rows of the file around them.

    A forked row becomes several entries of the list that it is in, or several rows of the file if it is in none.
    A dropped row is removed from its list, or with its row of the file.
    """

    out: Output
    moved: Sequence[str]
    """New columns that move to the top of the row of the file, as a table can take them only there."""
    changed: bool = False
    _outer: RawRow | None = None
    _changes: list[_Change] = field(default_factory=list)

    def keep(self, raw: RawRow) -> None:
        self._enter_outer(raw)

    def replace(self, raw: RawRow, rows: Sequence[Row]) -> None:
        path = self._enter_outer(raw)
        self._changes.append((path, rows))

    def finish(self, log: Log) -> None:
        self._write()
        for empty in log.rows_without:
            self.out.keep(empty)
        self.out.finish(log)

    def _enter_outer(self, raw: RawRow) -> Steps:
        """The path of a nested row, after the row of the file before is written, if it is the first of another."""
        assert raw.nesting is not None, "each row is in a wrapper"
        if raw.nesting.outer is not self._outer:
            self._write()
            for empty in raw.nesting.before:
                self.out.keep(empty)
            self._outer = raw.nesting.outer
        return raw.nesting.path

    def _write(self) -> None:
        """Write the current row of the file, of which all nested rows are known."""
        outer, changes = self._outer, self._changes
        self._outer, self._changes = None, []
        if outer is None:
            return
        if not changes:
            self.out.keep(outer)
            return
        moved, stay = self.moved, changes
        if moved:
            stay = [
                (path, [{name: row[name] for name in row if name not in moved} for row in rows])
                for path, rows in changes
            ]
        top = outer.value or {}
        whole: list[Row] = _replace_nested(top, stay, 0) if top else []
        for name in moved:
            named = [(path, row[name]) for path, rows in changes for row in rows if name in row]
            if not named:
                continue
            before = {"before": top[name]} if top.get(name) is not None else {}
            if any(isinstance(step, int) for step in named[0][0]):  # a list of them, as the rows are in a list
                entries = [
                    {"entry": next(step for step in path[::-1] if isinstance(step, int)), **value}
                    for path, value in named
                ]
                whole = [{**row, name: {"rows": entries, **before}} for row in whole]
            else:
                whole = [{**row, name: {**value, **before}} for row, (_, value) in zip(whole, named, strict=True)]
        self.out.replace(outer, whole)
        self.changed = self.out.changed


def _replace_nested(value: Any, changes: Sequence[_Change], depth: int) -> list[Any]:
    """The values that replace one `depth` steps down, given the changes below it: one, several or none."""
    here = next((rows for path, rows in changes if len(path) == depth), None)
    if here is not None:
        return list(here)
    below: dict[Any, list[_Change]] = {}
    for change in changes:
        below.setdefault(change[0][depth], []).append(change)
    if isinstance(value, Mapping):
        ((key, inner),) = below.items()
        return [{**value, key: entry} for entry in _replace_nested(value[key], inner, depth + 1)]
    entries: list[Any] = []
    for index, entry in enumerate(value):
        entries += _replace_nested(entry, below[index], depth + 1) if index in below else [entry]
    return [entries]


@dataclass
class Quarantine:
    """A file for the rows that a run drops from its logs."""

    out: BinaryIO
    rows: int = 0

    @classmethod
    @contextmanager
    def open(cls, path: Path, *, overwrite: bool, on_done: OnDone | None = None) -> Iterator[Quarantine]:
        """A quarantine, whose file appears when the block ends; StorageError if it cannot be written."""
        with new_file(path, overwrite=overwrite, on_done=on_done) as out:
            yield cls(out)

    def add(self, raw: RawRow, place: Place, columns: Mapping[str, Mapping[str, Any]]) -> bytes:
        """Write a row with one more column, and return the line.

        A row that is no object goes into that column as `text`, and as `base64` if it is not UTF-8.
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
            # In a document a row may span lines.
            text = " ".join(raw.text.decode("utf-8").split("\n")).strip()
            line = rewrite_json(text, [Edit((column,), about)]).encode("utf-8")
        elif raw.accepts_new_keys:
            # Python writes NaN and lone surrogates too.
            line = json.dumps({**raw.value, column: about}, default=json_default).encode("ascii")
        else:
            line = dump_row({**raw.value, column: about})
        self.write(line)
        return line

    def write(self, line: bytes) -> None:
        """Write a line that `add` returned."""
        self.out.write(line + b"\n")
        self.rows += 1
