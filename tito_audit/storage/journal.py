"""Journal: what a run has finished, in a file that survives a kill, so that the next run does not do it again.

    {"tito_audit_journal": 2}
    5f0c11d2 {"part": "eNr..."}
    91b0a3c7 {"done": "scan", "log": "logs/a.jsonl", ...}

One record a line, with a checksum. The parts of a log come before its `done`; a part without one belongs to a log
that was not finished. A last line that a kill cut off is dropped. It holds JSON, never pickles.
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
from tito_audit.storage.remote import RemoteFile
from tito_audit.storage.remote_output import CONTENT, content_status

VERSION = 2
SUFFIX = ".journal"
"""What is added to the name of a run's output for its journal."""
_NAME = "tito_audit_journal"
_HEAD = json.dumps({_NAME: VERSION}).encode() + b"\n"
_CHECKSUM = 9
"""Characters before the JSON of a record: eight hexadecimal digits and a space."""


_NOT_OURS = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading a record raises that no run wrote."""
_opened: list[BinaryIO] = []
"""The files of the journals that are open in this process."""

Stamp: TypeAlias = tuple[int, int, str | None]
"""Size, modification time and, of a remote file, its version."""
Status: TypeAlias = os.stat_result | RemoteStatus
"""What the system or a store says about a file."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A log that a run finished."""

    state: Any
    """What the log was: its size and times."""
    decided: Mapping[str, str]
    """What decided the result besides the log, by name, as hashes."""
    more: Mapping[str, Any]
    """What else was recorded when it was finished."""
    start: int
    end: int
    """Where its parts are."""


class Journal:
    """The records of a journal, and the file that takes more; one process at a time may open it.

    SetupError if the file is not a journal, is damaged, is of another version or is in use; StorageError if it
    cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._finished: dict[tuple[str, str], Finished] = {}
        self._written: dict[str, list[tuple[Stamp, int]]] = {}
        """By file: its stamps as written, and where each record is."""
        self._end = self._start = 0
        self._synced = time.monotonic()
        self._file = open(_descriptor(path), "r+b")  # noqa: SIM115 - open until `close`
        _opened.append(self._file)
        try:
            self._lock()
            self._read()
        except OSError as error:
            self.close()
            raise _unwritable(path, error) from None
        except BaseException:
            self.close()
            raise

    def finished(self, kind: str, log: str) -> Finished | None:
        """The log as a run of this kind finished it last; None if none did."""
        return self._finished.get((kind, log))

    def parts(self, finished: Finished) -> Iterator[Any]:
        """The parts recorded for a log, in order; read from the file as they are needed."""
        at = finished.start
        while at < finished.end:
            with self.reading(finished):
                self._file.seek(at)
                line = self._file.readline()
                part = json.loads(line[_CHECKSUM:])["part"]
            at += len(line)
            yield part

    @contextmanager
    def reading(self, finished: Finished) -> Iterator[None]:
        """A block that reads what was recorded of a log; SetupError if that is not what a run records."""
        try:
            yield
        except _NOT_OURS as error:
            raise self._damaged(finished.start) from error

    def add(self, part: Any) -> None:
        """Record a part of the log that is being worked on."""
        self._append({"part": part})

    def begin(self) -> None:
        """Start on a log: the parts that follow are its own."""
        self._start = self._end

    def finish(self, kind: str, log: str, state: Any, decided: Mapping[str, str], **more: Any) -> None:
        """Record that the log is finished, with the parts added since `begin`."""
        end = self._end
        record = {"done": kind, "log": log, "state": state, "decided": decided, "said": more, "start": self._start}
        self._append(record)
        self._finished[kind, log] = Finished(state, decided, more, self._start, end)
        self._start = self._end
        if time.monotonic() - self._synced > 1.0:  # a kill loses nothing, a power failure so many seconds
            self.sync()

    def wrote(self, target: Path, about: Status) -> None:
        """Record a file that is complete and gets its name next; on disk when this returns.

        A remote file is recorded by its content, and again by what the store calls it once it is there.
        """
        stamp = _stamp(about)
        self._written.setdefault(str(target), []).append((stamp, self._end))
        self._append({"wrote": str(target), "stamp": stamp})
        self.sync()

    def is_ours(self, target: Path) -> bool:
        """Whether the file is unchanged since a run with this journal wrote it."""
        stamps = [stamp for stamp, _ in self._written.get(str(target), ())]
        now = _stamp_of(target) if stamps else None
        if now is None or now in stamps:
            return now is not None
        # A run that was killed when the store had just taken the file has recorded only its content.
        contents = [stamp for stamp in stamps if stamp[0] == now[0] and str(stamp[2]).startswith(CONTENT)]
        return bool(contents) and _stamp(content_status(target)) in contents

    def holds(self, target: Path, finished: Finished) -> bool:
        """Whether the file is unchanged and is what was written for the log when it was finished."""
        written = self._written.get(str(target))
        if not written:
            return False
        stamp, at = written[-1]
        return at >= finished.end and stamp == _stamp_of(target)

    def sync(self) -> None:
        """Flush every record to disk."""
        with suppress(OSError):  # not every file system can
            os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def close(self) -> None:
        """Close the file; it may be opened again."""
        if self._file in _opened:
            _opened.remove(self._file)
            self.sync()
            with suppress(OSError):  # of a record that could not be written, as was said
                self._file.close()

    def _lock(self) -> None:
        """Take the lock that is gone as soon as this process is, however it ends; its children do not hold it."""
        try:
            import fcntl
        except ImportError:  # Windows
            return
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise SetupError(
                f"{self.path}: another run is using this journal.\nWait until it ends, or name another journal."
            ) from None
        except OSError:
            return  # a file system without locks

    def _read(self) -> None:
        self._file.seek(0)
        head = self._file.readline(len(_HEAD) + 64)
        if not _HEAD.startswith(head):
            version = None
            with suppress(ValueError, AttributeError):
                version = json.loads(head).get(_NAME)
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
            text = line[_CHECKSUM:-1]
            if line[:_CHECKSUM] != _checksum(text):
                raise self._damaged(at)
            if not text.startswith(b'{"part"'):
                try:
                    self._take(json.loads(text), at)
                except _NOT_OURS as error:
                    raise self._damaged(at) from error
                self._end = at + len(line)
            at += len(line)
        self._file.seek(self._end)
        self._file.truncate()

    def _take(self, record: Mapping[str, Any], at: int) -> None:
        if "wrote" in record:
            size, changed, tag = record["stamp"]
            self._written.setdefault(_text(record["wrote"]), []).append(((size, changed, tag), at))
            return
        start = record["start"]
        if type(start) is not int or not len(_HEAD) <= start <= at:
            raise ValueError(start)
        finished = Finished(record["state"], dict(record["decided"]), dict(record["said"]), start, at)
        self._finished[_text(record["done"]), _text(record["log"])] = finished

    def _damaged(self, at: int) -> SetupError:
        return SetupError(
            f"{self.path}: the journal is damaged at byte {at:,}, so none of it can be trusted.\n"
            "Delete it to start over."
        )

    def _append(self, record: Mapping[str, Any]) -> None:
        # Numpy's scalars as plain numbers.
        text = json.dumps(record, separators=(",", ":"), default=methodcaller("item")).encode("ascii")
        self._write(_checksum(text) + text + b"\n")

    def _write(self, line: bytes) -> None:
        try:
            self._file.seek(self._end)
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise _unwritable(self.path, error) from None
        self._end += len(line)


def is_open(path: Path) -> bool:
    """Whether a file is a journal that is open in this process: to open it once more and close it would drop the
    lock of this process on it."""
    if isinstance(path, RemoteFile):
        return False
    with suppress(OSError):
        return any(os.path.samestat(os.fstat(file.fileno()), path.stat()) for file in _opened)
    return False


def _descriptor(path: Path) -> int:
    """The file, opened; StorageError if it cannot be, SetupError for what is no file on disk."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
    except ValueError:
        raise SetupError(f"{path}: no file can have this name; name another file for the journal.") from None
    except OSError as error:
        raise _unwritable(path, error) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise SetupError(f"{path}: this is no file on disk, and a journal is kept in one; name another file.")
    return fd


def _text(value: object) -> str:
    """A value that is text; TypeError if it is not."""
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _checksum(text: bytes) -> bytes:
    return b"%08x " % zlib.crc32(text)


def _stamp(about: Status) -> Stamp:
    return about.st_size, about.st_mtime_ns, getattr(about, "etag", None)


def _stamp_of(file: Path) -> Stamp | None:
    """The stamp of a file; None if there is none."""
    try:
        return _stamp(file.stat())
    except OSError:
        return None


def _unwritable(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{path}: the journal cannot be written ({error.strerror or error}); name a file that can be written."
    )
