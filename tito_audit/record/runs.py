"""Runs of a mask: a list while they are few, columns where a mask has very many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from tito_audit.record.arrays import Mask

MANY = 1000
"""Beyond this many, runs take 16 bytes each; as objects they take ten times that."""
_AT_ONCE = 4096
"""Runs made objects at a time."""

Run: TypeAlias = tuple[int, int]
"""Half-open: the first token, and the one after the last."""


@dataclass(frozen=True, slots=True, eq=False)
class ManyRuns(Sequence[Run]):
    """Very many runs in order, none of them empty."""

    bounds: NDArray[np.int64]
    """`[N, 2]` where each starts and ends."""

    @classmethod
    def of(cls, mask: Mask) -> ManyRuns:
        """The runs in which a mask is true."""
        return cls(np.diff(mask, prepend=False, append=False).nonzero()[0].reshape(-1, 2))

    def long(self, least: int) -> ManyRuns:
        """Those of at least so many tokens."""
        return ManyRuns(self.bounds[self.bounds[:, 1] - self.bounds[:, 0] >= least])

    def moved(self, far: int, size: int) -> Mask:
        """`[size]` the tokens in the runs, each moved by `far`; what moves past an end is lost."""
        starts, ends = (self.bounds + far).clip(0, size).T
        opened = np.zeros(size + 1, np.int8)  # no two runs start at one place, or end there
        np.add.at(opened, starts, 1)
        np.add.at(opened, ends, -1)
        return np.asarray(opened[:-1].cumsum(dtype=np.int8) > 0)

    def __len__(self) -> int:
        return len(self.bounds)

    @overload
    def __getitem__(self, number: int) -> Run: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Run]: ...
    def __getitem__(self, number: int | slice) -> Run | Sequence[Run]:
        if isinstance(number, slice):
            return ManyRuns(self.bounds[number])
        start, end = self.bounds[number].tolist()
        return start, end

    def __iter__(self) -> Iterator[Run]:
        for first in range(0, len(self.bounds), _AT_ONCE):
            starts, ends = self.bounds[first : first + _AT_ONCE].T.tolist()
            yield from zip(starts, ends, strict=True)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(self) != len(other):
            return False
        return all(mine == one for mine, one in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # equal to a list, which has none


class _Ends(Mapping[int, int]):
    """The end of each of very many runs by its start."""

    __slots__ = ("_runs", "_starts")

    def __init__(self, runs: ManyRuns) -> None:
        self._runs = runs
        self._starts = np.ascontiguousarray(runs.bounds[:, 0])

    def __getitem__(self, start: int) -> int:
        at = int(self._starts.searchsorted(start))
        if at == len(self._starts) or self._starts[at] != start:
            raise KeyError(start)
        return int(self._runs.bounds[at, 1])

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[int]:
        return (start for start, _ in self._runs)


def run_ends(mask: Mask) -> Mapping[int, int]:
    """The end of each run in which the mask is true, by its start."""
    runs = trained_runs(mask)
    return _Ends(runs) if isinstance(runs, ManyRuns) else dict(runs)


def trained_runs(loss_mask: Mask) -> Sequence[Run]:
    """The half-open runs `[start, end)` in which the mask is true, in order."""
    # Searching bytes is faster than making three small arrays.
    trained, end = loss_mask.tobytes(), 0
    runs: list[Run] = []
    while (start := trained.find(1, end)) >= 0:
        end = trained.find(0, start)
        end = len(trained) if end < 0 else end
        runs.append((start, end))
        if len(runs) > MANY:
            return ManyRuns.of(loss_mask)
    return runs


def each_run(mask: Mask) -> Iterator[Run]:
    """The same as `trained_runs`, one by one: a mask may have half as many runs as tokens.

    Rows of few runs have them as a list, since a generator takes a call for each.
    """
    marked, end = mask.tobytes(), 0
    while (start := marked.find(1, end)) >= 0:
        end = marked.find(0, start)
        end = len(marked) if end < 0 else end
        yield start, end
