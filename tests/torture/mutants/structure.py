"""JSON values: keys and items deleted, renamed, doubled, exchanged, of another type, of another length."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from random import Random
from typing import Any

from tests.torture.attack import Mutant
from tests.torture.sources import Source, fixtures

__all__ = ["MUTATORS", "changed_rows", "lines_of"]

Place = tuple[Any, Any]
"""A dict or list, and a key or index in it."""


class Raw(str):
    """JSON text that is written as it is."""


def places(value: Any) -> list[Place]:
    """Every place in a JSON value; of long lists of numbers only the first and the last items."""
    spots: list[Place] = []
    waiting = [value]
    while waiting:
        holder = waiting.pop()
        if isinstance(holder, dict):
            spots += [(holder, key) for key in holder]
            waiting += [each for each in holder.values() if isinstance(each, (dict, list))]
        elif isinstance(holder, list):
            shown = range(len(holder)) if len(holder) < 20 else (0, 1, len(holder) // 2, len(holder) - 1)
            spots += [(holder, at) for at in shown]
            waiting += [holder[at] for at in shown if isinstance(holder[at], (dict, list))]
    return spots


def _deep(depth: int, kind: int) -> Raw:
    opens, closes = (("[", "]"), ('{"a":', "}"), ('[{"content":', "}]"))[kind]
    return Raw(opens * depth + "1" + closes * depth)


ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, -100, 2**31, 2**63, -(2**63) - 1, 2**64, 10**30, Raw("1" + "0" * 5000), 0.5, -0.0,
    1e308, Raw("1e400"), Raw("-1e400"), Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("1.0"), Raw("1E0"), "",
    " ", "\0", "a\0b", "x" * 100_000, "\ud800", "\udc00\ud800", "\u202e\u2066", "\ufeff", "\x1b[2J\x07", "\r\n",
    "💥" * 50, "NaN", "1", "[1,2]", "null", "{}", "<|im_end|>", "<|im_start|>assistant\n", "{{ 7*7 }}",
    "{% for %}", "../../etc/passwd", "\u2028", "e\u0301" * 30, [], {}, [[]], [{}], [None], [[], {}], {"": ""},
    {"a": {"b": [1]}}, [1, 2, 3], [1.5, "a", None], ["a"], [True], [-1], [10**20], [[1], [2, 3]],
    {"role": "assistant"}, [{"role": "user", "content": None}], [{"role": "tool"}],
    {"content": [{"type": "text"}]}, [0] * 5000, ["\ud800"], _deep(60, 0), _deep(600, 0), _deep(990, 1),
    _deep(5000, 0), _deep(100_000, 0), _deep(900, 2), _deep(20_000, 1), {"__class__": "x", "__reduce__": 1},
    {"tito_audit": {}}, [float("1e38")] * 3, {"a" * 5000: 1},
)  # fmt: skip
KEYS = (
    "", "\0", "\ud800", "a.b", "a[0]", "__class__", "tito_audit", "role", "content", "tokens", "token_ids",
    "prompt_ids", "completion_ids", "logprobs", "loss_mask", "messages", "tools", "x" * 3000, "\u202e", "0", " ",
    "completion_mask", "response", "meta_info", "prompt", "completion", "id", "session_id", "\x1b[31m", "nodes",
    "trajectories", "steps", "choices", "metadata", "finish_reason", "reward", "rows", "message_log",
)  # fmt: skip


def _put_odd(dice: Random, row: Any, at: Place) -> None:
    at[0][at[1]] = copy.deepcopy(dice.choice(ODD))


def _delete(dice: Random, row: Any, at: Place) -> None:
    del at[0][at[1]]


def _rename(dice: Random, row: Any, at: Place) -> None:
    holder, key = at
    if isinstance(holder, dict):
        new = dice.choice(KEYS) if dice.random() < 0.6 else str(key) + dice.choice(("s", "_", " ", "\0", "é"))
        items = [(new if name == key else name, value) for name, value in holder.items()]
        holder.clear()
        holder.update(items)


def _double(dice: Random, row: Any, at: Place) -> None:
    """The same item again, or the same key twice in an object, which only text can have."""
    holder, key = at
    if isinstance(holder, list):
        holder[key:key] = [copy.deepcopy(holder[key])] * dice.choice((1, 1, 2, 40))
    else:
        other = dice.choice(ODD) if dice.random() < 0.5 else holder[key]
        holder[Twice(key)] = copy.deepcopy(other)


class Twice(str):
    """A key that is equal to no other, so that an object has it twice."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self) // 16


def _add_key(dice: Random, row: Any, at: Place) -> None:
    if isinstance(at[0], dict):
        at[0][dice.choice(KEYS)] = copy.deepcopy(dice.choice(ODD))
    else:
        at[0].insert(at[1], copy.deepcopy(dice.choice(ODD)))


def _exchange(dice: Random, row: Any, at: Place) -> None:
    other = dice.choice(places(row))
    old, new = at[0][at[1]], other[0][other[1]]
    at[0][at[1]], other[0][other[1]] = copy.deepcopy(new), copy.deepcopy(old)


def _retype(dice: Random, row: Any, at: Place) -> None:
    old = at[0][at[1]]
    ways: tuple[Callable[[Any], Any], ...] = (
        str,
        lambda value: [value],
        lambda value: {"value": value},
        lambda value: json.dumps(value, default=str),
        bool,
        lambda value: -value if isinstance(value, (int, float)) else value,
        lambda value: [value] * 3,
        lambda value: float(value) if isinstance(value, int) else value,
        lambda value: value[::-1] if isinstance(value, (str, list)) else value,
        lambda value: (
            dict(enumerate(map(str, value)))
            if isinstance(value, list)
            else list(value)
            if isinstance(value, dict)
            else value
        ),
    )
    at[0][at[1]] = dice.choice(ways)(copy.deepcopy(old))


def _relength(dice: Random, row: Any, at: Place) -> None:
    lists = [(holder, key) for holder, key in places(row) if isinstance(holder[key], list) and holder[key]]
    if not lists:
        return
    holder, key = dice.choice(lists)
    old = holder[key]
    cut = dice.randrange(len(old) + 1)
    holder[key] = dice.choice((old[:cut], old[cut:], old[:-1], old[1:], old + old[-1:], old * 2, old[:1], []))


def _odd_ids(dice: Random, row: Any, at: Place) -> None:
    """Items of lists of numbers: out of range, negative, floats, bools, strings, null."""
    lists = [
        holder[key]
        for holder, key in places(row)
        if isinstance(holder[key], list) and holder[key] and isinstance(holder[key][0], (int, float))
    ]
    if not lists:
        return
    ids = dice.choice(lists)
    odd = dice.choice((
        -1, -100, 2**31, 2**62, 2**63, 2**64, 10**25, 1.0, 1.5, True, "1", "x", None, [], [1], {}, Raw("NaN"),
        Raw("1e400"), Raw("-Infinity"), Raw("1.0"), 1e300, 99999, 65536,
    ))  # fmt: skip
    spots = range(len(ids)) if dice.random() < 0.2 else [dice.randrange(len(ids)) for _ in range(3)]
    for spot in spots:
        ids[spot] = copy.deepcopy(odd)


def _odd_text(dice: Random, row: Any, at: Place) -> None:
    texts = [(holder, key) for holder, key in places(row) if isinstance(holder[key], str)]
    if not texts:
        return
    holder, key = dice.choice(texts)
    old = holder[key]
    spot = dice.randrange(len(old) + 1)
    odd = dice.choice(
        [text for text in ODD if isinstance(text, str) and not isinstance(text, Raw) and len(text) < 1000]
    )
    holder[key] = old[:spot] + odd + old[spot:]


def _graft(dice: Random, row: Any, at: Place) -> None:
    """A value of another log."""
    other = dice.choice(fixtures())
    rows = other.rows(dice)
    spots = places(rows)
    if spots:
        holder, key = dice.choice(spots)
        at[0][at[1]] = holder[key]


CHANGES: dict[Callable[[Random, Any, Place], None], int] = {
    _put_odd: 8,
    _delete: 5,
    _rename: 4,
    _double: 3,
    _add_key: 3,
    _exchange: 3,
    _retype: 5,
    _relength: 5,
    _odd_ids: 5,
    _odd_text: 3,
    _graft: 3,
}


def changed_rows(dice: Random, source: Source) -> tuple[list[Any], str]:
    """Rows with a few changes, and the names of these."""
    rows = source.rows(dice)
    names = []
    for _ in range(dice.choice((1, 1, 1, 2, 2, 4))):
        # Higher places are drawn as often as the many low ones.
        spots = places(rows)
        at = dice.choice(
            spots[: max(1, len(spots) // 8)] if dice.random() < 0.4 and spots else spots or [(rows, 0)]
        )
        change = dice.choices(list(CHANGES), list(CHANGES.values()))[0]
        try:
            change(dice, rows, at)
        except (IndexError, KeyError, TypeError, ValueError, OverflowError):
            continue
        names.append(change.__name__.strip("_").replace("_", " "))
    return rows, ", ".join(names)


def _encoded(value: Any) -> str:
    """JSON text; raw texts as they are, keys that are there twice written twice."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))}: {_encoded(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list) and not {int, float}.issuperset(map(type, value)):
        return "[" + ", ".join(map(_encoded, value)) + "]"
    return json.dumps(value, default=str)


def lines_of(rows: list[Any], *, as_list: bool = False) -> bytes:
    """Rows as JSON lines, or as one list."""
    texts = [_encoded(row) for row in rows]
    text = "[" + ",\n".join(texts) + "]\n" if as_list else "".join(f"{line}\n" for line in texts)
    return text.encode("utf-8", "surrogatepass")


def _changed(dice: Random, source: Source) -> Mutant:
    rows, names = changed_rows(dice, source)
    if source.suffix == ".json" and len(rows) == 1:
        return Mutant("log.json", _encoded(rows[0]).encode("utf-8", "surrogatepass"), f"{names} in {source.name}")
    return Mutant("log.jsonl", lines_of(rows), f"{names} in {source.name}")


def _listed(dice: Random, source: Source) -> Mutant:
    rows, names = changed_rows(dice, source)
    suffix = dice.choice((".json", ".jsonl"))
    return Mutant(f"log{suffix}", lines_of(rows, as_list=True), f"{names} in {source.name}, as one list")


def _mixed(dice: Random, source: Source) -> Mutant:
    """Changed rows between rows of other logs."""
    rows, names = changed_rows(dice, source)
    others = [row for _ in range(dice.choice((1, 2))) for row in dice.choice(fixtures()).rows(dice)]
    rows += others
    dice.shuffle(rows)
    return Mutant("log.jsonl", lines_of(rows), f"{names} in {source.name}, among rows of other logs")


MUTATORS = {_changed: 20, _listed: 2, _mixed: 2}
