"""What the SEQ rules report of a broken link between calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tito_audit.chains.links import Link, LinkKind
from tito_audit.evidence.model import Against, Evidence, Explained
from tito_audit.record.finding import Hit, Where
from tito_audit.rules._words import listed


def _causes_of(link: Link, evidence: Evidence) -> list[Explained]:
    """The differences that broke a link, each with the rule it belongs to."""
    return [
        one
        for one in evidence.explained
        if one.difference.against is Against.NEXT_PROMPT and one.difference.later_turn == link.turn
    ]


def broken_prefixes(evidence: Evidence, *, by_tokenizer: bool) -> Iterator[Hit]:
    """Hits for links broken by re-tokenization, or else by the template.

    A break counts as re-tokenization if only the tokenizer, or decoding, explains it.
    """
    for link in evidence.links:
        if not link.kind.only_tokens_differ:
            continue
        causes = _causes_of(link, evidence)
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
    assert prompt is not None  # only turns with known prompts have links
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
