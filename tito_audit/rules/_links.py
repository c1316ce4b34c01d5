"""What the SEQ rules say of a broken link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tito_audit.chains.links import Link, LinkKind
from tito_audit.evidence.model import Against, Evidence, Explained
from tito_audit.record.finding import Hit, Where
from tito_audit.rules._words import listed

__all__ = ["broken_prefixes", "causes_of", "link_hit"]


def causes_of(link: Link, evidence: Evidence) -> list[Explained]:
    """The differences that broke a link, with the rules that own them."""
    return [
        one
        for one in evidence.explained
        if one.difference.against is Against.NEXT_PROMPT and one.difference.later_turn == link.turn
    ]


def broken_prefixes(evidence: Evidence, *, by_tokenizer: bool) -> Iterator[Hit]:
    """Links broken by re-tokenization, or by the template.

    A break counts as re-tokenization when nothing but the tokenizer, or decoding itself, explains it.
    """
    for link in evidence.links:
        if not link.kind.only_tokens_differ:
            continue
        causes = causes_of(link, evidence)
        text_kept = bool(causes) and all(one.code.startswith("TOK") for one in causes)
        if (link.kind is LinkKind.RETOKENIZED or text_kept) is not by_tokenizer:
            continue
        counts = Counter(one.cause for one in causes)
        what = listed([cause if n == 1 else f"{n} × {cause}" for cause, n in counts.items()]) or link.detail
        same = "the same text" if link.kind is LinkKind.RETOKENIZED else "what decoding made of the history"
        lead = f"{same} comes back as other ids" if by_tokenizer else "the history comes back as other text"
        yield link_hit(link, evidence, f"{lead} ({what})", "; ".join(sorted(counts)) or "cause unknown")


def link_hit(link: Link, evidence: Evidence, what: str, cause: str) -> Hit:
    """A hit at the first token of the prompt that breaks the link."""
    prompt = evidence.rollout.turns[link.turn].prompt_ids
    assert prompt is not None  # a link is of a turn whose prompt is known
    size = len(prompt)
    start = min(link.at, size)
    before = f"what turn {link.parent} saw and said" if link.parent is not None else "any earlier call"
    relation = "starts with" if link.at >= size else "does not start with"
    message = f"turn {link.turn}'s prompt {relation} {before}, from token {start} on: {what}"
    if link.kind in (LinkKind.RETRY, LinkKind.SIBLING, LinkKind.ORPHAN):
        message = f"turn {link.turn}: {what}"
    end = min(start + 1, size)
    side = evidence.side(prompt[start : start + 8])
    return Hit(Where.PROMPT, start, end, message, turn=link.turn, cause=cause, recorded=side)
