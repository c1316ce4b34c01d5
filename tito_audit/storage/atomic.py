"""Files that appear under their name complete or not at all, and which file a run writes for each log.

Files in buckets and on the hub are written to a temporary file, and uploaded once they are complete. A store shows
an object only once all of it has arrived, so nobody sees a part of it, even if the run is killed.
"""

from __future__ import annotations

import errno
import io
import os
import secrets
import signal
import stat
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from hashlib import file_digest
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import unquote

from tito_audit.errors import SetupError, StorageError
from tito_audit.signals import exit_by_signal
from tito_audit.storage._store import Missing, NameTaken, Refusal, RemoteStatus, with_retries
from tito_audit.storage.remote import RemoteFile, is_url, remote_file

OnDone = Callable[[Path, os.stat_result | RemoteStatus], None]
"""Called with the target of a complete file, and its status on disk or in its store."""

_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EACCES}
"""What file systems without hard links raise."""
_OPEN_FILES = Path("/proc/self/fd")
_BLOCK = 1 << 20
CONTENT_ETAG = "sha256:"
"""Prefix of the etags of `content_status`."""
_buckets: set[str] = set()
"""URLs of buckets that were found to exist."""
_SCHEME_ALIASES = {"s3a": "s3", "gcs": "gs", "abfs": "az"}


@contextmanager
def new_file(
    target: Path, *, overwrite: bool, source: Path | None = None, on_done: OnDone | None = None
) -> Iterator[BinaryIO]:
    """A file to write, renamed to `target` when the block ends and removed if it raises.

    `on_done` is called when the file is complete, just before it gets its name. A remote target is written to
    a temporary file and uploaded when the block ends; then `on_done` is called again.

    StorageError before anything is written if `target` exists and must not be overwritten, is `source` under any
    name, or cannot be created; later if the disk is full or `target` has appeared in the meantime. Symlinks are
    followed: the file that they lead to is replaced.
    """
    place = refuse_target(target, overwrite=overwrite, source=source)
    with sigterm_raises(), ExitStack() as stack:
        with _as_storage_errors(target):
            fd, part = _open_draft(place)
        if part.parent != _OPEN_FILES:  # else it has no name to remove
            stack.callback(part.unlink, missing_ok=True)
        out = io.BufferedWriter(_TargetFile(fd, target, part), 1 << 20)

        @stack.callback
        def close() -> None:  # without errors: what is still buffered is not needed
            with suppress(OSError, StorageError):
                out.close()

        yield cast(BinaryIO, out)
        out.flush()
        if isinstance(place, RemoteFile):
            if on_done is not None:
                on_done(target, content_status(part))
            with _as_storage_errors(target):
                upload(part, place, overwrite=overwrite)
            if on_done is not None:
                on_done(target, place.stat())
            return
        if on_done is not None:
            on_done(target, os.fstat(fd))
        with _as_storage_errors(target):
            if overwrite and place.exists():
                part.chmod(stat.S_IMODE(place.stat().st_mode))
            os.fsync(fd)
            out.close()
            if overwrite:
                part.replace(place)
            else:
                # Unlike a rename, a link fails if the name is taken.
                try:
                    os.link(part, place)
                except OSError as error:
                    if error.errno not in _NO_LINKS:
                        raise
                    # Without hard links, an empty file reserves the name until it is replaced.
                    os.close(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
                    part.replace(place)
            with suppress(OSError):  # sync the new name, where the system can
                folder = os.open(place.parent, os.O_RDONLY)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)


def draft_path(out: BinaryIO) -> Path:
    """Where a file from `new_file` can be read before it has its name."""
    out.flush()
    raw: _TargetFile = cast(Any, out).raw
    return raw.path


def refuse_target(target: Path, *, overwrite: bool, source: Path | None = None) -> Path:
    """The resolved path of `target` if a file may be written there; else StorageError."""
    if isinstance(target, RemoteFile):
        refuse_remote_target(target, overwrite=overwrite, source=source)
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
        raise input_error(target)
    if not stat.S_ISREG(status.st_mode):
        raise StorageError(
            f"{target}: this is not a regular file, and only regular files can be written atomically; "
            "name another file."
        )
    if not overwrite:
        raise exists_error(target)
    return place


def raise_open_file_limit(count: int) -> None:
    """Raise this process's limit of open files by `count`, as far as the system allows it."""
    with suppress(ImportError, OSError, ValueError):
        import resource  # not on Windows

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY:
            wanted = soft + count
            wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _open_draft(place: Path) -> tuple[int, Path]:
    """A new file beside the target as descriptor and path, with the permissions of the file that it replaces.

    Its name is cut to stay within the limits of file systems. For a remote target it is a temporary file, without
    a name where `/proc` shows open files: a kill leaves nothing behind.
    """
    if isinstance(place, RemoteFile):
        fd, name = tempfile.mkstemp(prefix="tito-audit-")
        if not _OPEN_FILES.is_dir():
            return fd, Path(name)
        Path(name).unlink()
        return fd, _OPEN_FILES / str(fd)
    mode = stat.S_IMODE(place.stat().st_mode) | stat.S_IRUSR | stat.S_IWUSR if place.exists() else 0o666
    part = place.with_name(f".{place.name[:40]}.{secrets.token_hex(4)}.part")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    return os.open(part, flags, mode), part


class _TargetFile(io.FileIO):
    """A raw file whose write errors name the target and say what to do."""

    def __init__(self, fd: int, target: Path, path: Path) -> None:
        super().__init__(fd, "r+")
        self._target = target
        self.path = path
        """Where it can be read until it has its name."""

    def write(self, data: Any, /) -> int:
        """Number of bytes written; StorageError if the disk takes no more."""
        try:
            return super().write(data) or 0
        except OSError as error:
            raise _write_error(self._target, error) from error


@contextmanager
def _as_storage_errors(target: Path) -> Iterator[None]:
    """A block in which each OSError becomes a StorageError about the target."""
    try:
        yield
    except FileExistsError:
        raise exists_error(target) from None
    except OSError as error:
        raise _write_error(target, error) from error


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """A block in which SIGTERM raises, so that files are cleaned up, unless the program handles the signal."""
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


def output_path(name: str | Path) -> Path:
    """The path of an output, whose name may be a URL."""
    if isinstance(name, RemoteFile):
        return name
    return RemoteFile(str(RemoteFile(str(name)))) if is_url(str(name)) else Path(name)


def path_identity(path: str | Path) -> str:
    """A text that all names of one file share, whatever links, mounts and spellings lead to it on disk, or however
    its URL is spelled."""
    if isinstance(path, RemoteFile) or is_url(str(path)):
        return normalize_url(path.url if isinstance(path, RemoteFile) else str(path))
    with suppress(OSError, ValueError):
        status = os.stat(path)  # noqa: PTH116  names that cannot be paths raise ValueError
        if stat.S_ISREG(status.st_mode):
            return f"file {status.st_ino} of {status.st_dev}"
    return os.path.realpath(path)


def normalize_url(url: str) -> str:
    """A URL in one spelling: aliases of schemes, doubled slashes and the hub's `@main` are gone."""
    scheme, _, rest = url.partition("://")
    scheme = _SCHEME_ALIASES.get(scheme.lower(), scheme.lower())
    if scheme in ("http", "https"):
        return url
    parts = [part for part in rest.split("/") if part not in ("", ".")]
    if scheme == "hf":
        at = 2 if parts[:1] == ["datasets"] else 1
        parts[at : at + 1] = [unquote(part).removesuffix("@main") for part in parts[at : at + 1]]
    return f"{scheme}://{'/'.join(parts)}"


def is_folder(path: Path) -> bool:
    """Whether a path is a folder on disk, or a URL has files below it."""
    if not isinstance(path, RemoteFile):
        # Unlike pathlib, False for names that are too long or link to themselves; the error comes later.
        return os.path.isdir(path)  # noqa: PTH112
    try:
        return path.is_dir()
    except Missing:
        return False


def refuse_remote_target(target: RemoteFile, *, overwrite: bool, source: Path | None = None) -> None:
    """StorageError if the target exists, is the input, or is in no bucket that exists."""
    if source is not None and path_identity(target) == path_identity(source):
        raise input_error(target)
    refuse_read_only_store(target)
    scheme, _, rest = normalize_url(target.url).partition("://")
    parts, depth = rest.split("/"), 3 if scheme == "hf" else 1
    if len(parts) <= depth:
        raise StorageError(f"{target}: this names no file. Add a name after it.")
    if _exists(target):
        if not overwrite:
            raise exists_error(target)
        return
    bucket = RemoteFile(f"{scheme}://{'/'.join(parts[:depth])}")
    if bucket.url in _buckets:
        return
    try:
        there = bucket.is_dir()
    except Missing as error:
        raise StorageError(f"{target}: {error}") from None
    if not there:
        raise StorageError(f"{target}: there is no {bucket}, so nothing was written; create it first.")
    _buckets.add(bucket.url)


def refuse_read_only_store(target: RemoteFile) -> None:
    """StorageError for URLs that are only read: of web servers, and of models and spaces on the hub."""
    url = normalize_url(target.url)
    if url.lower().startswith(("http://", "https://")):
        raise StorageError(
            f"{target}: a web server is only read. Write to a bucket (s3://, gs://, az://), to hf://datasets/, or "
            "to disk."
        )
    if url.startswith("hf://") and not url.startswith("hf://datasets/"):
        raise StorageError(
            f"{target}: on the hub only data sets are written. Name a file hf://datasets/OWNER/NAME/PATH."
        )


def refuse_existing_remotes(targets: Iterable[RemoteFile]) -> None:
    """StorageError if any of these files exists; the folder of many files is listed instead."""
    wanted = list(targets)
    if len(wanted) < 8:
        for target in wanted:
            if _exists(target):
                raise exists_error(target)
        return
    above = wanted[0].parent
    while not all(target.is_relative_to(above) for target in wanted):
        above = above.parent
    try:
        present = {normalize_url(url) for url, _ in above.ask(lambda store: list(store.files(above.url)))}
    except Missing:  # stores have no empty folders
        return
    for target in wanted:
        if normalize_url(target.url) in present:
            raise exists_error(target)


def _exists(target: RemoteFile) -> bool:
    try:
        target.refresh_status()
    except FileNotFoundError:
        return False
    return True


def upload(file: Path, place: RemoteFile, *, overwrite: bool) -> None:
    """Send a whole file to a store, again from its start if the connection drops.

    FileExistsError if the name is taken and must not be overwritten; StorageError in one line if the store refuses
    the file. Then nothing has appeared.
    """
    try:
        with_retries(lambda: place.store.upload(file, place.url, overwrite=overwrite))
    except NameTaken:
        # It may be the file of an earlier try whose response was lost: then it has the same bytes.
        if place.refresh_status().st_size != file.stat().st_size:
            raise FileExistsError from None
        with place.open() as there, file.open("rb") as here:
            blocks = iter(lambda: (there.read(_BLOCK), here.read(_BLOCK)), (b"", b""))
            if any(block != other for block, other in blocks):
                raise FileExistsError from None
    except Refusal as error:
        raise StorageError(f"{place}: nothing was written: {error}") from None
    arrived, size = place.refresh_status().st_size, file.stat().st_size
    if arrived != size:
        raise StorageError(
            f"{place}: the store holds {arrived:,} bytes of the {size:,} that were sent; delete it and run again."
        )


def input_error(target: Path) -> StorageError:
    """The error for a target that is the log itself."""
    return StorageError(f"{target}: this is the input itself, and the input is never written; name another file.")


def exists_error(target: Path) -> StorageError:
    """The error for a target that exists."""
    return StorageError(
        f"{target}: the file exists, so nothing was written; name another file, or overwrite it with --force."
    )


def content_status(file: Path) -> RemoteStatus:
    """A status with a hash of the content as its etag, for which the whole file is read."""
    with file.open("rb") as opened:
        digest = file_digest(opened, "sha256").hexdigest()
    return RemoteStatus(file.stat().st_size, 0, CONTENT_ETAG + digest)


# The targets of a run


def target_paths(logs: Sequence[str], files: Sequence[Path], out: Path) -> Mapping[Path, Path]:
    """The target of each log: `out` itself for a single file, else a path below the folder `out`.

    A file that was found in a folder keeps its path below that folder. SetupError if two logs have the same
    target, or one is itself a target.
    """
    if isinstance(out, RemoteFile):
        refuse_read_only_store(out)
    in_folder = is_folder(out)
    named = [remote_file(log) if is_url(log) else Path(log) for log in logs]
    folders = [path for path in named if is_folder(path)]
    if len(files) == 1 and not in_folder and not folders:
        targets = {files[0]: out}
    else:
        if not in_folder and (out.is_file() if isinstance(out, RemoteFile) else os.path.exists(out)):  # noqa: PTH110
            raise SetupError(
                f"-o {out}: {len(files)} logs go into a folder, and this is a file.\nName a folder, new or not."
            )
        targets = {}
        for file in files:
            folder = next((folder for folder in folders if file.is_relative_to(folder)), None)
            targets[file] = out / (file.relative_to(folder) if folder is not None else file.name)
    owners: dict[str, Path] = {}
    for file, target in targets.items():
        other = owners.setdefault(path_identity(target), file)
        if other != file:
            raise SetupError(
                f"-o {out}: {other} and {file} would both be written to {target}.\n"
                "Repair them in two runs, or give the folder that holds both."
            )
    for file in files:
        if path_identity(file) in owners:
            raise SetupError(
                f"-o {out}: {file} is one of the logs, and a log is never overwritten.\n"
                "Name another file or folder."
            )
    return targets


def refuse_existing(targets: Mapping[Path, Path], *, overwrite: bool) -> None:
    """StorageError, before hours of work, if a target exists and must not be overwritten."""
    remote = [target for target in targets.values() if isinstance(target, RemoteFile)]
    for first in remote[:1]:
        refuse_remote_target(first, overwrite=True)  # whether there is such a bucket
    if remote and not overwrite:
        refuse_existing_remotes(remote)
    for file, target in targets.items():
        if not isinstance(target, RemoteFile) and os.path.lexists(target):
            refuse_target(target, overwrite=overwrite, source=file)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents; StorageError if that fails. Stores need no folders."""
    if isinstance(folder, RemoteFile):
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"{folder}: the folder cannot be created ({error.strerror or error}), so nothing was written to it; "
            "name one in a writable place."
        ) from error
