"""Named: what the report of a repair names as changed in one log."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Change:
    """What is named of one row."""

    places: frozenset[str]
    """Paths such as `turns[].prompt_ids`."""
    into: int
    """How many rows it became."""

    def allows(self, place: str) -> bool:
        """Whether this place, or one that it is in, may have another value."""
        return any(place == changed or place.startswith((f"{changed}.", f"{changed}[")) for changed in self.places)

    def below(self, place: str) -> bool:
        """Whether something in this place, or all of it, may change."""
        return any(changed == place or changed.startswith((f"{place}.", f"{place}[")) for changed in self.places)


@dataclass(frozen=True, slots=True)
class Named:
    """What is named of one log."""

    rows: dict[int, Change]
    notices: str
    """Everything that the report says in words."""

    def of(self, row: int) -> Change | None:
        """What is named of a row; None: it stays as it was."""
        return self.rows.get(row)

    def column(self, name: str) -> bool:
        """Whether any row may change in this column."""
        return any(change.below(name) for change in self.rows.values())

    def added(self, name: str) -> bool:
        """Whether any row names exactly this place."""
        return any(name in change.places for change in self.rows.values())

    def respelled(self, place: str) -> bool:
        """Whether the report says that the mask in this place is written in another style."""
        return f"{place.rsplit('.', 1)[-1].removesuffix('[]')} is written as " in self.notices

    @property
    def reshaped(self) -> bool:
        """Whether a row was left out or forked."""
        return any(change.into != 1 for change in self.rows.values())


def names_of(original: Path, repaired: Path, report: dict[str, Any]) -> Named | None:
    """What the report names of the log `original`; None if it does not say that the log was written."""
    logs = [
        file["log"]
        for file in report["files"]
        if Path(file["written"]).absolute() == repaired.absolute() or file["log"] == str(original)
    ]
    if not logs and len(report["files"]) == 1:
        logs = [report["files"][0]["log"]]
    if not logs:
        return None
    rows: dict[int, Change] = {}
    for entry in report["changed"]:
        if entry["file"] == logs[0]:
            change = Change(frozenset(entry["columns"]), entry["into"])
            rows |= {row: change for start, stop in entry["rows"] for row in range(start, stop)}
    notices = [*report["before"].get("notices", ()), *report["after"].get("notices", ())]
    return Named(rows, "\n".join([*notices, *(str(note["text"]) for note in report["notes"])]))
