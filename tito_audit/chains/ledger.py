"""Ledger: what all rows of a run train, in a few arrays instead of an object per row."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tito_audit.record.finding import Result
from tito_audit.record.rollout import Place
from tito_audit.record.trainings import SEQUENCE, SPAN, Spans, Trainings

Numbers = NDArray[np.int64]
BLOCK = 1 << 20
"""Spans or sequences processed at once, about."""


class Sparse:
    """A column that ends with its last value that is not 0, so that it takes no memory where it is not used."""

    def __init__(self, code: str) -> None:
        self._values = array(code)

    def set(self, number: int, value: int) -> None:
        """Set the value of the next sequence that has one; those before it get 0."""
        if value:
            self._values.frombytes(bytes(self._values.itemsize * (number - len(self._values))))
            self._values.append(value)

    def __getitem__(self, number: int) -> int:
        value: int = self._values[number] if number < len(self._values) else 0
        return value

    def values(self) -> NDArray[np.generic]:
        """The values up to the last one that is not 0."""
        return np.frombuffer(self._values, self._values.typecode)


MOST_BYTES = 1 << 30
"""How many bytes of records are kept; later rollouts are left out."""


class Ledger:
    """The trained spans of all sequences of a run, in the order of the rows."""

    def __init__(self) -> None:
        self.rollouts = self.left_out = 0
        """Rollouts seen, and those for which there was no room."""
        self.files: list[str] = []
        self._starts = array("q")
        """The first sequence of each file."""
        self._spans = bytearray()
        """SPAN records."""
        self._counts = array("I")
        """Spans of each sequence."""
        self._rows = array("I")
        self._turns = Sparse("i")
        """Turns plus 1; 0 is the training row."""
        self._items = Sparse("I")
        self._ids = Sparse("Q")
        self._call_rows = Sparse("I")
        """Rows of joined calls, plus 1."""
        self._call_files = Sparse("I")
        """Their files, by number from 1 on, if not the rollout's."""
        self._named: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def add_result(self, result: Result) -> None:
        """Record what the rollout of a result trains, if that is known."""
        if result.trainings is not None:
            self.add(result.trainings, result.place)

    def add(self, trainings: Trainings, place: Place) -> None:
        """Record what one rollout trains, if there is room; the rollouts of a file come in a row."""
        self.rollouts += 1
        if len(self._spans) >= MOST_BYTES:
            self.left_out += 1
            return
        if not self.files or self.files[-1] != place.file:
            self.files.append(place.file)
            self._starts.append(len(self))
        for spans, turn, answer_id in np.frombuffer(trainings.sequences, SEQUENCE).tolist():
            number = len(self._counts)
            self._counts.append(spans)
            self._rows.append(place.row)
            if turn >= 0:
                self._turns.set(number, turn + 1)
            if place.item:
                self._items.set(number, place.item)
            if answer_id:
                self._ids.set(number, answer_id)
            if trainings.calls_at and turn >= 0:
                file, row = trainings.calls_at[turn]
                self._call_rows.set(number, row + 1)
                if file != place.file:
                    self._call_files.set(number, self._named.setdefault(file, len(self._named) + 1))
        self._spans += trainings.spans

    def sort_key(self, number: int) -> tuple[int, ...]:
        """A key that sorts sequences by their rollouts, and the calls of one by their rows."""
        file = int(self.file_starts.searchsorted(number, "right"))
        own = self._call_files[number], self._call_rows[number]
        return file, self._rows[number], self._items[number], *own, number

    def row_place(self, number: int) -> Place:
        """Where the row of a sequence is; of a joined call, its own row."""
        place, row, file = self.place(number), self._call_rows[number], self._call_files[number]
        if not row:
            return place
        return Place(list(self._named)[file - 1] if file else place.file, row - 1, place.item)

    def place(self, number: int) -> Place:
        """Where the rollout of a sequence is."""
        file = self.files[int(self.file_starts.searchsorted(number, "right")) - 1]
        return Place(file, self._rows[number], self._items[number])

    def turn(self, number: int) -> int | None:
        """The call that a sequence is; None for a training row."""
        return self._turns[number] - 1 if self._turns[number] else None

    def trained_tokens(self, number: int) -> int:
        """How many tokens a sequence trains."""
        return int(self.spans["tokens"][slice(*self.first_spans[number : number + 2])].sum())

    def sequences_of(self, spans: Numbers) -> Numbers:
        """`[K]` the sequence that each of these spans is in."""
        # Of the same type, or the whole index would be converted.
        return self.first_spans.searchsorted(spans.astype(np.uint32), "right").astype(np.int64) - 1

    def sequences_of_rows(self, file: str, rows: Sequence[int]) -> Iterator[int]:
        """The sequences of some rows of a file, in order."""
        for number in (np.array(self.files) == file).nonzero()[0].tolist():
            start = self._starts[number]
            end = self._starts[number + 1] if number + 1 < len(self._starts) else len(self)
            for row in rows:
                at = bisect_left(self._rows, row, start, end)
                yield from range(at, bisect_right(self._rows, row, at, end))

    def answer_id(self, number: int) -> int:
        """The hash of the server's id of the answer; 0 where there is none."""
        return self._ids[number]

    @property
    def file_starts(self) -> Numbers:
        """`[F]` the first sequence of each file."""
        return np.frombuffer(self._starts, np.int64)

    @property
    def spans(self) -> Spans:
        """`[S]` every span."""
        return np.frombuffer(self._spans, SPAN)

    @cached_property
    def first_spans(self) -> NDArray[np.uint32]:
        """`[N+1]` the first span of each sequence, and the end of the last; read it once all rows are in."""
        counts = np.frombuffer(self._counts, np.uint32)
        first = np.zeros(len(counts) + 1, np.uint32)
        counts.cumsum(out=first[1:], dtype=np.uint32)
        return first

    def file_ranges(self) -> list[tuple[int, int]]:
        """`[start, end)` of the sequences of each file."""
        starts = self._starts.tolist()
        return list(pairwise((*starts, len(self))))

    def has_row_per_step(self) -> NDArray[np.bool_]:
        """`[F]` which files have one row per step: most rows with several spans continue the row before them."""
        hashes, tokens, stepwise = self.spans["hash"], self.spans["tokens"], []
        for start, end in self.file_ranges():
            links = rows = 0
            for at in range(start, end, BLOCK):
                first = self.first_spans[max(at - 1, start) : min(at + BLOCK, end) + 1].astype(np.int64)
                last = first[1:] - 1  # the last span of each sequence that trains anything
                for _ in range(2):  # the token after the last span, and the end of the ids
                    last -= tokens[last] == 0
                several = last > first[:-1]
                later = several[1:].nonzero()[0] + 1
                before, whole = last[later], hashes[last[later - 1]]
                # The end of the span before, or the token after it.
                links += int(np.count_nonzero((hashes[before - 2] == whole) | (hashes[before - 1] == whole)))
                rows += int(np.count_nonzero(several[int(at > start) :]))
            stepwise.append(links >= 3 and 2 * links > rows)
        return np.array(stepwise, np.bool_)

    def is_call(self) -> NDArray[np.bool_]:
        """`[N]` which sequences are calls, not training rows."""
        out = np.zeros(len(self), np.bool_)
        turns = self._turns.values()
        np.greater(turns, 0, out=out[: len(turns)])
        return out

    def count_trained_tokens(self, left_out: NDArray[np.bool_]) -> int:
        """How many tokens all sequences train, without those of `left_out`, `[N]`."""
        tokens, first, total = self.spans["tokens"], self.first_spans, 0
        for at in range(0, len(self), BLOCK):
            end = min(at + BLOCK, len(self))
            low, high = int(first[at]), int(first[end])
            counts = np.add.reduceat(tokens[low:high].astype(np.int64), first[at:end] - first[at])
            total += int(counts[~left_out[at:end]].sum())
        return total

    def find_shared_spans(self) -> Numbers:
        """`[K]` the spans whose hash another span has too, in order."""
        hashes, places = self.spans["hash"], [np.empty(0, np.int64)]
        # Hashes are sorted one part after another, split by their first bits.
        bits = (len(hashes) // BLOCK).bit_length()
        part = np.empty(len(hashes), np.uint16)
        for at in range(0, len(hashes), BLOCK):
            part[at : at + BLOCK] = hashes[at : at + BLOCK] >> np.uint64(64 - bits) if bits else 0
        for number in range(1 << bits):
            own_places = (part == number).nonzero()[0]
            own_hashes = hashes[own_places]
            order = np.argsort(own_hashes, kind="stable")
            own_hashes = own_hashes[order]
            same = own_hashes[1:] == own_hashes[:-1]
            twice = np.zeros(len(own_hashes), np.bool_)
            twice[1:] |= same
            twice[:-1] |= same
            places.append(own_places[order[twice]])
        return np.sort(np.concatenate(places))
