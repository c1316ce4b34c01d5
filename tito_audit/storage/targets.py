"""Where repaired files go: one for each log, never a log itself."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tito_audit.errors import SetupError, StorageError
from tito_audit.storage.atomic import refuse_target


def target_paths(logs: Sequence[str], files: Sequence[Path], out: Path) -> Mapping[Path, Path]:
    """The file to write for each log: `out` itself for a single file, else a path below the folder `out`.

    A file found in a folder keeps its path below that folder. SetupError if two logs would be written to
    one file or a log would be overwritten.
    """
    # os.path, which returns False for names that are too long or link to themselves; the error comes later.
    in_folder = os.path.isdir(out)  # noqa: PTH112
    if len(files) == 1 and not in_folder and not any(Path(log).is_dir() for log in logs):
        targets = {files[0]: out}
    else:
        if os.path.exists(out) and not in_folder:  # noqa: PTH110
            raise SetupError(
                f"-o {out}: {len(files)} logs go into a folder, and this is a file.\nName a folder, new or not."
            )
        folders = [Path(log) for log in logs if Path(log).is_dir()]
        targets = {file: out / _below(file, folders) for file in files}
    owners: dict[str, Path] = {}
    for file, target in targets.items():
        other = owners.setdefault(os.path.realpath(target), file)
        if other != file:
            raise SetupError(
                f"-o {out}: {other} and {file} would both be written to {target}.\n"
                "Repair them in two runs, or give the folder that holds both."
            )
    for file in files:
        if os.path.realpath(file) in owners:
            raise SetupError(
                f"-o {out}: {file} is one of the logs, and a log is never overwritten.\n"
                "Name another file or folder."
            )
    return targets


def same_place(one: Path, other: Path) -> bool:
    """Whether two paths name the same place, all links followed."""
    return os.path.realpath(one) == os.path.realpath(other)


def refuse_taken(targets: Mapping[Path, Path], *, overwrite: bool) -> None:
    """Raise StorageError if a target exists and must not be overwritten, before hours of work."""
    for file, target in targets.items():
        if os.path.lexists(target):
            refuse_target(target, overwrite=overwrite, source=file)


def make_folder(folder: Path) -> None:
    """Create the folder and its parents; StorageError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"{folder}: the folder cannot be created ({error.strerror or error}), so nothing was written to it; "
            "name one in a writable place."
        ) from error


def _below(file: Path, folders: Sequence[Path]) -> Path:
    for folder in folders:
        if file.is_relative_to(folder):
            return file.relative_to(folder)
    return Path(file.name)
