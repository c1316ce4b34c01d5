"""find_logs: the log files that files, folders and globs name, on disk and in stores.

In a folder that `datasets` saved, metadata say which files hold the rows; they are updated when rows change.
`Dataset.save_to_disk` writes the shards, `state.json`, which lists them in order, and `dataset_info.json`;
`DatasetDict.save_to_disk` writes such a folder for each split, and `dataset_dict.json`, which lists the splits.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from hashlib import blake2b
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from tito_audit.errors import StorageError
from tito_audit.settings.values import expand_user
from tito_audit.storage.arrow import open_arrow
from tito_audit.storage.atomic import OnDone, new_file
from tito_audit.storage.in_memory import RowsInMemory
from tito_audit.storage.journal import SUFFIX, is_open_journal
from tito_audit.storage.remote import FIRST_BLOCK, RemoteFile, is_url, is_web_url, remember, remote_file
from tito_audit.storage.watch import STDIN, standard_input
from tito_audit.unknown import close_names

LOG_SUFFIXES = (
    *(f"{base}{packed}" for base in (".jsonl", ".ndjson", ".json") for packed in ("", ".gz", ".zst")),
    *(".parquet", ".arrow", ".arrows", ".feather"),
)
"""Suffixes of the logs in a folder; a file that is named itself may have any."""

_NOT_LOGS = {
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "added_tokens.json", "special_tokens_map.json"),
    *("config.json", "generation_config.json", "chat_template.json", "adapter_config.json"),
    *("preprocessor_config.json", "processor_config.json", "quantization_config.json"),
    *("model.safetensors.index.json", "pytorch_model.bin.index.json"),
    *("dataset_dict.json", "dataset_info.json", "state.json"),
    *("trainer_state.json", "all_results.json", "train_results.json", "eval_results.json", "training_args.json"),
    *("ds_config.json", "wandb-summary.json", "wandb-metadata.json", "package.json", "package-lock.json"),
}
"""JSON files of models and data sets."""

_CACHED = re.compile(r"(?:cache-.*|indices)\.arrow")
"""Files that `datasets` computed from others in the same folder."""

_OWN_REPORT = re.compile(
    rb'\{"(?:summary|before)":\{"schema_version":|\{"code":"[A-Z]{3}\d{3}","severity":"|\{"what": "tito-audit |'
    rb'\{"tito_audit_journal"|\{"\$schema":"[^"]*/sarif-schema'
)
"""How our own reports and baselines begin, which may lie among logs."""
_HEAD_BYTES = 128

_MOST_NAMES = 5
"""Names that a message lists at most."""

_GLOB_CHARACTER = re.compile(r"[*?\[]")
_DIGITS = re.compile(r"\d+")
_MANY_SHARDS = 8
"""So many files whose names differ only in digits are shards: if the first is a log, all are."""


def find_logs(arguments: Sequence[str | Path]) -> list[Path]:
    """The logs that arguments name, each once and in order: files, folders with all below them, globs, `-`.

    Rows in memory are passed through. StorageError, with close names, if an argument names none.
    """
    files: dict[Path, None] = {}
    for argument in arguments:
        name, path = str(argument), expand_user(str(argument))
        if name != STDIN and str(path) == STDIN:
            path = Path.cwd() / STDIN  # ./- is the file of that name
        logs: list[Path]
        if isinstance(argument, RowsInMemory):
            logs = [argument]
        elif name == STDIN:
            logs = [standard_input()]
        elif is_url(name):
            logs = _remote_logs(name)
        # pathlib's versions raise if the name is too long.
        elif os.path.isdir(path):  # noqa: PTH112
            logs = _require_logs(path)
        elif os.path.exists(path):  # noqa: PTH110
            logs = [path]
        # Only if no such file exists, as names may contain brackets.
        elif glob.has_magic(name):
            matched = map(Path, sorted(glob.glob(str(path), recursive=True)))  # noqa: PTH207  Path takes no absolute pattern
            logs = [file for match in matched for file in (_collect_logs(match) if match.is_dir() else [match])]
            if not logs:
                raise StorageError(f"{name}: no file matches. Quote the pattern, or look where it starts.")
        elif name == "…":
            raise StorageError(f"{name}: it stands for the logs and flags of your scan; write them in its place.")
        else:
            raise StorageError(f"{name}: no such file or folder.{_suggest_names(path)}")
        files |= dict.fromkeys(logs)
    return list(files)


def first_few(names: Sequence[str]) -> str:
    """The first names joined by commas, with `…` if there are more."""
    return ", ".join([*names[:_MOST_NAMES], *(["…"] if len(names) > _MOST_NAMES else [])])


def skipped_files(arguments: Sequence[str]) -> list[Path]:
    """The files that `find_logs` leaves out of folders because they are no logs, in order."""
    folders: list[Path] = []
    for argument in arguments:
        if not is_url(argument):
            local = expand_user(argument)
            folders += [local] if os.path.isdir(local) else []  # noqa: PTH112
        elif not is_web_url(argument) and not _GLOB_CHARACTER.search(argument, argument.index("://") + 3):
            folder = remote_file(argument.rstrip("/"))
            with suppress(StorageError):  # `find_logs` reports it
                if folder.files_below is not None:
                    folders.append(folder)
                elif not folder.is_file():
                    folders.append(_list_folder(folder))
    return list(dict.fromkeys(path for folder in folders for path in sorted(_other_files(folder))))


def _walk(
    folder: Path, refuse: Callable[[OSError], None] | None = None
) -> Iterator[tuple[Path, list[str], list[str]]]:
    """`os.walk` for folders on disk and in stores: each folder with the names of the folders and files in it."""
    if not isinstance(folder, RemoteFile):
        for root, folders, files in os.walk(folder, onerror=refuse):
            yield Path(root), folders, files
        return
    # From one listing of all files below.
    tree: dict[str, tuple[dict[str, None], list[str]]] = defaultdict(lambda: ({}, []))
    for file in (folder if folder.files_below is not None else _list_folder(folder)).files_below or ():
        tree[str(file.parent)][1].append(file.name)
        for above in takewhile(lambda path: path != folder, file.parents):
            tree[str(above.parent)][0][above.name] = None
    waiting = [folder]
    while waiting:
        here = waiting.pop()
        folders, files = sorted(tree[str(here)][0]), sorted(tree[str(here)][1])
        yield here, folders, files
        waiting += [here / name for name in reversed(folders)]


def _classify(folder: Path, refuse: Callable[[OSError], None] | None = None) -> Iterator[tuple[Path, bool | None]]:
    """Each file that is not hidden, with whether it is a log; None for a whole folder that `datasets` saved."""
    for root, folders, files in _walk(folder, refuse):
        if DATASET_MARKERS.intersection(files) and ((root / _SPLITS).is_file() or _is_split_folder(root)):
            folders.clear()
            yield root, None
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (root / name for name in files if not name.startswith(".")):
            path = remote_file(str(path)) if isinstance(path, RemoteFile) else path  # with its listed status
            yield path, _has_log_name(path) and not _is_own_report(path)


def _other_files(folder: Path) -> Iterator[Path]:
    """Files that are no logs, without journals, hidden files and those in folders that `datasets` saved."""
    return (path for path, is_log in _classify(folder) if is_log is False and not path.name.endswith(SUFFIX))


def _require_logs(folder: Path) -> list[Path]:
    files = _collect_logs(folder)
    if not files:
        others = [str(path.relative_to(folder)) for path in sorted(_other_files(folder))]
        content = f"It holds {first_few(others)}." if others else "It is empty."
        raise StorageError(
            f"{folder}: no log in this folder or below. {content}\n"
            f"Names of logs end in {', '.join(LOG_SUFFIXES)}. If yours has another name, pass the file itself."
        )
    return files


def _collect_logs(folder: Path) -> list[Path]:
    """The logs below a folder, sorted by name; the shards of a data set together, in the order of its rows."""
    if isinstance(folder, RemoteFile):
        named = [file for file in folder.files_below or () if _has_log_name(file)]
        for file in named:  # paths collapse // and /./, which URLs may have
            if file.url != (plain := str(file.parent / file.name)):
                raise StorageError(
                    f"{file}: its name holds // or /./, so in a folder it cannot be told from {plain}. "
                    "Name each file of the folder, or rename this one."
                )
        groups: dict[tuple[str, str], list[RemoteFile]] = defaultdict(list)
        for file in filter(_has_json_name, named):
            groups[str(file.parent), _DIGITS.sub("0", file.name)].append(file)
        wanted = []
        for group in groups.values():
            wanted += group[:1] if len(group) >= _MANY_SHARDS else group
            for file in group[1:] if len(group) >= _MANY_SHARDS else ():
                file.similar = group[0]
        if len(wanted) > 1:  # fetch the beginnings of many files at once
            from concurrent.futures import ThreadPoolExecutor

            size = FIRST_BLOCK if len(wanted) <= 64 else _HEAD_BYTES  # of a few, as much as reading needs first
            with ThreadPoolExecutor(16) as pool:
                list(pool.map(lambda file: file.open("rb", 0).read(size), wanted))

    def refuse(error: OSError) -> None:
        raise StorageError(f"{error.filename}: the folder cannot be read ({error.strerror}).") from error

    logs = sorted((path, is_log) for path, is_log in _classify(folder, refuse) if is_log is not False)
    return [file for path, is_log in logs for file in ([path] if is_log else dataset_shards(path))]


def _has_log_name(path: Path) -> bool:
    """Whether a file has the name of a log, and none of another file in folders of models and data sets."""
    name = path.name
    return name.endswith(LOG_SUFFIXES) and name not in _NOT_LOGS and _CACHED.fullmatch(name) is None


def _has_json_name(path: Path) -> bool:
    return path.name.endswith((".json", ".jsonl", ".ndjson"))


def _is_own_report(path: Path) -> bool:
    """Whether a file is one of our reports or baselines; False if it cannot be read, which is said later."""
    if not _has_json_name(path) or not path.is_file():
        return False
    if is_open_journal(path):
        return True
    if isinstance(path, RemoteFile) and path.similar is not None and not _is_own_report(path.similar):
        return False
    try:
        with path.open("rb") as file:
            return _OWN_REPORT.match(file.read(_HEAD_BYTES)) is not None
    except OSError:
        return False


def _suggest_names(path: Path) -> str:
    """` Did you mean …?`, for the end of a message; "" without a close name."""
    folder = path.parent
    if isinstance(folder, RemoteFile):
        names = folder.entries()
    elif folder.is_dir():
        names = [entry.name for entry in os.scandir(folder)]
    else:
        return f" The folder {folder} does not exist either."
    close = close_names(path.name, sorted(names))
    return f" Did you mean {' or '.join(str(folder / name) for name in close)}?" if close else ""


def _remote_logs(url: str) -> list[Path]:
    """The logs that a URL names, with their status now; StorageError if there are none."""
    if url.startswith("file://"):
        local = url.removeprefix("file://")
        raise StorageError(
            f"{url}: local logs are named by path, not by URL.\nPass the path: tito-audit scan {local}"
        )
    if url.endswith("://"):
        raise StorageError(f"{url}: this names no file. Name one, or a folder, after it.")
    path = remote_file(url)
    if is_web_url(url):
        if "*" in path.name:
            raise StorageError(f"{path}: a web server does not list its files. Name each file.")
        try:
            path.refresh_status()
        except FileNotFoundError as error:
            raise StorageError(f"{path}: {error.strerror}") from None
        return [remember(path)]
    pattern = _GLOB_CHARACTER.search(url, url.index("://") + 3)
    why = "there is nothing below it."
    if not url.endswith("/"):
        try:
            path.refresh_status()
            return [remember(path)]
        except FileNotFoundError as error:
            why = str(error.strerror)
    if pattern is None:
        folder = _list_folder(RemoteFile(url.rstrip("/")))
        if not folder.files_below:
            raise StorageError(f"{folder}: {why}{_suggest_names(folder)}")
        return _require_logs(folder)
    # The files that the pattern matches, and the logs in folders that it matches.
    folder = RemoteFile(url[: pattern.start()].rpartition("/")[0])
    if len(folder.parts) < 2:
        raise StorageError(f"{url}: a pattern begins after the name of the bucket or the repository.")
    steps = url.split("/")
    matched: dict[str, list[Path]] = {}
    folders: dict[RemoteFile, list[RemoteFile]] = defaultdict(list)
    for file in _list_folder(folder).files_below or ():
        if _matches(str(file).split("/"), steps):
            matched[str(file)] = [file]
        else:
            above = (path for path in file.parents if _matches(str(path).split("/"), steps))
            for parent in islice(above, 1):
                folders[parent].append(file)
    for parent, below in folders.items():
        parent.files_below = below
        matched[str(parent)] = _collect_logs(parent)
    logs = [log for name in sorted(matched) for log in matched[name]]
    if not logs:
        raise StorageError(f"{url}: no file matches. Quote the pattern, or look where it starts.")
    return logs


def _list_folder(folder: RemoteFile) -> RemoteFile:
    """The folder with all files below it, whose status is remembered."""
    folder.files_below = [remember(file) for file in folder.files()]
    return remember(folder)


def _matches(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a path matches a pattern, part by part; as for `glob`, only a dot matches that of a hidden name."""
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


_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
DATASET_MARKERS = frozenset((_STATE, _SPLITS))
"""Every folder that `datasets` saved has one of these files."""


def dataset_shards(folder: Path) -> list[Path]:
    """The shards of a folder that `datasets` saved, split by split, in the order of their rows.

    StorageError if the metadata list a file that is missing, or is not in the folder.
    """
    if not (folder / _SPLITS).is_file():
        return _split_shards(folder)
    splits = _load_object(folder / _SPLITS).get("splits")
    if not isinstance(splits, list) or not all(_is_plain_name(split) for split in splits):
        raise _folder_error(folder / _SPLITS, "its list 'splits' does not name folders next to it")
    shards = []
    for split in splits:
        if not (folder / split / _STATE).is_file():
            raise _folder_error(folder / _SPLITS, f"it names the split {split!r}, but {split}/{_STATE} is missing")
        shards += _split_shards(folder / split)
    return shards


def dataset_metadata(logs: Sequence[str], targets: Mapping[Path, Path]) -> dict[Path, Path]:
    """The metadata files to write for data sets whose shards are written again, each with its target.

    Only for data sets that `logs` names, or that are below a folder in it.
    """
    named = [Path(log) for log in logs if Path(log).is_dir()]
    metadata: dict[Path, Path] = {}
    for folder in dict.fromkeys(file.parent for file in targets):
        if not any(map(folder.is_relative_to, named)) or not _is_split_folder(folder):
            continue
        shards = _split_shards(folder)
        places = {targets[shard].parent if shard in targets else None for shard in shards}
        same_names = all(shard in targets and targets[shard].name == shard.name for shard in shards)
        place = places.pop() if same_names and len(places) == 1 else None
        if place is None:  # the targets are in several folders, or have other names
            continue
        metadata |= {folder / name: place / name for name in (_STATE, _INFO) if (folder / name).is_file()}
        above = folder.parent / _SPLITS
        if above.is_file() and any(map(folder.parent.is_relative_to, named)):
            metadata[above] = place.parent / _SPLITS
    return metadata


def write_dataset_metadata(
    logs: Sequence[str],
    targets: Mapping[Path, Path],
    *,
    overwrite: Callable[[Path], bool],
    on_done: OnDone | None = None,
) -> None:
    """Write the files of `dataset_metadata`, updated for the shards as they were written.

    Counts of rows and bytes are updated, and added columns become features. A data set in which anything changed
    gets a new fingerprint: else `datasets` would use what it cached of the old one. `overwrite` tells which files
    may be replaced; `on_done` is called for each just before it appears.
    """
    import filecmp  # a scan needs none

    for file, place in dataset_metadata(logs, targets).items():
        data = file.read_bytes()
        pairs = [(shard, targets[shard]) for shard in _split_shards(file.parent)] if file.name != _SPLITS else []
        if not all(filecmp.cmp(*pair, shallow=False) for pair in pairs):
            about = _load_object(file)
            if file.name == _STATE:
                seen = blake2b(str(about.get("_fingerprint")).encode(), digest_size=8)
                for _, written in pairs:
                    with written.open("rb") as shard:
                        while block := shard.read(1 << 20):
                            seen.update(block)
                about = {**about, "_fingerprint": seen.hexdigest()}
            else:
                about = _update_info(about, file.parent, pairs)
            data = json.dumps(about, indent=2).encode("utf-8")
        with new_file(place, overwrite=overwrite(place), source=file, on_done=on_done) as out:
            out.write(data)


def _is_split_folder(folder: Path) -> bool:
    return (folder / _STATE).is_file() and isinstance(_load_object(folder / _STATE).get("_data_files"), list)


def _split_shards(folder: Path) -> list[Path]:
    """The shards in one folder that `Dataset.save_to_disk` wrote, in order."""
    state = _load_object(folder / _STATE)
    if state.get("_indices_data_files"):
        raise _folder_error(
            folder / _STATE,
            "it selects some of its rows by a separate index file, which is not read",
            "Save it with the selection applied: load_from_disk(FOLDER).flatten_indices().save_to_disk(OTHER)",
        )
    entries = state.get("_data_files")
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries or ()]
    if not isinstance(entries, list) or not all(map(_is_plain_name, names)):
        raise _folder_error(folder / _STATE, "its list '_data_files' does not name files next to it")
    shards = [folder / str(name) for name in names]
    missing = next((shard for shard in shards if not shard.is_file()), None)
    if missing is not None:
        raise _folder_error(folder / _STATE, f"it names {missing.name}, which is missing")
    return shards


def _is_plain_name(name: object) -> bool:
    """Whether a name is one of a file directly in a folder."""
    return isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\\", "\0"} & {*name}


def _load_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if there is none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _folder_error(path: Path, why: str, way_out: str = "") -> StorageError:
    way_out = way_out or "The copy is incomplete; copy the folder again, or pass the files with rows themselves."
    return StorageError(f"{path}: {why}.\n{way_out}")


def _update_info(info: Mapping[str, Any], folder: Path, pairs: Sequence[tuple[Path, Path]]) -> dict[str, Any]:
    """The contents of `dataset_info.json` with new counts; `pairs` are shards and what was written for them."""
    more = sum(new.stat().st_size - old.stat().st_size for old, new in pairs)
    before: list[int] = []
    after: list[int] = []
    columns: dict[str, None] = {}
    for shard, place in pairs:
        with open_arrow(shard) as source, open_arrow(place) as written:
            before.append(source.count())
            after.append(written.count())
            columns |= dict.fromkeys(name for name in written.schema.names if name not in source.schema.names)
    new = dict(info)
    splits, name = info.get("splits"), _load_object(folder / _STATE).get("_split")
    split = splits.get(name) if isinstance(splits, dict) else None
    # Saved after rows were selected, a data set still has the row count of its source, which stays.
    if isinstance(splits, dict) and isinstance(split, dict) and split.get("num_examples") == sum(before):
        counts = {**split, "num_examples": sum(after)}
        if split.get("shard_lengths") == before:
            counts["shard_lengths"] = after
        if isinstance(split.get("num_bytes"), int):
            counts["num_bytes"] = split["num_bytes"] + more
        new["splits"] = {**splits, name: counts}
        for total in ("dataset_size", "size_in_bytes"):
            if isinstance(info.get(total), int):
                new[total] = info[total] + more
    features = info.get("features")
    if isinstance(features, dict):
        added = {name: {"dtype": "string", "_type": "Value"} for name in columns if name not in features}
        new["features"] = {**features, **added}
    return new
