"""From logs to results: every row is read and audited, then the logs and the run as wholes."""

from __future__ import annotations

import re
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path

from tito_audit.chains.ledger import Ledger
from tito_audit.errors import RecordError, StorageError
from tito_audit.evidence.trainings import trainings_of
from tito_audit.formats import MatchedKeys
from tito_audit.record.finding import Result
from tito_audit.record.rollout import Rollout
from tito_audit.run.auditor import Loader, selected_codes
from tito_audit.run.fit import TESTED_ROLLOUTS, stated_names
from tito_audit.run.log_findings import RunCounts, TrainedOverlaps
from tito_audit.run.log_groups import RowFlow
from tito_audit.run.progress import Progress, RowCounts, follow_counters
from tito_audit.run.resume import SCAN, Recorder, log_states
from tito_audit.run.rows import sample_share
from tito_audit.run.tasks import ChunkedScan, chunk_bytes, open_engine, strip_rollout
from tito_audit.run.workers import Executor, InProcess, executor_for, is_small
from tito_audit.settings.model import Settings
from tito_audit.storage import Logs, Name, RemoteFile, find_logs, is_in_memory, log_names
from tito_audit.storage.journal import Journal
from tito_audit.storage.watch import FileWatch
from tito_audit.summary import Summary
from tito_audit.tables.display import DisplayableResults
from tito_audit.terminal.escape import elided, shell_word
from tito_audit.tokens.vocab import Vocabulary
from tito_audit.viewer.model import ViewQuota

_COLUMN_KINDS = ("token ids", "loss masks", "logprobs", "messages")
_PATH_WIDTH = 60
"""How many characters of a column's path are shown."""
_MOST_PATHS = 6
"""The most unread columns that are named."""
_MOST_HINTED = 4
"""How many logs without a tokenizer are searched for the name of a model."""
_FEW_ROWS = 1000
"""Up to this --limit, one process reads remote logs alone: several would fetch more rows than wanted."""
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""The name of a model on the Hugging Face hub."""


class Scan(DisplayableResults):
    """The results of logs, rollout by rollout; `summary` is complete after the last one.

    Creating one opens nothing. Iterating raises SetupError or StorageError if the run is impossible. With more
    than one job (`Settings.jobs`) the rollout of a result keeps only its place and format. With `observe`, results
    have their measures, and the first rollouts of each code, or as many as a quota allows, have a view.

    `print(scan)`, the last line of a notebook's cell and `scan.verdict` show what was found, and run the scan if
    it has not run; `run()` runs it. Iterating again audits again.
    """

    def __init__(
        self,
        logs: Sequence[Name],
        settings: Settings,
        progress: Progress | None = None,
        *,
        observe: bool | ViewQuota = False,
        resume: Path | None = None,
    ) -> None:
        self.logs = logs
        self.settings = settings
        self.progress = progress
        self.observe = observe
        self.resume = resume
        """A journal: logs that it has as finished are not audited again; those audited now are added."""
        self.journal: Journal | None = None
        """An open journal, in place of `resume`."""
        self.resumed = 0
        """How many logs were finished before."""
        self.summary = Summary()
        self.vocabulary: Vocabulary | None = None
        """To show tokens of the first log as text; None without a tokenizer and before the first result."""
        self.chunk_bytes: int | None = None
        """About how many bytes of a log a process gets at once; None: depends on the size of the logs."""
        self.executor: Executor | None = None
        """Runs the work; None: this process, or as many forked ones as `Settings.jobs` says."""
        self.standing_for: Mapping[Path, Path] = {}
        """Logs that get the settings, overrides included, of another log: a repaired log gets the original's."""
        self.loader: Loader | None = None
        """Loads tokenizers and templates; None: a new loader."""
        self._begun = self._ended = False

    def __iter__(self) -> Iterator[Result]:
        self.restart()
        self._begun = True
        settings, summary = self.settings, self.summary
        selected_codes(settings)
        files = find_logs(self.logs)
        watch = FileWatch(files)
        states = log_states(files) if self.resume is not None or self.journal is not None else {}
        flow = RowFlow(files, settings, self.standing_for, loader=self.loader, annotated=True)
        flow.progress = self.progress
        flow.task_counters = follow_counters(self.progress, summary, settings.jobs or 1)
        flow.fill_summary(summary)
        groups = flow.groups
        summary.codes = frozenset().union(*(group.auditor.codes for group in groups.values()))
        self.vocabulary = next((group.auditor.vocabulary for group in groups.values()), None)
        with ExitStack() as stack:
            recorder, journal = None, self.journal
            if settings.row is None:  # a single row is not recorded
                if journal is None and self.resume is not None:
                    journal = stack.enter_context(closing(Journal(self.resume)))
                if journal is not None:
                    recorder = Recorder(journal, SCAN, flow, states, {"reports": bool(self.observe)})
                    self.resumed = len(recorder.finished)
                    summary.notices += recorder.notices()
            flow.choose_encoders()
            file, started, counted, counts = None, time.perf_counter(), RowCounts(), RunCounts(summary, settings)
            flow.executor = stack.enter_context(open_engine(settings))
            results = stack.enter_context(closing(self._results(flow, counted, recorder)))
            for result in flow.count_joins(results):
                if result.place.file != file:
                    # Findings by the first rows of a log come before its rows, those by all rows after them.
                    yield from self._close_log(file, counts, flow)
                    yield from counts.add_log_findings(result.told)
                    file = result.place.file
                counts.add(result)
                summary.seconds = time.perf_counter() - started
                yield result
            yield from self._close_log(file, counts, flow)
        if settings.row is None:  # a single row is not compared with others
            yield from counts.close_run(whole=settings.sample is None and settings.limit is None, owners=True)
        summary.notices += watch.grown()
        flow.save()
        flow.encoders.report_encoders(summary)
        summary.notices += _tokenizer_hints(flow)
        flow.report_joins(summary)
        summary.sampled = counted.sampled(sample_share(settings))
        add_coverage_notices(summary)
        summary.gate = counts.gate(settings.fail_on)
        self._ended = True

    def restart(self) -> None:
        """Reset the counts of an earlier iteration, if any; StorageError if a log is a pipe, read already."""
        if not self._begun:
            return
        pipe = next((file for file in find_logs(self.logs) if not file.is_file()), None)
        if pipe is not None:
            raise StorageError(f"{pipe}: a pipe cannot be read twice.\nSave it to a file, or iterate once.")
        self.summary, self._begun, self._ended = Summary(), False, False

    def _finished_summary(self) -> Summary | None:
        return self.summary if self._ended else None

    def _close_log(self, file: str | None, counts: RunCounts, flow: RowFlow) -> Iterator[Result]:
        """The findings about a whole log; none if a single row was selected."""
        if file is not None and self.settings.row is None:
            yield from counts.close_log(file, flow.groups[file].auditor.codes)

    def _make_view_quota(self) -> ViewQuota | None:
        """The quota of rollouts that get a view; None if nothing is observed."""
        if isinstance(self.observe, ViewQuota):
            return self.observe.copy()
        return ViewQuota() if self.observe else None

    def _results(
        self, flow: RowFlow, counted: RowCounts, recorder: Recorder | None
    ) -> Generator[Result, None, None]:
        """The results of all rows; rollouts keep only place and format if several processes may do the work."""
        settings, executor = self.settings, self.executor
        if executor is None and settings.row is None:  # this process finds a single row fastest
            executor = flow.executor
        several = executor is not None or (settings.jobs or 1) > 1
        if executor is None and several:
            executor = executor_for(settings.jobs or 1, self.summary)
            remote = any(isinstance(file, RemoteFile) for file in flow.files)
            few = remote and settings.limit is not None and settings.limit <= _FEW_ROWS
            small = self.chunk_bytes is None and is_small(flow.files)
            if executor.here or settings.row is not None or few or small:
                executor = None
        if executor is None and recorder is not None:
            executor = InProcess()
        detection = MatchedKeys()
        if executor is None:
            viewed = None if (views := self._make_view_quota()) is None else views.take
            for raw, place in flow.rows(self.summary, self.progress, counted):
                for result in flow.audit_row(raw, place, detection, viewed):
                    yield strip_rollout(result) if several else result
            return
        if not executor.here:
            flow.load()
        chunked = ChunkedScan(flow, self.summary, counted, self._make_view_quota(), recorder)
        size = self.chunk_bytes or chunk_bytes(flow.size, executor.jobs)
        with closing(chunked.results(executor, size, self.progress)) as results:
            yield from detection.without_repeats(results)


def add_coverage_notices(summary: Summary) -> None:
    """Add notices where a reader might take a log for clean that was not, or not fully, audited."""
    sampled = summary.sampled
    if sampled is not None and sampled.of and not sampled.rows:
        summary.notices.append(
            f"The sample took none of the {sampled.of} rows: nothing was audited. Pass a larger --sample."
        )
    elif not summary.rollouts and not summary.rows_unreadable:
        logs_hold = "The log holds" if len(summary.files) < 2 else "The logs hold"
        summary.notices.append(
            f"{logs_hold} no rows: nothing was audited. "
            "Check that the run wrote to it, and that it was copied whole."
        )
    elif summary.without_ids and summary.without_ids == summary.rollouts:
        is_generic = {name for formats in summary.taken.values() for name in formats} == {"generic"}
        chat = " If this is chat data for SFT, `tito-audit sft` shows what would be trained." if is_generic else ""
        summary.notices.append(
            "No rollout holds token ids: nothing was audited. Log the ids and logprobs that the sampler returns "
            f"with each answer; `tito-audit serve` writes logs that have them.{chat}"
        )
    elif summary.without_ids:
        summary.notices.append(
            f"No token ids in {summary.without_ids:,} of {summary.rollouts:,} rollouts: "
            "not audited, so not known to be clean."
        )
    summary.notices += unread_notices(summary)
    for file, formats in summary.taken.items():
        if len(formats) > 1:
            rare = min(formats, key=lambda name: (formats[name].rows, name))
            summary.notices.append(
                f"{file} holds rows of {len(formats)} formats, each read as its own; "
                f"the first of {rare} is row {formats[rare].first_row}."
            )


def unread_notices(summary: Summary) -> Iterator[str]:
    """Notices about unread columns that look like ids, masks, logprobs or messages; one for all logs alike."""
    alike: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for file, kinds in summary.unread.items():
        alike.setdefault(tuple((kind, path) for path, kind in kinds.items()), []).append(file)
    for columns, files in alike.items():
        looks = " or ".join(
            kind for kind in _COLUMN_KINDS if any(kind == column_kind for column_kind, _ in columns)
        )
        paths = ", ".join(elided(path, _PATH_WIDTH) for _, path in columns[:_MOST_PATHS])
        more = f" and {len(columns) - _MOST_PATHS} more" if len(columns) > _MOST_PATHS else ""
        where = f" in {len(files)} logs" if len(files) > 1 else ""
        unread = (
            f"1 column looks like {looks} and was not read{where}"
            if len(columns) == 1
            else f"{len(columns)} columns look like {looks} and were not read{where}"
        )
        if is_in_memory(files[0]):
            yield f"{unread}: {paths}{more}. `inspect_rollouts(rows)` shows them and suggests `Settings(map=…)`."
            continue
        shows = f"tito-audit inspect {shell_word(files[0])} shows {'it' if len(columns) == 1 else 'them'}"
        maps = " and suggests a mapping" if "generic" in summary.taken.get(files[0], {}) else ""
        yield f"{unread}: {paths}{more}. {shows}{maps}."


def scan_rollouts(
    logs: Logs,
    settings: Settings | None = None,
    progress: Progress | None = None,
    *,
    observe: bool | ViewQuota = False,
    resume: Path | None = None,
) -> Scan:
    """Audit logs: files, folders, globs, or rows in memory (`Logs`). Results are computed as they are iterated.

    With `observe` each result also has what a viewer shows (`Result.observed`). `resume` is a journal, made if it
    does not exist: logs that an earlier run with it finished are not audited again. The results are the same, but
    their rollouts keep only place and format.
    """
    return Scan(log_names(logs), Settings.given(settings), progress, observe=observe, resume=resume)


def read_rollouts(logs: Logs, settings: Settings | None = None) -> Iterator[Rollout]:
    """Read the rollouts of logs; RecordError, with the place, for a row that cannot be read."""
    flow = RowFlow(find_logs(log_names(logs)), Settings.given(settings), audits=False)
    for raw, place in flow.rows(Summary()):
        try:
            read = flow.groups[place.file].read_row(raw, place)
        except RecordError as error:
            raise RecordError(f"{place}: {error}") from None
        yield from read.rollouts


def find_overlaps(
    logs: Logs, settings: Settings | None = None, *, loader: Loader | None = None
) -> TrainedOverlaps:
    """Read every row of all logs, without auditing any, to find what is trained more than once."""
    settings = replace(Settings.given(settings), limit=None, sample=None, row=None)
    flow, ledger = RowFlow(find_logs(log_names(logs)), settings, audits=False, loader=loader), Ledger()
    for raw, place in flow.rows(Summary()):
        with suppress(RecordError):
            for rollout in flow.groups[place.file].read_row(raw, place).rollouts:
                trainings = trainings_of(rollout)
                if trainings is not None:
                    ledger.add(trainings, rollout.place)
    return TrainedOverlaps.from_ledger(ledger)


def _tokenizer_hints(flow: RowFlow) -> Iterator[str]:
    """Notices for logs audited without a tokenizer that name a model or tokenizer: what to pass."""
    groups = {file: flow.groups[str(file)] for file in flow.files if file.is_file()}
    without = [(file, group) for file, group in groups.items() if group.auditor.tokenizer is None]
    notices: dict[str, None] = {}
    for file, group in without[:_MOST_HINTED]:
        named = stated_names(group.first_rollouts(file, TESTED_ROLLOUTS))
        if named:
            claim = " and ".join(f"its {key} {name!r}" for key, name in named.items())
            name = named.get("tokenizer") or named["model"]
            use = f"-t {shell_word(name)}" if _HUB_NAME.fullmatch(name) else "-t with the tokenizer of that model"
            notice = f"names {claim} (not verified): pass {use} to audit against it."
            if notice not in notices:
                notices[notice] = None
                yield f"{file} {notice}"
