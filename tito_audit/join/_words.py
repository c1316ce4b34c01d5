"""Counts of what a join found, and the notices about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from tito_audit.join._partners import Partners
from tito_audit.record.rollout import Place

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
