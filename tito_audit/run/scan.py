"""Read, gather, check: the flow from logs to results."""

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
from tito_audit.formats import Detection
from tito_audit.record.finding import Result
from tito_audit.record.rollout import Rollout
from tito_audit.run.auditor import Loader, selected_codes
from tito_audit.run.fit import ROWS, names_of_log
from tito_audit.run.log_findings import Once, RunCounts
from tito_audit.run.log_groups import RowFlow
from tito_audit.run.progress import Counted, Progress, followed
from tito_audit.run.resume import SCAN, Recorder, States, states_of
from tito_audit.run.rows import share_of
from tito_audit.run.tasks import ChunkedScan, bare, chunk_bytes, engine_of
from tito_audit.run.workers import Executor, InProcess, executor_for, is_small
from tito_audit.settings.model import Settings
from tito_audit.storage import Logs, Name, find_logs, is_in_memory, names_of
from tito_audit.storage.journal import Journal
from tito_audit.storage.watch import Watch
from tito_audit.summary import Summary
from tito_audit.tables.display import DisplayableResults
from tito_audit.terminal.escape import elided, shell_word
from tito_audit.tokens.vocab import Vocabulary
from tito_audit.viewer.model import ViewQuota

_KINDS = ("token ids", "loss masks", "logprobs", "messages")
_PATH = 60
"""The most characters of a column's path that are shown."""
_PATHS = 6
"""The most unread columns that are named."""
_NAMED = 4
"""How many logs without a tokenizer are searched for a model name."""
_FEW = 1000
"""Rows of remote logs that one process fetches alone."""
_LOADABLE = re.compile(r"[\w.-]+/[\w.-]+")
"""The name of a model on the Hugging Face hub."""


class Scan(DisplayableResults):
    """The results of logs, rollout by rollout; `summary` is complete after the last one.

    Creating one opens nothing; iterating raises SetupError or StorageError when the run is impossible. With more
    than one job (`Settings.jobs`) the rollout of a result keeps only its place and format. With `observe` results
    come with their measures, and the first rollouts of each code with a view, or those of a quota.

    `print(scan)`, the last line of a notebook's cell and `scan.verdict` show what it found, and run it if it has
    not run; `run()` runs it. Iterating again audits again.
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
        """A journal: logs that it says are finished are not audited again, and those audited now are added."""
        self.journal: Journal | None = None
        """That journal, if the caller has opened it."""
        self.resumed = 0
        """How many logs were finished before."""
        self.summary = Summary()
        self.vocabulary: Vocabulary | None = None
        """To show tokens of the first log as text; None without a tokenizer and before the first result."""
        self.chunk_bytes: int | None = None
        """Roughly how many bytes of a log a process gets at once; None: depends on the size of the logs."""
        self.executor: Executor | None = None
        """What runs the work; None: this process, or as many forked ones as `Settings.jobs` says."""
        self.standing_for: Mapping[Path, Path] = {}
        """Logs that get the settings of another log, which overrides may name: a repaired log gets the
        original's."""
        self.loader: Loader | None = None
        """What loads tokenizers and templates; None: a new loader."""
        self._begun = self._ended = False

    def __iter__(self) -> Iterator[Result]:
        self.restart()
        self._begun = True
        settings, summary = self.settings, self.summary
        selected_codes(settings)
        files = find_logs(self.logs)
        watch = Watch(files)
        states = states_of(files) if self.resume is not None or self.journal is not None else {}
        flow = RowFlow(files, settings, self.standing_for, loader=self.loader, annotated=True)
        flow.progress = self.progress
        flow.in_flight = followed(self.progress, summary, settings.jobs or 1)
        flow.begin(summary)
        groups = flow.groups
        summary.codes = frozenset().union(*(group.auditor.codes for group in groups.values()))
        self.vocabulary = next((group.auditor.vocabulary for group in groups.values()), None)
        with ExitStack() as stack:
            recorder = self._recorder(flow, states, stack)
            flow.choose_encoders()
            file, started, counted, counts = None, time.perf_counter(), Counted(), RunCounts(summary, settings)
            flow.executor = stack.enter_context(engine_of(settings))
            results = stack.enter_context(closing(self._results(flow, counted, recorder)))
            for result in flow.noted(results):
                if result.place.file != file:
                    # What all rows of a log show comes last, what its first rows show comes first.
                    yield from self._of_log(file, counts, flow)
                    yield from counts.about_log(result.told)
                    file = result.place.file
                counts.add(result)
                summary.seconds = time.perf_counter() - started
                yield result
            yield from self._of_log(file, counts, flow)
        if settings.row is None:  # a single row is not compared with others
            yield from counts.of_run(whole=settings.sample is None and settings.limit is None, owners=True)
        summary.notices += watch.grown()
        flow.save()
        flow.encoders.settle(summary)
        summary.notices += _named(flow)
        flow.say_joined(summary)
        summary.sampled = counted.sampled(share_of(settings))
        conclude(summary)
        summary.gate = counts.gate(settings.fail_on)
        self._ended = True

    def restart(self) -> None:
        """Forget what was counted by an iteration that began before; StorageError if a log is a pipe."""
        if not self._begun:
            return
        pipe = next((file for file in find_logs(self.logs) if not file.is_file()), None)
        if pipe is not None:
            raise StorageError(f"{pipe}: a pipe cannot be read twice.\nSave it to a file, or iterate once.")
        self.summary, self._begun, self._ended = Summary(), False, False

    def _finished_summary(self) -> Summary | None:
        return self.summary if self._ended else None

    def _of_log(self, file: str | None, counts: RunCounts, flow: RowFlow) -> Iterator[Result]:
        """The findings about a whole log; a single selected row says nothing about it."""
        if file is not None and self.settings.row is None:
            yield from counts.of_log(file, flow.groups[file].auditor.codes)

    def _recorder(self, flow: RowFlow, states: States, stack: ExitStack) -> Recorder | None:
        """What records the logs, with the journal open until `stack` closes; None without a journal.

        A single row is not recorded: nothing would be gained.
        """
        if self.settings.row is not None or (self.resume is None and self.journal is None):
            return None
        journal = self.journal
        if journal is None and self.resume is not None:
            journal = stack.enter_context(closing(Journal(self.resume)))
        assert journal is not None
        recorder = Recorder(journal, SCAN, flow, states, {"reports": bool(self.observe)})
        self.resumed = len(recorder.logs)
        self.summary.notices += recorder.notices()
        return recorder

    def _views(self) -> ViewQuota | None:
        """Which rollouts get a view; None: nothing is observed."""
        return (
            self.observe.copy() if isinstance(self.observe, ViewQuota) else ViewQuota() if self.observe else None
        )

    def _results(
        self, flow: RowFlow, counted: Counted, recorder: Recorder | None
    ) -> Generator[Result, None, None]:
        """The results of all rows, with bare rollouts if several processes may do the work."""
        settings, executor = self.settings, self.executor
        if executor is None and settings.row is None:  # a single row is found here before anywhere else
            executor = flow.executor
        several = executor is not None or (settings.jobs or 1) > 1
        if executor is None and several:
            executor = executor_for(settings.jobs or 1, self.summary)
            # Of so few rows, other processes would fetch more than was asked for.
            few = settings.limit is not None and settings.limit <= _FEW and flow.remote
            small = self.chunk_bytes is None and is_small(flow.files)
            if executor.here or settings.row is not None or few or small:
                executor = None
        if executor is None and recorder is not None:
            executor = InProcess()
        detection = Detection()
        if executor is None:
            viewed = None if (views := self._views()) is None else views.take
            for raw, place in flow.rows(self.summary, self.progress, counted):
                for result in flow.audit(raw, place, detection, viewed):
                    yield bare(result) if several else result
            return
        if not executor.here:
            flow.load()
        chunked = ChunkedScan(flow, self.summary, counted, self._views(), recorder)
        size = self.chunk_bytes or chunk_bytes(flow.size, executor.jobs)
        with closing(chunked.results(executor, size, self.progress)) as results:
            yield from detection.once(results)


def conclude(summary: Summary) -> None:
    """Add notices to the summary where a reader might wrongly take a log for clean."""
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
        summary.notices.append(
            "No rollout holds token ids: nothing was audited. Log the ids and logprobs that the sampler returns "
            "with each answer; `tito-audit serve` writes logs that have them."
            + (
                " If this is chat data for SFT, `tito-audit sft` shows what would be trained."
                if {name for formats in summary.taken.values() for name in formats} == {"generic"}
                else ""
            )
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
    """Notices about unread columns that look like ids, masks, logprobs or messages; logs with the same columns
    share one."""
    alike: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for file, kinds in summary.unread.items():
        alike.setdefault(tuple((kind, path) for path, kind in kinds.items()), []).append(file)
    for columns, files in alike.items():
        looks = " or ".join(kind for kind in _KINDS if any(kind == column_kind for column_kind, _ in columns))
        paths = ", ".join(elided(path, _PATH) for _, path in columns[:_PATHS])
        more = f" and {len(columns) - _PATHS} more" if len(columns) > _PATHS else ""
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
    """Audits logs: files, folders, globs, or rows in memory (`Logs`); results are computed as they are iterated.

    With `observe` each result also has what a viewer shows (`Result.observed`). With `resume`, a journal that is
    made if it does not exist, logs that an earlier run finished are not audited again; the results are the same,
    and their rollouts keep only place and format.
    """
    return Scan(names_of(logs), Settings.given(settings), progress, observe=observe, resume=resume)


def read_rollouts(logs: Logs, settings: Settings | None = None) -> Iterator[Rollout]:
    """The rollouts of logs; RecordError, with its place, for a row that cannot be read."""
    flow = RowFlow(find_logs(names_of(logs)), Settings.given(settings), audits=False)
    for raw, place in flow.rows(Summary()):
        try:
            read = flow.groups[place.file].read(raw, place)
        except RecordError as error:
            raise RecordError(f"{place}: {error}") from None
        yield from read.rollouts


def once_of(logs: Logs, settings: Settings | None = None, *, loader: Loader | None = None) -> Once:
    """What the rows of all logs train more than once; every row is read, none is audited."""
    settings = replace(Settings.given(settings), limit=None, sample=None, row=None)
    flow, ledger = RowFlow(find_logs(names_of(logs)), settings, audits=False, loader=loader), Ledger()
    for raw, place in flow.rows(Summary()):
        with suppress(RecordError):
            for rollout in flow.groups[place.file].read(raw, place).rollouts:
                trainings = trainings_of(rollout)
                if trainings is not None:
                    ledger.add(trainings, rollout.place)
    return Once.of(ledger)


def _named(flow: RowFlow) -> Iterator[str]:
    """Notices that say what to pass for logs without a tokenizer that name a model or tokenizer."""
    groups = {file: flow.groups[str(file)] for file in flow.files if file.is_file()}
    without = [(file, group) for file, group in groups.items() if group.auditor.tokenizer is None]
    notices: dict[str, None] = {}
    for file, group in without[:_NAMED]:
        named = names_of_log(group.head(file, ROWS))
        if named:
            claim = " and ".join(f"its {key} {name!r}" for key, name in named.items())
            name = named.get("tokenizer") or named["model"]
            use = f"-t {shell_word(name)}" if _LOADABLE.fullmatch(name) else "-t with the tokenizer of that model"
            notice = f"names {claim} (not verified): pass {use} to audit against it."
            if notice not in notices:
                notices[notice] = None
                yield f"{file} {notice}"
