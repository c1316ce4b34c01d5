"""Conversations as logs of calls, each with its complete prompt, so T answers take O(T²) ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["calls_of", "calls_type", "ids_of", "names_of", "recorded_ids", "runs_of"]

_LISTS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
_NAMES = (("prompt_token_ids", "generation_token_ids"), ("prompt_ids", "completion_ids"))


def calls_of(ids: Any, mask: Any, logprobs: Any, heard: Any, heard_mask: Any) -> list[dict[str, Any]]:
    """The calls of a conversation whose answers are the runs of the mask, `[T]` ids, mask and logprobs.

    Later prompts hold `heard` instead of `ids`: the ids themselves, or their text encoded again.
    """
    answers, asked = runs_of(mask), runs_of(heard_mask)
    assert len(answers) == len(asked)
    return [
        {
            "prompt_token_ids": heard[:end],
            "generation_token_ids": ids[first:last],
            "generation_log_probs": logprobs[first:last],
            "finish_reason": "stop",
        }
        for (first, last), (end, _) in zip(answers, asked, strict=True)
    ]


def recorded_ids(calls: Sequence[dict[str, Any]]) -> int:
    """How many ids the calls hold."""
    return sum(len(ids) for call in calls for ids in ids_of(call))


def names_of(call: dict[str, Any]) -> tuple[str, str]:
    """The names of a call's columns of prompt ids and answer ids."""
    return _NAMES[0] if _NAMES[0][0] in call else _NAMES[1]


def ids_of(call: dict[str, Any]) -> tuple[Any, Any]:
    """The ids of a call's prompt and of its answer."""
    prompt, answer = names_of(call)
    return call[prompt], call[answer]


def calls_type(*, text: bool = False) -> Any:
    """The Arrow type of a column of calls; with `text`, calls may hold the text of their answer."""
    import pyarrow as pa

    values = (pa.int32(), pa.int32(), pa.float32())
    fields = [(name, pa.list_(value)) for name, value in zip(_LISTS, values, strict=True)]
    said = [("text", pa.string())] if text else []
    return pa.list_(pa.struct([*fields, ("finish_reason", pa.string()), *said]))


def runs_of(mask: Any) -> list[tuple[int, int]]:
    """The runs in which the mask is set."""
    edges = np.flatnonzero(np.diff(mask, prepend=0, append=0)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))
