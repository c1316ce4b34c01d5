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
class BaselineEntry:
    """The accepted findings of one fingerprint in one file."""

    fingerprint: str
    code: str
    severity: Severity
    file: str
    """The log, relative to the baseline's folder, with `/`; the URL of a remote log."""
    row: int
    """The row of the first finding when the baseline was written."""
    message: str
    """The message of the first finding, shortened."""
    times: int = 1

    @property
    def key(self) -> Key:
        return self.fingerprint, self.severity, self.file


def baseline_entry(finding: Finding, fingerprint: str, file: str) -> BaselineEntry:
    """The entry of a finding; `file` is the name of its log in the baseline."""
    message = elided(visible(finding.hit.message), 120)
    row, times = finding.place.row, finding.times
    return BaselineEntry(fingerprint, finding.code, finding.severity, file, row, message, times)


class LogNames:
    """The names of logs in a baseline: relative to its resolved folder, with symlinks below that kept.

    Remote logs are named by URL. A remote baseline names logs on disk relative to the current folder.
    """

    def __init__(self, baseline: Path) -> None:
        folder = os.path.realpath(folder_of(baseline))
        self._above = {_folder_id(place): place for place in (folder, *map(str, PurePath(folder).parents))}
        self._folder = folder

    def of(self, file: str) -> str:
        """The name of one log, with `/`; a remote log is named by its URL."""
        if is_url(file):
            return file
        whole = PurePath(os.path.abspath(file))  # noqa: PTH100 - Path.absolute keeps the dots
        place = whole
        for folder in whole.parents:
            if (real := self._above.get(_folder_id(str(folder)))) is not None:
                place = PurePath(real, whole.relative_to(folder))
                break
        try:
            return PurePath(os.path.relpath(place, self._folder)).as_posix()
        except ValueError:  # another drive
            return whole.as_posix()


def folder_of(baseline: Path) -> Path:
    """The folder that the names of logs in a baseline are relative to."""
    return Path.cwd() if isinstance(baseline, RemoteFile) else Path(os.path.abspath(baseline)).parent  # noqa: PTH100


def _folder_id(folder: str) -> tuple[int, int] | str:
    """The device and inode of a folder, equal under all of its names; its path if it cannot be read."""
    try:
        there = os.stat(folder)  # noqa: PTH116
    except (OSError, ValueError):
        return folder
    return there.st_dev, there.st_ino


class EntryCounts:
    """Findings as entries of a baseline, identical ones as one entry."""

    def __init__(self) -> None:
        self.total = 0
        """How many findings were added."""
        self._by_key: dict[Key, BaselineEntry] = {}

    def __iter__(self) -> Iterator[BaselineEntry]:
        return iter(self._by_key.values())

    def add(self, finding: Finding, file: str) -> None:
        """Add a finding; `file` is the name of its log in the baseline."""
        fingerprint = finding.fingerprint
        if (fingerprint, finding.severity, file) in self._by_key:
            self._by_key[fingerprint, finding.severity, file].times += finding.times
            self.total += finding.times
        else:
            self.add_entry(baseline_entry(finding, fingerprint, file))

    def add_entry(self, entry: BaselineEntry) -> None:
        counted = self._by_key.setdefault(entry.key, entry)
        if counted is not entry:
            counted.times += entry.times
            counted.row = min(counted.row, entry.row)
        self.total += entry.times


class Baseline:
    """A baseline during a run: findings use up its entries, and the file is written again from the rest.

    A finding uses up an entry of its own log first, then one of a log that no longer exists (it may have been
    renamed), then one of another log of the run (its row may have moved).
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
        self._codes = {(entry.code, entry.severity) for entry in entries}
        self._counts: dict[tuple[str, Severity], dict[str, int]] = {}
        """By fingerprint and severity, then by file: how many accepted findings are left."""
        self._entries_at: dict[tuple[str, int], list[BaselineEntry]] = {}
        self._unchecked: dict[str, set[str]] = {}
        """By file: the codes of its entries that no rollout so far could be checked for."""
        for entry in entries:
            self._counts.setdefault((entry.fingerprint, entry.severity), {})[entry.file] = entry.times
            if entry.file in self._files:
                self._entries_at.setdefault((entry.file, entry.row), []).append(entry)
                self._unchecked.setdefault(entry.file, set()).add(entry.code)
        self._uncheckable: set[Key] = set()
        """Entries whose row could not be read, or not be checked for their code."""
        self._last_rows: dict[str, tuple[int, bool]] = {}
        """By file: its last row so far, and whether it could be read."""
        folder = folder_of(path)
        # Not `Path.exists`, which raises if the name is too long.
        self._is_gone = cache(
            lambda file: not (remote_file(file).is_file() if is_url(file) else os.path.exists(folder / file))  # noqa: PTH110
        )
        self.still_found = EntryCounts()
        """The findings of this run that are in the baseline."""

    def use_up(self, finding: Finding, file: str) -> bool:
        """Whether an entry is left for the finding; if so, uses it up.

        Only entries of its own severity count: the same tokens may be a note in one rollout, an error in another.
        """
        if (finding.code, finding.severity) not in self._codes:
            return False  # avoids computing the fingerprint, which is slow
        left = self._counts.get((finding.fingerprint, finding.severity), {})
        renamed = (home for home in left if home not in self._files and self._is_gone(home))
        moved = (home for home in left if home in self._files)
        home = file if file in left else next(chain(renamed, moved), None)
        if home is None or left[home] < finding.times:
            return False
        left[home] -= finding.times
        if not left[home]:
            del left[home]
        return True

    def note_unchecked(self, result: Result, file: str) -> None:
        """Note which entries of a log could not be checked in this result."""
        if file not in self._unchecked or result.of_log:
            return
        readable, skipped = result.rollout is not None, {skip.code for skip in result.skips}
        self._last_rows[file] = result.place.row, readable
        if readable:
            self._unchecked[file] &= skipped
        for entry in self._entries_at.get((file, result.place.row), ()):
            if entry.code in skipped if readable else entry.code != _UNREADABLE_ROW:
                self._uncheckable.add(entry.key)

    def unused(self, codes: Callable[[str], frozenset[str]]) -> tuple[list[BaselineEntry], list[BaselineEntry]]:
        """The entries with counts that no finding used up: those that are gone, and those that were not checked.

        `codes` gives the codes that are selected for a log.
        """
        gone: list[BaselineEntry] = []
        unchecked: list[BaselineEntry] = []
        for (fingerprint, severity), files in self._counts.items():
            for file, times in files.items():
                entry = replace(self._entries[fingerprint, severity, file], times=times)
                last, readable = self._last_rows.get(file, (-1, False))
                checked = last >= 0 and entry.code in codes(self._files[file])
                checked = checked and entry.code not in self._unchecked[file]
                checked = checked and entry.key not in self._uncheckable
                checked = checked and (readable or entry.row < last or entry.code == _UNREADABLE_ROW)
                (gone if checked else unchecked).append(entry)
        return gone, unchecked

    def fixed(self, codes: Callable[[str], frozenset[str]]) -> tuple[Fixed, ...]:
        """The entries whose findings are gone from the logs."""
        return tuple(
            Fixed(entry.fingerprint, entry.code, self._files[entry.file], entry.row, entry.message, entry.times)
            for entry in sorted(self.unused(codes)[0], key=attrgetter("file", "row", "code"))
        )

    def rewrite(self, codes: Callable[[str], frozenset[str]] | None, new: Iterable[EntryCounts]) -> None:
        """Write the file again, with `new` and without what is gone; with `codes` None all entries stay."""
        stays = self._entries.values() if codes is None else chain(self.unused(codes)[1], self.still_found)
        entries = EntryCounts()
        for entry in chain(stays, *new):
            entries.add_entry(entry)
        write_baseline(self._path, entries)


def read_baseline(path: Path) -> list[BaselineEntry]:
    """The entries of a baseline; SetupError with the place if the file is not a baseline."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
        value = _parse_json(text)
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
        raise _not_a_baseline(path, f"its version is {_describe(version)}")
    if version > VERSION:
        raise SetupError(
            f"--baseline {path}: it has version {version}, but this tito-audit knows versions up to {VERSION}.\n"
            "Update tito-audit, or write the file again with this one: delete it and pass --update-baseline."
        )
    # After a merge, what both branches accepted is there twice.
    entries = (_parse_entry(path, number, entry) for number, entry in enumerate(value["findings"], 1))
    by_key: dict[Key, BaselineEntry] = {}
    for entry in entries:
        first = by_key.setdefault(entry.key, entry)
        if first.times < entry.times:
            by_key[entry.key] = entry
    return list(by_key.values())


def _parse_json(text: str) -> Any:
    """The JSON value of a baseline, in which a merge may have lost or doubled commas between lines."""
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


def write_baseline(path: Path, entries: Iterable[BaselineEntry]) -> None:
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
            # A file name may hold a lone surrogate, which is written as its JSON escape.
            out.write(text.encode("utf-8", "backslashreplace"))
    except StorageError as error:
        raise SetupError(f"--baseline: {error}") from error


def _parse_entry(path: Path, number: int, value: Any) -> BaselineEntry:
    if not isinstance(value, dict):
        raise _not_a_baseline(path, f"finding {number} in it is {_describe(value)}")

    def field(name: str, kind: type, fits: bool = True) -> Any:
        entry_value = value.get(name)
        if type(entry_value) is not kind or not fits:
            raise _not_a_baseline(path, f"{name} of finding {number} in it is {_describe(entry_value)}")
        return entry_value

    fingerprint = field("fingerprint", str)
    field("fingerprint", str, bool(_FINGERPRINT.fullmatch(fingerprint)))
    severity = field("severity", str)
    field("severity", str, severity in _SEVERITIES)
    times, row = field("times", int), field("row", int)
    field("times", int, times >= 1)
    field("row", int, row >= 0)
    file, message = field("file", str), field("message", str)
    return BaselineEntry(fingerprint, field("code", str), _SEVERITIES[severity], file, row, message, times)


def _not_a_baseline(path: Path, because: str) -> SetupError:
    return SetupError(
        f"--baseline {path}: not a baseline file: {because}.\n"
        "If it was damaged by hand or in a merge, restore it from version control; if there is none, "
        "--update-baseline writes a new one."
    )


def _describe(value: Any) -> str:
    if value is None:
        return "missing"
    text = repr(value) if isinstance(value, str | int | float) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:60]}…"
