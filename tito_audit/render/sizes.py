"""How large a value is when it is written out, however often it holds the same part.

A list that holds another one twice, which holds another one twice, and so on, takes little memory, but sixty of
them are written as 10 ** 18 elements. So what a template builds is measured before something reads all of it.
"""

from __future__ import annotations

from typing import Any

CONTAINERS = frozenset((list, tuple, dict))
DEEPEST = 1000
"""Values are not nested deeper."""
_ELEMENT = 4
"""What an element takes besides its text."""

Measured = tuple[Any, int, int]
"""A container, which is kept alive for its id; its size, and how deep it is nested."""


def written_size(value: Any, known: dict[int, Measured] | None = None) -> tuple[int, int]:
    """The size of a value in characters, roughly, and how deep it is nested.

    `known` has the containers inside it that were measured before, by their ids, and gets the others.
    """
    if type(value) not in CONTAINERS:
        return (len(value) if type(value) is str else 0) + _ELEMENT, 0
    known = {} if known is None else known
    frames, opened = [_Frame(value)], {id(value)}
    while True:
        frame = frames[-1]
        child = frame.read(known)
        if child is not None:
            if id(child) in opened or len(frames) > DEEPEST:  # it holds itself, or is too deep
                return frame.size, DEEPEST + 1
            opened.add(id(child))
            frames.append(_Frame(child))
            continue
        frames.pop()
        opened.discard(id(frame.container))
        if not frames:
            return frame.size, frame.deep + 1
        known[id(frame.container)] = frame.container, frame.size, frame.deep + 1
        frames[-1].add(frame.size, frame.deep + 1)


class _Frame:
    """A container that is being measured."""

    __slots__ = ("container", "deep", "items", "size")

    def __init__(self, container: Any) -> None:
        self.container = container
        parts = container if type(container) is not dict else (*container, *container.values())
        self.items = iter(parts)
        self.size = _ELEMENT
        self.deep = 0

    def add(self, size: int, deep: int) -> None:
        """Count a container inside."""
        self.size += size
        self.deep = max(self.deep, deep)

    def read(self, known: dict[int, Measured]) -> Any:
        """The next container inside that has not been measured; None if there is none."""
        for item in self.items:
            kind = type(item)
            if kind is str:
                self.size += len(item) + _ELEMENT
            elif kind not in CONTAINERS:
                self.size += _ELEMENT
            elif (found := known.get(id(item))) is not None:
                self.add(found[1], found[2])
            else:
                return item
        return None
