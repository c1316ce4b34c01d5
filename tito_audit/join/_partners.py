"""Partners: the rows of other files, found by id."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from tito_audit.errors import SetupError, StorageError
from tito_audit.format import Row
from tito_audit.join._keys import Keys
from tito_audit.join.history import hash_of
from tito_audit.record.rollout import Place
from tito_audit.storage.random_access import RandomAccess
from tito_audit.storage.spool import Spool
from tito_audit.terminal.cut import elided


class Partners:
    """Rows of some files by their ids; StorageError or SetupError when they cannot be used.

    For each row its place and 64 bits of its id are kept, some 30 bytes; rows of files that are not plain JSONL go
    into a temporary file. Processes forked afterwards share it.
    """

    def __init__(self, option: str, name: str, files: Sequence[Path], keys: Keys, max_row_bytes: int) -> None:
        self.option = option
        self.name = name
        self.files = files
        self.keys = keys
        self.rows = 0
        self.without_id = 0
        self.unreadable = 0
        self.first_bad: Place | None = None
        """The first row that has no id or cannot be read."""
        self.first_id: str | None = None
        spool = Spool()
        self._readers = [RandomAccess(file, max_row_bytes=max_row_bytes, spool=spool) for file in files]
        hashes, file_of, index_of, at = array("Q"), array("I"), array("Q"), array("Q")
        for number, reader in enumerate(self._readers):
            for ticket, raw in reader:
                self.rows += 1
                key = keys.of_other(raw.value, reader.path) if raw.value is not None else None
                if key is None:
                    self.unreadable += raw.value is None
                    self.without_id += raw.value is not None
                    self.first_bad = self.first_bad or Place(str(reader.path), raw.index)
                    continue
                self.first_id = self.first_id or readable_id(key)
                hashes.append(_hash(key))
                file_of.append(number)
                index_of.append(ticket[0])
                at.append(ticket[1])
        order = np.argsort(np.frombuffer(hashes, np.uint64), kind="stable")
        self._hashes = np.frombuffer(hashes, np.uint64)[order]
        self._file_of = np.frombuffer(file_of, np.uint32)[order]
        self._index_of = np.frombuffer(index_of, np.uint64)[order]
        self._at = np.frombuffer(at, np.uint64)[order]
        self._refuse_doubles()

    def __len__(self) -> int:
        """How many rows have an id."""
        return len(self._hashes)

    def find(self, key: str) -> tuple[int, Place, Row] | None:
        """The row with this id: its number here, its place and its value; None when there is none."""
        wanted = np.uint64(_hash(key))
        number = int(np.searchsorted(self._hashes, wanted))
        while number < len(self._hashes) and self._hashes[number] == wanted:
            place, row, own_key = self._row(number)
            if own_key == key:
                return number, place, row
            number += 1
        return None

    def _row(self, number: int) -> tuple[Place, Row, str]:
        """A row with its place and id; StorageError when the file has changed."""
        reader = self._readers[int(self._file_of[number])]
        index = int(self._index_of[number])
        raw = reader.row((index, int(self._at[number])))
        key = self.keys.of_other(raw.value, reader.path) if raw.value is not None else None
        if raw.value is None or key is None or _hash(key) != int(self._hashes[number]):
            raise StorageError(f"{self.option} {reader.path}: row {index} has changed since the run started.")
        return Place(str(reader.path), index), raw.value, key

    def _refuse_doubles(self) -> None:
        alike = np.flatnonzero(self._hashes[1:] == self._hashes[:-1])
        for number in alike.tolist():
            (place, _, key), (other, _, again) = self._row(number), self._row(number + 1)
            if key != again:
                continue
            columns = ", ".join(self.keys.theirs)
            raise SetupError(
                f"{self.option}: {place} and {other} have the same id ({columns}: {readable_id(key)}), so which "
                "one belongs to a rollout is unknown.\n"
                "Name columns that tell them apart with --on LOG_COLUMN=FILE_COLUMN, several if need be."
            )


def readable_id(key: str) -> str:
    """An id for people, short enough for a line."""
    return elided(" + ".join(key.split("\x1f")), 60)


def _hash(key: str) -> int:
    return hash_of(key.encode("utf-8", "surrogatepass"))


# Counts of what a join found, and the notices about them


NO_ROW, NO_ID, OWN, EMPTY, MISFIT, UNREADABLE, NO_TOOLS, NO_ANSWER = -1, -2, -3, -4, -5, -6, -7, -8

_WHY = {
    NO_ROW: "found no row with their id",
    NO_ID: "without an id",
    OWN: "with {word} of their own, which were kept",
    EMPTY: "found a row without {word}",
    MISFIT: "share a row of the log, and the row found for it has another number of conversations",
    UNREADABLE: "found a row that cannot be read",
    NO_ANSWER: "found {word} without the answer that is trained",
    NO_TOOLS: "found {word} that call tools listed nowhere, so no template was applied; pass --tools FILE",
}


class Tally:
    """Counts rollouts by what was found for them in one file."""

    def __init__(self, word: str, partners: Partners, first_id: str | None) -> None:
        self.word = word
        self._partners = partners
        self._first_id = first_id
        self._found = 0
        self._missed: dict[int, tuple[int, Place]] = {}
        self._user = np.zeros(len(partners), np.int64)
        """For each row, the number (from 1) of the log's row that used it; 0 if none did."""
        self._row: tuple[str, int] | None = None
        self._rows = 0
        self._twice = 0
        self._first_twice: Place | None = None

    def add(self, place: Place, counts: Mapping[str, int]) -> None:
        """Count a rollout by what its counts say about the join."""
        code, row = counts.get(f"{self.word}_from"), counts.get(f"{self.word}_row", NO_ROW)
        if code is None:
            return
        if code < 0:
            count, first = self._missed.get(code, (0, place))
            self._missed[code] = count + 1, first
        else:
            self._found += 1
        if row < 0:
            return
        if self._row != (place.file, place.row):
            self._row = (place.file, place.row)
            self._rows += 1
        if self._user[row] not in (0, self._rows):
            self._twice += 1
            self._first_twice = self._first_twice or place
        self._user[row] = self._user[row] or self._rows

    def notices(self, *, whole: bool) -> Iterator[str]:
        """The notices, most important first; `whole` if the whole log was read."""
        partners = self._partners
        everything = self._found + sum(count for count, _ in self._missed.values())
        parts = [
            f"{count} {_WHY[code].format(word=self.word)} (first {first})"
            for code, (count, first) in sorted(self._missed.items(), reverse=True)
        ]
        missed = f"; {'; '.join(parts)}" if parts else ""
        yield (
            f"{partners.option} {partners.name}, joined on {partners.keys}: {self._found} of {everything} "
            f"rollouts found their {self.word}{missed}."
        )
        if not self._found and NO_ROW in self._missed and self._first_id and partners.first_id:
            yield (
                f"{partners.option}: no id of the log is in {partners.name}: the log's first is {self._first_id}, "
                f"the file's {partners.first_id}. Name other columns with --on."
            )
        if self._twice:
            yield (
                f"{partners.option}: rows of {partners.name} found for more than one row of the log: "
                f"{self._twice} times (first {self._first_twice}). If they are not one conversation, name "
                "columns that tell them apart with --on."
            )
        unused = len(partners) - int(np.count_nonzero(self._user))
        bad = [
            f"{count} {what}"
            for count, what in (
                (unused if whole else 0, "that match no rollout of the log"),
                (partners.without_id, "without an id"),
                (partners.unreadable, "that cannot be read"),
            )
            if count
        ]
        if bad:
            first = f" (first {partners.first_bad})" if partners.first_bad is not None else ""
            yield f"{partners.option} {partners.name}: {'; '.join(bad)}, of its {partners.rows} rows{first}."
