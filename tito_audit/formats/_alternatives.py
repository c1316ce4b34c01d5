"""The alternatives that a server logged for a token: the logprobs of the top k."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tito_audit.formats._columns import Raw, is_list

_FIRST = 32
"""How many tokens of a call are read; they show the unit of the logprobs, which all tokens share."""
_MOST = 64
"""How many alternatives are read per token."""


def alternatives(logged: Any) -> tuple[tuple[float, ...], ...]:
    """The distinct top k logprobs of a call's first tokens; () if the log has one value per token.

    OpenAI's objects (`content` with `top_logprobs`, or lists of texts and logprobs), or a list for each token.
    Equal values count once: some servers repeat the sampled token.
    """
    tokens: Any = logged
    if isinstance(logged, dict | Mapping):
        tokens = logged.get("content")
        if is_list(tokens):
            tokens = [one.get("top_logprobs") if isinstance(one, Mapping) else None for one in tokens[:_FIRST]]
        else:
            tokens = logged.get("top_logprobs")
    if not is_list(tokens) or not len(tokens) or isinstance(tokens[0], int | float):
        return ()
    found = (_values(one) for one in tokens[:_FIRST])
    return tuple(values for values in found if len(values) > 1)


def _values(top: Any) -> tuple[float, ...]:
    entries: Iterable[Any] = ()
    if isinstance(top, dict | Mapping):
        entries = list(top.values())[:_MOST]
    elif is_list(top):
        entries = [one.get("logprob") if isinstance(one, dict | Mapping) else one for one in _part(top)]
    numbers = {float(one) for one in entries if isinstance(one, int | float) and not isinstance(one, bool)}
    return tuple(sorted(numbers, reverse=True))


def _part(top: Raw) -> Raw:
    part: Raw = top[:_MOST]
    # SGLang's [logprob, id, text] and [logprob, id] are one token, not alternatives.
    return () if len(part) in (2, 3) and isinstance(part[1], int) else part
