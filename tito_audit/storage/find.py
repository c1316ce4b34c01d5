"""find_logs: files, folders and globs on the command line to log files."""

from __future__ import annotations

import difflib
import glob
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tito_audit.errors import StorageError
from tito_audit.storage.datasets import is_dataset, shards_under

LOG_SUFFIXES = (
    *(f"{base}{packed}" for base in (".jsonl", ".ndjson", ".json") for packed in ("", ".gz", ".zst")),
    *(".parquet", ".arrow", ".arrows", ".feather"),
)
"""Suffixes of logs found in a folder; a file named directly may have any name."""

_NOT_LOGS = {
    "added_tokens.json",
    "config.json",
    "dataset_dict.json",
    "dataset_info.json",
    "generation_config.json",
    "package.json",
    "special_tokens_map.json",
    "state.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "trainer_state.json",
    "vocab.json",
}
"""JSON files of models and data sets that are not logs."""

_CACHED = re.compile(r"(?:cache-.*|indices)\.arrow")
"""Names of files that `datasets` computed from other files in the folder."""

_OURS = re.compile(
    rb'\{"(?:summary|before)":\{"schema_version":|\{"code":"[A-Z]{3}\d{3}","severity":"|\{"what": "tito-audit |'
    rb'\{"\$schema":"[^"]*/sarif-schema'
)
"""How tito-audit's own reports and baselines begin, which may be in a folder of logs."""
_BEGINNING = 128

_URL = re.compile(r"^[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def find_logs(arguments: Sequence[str]) -> list[Path]:
    """The files that arguments name, each once and in order: files, folders (searched recursively), globs."""
    found: dict[Path, None] = {}
    for argument in arguments:
        for path in _files(argument):
            found.setdefault(path)
    return list(found)


def _files(argument: str) -> list[Path]:
    if _URL.match(argument):
        raise StorageError(_about_url(argument))
    path = Path(argument).expanduser()
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
    raise StorageError(f"{argument}: no such file or folder.{_close_names(path)}")


def _of_match(path: Path) -> list[Path]:
    """A file that a glob matched, or the logs in a folder that it matched, if any."""
    return _sorted_logs(path) if path.is_dir() else [path]


def _in_folder(folder: Path) -> list[Path]:
    files = _sorted_logs(folder)
    if not files:
        raise StorageError(
            f"{folder}: no log in this folder or below. Looked for names that end in "
            f"{', '.join(LOG_SUFFIXES)}. If a log has another name, pass the file itself."
        )
    return files


def _sorted_logs(folder: Path) -> list[Path]:
    """The logs of a folder by name; the shards of a data set together, in the order of its rows."""
    return [path for _, found in sorted(_logs_under(folder)) for path in found]


def _logs_under(folder: Path) -> Iterator[tuple[Path, list[Path]]]:
    """Each log by itself; the shards of each data set together, under its folder."""
    for root, folders, files in os.walk(folder, onerror=_refuse):
        if is_dataset(Path(root)):
            folders.clear()
            yield Path(root), shards_under(Path(root))
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            if not name.startswith(".") and name.endswith(LOG_SUFFIXES) and name not in _NOT_LOGS:
                path = Path(root) / name
                if not _is_ours(path) and _CACHED.fullmatch(name) is None:
                    yield path, [path]


def _is_ours(path: Path) -> bool:
    """Whether a file is one of our reports or baselines; False if it cannot be read, which is reported later."""
    if not path.name.endswith((".json", ".jsonl", ".ndjson")) or not path.is_file():
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
    names = [entry.name for entry in os.scandir(folder)]
    close = difflib.get_close_matches(path.name, names, n=3)
    return f" Did you mean {' or '.join(str(folder / name) for name in close)}?" if close else ""


def _about_url(argument: str) -> str:
    if argument.startswith("hf://"):
        way = "hf download NAME --repo-type dataset --local-dir logs"
    elif argument.startswith("s3://"):
        way = f"aws s3 cp --recursive {argument} logs"
    elif argument.startswith(("gs://", "gcs://")):
        way = f"gcloud storage cp -r {argument} logs"
    elif argument.startswith("file://"):
        way = f"tito-audit scan {argument.removeprefix('file://')}"
        return f"{argument}: logs are named by path, not by URL.\nPass the path: {way}"
    else:
        way = f"curl -LO {argument}"
    return (
        f"{argument}: logs are read from disk only, so that a scan gives the same result twice.\n"
        f"Download it first ({way}) and pass the file."
    )
