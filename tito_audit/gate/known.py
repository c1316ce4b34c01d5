"""Which findings of a run are in the baseline, and which entries of the baseline are gone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from tito_audit.gate.baseline import Entry, Key, entry_of
from tito_audit.record.finding import Finding, Result, Severity
from tito_audit.storage.remote import is_url, remote_file

_UNREADABLE = "REC001"


class EntryCounts:
    """Findings collected as baseline entries: one entry for all identical findings."""

    def __init__(self) -> None:
        self.total = 0
        """Findings that were added."""
        self._by_key: dict[Key, Entry] = {}

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._by_key.values())

    def add(self, finding: Finding, file: str) -> None:
        """Add one finding of a log, as the baseline names it."""
        fingerprint = finding.fingerprint
        if (fingerprint, finding.severity, file) in self._by_key:
            self._by_key[fingerprint, finding.severity, file].times += finding.times
            self.total += finding.times
        else:
            self.put(entry_of(finding, fingerprint, file))

    def put(self, entry: Entry) -> None:
        """Add an entry with its count."""
        counted = self._by_key.setdefault(entry.key, entry)
        if counted is not entry:
            counted.times += entry.times
            counted.row = min(counted.row, entry.row)
        self.total += entry.times


class KnownFindings:
    """The entries of a baseline, used up by the findings of a run.

    A finding uses up an entry of its own log first, then one of a log that no longer exists (it may have been
    renamed), then one of another log of the run (its row may have moved there).
    """

    def __init__(self, entries: Sequence[Entry], folder: Path, scanned: Iterable[str]) -> None:
        self._entries = {entry.key: entry for entry in entries}
        self._kinds = {(entry.code, entry.severity) for entry in entries}
        self._scanned = frozenset(scanned)
        self._left: dict[tuple[str, Severity], dict[str, int]] = {}
        """By fingerprint and severity: by file, how many are not used up."""
        self._at: dict[tuple[str, int], list[Entry]] = {}
        self._unchecked: dict[str, set[str]] = {}
        """By file: codes that could not be checked in any rollout so far."""
        for entry in entries:
            self._left.setdefault((entry.fingerprint, entry.severity), {})[entry.file] = entry.times
            if entry.file in self._scanned:
                self._at.setdefault((entry.file, entry.row), []).append(entry)
                self._unchecked.setdefault(entry.file, set()).add(entry.code)
        self._unseen: set[Key] = set()
        """Entries whose row could not be read or not be checked for their code."""
        self._ends: dict[str, tuple[int, bool]] = {}
        """By file: its last row, and whether that could be read."""
        self._gone = cache(lambda file: not _exists(file, folder))

    def holds(self, finding: Finding, file: str) -> bool:
        """Whether an entry is left for the finding; if so, uses it up.

        Only entries of its own severity count: the same tokens may be a note in one rollout, an error in another.
        """
        if (finding.code, finding.severity) not in self._kinds:
            return False  # avoids computing the fingerprint, which is slow
        left = self._left.get((finding.fingerprint, finding.severity))
        home = self._home(left, file) if left else None
        if left is None or home is None or left[home] < finding.times:
            return False
        left[home] -= finding.times
        if not left[home]:
            del left[home]
        return True

    def look(self, result: Result, file: str) -> None:
        """Record what could not be checked in a result."""
        unchecked = self._unchecked.get(file)
        if unchecked is None or result.of_log:
            return
        self._ends[file] = result.place.row, result.rollout is not None
        skipped = None
        if unchecked and result.rollout is not None:
            skipped = {skip.code for skip in result.skips}
            unchecked &= skipped
        for entry in self._at.get((file, result.place.row), ()):
            if result.rollout is None:
                unseen = entry.code != _UNREADABLE
            else:
                skipped = {skip.code for skip in result.skips} if skipped is None else skipped
                unseen = entry.code in skipped
            if unseen:
                self._unseen.add(entry.key)

    def left(self, is_checked: Callable[[str, str], bool]) -> tuple[list[Entry], list[Entry]]:
        """The entries not used up, with the remaining counts: those that are gone, and those not checked.

        `is_checked` tells whether the run checked a code in a file.
        """
        gone: list[Entry] = []
        unchecked: list[Entry] = []
        for (fingerprint, severity), files in self._left.items():
            for file, times in files.items():
                entry = replace(self._entries[fingerprint, severity, file], times=times)
                # Whether the place of an entry was checked.
                if entry.file not in self._ends or entry.code in self._unchecked[entry.file]:
                    seen = False
                else:
                    last, readable = self._ends[entry.file]
                    seen = entry.key not in self._unseen and (
                        readable or entry.row < last or entry.code == _UNREADABLE
                    )
                (gone if seen and is_checked(file, entry.code) else unchecked).append(entry)
        return gone, unchecked

    def _home(self, left: dict[str, int], file: str) -> str | None:
        if file in left:
            return file
        renamed = (home for home in left if home not in self._scanned and self._gone(home))
        moved = (home for home in left if home in self._scanned)
        return next(renamed, None) or next(moved, None)


def _exists(file: str, folder: Path) -> bool:
    """Whether a log of a baseline is still there."""
    if is_url(file):
        return remote_file(file).is_file()
    return os.path.exists(folder / file)  # noqa: PTH110 - pathlib's raises if the name is too long
