"""Log groups: a run's logs grouped by settings, each read and audited with its own."""

from __future__ import annotations

import gc
import json
import platform
from collections.abc import Iterable, Iterator, Mapping, MutableSequence, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from tito_audit.errors import EncodeError, RecordError, SetupError
from tito_audit.formats import Detection, Unread, unread_columns
from tito_audit.join import Annotations, Answers, Join, RowBatch, Work, lines_of, shown_by
from tito_audit.levels.facts import NOTHING
from tito_audit.levels.holds import record_of
from tito_audit.record.finding import Result
from tito_audit.record.outcome import COLUMN
from tito_audit.record.rollout import Place, Rollout
from tito_audit.run.adopt import CODES as ADOPTING
from tito_audit.run.adopt import adopted
from tito_audit.run.auditor import READS_ONLY, Auditor, Loader, Viewed, audit_rollout, selected_codes, unreadable
from tito_audit.run.encoders import Encoders, begin_encoder, choose_encoder, texts_of
from tito_audit.run.fit import CODE, ROWS, misfit
from tito_audit.run.progress import Counted, InFlight, Progress
from tito_audit.run.rewriting import CODE as REWRITING
from tito_audit.run.rewriting import rewriting
from tito_audit.run.rows import LogGroup, share_of
from tito_audit.run.workers import Executor, ForkedProcesses, InProcess, can_fork, is_small, mapped
from tito_audit.settings.model import Settings
from tito_audit.storage import RawRow, RemoteFile, RowsInMemory, path_of
from tito_audit.summary import RECORD, Summary
from tito_audit.tokens.tokenizer import Tokenizer
from tito_audit.viewer.model import named

EVERY = 8 << 20
"""How many bytes of rows are read between two collections."""
_LOOKED_AT = 3
"""How many of a log's first rows are searched for columns that were not read."""
_SEARCHED = 64
"""How many rows of a log are searched for rollouts with ids."""

_Grouped = list[tuple[Settings, list[Path]]]
"""Settings, each with the logs that they apply to."""


class RowFlow:
    """The logs of a run, with everything loaded that reads and audits them.

    It pickles as its arguments: a process not forked from this one loads everything itself, the tokenizers of the
    hub at the commits that are loaded here. `standing_for` maps a file to the log whose settings it gets. Without
    `audits`, logs are only read. What `loader` has loaded for another flow is not loaded again. In another
    process, `sizes` has the bytes of the files where the rows come from. `annotated`: with what trainers wrote
    about the rows in other files.
    """

    def __init__(
        self,
        files: Sequence[Path],
        settings: Settings,
        standing_for: Mapping[Path, Path] | None = None,
        *,
        audits: bool = True,
        loader: Loader | None = None,
        sizes: Mapping[str, int] | None = None,
        annotated: bool = False,
    ) -> None:
        self._arguments = tuple(files), settings, standing_for or {}
        self._annotated = annotated
        self._sizes = sizes
        self.loader = loader or Loader()
        self.progress: Progress | None = None
        """Gets the row counts of a first pass over calls, without bytes."""
        self.in_flight: InFlight | None = None
        """What processes forked from this one count on; None: nobody looks at it."""
        self.executor: Executor | None = None
        """What runs the first pass over calls; None: this process, or as many as `Settings.jobs` says."""
        self._notices: list[str] = []
        self._fitting: dict[str, LogGroup] = {}
        share_of(settings)
        self.files = files
        self.settings = settings
        self.groups = self._grouped(standing_for or {}, audits=audits)
        """The group of each log, before the check that tokenizer and template fit."""
        self.encoders = Encoders(self.tokenizers)

    def __reduce__(self) -> tuple[Any, ...]:
        sizes = {str(file): file.stat().st_size for file in self.files if file.is_file()}
        return _rebuilt, (*self._arguments, sizes, self.loader.commits, self._annotated)

    @property
    def tokenizers(self) -> Sequence[Tokenizer]:
        """The tokenizers of all logs, each once."""
        used = [group.auditor.tokenizer for group in self.groups.values()]
        return [tokenizer for tokenizer in self.loader.tokenizers if any(tokenizer is other for other in used)]

    @property
    def remote(self) -> bool:
        """Whether a log is fetched over a network."""
        return any(isinstance(file, RemoteFile) for file in self.files)

    @property
    def size(self) -> int:
        """Bytes of all logs, not counting pipes."""
        return sum(file.stat().st_size for file in self.files if file.is_file())

    def group(self, file: str) -> LogGroup:
        """The group of a log; its auditor lacks a tokenizer or template that the log was not written with.

        The first call reads the first rows of the log, so every process comes to the same answer. Pipes, which
        cannot be read twice, and logs for which REC007 is not selected are assumed to fit.
        """
        fitting = self._fitting.get(file)
        if fitting is None:
            path = next((path for path in self.files if str(path) == file), None) or path_of(file)
            fitting = self._fitting[file] = _fitted(path, self.groups[file])
        return fitting

    def counts_of(self, task: int) -> MutableSequence[int]:
        """Where rows, bytes and tokens of a task are counted while it is worked on."""
        return [0, 0, 0] if self.in_flight is None else self.in_flight.of(task)

    def check_seen(self, file: Path) -> None:
        """SetupError if this machine does not see a log as the one that the rows come from does."""
        wanted = None if self._sizes is None else self._sizes.get(str(file))
        if wanted is None:
            return
        try:
            size = file.stat().st_size
        except OSError as error:
            how = f"cannot be read on {platform.node()} ({error.strerror or error})"
        else:
            if size >= wanted:  # a log that is being written grows
                return
            how = f"has {size:,} bytes on {platform.node()}, and {wanted:,} where this run was started"
        raise SetupError(
            f"{file}: this log {how}.\n"
            "Every node has to see the logs at the same paths, as on a shared file system."
        )

    def rows(
        self, summary: Summary, progress: Progress | None = None, counted: Counted | None = None
    ) -> Iterator[tuple[RawRow, Place]]:
        """Every wanted row with its place; adds the files to the summary."""
        total, done, counted = self.size, 0, counted or Counted()
        for file in self.files:
            summary.files.append(str(file))
            group = self.groups[str(file)]
            wanted = group.settings.row
            log, before, at, garbage = group.open_quick(file), counted.left_out, 0, Garbage()
            for raw in group.rows(log):
                garbage.passed(log.position - at)
                at = log.position
                if counted.full(group.settings.limit, summary):
                    return
                counted.rows += 1
                counted.left_out = before + log.left_out
                if wanted is not None and all(line.index != wanted for line in lines_of(raw)):
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
            result = replace(
                unreadable(place, str(error), auditor.codes), misfit=auditor.misfit, told=auditor.told
            )
            yield result if group.settings.require_level is None else replace(result, counts={RECORD: NOTHING})
            return
        detection.look(place.file, *shown_by(read.format, read.row))
        unread: Unread = ()
        first = lines_of(raw)[0].value if place.row < _LOOKED_AT else None  # of joined calls, the first
        if first is not None:
            form = shown_by(read.format, read.row)[0]
            unread = unread_columns(form, first, read.rollouts, group.settings.columns.values())
        inside = read.row.get(read.format.open_object) if read.format.open_object else None
        repaired = read.row.get(COLUMN) is not None or (isinstance(inside, dict | Mapping) and COLUMN in inside)
        for rollout in read.rollouts:
            result = detection.say(audit_rollout(rollout, auditor, viewed))
            if viewed is not None:
                result = named(result, read.row)
            result = replace(result, counts={**result.counts, "repaired": 1}) if repaired else result
            if group.settings.require_level is not None:
                record = record_of(rollout, group.rows_behind(raw, read))
                more = {} if record is None else {RECORD: record}
                result = replace(result, counts={**result.counts, **more})
            yield replace(result, unread=unread) if unread else result

    def choose_encoders(self) -> None:
        """Load fast encoders where the logs are large enough and, meanwhile, whatever else the run will need.

        Forked processes would wait forever for the threads of polars, so first rows in memory are read here.
        """
        groups = {file: self.groups[str(file)] for file in self.files}
        for tokenizer in self.tokenizers:
            logs = {file: group for file, group in groups.items() if group.auditor.tokenizer is tokenizer}
            if not begin_encoder(tokenizer, logs, self.settings):
                continue
            head: Sequence[Rollout] = ()
            file = next((log for log in logs if log.is_file()), None)  # a pipe cannot be read twice
            if file is not None:  # its first rollouts also show whether it fits
                head = _head(file, logs[file])
                self._fitting.setdefault(str(file), _fitted(file, logs[file], head))
            if (self.settings.jobs or 1) > 1:
                self.load()
            choose_encoder(tokenizer, head, self.settings)
        if (self.settings.jobs or 1) > 1:
            for file in self.files:
                if isinstance(file, RowsInMemory):
                    self.group(str(file))

    def load(self) -> None:
        """Load everything that forked processes can share."""
        for group in dict.fromkeys(self.groups.values()):
            group.auditor.load()

    def begin(self, summary: Summary) -> None:
        """Put the tokenizers, the joining flags, and notices about what is missing into a summary."""
        summary.tokenizer = ", ".join(dict.fromkeys(each.name for each in self.tokenizers)) or None
        summary.tokenizer_commits = {each.name: each.commit for each in self.tokenizers if each.commit is not None}
        settings = [group.settings for group in self.groups.values()]
        summary.reading, summary.joining = _only(map(reading_flags, settings)), _only(map(joining_flags, settings))
        summary.notices += self._notices

    def noted(self, results: Iterable[Result]) -> Iterator[Result]:
        """The results, counted by the joins of their logs as they pass."""
        for result in results:
            join = self.groups[result.place.file].join
            yield from (result,) if join is None else join.counted((result,))

    def say_joined(self, summary: Summary) -> None:
        """Put into a summary what the joins found, after all results have passed."""
        for join in dict.fromkeys(group.join for group in self.groups.values()):
            if join is not None:
                summary.joined += join.joined()
                summary.notices += join.notices()
        for noted in dict.fromkeys(group.annotations for group in self.groups.values()):
            summary.notices += () if noted is None else noted.notices()
        summary.notices += summary.joined

    def save(self) -> None:
        """Cache what this run worked out about its tokenizers for the next one."""
        for tokenizer in self.tokenizers:
            tokenizer.save()

    def _grouped(self, standing_for: Mapping[Path, Path], *, audits: bool) -> dict[str, LogGroup]:
        by_settings = _by_settings(self.files, self.settings, standing_for)
        auditors = self._auditors(by_settings) if audits else [READS_ONLY for _ in by_settings]
        joins: dict[str, Join | None] = {}
        groups: dict[str, LogGroup] = {}
        for (own, members), auditor in zip(by_settings, auditors, strict=True):
            key = _join_key(own)
            if key not in joins:
                logs = [file for other, files in by_settings if _join_key(other) == key for file in files]
                vocabulary = auditor.vocabulary
                decode = vocabulary.bytes_of if vocabulary is not None else None
                gathers = self._sizes is None
                joins[key] = Join.of(
                    own, logs, decode, self._first_pass, written=bool(standing_for), gathers=gathers
                )
            wanted = self._annotated and own.join
            annotations = Annotations.beside(members, own.max_row_bytes) if wanted else {}
            for which in dict.fromkeys((None, *annotations.values())):
                group = LogGroup(own, auditor, joins[key], which)
                groups.update({str(log): group for log in members if annotations.get(str(log)) is which})
        return groups

    def _first_pass(self, work: Work, batches: Iterable[tuple[int, RowBatch]]) -> Answers:
        """The work of a first pass over calls, in all processes of the run if that pays off."""
        jobs = self.settings.jobs or 1
        executor: Executor = InProcess()
        if not is_small(self.files):
            forks = jobs > 1 and can_fork() and self.settings.engine == "local"
            executor = self.executor or (ForkedProcesses(jobs) if forks else executor)
        tasks: Iterable[tuple[int, RowBatch | None]] = batches
        rows = 0
        for number, answer in mapped(executor, work, tasks):
            rows += 0 if answer is None else len(answer.rows)
            if self.progress is not None:
                self.progress(rows, 0, 0)
            yield number, answer

    def _auditors(self, by_settings: _Grouped) -> list[Auditor]:
        """The auditor for each of the settings; notices name the logs that they are about."""
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
    files: tuple[Path, ...],
    settings: Settings,
    standing_for: Mapping[Path, Path],
    sizes: Mapping[str, int],
    commits: Mapping[str, str],
    annotated: bool,
) -> RowFlow:
    """A pickled flow, loaded in this process."""
    loader = Loader(commits)
    flow = RowFlow(files, settings, standing_for, loader=loader, sizes=sizes, annotated=annotated)
    flow.choose_encoders()
    return flow


def _head(file: Path, group: LogGroup, *, joined: bool = False) -> Sequence[Rollout]:
    """The first rollouts of a log; `joined`: with the messages and tools of other files."""
    return list(islice(group.head(file, _SEARCHED, joined=joined), ROWS))


def _fitted(file: Path, group: LogGroup, head: Sequence[Rollout] | None = None) -> LogGroup:
    """The group without a tokenizer or template that its log was not written with, or with the template arguments,
    date and tools that it was written with. `head` is its `_head`."""
    auditor, settings = group.auditor, group.settings
    tokenizer, renderer = auditor.tokenizer, auditor.renderer
    # Even if this run only asks how the log was written.
    codes = auditor.codes if auditor.rules else selected_codes(settings) & ADOPTING
    wanted = codes & ({CODE} if renderer is None else {CODE, REWRITING, *ADOPTING})
    if tokenizer is None or not wanted or not file.is_file():
        return group
    head = _head(file, group) if head is None else head
    tokenizer.expect(texts_of(head, tokenizer.vocabulary) if is_small([file]) else ())
    finding = misfit(head, tokenizer, renderer) if CODE in wanted else None
    if finding is not None:
        return replace(group, auditor=auditor.held_back(finding))
    if renderer is None:
        return group
    head = _head(file, group, joined=True) if group.joins_files else head
    other = None
    with suppress(EncodeError):  # the audit of each row says so
        other = adopted(head, tokenizer, renderer, settings, codes) if wanted & ADOPTING else None
    if other is not None:
        auditor, renderer = auditor.adopting(other), other.renderer
    if REWRITING in wanted:
        # The words that name the chat template to `tito-audit template`.
        words = [tokenizer.name]
        words += ["--chat-template", settings.chat_template] if settings.chat_template else []
        words += ["--template-name", settings.template_name] if settings.template_name else []
        auditor = auditor.telling(rewriting(head, renderer, auditor.speakers, words))
    return group if auditor is group.auditor else replace(group, auditor=auditor)


def _only(flags: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """The flags that all logs have; () where logs differ."""
    several = set(flags)
    return several.pop() if len(several) == 1 else ()


def _join_key(settings: Settings) -> str:
    """All settings that a join depends on and that may differ within a run."""
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


class Garbage:
    """Frees cycles of objects every few megabytes of rows.

    An error caught in a template holds the row that it came from, in a cycle; a row of a table holds all rows read
    with it. Python counts objects, not bytes, so it would collect them far too late.
    """

    def __init__(self) -> None:
        self._bytes = 0

    def passed(self, size: int) -> None:
        """Count the bytes of a row, or of several."""
        self._bytes += size
        if self._bytes >= EVERY:
            self._bytes = 0
            gc.collect(1)


def joining_flags(settings: Settings) -> tuple[str, ...]:
    """The flags that join single calls as these settings do."""
    if not settings.join:
        return ("--no-join",)
    return ("--session", settings.session) if settings.session is not None else ()


def reading_flags(settings: Settings) -> tuple[str, ...]:
    """The flags that read and render rows as these settings do, without the tokenizer and those of joining."""
    return tuple(word for flag, value in _flags(settings) if value is not None for word in (flag, value))


def _flags(settings: Settings) -> Iterator[tuple[str, str | None]]:
    yield "--format", settings.format
    yield from (("--map", f"{ours}={theirs}") for ours, theirs in settings.columns.items())
    yield "--rows-at", settings.rows_at
    yield "--messages", settings.messages
    yield "--tools", settings.tools
    yield from (("--on", ours if ours == other else f"{ours}={other}") for ours, other in settings.on.items())
    yield "--chat-template", settings.chat_template
    yield "--template-name", settings.template_name
    yield from (
        ("--template-arg", f"{name}={json.dumps(value)}") for name, value in settings.template_args.items()
    )
    yield "--tool-arguments", None if settings.tool_arguments == "auto" else settings.tool_arguments
    clock = settings.clock
    yield "--clock", clock.isoformat() if isinstance(clock, datetime) else clock
    yield from (("--sampled-role", role) for role in settings.sampled_roles)


@dataclass(slots=True)
class FirstRows:
    """The rollouts of the first rows of some logs."""

    rollouts: list[Rollout] = field(default_factory=list)
    rows: int = 0
    unreadable: dict[Place, str] = field(default_factory=dict)
    """Why rows could not be read."""
    stopped: bool = False
    """Whether there are more rows."""
    notices: list[str] = field(default_factory=list)
    """Notices from joining calls and other files."""


def first_rows(files: Sequence[Path], settings: Settings, rows: int) -> FirstRows:
    """The first rows of logs: `rows` in total, the same number from each log if it has enough."""
    first = FirstRows()
    flow = RowFlow(files, replace(settings, limit=None), audits=False)
    for number, file in enumerate(files):
        quota, count = -(-(rows - first.rows) // (len(files) - number)), 0
        group = flow.group(str(file))
        for raw in islice(group.rows(group.open_quick(file)), quota + 1):
            if count == quota:
                first.stopped = True
                break
            count += 1
            place = Place(str(file), raw.index)
            try:
                first.rollouts += group.read(raw, place).rollouts
            except RecordError as error:
                first.unreadable[place] = str(error)
        first.rows += count
    summary = Summary()
    flow.say_joined(summary)
    first.notices += summary.notices
    return first
