"""Where repaired files go: one for each log, never a log itself."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tito_audit.errors import SetupError, StorageError
from tito_audit.storage.atomic import refuse_target
from tito_audit.storage.remote import RemoteFile, is_url, remote_file
from tito_audit.storage.remote_output import is_folder, place_key, refuse_place, refuse_remote, refuse_remotes


def target_paths(logs: Sequence[str], files: Sequence[Path], out: Path) -> Mapping[Path, Path]:
    """The file to write for each log: `out` itself for a single file, else a path below the folder `out`.

    A file found in a folder keeps its path below that folder. SetupError if two logs would be written to
    one file or a log would be overwritten.
    """
    if isinstance(out, RemoteFile):
        refuse_place(out)
    in_folder = _is_folder(out)
    folders = [path for path in map(_named, logs) if _is_folder(path)]
    if len(files) == 1 and not in_folder and not folders:
        targets = {files[0]: out}
    else:
        if not in_folder and _is_file(out):
            raise SetupError(
                f"-o {out}: {len(files)} logs go into a folder, and this is a file.\nName a folder, new or not."
            )
        targets = {file: out / _below(file, folders) for file in files}
    owners: dict[str, Path] = {}
    for file, target in targets.items():
        other = owners.setdefault(place_key(target), file)
        if other != file:
            raise SetupError(
                f"-o {out}: {other} and {file} would both be written to {target}.\n"
                "Repair them in two runs, or give the folder that holds both."
            )
    for file in files:
        if place_key(file) in owners:
            raise SetupError(
                f"-o {out}: {file} is one of the logs, and a log is never overwritten.\n"
                "Name another file or folder."
            )
    return targets


def same_place(one: Path, other: Path) -> bool:
    """Whether two paths name the same place, all links followed."""
    return place_key(one) == place_key(other)


def refuse_taken(targets: Mapping[Path, Path], *, overwrite: bool) -> None:
    """Raise StorageError if a target exists and must not be overwritten, before hours of work."""
    remote = [target for target in targets.values() if isinstance(target, RemoteFile)]
    for first in remote[:1]:
        refuse_remote(first, overwrite=True)  # whether there is such a bucket
    if remote and not overwrite:
        refuse_remotes(remote)
    for file, target in targets.items():
        if not isinstance(target, RemoteFile) and os.path.lexists(target):
            refuse_target(target, overwrite=overwrite, source=file)


def make_folder(folder: Path) -> None:
    """Create the folder and its parents; StorageError if that fails. A store needs no folders."""
    if isinstance(folder, RemoteFile):
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"{folder}: the folder cannot be created ({error.strerror or error}), so nothing was written to it; "
            "name one in a writable place."
        ) from error


def _named(log: str) -> Path:
    return remote_file(log) if is_url(log) else Path(log)


def _is_folder(path: Path) -> bool:
    # os.path, which returns False for names that are too long or link to themselves; the error comes later.
    return is_folder(path) if isinstance(path, RemoteFile) else os.path.isdir(path)  # noqa: PTH112


def _is_file(path: Path) -> bool:
    return path.is_file() if isinstance(path, RemoteFile) else os.path.exists(path)  # noqa: PTH110


def _below(file: Path, folders: Sequence[Path]) -> Path:
    for folder in folders:
        if file.is_relative_to(folder):
            return file.relative_to(folder)
    return Path(file.name)
