"""Folders that `datasets` saves: which files hold the rows, and their metadata once rows change.

`Dataset.save_to_disk` writes the shards, `state.json`, which lists them in order, and `dataset_info.json`;
`DatasetDict.save_to_disk` writes such a folder for each split, and `dataset_dict.json`, which lists the splits.
"""

from __future__ import annotations

import filecmp
import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tito_audit.errors import StorageError
from tito_audit.storage.arrow import open_arrow
from tito_audit.storage.atomic import Sealed, new_file

_STATE, _INFO, _DICT = "state.json", "dataset_info.json", "dataset_dict.json"
MARKS = frozenset((_STATE, _DICT))
"""Names of files of which every folder that `datasets` saved has one."""


def is_dataset(folder: Path) -> bool:
    """Whether `datasets` saved this folder: one data set, or several splits."""
    return (folder / _DICT).is_file() or _is_single(folder)


def shards_under(folder: Path) -> list[Path]:
    """The shards of a folder that `datasets` saved, split by split, in the order of their rows.

    StorageError if the folder lacks a file that its metadata lists, or lists a file outside of it.
    """
    if not (folder / _DICT).is_file():
        return _shards(folder)
    splits = _object(folder / _DICT).get("splits")
    if not isinstance(splits, list) or not all(_is_name(split) for split in splits):
        raise _bad_folder(folder / _DICT, "its list 'splits' does not name folders next to it")
    shards = []
    for split in splits:
        if not (folder / split / _STATE).is_file():
            raise _bad_folder(folder / _DICT, f"it names the split {split!r}, but {split}/{_STATE} is missing")
        shards += _shards(folder / split)
    return shards


def dataset_metadata(logs: Sequence[str], targets: Mapping[Path, Path]) -> dict[Path, Path]:
    """The metadata files of data sets whose shards are written again, each with its new place.

    Only of folders in `logs`, or below one of them.
    """
    named = [Path(log) for log in logs if Path(log).is_dir()]
    metadata: dict[Path, Path] = {}
    for folder in dict.fromkeys(file.parent for file in targets):
        places = _target_folder(folder, targets) if any(map(folder.is_relative_to, named)) else None
        if places is None:
            continue
        metadata |= {folder / name: places / name for name in (_STATE, _INFO) if (folder / name).is_file()}
        above = folder.parent / _DICT
        if above.is_file() and any(map(folder.parent.is_relative_to, named)):
            metadata[above] = places.parent / _DICT
    return metadata


def write_dataset_metadata(
    logs: Sequence[str],
    targets: Mapping[Path, Path],
    *,
    overwrite: Callable[[Path], bool],
    sealed: Sealed | None = None,
) -> None:
    """Write the metadata files of `dataset_metadata`, updated for the shards as written.

    Row and byte counts follow the shards, an added column becomes a feature, and a data set in which anything
    changed gets a new fingerprint, or `datasets` would use what it cached of the old one. `overwrite` says which
    files may be replaced; `sealed` is called for each just before it appears.
    """
    for file, place in dataset_metadata(logs, targets).items():
        data = file.read_bytes()
        pairs = [(shard, targets[shard]) for shard in _shards(file.parent)] if file.name != _DICT else []
        if not all(filecmp.cmp(*pair, shallow=False) for pair in pairs):
            about = _object(file)
            changed = _new_state(about, pairs) if file.name == _STATE else _new_info(about, file.parent, pairs)
            data = json.dumps(changed, indent=2).encode("utf-8")
        with new_file(place, overwrite=overwrite(place), source=file, sealed=sealed) as out:
            out.write(data)


def _is_single(folder: Path) -> bool:
    return (folder / _STATE).is_file() and isinstance(_object(folder / _STATE).get("_data_files"), list)


def _shards(folder: Path) -> list[Path]:
    """The shards of one data set, in order."""
    state = _object(folder / _STATE)
    if state.get("_indices_data_files"):
        raise _bad_folder(
            folder / _STATE,
            "it selects some of its rows by a separate index file, which is not read",
            "Save it with the selection applied: load_from_disk(FOLDER).flatten_indices().save_to_disk(OTHER)",
        )
    entries = state.get("_data_files")
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries or ()]
    if not isinstance(entries, list) or not all(map(_is_name, names)):
        raise _bad_folder(folder / _STATE, "its list '_data_files' does not name files next to it")
    shards = [folder / str(name) for name in names]
    missing = next((shard for shard in shards if not shard.is_file()), None)
    if missing is not None:
        raise _bad_folder(folder / _STATE, f"it names {missing.name}, which is missing")
    return shards


def _is_name(name: object) -> bool:
    """Whether a name stays inside its folder."""
    return isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\\", "\0"} & {*name}


def _object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if there is none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _bad_folder(path: Path, why: str, way_out: str = "") -> StorageError:
    way_out = way_out or "The copy is incomplete; copy the folder again, or pass the files with rows themselves."
    return StorageError(f"{path}: {why}.\n{way_out}")


def _target_folder(folder: Path, targets: Mapping[Path, Path]) -> Path | None:
    """The folder that all shards of a data set go to under their own names; None if there is no such folder."""
    if not _is_single(folder):
        return None
    shards = _shards(folder)
    places = {targets[shard].parent if shard in targets else None for shard in shards}
    same_names = all(shard in targets and targets[shard].name == shard.name for shard in shards)
    return places.pop() if same_names and len(places) == 1 else None


_Pairs = Sequence[tuple[Path, Path]]
"""Pairs of a shard and the file written for it."""


def _new_state(state: Mapping[str, Any], pairs: _Pairs) -> dict[str, Any]:
    seen = blake2b(str(state.get("_fingerprint")).encode(), digest_size=8)
    for _, written in pairs:
        with written.open("rb") as file:
            for block in iter(lambda: file.read(1 << 20), b""):
                seen.update(block)
    return {**state, "_fingerprint": seen.hexdigest()}


def _new_info(info: Mapping[str, Any], folder: Path, pairs: _Pairs) -> dict[str, Any]:
    """The contents of `dataset_info.json`, with its counts updated for these shards."""
    more = sum(new.stat().st_size - old.stat().st_size for old, new in pairs)
    before: list[int] = []
    after: list[int] = []
    columns: dict[str, None] = {}
    for shard, place in pairs:
        with open_arrow(shard) as source, open_arrow(place) as written:
            before.append(sum(source.lengths()))
            after.append(sum(written.lengths()))
            columns |= dict.fromkeys(name for name in written.schema.names if name not in source.schema.names)
    new = dict(info)
    splits, name = info.get("splits"), _object(folder / _STATE).get("_split")
    split = splits.get(name) if isinstance(splits, dict) else None
    # A data set saved after rows were selected still states the row count of its source: leave that alone.
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
