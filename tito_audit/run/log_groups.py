"""Log groups: the logs of a run grouped by their settings, each read and audited by its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from tito_audit.errors import RecordError
from tito_audit.formats import Detection
from tito_audit.join import Answers, Batch, Join, Work, contains_row, shown_by
from tito_audit.record.finding import Result
from tito_audit.record.rollout import Place, Rollout
from tito_audit.run.adopt import CODES as ADOPTING
from tito_audit.run.adopt import adopted
from tito_audit.run.auditor import (
    READS_ONLY,
    Auditor,
    Loader,
    Viewed,
    audit_rollout,
    selected_codes,
    unreadable,
)
from tito_audit.run.encoders import Encoders, begin_encoder, choose_encoder
from tito_audit.run.executor import Executor, InProcess, is_small, mapped
from tito_audit.run.fit import CODE, ROWS, misfit
from tito_audit.run.progress import Counted, Progress
from tito_audit.run.rewriting import CODE as REWRITING
from tito_audit.run.rewriting import rewriting
from tito_audit.run.rows import LogGroup, share_of
from tito_audit.run.workers import ForkedProcesses, can_fork
from tito_audit.settings.model import Settings
from tito_audit.storage import RawRow
from tito_audit.summary import Summary
from tito_audit.tokens.tokenizer import Tokenizer

_SEARCHED = 64
"""Rows of a log that are searched for rollouts with ids."""

_Grouped = list[tuple[Settings, list[Path]]]
"""Settings, each with the logs that they apply to."""


class RowFlow:
    """The logs of a run, with everything loaded that reads and audits them.

    It pickles as its arguments: a process that was not forked from this one loads everything itself.
    `standing_for` maps a file to the log whose settings it has. Without `audits` logs are only read; without
    `asks_rules` rules are skipped and results only say how their log was written. What `loader` has loaded for
    another flow is not loaded again.
    """

    def __init__(
        self,
        files: Sequence[Path],
        settings: Settings,
        standing_for: Mapping[Path, Path] | None = None,
        *,
        audits: bool = True,
        asks_rules: bool = True,
        loader: Loader | None = None,
    ) -> None:
        self._arguments = tuple(files), settings, standing_for or {}, asks_rules
        self.loader = loader or Loader()
        self.progress: Progress | None = None
        """Told of the rows of a first pass over calls, whose bytes it does not know."""
        self._notices: list[str] = []
        self._fitting: dict[str, LogGroup] = {}
        share_of(settings)
        self.files = files
        self.settings = settings
        self.groups = self._grouped(standing_for or {}, audits=audits, asks_rules=asks_rules)
        """By log, whether or not tokenizer and template fit it."""
        self.encoders = Encoders(self.tokenizers)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, self._arguments

    @property
    def tokenizers(self) -> Sequence[Tokenizer]:
        """The tokenizers of all logs, each once."""
        used = [group.auditor.tokenizer for group in self.groups.values()]
        return [tokenizer for tokenizer in self.loader.tokenizers if any(tokenizer is one for one in used)]

    @property
    def size(self) -> int:
        """Bytes of all logs, pipes not counted."""
        return sum(file.stat().st_size for file in self.files if file.is_file())

    def group(self, file: str) -> LogGroup:
        """The group of a log; its auditor lacks the tokenizer or template that the log was not written with.

        The first call looks at the first rows of the log, so every process comes to the same answer. Pipes, which
        cannot be read twice, and logs for which REC007 is not selected are taken to fit.
        """
        fitting = self._fitting.get(file)
        if fitting is None:
            fitting = self._fitting[file] = _fitted(Path(file), self.groups[file])
        return fitting

    def rows(
        self, summary: Summary, progress: Progress | None = None, counted: Counted | None = None
    ) -> Iterator[tuple[RawRow, Place]]:
        """Every wanted row with its place; the summary gets the files."""
        total, done, counted = self.size, 0, counted or Counted()
        for file in self.files:
            summary.files.append(str(file))
            group = self.groups[str(file)]
            wanted = group.settings.row
            log, before = group.open_quick(file), counted.left_out
            for raw in group.rows(log):
                if counted.full(group.settings.limit, summary):
                    return
                counted.rows += 1
                counted.left_out = before + log.left_out
                if wanted is not None and not contains_row(raw, wanted):
                    if raw.index > wanted:
                        break
                    continue
                yield raw, Place(str(file), raw.index)
                if progress is not None:
                    progress(counted.rows, done + log.position, total)
            counted.left_out = before + log.left_out
            done += log.size
            if progress is not None and log.share is not None:
                progress(counted.rows, done, total)

    def audit(self, raw: RawRow, place: Place, detection: Detection, viewed: Viewed | None) -> Iterator[Result]:
        """The results of one row: one per rollout, or one that says why it cannot be read."""
        group = self.group(place.file)
        auditor = group.auditor
        try:
            read = group.read(raw, place)
        except RecordError as error:
            yield replace(unreadable(place, str(error), auditor.codes), misfit=auditor.misfit, told=auditor.told)
            return
        detection.look(place.file, *shown_by(read.format, read.row))
        for rollout in read.rollouts:
            yield detection.say(audit_rollout(rollout, auditor, viewed))

    def choose_encoders(self) -> None:
        """Load fast encoders where the logs are large enough, and meanwhile what else the run will need."""
        groups = {file: self.groups[str(file)] for file in self.files}
        for tokenizer in self.tokenizers:
            mine = {file: group for file, group in groups.items() if group.auditor.tokenizer is tokenizer}
            if begin_encoder(tokenizer, mine, self.settings):
                head = self._first_rollouts(mine)
                if (self.settings.jobs or 1) > 1:
                    self.load()
                choose_encoder(tokenizer, head, self.settings)

    def _first_rollouts(self, logs: Iterable[Path]) -> Sequence[Rollout]:
        """The first rollouts of the first of the logs, which are also asked whether it fits."""
        file = next((log for log in logs if log.is_file()), None)  # a pipe cannot be read twice
        if file is None:
            return ()
        group = self.groups[str(file)]
        head = _head(file, group)
        self._fitting.setdefault(str(file), _fitted(file, group, head))
        return head

    def load(self) -> None:
        """Load everything that forked processes can share."""
        for group in dict.fromkeys(self.groups.values()):
            group.auditor.load()

    def begin(self, summary: Summary) -> None:
        """Put the tokenizers, the flags of joining, and notices about what is missing, into a summary."""
        summary.tokenizer = ", ".join(dict.fromkeys(one.name for one in self.tokenizers)) or None
        joining = {_joining(group.settings) for group in self.groups.values()}
        summary.joining = next(iter(joining)) if len(joining) == 1 else ()
        summary.notices += self._notices

    def noted(self, results: Iterable[Result]) -> Iterator[Result]:
        """The results, counted by the joins of their logs as they pass."""
        for result in results:
            join = self.groups[result.place.file].join
            yield from (result,) if join is None else join.counted((result,))

    def say_joined(self, summary: Summary) -> None:
        """Put into a summary what the joins of the logs found, once all results were noted."""
        for join in dict.fromkeys(group.join for group in self.groups.values()):
            if join is not None:
                summary.joined += join.joined()
                summary.notices += join.notices()
        summary.notices += summary.joined

    def save(self) -> None:
        """Cache for the next run what this one worked out about its tokenizers."""
        for tokenizer in self.tokenizers:
            tokenizer.save()

    def _grouped(
        self, standing_for: Mapping[Path, Path], *, audits: bool, asks_rules: bool
    ) -> dict[str, LogGroup]:
        by_settings = _by_settings(self.files, self.settings, standing_for)
        auditors = self._auditors(by_settings) if audits else [READS_ONLY for _ in by_settings]
        joins: dict[str, Join | None] = {}
        groups: dict[str, LogGroup] = {}
        for (own, members), auditor in zip(by_settings, auditors, strict=True):
            key = _join_key(own)
            if key not in joins:
                logs = [file for one, files in by_settings if _join_key(one) == key for file in files]
                vocabulary = auditor.vocabulary
                decode = vocabulary.data if vocabulary is not None else None
                joins[key] = Join.of(own, logs, decode, self._first_pass, written=bool(standing_for))
            group = LogGroup(own, auditor if asks_rules else auditor.silent(), joins[key])
            groups.update(dict.fromkeys(map(str, members), group))
        return groups

    def _first_pass(self, work: Work, batches: Iterable[tuple[int, Batch]]) -> Answers:
        """The work of a first pass over calls, in as many processes as the run has if it is worth it."""
        jobs = self.settings.jobs or 1
        alone = jobs == 1 or not can_fork() or is_small(self.files)
        executor: Executor = InProcess() if alone else ForkedProcesses(jobs)
        tasks: Iterable[tuple[int, Batch | None]] = batches
        rows = 0
        for number, said in mapped(executor, work, tasks):
            rows += 0 if said is None else len(said.index)
            if self.progress is not None:
                self.progress(rows, 0, 0)
            yield number, said

    def _auditors(self, by_settings: _Grouped) -> list[Auditor]:
        """The auditor for each of the settings; a notice names the logs that it is about."""
        auditors: list[Auditor] = []
        notices: dict[str, list[Path]] = {}
        for own, members in by_settings:
            auditor, notice = self.loader.auditor(own)
            auditors.append(auditor)
            if notice is not None:
                notices.setdefault(notice, []).extend(members)
        for notice, members in notices.items():
            more = f" and {len(members) - 1} more" if len(members) > 1 else ""
            where = f"{members[0]}{more}: " if len(members) < len(self.files) else ""
            self._notices.append(where + notice)
        return auditors


def _rebuilt(
    files: tuple[Path, ...], settings: Settings, standing_for: Mapping[Path, Path], asks_rules: bool
) -> RowFlow:
    """The flow that was pickled, loaded in this process."""
    flow = RowFlow(files, settings, standing_for, asks_rules=asks_rules)
    flow.choose_encoders()
    return flow


def _head(file: Path, group: LogGroup, *, joined: bool = False) -> Sequence[Rollout]:
    """The first rollouts of a log; `joined`: with the messages and tools of other files."""
    return list(islice(group.head(file, _SEARCHED, joined=joined), ROWS))


def _fitted(file: Path, group: LogGroup, head: Sequence[Rollout] | None = None) -> LogGroup:
    """The group, without the tokenizer or template that its log was not written with; or with the template
    arguments, date and tools that it was written with. `head` is its `_head`."""
    auditor, settings = group.auditor, group.settings
    tokenizer, renderer = auditor.tokenizer, auditor.renderer
    # Also where this run only asks how the log was written.
    codes = auditor.codes if auditor.rules else selected_codes(settings) & ADOPTING
    asked = codes & ({CODE} if renderer is None else {CODE, REWRITING, *ADOPTING})
    if tokenizer is None or not asked or not file.is_file():
        return group
    head = _head(file, group) if head is None else head
    found = misfit(head, tokenizer, renderer) if CODE in asked else None
    if found is not None:
        return replace(group, auditor=auditor.held_back(found))
    if renderer is None:
        return group
    head = _head(file, group, joined=True) if group.joins_files else head
    other = adopted(head, tokenizer, renderer, settings, codes) if asked & ADOPTING else None
    if other is not None:
        auditor, renderer = auditor.adopting(other), other.renderer
    if REWRITING in asked:
        auditor = auditor.telling(
            rewriting(head, renderer, auditor.speakers, _template_words(tokenizer, settings))
        )
    return group if auditor is group.auditor else replace(group, auditor=auditor)


def _template_words(tokenizer: Tokenizer, settings: Settings) -> Sequence[str]:
    """The words that name the chat template of these settings to `tito-audit template`."""
    file = ("--chat-template", settings.chat_template) if settings.chat_template else ()
    name = ("--template-name", settings.template_name) if settings.template_name else ()
    return (tokenizer.name, *file, *name)


def _joining(settings: Settings) -> tuple[str, ...]:
    """The flags that join single calls as these settings do."""
    if not settings.join:
        return ("--no-join",)
    return ("--session", settings.session) if settings.session is not None else ()


def _join_key(settings: Settings) -> str:
    """All settings that a join depends on and that may differ within one run."""
    columns = dict(settings.columns)
    joined = settings.messages, settings.tools, dict(settings.on), settings.session, settings.join
    return repr((*joined, settings.format, columns, settings.rows_at))


def _by_settings(files: Sequence[Path], settings: Settings, standing_for: Mapping[Path, Path]) -> _Grouped:
    if not settings.overrides or not files:
        return [(settings, list(files))]
    grouped: _Grouped = []
    for file in files:
        own = settings.at(standing_for.get(file, file))
        members = next((members for other, members in grouped if own is other or own == other), None)
        if members is None:
            grouped.append((own, [file]))
        else:
            members.append(file)
    return grouped
