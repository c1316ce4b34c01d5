"""The ids of a prompt, converted to numbers or JSON only on demand, and once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
import orjson

from tito_audit.record.arrays import Ids


class PromptIds(Sequence[int]):
    """Token ids as an array or as plain numbers; do not modify them afterwards."""

    __slots__ = ("_given", "_json", "_plain")

    def __init__(self, ids: Ids | tuple[int, ...]) -> None:
        self._given = ids
        self._json: bytes | None = None
        self._plain: tuple[int, ...] | None = None if isinstance(ids, np.ndarray) else ids

    @property
    def whole(self) -> Sequence[int]:
        """The ids as given: a tuple, or this object if they were an array."""
        return self._given if isinstance(self._given, tuple) else self

    @property
    def plain(self) -> tuple[int, ...]:
        """The ids as numbers."""
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
        """The last ids, `[count]` or fewer."""
        return np.array(self._given[-count:], np.int32)

    def first_below(self, least: int) -> int | None:
        """The position of the first id below this; None if there is none."""
        below = (np.asarray(self._given) < least).nonzero()[0]
        return int(below[0]) if len(below) else None

    def __len__(self) -> int:
        return len(self._given)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[int, ...]: ...
    def __getitem__(self, at: int | slice) -> int | tuple[int, ...]:
        return self.plain[at]

    def __iter__(self) -> Iterator[int]:
        return iter(self.plain)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PromptIds):
            return self.json == other.json
        return isinstance(other, list | tuple) and self.plain == tuple(other)

    def __hash__(self) -> int:
        return hash(self.plain)

    def __repr__(self) -> str:
        return f"PromptIds({self.plain})"
