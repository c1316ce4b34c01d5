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
        spelled = token.text.encode("utf-8", "surrogatepass")
        # The server could not decode the token alone.
        lost_bytes = _REPLACEMENT in token.text and token.data in (None, spelled)
        no_text = not token.text and not token.data
        escaped = _BYTES_STRING.fullmatch(token.text) if token.data is None else None
        candidates: tuple[int, ...] = ()
        if no_text and position == len(token_texts) - 1:
            candidates = tuple(sorted(end_ids))
        elif token.data and not lost_bytes:
            candidates = vocabulary.ids_of_bytes(token.data)
        elif escaped:
            candidates = vocabulary.ids_of_bytes(bytes.fromhex(escaped[1].replace("\\x", "")))
        elif not lost_bytes and not no_text:
            candidates = vocabulary.ids_of_bytes(spelled)
            if token.data is not None:  # a special token may have text and empty bytes
                candidates = tuple(id_ for id_ in candidates if id_ in vocabulary.added_ids)
        if not candidates:
            if lost_bytes:
                reason = "lost its bytes: the server wrote a replacement character where a character was cut"
            elif no_text:
                reason = "has neither text nor bytes, so which special token it was is unknown"
            else:
                reason = "is not a token of this vocabulary: "
                reason += "the log comes from another tokenizer, or the text was changed"
            return RecoveredIds(None, f"token {position} ({token.text!r}) {reason}", ambiguous)
        ambiguous += len(candidates) > 1
        ids.append(min(candidates, key=lambda candidate: (candidate in vocabulary.added_ids, candidate)))
    return RecoveredIds(np.array(ids, np.int32), None, ambiguous)
