"""Folds what one rule finds very often in one rollout, so that a row's claims bound neither time nor memory."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tito_audit.evidence.model import Against, Difference, Explained
from tito_audit.record.finding import TRAINING_ROW, Finding, Folded, Hit, Severity, Where
from tito_audit.record.rollout import Place
from tito_audit.run.headlines import Turns

SINGLE = 100
"""How many findings of one rule, severity and cause in one rollout are each a finding of their own."""

_CallsAt = tuple[tuple[str, int], ...]


class Spot(NamedTuple):
    """Where a hit is: all that a folded finding keeps of it."""

    where: Where
    turn: int | None
    start: int
    end: int
    cause: str
    later_turn: int | None
    beside: bool
    """Whether it is shown against the training row."""

    @classmethod
    def of(cls, hit: Hit) -> Spot:
        """The spot of a hit."""
        beside = hit.canonical.label == TRAINING_ROW
        return cls(hit.where, hit.turn, hit.start, hit.end, hit.cause, hit.later_turn, beside)

    @classmethod
    def of_difference(cls, explained: Explained) -> Spot:
        """The spot of the hit of an explained difference."""
        one: Difference = explained.difference
        beside = one.against is Against.ROW
        return cls(one.where, one.turn, one.start, one.end, explained.cause, one.later_turn, beside)


@dataclass(slots=True)
class _Group:
    """Findings of one rule, severity and cause."""

    found: int = 0
    at: int = -1
    """The number of the finding that the others are folded into."""
    tokens: int = 0
    places: array[int] = field(default_factory=lambda: array("q"))
    turns: dict[int | None, None] = field(default_factory=dict)

    def add(self, spot: Spot) -> None:
        self.tokens += spot.end - spot.start
        self.places.extend((-1 if spot.turn is None else spot.turn, spot.start, spot.end))
        self.turns[spot.turn if spot.later_turn is None else spot.later_turn] = None


class Findings:
    """The findings of a rollout as its rules find them; beyond `single` of one kind, the others become one.

    `calls_at` are the rows of the calls if single calls were joined: findings of different rows stay apart.
    `single` None folds nothing.
    """

    def __init__(self, place: Place, calls_at: _CallsAt = (), single: int | None = SINGLE) -> None:
        self._place = place
        self._calls_at = calls_at
        self._single = single
        self._found: list[Finding] = []
        self._groups: dict[Hashable, _Group] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    def wants(self, code: str, severity: Severity, spot: Spot) -> bool:
        """Whether the hit at a spot has to be made: to be a finding, or the first of those that become one."""
        if self._single is None:
            return True
        row = self._calls_at[spot.turn] if self._calls_at and spot.turn is not None else None
        key = code, severity, spot.cause, spot.where, spot.later_turn is None, spot.beside, row
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group()
        group.found += 1
        if group.found <= self._single:
            return True
        group.add(spot)
        if group.at < 0:
            group.at = len(self._found)
            return True
        return False

    def add(self, code: str, severity: Severity, hit: Hit) -> None:
        """Add the hit at a spot that was wanted last."""
        self._found.append(Finding(code, severity, self._place, hit))

    def take(self, code: str, usual: Severity, hit: Hit) -> None:
        """Add a hit of a rule, `usual` being its severity if it has none of its own."""
        severity = usual if hit.severity is None else hit.severity
        if self.wants(code, severity, Spot.of(hit)):
            self.add(code, severity, hit)

    def folded(self) -> tuple[list[Finding], dict[int, Turns]]:
        """The findings in order, and by number the turns of those that others were folded into."""
        turns: dict[int, Turns] = {}
        for group in self._groups.values():
            if group.found > (self._single or 0) + 1 and group.at >= 0:
                first, times = self._found[group.at], group.found - (self._single or 0)
                message = f"{first.hit.message} ({times - 1:,} more like this in the row are counted here)"
                packed, group.places = group.places.tobytes(), array("q")
                folded = Folded(times, len(group.turns), group.tokens, packed)
                self._found[group.at] = replace(first, hit=replace(first.hit, message=message), folded=folded)
                turns[group.at] = group.turns.keys()
        return self._found, turns
