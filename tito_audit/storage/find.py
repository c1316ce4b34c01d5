"""find_logs: files, folders and globs on the command line to log files."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from tito_audit.errors import StorageError
from tito_audit.settings.home import user_path
from tito_audit.storage._remote_find import fetch_heads, remote_folder, remote_logs, walk
from tito_audit.storage.datasets import MARKS, is_dataset, shards_under
from tito_audit.storage.in_memory import RowsInMemory
from tito_audit.storage.journal import SUFFIX, is_open
from tito_audit.storage.remote import RemoteFile, is_url, remote_file
from tito_audit.storage.standard_input import NAME, standard_input
from tito_audit.unknown import close_names

LOG_SUFFIXES = (
    *(f"{base}{packed}" for base in (".jsonl", ".ndjson", ".json") for packed in ("", ".gz", ".zst")),
    *(".parquet", ".arrow", ".arrows", ".feather"),
)
"""Suffixes of logs found in a folder; a file named directly may have any name."""

_NOT_LOGS = {
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "added_tokens.json", "special_tokens_map.json"),
    *("config.json", "generation_config.json", "chat_template.json", "adapter_config.json"),
    *("preprocessor_config.json", "processor_config.json", "quantization_config.json"),
    *("model.safetensors.index.json", "pytorch_model.bin.index.json"),
    *("dataset_dict.json", "dataset_info.json", "state.json"),
    *("trainer_state.json", "all_results.json", "train_results.json", "eval_results.json", "training_args.json"),
    *("ds_config.json", "wandb-summary.json", "wandb-metadata.json", "package.json", "package-lock.json"),
}
"""JSON files of models and data sets that are not logs."""

_CACHED = re.compile(r"(?:cache-.*|indices)\.arrow")
"""Names of files that `datasets` computed from other files in the folder."""

_OURS = re.compile(
    rb'\{"(?:summary|before)":\{"schema_version":|\{"code":"[A-Z]{3}\d{3}","severity":"|\{"what": "tito-audit |'
    rb'\{"tito_audit_journal"|\{"\$schema":"[^"]*/sarif-schema'
)
"""How tito-audit's own reports and baselines begin; these may be in a folder of logs."""
_BEGINNING = 128

_SAME = "…"
"""What commands to paste show for the logs and flags of the scan that proposes them."""
_FEW = 5
"""Names that a message lists."""

_Walked: TypeAlias = tuple[Path, list[str], list[str]]


def find_logs(arguments: Sequence[str | Path]) -> list[Path]:
    """The files that arguments name, each once and in order: files, folders (searched recursively), globs, `-`.

    Rows in memory are their own path.
    """
    found: dict[Path, None] = {}
    for argument in arguments:
        for path in [argument] if isinstance(argument, RowsInMemory) else _files(str(argument)):
            found.setdefault(path)
    return list(found)


def few(names: Sequence[str]) -> str:
    """The first few names, and `…` if there are more."""
    return ", ".join([*names[:_FEW], *(["…"] if len(names) > _FEW else [])])


def skipped_files(arguments: Sequence[str]) -> list[Path]:
    """The files in folders among the arguments that `find_logs` leaves out because they are not logs, in order."""
    folders = [path for path in map(_folder, arguments) if path is not None]
    return list(dict.fromkeys(path for folder in folders for path in sorted(_others_under(folder))))


def _folder(argument: str) -> Path | None:
    """The folder that an argument names; None if it names something else."""
    if is_url(argument):
        return remote_folder(argument)
    path = user_path(argument)
    return path if os.path.isdir(path) else None  # noqa: PTH112


def _walk(folder: Path, refuse: Callable[[OSError], None] | None = None) -> Iterator[_Walked]:
    """Each folder, and the names of the folders and files in it; folders removed from the list are passed over."""
    if isinstance(folder, RemoteFile):
        yield from walk(folder)
    for root, folders, files in os.walk(folder, onerror=refuse) if not isinstance(folder, RemoteFile) else ():
        yield Path(root), folders, files


def _others_under(folder: Path) -> Iterator[Path]:
    """Files that are not logs, except journals, hidden files and the files of a data set."""
    for root, folders, files in _walk(folder):
        if MARKS.intersection(files) and is_dataset(root):
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            if not name.startswith(".") and not name.endswith(SUFFIX) and not _is_log(_inside(root, name)):
                yield _inside(root, name)


def _inside(folder: Path, name: str) -> Path:
    """A file of a folder; a remote one as it was listed."""
    return remote_file(str(folder / name)) if isinstance(folder, RemoteFile) else folder / name


def _files(argument: str) -> list[Path]:
    if argument == NAME:
        return [standard_input()]
    if is_url(argument):
        if argument.startswith("file://"):
            raise StorageError(_about_url(argument))
        return remote_logs(argument, _in_folder)
    path = user_path(argument)
    if str(path) == NAME:
        path = Path.cwd() / NAME  # the file of that name, as in ./-
    # pathlib's versions raise if the name is too long.
    if os.path.isdir(path):  # noqa: PTH112
        return _in_folder(path)
    if os.path.exists(path):  # noqa: PTH110
        return [path]
    # After the check for existence, as names may contain brackets.
    if glob.has_magic(argument):
        matched = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207  Path takes no absolute pattern
        files = [file for match in matched for file in _of_match(Path(match))]
        if not files:
            raise StorageError(f"{argument}: no file matches. Quote the pattern, or look where it starts.")
        return files
    if argument == _SAME:
        raise StorageError(f"{argument}: it stands for the logs and flags of your scan; write them in its place.")
    raise StorageError(f"{argument}: no such file or folder.{_close_names(path)}")


def _of_match(path: Path) -> list[Path]:
    """A file that a glob matched, or the logs in a folder that it matched, if any."""
    return _sorted_logs(path) if path.is_dir() else [path]


def _in_folder(folder: Path) -> list[Path]:
    files = _sorted_logs(folder)
    if not files:
        others = [str(path.relative_to(folder)) for path in sorted(_others_under(folder))]
        held = f"It holds {few(others)}." if others else "It is empty."
        raise StorageError(
            f"{folder}: no log in this folder or below. {held}\n"
            f"Names of logs end in {', '.join(LOG_SUFFIXES)}. If yours has another name, pass the file itself."
        )
    return files


def _sorted_logs(folder: Path) -> list[Path]:
    """The logs of a folder by name; the shards of a data set together, in the order of its rows."""
    return [path for _, found in sorted(_logs_under(folder)) for path in found]


def _logs_under(folder: Path) -> Iterator[tuple[Path, list[Path]]]:
    """Each log by itself; the shards of each data set together, under its folder."""
    if isinstance(folder, RemoteFile):
        named = [file for file in folder.below or () if _is_named(file)]
        _refuse_ambiguous(named)
        fetch_heads([file for file in named if _is_text(file)], _BEGINNING)
    for root, folders, files in _walk(folder, _refuse):
        if MARKS.intersection(files) and is_dataset(root):
            folders.clear()
            yield root, shards_under(root)
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (_inside(root, name) for name in files if not name.startswith(".")):
            if _is_log(path):
                yield path, [path]


def _refuse_ambiguous(files: Iterable[RemoteFile]) -> None:
    """StorageError for a file below a folder without a name, which no path on disk has."""
    for file in files:
        if file.url != (plain := str(file.parent / file.name)):
            raise StorageError(
                f"{file}: its name holds // or /./, so in a folder it cannot be told from {plain}. "
                "Name each file of the folder, or rename this one."
            )


def _is_log(path: Path) -> bool:
    """Whether a file in a folder is taken for a log, by its name and, for our own reports, its beginning."""
    return _is_named(path) and not _is_ours(path)


def _is_named(path: Path) -> bool:
    """Whether a file in a folder has the name of a log."""
    name = path.name
    return name.endswith(LOG_SUFFIXES) and name not in _NOT_LOGS and _CACHED.fullmatch(name) is None


def _is_text(path: Path) -> bool:
    """Whether a file has the name of JSON that is not compressed."""
    return path.name.endswith((".json", ".jsonl", ".ndjson"))


def _is_ours(path: Path) -> bool:
    """Whether a file is one of our reports or baselines; False if it cannot be read, which is reported later."""
    if not _is_text(path) or not path.is_file():
        return False
    if is_open(path):
        return True
    if isinstance(path, RemoteFile) and path.alike is not None and not _is_ours(path.alike):
        return False
    try:
        with path.open("rb") as file:
            return _OURS.match(file.read(_BEGINNING)) is not None
    except OSError:
        return False


def _refuse(error: OSError) -> None:
    raise StorageError(f"{error.filename}: the folder cannot be read ({error.strerror}).") from error


def _close_names(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f" The folder {folder} does not exist either."
    close = close_names(path.name, sorted(entry.name for entry in os.scandir(folder)))
    return f" Did you mean {' or '.join(str(folder / name) for name in close)}?" if close else ""


def _about_url(argument: str) -> str:
    way = f"tito-audit scan {argument.removeprefix('file://')}"
    return f"{argument}: local logs are named by path, not by URL.\nPass the path: {way}"
