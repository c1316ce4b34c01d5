"""Log groups: the logs of a run by the settings that hold for them, each read and audited its own way."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from tito_audit.formats import Detection
from tito_audit.join import Join, contains_row
from tito_audit.record.finding import Finding, Result
from tito_audit.record.rollout import Place, Rollout
from tito_audit.run.auditor import READS_ONLY, Auditor, Loader, Viewed
from tito_audit.run.encoders import Encoders, choose_encoder
from tito_audit.run.fit import CODE, ROWS, misfit
from tito_audit.run.progress import Counted, Progress
from tito_audit.run.rows import LogGroup, share_of
from tito_audit.settings.model import Settings
from tito_audit.storage import RawRow
from tito_audit.summary import Summary
from tito_audit.tokens.tokenizer import Tokenizer

__all__ = ["RowFlow"]

_LOOKED_AT = 64
"""Rows of a log that are read to find some that hold ids."""

_Alike = list[tuple[Settings, list[Path]]]
"""Settings, each with the logs for which they hold."""


class RowFlow:
    """The logs of a run and what each is read and audited with, all of it loaded.

    It is pickled as what it was made of: a process that is no fork of this one loads its own. A file that stands
    for another has the settings of that one. Without `audits` logs are only read; without `asks_rules` nothing is
    looked for in them but how they were written.
    """

    def __init__(
        self,
        files: Sequence[Path],
        settings: Settings,
        standing_for: Mapping[Path, Path] | None = None,
        *,
        audits: bool = True,
        asks_rules: bool = True,
    ) -> None:
        self._made_of = tuple(files), settings, standing_for or {}, asks_rules
        self._loader = Loader()
        self._notices: list[str] = []
        """What a reader should know of which logs."""
        self._fitting: dict[str, LogGroup] = {}
        share_of(settings)
        self.files = files
        self.settings = settings
        self.groups = self._grouped(standing_for or {}, audits=audits, asks_rules=asks_rules)
        """By log, whether the log fits what it is audited with or not."""
        self.encoders = Encoders(self.tokenizers)

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_again, self._made_of

    @property
    def tokenizers(self) -> Sequence[Tokenizer]:
        """Those of all logs, each once."""
        return self._loader.tokenizers

    @property
    def size(self) -> int:
        """Bytes of all logs; a pipe has none."""
        return sum(file.stat().st_size for file in self.files if file.is_file())

    def group(self, file: str) -> LogGroup:
        """The group of a log, with an auditor that fits: without what a log was not written with.

        A log is asked when this is first called, by its first rows, so every process comes to the same answer. A
        pipe cannot be read twice and is taken to fit; so is any log where nobody asked for the rule that says so.
        """
        fitting = self._fitting.get(file)
        if fitting is None:
            group = self.groups[file]
            found = _misfit(Path(file), group)
            fitting = group if found is None else replace(group, auditor=group.auditor.held_back(found))
            self._fitting[file] = fitting
        return fitting

    def audit(self, raw: RawRow, place: Place, told: Detection, viewed: Viewed | None) -> Iterator[Result]:
        """The results of one row: one a rollout, or one that says why it cannot be read."""
        group = self.group(place.file)
        for at, item in group.items(raw, place, told):
            yield told.say(group.result(at, item, viewed))

    def choose_encoders(self) -> None:
        """Load fast encoders where the logs are worth them."""
        for tokenizer in self.tokenizers:
            mine = {file: self.groups[str(file)] for file in self.files}
            mine = {file: group for file, group in mine.items() if group.auditor.tokenizer is tokenizer}
            choose_encoder(tokenizer, mine, self.settings)

    def load(self) -> None:
        """Have everything in memory, to be shared with processes that are forked from this one."""
        for group in dict.fromkeys(self.groups.values()):
            group.auditor.load()

    def begin(self, summary: Summary) -> None:
        """Say in a summary what was loaded, and what was not."""
        summary.tokenizer = ", ".join(dict.fromkeys(one.name for one in self.tokenizers)) or None
        summary.notices += self._notices

    def read(
        self,
        summary: Summary,
        progress: Progress | None = None,
        told: Detection | None = None,
        counted: Counted | None = None,
    ) -> Generator[tuple[LogGroup, Place, Rollout | str], None, None]:
        """Every rollout with its group and place, or why its row could not be read."""
        total, done = self.size, 0
        counted, told = counted or Counted(), told or Detection()
        for file in self.files:
            summary.files.append(str(file))
            group = self.groups[str(file)]
            limit, wanted = group.settings.limit, group.settings.row
            log, before = group.open_quick(file), counted.left_out
            for raw in group.rows(log):
                if counted.full(limit, summary):
                    return
                counted.rows += 1
                counted.left_out = before + log.left_out
                if wanted is not None and not contains_row(raw, wanted):
                    if raw.index > wanted:
                        break
                    continue
                for place, item in group.items(raw, Place(str(file), raw.index), told):
                    yield group, place, item
                if progress is not None:
                    progress(counted.rows, done + log.position, total)
            counted.left_out = before + log.left_out
            done += log.size
            if progress is not None and log.share is not None:
                progress(counted.rows, done, total)

    def noted(self, results: Iterable[Result]) -> Iterator[Result]:
        """The results, which the joins of their logs have counted as they pass."""
        joins = {file: group.join for file, group in self.groups.items() if group.join is not None}
        for result in results:
            join = joins.get(result.place.file)
            yield from (result,) if join is None else join.counted((result,))

    def join_notices(self) -> Iterator[str]:
        """What became of the joins, for the summary, once all results were noted."""
        for join in dict.fromkeys(group.join for group in self.groups.values()):
            if join is not None:
                yield from join.notices()

    def save(self) -> None:
        """Keep what this run worked out about its tokenizers for the next one."""
        for tokenizer in self.tokenizers:
            tokenizer.save()

    def _grouped(
        self, standing_for: Mapping[Path, Path], *, audits: bool, asks_rules: bool
    ) -> dict[str, LogGroup]:
        alike = _alike(self.files, self.settings, standing_for)
        auditors = self._auditors(alike) if audits else [READS_ONLY for _ in alike]
        joins: dict[str, Join | None] = {}
        groups: dict[str, LogGroup] = {}
        for (own, members), auditor in zip(alike, auditors, strict=True):
            key = _of_join(own)
            if key not in joins:
                joins[key] = Join.of(own, [file for one, all_ in alike if _of_join(one) == key for file in all_])
            group = LogGroup(own, auditor if asks_rules else auditor.silent(), joins[key])
            groups.update(dict.fromkeys(map(str, members), group))
        return groups

    def _auditors(self, alike: _Alike) -> list[Auditor]:
        """The auditor of each; what a reader should know is kept with the logs that it is about."""
        auditors: list[Auditor] = []
        notices: dict[str, list[Path]] = {}
        for own, members in alike:
            auditor, notice = self._loader.auditor(own)
            auditors.append(auditor)
            if notice is not None:
                notices.setdefault(notice, []).extend(members)
        for notice, members in notices.items():
            more = f" and {len(members) - 1} more" if len(members) > 1 else ""
            where = f"{members[0]}{more}: " if len(members) < len(self.files) else ""
            self._notices.append(where + notice)
        return auditors


def _made_again(
    files: tuple[Path, ...], settings: Settings, standing_for: Mapping[Path, Path], asks_rules: bool
) -> RowFlow:
    """The flow that was pickled, loaded in this process."""
    flow = RowFlow(files, settings, standing_for, asks_rules=asks_rules)
    flow.choose_encoders()
    return flow


def _misfit(file: Path, group: LogGroup) -> Finding | None:
    """What says that a log was not written with what its group has; None where it may have been."""
    auditor = group.auditor
    if auditor.tokenizer is None or CODE not in auditor.codes or not file.is_file():
        return None
    return misfit(list(islice(group.head(file, _LOOKED_AT), ROWS)), auditor.tokenizer, auditor.renderer)


def _of_join(settings: Settings) -> str:
    """All settings that a join depends on and that may differ inside one run."""
    columns = dict(settings.columns)
    return repr((settings.messages, settings.tools, dict(settings.on), settings.format, columns, settings.rows_at))


def _alike(files: Sequence[Path], settings: Settings, standing_for: Mapping[Path, Path]) -> _Alike:
    if not settings.overrides or not files:
        return [(settings, list(files))]
    alike: _Alike = []
    for file in files:
        own = settings.at(standing_for.get(file, file))
        members = next((members for other, members in alike if own is other or own == other), None)
        if members is None:
            alike.append((own, [file]))
        else:
            members.append(file)
    return alike
