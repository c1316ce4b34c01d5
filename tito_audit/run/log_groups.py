"""The logs of a run, grouped by their settings, and the rows that flow from them through the audit."""

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
from tito_audit.formats import MatchedKeys, Unread, unread_columns
from tito_audit.join import Annotations, BatchAnswers, Join, ReadBatch, RowBatch, rows_behind, shown_format_and_row
from tito_audit.levels.facts import LACKS_ALL, record_mask
from tito_audit.record.finding import Result
from tito_audit.record.outcome import COLUMN
from tito_audit.record.rollout import Place, Rollout
from tito_audit.run.adopt import ADOPTION_CODES, find_adoption
from tito_audit.run.auditor import (
    READS_ONLY,
    Auditor,
    ChooseView,
    Loader,
    audit_rollout,
    selected_codes,
    unreadable_result,
)
from tito_audit.run.encoders import Encoders, begin_encoder, choose_encoder, rollout_texts
from tito_audit.run.fit import MISFIT_CODE, TESTED_ROLLOUTS, find_misfit
from tito_audit.run.progress import Progress, RowCounts, TaskCounters
from tito_audit.run.rewriting import REWRITING_CODE, find_rewriting
from tito_audit.run.rows import LogGroup, sample_share
from tito_audit.run.workers import Executor, ForkedProcesses, InProcess, can_fork, is_small, map_in_order
from tito_audit.settings.model import Settings
from tito_audit.storage import RawRow, RowsInMemory, path_from_name
from tito_audit.summary import RECORD, Summary
from tito_audit.tokens.tokenizer import Tokenizer
from tito_audit.viewer.model import with_row_id

_COLLECT_BYTES = 8 << 20
"""Bytes of rows between two garbage collections."""
_UNREAD_ROWS = 3
"""In how many of a log's first rows unread columns are looked for."""
_HEAD_ROWS = 64
"""How many rows of a log are read to get its first rollouts."""


class RowFlow:
    """The logs of a run and what reads and audits them, loaded.

    It pickles as its arguments: a process that was not forked from this one loads everything again, hub tokenizers
    at the commits of this process.

    `standing_for` maps a file to the log whose settings it gets. Without `audits` the logs are only read. `loader`
    may have tokenizers loaded already. `annotated` adds what trainers wrote about rows in other files. `sizes` are
    the bytes of the files where the run was started, given only in other processes.
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
        """Gets the rows of a first pass over calls."""
        self.task_counters: TaskCounters | None = None
        """The counters of forked processes; None if no progress is shown."""
        self.executor: Executor | None = None
        """Runs the first pass over calls; None: this process, or as many as `Settings.jobs` says."""
        self._notices: list[str] = []
        self._fitted_groups: dict[str, LogGroup] = {}
        sample_share(settings)
        self.files = files
        self.settings = settings
        self.groups = self._make_groups(standing_for or {}, audits=audits)
        """By log: its group by the settings alone; `fitted_group` also checks tokenizer and template."""
        self.encoders = Encoders(self.tokenizers)

    def __reduce__(self) -> tuple[Any, ...]:
        sizes = {str(file): file.stat().st_size for file in self.files if file.is_file()}
        return _unpickle_flow, (*self._arguments, sizes, self.loader.commits, self._annotated)

    @property
    def tokenizers(self) -> Sequence[Tokenizer]:
        """The tokenizers of all logs, each once, in the order of loading."""
        used = [group.auditor.tokenizer for group in self.groups.values()]
        return [tokenizer for tokenizer in self.loader.tokenizers if any(tokenizer is other for other in used)]

    @property
    def size(self) -> int:
        """Bytes of all logs, without pipes."""
        return sum(file.stat().st_size for file in self.files if file.is_file())

    def fitted_group(self, file: str) -> LogGroup:
        """The group of a log, without a tokenizer or template that the log was not written with.

        The first call for a log reads its first rows, so that every process comes to the same answer. Pipes, which
        cannot be read twice, and logs without REC007 are assumed to fit.
        """
        fitted = self._fitted_groups.get(file)
        if fitted is None:
            path = next((path for path in self.files if str(path) == file), None) or path_from_name(file)
            fitted = self._fitted_groups[file] = _fit_group(path, self.groups[file])
        return fitted

    def counts_of(self, task: int) -> MutableSequence[int]:
        """The counters of a task in progress: rows, bytes, tokens."""
        return [0, 0, 0] if self.task_counters is None else self.task_counters.counts_of(task)

    def check_same_size(self, file: Path) -> None:
        """Raise SetupError if this machine sees less of a log than the machine where the run was started."""
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
        self, summary: Summary, progress: Progress | None = None, counted: RowCounts | None = None
    ) -> Iterator[tuple[RawRow, Place]]:
        """Every wanted row with its place; adds the logs to the summary."""
        total, done, counted = self.size, 0, counted or RowCounts()
        for file in self.files:
            summary.files.append(str(file))
            group = self.groups[str(file)]
            wanted = group.settings.row
            log, before, at, garbage = group.open_for_audit(file), counted.left_out, 0, GarbageCollector()
            for raw in group.rows(log):
                garbage.count_bytes(log.position - at)
                at = log.position
                if counted.is_full(group.settings.limit, summary):
                    return
                counted.rows += 1
                counted.left_out = before + log.left_out
                if wanted is not None and all(line.index != wanted for line in rows_behind(raw)):
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

    def audit_row(
        self, raw: RawRow, place: Place, detection: MatchedKeys, viewed: ChooseView | None
    ) -> Iterator[Result]:
        """The results of a row: one per rollout, or one that says why the row cannot be read."""
        group = self.fitted_group(place.file)
        auditor = group.auditor
        try:
            read = group.read_row(raw, place)
        except RecordError as error:
            result = unreadable_result(place, str(error), auditor.codes)
            result = replace(result, misfit=auditor.misfit, told=auditor.log_findings)
            yield result if group.settings.require_level is None else replace(result, counts={RECORD: LACKS_ALL})
            return
        detection.note_first_row(place.file, *shown_format_and_row(read.format, read.row))
        unread: Unread = ()
        first = rows_behind(raw)[0].value if place.row < _UNREAD_ROWS else None  # of joined calls, the first
        if first is not None:
            form = shown_format_and_row(read.format, read.row)[0]
            unread = unread_columns(form, first, read.rollouts, group.settings.columns.values())
        inside = read.row.get(read.format.open_object) if read.format.open_object else None
        repaired = read.row.get(COLUMN) is not None or (isinstance(inside, dict | Mapping) and COLUMN in inside)
        for rollout in read.rollouts:
            result = detection.with_keys(audit_rollout(rollout, auditor, viewed))
            if viewed is not None:
                result = with_row_id(result, read.row)
            result = replace(result, counts={**result.counts, "repaired": 1}) if repaired else result
            if group.settings.require_level is not None:
                record = record_mask(rollout, group.logged_rows(raw, read))
                more = {} if record is None else {RECORD: record}
                result = replace(result, counts={**result.counts, **more})
            yield replace(result, unread=unread) if unread else result

    def choose_encoders(self) -> None:
        """Load fast encoders if the logs are large enough and, while they load, whatever else the run needs.

        Reads the first rows of logs in memory before a fork: children would wait forever for threads of polars.
        """
        groups = {file: self.groups[str(file)] for file in self.files}
        for tokenizer in self.tokenizers:
            logs = {file: group for file, group in groups.items() if group.auditor.tokenizer is tokenizer}
            if not begin_encoder(tokenizer, logs, self.settings):
                continue
            head: Sequence[Rollout] = ()
            file = next((log for log in logs if log.is_file()), None)  # a pipe cannot be read twice
            if file is not None:  # the same rollouts show whether tokenizer and template fit
                head = _first_rollouts(file, logs[file])
                self._fitted_groups.setdefault(str(file), _fit_group(file, logs[file], head))
            if (self.settings.jobs or 1) > 1:
                self.load()
            choose_encoder(tokenizer, head, self.settings)
        if (self.settings.jobs or 1) > 1:
            for file in self.files:
                if isinstance(file, RowsInMemory):
                    self.fitted_group(str(file))

    def load(self) -> None:
        """Load everything that forked processes can share."""
        for group in dict.fromkeys(self.groups.values()):
            group.auditor.load()

    def fill_summary(self, summary: Summary) -> None:
        """Put the tokenizers, the reading and joining flags, and notices about what is missing into a summary."""
        summary.tokenizer = ", ".join(dict.fromkeys(each.name for each in self.tokenizers)) or None
        summary.tokenizer_commits = {each.name: each.commit for each in self.tokenizers if each.commit is not None}
        settings = [group.settings for group in self.groups.values()]
        summary.reading = _shared_flags(map(reading_flags, settings))
        summary.joining = _shared_flags(map(joining_flags, settings))
        summary.notices += self._notices

    def count_joins(self, results: Iterable[Result]) -> Iterator[Result]:
        """Pass the results on; the joins of their logs count them."""
        for result in results:
            join = self.groups[result.place.file].join
            yield from (result,) if join is None else join.count_results((result,))

    def report_joins(self, summary: Summary) -> None:
        """Put what the joins counted into a summary, after the last result."""
        for join in dict.fromkeys(group.join for group in self.groups.values()):
            if join is not None:
                summary.joined += join.joined_notices()
                summary.notices += join.notices()
        for noted in dict.fromkeys(group.annotations for group in self.groups.values()):
            summary.notices += () if noted is None else noted.notices()
        summary.notices += summary.joined

    def save(self) -> None:
        """Cache on disk what this run worked out about its tokenizers."""
        for tokenizer in self.tokenizers:
            tokenizer.save()

    def _make_groups(self, standing_for: Mapping[Path, Path], *, audits: bool) -> dict[str, LogGroup]:
        """By log: its group; logs with the same settings share an auditor, and those that are joined a join."""
        by_settings: list[tuple[Settings, list[Path]]] = [] if self.files else [(self.settings, [])]
        for file in self.files:
            own = self.settings.at(standing_for.get(file, file))
            members = next((members for other, members in by_settings if own is other or own == other), None)
            if members is None:
                by_settings.append((own, [file]))
            else:
                members.append(file)
        auditors: list[Auditor] = []
        about: dict[str, list[Path]] = {}  # the logs that each notice is about
        for own, members in by_settings:
            auditor, notice = self.loader.load_auditor(own) if audits else (READS_ONLY, None)
            auditors.append(auditor)
            if notice is not None:
                about.setdefault(notice, []).extend(members)
        for notice, members in about.items():
            more = f" and {len(members) - 1} more" if len(members) > 1 else ""
            where = f"{members[0]}{more}: " if len(members) < len(self.files) else ""
            self._notices.append(where + notice)
        joins: dict[str, Join | None] = {}
        groups: dict[str, LogGroup] = {}
        for (own, members), auditor in zip(by_settings, auditors, strict=True):
            key = _join_key(own)
            if key not in joins:
                logs = [file for other, files in by_settings if _join_key(other) == key for file in files]
                vocabulary = auditor.vocabulary
                decode = vocabulary.bytes_of if vocabulary is not None else None
                gathers = self._sizes is None
                joins[key] = Join.for_run(
                    own, logs, decode, self._run_first_pass, written=bool(standing_for), gathers=gathers
                )
            wanted = self._annotated and own.join
            annotations = Annotations.find_beside(members, own.max_row_bytes) if wanted else {}
            for which in dict.fromkeys((None, *annotations.values())):
                group = LogGroup(own, auditor, joins[key], which)
                groups.update({str(log): group for log in members if annotations.get(str(log)) is which})
        return groups

    def _run_first_pass(self, work: ReadBatch, batches: Iterable[tuple[int, RowBatch]]) -> BatchAnswers:
        """The answers of a join's first pass over calls, computed by several processes if that pays off."""
        jobs = self.settings.jobs or 1
        executor: Executor = InProcess()
        if not is_small(self.files):
            forks = jobs > 1 and can_fork() and self.settings.engine == "local"
            executor = self.executor or (ForkedProcesses(jobs) if forks else executor)
        tasks: Iterable[tuple[int, RowBatch | None]] = batches
        rows = 0
        for number, answer in map_in_order(executor, work, tasks):
            rows += 0 if answer is None else len(answer.rows)
            if self.progress is not None:
                self.progress(rows, 0, 0)
            yield number, answer


def _unpickle_flow(
    files: tuple[Path, ...],
    settings: Settings,
    standing_for: Mapping[Path, Path],
    sizes: Mapping[str, int],
    commits: Mapping[str, str],
    annotated: bool,
) -> RowFlow:
    """Load a pickled flow in this process."""
    loader = Loader(commits)
    flow = RowFlow(files, settings, standing_for, loader=loader, sizes=sizes, annotated=annotated)
    flow.choose_encoders()
    return flow


def _first_rollouts(file: Path, group: LogGroup, *, joined: bool = False) -> Sequence[Rollout]:
    """The first rollouts of a log; `joined`: with messages and tools of other files."""
    return list(islice(group.first_rollouts(file, _HEAD_ROWS, joined=joined), TESTED_ROLLOUTS))


def _fit_group(file: Path, group: LogGroup, head: Sequence[Rollout] | None = None) -> LogGroup:
    """The group for a log, adapted to what its first rollouts (`head`) prove.

    It loses a tokenizer or template that the log was not written with, or gets the template, arguments, date and
    tools that it was written with.
    """
    auditor, settings = group.auditor, group.settings
    tokenizer, renderer = auditor.tokenizer, auditor.renderer
    # A run without rules, which only asks how logs were written, adapts too.
    codes = auditor.codes if auditor.rules else selected_codes(settings) & ADOPTION_CODES
    wanted = codes & ({MISFIT_CODE} if renderer is None else {MISFIT_CODE, REWRITING_CODE, *ADOPTION_CODES})
    if tokenizer is None or not wanted or not file.is_file():
        return group
    head = _first_rollouts(file, group) if head is None else head
    tokenizer.expect(rollout_texts(head, tokenizer.vocabulary) if is_small([file]) else ())
    finding = find_misfit(head, tokenizer, renderer) if MISFIT_CODE in wanted else None
    if finding is not None:
        return replace(group, auditor=auditor.without_misfit(finding))
    if renderer is None:
        return group
    head = _first_rollouts(file, group, joined=True) if group.joins_files else head
    adoption = None
    with suppress(EncodeError):  # the audit of each row reports it
        adoption = find_adoption(head, tokenizer, renderer, settings, codes) if wanted & ADOPTION_CODES else None
    if adoption is not None:
        auditor, renderer = auditor.with_adoption(adoption), adoption.renderer
    if REWRITING_CODE in wanted:
        # What names the chat template on the command line of `tito-audit template`.
        words = [tokenizer.name]
        words += ["--chat-template", settings.chat_template] if settings.chat_template else []
        words += ["--template-name", settings.template_name] if settings.template_name else []
        rewriting = find_rewriting(head, renderer, auditor.speakers, words)
        if rewriting is not None:
            auditor = replace(auditor, log_findings=(*auditor.log_findings, rewriting))
    return group if auditor is group.auditor else replace(group, auditor=auditor)


def _shared_flags(flags: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """The flags of all logs; () where logs differ."""
    several = set(flags)
    return several.pop() if len(several) == 1 else ()


def _join_key(settings: Settings) -> str:
    """The settings that a join depends on, as far as overrides may change them."""
    columns = dict(settings.columns)
    joined = settings.messages, settings.tools, dict(settings.on), settings.session, settings.join
    return repr((*joined, settings.format, columns, settings.rows_at))


class GarbageCollector:
    """Collects garbage every few megabytes of rows.

    An error caught in a template keeps its row alive in a reference cycle, and a row of a table all rows read with
    it. Python counts objects, not bytes, and would collect these far too late.
    """

    def __init__(self) -> None:
        self._bytes = 0

    def count_bytes(self, size: int) -> None:
        """Count bytes of rows; collects garbage when enough have passed."""
        self._bytes += size
        if self._bytes >= _COLLECT_BYTES:
            self._bytes = 0
            gc.collect(1)


def joining_flags(settings: Settings) -> tuple[str, ...]:
    """The flags that join single calls as these settings say."""
    if not settings.join:
        return ("--no-join",)
    return ("--session", settings.session) if settings.session is not None else ()


def reading_flags(settings: Settings) -> tuple[str, ...]:
    """The flags that read and render rows as these settings say, without the tokenizer and the joining flags."""
    clock, arguments = settings.clock, settings.tool_arguments
    flags = [
        ("--format", settings.format),
        *(("--map", f"{ours}={theirs}") for ours, theirs in settings.columns.items()),
        ("--rows-at", settings.rows_at),
        ("--messages", settings.messages),
        ("--tools", settings.tools),
        *(("--on", ours if ours == other else f"{ours}={other}") for ours, other in settings.on.items()),
        ("--chat-template", settings.chat_template),
        ("--template-name", settings.template_name),
        *(("--template-arg", f"{name}={json.dumps(value)}") for name, value in settings.template_args.items()),
        ("--tool-arguments", None if arguments == "auto" else arguments),
        ("--clock", clock.isoformat() if isinstance(clock, datetime) else clock),
        *(("--sampled-role", role) for role in settings.sampled_roles),
    ]
    return tuple(word for flag, value in flags if value is not None for word in (flag, value))


@dataclass(slots=True)
class FirstRows:
    """The rollouts of the first rows of some logs, and what was met in reading them."""

    rollouts: list[Rollout] = field(default_factory=list)
    rows: int = 0
    unreadable: dict[Place, str] = field(default_factory=dict)
    """Why rows could not be read."""
    stopped: bool = False
    """Whether the logs have more rows."""
    notices: list[str] = field(default_factory=list)
    """From joining calls and other files."""


def read_first_rows(files: Sequence[Path], settings: Settings, rows: int) -> FirstRows:
    """Read the first rows of logs: `rows` in total, as evenly as the logs have them."""
    first = FirstRows()
    flow = RowFlow(files, replace(settings, limit=None), audits=False)
    for number, file in enumerate(files):
        quota, count = -(-(rows - first.rows) // (len(files) - number)), 0
        group = flow.fitted_group(str(file))
        for raw in islice(group.rows(group.open_for_audit(file)), quota + 1):
            if count == quota:
                first.stopped = True
                break
            count += 1
            place = Place(str(file), raw.index)
            try:
                first.rollouts += group.read_row(raw, place).rollouts
            except RecordError as error:
                first.unreadable[place] = str(error)
        first.rows += count
    summary = Summary()
    flow.report_joins(summary)
    first.notices += summary.notices
    return first
