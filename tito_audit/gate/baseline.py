"""The baseline: a file of known findings, which do not fail a scan, made to be committed and reviewed.

    {"what": "tito-audit baseline", "version": 1, "findings": [
    {"fingerprint": "0d2f…", "times": 2, "code": "TOK101", "severity": "error", "file": "logs/a.jsonl", …},
    …
    ]}

One finding per line, by file and row. File names are relative to the baseline's folder.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from operator import attrgetter
from pathlib import Path, PurePath
from typing import Any

from tito_audit.errors import SetupError, StorageError
from tito_audit.record.finding import Finding, Result, Severity
from tito_audit.report_objects import pick
from tito_audit.storage.atomic import new_file, refuse_target
from tito_audit.storage.remote import RemoteFile, is_url, remote_file
from tito_audit.summary import Fixed
from tito_audit.terminal.escape import elided, escaped_json, visible

VERSION = 1
_WHAT = "tito-audit baseline"
_UNREADABLE_ROW = "REC001"
_HEAD = re.compile(r'\{"what": "[^"]*", "version": \d{1,9}, "findings": \[')
_FINGERPRINT = re.compile("[0-9a-f]{16}")
_SEVERITIES = {severity.word: severity for severity in Severity}

Key = tuple[str, Severity, str]
"""Fingerprint, severity and file: what identifies an entry."""


@dataclass(slots=True)
class Entry:
    """Accepted findings of one fingerprint in one file."""

    fingerprint: str
    code: str
    severity: Severity
    file: str
    """Relative to the baseline's folder, with `/`; the URL of a remote log."""
    row: int
    """The row of the first of them when the baseline was written."""
    message: str
    """The message of the first of them, shortened."""
    times: int = 1

    @property
    def key(self) -> Key:
        return self.fingerprint, self.severity, self.file


def entry_of(finding: Finding, fingerprint: str, file: str) -> Entry:
    """The entry for a finding; `file` is its log as the baseline names it."""
    message = elided(visible(finding.hit.message), 120)
    return Entry(fingerprint, finding.code, finding.severity, file, finding.place.row, message, finding.times)


class LogNames:
    """How a baseline names logs: relative to its own folder, resolved; symlinks below that folder are kept.

    Remote logs are named by URL. A remote baseline names logs on disk relative to the current folder.
    """

    def __init__(self, baseline: Path) -> None:
        folder = os.path.realpath(folder_of(baseline))
        self._above = {_identity(place): place for place in (folder, *map(str, PurePath(folder).parents))}
        self._folder = folder

    def of(self, file: str) -> str:
        """The name of one log, with `/`; a remote log is named by its URL."""
        if is_url(file):
            return file
        whole = PurePath(os.path.abspath(file))  # noqa: PTH100 - Path.absolute keeps the dots
        place = whole
        for folder in whole.parents:
            if (real := self._above.get(_identity(str(folder)))) is not None:
                place = PurePath(real, whole.relative_to(folder))
                break
        try:
            return PurePath(os.path.relpath(place, self._folder)).as_posix()
        except ValueError:  # another drive
            return whole.as_posix()


def folder_of(baseline: Path) -> Path:
    """The folder from which a baseline names logs on disk."""
    return Path.cwd() if isinstance(baseline, RemoteFile) else Path(os.path.abspath(baseline)).parent  # noqa: PTH100


def _identity(folder: str) -> tuple[int, int] | str:
    """What identifies a folder under any name."""
    try:
        there = os.stat(folder)  # noqa: PTH116
    except (OSError, ValueError):
        return folder
    return there.st_dev, there.st_ino


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
        counted = self._by_key.setdefault(entry.key, entry)
        if counted is not entry:
            counted.times += entry.times
            counted.row = min(counted.row, entry.row)
        self.total += entry.times


class Baseline:
    """A baseline in a run: its entries, which findings use up, and the file as it is written again.

    A finding uses up an entry of its own log first, then one of a log that no longer exists (it may have been
    renamed), then one of another log of the run (its row may have moved there).
    """

    def __init__(self, path: Path, logs: Iterable[Path], *, update: bool = False) -> None:
        if update:
            try:
                refuse_target(path, overwrite=True)
            except StorageError as error:
                raise SetupError(f"--baseline {error}") from error
        self._path = path
        self.name = cache(LogNames(path).of)
        """The name of a log in the baseline."""
        self._files = {self.name(str(file)): str(file) for file in logs}
        entries = [] if update and not path.exists() else read_baseline(path)
        self._entries = {entry.key: entry for entry in entries}
        self._kinds = {(entry.code, entry.severity) for entry in entries}
        self._left: dict[tuple[str, Severity], dict[str, int]] = {}
        """By fingerprint and severity: by file, how many are not used up."""
        self._at: dict[tuple[str, int], list[Entry]] = {}
        self._unchecked: dict[str, set[str]] = {}
        """By file: codes that could not be checked in any rollout so far."""
        for entry in entries:
            self._left.setdefault((entry.fingerprint, entry.severity), {})[entry.file] = entry.times
            if entry.file in self._files:
                self._at.setdefault((entry.file, entry.row), []).append(entry)
                self._unchecked.setdefault(entry.file, set()).add(entry.code)
        self._unseen: set[Key] = set()
        """Entries whose row could not be read or not be checked for their code."""
        self._ends: dict[str, tuple[int, bool]] = {}
        """By file: its last row, and whether that could be read."""
        folder = folder_of(path)
        # os.path, since pathlib's raises if the name is too long.
        self._gone = cache(
            lambda file: not (remote_file(file).is_file() if is_url(file) else os.path.exists(folder / file))  # noqa: PTH110
        )
        self.seen = EntryCounts()
        """The baseline's findings as they were found in this run."""

    def holds(self, finding: Finding, file: str) -> bool:
        """Whether an entry is left for the finding; if so, uses it up.

        Only entries of its own severity count: the same tokens may be a note in one rollout, an error in another.
        """
        if (finding.code, finding.severity) not in self._kinds:
            return False  # avoids computing the fingerprint, which is slow
        left = self._left.get((finding.fingerprint, finding.severity), {})
        renamed = (home for home in left if home not in self._files and self._gone(home))
        moved = (home for home in left if home in self._files)
        home = file if file in left else next(chain(renamed, moved), None)
        if home is None or left[home] < finding.times:
            return False
        left[home] -= finding.times
        if not left[home]:
            del left[home]
        return True

    def look(self, result: Result, file: str) -> None:
        """Record what could not be checked in a result."""
        if file not in self._unchecked or result.of_log:
            return
        readable, skipped = result.rollout is not None, {skip.code for skip in result.skips}
        self._ends[file] = result.place.row, readable
        if readable:
            self._unchecked[file] &= skipped
        for entry in self._at.get((file, result.place.row), ()):
            if entry.code in skipped if readable else entry.code != _UNREADABLE_ROW:
                self._unseen.add(entry.key)

    def left(self, codes: Callable[[str], frozenset[str]]) -> tuple[list[Entry], list[Entry]]:
        """The entries not used up, with the remaining counts: those that are gone, and those not checked.

        `codes` are those that the run checked in a log.
        """
        gone: list[Entry] = []
        unchecked: list[Entry] = []
        for (fingerprint, severity), files in self._left.items():
            for file, times in files.items():
                entry = replace(self._entries[fingerprint, severity, file], times=times)
                # Whether the place of an entry was checked.
                last, readable = self._ends.get(file, (-1, False))
                seen = last >= 0 and entry.code not in self._unchecked[file] and entry.key not in self._unseen
                seen = seen and (readable or entry.row < last or entry.code == _UNREADABLE_ROW)
                seen = seen and entry.code in codes(self._files[file])
                (gone if seen else unchecked).append(entry)
        return gone, unchecked

    def fixed(self, codes: Callable[[str], frozenset[str]]) -> tuple[Fixed, ...]:
        """The entries that are gone from the logs."""
        return tuple(
            Fixed(entry.fingerprint, entry.code, self._files[entry.file], entry.row, entry.message, entry.times)
            for entry in sorted(self.left(codes)[0], key=attrgetter("file", "row", "code"))
        )

    def rewrite(self, codes: Callable[[str], frozenset[str]] | None, new: Iterable[EntryCounts]) -> None:
        """Write the file again with what is new and without what is gone; None: rows were left out, all stay."""
        stays = self._entries.values() if codes is None else chain(self.left(codes)[1], self.seen)
        entries = EntryCounts()
        for entry in chain(stays, *new):
            entries.put(entry)
        write_baseline(self._path, entries)


def read_baseline(path: Path) -> list[Entry]:
    """The entries of a baseline; SetupError, with the place, if the file is not a baseline."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
        value = _parsed(text)
    except FileNotFoundError:
        raise SetupError(
            f"--baseline {path}: there is no such file.\n"
            "Create it with --update-baseline, which accepts what is found now, and commit it."
        ) from None
    except OSError as error:
        raise SetupError(f"--baseline {path}: the file cannot be read ({error.strerror or error}).") from None
    except UnicodeDecodeError as error:
        raise _not_a_baseline(path, f"byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        if not text.strip():
            about_json = "it is empty"
        else:
            marked = re.search(r"^(?:<{7}|[|]{7}|={7}|>{7})(?: |$)", text, re.MULTILINE)
            if marked:
                line = text[: marked.start()].count("\n") + 1
                about_json = (
                    f"line {line} is an unresolved merge conflict. Keep the lines of both sides and remove the "
                    "markers (merge=union in .gitattributes leaves none)"
                )
            else:
                about_json = f"it is not JSON at line {error.lineno}, column {error.colno} ({error.msg})"
        raise _not_a_baseline(path, about_json) from None
    except RecursionError:
        raise _not_a_baseline(path, "it is nested too deeply") from None
    if not isinstance(value, dict) or value.get("what") != _WHAT or not isinstance(value.get("findings"), list):
        raise _not_a_baseline(path, f'it is not an object with "what": "{_WHAT}" and a list "findings"')
    version = value.get("version")
    if type(version) is not int or version < 1:
        raise _not_a_baseline(path, f"its version is {_shown(version)}")
    if version > VERSION:
        raise SetupError(
            f"--baseline {path}: it has version {version}, but this tito-audit knows versions up to {VERSION}.\n"
            "Update tito-audit, or write the file again with this one: delete it and pass --update-baseline."
        )
    # The entries without duplicates: what two branches accepted is there twice after a merge.
    entries = (_entry(path, number, entry_object) for number, entry_object in enumerate(value["findings"], 1))
    by_key: dict[Key, Entry] = {}
    for entry in entries:
        first = by_key.setdefault(entry.key, entry)
        if first.times < entry.times:
            by_key[entry.key] = entry
    return list(by_key.values())


def _parsed(text: str) -> Any:
    """The value of the file; commas between its lines may be missing or doubled, as after a merge."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        head, *lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
        if not (_HEAD.fullmatch(head) and lines[-1:] == ["]}"] and all(line[:1] == "{" for line in lines[:-1])):
            raise
        whole = ",".join(line.rstrip(",") for line in lines[:-1])
        try:
            return json.loads(f"{head}{whole}]}}")
        except json.JSONDecodeError:
            pass
        raise  # with positions in the original text


def write_baseline(path: Path, entries: Iterable[Entry]) -> None:
    """Write the file atomically; the same entries give the same bytes."""
    order = attrgetter("file", "row", "code", "fingerprint", "severity")
    lines = []
    for entry in sorted(entries, key=order):
        start, severity = pick(entry, "fingerprint times code"), {"severity": entry.severity.word}
        value = start | severity | pick(entry, "file row message")
        lines.append(escaped_json(json.dumps(value, ensure_ascii=False)))
    head = f'{{"what": "{_WHAT}", "version": {VERSION}, "findings": ['
    text = "\n".join([head, ",\n".join(lines), "]}\n"] if lines else [head, "]}\n"])
    try:
        with new_file(path, overwrite=True) as out:
            # A lone surrogate, which file names may contain, becomes its JSON escape.
            out.write(text.encode("utf-8", "backslashreplace"))
    except StorageError as error:
        raise SetupError(f"--baseline: {error}") from error


def _entry(path: Path, number: int, value: Any) -> Entry:
    if not isinstance(value, dict):
        raise _not_a_baseline(path, f"finding {number} in it is {_shown(value)}")

    def field(name: str, kind: type, fits: bool = True) -> Any:
        entry_value = value.get(name)
        if type(entry_value) is not kind or not fits:
            raise _not_a_baseline(path, f"{name} of finding {number} in it is {_shown(entry_value)}")
        return entry_value

    fingerprint = field("fingerprint", str)
    field("fingerprint", str, bool(_FINGERPRINT.fullmatch(fingerprint)))
    severity = field("severity", str)
    field("severity", str, severity in _SEVERITIES)
    times, row = field("times", int), field("row", int)
    field("times", int, times >= 1)
    field("row", int, row >= 0)
    file, message = field("file", str), field("message", str)
    return Entry(fingerprint, field("code", str), _SEVERITIES[severity], file, row, message, times)


def _not_a_baseline(path: Path, because: str) -> SetupError:
    return SetupError(
        f"--baseline {path}: not a baseline file: {because}.\n"
        "If it was damaged by hand or in a merge, restore it from version control; if there is none, "
        "--update-baseline writes a new one."
    )


def _shown(value: Any) -> str:
    if value is None:
        return "missing"
    text = repr(value) if isinstance(value, str | int | float) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:60]}…"
