"""The shapes of messages: everything by which a template can tell them apart.

Two messages of the same shape are written the same way: the same parts in the same order, with the same template
text between them. The shape of a text says whether it is empty or one of the texts that the template asks for, and
how the markers that the template looks for divide it (see `render/fast/looked_for.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from typing import Any

from tito_audit.render.facts import LookedFor
from tito_audit.tokens.segments import pattern_of, shared_start

Shape = Hashable
_ROLE = "role"
_DETAILS = frozenset(("tool_calls", "tool_call_id", "name", "id"))


class Shapes:
    """Gives the shapes of messages for one template."""

    def __init__(self, looked_for: LookedFor) -> None:
        whole, inside, sizes = looked_for
        self._whole = frozenset(whole)
        self._inside = inside
        self._sizes = frozenset((*sizes, 0, 1))
        self._measured = sizes
        self._begin = shared_start(inside[0], inside[-1]) if inside else ""
        """How every marker begins, to search for that first."""
        self._split = re.compile(f"({pattern_of(sorted(inside))})").split if inside else None
        self._of: dict[type, Callable[[Any], Shape]] = {
            str: self._text,
            int: self._number,
            float: self._number,
            bool: lambda value: value,
            type(None): lambda value: value,
            dict: self._object,
            list: lambda value: tuple(map(self.of, value)),
        }

    def message(self, message: dict[str, Any]) -> tuple[Shape, Shape]:
        """The shape of a message, and what a template sees of it while it writes another one: the same without the
        details of its calls.
        """
        found = self._object(message)
        return found, (bool(message.get("tool_calls")), *[pair for pair in found if pair[0] not in _DETAILS])

    def of(self, value: Any) -> Shape:
        """The shape of a value of plain JSON types, such as a message; TypeError for any other."""
        read = self._of.get(type(value))
        if read is None:
            raise TypeError(f"a {type(value).__name__} has no shape")
        return type(value), read(value)

    def _object(self, value: dict[str, Any]) -> tuple[tuple[str, Shape], ...]:
        return tuple(
            [
                (key, inner if key == _ROLE and type(inner) is str else self.of(inner))
                for key, inner in value.items()
            ]
        )

    def _number(self, value: float) -> Shape:
        return value if value in self._sizes else "number"

    def _text(self, text: str) -> Shape:
        if text in self._whole or text.isspace() or not text:
            return "", text
        sizes = tuple([(len(text) > size) - (len(text) < size) for size in self._measured])
        if self._split is None or self._begin not in text or not any(marker in text for marker in self._inside):
            return sizes, self._part(text)
        held = tuple((text.startswith(one), text.endswith(one), text.count(one)) for one in self._inside)
        return sizes, held, tuple(map(self._part, self._split(text)))

    def _part(self, part: str) -> str | None:
        """What a template can tell about a part of a text between markers."""
        bare = part.strip()
        return part if not bare or bare in self._whole or bare in self._inside else None
