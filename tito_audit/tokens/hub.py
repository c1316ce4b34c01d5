"""A tokenizer's files from the Hugging Face hub, by repository and revision; without a network, from its cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tito_audit.errors import TokenizerError
from tito_audit.tokens.hub_cache import HubName, cached_revisions
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
"""Which files of a repository a tokenizer may need."""
_FEW = 5


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The files of one commit of a repository, on this machine."""

    folder: Path
    commit: str
    """Its hash, 40 hexadecimal digits."""


def snapshot_of(name: str, commit: str | None = None) -> Snapshot:
    """The tokenizer's files of a hub repository, downloaded if they are not in the cache; those of `commit`, if it
    is given, instead of the revision in the name.

    TokenizerError, in one line, for a name that is not a hub's, an unknown repository or revision, one that needs
    permission, and files that are neither in the cache nor to be had.
    """
    hub = HubName.of(name)
    if hub is None:
        raise TokenizerError(
            f"{name}: no such folder.\nA tokenizer is needed to re-encode the messages.\n"
            "Pass a folder with a tokenizer.json, or a hub name such as org/model or org/model@revision."
        )
    if commit is not None:
        hub = HubName(hub.repository, commit)
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    try:
        folder = Path(
            huggingface_hub.snapshot_download(hub.repository, revision=hub.revision, allow_patterns=FILES)
        )
    except (OSError, ValueError, RuntimeError, HfHubHTTPError) as error:
        raise _refused(name, hub, error) from error
    return Snapshot(folder, folder.name)


def _refused(name: str, hub: HubName, error: Exception) -> TokenizerError:
    """Why the files cannot be had, and what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, RevisionNotFoundError):
        return TokenizerError(f"{name}: {hub.repository} has no revision {hub.revision!r}; {_other_revision(hub)}")
    if isinstance(error, GatedRepoError):
        return TokenizerError(
            f"{name}: the repository is gated and this login has no access; ask for it on its page, then run "
            "`hf auth login` or set HF_TOKEN, or pass a folder with its tokenizer.json."
        )
    if isinstance(error, RepositoryNotFoundError):
        return TokenizerError(
            f"{name}: no such folder, and the hub has no repository {hub.repository}, or it is private; check the "
            "spelling, log in (`hf auth login`), or pass a folder with a tokenizer.json."
        )
    if isinstance(error, LocalEntryNotFoundError):
        return _not_here(name, hub, error)
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return TokenizerError(
        f"{name}: no such folder, and the hub did not give the repository ({reason}); check the spelling and the "
        "network, or pass a folder with a tokenizer.json."
    )


def _not_here(name: str, hub: HubName, error: Exception) -> TokenizerError:
    """The hub cannot be asked, and the cache lacks these files."""
    from huggingface_hub import constants

    asked = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
    held = cached_revisions(hub.repository)
    here = f"; the cache has {hub.repository} at {_few(held)}" if held else ""
    return TokenizerError(
        f"{name}: no such folder, and the hub's cache does not have its files, while {asked}{here}; download it "
        f"where there is a network (`hf download {hub.repository}"
        f"{f' --revision {hub.revision}' if hub.revision else ''}`), or pass a folder with a tokenizer.json."
    )


def _other_revision(hub: HubName) -> str:
    """Which revision may have been meant, or which there are."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    asked = hub.revision or ""
    try:
        refs = huggingface_hub.HfApi().list_repo_refs(hub.repository)
    except (OSError, ValueError, RuntimeError, HfHubHTTPError):
        return "pass a branch, a tag or the whole hash of a commit."
    named = [*refs.branches, *refs.tags]
    names = list(dict.fromkeys(one.name for one in named))
    begun = {one.target_commit for one in named if len(asked) > 3 and one.target_commit.startswith(asked)}
    if begun:
        return f"the hash of a commit is given whole: {_few(sorted(begun))}."
    close = close_names(asked, names)
    return f"did you mean {' or '.join(close)}?" if close else f"it has {_few(names)}, and commits by whole hash."


def _few(names: list[str]) -> str:
    return ", ".join([*names[:_FEW], *(["…"] if len(names) > _FEW else [])])
