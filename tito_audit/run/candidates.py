"""Tokenizers that may have written a log: passed, configured, named by the log, or in the local hub cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tito_audit.errors import TokenizerError
from tito_audit.identify.engine import Candidate
from tito_audit.identify.ids_alone import id_sequences
from tito_audit.record.rollout import Rollout
from tito_audit.run.auditor import template_source
from tito_audit.run.fit import stated_names
from tito_audit.tokens.hub import CachedTokenizer, HubName, cached_tokenizer, cached_tokenizers, read_summary
from tito_audit.tokens.load import load_tokenizer
from tito_audit.ways.way import OWN_TEMPLATE, NamedTemplate

_LOADED = 8
"""The most tokenizers of the hub cache that are loaded."""
_INSPECTED = 64
"""The most tokenizers of the hub cache whose vocabulary is looked at."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A tokenizer to try on a log."""

    name: str
    """As for `-t`."""
    because: str
    """Where the name comes from."""
    folder: Path | None = None
    """The folder of its files; None: its name says where they are, and the run fails if it cannot be loaded."""


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A tokenizer that was not tried, and why."""

    name: str
    because: str


@dataclass(frozen=True, slots=True)
class Candidates:
    """The tokenizers to try on a log."""

    tried: tuple[Candidate, ...] = ()
    because: tuple[str, ...] = ()
    """For each of them, where its name comes from."""
    passed_over: tuple[PassedOver, ...] = ()


def templates_of_files(files: Sequence[str]) -> tuple[NamedTemplate, ...]:
    """The chat templates in Jinja files; SetupError for one that cannot be read."""
    return tuple(
        NamedTemplate(Path(file).name, source=template_source(file), chat_template=file) for file in files
    )


def find_candidates(
    rollouts: Sequence[Rollout],
    logs: Sequence[Path],
    chosen: Sequence[str],
    configured: Sequence[str] = (),
    templates: Sequence[NamedTemplate] = (),
    *,
    trust_remote_code: bool = False,
) -> Candidates:
    """The tokenizers to try on rollouts, loaded, each with its own templates and the passed ones.

    If tokenizers are `chosen`, no others are tried. TokenizerError if one of them cannot be loaded.
    """
    passed_over: list[PassedOver] = []
    offers = [Offer(name, "given") for name in chosen]
    if not offers:
        offers = [Offer(name, "configured") for name in configured]
        for key, name in stated_names(rollouts).items():
            if HubName.parse(name) is None:
                continue
            folders = (log.parent / part for log in logs for part in dict.fromkeys((name, name.split("/")[-1])))
            beside = next((folder for folder in folders if (folder / "tokenizer.json").is_file()), None)
            cached = cached_tokenizer(name)
            if beside is not None:
                offers.append(Offer(str(beside), f"the log names its {key} '{name}'", beside))
            elif cached is not None:
                offers.append(Offer(cached.name, f"the log names its {key} '{name}'", cached.folder))
            elif name not in (passed.name for passed in passed_over):
                why = f"the log names this {key}, which is not on this machine: pass -t"
                passed_over.append(PassedOver(name, why))
        offers += _cached_offers(rollouts, {offer.name for offer in offers}, passed_over)
    tried: dict[str, tuple[Candidate, str]] = {}
    for offer in offers:
        if offer.name in tried:
            continue
        if offer.folder is None:
            tokenizer = load_tokenizer(offer.name, trust_remote_code=trust_remote_code)
        else:
            try:
                tokenizer = replace(load_tokenizer(str(offer.folder)), name=offer.name)
            except TokenizerError as error:
                passed_over.append(PassedOver(offer.name, str(error).split("\n")[0]))
                continue
        several = len(tokenizer.chat_templates) > 1
        own = (
            NamedTemplate(f"its template {name}", template_name=name)
            if several and name != "default"
            else OWN_TEMPLATE
            for name in tokenizer.chat_templates
        )
        tried[offer.name] = Candidate(tokenizer, (*own, *templates)), offer.because
    return Candidates(
        tuple(candidate for candidate, _ in tried.values()),
        tuple(because for _, because in tried.values()),
        tuple(passed_over),
    )


def _cached_offers(
    rollouts: Sequence[Rollout], offered: set[str], passed_over: list[PassedOver]
) -> Iterator[Offer]:
    """The tokenizers of the hub cache whose vocabulary has all the ids, the likeliest first."""
    cached = [tokenizer for tokenizer in cached_tokenizers() if tokenizer.name not in offered]
    passed_over += [PassedOver(other.name, "too many in the hub cache: pass -t") for other in cached[_INSPECTED:]]
    sequences = id_sequences(rollouts)
    largest = max((int(ids.max()) for ids in sequences), default=-1)
    ranked: list[tuple[int, CachedTokenizer]] = []
    for tokenizer in cached[:_INSPECTED]:
        seen = read_summary(tokenizer.folder)
        if seen is None:
            passed_over.append(PassedOver(tokenizer.name, "its tokenizer.json cannot be read"))
        elif largest >= seen.size:
            passed_over.append(
                PassedOver(tokenizer.name, f"its ids end at {seen.size - 1:,}, the log has {largest:,}")
            )
        else:
            opened = sum(int(ids[0]) in seen.control_ids for ids in sequences)  # sequences that open with one
            ranked.append((opened, tokenizer))
    ranked.sort(key=lambda pair: -pair[0])
    passed_over += [PassedOver(other.name, "others are more likely: pass -t") for _, other in ranked[_LOADED:]]
    yield from (Offer(tokenizer.name, "in the hub cache", tokenizer.folder) for _, tokenizer in ranked[:_LOADED])
