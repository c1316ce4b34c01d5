"""How much an answer resembles what a later prompt holds in its place."""

from __future__ import annotations

import re
from collections import Counter
from difflib import SequenceMatcher
from typing import Any

import numpy as np

from tito_audit.align.prefix import starts_with
from tito_audit.align.runs import gaps, paired_runs
from tito_audit.join.history._said import said, without_reasoning
from tito_audit.record.arrays import Ids

PROVEN = 0.8
"""From this likeness on, they are the same answer."""
SAME, SAME_WITHOUT_REASONING, SAME_IN_OTHER_SPELLING = 3.0, 2.0, 1.0
_UNPROVEN = 0.5
"""The highest likeness of two answers that say different things in similar words."""
_LEAST_BYTES, _LEAST_IDS = 16, 8
_MOST_WORDS, _MOST_IDS, _FREQUENT_FROM = 1000, 1500, 200
_WORD = re.compile(r"\w+|[^\w\s]")


def likeness_of_texts(answer: bytes, held: bytes, *, open_end: bool = False) -> float:
    """How much two texts resemble each other: 1 to 3 if they say the same, else below 1.

    With `open_end`, `held` may go on after the answer.
    """
    if not answer.strip() or not held.strip():
        return 0.0
    if answer == held or (open_end and len(answer) >= _LEAST_BYTES and held.startswith(answer)):
        return SAME
    one, other = (text.decode("utf-8", "replace") for text in (answer, held))
    shown, shown_held = without_reasoning(one).strip(), without_reasoning(other).strip()
    if shown and _same(shown, shown_held, open_end=open_end):
        return SAME_WITHOUT_REASONING
    (text, calls), (text_held, calls_held) = said(one), said(other)
    if calls != calls_held[: len(calls)] or (len(calls) != len(calls_held) and not open_end):
        return 0.0
    text, text_held = "".join(text.split()), "".join(text_held.split())
    if _same(text, text_held, open_end=open_end) and (text or calls):
        return SAME_IN_OTHER_SPELLING
    return 0.0 if open_end else _likeness_of_words(shown, shown_held)


def _same(one: str, other: str, *, open_end: bool) -> bool:
    return one == other or (open_end and len(one) >= _LEAST_BYTES and other.startswith(one))


def _likeness_of_words(one: str, other: str) -> float:
    """The share of words that two texts have in common, in order; below proof if numbers differ."""
    words, others = _WORD.findall(one), _WORD.findall(other)
    if not words or not others or max(len(words), len(others)) > _MOST_WORDS:
        return 0.0
    matcher = SequenceMatcher(None, words, others, autojunk=False)
    same = [word for start, _, size in matcher.get_matching_blocks() for word in words[start : start + size]]
    equal, largest = sum(map(len, same)), max(sum(map(len, words)), sum(map(len, others)))
    likeness = equal / largest
    numbers = Counter(filter(_has_digit, words)) == Counter(filter(_has_digit, others))
    return likeness if numbers and equal >= _LEAST_BYTES else min(likeness, _UNPROVEN)


def _has_digit(word: str) -> bool:
    return any(map(str.isdigit, word))


def likeness_of_ids(answer: Ids, held: Ids, *, open_end: bool = False) -> float:
    """The same for token ids whose text is unknown.

    One id instead of another is different text; several instead of one may be the same text.
    """
    if not len(answer) or not len(held):
        return 0.0
    if open_end:
        return SAME if len(answer) >= _LEAST_IDS and starts_with(held, answer) else 0.0
    if np.array_equal(answer, held):
        return SAME
    if len(held) < len(answer) and np.array_equal(answer[-len(held) :], held):
        return SAME_WITHOUT_REASONING
    runs = list(paired_runs(answer, held, longest=_MOST_IDS, frequent_from=_FREQUENT_FROM))
    equal = sum(run.size for run in runs)
    swapped = any(_is_swap(gap) for gap in gaps(runs, len(answer), len(held)))
    likeness = min(equal / len(held), 0.99)
    return likeness if equal >= _LEAST_IDS and not swapped else min(likeness, _UNPROVEN)


def _is_swap(gap: Any) -> bool:
    return bool(gap.end - gap.start == gap.other_end - gap.other == 1)
