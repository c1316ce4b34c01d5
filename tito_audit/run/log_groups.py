"""Parts: the logs of a run by the settings that hold for them, each read and audited its own way."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from tito_audit.errors import RecordError, SetupError, StorageError
from tito_audit.format import Format
from tito_audit.formats import Detection, format_named, map_columns, number_columns
from tito_audit.join import Join, form_of, holds
from tito_audit.record.finding import Finding, Result
from tito_audit.record.rollout import Place, Rollout
from tito_audit.run.auditor import Auditor, Loader, Viewed, audit_rollout, unreadable
from tito_audit.run.fit import CODE, ROWS, misfit
from tito_audit.run.parallel import Counted
from tito_audit.settings.model import Settings
from tito_audit.storage import Log, RawRow, open_log
from tito_audit.storage.chunk import Chunk
from tito_audit.storage.chunks import chunks_of
from tito_audit.summary import Summary

__all__ = [
    "Fits",
    "LogGroup",
    "Parts",
    "Progress",
    "asking_nothing",
    "fitted",
    "head",
    "join_notices",
    "noted",
    "parts_of",
    "read",
    "share_of",
]

Progress = Callable[[int, int, int], None]
"""Called with rows audited, bytes read and bytes in all, of all logs together."""


@dataclass(frozen=True, slots=True, eq=False)
class LogGroup:
    """Logs of a run that have the same settings, and what they are read and audited with."""

    settings: Settings
    engine: Auditor
    named: Format | None
    """The one format of all rows; None when each row shows its own."""
    join: Join | None

    def open(self, file: Path) -> Log:
        """A log of this part."""
        settings = self.settings
        arrays = number_columns(settings.columns)
        log = open_log(
            file,
            max_row_bytes=settings.max_row_bytes,
            arrays=arrays,
            share=share_of(settings),
            rows_at=settings.rows_at,
        )
        log.only = settings.row if self.join is None else None
        return log

    def rows(self, log: Log) -> Iterable[RawRow]:
        """The rows of a log, with lines gathered that a join reads as one."""
        return log if self.join is None else self.join.rows(log)

    def chunks(self, log: Log, size: int) -> Iterator[Chunk]:
        """The same rows in chunks of about `size` bytes."""
        return chunks_of(log, size) if self.join is None else self.join.chunks(log, size)

    def rollouts(self, raw: RawRow, place: Place, told: Detection | None) -> Iterator[tuple[Place, Rollout | str]]:
        """The rollouts of a row, or why it cannot be read."""
        if raw.value is None:
            yield place, raw.error or "the row cannot be read"
            return
        row, join = raw.value, self.join
        try:
            if self.settings.columns:
                row = map_columns(row, self.settings.columns)
            form = form_of(row, self.named)
            rollouts = form.read(row, place) if join is None else join.given(form.read(row, place), raw.value)
        except RecordError as error:
            yield place, str(error)
            return
        if told is not None:
            told.look(place.file, form, row)
        for rollout in rollouts:
            yield rollout.place, rollout

    def result(self, place: Place, item: Rollout | str, viewed: Viewed | None = None) -> Result:
        """The audit of what `rollouts` gave."""
        if isinstance(item, str):
            return replace(unreadable(place, item, self.engine.codes), misfit=self.engine.misfit)
        return audit_rollout(item, self.engine, viewed)


_LOOKED_AT = 64
"""Rows of a log that are read to find some that hold ids."""

Parts = Mapping[str, LogGroup]
"""The part of each log, by its path as text."""


def share_of(settings: Settings) -> float | None:
    """How much of the rows is audited; None: all. SetupError when that cannot be."""
    share = settings.sample
    if share is None:
        return None
    if not 0 < share <= 1:
        raise SetupError(
            f"--sample {share:g}: a share of the rows is above 0 and at most 1.\n"
            "Pass --sample 0.1 for about one row in ten."
        )
    return share if share < 1 and settings.row is None else None


def parts_of(
    files: Sequence[Path],
    settings: Settings,
    stock: Loader | None = None,
    summary: Summary | None = None,
    standing_for: Mapping[Path, Path] | None = None,
) -> Parts:
    """The parts of a run, everything loaded that they need; without a stock they only read.

    The summary says what was loaded. A file that stands for another has the settings of that one.
    """
    share_of(settings)
    alike = _alike(files, settings, standing_for or {})
    engines = [_NOTHING for _ in alike]
    if stock is not None and summary is not None:
        engines = _engines(alike, stock, summary)
    joins: dict[str, Join | None] = {}
    parts: dict[str, LogGroup] = {}
    for (own, members), engine in zip(alike, engines, strict=True):
        key = _of_join(own)
        if key not in joins:
            joins[key] = Join.of(own, [file for one, all_ in alike if _of_join(one) == key for file in all_])
        named = format_named(own.format or "generic") if own.format or own.columns else None
        part = LogGroup(own, engine, named, joins[key])
        parts.update(dict.fromkeys(map(str, members), part))
    return parts


_NOTHING = Auditor(None, None, (), frozenset(), tuple)
"""For logs that are only read."""
_Alike = list[tuple[Settings, list[Path]]]
"""Settings, each with the logs for which they hold."""


class Fits:
    """The parts of logs as they fit them: a log that another tokenizer or template wrote is audited without.

    A log is asked when its part is first wanted, by its first rows, so every process comes to the same answer. A
    pipe cannot be read twice and is taken to fit; so is any log where nobody asked for the rule that says so.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._fitting: dict[str, LogGroup] = {}

    def part(self, file: str) -> LogGroup:
        """The part of a log, with an engine that fits it."""
        fitting = self._fitting.get(file)
        if fitting is None:
            part = self._parts[file]
            misfit = _misfit(Path(file), part)
            fitting = part if misfit is None else replace(part, engine=part.engine.held_back(misfit))
            self._fitting[file] = fitting
        return fitting


def fitted(parts: Parts) -> Parts:
    """The same parts, each as it fits its log."""
    fits = Fits(parts)
    return {file: fits.part(file) for file in parts}


def _misfit(file: Path, part: LogGroup) -> Finding | None:
    """What says that a log was not written with what its part has; None where it may have been."""
    engine = part.engine
    if engine.tokenizer is None or CODE not in engine.codes or not file.is_file():
        return None
    return misfit(list(islice(head(file, part, _LOOKED_AT), ROWS)), engine.tokenizer, engine.renderer)


def head(file: Path, part: LogGroup, rows: int) -> Iterator[Rollout]:
    """The rollouts of the first rows of a log, as far as they can be read; nothing is joined to them."""
    settings = replace(part.settings, row=None, sample=None)
    first = replace(part, settings=settings, join=None)
    with suppress(StorageError):
        for raw in islice(first.open(file), rows):
            for _, item in first.rollouts(raw, Place(str(file), raw.index), None):
                if isinstance(item, Rollout):
                    yield item


def asking_nothing(parts: Parts) -> Parts:
    """The same parts with no rule to ask."""
    silent = {part: replace(part, engine=part.engine.silent()) for part in dict.fromkeys(parts.values())}
    return {file: silent[part] for file, part in parts.items()}


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


def _engines(alike: _Alike, stock: Loader, summary: Summary) -> list[Auditor]:
    """The engine of each; the summary names tokenizers, and what a reader should know of which logs."""
    engines: list[Auditor] = []
    notices: dict[str, list[Path]] = {}
    for own, members in alike:
        engine, notice = stock.engine(own)
        engines.append(engine)
        if notice is not None:
            notices.setdefault(notice, []).extend(members)
    summary.tokenizer = ", ".join(dict.fromkeys(one.name for one in stock.tokenizers)) or None
    every = sum(len(members) for _, members in alike)
    for notice, members in notices.items():
        more = f" and {len(members) - 1} more" if len(members) > 1 else ""
        where = f"{members[0]}{more}: " if len(members) < every else ""
        summary.notices.append(where + notice)
    return engines


def _of_join(settings: Settings) -> str:
    """All settings that a join depends on and that may differ inside one run."""
    columns = dict(settings.columns)
    return repr((settings.messages, settings.tools, dict(settings.on), settings.format, columns, settings.rows_at))


def noted(results: Iterable[Result], parts: Parts) -> Iterator[Result]:
    """The results, which the joins of their logs have counted as they pass."""
    joins = {file: part.join for file, part in parts.items() if part.join is not None}
    if not joins:
        yield from results
        return
    for result in results:
        join = joins.get(result.place.file)
        yield from (result,) if join is None else join.noted((result,))


def join_notices(parts: Parts) -> Iterator[str]:
    """What became of the joins, for the summary, once all results were noted."""
    for join in dict.fromkeys(part.join for part in parts.values()):
        if join is not None:
            yield from join.notices()


def read(
    files: Sequence[Path],
    parts: Parts,
    summary: Summary,
    progress: Progress | None = None,
    told: Detection | None = None,
    counted: Counted | None = None,
) -> Generator[tuple[LogGroup, Place, Rollout | str], None, None]:
    """Every rollout with its part and place, or why its row could not be read."""
    total = sum(file.stat().st_size for file in files if file.is_file())
    counted = counted or Counted()
    done = 0
    for file in files:
        summary.files.append(str(file))
        part = parts[str(file)]
        limit, wanted = part.settings.limit, part.settings.row
        log, before = part.open(file), counted.left_out
        for raw in part.rows(log):
            if counted.full(limit, summary):
                return
            counted.rows += 1
            counted.left_out = before + log.left_out
            if wanted is not None and not holds(raw, wanted):
                if raw.index > wanted:
                    break
                continue
            for place, item in part.rollouts(raw, Place(str(file), raw.index), told):
                yield part, place, item
            if progress is not None:
                progress(counted.rows, done + log.position, total)
        counted.left_out = before + log.left_out
        done += log.size
        if progress is not None and log.share is not None:
            progress(counted.rows, done, total)
