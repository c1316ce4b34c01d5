"""The size of the value that an operator, a filter or a method is about to make.

Estimates err on the high side. What cannot make a large value costs nothing: Jinja limits `range`, and the clock
limits everything else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from tito_audit.render.limits import LimitReached
from tito_audit.render.sizes import written_size

_WIDTHS = {"center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes"}
_WIDE = re.compile(r"\d{7}")
_POINTER = 16
"""A list of short strings takes about ten times the memory of its text."""
_MOST_BITS = 100_000
_SIZED = (str, bytes, list, tuple, Mapping)


def length(value: object) -> int:
    """Characters of a text, elements of a collection, 0 for anything else."""
    return len(value) if isinstance(value, _SIZED) else 0


def binary_cost(operator: str, left: Any, right: Any) -> int:
    """The size of `left operator right`."""
    if operator == "+":
        return length(left) + length(right)
    if operator == "%":
        values = right if isinstance(right, tuple) else (right,)
        return _formatted("%", left, values) if isinstance(left, str) else 0
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length() if operator == "*" else _power_bits(left, right)
        if bits > _MOST_BITS:
            raise LimitReached(f"the template makes a number of {bits:,} bits")
        return 0
    if operator == "*":
        if isinstance(right, int):
            return length(left) * max(right, 0)
        return length(right) * max(left, 0) if isinstance(left, int) else 0
    return 0


def _power_bits(base: int, exponent: int) -> int:
    return base.bit_length() * exponent if exponent > 1 and abs(base) > 1 else 0


def call_cost(function: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """The size of what a method of a text or number returns; 0 for any other function."""
    method = getattr(function, "__wrapped__", function)  # Jinja wraps str.format
    owner = getattr(method, "__self__", None)
    name = getattr(method, "__name__", "")
    if not isinstance(owner, str | bytes | int):
        return 0
    values = (*args, *kwargs.values())
    if name in _WIDTHS:
        width = max((value for value in values if isinstance(value, int)), default=0)
        return width * (1 + owner.count("\t") if name == "expandtabs" and isinstance(owner, str) else 1)
    if not isinstance(owner, str):
        return 0
    cost = _TEXT_METHODS.get(name)
    return cost(owner, values) if cost is not None else 0


def _formatted(sign: str, pattern: str, values: tuple[Any, ...]) -> int:
    """The size of `pattern` with its fields filled, each as long as the longest value or as its width."""
    if _WIDE.search(pattern) or (sign == "%" and "*" in pattern):
        raise LimitReached("the template formats a value with a width past 1,000,000")
    longest = max((_longest(value) for value in values), default=0)
    nested = sign == "{" and re.search(r"\{[^{}]*\{", pattern) is not None
    widths = [value for value in values if isinstance(value, int)] if nested else []
    return len(pattern) + pattern.count(sign) * max([longest, *widths, 32])


def _longest(value: object) -> int:
    """Characters of a text; of anything else as many as it takes to write it."""
    return length(value) if isinstance(value, str) else written_size(value)[0]


def _written(value: object) -> int:
    return len(value) if isinstance(value, str) else written_size(value)[0]


def _replaced(text: str, values: tuple[Any, ...]) -> int:
    old, new = (*values[:2], "", "")[:2]
    if not isinstance(old, str) or not isinstance(new, str):
        return 0
    return len(text) + text.count(old) * len(new)


def _joined(separator: str, values: tuple[Any, ...]) -> int:
    items = values[0] if values and isinstance(values[0], list | tuple | Mapping) else ()
    return sum(_written(item) for item in items) + len(separator) * len(items)


def _split(text: str, values: tuple[Any, ...]) -> int:
    separator = values[0] if values else None
    pieces = text.count(separator) if isinstance(separator, str) and separator else len(text) // 2
    return pieces * _POINTER


_TEXT_METHODS: dict[str, Callable[[str, tuple[Any, ...]], int]] = {
    "format": lambda text, values: _formatted("{", text, values),
    "format_map": lambda text, values: _formatted("{", text, values),
    "join": _joined,
    "replace": _replaced,
    "rsplit": _split,
    "split": _split,
    "splitlines": lambda text, values: text.count("\n") * _POINTER,
    "translate": lambda text, values: len(text) * max(1, *(_longest(value) for value in values)),
}


def _center(value: Any, width: Any = 80) -> int:
    return width if isinstance(width, int) else 0


def _indent(value: Any, width: Any = 4, *args: Any, **kwargs: Any) -> int:
    text = str(value)
    return len(text) + (text.count("\n") + 2) * (width if isinstance(width, int) else length(width))


def _join(value: Any, d: Any = "", attribute: Any = None) -> int:
    if isinstance(value, Mapping) or attribute is None:
        return _joined(str(d), (value,))
    values = [item.get(attribute) if isinstance(item, Mapping) else item for item in value]
    return _joined(str(d), (values,))


def _wordwrap(value: Any, width: Any = 79, break_long_words: Any = True, wrapstring: Any = None, *_: Any) -> int:
    return len(str(value)) * (1 + length(wrapstring))


def _counted(value: Any, count: Any = 0, *args: Any, **kwargs: Any) -> int:
    return count if isinstance(count, int) else 0


def _sum(value: Any, attribute: Any = None, start: Any = 0) -> int:
    return sum(length(item) for item in value) if isinstance(value, list | tuple) else 0


def _escaped(value: Any) -> int:
    text = str(value)
    return len(text) + 5 * sum(map(text.count, "<>&'\""))


def _json(value: Any, ensure_ascii: bool = False, indent: Any = None, *args: Any, **kwargs: Any) -> int:
    size, deep = written_size(value)
    width = indent if isinstance(indent, int) else length(indent)
    return size * (1 + deep * max(width, 0) // 4) if width else size


FILTER_COSTS: dict[str, Callable[..., int]] = {
    "batch": lambda value, linecount=0, fill_with=None: _counted(value, linecount),
    "center": _center,
    "e": _escaped,
    "escape": _escaped,
    "forceescape": _escaped,
    "format": lambda value, *args, **kwargs: _formatted("%", str(value), (*args, *kwargs.values())),
    "indent": _indent,
    "join": _join,
    "list": lambda value: length(value),
    "replace": lambda value, old="", new="", count=None: _replaced(str(value), (str(old), str(new))),
    "slice": lambda value, slices=0, fill_with=None: _counted(value, slices),
    "sum": _sum,
    "tojson": _json,
    "urlencode": lambda value: 3 * length(value),
    "urlize": lambda value, *args, **kwargs: 4 * len(str(value)),
    "wordwrap": _wordwrap,
}
"""For each filter that can make a large value: its size, given the filter's arguments."""
