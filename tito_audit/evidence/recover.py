"""The ids of tokens that a log holds only as strings and bytes; ambiguous tokens are counted."""

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
    """`[C]` the id of each token; None when a token has no id in the vocabulary."""
    problem: str | None
    """Which token has no id, and why; None when all were found."""
    ambiguous: int
    """Tokens whose bytes several ids spell; one of them was chosen."""


def recover_ids(
    token_texts: Sequence[TokenText], vocabulary: Vocabulary, end_ids: Collection[int]
) -> RecoveredIds:
    """The id of each token, looked up from its bytes, or its string where the log has no bytes.

    Where several ids spell the same bytes, the lowest that is not an added token is taken. A token without
    text at the end is the end token, if `end_ids` names any.
    """
    ids: list[int] = []
    ambiguous = 0
    for position, token in enumerate(token_texts):
        candidates = _candidates(token, vocabulary)
        if not candidates and _is_silent(token) and position == len(token_texts) - 1:
            candidates = tuple(sorted(end_ids))
        if not candidates:
            problem = f"token {position} ({token.text!r}) {_reason(token)}"
            return RecoveredIds(None, problem, ambiguous)
        ambiguous += len(candidates) > 1
        ids.append(min(candidates, key=lambda candidate: (candidate in vocabulary.added_ids, candidate)))
    return RecoveredIds(np.array(ids, np.int32), None, ambiguous)


def _candidates(token: TokenText, vocabulary: Vocabulary) -> tuple[int, ...]:
    if _lost_bytes(token) or _is_silent(token):
        return ()
    if token.data == b"":
        # A special token has no bytes of its own; only its text identifies it.
        named = vocabulary.ids_of_bytes(token.text.encode("utf-8", "surrogatepass"))
        return tuple(token for token in named if token in vocabulary.added_ids)
    if token.data is not None:
        bytes_of = token.data
    else:
        spelled = _BYTES_STRING.fullmatch(token.text)
        if spelled:
            bytes_of = bytes.fromhex(spelled[1].replace("\\x", ""))
        else:
            bytes_of = token.text.encode("utf-8", "surrogatepass")
    return vocabulary.ids_of_bytes(bytes_of)


def _lost_bytes(token: TokenText) -> bool:
    """True if a server wrote a replacement character where it could not decode the token alone."""
    return _REPLACEMENT in token.text and token.data in (None, token.text.encode("utf-8", "surrogatepass"))


def _is_silent(token: TokenText) -> bool:
    return not token.text and not token.data


def _reason(token: TokenText) -> str:
    if _lost_bytes(token):
        return "lost its bytes: the server wrote a replacement character where a character was cut"
    if _is_silent(token):
        return "has neither text nor bytes, so which special token it was is unknown"
    return "is not a token of this vocabulary: the log comes from another tokenizer, or the text was changed"
