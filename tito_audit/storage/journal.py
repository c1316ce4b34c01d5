"""Journal: a file of what a run has finished, which survives a kill, so that the next run goes on from there.

    {"tito_audit_journal": 2}
    5f0c11d2 {"part": "eNr..."}
    91b0a3c7 {"done": "scan", "log": "logs/a.jsonl", ...}

Each line is a checksum and a record in JSON. The parts of a log precede its `done`; parts without one are of a log
that was not finished. A last line that a kill cut off is dropped.
"""

from __future__ import annotations

import json
import os
import stat
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from tito_audit.errors import SetupError, StorageError
from tito_audit.storage._store import RemoteStatus
from tito_audit.storage.atomic import CONTENT_ETAG, content_status
from tito_audit.storage.remote import RemoteFile

VERSION = 2
SUFFIX = ".journal"
"""Suffix that makes a journal's name of a run's output."""
_HEAD_KEY = "tito_audit_journal"
_HEAD = json.dumps({_HEAD_KEY: VERSION}).encode() + b"\n"
_CHECKSUM_SIZE = 9
"""Characters before the JSON of a record: eight hexadecimal digits and a space."""


_BAD_RECORD = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Raised by records that no run wrote."""
_open_journals: list[BinaryIO] = []
"""The files of the journals that are open in this process."""

Stamp: TypeAlias = tuple[int, int, str | None]
"""Size and modification time of a file, and the etag of a remote one."""
FileStatus: TypeAlias = os.stat_result | RemoteStatus
"""The status of a file on disk, or in a store."""


@dataclass(frozen=True, slots=True)
class JournaledLog:
    """A log that a run finished."""

    state: Any
    """What identifies the log's content, such as size and times."""
    decided: Mapping[str, str]
    """Hashes of what decided the result besides the log, by name."""
    more: Mapping[str, Any]
    """What else was recorded with it."""
    start: int
    end: int
    """Bytes of the journal between which its parts are."""


class Journal:
    """The records of a journal, to which a run adds more; one process at a time may open it.

    SetupError if the file is no journal, damaged, of another version or in use; StorageError if it cannot be
    written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._finished_logs: dict[tuple[str, str], JournaledLog] = {}
        self._written: dict[str, list[tuple[Stamp, int]]] = {}
        """By file: its stamps as they were written, each with the offset of its record."""
        self._end = self._start = 0
        self._synced = time.monotonic()
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        except ValueError:
            raise SetupError(f"{path}: no file can have this name; name another file for the journal.") from None
        except OSError as error:
            raise _unwritable_error(path, error) from None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise SetupError(f"{path}: this is no file on disk, and a journal is kept in one; name another file.")
        self._file = os.fdopen(fd, "r+b")
        _open_journals.append(self._file)
        try:
            import fcntl

            # It ends with this process in any case, and its children do not inherit it.
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            self.close()
            raise SetupError(
                f"{path}: another run is using this journal.\nWait until it ends, or name another journal."
            ) from None
        except (ImportError, OSError):
            pass  # Windows, or a file system without locks
        try:
            self._read()
        except OSError as error:
            self.close()
            raise _unwritable_error(path, error) from None
        except BaseException:
            self.close()
            raise

    def find_finished(self, kind: str, log: str) -> JournaledLog | None:
        """A log as a run of this kind finished it last; None if none did."""
        return self._finished_logs.get((kind, log))

    def read_parts(self, log: JournaledLog) -> Iterator[Any]:
        """The parts of a log in order, read from the file as they are needed."""
        at = log.start
        while at < log.end:
            with self.checking_records(log):
                self._file.seek(at)
                line = self._file.readline()
                part = json.loads(line[_CHECKSUM_SIZE:])["part"]
            at += len(line)
            yield part

    @contextmanager
    def checking_records(self, log: JournaledLog) -> Iterator[None]:
        """A block that uses records of a log; SetupError if no run can have written them."""
        try:
            yield
        except _BAD_RECORD as error:
            raise self._damage_error(log.start) from error

    def add_part(self, part: Any) -> None:
        """Record a part of the current log."""
        self._append({"part": part})

    def begin_log(self) -> None:
        """Make the next log the current one, without parts."""
        self._start = self._end

    def finish_log(self, kind: str, log: str, state: Any, decided: Mapping[str, str], **more: Any) -> None:
        """Record the current log as finished, with the parts since `begin_log`."""
        end = self._end
        record = {"done": kind, "log": log, "state": state, "decided": decided, "said": more, "start": self._start}
        self._append(record)
        self._finished_logs[kind, log] = JournaledLog(state, decided, more, self._start, end)
        self._start = self._end
        if time.monotonic() - self._synced > 1.0:  # a kill loses nothing, a power failure at most a second
            self.sync()

    def record_written(self, target: Path, status: FileStatus) -> None:
        """Record a complete file that gets its name next; the record is on disk when this returns.

        A remote file is recorded by its content, and again by its etag once it is uploaded.
        """
        stamp = _stamp(status)
        self._written.setdefault(str(target), []).append((stamp, self._end))
        self._append({"wrote": str(target), "stamp": stamp})
        self.sync()

    def is_unchanged_output(self, target: Path) -> bool:
        """Whether the file is unchanged since a run with this journal wrote it."""
        stamps = [stamp for stamp, _ in self._written.get(str(target), ())]
        now = _file_stamp(target) if stamps else None
        if now is None or now in stamps:
            return now is not None
        # A run that was killed right after an upload has recorded only the content.
        contents = [stamp for stamp in stamps if stamp[0] == now[0] and str(stamp[2]).startswith(CONTENT_ETAG)]
        return bool(contents) and _stamp(content_status(target)) in contents

    def is_output_of(self, target: Path, log: JournaledLog) -> bool:
        """Whether the file is unchanged since it was written for this log, after its parts."""
        written = self._written.get(str(target))
        if not written:
            return False
        stamp, at = written[-1]
        return at >= log.end and stamp == _file_stamp(target)

    def sync(self) -> None:
        """Flush all records to disk."""
        with suppress(OSError):  # not every file system can
            os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def close(self) -> None:
        """Close the file and drop its lock; closing twice is fine."""
        if self._file in _open_journals:
            _open_journals.remove(self._file)
            self.sync()
            with suppress(OSError):  # the record that could not be written was reported
                self._file.close()

    def _read(self) -> None:
        """Load all records but parts, and cut off parts of an unfinished log; start a file that is empty."""
        self._file.seek(0)
        head = self._file.readline(len(_HEAD) + 64)
        if not _HEAD.startswith(head):
            version = None
            with suppress(ValueError, AttributeError):
                version = json.loads(head).get(_HEAD_KEY)
            if version is None:
                raise SetupError(f"{self.path}: this file is not a journal of tito-audit; name another file.")
            raise SetupError(
                f"{self.path}: this journal has version {version}, and this tito-audit writes version {VERSION}.\n"
                "Delete it to start over, or resume with the tito-audit that wrote it."
            )
        if head != _HEAD:  # the file is empty, or a kill cut off its first line
            self._file.seek(0)
            self._file.truncate()
            self._write(_HEAD)
            return
        self._end = at = len(head)
        for line in self._file:
            if not line.endswith(b"\n"):
                break  # a kill cut it off
            text = line[_CHECKSUM_SIZE:-1]
            if line[:_CHECKSUM_SIZE] != _checksum(text):
                raise self._damage_error(at)
            if not text.startswith(b'{"part"'):
                try:
                    record = json.loads(text)
                    if "wrote" in record:
                        size, changed, tag = record["stamp"]
                        target = _require_text(record["wrote"])
                        self._written.setdefault(target, []).append(((size, changed, tag), at))
                    else:
                        start = record["start"]
                        if type(start) is not int or not len(_HEAD) <= start <= at:
                            raise self._damage_error(at)
                        log = _require_text(record["done"]), _require_text(record["log"])
                        decided, more = dict(record["decided"]), dict(record["said"])
                        self._finished_logs[log] = JournaledLog(record["state"], decided, more, start, at)
                except _BAD_RECORD as error:
                    raise self._damage_error(at) from error
                self._end = at + len(line)
            at += len(line)
        self._file.seek(self._end)
        self._file.truncate()

    def _damage_error(self, at: int) -> SetupError:
        return SetupError(
            f"{self.path}: the journal is damaged at byte {at:,}, so none of it can be trusted.\n"
            "Delete it to start over."
        )

    def _append(self, record: Mapping[str, Any]) -> None:
        # `item` makes a plain number of a numpy scalar.
        text = json.dumps(record, separators=(",", ":"), default=methodcaller("item")).encode("ascii")
        self._write(_checksum(text) + text + b"\n")

    def _write(self, line: bytes) -> None:
        try:
            self._file.seek(self._end)
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise _unwritable_error(self.path, error) from None
        self._end += len(line)


def is_open_journal(path: Path) -> bool:
    """Whether a file is an open journal of this process. Opening and closing it again would drop the lock."""
    if isinstance(path, RemoteFile):
        return False
    with suppress(OSError):
        return any(os.path.samestat(os.fstat(file.fileno()), path.stat()) for file in _open_journals)
    return False


def _require_text(value: object) -> str:
    """The value, if it is text; else TypeError."""
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _checksum(text: bytes) -> bytes:
    return b"%08x " % zlib.crc32(text)


def _stamp(status: FileStatus) -> Stamp:
    return status.st_size, status.st_mtime_ns, getattr(status, "etag", None)


def _file_stamp(file: Path) -> Stamp | None:
    try:
        return _stamp(file.stat())
    except OSError:
        return None


def _unwritable_error(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{path}: the journal cannot be written ({error.strerror or error}); name a file that can be written."
    )
