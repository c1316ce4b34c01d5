"""Where the files of a repair go: one beside each log, never a log itself."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tito_audit.errors import SetupError, StorageError
from tito_audit.storage.atomic import refuse_target


def target_paths(logs: Sequence[str], files: Sequence[Path], out: Path) -> Mapping[Path, Path]:
    """The file to write for each log: `out` itself for one file, else its place below the folder `out`.

    A file found in a folder keeps its path below that folder. SetupError when two logs would be written to
    one file or a log would be written over.
    """
    # Of os.path, as a name that is too long or a link to itself only says no; what is wrong is said later.
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
                f"-o {out}: {file} is one of the logs, and a log is never written.\nName another file or folder."
            )
    return targets


def same_place(one: Path, other: Path) -> bool:
    """Whether two names come to the same place, with every link followed as far as it goes."""
    return os.path.realpath(one) == os.path.realpath(other)


def refuse_taken(targets: Mapping[Path, Path], *, overwrite: bool) -> None:
    """Nothing, if no target is there already that may not be replaced; else StorageError, before hours of work."""
    for file, target in targets.items():
        if os.path.lexists(target):
            refuse_target(target, overwrite=overwrite, source=file)


def make_folder(folder: Path) -> None:
    """Nothing, once the folder is there with all above it; StorageError when it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"{folder}: the folder cannot be made ({error.strerror or error}), so nothing was written to it; "
            "name one in a place that can be written."
        ) from error


def _below(file: Path, folders: Sequence[Path]) -> Path:
    for folder in folders:
        if file.is_relative_to(folder):
            return file.relative_to(folder)
    return Path(file.name)
