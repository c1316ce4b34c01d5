"""find_logs: files, folders and globs on the command line to log files, on disk and in stores."""

from __future__ import annotations

import glob
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from itertools import islice, takewhile
from pathlib import Path
from typing import TypeAlias

from tito_audit.errors import StorageError
from tito_audit.settings.home import user_path
from tito_audit.storage.datasets import MARKS, is_dataset, shards_under
from tito_audit.storage.in_memory import RowsInMemory
from tito_audit.storage.journal import SUFFIX, is_open
from tito_audit.storage.remote import FIRST, RemoteFile, is_url, know, remote_file
from tito_audit.storage.watch import NAME, standard_input
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

_MAGIC = re.compile(r"[*?\[]")
_DIGITS = re.compile(r"\d+")
_ALIKE = 8
"""So many files with the same name but for its digits are shards: if the first is a log, all are."""
_AT_ONCE = 16
"""Beginnings of files that are fetched at the same time."""
_FEW_HEADS = 64
"""Of up to so many files as much is fetched as reading them needs first."""

_Walked: TypeAlias = tuple[Path, list[str], list[str]]


def find_logs(arguments: Sequence[str | Path]) -> list[Path]:
    """The files that arguments name, each once and in order: files, folders (searched recursively), globs, `-`.

    Rows in memory are their own path.
    """
    files: dict[Path, None] = {}
    for argument in arguments:
        files |= dict.fromkeys([argument] if isinstance(argument, RowsInMemory) else _files(str(argument)))
    return list(files)


def few(names: Sequence[str]) -> str:
    """The first few names, and `…` if there are more."""
    return ", ".join([*names[:_FEW], *(["…"] if len(names) > _FEW else [])])


def skipped_files(arguments: Sequence[str]) -> list[Path]:
    """The files in folders among the arguments that `find_logs` leaves out because they are not logs, in order."""
    folders: list[Path] = []
    for argument in arguments:
        folder = _remote_folder(argument) if is_url(argument) else user_path(argument)
        if folder is not None and (isinstance(folder, RemoteFile) or os.path.isdir(folder)):  # noqa: PTH112
            folders.append(folder)
    return list(dict.fromkeys(path for folder in folders for path in sorted(_others_under(folder))))


def _walk(folder: Path, refuse: Callable[[OSError], None] | None = None) -> Iterator[_Walked]:
    """Each folder, and the names of the folders and files in it; folders removed from the list are passed over."""
    if isinstance(folder, RemoteFile):
        yield from _remote_walk(folder)
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
            local = argument.removeprefix("file://")
            raise StorageError(
                f"{argument}: local logs are named by path, not by URL.\nPass the path: tito-audit scan {local}"
            )
        return _remote_logs(argument)
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
        matched = map(Path, sorted(glob.glob(str(path), recursive=True)))  # noqa: PTH207  Path takes no absolute pattern
        files = [file for match in matched for file in (_sorted_logs(match) if match.is_dir() else [match])]
        if not files:
            raise StorageError(f"{argument}: no file matches. Quote the pattern, or look where it starts.")
        return files
    if argument == _SAME:
        raise StorageError(f"{argument}: it stands for the logs and flags of your scan; write them in its place.")
    raise StorageError(f"{argument}: no such file or folder.{_close_names(path)}")


def _in_folder(folder: Path) -> list[Path]:
    files = _sorted_logs(folder)
    if not files:
        others = [str(path.relative_to(folder)) for path in sorted(_others_under(folder))]
        content = f"It holds {few(others)}." if others else "It is empty."
        raise StorageError(
            f"{folder}: no log in this folder or below. {content}\n"
            f"Names of logs end in {', '.join(LOG_SUFFIXES)}. If yours has another name, pass the file itself."
        )
    return files


def _sorted_logs(folder: Path) -> list[Path]:
    """The logs of a folder by name; the shards of a data set together, in the order of its rows."""
    return [path for _, files in sorted(_logs_under(folder)) for path in files]


def _logs_under(folder: Path) -> Iterator[tuple[Path, list[Path]]]:
    """Each log by itself; the shards of each data set together, under its folder."""
    if isinstance(folder, RemoteFile):
        named = [file for file in folder.below or () if _is_named(file)]
        _refuse_ambiguous(named)
        _fetch_heads([file for file in named if _is_text(file)], _BEGINNING)

    def refuse(error: OSError) -> None:
        raise StorageError(f"{error.filename}: the folder cannot be read ({error.strerror}).") from error

    for root, folders, files in _walk(folder, refuse):
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


def _close_names(path: Path) -> str:
    folder = path.parent
    if isinstance(folder, RemoteFile):
        names = folder.entries()
    elif folder.is_dir():
        names = [entry.name for entry in os.scandir(folder)]
    else:
        return f" The folder {folder} does not exist either."
    close = close_names(path.name, sorted(names))
    return f" Did you mean {' or '.join(str(folder / name) for name in close)}?" if close else ""


# Logs in stores


def _remote_logs(url: str) -> list[Path]:
    """The files that a URL names, as they are now; StorageError if there are none."""
    if url.endswith("://"):
        raise StorageError(f"{url}: this names no file. Name one, or a folder, after it.")
    path = remote_file(url)
    if _of_web(url):
        if "*" in path.name:
            raise StorageError(f"{path}: a web server does not list its files. Name each file.")
        try:
            path.refreshed()
        except FileNotFoundError as error:
            raise StorageError(f"{path}: {error.strerror}") from None
        return [know(path)]
    pattern = _MAGIC.search(url, url.index("://") + 3)
    why = "there is nothing below it."
    if not url.endswith("/"):
        try:
            path.refreshed()
            return [know(path)]
        except FileNotFoundError as error:
            why = str(error.strerror)
    if pattern is not None:
        return _of_pattern(url, pattern.start())
    folder = _listed(RemoteFile(url.rstrip("/")))
    if not folder.below:
        raise StorageError(f"{folder}: {why}{_close_names(folder)}")
    return _in_folder(folder)


def _remote_folder(url: str) -> RemoteFile | None:
    """The folder that a URL names, with all files below it; None if it names something else."""
    if _of_web(url) or _MAGIC.search(url, url.index("://") + 3):
        return None
    folder = remote_file(url.rstrip("/"))
    if folder.below is not None:
        return folder
    try:
        return None if folder.is_file() else _listed(folder)
    except StorageError:  # which find_logs reports
        return None


def _remote_walk(folder: RemoteFile) -> Iterator[tuple[RemoteFile, list[str], list[str]]]:
    """As `os.walk`, from one listing: each folder, and the names of the folders and files in it."""
    tree: dict[str, tuple[dict[str, None], list[str]]] = defaultdict(lambda: ({}, []))
    for file in (folder if folder.below is not None else _listed(folder)).below or ():
        tree[str(file.parent)][1].append(file.name)
        for above in takewhile(lambda path: path != folder, file.parents):
            tree[str(above.parent)][0][above.name] = None
    waiting = [folder]
    while waiting:
        here = waiting.pop()
        folders, files = sorted(tree[str(here)][0]), sorted(tree[str(here)][1])
        yield here, folders, files
        waiting += [here / name for name in reversed(folders)]


def _listed(folder: RemoteFile) -> RemoteFile:
    """The folder with all files below it, which are known from now on."""
    folder.below = [know(file) for file in folder.files()]
    return know(folder)


def _fetch_heads(files: Sequence[RemoteFile], size: int) -> None:
    """Fetch how files begin, many at a time.

    Of many files with the same name but for its digits, only the first is fetched; the others are `alike`.
    """
    groups: dict[tuple[str, str], list[RemoteFile]] = defaultdict(list)
    for file in files:
        groups[str(file.parent), _DIGITS.sub("0", file.name)].append(file)
    wanted = []
    for group in groups.values():
        wanted += group[:1] if len(group) >= _ALIKE else group
        for file in group[1:] if len(group) >= _ALIKE else ():
            file.alike = group[0]
    if len(wanted) > 1:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            size = FIRST if len(wanted) <= _FEW_HEADS else size
            list(pool.map(lambda file: file.open("rb", 0).read(size), wanted))


def _of_pattern(url: str, magic: int) -> list[Path]:
    """The files that a pattern matches, and the logs in folders that it matches."""
    folder = RemoteFile(url[:magic].rpartition("/")[0])
    if len(folder.parts) < 2:
        raise StorageError(f"{url}: a pattern begins after the name of the bucket or the repository.")
    pattern = url.split("/")
    matched: dict[str, list[Path]] = {}
    folders: dict[RemoteFile, list[RemoteFile]] = defaultdict(list)
    for file in _listed(folder).below or ():
        if _matches(str(file).split("/"), pattern):
            matched[str(file)] = [file]
        else:
            above = (path for path in file.parents if _matches(str(path).split("/"), pattern))
            for path in islice(above, 1):
                folders[path].append(file)
    for path, below in folders.items():
        path.below = below
        matched[str(path)] = _sorted_logs(path)
    logs = [log for name in sorted(matched) for log in matched[name]]
    if not logs:
        raise StorageError(f"{url}: no file matches. Quote the pattern, or look where it starts.")
    return logs


def _matches(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether the parts of a path match those of a pattern, with the rules of `glob`: hidden names are named."""
    if not pattern:
        return not names
    first, rest = pattern[0], pattern[1:]
    if first == "**":
        deep = next((at for at, name in enumerate(names) if name[:1] in ("", ".")), len(names))
        # At the end it matches files and folders at any depth.
        return 0 < deep == len(names) if not rest else any(_matches(names[at:], rest) for at in range(deep + 1))
    if not names or (names[0].startswith(".") and not first.startswith(".")):
        return False
    return fnmatchcase(names[0], first) and _matches(names[1:], rest)


def _of_web(url: str) -> bool:
    return url.lower().startswith(("http://", "https://"))
