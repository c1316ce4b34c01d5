"""new_file: atomic writes. A file appears under its name complete, or not at all."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import shutil
import signal
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from tito_audit.errors import StorageError
from tito_audit.signals import exit_by_signal
from tito_audit.storage.remote import RemoteFile, RemoteStatus
from tito_audit.storage.remote_output import RemoteDraft, content_status, exists_error, refuse_remote

Sealed = Callable[[Path, os.stat_result | RemoteStatus], None]
"""Called with the target of a complete file and what the system says about it, or its store."""

_BUFFER = 1 << 20
_HANDLES = 2
"""File descriptors that an unnamed file holds: itself and its folder."""
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EACCES}
"""Errors of file systems without hard links."""
_NO_NAME = {*_NO_LINKS, errno.ENOENT}
"""Errors of systems that cannot link an open file; ENOENT where there is no /proc."""


@contextmanager
def new_file(
    target: Path, *, overwrite: bool, source: Path | None = None, sealed: Sealed | None = None
) -> Iterator[BinaryIO]:
    """A file to write, renamed to `target` when the block ends and removed if it raises.

    `sealed` is called once the file is complete, just before it gets its name. A remote target is written to a
    temporary file, which is sent to its store when the block ends; `sealed` is called again once it is there.

    Raises StorageError before anything is written if `target` exists and must not be overwritten, is `source`
    under any name, or cannot be created; and later if the disk is full or `target` has appeared in the meantime.
    Symlinks are followed: the file they point to is replaced.
    """
    place = refuse_target(target, overwrite=overwrite, source=source)
    with contextlib.ExitStack() as stack:
        with _as_storage_errors(target):
            draft = stack.enter_context(_draft(place))
        out = io.BufferedWriter(_TargetFile(draft.fd, target, draft.path), _BUFFER)
        stack.callback(_close_quietly, out)
        yield cast(BinaryIO, out)
        out.flush()
        remote = place if isinstance(place, RemoteFile) else None
        if sealed is not None:
            sealed(target, os.fstat(draft.fd) if remote is None else content_status(draft.path))
        with _as_storage_errors(target):
            draft.publish(out, overwrite)
        if sealed is not None and remote is not None:
            sealed(target, remote.stat())


def draft_of(out: BinaryIO) -> Path:
    """The path at which a file from `new_file` can be read before it has its final name."""
    out.flush()
    raw = getattr(out, "raw", None)
    if not isinstance(raw, _TargetFile) or raw.path is None:
        raise ValueError("only a file that new_file gave can be read before it has its name")
    return raw.path


def refuse_target(target: Path, *, overwrite: bool, source: Path | None = None) -> Path:
    """The resolved path of `target` if a file may be written there; else StorageError."""
    if isinstance(target, RemoteFile):
        refuse_remote(target, overwrite=overwrite, source=source)
        return target
    place = Path(os.path.realpath(target))
    try:
        status = place.stat()
    except FileNotFoundError:
        if not place.parent.is_dir():
            raise StorageError(
                f"{target}: there is no folder {place.parent}, so nothing was written; create it first."
            ) from None
        return place
    except OSError as error:
        raise _write_error(target, error) from error
    if stat.S_ISDIR(status.st_mode):
        raise StorageError(f"{target}: this is a folder, so nothing was written; name a file in it.")
    local = source if not isinstance(source, RemoteFile) else None
    if local is not None and local.exists() and os.path.samestat(status, local.stat()):
        raise StorageError(
            f"{target}: this is the input itself, and the input is never written; name another file."
        )
    if not stat.S_ISREG(status.st_mode):
        raise StorageError(
            f"{target}: this is not a regular file, and only regular files can be written atomically; "
            "name another file."
        )
    if not overwrite:
        raise exists_error(target)
    return place


def allow_open_files(count: int) -> None:
    """Raise this process's limit of open files by what `count` unfinished files need, if the system allows it."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource  # not on Windows

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY:
            wanted = soft + _HANDLES * count
            wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextmanager
def _draft(place: Path) -> Iterator[_Unnamed | _Named | RemoteDraft]:
    """A file without its final name yet; removed afterwards unless it is published."""
    if isinstance(place, RemoteFile):
        with sigterm_raises():
            remote = RemoteDraft(place)
            try:
                yield remote
            finally:
                remote.remove()
        return
    if _Unnamed.possible(place):
        unnamed = _Unnamed(place)
        try:
            yield unnamed
        finally:
            os.close(unnamed.folder)
        return
    with _temporary(place) as named:
        yield named


@contextmanager
def _temporary(place: Path) -> Iterator[_Named]:
    """A temporary file next to the target; removed afterwards unless it is published."""
    with sigterm_raises():
        named = _Named(place)
        try:
            yield named
        finally:
            named.part.unlink(missing_ok=True)


class _Unnamed:
    """A file without a name (Linux): nothing is left of it even if the process is killed."""

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
        """A path to the file that only this process can use."""
        return Path(f"/proc/self/fd/{self.fd}")

    @classmethod
    def possible(cls, place: Path) -> bool:
        """Whether an unnamed file can be created in the folder and linked later; tried out, except the link."""
        if not hasattr(os, "O_TMPFILE"):
            return False
        try:
            trial = cls(place)
        except OSError:
            return False
        os.close(trial.folder)
        try:
            # The link itself is not tried: a run killed in between would leave a file behind.
            return os.path.exists(f"/proc/self/fd/{trial.fd}")  # noqa: PTH110  not a user's path
        finally:
            os.close(trial.fd)

    def publish(self, out: io.BufferedWriter[_TargetFile], overwrite: bool) -> None:
        """Give the file its name; FileExistsError when it is taken and may not be."""
        _sync(self.fd, self._place, overwrite)
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
        """Replace the file that has the name; for a moment both exist, each complete."""
        part = _part_name(self._place)
        self._link(part)
        try:
            os.replace(part, self._place.name, src_dir_fd=self.folder, dst_dir_fd=self.folder)
        except BaseException:
            os.unlink(part, dir_fd=self.folder)
            raise

    def _copy(self, overwrite: bool) -> None:
        """Fall back to a named temporary file, on systems that create unnamed files but cannot link them."""
        with _temporary(self._place) as named, open(self.fd, "rb", closefd=False) as source:
            copy = io.BufferedWriter(_TargetFile(named.fd, self._place), _BUFFER)
            source.seek(0)
            try:
                shutil.copyfileobj(source, copy, _BUFFER)
                copy.flush()
                _copy_times(self.fd, named.fd)
                named.publish(copy, overwrite)
            finally:
                _close_quietly(copy)

    def _link(self, name: str) -> None:
        """Give the file a free name in its folder."""
        # Python follows the link in /proc only if a folder is given.
        folder = self.folder
        os.link(f"/proc/self/fd/{self.fd}", name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=True)


class _Named:
    """A file next to the target, `.NAME.XXXX.part`, for systems without unnamed files."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self.part = place.with_name(_part_name(place))
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        self.fd = os.open(self.part, flags, 0o666)

    @property
    def path(self) -> Path:
        """The temporary name of the file."""
        return self.part

    def publish(self, out: io.BufferedWriter[_TargetFile], overwrite: bool) -> None:
        """Give the file its name; FileExistsError when it is taken and may not be."""
        _sync(self.fd, self._place, overwrite)
        out.close()
        if overwrite:
            self.part.replace(self._place)
        else:
            self._claim()
        _sync_folder(self._place.parent)

    def _claim(self) -> None:
        """Take the name only if it is free, atomically."""
        try:
            os.link(self.part, self._place)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # Without hard links, an empty file reserves the name until it is replaced.
            os.close(os.open(self._place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            self.part.replace(self._place)


class _TargetFile(io.FileIO):
    """A raw file whose write errors name the file and say what to do."""

    def __init__(self, fd: int, target: Path, path: Path | None = None) -> None:
        super().__init__(fd, "r+")
        self._target = target
        self.path = path
        """Where it can be read until it has its final name."""

    def write(self, data: Any, /) -> int:
        """The number of bytes written; StorageError if the disk takes no more."""
        try:
            return super().write(data) or 0
        except OSError as error:
            raise _write_error(self._target, error) from error


@contextmanager
def _as_storage_errors(target: Path) -> Iterator[None]:
    """Turn what the system refuses into a StorageError."""
    try:
        yield
    except FileExistsError:
        raise exists_error(target) from None
    except OSError as error:
        raise _write_error(target, error) from error


def _close_quietly(out: io.BufferedWriter[_TargetFile]) -> None:
    """Close and ignore errors: what is left in the buffer is not needed."""
    with contextlib.suppress(OSError, StorageError):
        out.close()


def _copy_times(source: int, target: int) -> None:
    """Give one open file the times of another, where the system can."""
    if os.utime in os.supports_fd:
        about = os.fstat(source)
        os.utime(target, ns=(about.st_atime_ns, about.st_mtime_ns))


def _sync(fd: int, place: Path, overwrite: bool) -> None:
    """Flush all bytes to disk and copy the permissions of the replaced file, if any."""
    if overwrite and os.chmod in os.supports_fd and place.exists():
        os.chmod(fd, stat.S_IMODE(place.stat().st_mode))
    os.fsync(fd)


def _sync_folder(folder: Path) -> None:
    """Flush the new name to disk, where the system supports it."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _part_name(place: Path) -> str:
    # Shortened so that the name stays within the limits of file systems.
    return f".{place.name[:40]}.{secrets.token_hex(4)}.part"


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Turn SIGTERM into an exception so that files are cleaned up, unless the program handles it itself."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    ):
        yield
        return
    signal.signal(signal.SIGTERM, exit_by_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _write_error(target: Path, error: OSError) -> StorageError:
    way_out = "free some space or name a file on another disk"
    if isinstance(target, RemoteFile):
        way_out = f"it is written to {tempfile.gettempdir()} first: free some space there, or set TMPDIR"
    elif error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        way_out = "name a file in a folder that can be written"
    return StorageError(
        f"{target}: the file cannot be written ({error.strerror or error}), so nothing was written; {way_out}."
    )
