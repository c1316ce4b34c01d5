"""How much memory the library takes to search texts for tokens: by the letters that they do not share.

All added tokens together become one automaton, and the whole vocabulary of a Unigram model one trie. Both have a
state for each different beginning of a token, and take thousands of times the memory of the file if tokens are
long and differ from each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise, takewhile
from operator import eq
from pathlib import Path
from typing import Any

from tito_audit.errors import TokenizerError

ADDED_STATES = 300_000
"""States of the automaton of added tokens, of up to 2 kB each; a speech model's 65,536 tokens have 200,000."""
UNIGRAM_STATES = 2_000_000
"""States of the trie of a Unigram model, of up to 360 bytes each; 250,000 tokens have about a million."""


_PIECE = 128
"""Characters of a token of Unigram, which looks for tokens from each place of a text on."""


def check_tries(parts: Mapping[str, Any], file: Path) -> None:
    """TokenizerError if parts of a `tokenizer.json` would take too much memory."""
    added = parts.get("added_tokens")
    tokens = [token for token in added if isinstance(token, Mapping)] if isinstance(added, list) else []
    check_added([str(token.get("content")) for token in tokens], file)
    _check(_pieces(parts), UNIGRAM_STATES, "tokens of a Unigram model", file)


def check_added(texts: Iterable[str], file: Path) -> None:
    """TokenizerError for added tokens that would take too much memory together."""
    _check(texts, ADDED_STATES, "added tokens", file)


def long_piece(parts: Mapping[str, Any]) -> str | None:
    """What makes a Unigram model slow, in a few words; None if nothing does."""
    return "long tokens of Unigram" if any(len(text) > _PIECE for text in _pieces(parts)) else None


def _pieces(parts: Mapping[str, Any]) -> list[str]:
    """The tokens of a Unigram model; none of any other."""
    model = parts.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    pairs = vocabulary if isinstance(vocabulary, list) else ()
    return [pair[0] for pair in pairs if isinstance(pair, list) and pair and isinstance(pair[0], str)]


def states(texts: Iterable[str]) -> int:
    """How many different beginnings texts have, in bytes."""
    ordered = sorted({text.encode("utf-8", "surrogatepass") for text in texts})
    shared = sum(sum(1 for _ in takewhile(bool, map(eq, one, other))) for one, other in pairwise(ordered))
    return sum(map(len, ordered)) - shared


def _check(texts: Iterable[str], most: int, what: str, file: Path) -> None:
    known = list(texts)
    if 4 * sum(map(len, known)) <= most:  # a character has four bytes at most
        return
    found = states(known)
    if found > most:
        raise TokenizerError(
            f"{file}: {len(known):,} {what} that have {found:,} different beginnings, and {most:,} are the most.\n"
            "They would take gigabytes of memory. Download the tokenizer again."
        )
