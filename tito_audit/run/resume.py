"""Resume: which logs an earlier run finished, and whether its results are still theirs."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from datetime import date
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tito_audit.errors import SetupError
from tito_audit.run.log_groups import RowFlow
from tito_audit.run.rows import LogGroup
from tito_audit.settings.model import Settings
from tito_audit.storage import RowsInMemory, find_logs
from tito_audit.storage.journal import Finished, Journal
from tito_audit.terminal.words import listed, many
from tito_audit.tokens.load import digest_of
from tito_audit.version import VERSION

State = list[Any]
"""What shows that a file is the same: its size and times; what a remote store says about it."""
States = Mapping[Path, State | None]
"""By log: its state before the run; None for a pipe."""

SCAN, REPAIR = "scan", "repair"
"""What was done to a log."""
_NOT_DECIDING = {"jobs", "engine", "address", "limit", "overrides"}
"""Settings that change no result of a log that was read to its end."""
_LIBRARIES = ("tokenizers", "fastokens", "jinja2", "numpy", "orjson", "pyarrow")


def identity_of(path: Path) -> State | None:
    """Size, modification time and, of a remote file, its version; None for a pipe, which cannot be read again."""
    if not path.is_file():
        return None
    about = path.stat()
    return [about.st_size, about.st_mtime_ns, getattr(about, "etag", None)]


def states_of(files: Sequence[Path]) -> States:
    """The state of each log; SetupError for rows in memory, which another run cannot be sure to find again."""
    rows = next((file for file in files if isinstance(file, RowsInMemory)), None)
    if rows is not None:
        raise SetupError(f"resume: {rows} are rows in memory, and only files can be resumed.\nLeave out `resume`.")
    return {file: identity_of(file) for file in files}


class FinishedLogs:
    """The logs of a run that an earlier run finished with the same settings, and a record of those it finishes.

    `kind` says what was done to them (SCAN, REPAIR), `more` what decided that besides their settings.
    """

    def __init__(
        self, journal: Journal, kind: str, flow: RowFlow, states: States, more: Mapping[str, object]
    ) -> None:
        self.journal = journal
        self._kind = kind
        self._flow = flow
        self._states = states
        self._more = more
        self._by_group: dict[int, Mapping[str, str]] = {}
        self._differs: dict[str, None] = {}
        self._unused = 0
        self.found = {file: one for file in flow.files if (one := self._find(file)) is not None}
        """By log: what was recorded."""

    def notices(self) -> Iterator[str]:
        """What the journal holds of unchanged logs and cannot be used, for the summary."""
        if self._unused:
            yield (
                f"{self.journal.path}: {many(self._unused, 'log')} had been finished by a run with "
                f"{listed([f'other {name}' for name in self._differs])}; this run did not use that."
            )

    def finish(self, file: Path, **said: object) -> bool:
        """Whether the log was recorded as finished: not if it changed since the run began."""
        state = self._states.get(file)
        same = state is not None and state == identity_of(file)
        if same:
            self.journal.finish(self._kind, str(file), state, self._decided(file), **said)
        return same

    def _find(self, file: Path) -> Finished | None:
        found, state = self.journal.finished(self._kind, str(file)), self._states.get(file)
        if found is None or state is None or found.state != state:
            return None
        decided = self._decided(file)
        differs = [name for name in {**decided, **found.decided} if decided.get(name) != found.decided.get(name)]
        self._differs |= dict.fromkeys(differs)
        self._unused += bool(differs)
        return None if differs else found

    def _decided(self, file: Path) -> Mapping[str, str]:
        """What decides the result of a log, by name, as hashes."""
        group = self._flow.groups[str(file)]
        if id(group) not in self._by_group:
            said = {**_deciding(group, self._kind), **self._more}
            self._by_group[id(group)] = {name: _hash(value) for name, value in said.items()}
        decided = self._by_group[id(group)]
        if group.join is None or not group.join.joins_logs(file):
            return decided
        # With a limit, only so many rows are searched for the calls of a conversation.
        return {**decided, "logs": self._all_logs + str(group.settings.limit)}

    @cached_property
    def _all_logs(self) -> str:
        return logs_hash(self._states)


def logs_hash(states: States) -> str:
    """A hash of all logs of a run."""
    return _hash([(str(file), state) for file, state in states.items()])


def _deciding(group: LogGroup, kind: str) -> dict[str, object]:
    """What decides the results of a group of logs, besides what is in them."""
    settings, auditor = group.settings, group.auditor
    said: dict[str, object] = {
        "code": _code(),
        "settings": [(name, _plain(getattr(settings, name))) for name in _fields(kind)],
    }
    if auditor.tokenizer is not None:
        said["tokenizer files"] = digest_of(auditor.tokenizer)
    if auditor.renderer is not None:
        sources = {name: template.source for name, template in auditor.renderer.templates.items()}
        said["chat template"] = _plain(sources)
        if settings.clock is None and any("strftime_now" in source for source in sources.values()):
            said["date (--clock sets it)"] = date.today().isoformat()
    others = [name for name in (settings.messages, settings.tools_file) if name is not None]
    if others and group.join is not None:
        files = [(str(file), identity_of(file)) for name in others for file in find_logs([name])]
        said["joined files"] = files, group.join.keys()
    return said


def _fields(kind: str) -> list[str]:
    """The settings that decide a result. What fails a scan is decided later."""
    without = _NOT_DECIDING | ({"fail_on"} if kind == SCAN else set())
    return [one.name for one in fields(Settings) if one.name not in without]


def _plain(value: object) -> object:
    """A value whose `repr` is the same for equal values."""
    return sorted(value.items()) if isinstance(value, Mapping) else value


def _hash(value: object) -> str:
    return hashlib.sha256(repr(value).encode("utf-8", "surrogatepass")).hexdigest()[:32]


@cache
def _code() -> str:
    """A hash of this package's code and the versions of what it computes with."""
    code = hashlib.sha256(f"{VERSION} {sys.version}".encode())
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            code.update(f"{name} {version(name)}\n".encode())
    folder = Path(__file__).parents[1]
    for file in sorted((*folder.rglob("*.py"), *folder.rglob("*.json"))):
        code.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return code.hexdigest()
