"""What happened to the rows of a converted log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tito_audit.record.rollout import Place

_NAMED = 1000
"""How many of the rows that could not be converted are kept with their places; the rest are only counted."""


@dataclass(slots=True)
class ConversionOutcome:
    """What a conversion keeps and what it loses."""

    rows_read: int = 0
    rollouts: int = 0
    joined: int = 0
    """How many of the rollouts are conversations with a row for each call."""
    rows_made: int = 0
    lost: dict[str, int] = field(default_factory=dict)
    """What has no place in the new form, by name or path in the log, with the number of rows that have it."""
    repeated: Counter[str] = field(default_factory=Counter)
    """What the log says once and several new rows repeat, with the number of rollouts affected."""
    missing: Counter[str] = field(default_factory=Counter)
    """What the new form has a place for but the log lacks, with the number of rollouts that lack it; no value is
    made up."""
    forked: int = 0
    """Rollouts that became several rows because their calls do not all continue one another."""
    refused: list[tuple[Place, str]] = field(default_factory=list)
    """The first rows and rollouts that could not be read or converted, with the reason."""
    not_converted: int = 0
    """How many there are in total."""
    _last: dict[str, tuple[str, int]] = field(default_factory=dict)

    @property
    def lossless(self) -> bool:
        """Whether nothing is lost."""
        return not self.lost and not self.not_converted

    def lose(self, names: Iterable[str], place: Place) -> None:
        """Note what a row of a log loses; rows come in order."""
        row = place.file, place.row
        for name in names:
            if self._last.get(name) != row:
                self._last[name] = row
                self.lost[name] = self.lost.get(name, 0) + 1

    def refuse(self, place: Place, reason: str) -> None:
        """Note a row or rollout that is left out, with the reason."""
        self.not_converted += 1
        if len(self.refused) < _NAMED:
            self.refused.append((place, reason))
