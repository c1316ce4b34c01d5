"""Rows of any format with faults put into them: ids drift, masks slide, logprobs go, text is cut, JSON breaks.

Knows no format: it looks for lists of numbers, for texts and for keys, wherever a row holds them.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Vocabulary", "broken_lines", "rows_of"]

Path_ = tuple[str | int, ...]
_ODD = (None, "x", -1, 10**12, 1.5, True, [], {}, "NaN")
_TEXTS = (" ", "\n", "<|im_end|>", "é🙂", "\u202e", "\x00", "\ufffd", "</think>")


class Vocabulary:
    """The tokens of a tokenizer.json of kind BPE: which two read as one, and which one as two."""

    def __init__(self, tokenizer: dict[str, Any]) -> None:
        self._ids: dict[str, int] = tokenizer["model"]["vocab"]
        self._texts = {number: text for text, number in self._ids.items()}

    def merge(self, left: object, right: object) -> int | None:
        """The token that reads as two."""
        if type(left) is not int or type(right) is not int or left not in self._texts or right not in self._texts:
            return None
        return self._ids.get(self._texts[left] + self._texts[right])

    def split(self, token: object) -> tuple[int, int] | None:
        """Two tokens that read as one."""
        text = self._texts.get(token, "") if type(token) is int else ""
        for at in range(1, len(text)):
            if text[:at] in self._ids and text[at:] in self._ids:
                return self._ids[text[:at]], self._ids[text[at:]]
        return None


def rows_of(text: str) -> list[Any]:
    """The documents of a text: JSON lines, or JSON values one after another; a list stands for its entries."""
    decoder, at, rows = json.JSONDecoder(), 0, []
    while (at := len(text) - len(text[at:].lstrip())) < len(text):
        row, at = decoder.raw_decode(text, at)
        rows += row if isinstance(row, list) else [row]
    return rows


def broken_lines(rows: list[Any], count: int, vocabulary: Vocabulary, dice: random.Random) -> Iterator[str]:
    """So many lines, each a row with one to three faults; some are no JSON."""
    faults = (*[_drift] * 5, *[_numbers] * 5, *[_entry] * 3, *[_text] * 2, _key, _key, _swap_lists)
    for number in range(count):
        row = copy.deepcopy(rows[number % len(rows)])
        for _ in range(dice.choice((1, 1, 1, 2, 3))):
            dice.choice(faults)(row, vocabulary, dice)
        line = json.dumps(row, ensure_ascii=dice.random() < 0.5)
        if number % 29 == 28:
            line = dice.choice(
                (line[: len(line) // 2], line + "}", line.replace(":", "", 1), "", "null", "[1, 2]")
            )
        yield line


Fault = Callable[[Any, Vocabulary, random.Random], None]


def _walk(value: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Everything in a row that is no plain number, with its place."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key), inner
            yield from _walk(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            if isinstance(inner, (dict, list)):
                yield (*path, index), inner
                yield from _walk(inner, (*path, index))


def _lists(row: Any, least: int = 2) -> list[list[Any]]:
    """Lists of numbers."""
    return [
        value
        for _, value in _walk(row)
        if isinstance(value, list)
        and len(value) >= least
        and all(isinstance(number, (int, float)) or number is None for number in value)
    ]


def _drift(row: Any, vocabulary: Vocabulary, dice: random.Random) -> None:
    """Two tokens become the one that reads the same, or one becomes two; other columns keep their length."""
    lists = _lists(row)
    dice.shuffle(lists)
    for ids in lists:
        at = dice.randrange(len(ids) - 1)
        for place in (*range(at, len(ids) - 1), *range(at)):
            merged, parts = vocabulary.merge(ids[place], ids[place + 1]), vocabulary.split(ids[place])
            if merged is not None and dice.random() < 0.6:
                ids[place : place + 2] = [merged]
                return
            if parts is not None and dice.random() < 0.4:
                ids[place : place + 1] = parts
                return


def _numbers(row: Any, vocabulary: Vocabulary, dice: random.Random) -> None:
    """A whole column slides, is filled, turned round or loses an end."""
    lists = _lists(row)
    if not lists:
        return
    column = dice.choice(lists)
    kind = dice.randrange(9)
    if kind == 0:
        column.pop()
    elif kind == 1:
        column.append(column[-1])
    elif kind == 2:
        column[:] = [column[0], *column[:-1]]
    elif kind == 3:
        column[:] = [*column[1:], column[-1]]
    elif kind == 4:
        column[:] = [dice.choice((0, 1, 0.0, None))] * len(column)
    elif kind == 5:
        column[:] = [1 - flag if flag in (0, 1) else flag for flag in column]
    elif kind == 6:
        column.reverse()
    elif kind == 7:
        at = dice.randrange(len(column))
        column[at:] = [0] * (len(column) - at)
    else:
        column.clear()


def _entry(row: Any, vocabulary: Vocabulary, dice: random.Random) -> None:
    """One value of a column is another, or none that belongs there."""
    if lists := _lists(row):
        column = dice.choice(lists)
        at, value = dice.randrange(len(column)), column[0]
        near = value + 1 if isinstance(value, (int, float)) else 0
        column[at] = dice.choice((*_ODD, near, near, 0, 1))


def _text(row: Any, vocabulary: Vocabulary, dice: random.Random) -> None:
    """A text gains or loses a little."""
    texts = [(path, value) for path, value in _walk(row) if isinstance(value, str) and isinstance(path[-1], str)]
    if not texts:
        return
    path, value = dice.choice(texts)
    other = dice.choice(_TEXTS)
    at = dice.randrange(len(value) + 1)
    _put(row, path, dice.choice((value + other, other + value, value[:at], value[:at] + other + value[at:], "")))


def _key(row: Any, vocabulary: Vocabulary, dice: random.Random) -> None:
    """A key goes, or holds what does not belong there."""
    keys = [path for path, _ in _walk(row) if isinstance(path[-1], str)]
    if not keys:
        return
    path = dice.choice(keys)
    if dice.random() < 0.4:
        del _at(row, path[:-1])[path[-1]]
    else:
        _put(row, path, copy.deepcopy(dice.choice(_ODD)))


def _swap_lists(row: Any, vocabulary: Vocabulary, dice: random.Random) -> None:
    """Two neighbours of a list of objects change places, or one comes twice."""
    lists = [
        value
        for _, value in _walk(row)
        if isinstance(value, list) and len(value) > 1 and isinstance(value[0], dict)
    ]
    if lists:
        chosen = dice.choice(lists)
        at = dice.randrange(len(chosen) - 1)
        if dice.random() < 0.5:
            chosen[at], chosen[at + 1] = chosen[at + 1], chosen[at]
        else:
            chosen.insert(at, copy.deepcopy(chosen[at]))


def _at(row: Any, path: Path_) -> Any:
    for step in path:
        row = row[step]
    return row


def _put(row: Any, path: Path_, value: Any) -> None:
    _at(row, path[:-1])[path[-1]] = value
