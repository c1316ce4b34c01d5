"""new_file: a file that appears under its name whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import shutil
import signal
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from tito_audit.errors import StorageError

_BUFFER = 1 << 20
_HANDLES = 2
"""What a file without a name holds open: itself and its folder."""
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EACCES}
"""What file systems say that know no second name for a file."""
_NO_NAME = {*_NO_LINKS, errno.ENOENT}
"""What systems say that cannot name an open file; the last where there is no /proc."""


@contextmanager
def new_file(target: Path, *, overwrite: bool, source: Path | None = None) -> Iterator[BinaryIO]:
    """A file to write, which takes the name `target` when the block ends and vanishes when it raises.

    StorageError, before anything is written, when `target` exists and may not be replaced, is `source`
    itself by whatever name, or cannot be made; and later when the disk is full or a file has appeared
    under the name meanwhile. A link is followed: the file that it names is replaced.
    """
    place = refuse_target(target, overwrite=overwrite, source=source)
    with contextlib.ExitStack() as stack:
        with _in_words(target):
            draft = stack.enter_context(_draft(place))
        out = io.BufferedWriter(_Told(draft.fd, target, draft.path), _BUFFER)
        stack.callback(_drop, out)
        yield cast(BinaryIO, out)
        out.flush()
        with _in_words(target):
            draft.publish(out, overwrite)


def draft_of(out: BinaryIO) -> Path:
    """Where the bytes of a file from `new_file` can be read while it has no name yet."""
    out.flush()
    raw = getattr(out, "raw", None)
    if not isinstance(raw, _Told) or raw.path is None:
        raise ValueError("only a file that new_file gave can be read before it has its name")
    return raw.path


def refuse_target(target: Path, *, overwrite: bool, source: Path | None = None) -> Path:
    """The place that `target` names, if a file may be written there; else StorageError."""
    place = Path(os.path.realpath(target))
    try:
        there = place.stat()
    except FileNotFoundError:
        if not place.parent.is_dir():
            raise StorageError(
                f"{target}: there is no folder {place.parent}, so nothing was written; make it first."
            ) from None
        return place
    except OSError as error:
        raise _cannot(target, error) from error
    if stat.S_ISDIR(there.st_mode):
        raise StorageError(f"{target}: this is a folder, so nothing was written; name a file in it.")
    if source is not None and source.exists() and os.path.samestat(there, source.stat()):
        raise StorageError(
            f"{target}: this is the input itself, and the input is never written; name another file."
        )
    if not stat.S_ISREG(there.st_mode):
        raise StorageError(
            f"{target}: this is no regular file, and only such a one can be written whole or not at all; "
            "name another file."
        )
    if not overwrite:
        raise _exists(target)
    return place


def allow_open_files(count: int) -> None:
    """Nothing; from then on this process may have so many unfinished files open, if the system lets it."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource  # not on Windows

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY:
            wanted = soft + _HANDLES * count
            wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextmanager
def _draft(place: Path) -> Iterator[_Unnamed | _Named]:
    """A file that has not got its name yet; what is not published is gone afterwards."""
    if _Unnamed.possible(place):
        unnamed = _Unnamed(place)
        try:
            yield unnamed
        finally:
            os.close(unnamed.folder)
        return
    with _part(place) as named:
        yield named


@contextmanager
def _part(place: Path) -> Iterator[_Named]:
    """A file beside the place, which is gone afterwards unless it has got the place's name."""
    with _ended_politely():
        named = _Named(place)
        try:
            yield named
        finally:
            named.part.unlink(missing_ok=True)


class _Unnamed:
    """A file without a name, of which nothing is left even when the process is killed (Linux)."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self.folder = os.open(place.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.fd = os.open(place.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)
        except OSError:
            os.close(self.folder)
            raise

    @property
    def path(self) -> Path:
        """A name of the file for this process alone."""
        return Path(f"/proc/self/fd/{self.fd}")

    @classmethod
    def possible(cls, place: Path) -> bool:
        """Whether a file can be made in the folder without a name and get one later, found by doing it."""
        if not hasattr(os, "O_TMPFILE"):
            return False
        try:
            trial = cls(place)
        except OSError:
            return False
        os.close(trial.folder)
        try:
            # Not tried out: a run that is killed in between would leave a name.
            return os.path.exists(f"/proc/self/fd/{trial.fd}")  # noqa: PTH110  no path of a person's
        finally:
            os.close(trial.fd)

    def publish(self, out: io.BufferedWriter[_Told], overwrite: bool) -> None:
        """Give the file its name; FileExistsError when it is taken and may not be."""
        _settle(self.fd, self._place, overwrite)
        try:
            self._link(self._place.name)
        except FileExistsError:
            if not overwrite:
                raise
            self._replace()
        except OSError as error:
            if error.errno not in _NO_NAME:
                raise
            self._copy(overwrite)
        _sync_folder(self._place.parent)
        out.close()

    def _replace(self) -> None:
        """Take the place of the file that has the name; for a moment there are both, and both are whole."""
        part = _part_name(self._place)
        self._link(part)
        try:
            os.replace(part, self._place.name, src_dir_fd=self.folder, dst_dir_fd=self.folder)
        except BaseException:
            os.unlink(part, dir_fd=self.folder)
            raise

    def _copy(self, overwrite: bool) -> None:
        """Go the other way after all, on a system that makes files without a name and cannot name them."""
        with _part(self._place) as named, open(self.fd, "rb", closefd=False) as source:
            copy = io.BufferedWriter(_Told(named.fd, self._place), _BUFFER)
            source.seek(0)
            try:
                shutil.copyfileobj(source, copy, _BUFFER)
                copy.flush()
                named.publish(copy, overwrite)
            finally:
                _drop(copy)

    def _link(self, name: str) -> None:
        """Enter the file into its folder under a name that is free."""
        # Only with a folder given does Python ask for the link in /proc to be followed.
        folder = self.folder
        os.link(f"/proc/self/fd/{self.fd}", name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=True)


class _Named:
    """A file beside the target, `.NAME.XXXX.part`, for systems that know no file without a name."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self.part = place.with_name(_part_name(place))
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        self.fd = os.open(self.part, flags, 0o666)

    @property
    def path(self) -> Path:
        """The name that the file has until then."""
        return self.part

    def publish(self, out: io.BufferedWriter[_Told], overwrite: bool) -> None:
        """Give the file its name; FileExistsError when it is taken and may not be."""
        _settle(self.fd, self._place, overwrite)
        out.close()
        if overwrite:
            self.part.replace(self._place)
        else:
            self._claim()
        _sync_folder(self._place.parent)

    def _claim(self) -> None:
        """Take the name only if it is free, in one step."""
        try:
            os.link(self.part, self._place)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # Without links an empty file holds the name for the moment until it is replaced.
            os.close(os.open(self._place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            self.part.replace(self._place)


class _Told(io.FileIO):
    """A raw file whose failures say which file and what to do."""

    def __init__(self, fd: int, target: Path, path: Path | None = None) -> None:
        super().__init__(fd, "r+")
        self._target = target
        self.path = path
        """Where it can be read until it has its name."""

    def write(self, data: Any, /) -> int:
        """How many bytes were taken; StorageError when the disk takes none."""
        try:
            return super().write(data) or 0
        except OSError as error:
            raise _cannot(self._target, error) from error


@contextmanager
def _in_words(target: Path) -> Iterator[None]:
    """What the system refuses, as a StorageError."""
    try:
        yield
    except FileExistsError:
        raise _exists(target) from None
    except OSError as error:
        raise _cannot(target, error) from error


def _drop(out: io.BufferedWriter[_Told]) -> None:
    """Close without a word: what is still in the buffer is not wanted any more."""
    with contextlib.suppress(OSError, StorageError):
        out.close()


def _settle(fd: int, place: Path, overwrite: bool) -> None:
    """All bytes on the disk, and the permissions of the file that is replaced, if any."""
    if overwrite and os.chmod in os.supports_fd and place.exists():
        os.chmod(fd, stat.S_IMODE(place.stat().st_mode))
    os.fsync(fd)


def _sync_folder(folder: Path) -> None:
    """The new name on the disk, where the system can promise it."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _part_name(place: Path) -> str:
    # Cut so that the longest name a file system takes still fits.
    return f".{place.name[:40]}.{secrets.token_hex(4)}.part"


@contextmanager
def _ended_politely() -> Iterator[None]:
    """SIGTERM as an exception, so that files are cleaned up, unless the program has its own way."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    ):
        yield
        return
    signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _exists(target: Path) -> StorageError:
    return StorageError(
        f"{target}: the file exists and is not replaced unasked, so nothing was written; "
        "name another file, or ask for it to be replaced (--force)."
    )


def _cannot(target: Path, error: OSError) -> StorageError:
    way_out = "free some space or name a file on another disk"
    if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        way_out = "name a file in a folder that can be written"
    return StorageError(
        f"{target}: the file cannot be written ({error.strerror or error}), and nothing was left of it; {way_out}."
    )
