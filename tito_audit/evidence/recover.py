"""Recovers the ids of tokens that a log holds only as strings and bytes."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from tito_audit.record.arrays import Ids
from tito_audit.record.rollout import TokenText
from tito_audit.tokens.vocab import Vocabulary

_BYTES_STRING = re.compile(r"bytes:((?:\\x[0-9a-fA-F]{2})+)")
"""How completions APIs write a token that is not valid text on its own: `bytes:\\xe2\\x9c`."""
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class RecoveredIds:
    """The ids recovered from a list of token strings."""

    ids: Ids | None
    """`[C]` the id of each token; None if a token has no id in the vocabulary."""
    problem: str | None
    """Which token has no id, and why; None if all were found."""
    ambiguous: int
    """How many tokens have bytes that several ids spell; one of these was chosen."""


def recover_ids(
    token_texts: Sequence[TokenText], vocabulary: Vocabulary, end_ids: Collection[int]
) -> RecoveredIds:
    """Look up the id of each token by its bytes, or by its string if the log has no bytes.

    If several ids spell the same bytes, the lowest that is no added token is taken. A last token without text is
    the end token, the lowest of `end_ids`.
    """
    ids: list[int] = []
    ambiguous = 0
    for position, token in enumerate(token_texts):
        candidates = _candidates(token, vocabulary)
        if not candidates and _has_no_text(token) and position == len(token_texts) - 1:
            candidates = tuple(sorted(end_ids))
        if not candidates:
            if _lost_bytes(token):
                reason = "lost its bytes: the server wrote a replacement character where a character was cut"
            elif _has_no_text(token):
                reason = "has neither text nor bytes, so which special token it was is unknown"
            else:
                reason = "is not a token of this vocabulary: "
                reason += "the log comes from another tokenizer, or the text was changed"
            return RecoveredIds(None, f"token {position} ({token.text!r}) {reason}", ambiguous)
        ambiguous += len(candidates) > 1
        ids.append(min(candidates, key=lambda candidate: (candidate in vocabulary.added_ids, candidate)))
    return RecoveredIds(np.array(ids, np.int32), None, ambiguous)


def _candidates(token: TokenText, vocabulary: Vocabulary) -> tuple[int, ...]:
    """The ids that may be this token; () if its bytes are unknown."""
    if _lost_bytes(token) or _has_no_text(token):
        return ()
    if token.data:
        return vocabulary.ids_of_bytes(token.data)
    escaped = _BYTES_STRING.fullmatch(token.text)
    if escaped and token.data is None:
        return vocabulary.ids_of_bytes(bytes.fromhex(escaped[1].replace("\\x", "")))
    ids = vocabulary.ids_of_bytes(token.text.encode("utf-8", "surrogatepass"))
    # A special token may have text and empty bytes.
    return ids if token.data is None else tuple(id_ for id_ in ids if id_ in vocabulary.added_ids)


def _lost_bytes(token: TokenText) -> bool:
    """Whether a server wrote a replacement character because it could not decode the token alone."""
    return _REPLACEMENT in token.text and token.data in (None, token.text.encode("utf-8", "surrogatepass"))


def _has_no_text(token: TokenText) -> bool:
    return not token.text and not token.data
