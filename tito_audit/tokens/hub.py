"""Tokenizer files from the Hugging Face hub or its local cache, by repository and revision."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import orjson

from tito_audit.errors import ODD_VALUES, TokenizerError
from tito_audit.settings.values import expand_user
from tito_audit.unknown import close_names

FILES = [
    "tokenizer*",
    "*token*.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
]
"""The files of a repository that a tokenizer may need."""
_MAX_NAMES = 5


def download_snapshot(name: str, commit: str | None = None) -> Path:
    """The local folder with a repository's tokenizer files, named by their commit; downloads what is not cached.

    The commit is `commit` if given, else that of the revision in `name`. TokenizerError if `name` is no hub name,
    if the repository or revision is unknown or needs permission, or if the files can be neither found nor
    downloaded.
    """
    hub = HubName.parse(name)
    if hub is None:
        raise TokenizerError(
            f"{name}: no such folder.\nA tokenizer is needed to re-encode the messages.\n"
            "Pass a folder with a tokenizer.json, or a hub name such as org/model or org/model@revision."
        )
    if commit is not None:
        hub = HubName(hub.repository, commit)
    import huggingface_hub
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(huggingface_hub.snapshot_download(hub.repository, revision=hub.revision, allow_patterns=FILES))
    except RevisionNotFoundError as error:
        hint = _suggest_revision(hub)
        raise TokenizerError(f"{name}: {hub.repository} has no revision {hub.revision!r}; {hint}") from error
    except GatedRepoError as error:
        raise TokenizerError(
            f"{name}: the repository is gated and this login has no access; ask for it on its page, then run "
            "`hf auth login` or set HF_TOKEN, or pass a folder with its tokenizer.json."
        ) from error
    except RepositoryNotFoundError as error:
        raise TokenizerError(
            f"{name}: no such folder, and the hub has no repository {hub.repository}, or it is private; check the "
            "spelling, log in (`hf auth login`), or pass a folder with a tokenizer.json."
        ) from error
    except LocalEntryNotFoundError as error:
        is_offline = huggingface_hub.constants.HF_HUB_OFFLINE
        because = "HF_HUB_OFFLINE is set" if is_offline else "the hub cannot be reached"
        revisions = cached_revisions(hub.repository)
        here = f"; the cache has {hub.repository} at {_first_names(revisions)}" if revisions else ""
        raise TokenizerError(
            f"{name}: no such folder, and the hub's cache does not have its files, while {because}{here}; "
            f"download it where there is a network (`hf download {hub.repository}"
            f"{f' --revision {hub.revision}' if hub.revision else ''}`), or pass a folder with a tokenizer.json."
        ) from error
    except (OSError, ValueError, RuntimeError, HfHubHTTPError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TokenizerError(
            f"{name}: no such folder, and the hub did not give the repository ({reason}); check the spelling and "
            "the network, or pass a folder with a tokenizer.json."
        ) from error


def _suggest_revision(hub: HubName) -> str:
    """Which revision may have been meant, or which ones exist."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    revision = hub.revision or ""
    try:
        refs = huggingface_hub.HfApi().list_repo_refs(hub.repository)
    except (OSError, ValueError, RuntimeError, HfHubHTTPError):
        return "pass a branch, a tag or the whole hash of a commit."
    named = [*refs.branches, *refs.tags]
    names = list(dict.fromkeys(ref.name for ref in named))
    begun = {ref.target_commit for ref in named if len(revision) > 3 and ref.target_commit.startswith(revision)}
    if begun:
        return f"the hash of a commit is given whole: {_first_names(sorted(begun))}."
    close = close_names(revision, names)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"it has {_first_names(names)}, and commits by whole hash."


def _first_names(names: list[str]) -> str:
    return ", ".join([*names[:_MAX_NAMES], *(["…"] if len(names) > _MAX_NAMES else [])])


_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_PREFIX = "models--"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[\w.+-][\w.+/-]*)?")
_URL = "hf://"


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository of the hub, at a revision."""

    repository: str
    revision: str | None = None
    """A branch, a tag or the hash of a commit; None: the main branch."""

    @classmethod
    def parse(cls, name: str) -> HubName | None:
        """Parse `ORG/NAME`, `ORG/NAME@REVISION` or `hf://ORG/NAME@REVISION`; None for any other name."""
        plain = unquote(name.removeprefix(_URL)) if name.startswith(_URL) else name
        if not _NAME.fullmatch(plain) or ".." in plain:
            return None
        repository, _, revision = plain.partition("@")
        return cls(repository, revision or None)


@dataclass(frozen=True, slots=True)
class CachedTokenizer:
    """A tokenizer in the hub's local cache."""

    name: str
    """What `-t` takes: the repository if its main branch is this snapshot, else the folder."""
    folder: Path
    same: tuple[str, ...] = ()
    """Other repositories with the same files."""


@dataclass(frozen=True, slots=True)
class TokenizerSummary:
    """What `tokenizer.json` shows without loading the tokenizer."""

    size: int
    """One more than its largest id."""
    control_ids: frozenset[int]


def hub_cache() -> Path:
    """The folder of the hub's local cache, whether or not it exists."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return expand_user(os.environ[name])
    if os.environ.get("HF_HOME"):
        return expand_user(os.environ["HF_HOME"]) / "hub"
    cache = os.environ.get("XDG_CACHE_HOME")
    return expand_user(cache or "~/.cache") / "huggingface" / "hub"


def cached_tokenizers() -> list[CachedTokenizer]:
    """The cached tokenizers with a `tokenizer.json`, last used first; equal files are listed once."""
    by_files: dict[tuple[Path | None, ...], CachedTokenizer] = {}
    try:
        repositories = sorted(hub_cache().glob(f"{_PREFIX}*"))
    except OSError:
        return []
    snapshots = [snapshot for snapshot in map(_snapshot, repositories) if snapshot is not None]
    for snapshot in sorted(snapshots, key=lambda s: (s.folder / _FILES[0]).stat().st_atime, reverse=True):
        stored = [path.resolve() if (path := snapshot.folder / name).is_file() else None for name in _FILES]
        # The name of a cached blob is a hash of its content.
        key = tuple(Path(file.name) if file and file.parent.name == "blobs" else file for file in stored)
        first = by_files.get(key)
        by_files[key] = (
            snapshot if first is None else CachedTokenizer(first.name, first.folder, (*first.same, snapshot.name))
        )
    return list(by_files.values())


def cached_tokenizer(name: str) -> CachedTokenizer | None:
    """The tokenizer in the hub's cache under the name of a repository, with or without `@REVISION`; None if it is
    not there."""
    hub = HubName.parse(name)
    if hub is None:
        return None
    repository = _repository_folder(hub.repository)
    if hub.revision is None:
        return _snapshot(repository)
    commit = _read_text(repository / "refs" / hub.revision) or hub.revision
    folder = repository / "snapshots" / commit
    return CachedTokenizer(name, folder) if "/" not in commit and (folder / _FILES[0]).is_file() else None


def cached_revisions(repository: str) -> list[str]:
    """The cached revisions of a repository's tokenizer: branches and tags, then other commits."""
    place = _repository_folder(repository)
    commits = sorted(folder.parent.name for folder in place.glob(f"snapshots/*/{_FILES[0]}"))
    files = [file for file in sorted(place.glob("refs/**/*")) if file.is_file() and _read_text(file) in commits]
    named = {_read_text(file) for file in files}
    names = [file.relative_to(place / "refs").as_posix() for file in files]
    return [*names, *(commit for commit in commits if commit not in named)]


def read_summary(folder: Path) -> TokenizerSummary | None:
    """The vocabulary size and control ids in a folder's `tokenizer.json`; None if it cannot be read."""
    try:
        whole = orjson.loads((folder / "tokenizer.json").read_bytes())
        added = whole.get("added_tokens") or []
        vocabulary = whole["model"]["vocab"]
        ids = [int(token["id"]) for token in added]
        ids.append(len(vocabulary) - 1 if isinstance(vocabulary, list) else max(vocabulary.values(), default=-1))
        control = frozenset(int(token["id"]) for token in added if token.get("special"))
        return TokenizerSummary(max(ids) + 1, control)
    except (OSError, *ODD_VALUES):
        return None


def _repository_folder(name: str) -> Path:
    return hub_cache() / (_PREFIX + name.replace("/", "--"))


def _snapshot(repository: Path) -> CachedTokenizer | None:
    """The cached snapshot of a repository's main branch, else the newest one; None if none holds a tokenizer."""
    try:
        folders = [each for each in (repository / "snapshots").iterdir() if (each / _FILES[0]).is_file()]
    except OSError:
        return None
    if not folders:
        return None
    main = _read_text(repository / "refs" / "main")
    for folder in folders:
        if folder.name == main:
            return CachedTokenizer(repository.name.removeprefix(_PREFIX).replace("--", "/", 1), folder)
    newest = max(folders, key=lambda folder: (folder / _FILES[0]).stat().st_mtime)
    return CachedTokenizer(str(newest), newest)


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
