"""PromptIds: the ids of a prompt, converted to a tuple or to JSON on first use and then kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
import orjson

from tito_audit.record.arrays import Ids


class PromptIds(Sequence[int]):
    """Token ids, given as an array or a tuple; the array must not change afterwards."""

    __slots__ = ("_given", "_json", "_plain")

    def __init__(self, ids: Ids | tuple[int, ...]) -> None:
        self._given = ids
        self._json: bytes | None = None
        self._plain: tuple[int, ...] | None = None if isinstance(ids, np.ndarray) else ids

    @property
    def original(self) -> Sequence[int]:
        """The tuple that was given; this object if it was an array, so that nothing is converted."""
        return self._given if isinstance(self._given, tuple) else self

    @property
    def as_tuple(self) -> tuple[int, ...]:
        """The ids as plain integers."""
        if self._plain is None:
            self._plain = tuple(np.asarray(self._given).tolist())
        return self._plain

    @property
    def json(self) -> bytes:
        """The ids as a JSON list without spaces."""
        if self._json is None:
            ids = self._given if isinstance(self._given, tuple) else np.ascontiguousarray(self._given)
            self._json = orjson.dumps(ids, option=orjson.OPT_SERIALIZE_NUMPY)
        return self._json

    def tail(self, count: int) -> Ids:
        """`[count]` int32, the last ids; fewer in a shorter prompt."""
        return np.array(self._given[-count:], np.int32)

    def first_below(self, least: int) -> int | None:
        """The position of the first id below `least`; None if there is none."""
        below = (np.asarray(self._given) < least).nonzero()[0]
        return int(below[0]) if len(below) else None

    def __len__(self) -> int:
        return len(self._given)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[int, ...]: ...
    def __getitem__(self, at: int | slice) -> int | tuple[int, ...]:
        return self.as_tuple[at]

    def __iter__(self) -> Iterator[int]:
        return iter(self.as_tuple)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PromptIds):
            return self.json == other.json
        return isinstance(other, list | tuple) and self.as_tuple == tuple(other)

    def __hash__(self) -> int:
        return hash(self.as_tuple)

    def __repr__(self) -> str:
        return f"PromptIds({self.as_tuple})"
