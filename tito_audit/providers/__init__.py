"""Token providers: models and servers that sample and score ids, one file each."""

from __future__ import annotations

import os
from functools import cache

from tito_audit.errors import SetupError
from tito_audit.provider import ProviderKind, ProviderOptions, TokenProvider
from tito_audit.registry import load_plugins
from tito_audit.unknown import unknown_name


@cache
def all_providers() -> tuple[ProviderKind, ...]:
    """Every kind of provider, in order of names."""
    return load_plugins(__name__, ProviderKind, lambda kind: kind.name)


def open_provider(spec: str, options: ProviderOptions | None = None) -> TokenProvider:
    """The provider that `NAME=WHERE` names: `vllm=http://127.0.0.1:8000`, `hf=FOLDER`.

    SetupError for an unknown name, a missing address or folder, or a package that the provider needs.
    """
    name, equals, where = spec.partition("=")
    kinds = {kind.name: kind for kind in all_providers()}
    written = [f"{kind.name}={kind.where}" for kind in kinds.values()]
    if name not in kinds and equals:
        raise unknown_name("provider", name, kinds, choices=written, flag="--provider")
    if name not in kinds:
        raise SetupError(f"{spec}: a provider is written NAME=WHERE. Providers: {', '.join(written)}.")
    kind = kinds[name]
    if not where:
        raise SetupError(f"{spec}: {kind.title} needs a place: {kind.name}={kind.where}")
    return kind.open(where, options or ProviderOptions())


def key_of(spec: str) -> str | None:
    """The API key of a provider's server from the environment: `VLLM_API_KEY`, `SGLANG_API_KEY`; None if unset."""
    return os.environ.get(f"{spec.partition('=')[0].upper()}_API_KEY")
