"""Tokenizers in the local cache of the Hugging Face hub, and a quick look into one; no network."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_PREFIX = "models--"


@dataclass(frozen=True, slots=True)
class CachedTokenizer:
    """A tokenizer that the hub client has downloaded."""

    name: str
    """What `-t` takes: the repository name if that leads here, else the folder."""
    folder: Path
    same: tuple[str, ...] = ()
    """Other repositories with the same files."""


@dataclass(frozen=True, slots=True)
class Glance:
    """What the files of a tokenizer say without loading it."""

    size: int
    """One more than its largest id."""
    control_ids: frozenset[int]


def hub_cache() -> Path:
    """The folder of the hub's cache, whether or not it exists."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser()
    if os.environ.get("HF_HOME"):
        return Path(os.environ["HF_HOME"]).expanduser() / "hub"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache).expanduser() if cache else Path.home() / ".cache") / "huggingface" / "hub"


def cached_tokenizers() -> list[CachedTokenizer]:
    """The tokenizers in the hub's cache with a `tokenizer.json`, last used first, each set of files once."""
    found: dict[tuple[Path | None, ...], CachedTokenizer] = {}
    for one in sorted(_snapshots(), key=_last_used, reverse=True):
        key = tuple(_content(one.folder / name) for name in _FILES)
        first = found.get(key)
        found[key] = one if first is None else CachedTokenizer(first.name, first.folder, (*first.same, one.name))
    return list(found.values())


def cached_tokenizer(name: str) -> CachedTokenizer | None:
    """The tokenizer in the hub's cache under the name of a repository; None if it is not there."""
    repository = hub_cache() / (_PREFIX + name.replace("/", "--"))
    return _snapshot(repository) if repository.parent == hub_cache() else None


def glance(folder: Path) -> Glance | None:
    """The size and control ids of the tokenizer in a folder; None if they cannot be read from `tokenizer.json`."""
    try:
        whole = orjson.loads((folder / "tokenizer.json").read_bytes())
        added = whole.get("added_tokens") or []
        ids = [int(one["id"]) for one in added] + [_last_id(whole["model"]["vocab"])]
        control = frozenset(int(one["id"]) for one in added if one.get("special"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return Glance(max(ids) + 1, control)


def _last_id(vocabulary: Mapping[str, int] | list[Any]) -> int:
    if isinstance(vocabulary, list):
        return len(vocabulary) - 1
    return max(vocabulary.values(), default=-1)


def _snapshots() -> Iterator[CachedTokenizer]:
    try:
        repositories = sorted(hub_cache().glob(f"{_PREFIX}*"))
    except OSError:
        return
    yield from (one for one in map(_snapshot, repositories) if one is not None)


def _snapshot(repository: Path) -> CachedTokenizer | None:
    """The snapshot of a repository's main branch, else the newest, if it holds a tokenizer."""
    try:
        folders = [one for one in (repository / "snapshots").iterdir() if (one / _FILES[0]).is_file()]
    except OSError:
        return None
    if not folders:
        return None
    main = _text(repository / "refs" / "main")
    for folder in folders:
        if folder.name == main:
            return CachedTokenizer(repository.name.removeprefix(_PREFIX).replace("--", "/", 1), folder)
    newest = max(folders, key=lambda folder: (folder / _FILES[0]).stat().st_mtime)
    return CachedTokenizer(str(newest), newest)


def _content(file: Path) -> Path | None:
    """The stored file, the same for files with the same content: the cache names it by its hash."""
    if not file.is_file():
        return None
    stored = file.resolve()
    return Path(stored.name) if stored.parent.name == "blobs" else stored


def _last_used(one: CachedTokenizer) -> float:
    return (one.folder / _FILES[0]).stat().st_atime


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
