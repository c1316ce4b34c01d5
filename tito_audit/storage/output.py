"""open_output: a log of any kind written again under another name."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from tito_audit.errors import SetupError, StorageError
from tito_audit.format import Row
from tito_audit.record.edits import edits_between
from tito_audit.storage.arrow import open_arrow
from tito_audit.storage.atomic import Sealed, new_file
from tito_audit.storage.changes import Changes
from tito_audit.storage.log import BINARY, TABLES, Log
from tito_audit.storage.output_contract import Output
from tito_audit.storage.row import RawRow
from tito_audit.storage.streams import Compression
from tito_audit.storage.text_output import TextOutput
from tito_audit.terminal.words import listed

_TEXT_SUFFIXES = {".jsonl", ".ndjson", ".json"}
_OWN = {".parquet", ".pt", ".arrow", ".arrows", ".feather"}
_PACKED: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}


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
        if log.kind == "parquet":
            from tito_audit.storage.parquet_output import ParquetOutput  # only where needed

            inner = table = ParquetOutput(log.path, out, added)
            stack.callback(table.abandon)
        elif log.kind == "arrow":
            from tito_audit.storage.arrow_output import ArrowOutput

            inner = ArrowOutput(log.path, out, added)
        elif log.kind == "torch":
            from tito_audit.storage.torch_output import TorchOutput

            inner = TorchOutput(log.path, out)
        else:
            inner = text = TextOutput(out, log.kind, compression)
            stack.callback(text.abandon)
        may_copy = log.kind not in BINARY and compression == log.compression
        whole = _CheckedOutput(log, out, inner, changes or Changes(), may_copy=may_copy)
        yield whole if log.inside is None else nested_output(whole, added if log.kind in TABLES else ())
        if not whole.finished:
            raise RuntimeError("an output has to be finished before its block ends")


def nested_output(whole: Output, moved: tuple[str, ...]) -> Output:
    """An output for rows nested in those of another; `moved` columns go into the row of the file."""
    from tito_audit.storage.inside_output import InsideOutput

    return InsideOutput(whole, moved)


class _Inner(Output, Protocol):
    """An output of one kind of file."""

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
        self._inner.finish(log)
        # If the log was modified meanwhile, the file is no longer what was read.
        if not self.changed and self._may_copy and self._state == _state(self._path):
            self._copy()
        elif self.changed and self._inner.not_kept:
            said = listed(list(self._inner.not_kept))
            self._changes.notices.append(f"{self._path}: the repaired file is stored in another form: {said}.")
        # The file may get its name much later; report a full disk now.
        self._out.flush()
        os.fsync(self._out.fileno())
        self.finished = True

    def _copy(self) -> None:
        self._out.seek(0)
        self._out.truncate()
        try:
            with self._path.open("rb") as source:
                shutil.copyfileobj(source, self._out, 1 << 20)
        except OSError as error:
            raise StorageError(
                f"{self._path}: it can no longer be read ({error.strerror or error}), so its file was not written."
            ) from error

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
        name, own = _own_suffixes(log)
        if last in {*_PACKED, *_TEXT_SUFFIXES, *_OWN} - {*own}:
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
    if last in _PACKED:
        return _PACKED[last]
    return None if last in _TEXT_SUFFIXES else log.compression


def _own_suffixes(log: Log) -> tuple[str, tuple[str, ...]]:
    """What a binary log is, in words, and the suffixes of such files."""
    if log.kind != "arrow":
        return ("Parquet", (".parquet",)) if log.kind == "parquet" else ("a Torch file", (".pt",))
    with open_arrow(log.path) as file:
        if file.has_footer:
            return "an Arrow file", (".arrow", ".feather")
    return "an Arrow stream", (".arrow", ".arrows")
