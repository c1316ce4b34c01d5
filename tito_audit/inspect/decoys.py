"""Decoys: lists of integers or flags that are not tokens or masks, recognized by values and names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tito_audit.formats import (
    COMPLETION_IDS,
    FLAT_IDS,
    PARAMETER,
    PROMPT_IDS,
    in_snake_case,
    no_loss_mask_by_name,
    no_tokens_by_name,
)
from tito_audit.inspect.columns import Column, NumberFacts, Numbers

InVocabulary = Callable[[Numbers], Numbers]
"""Which of these ids are in the vocabulary."""

_NAMED = {*FLAT_IDS, *PROMPT_IDS, *COMPLETION_IDS}
_SHORT = 4
"""Shorter lists count as tokens only if a mask or logprobs have the same length."""
_LONG = 8
"""The least length of a prompt that all rows share."""
_STEPS = 12
"""How many pairs of neighbours are needed to see a pattern."""
_ENOUGH = 48
"""How many numbers are needed to judge frequencies."""
_FEW_DIFFERENT = 8
_OFTEN = 0.4
"""No token makes up this share of a text."""
_CHARACTERS = 40
"""Maximum characters of text per token; 3 to 5 are usual."""

_SETTINGS = re.compile(
    r"sampling|(?:^|_)(?:params?|parameters|config|configuration|kwargs|args|options|settings|hparams|usage)$"
    r"|extra_body|^generation$",
    re.IGNORECASE,
)
_ENDS = re.compile(r"(?:^|_)(?:dones?|terminals?|eos|eot|end|last|final|truncated)(?:_|$)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Beside:
    """What a column is compared with."""

    aligned: bool
    """Whether a mask or logprobs are as long, list by list."""
    others_vary: bool
    """Whether another column differs from row to row."""
    texts: Sequence[int] = ()
    """Characters of text by row; () where objects are not rows."""
    in_vocabulary: InVocabulary | None = None


def no_tokens(column: Column, facts: NumberFacts, beside: Beside) -> str:
    """Why a list of integers does not hold tokens, in a few words; "" if it may."""
    lists = [array for array in column.arrays if len(array)]
    if beside.in_vocabulary is not None and lists:
        share = 1 - float(beside.in_vocabulary(np.concatenate(lists).astype(np.int64)).mean())
        if share > 0.25:
            return f"{share:.0%} of its numbers are not in the vocabulary"
    by_name = no_tokens_by_name(column.name)
    if by_name == PARAMETER:
        return by_name
    inside = next((key for key in column.keys[:-1] if _SETTINGS.search(in_snake_case(key))), None)
    if inside is not None and not beside.aligned:
        return f"a parameter: it is in {inside}"
    if column.name in _NAMED:
        return ""
    return by_name or _by_values(lists, facts) or ("" if beside.aligned else _by_rows(lists, beside))


def _by_values(lists: Sequence[Numbers], facts: NumberFacts) -> str:
    """Why the numbers cannot be the tokens of a text."""
    if len(lists) > 1 and is_constant(lists):
        lists = lists[:1]  # repeated in each row, which adds no evidence
    steps = np.concatenate([np.diff(array) for array in lists]) if lists else np.empty(0)
    if facts.constant and facts.count >= _SHORT and len(steps) >= _SHORT:
        return "one number per list"
    if len(steps) >= _STEPS:
        if (steps == 1).mean() > 0.6:
            return "it counts up by one"
        if (steps >= 0).all() or (steps <= 0).all():
            return "its numbers only rise" if steps.max() > 0 else "its numbers only fall"
    every = np.concatenate([_without_ends(array) for array in lists])
    if len(every) >= _ENOUGH:
        values, counts = np.unique(every, return_counts=True)
        if len(values) <= _FEW_DIFFERENT:
            return f"only {len(values)} different numbers"
        if counts.max() > _OFTEN * len(every):
            return f"{counts.max() / len(every):.0%} of it is the number {values[counts.argmax()]:g}"
    return ""


def _by_rows(lists: Sequence[Numbers], beside: Beside) -> str:
    """Why lists do not match the text of their rows."""
    if len(lists) > 1 and beside.others_vary and is_constant(lists):
        return f"the same list in all {len(lists):,} rows"
    lengths = [len(array) for array in lists]
    if max(lengths, default=0) <= _SHORT:
        return f"at most {max(lengths, default=0)} numbers per list"
    # Lists that mostly begin or end with a run of one number are padded to one length.
    padded = 2 * sum(len(_without_ends(array)) < len(array) - 2 for array in lists) > len(lists)
    if len(lists) >= 4 and len(set(lengths)) == 1 and not padded:
        return f"always {lengths[0]:,} numbers"
    texts = [count for count in beside.texts if count]
    if texts and np.median(texts) > _CHARACTERS * np.median(lengths):
        return "too few numbers for the text of its rows"
    return ""


def may_be_shared_prompt(lists: Sequence[Numbers]) -> bool:
    """Whether a list that all rows share is long and varied enough to be a prompt."""
    first = next((array for array in lists if len(array)), np.empty(0))
    return len(first) >= _LONG and bool((np.diff(first) < 0).any())


def no_loss_mask(name: str, lists: Sequence[Numbers], ids: Sequence[Numbers | None]) -> str:
    """Why flags do not mark what is trained, in a few words; "" if they may. `ids` are the tokens of the same
    objects.
    """
    if no_loss_mask_by_name(name):
        return "not a loss mask by its name"
    filled = [array for array in lists if len(array) > 1]
    if not filled:
        return ""
    ones = sum(int(np.count_nonzero(array)) == 1 and bool(array[-1]) for array in filled)
    if ones == len(filled) and (_ENDS.search(in_snake_case(name)) or min(map(len, filled)) > _FEW_DIFFERENT):
        return "marks only the last token"
    if 2 * sum(bool(array[0]) and not array[-1] for array in filled) > len(filled):
        return "marks the beginning, not what was sampled"
    pairs = [(flags, tokens) for flags, tokens in zip(lists, ids, strict=True) if tokens is not None]
    hidden = [tokens[flags == 0] for flags, tokens in pairs if len(flags) == len(tokens)]
    padding = max(map(len, hidden), default=0) > 2 and len(np.unique(np.concatenate(hidden))) == 1
    return "marks everything but one token: padding" if padding else ""


def is_constant(lists: Sequence[Numbers]) -> bool:
    """Whether all lists are the same."""
    return all(len(array) == len(lists[0]) and bool((array == lists[0]).all()) for array in lists[1:])


def varies(columns: Iterable[Column]) -> bool:
    """Whether any of these columns differs from row to row."""
    for column in columns:
        lists = column.arrays
        if len(lists) > 1 and not is_constant(lists):
            return True
        if len(column.samples) > 1 and any(_differ(value, column.samples[0]) for value in column.samples[1:]):
            return True
    return False


def _differ(value: Any, other: Any) -> bool:
    """Whether two values differ; lists of numbers may be arrays."""
    if isinstance(value, np.ndarray) or isinstance(other, np.ndarray):
        return not np.array_equal(value, other)
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        return value.keys() != other.keys() or any(_differ(value[key], other[key]) for key in value)
    if isinstance(value, list) and isinstance(other, list):
        return len(value) != len(other) or any(map(_differ, value, other))
    return bool(value != other)


def characters(row: Mapping[str, Any]) -> int:
    """Characters of the texts with spaces in a row: prose and code, not names or encoded images."""
    count, left = 0, [row]
    for _ in range(10_000):
        if not left:
            break
        value: Any = left.pop()
        if isinstance(value, str):
            count += len(value) if " " in value[:256] else 0
        elif isinstance(value, Mapping):
            left += value.values()
        elif isinstance(value, list | tuple) and value and not isinstance(value[0], int | float):
            left += value
    return count


def _without_ends(array: Numbers) -> Numbers:
    """The list without the runs of one number at its ends, which may be padding."""
    if len(array) < 2:
        return array
    differs = np.flatnonzero(np.diff(array))
    return array[:0] if not len(differs) else array[differs[0] + 1 : differs[-1] + 1]
