"""Read, gather, check: the flow from logs to results, and the only module that knows every room."""

from __future__ import annotations

import re
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from tito_audit.errors import RecordError
from tito_audit.formats import Detection
from tito_audit.record.finding import Result
from tito_audit.record.rollout import Rollout
from tito_audit.record.testimony import Testimony
from tito_audit.repairs import all_repairs
from tito_audit.rules import all_rules
from tito_audit.run.auditor import load_renderer, selected_codes
from tito_audit.run.executor import Executor, executor_for, is_small
from tito_audit.run.fit import ROWS, names_of_log
from tito_audit.run.log_findings import findings_of_log
from tito_audit.run.log_groups import RowFlow
from tito_audit.run.parallel import AuditInChunks, bare, chunk_bytes
from tito_audit.run.progress import Counted, Progress
from tito_audit.run.rows import share_of
from tito_audit.settings.model import Settings
from tito_audit.storage import find_logs
from tito_audit.summary import Summary
from tito_audit.terminal.shell import shell_word
from tito_audit.tokens.vocab import Vocabulary
from tito_audit.viewer.selection import ViewQuota

__all__ = [
    "Progress",
    "Scan",
    "all_repairs",
    "all_rules",
    "conclude",
    "load_renderer",
    "names_of",
    "read_rollouts",
    "scan_rollouts",
    "selected_codes",
    "testimony_of",
]

_NAMED = 4
"""Logs that are asked what they call their model, where no tokenizer was given."""
_LOADABLE = re.compile(r"[\w.-]+/[\w.-]+")
"""The name of a model on a hub."""


class Scan:
    """Results of logs, one rollout after the other; `summary` is complete once they are used up.

    Making one opens nothing; iterating raises SetupError or StorageError when the run cannot be made. With
    more than one job (`Settings.jobs`) the rollout of a result holds its place and format only. With `observe`
    results come with their measures, and the first rollouts of each finding with a view.
    """

    def __init__(
        self,
        logs: Sequence[str],
        settings: Settings,
        progress: Progress | None = None,
        *,
        observe: bool = False,
    ) -> None:
        self.logs = logs
        self.settings = settings
        self.progress = progress
        self.observe = observe
        self.summary = Summary()
        self.vocabulary: Vocabulary | None = None
        """For showing pieces of the first log; None without a tokenizer, set once iteration has started."""
        self.chunk_bytes: int | None = None
        """How much of a log a process is given at once, about; None: as fits the logs."""
        self.executor: Executor | None = None
        """What runs the work of several jobs; None: processes of this machine."""
        self.standing_for: Mapping[Path, Path] = {}
        """Logs whose settings are those of others, which overrides may name (a repaired log: the original's)."""
        self.asks_rules = True
        """False: nothing is looked for, and only what rows say of how their log was written is gathered."""
        self.testimonies: dict[str, Testimony] = {}
        """By log: what its rows say together of how they were written, as far as they were read."""

    def __iter__(self) -> Iterator[Result]:
        selected_codes(self.settings)
        flow = RowFlow(find_logs(self.logs), self.settings, self.standing_for, asks_rules=self.asks_rules)
        flow.begin(self.summary)
        self.vocabulary = next((group.auditor.vocabulary for group in flow.groups.values()), None)
        flow.choose_encoders()
        started, counted = time.perf_counter(), Counted()
        with closing(self._results(flow, counted)) as results:
            for result in self._with_logs(flow.noted(results), flow):
                self.summary.add(result)
                self.summary.seconds = time.perf_counter() - started
                yield result
        flow.save()
        flow.encoders.settle(self.summary)
        self.summary.notices += [*_named(flow), *flow.join_notices()]
        self.summary.sampled = counted.sampled(share_of(self.settings))
        conclude(self.summary)

    def _with_logs(self, results: Iterable[Result], flow: RowFlow) -> Iterator[Result]:
        """The results, those of each log behind what it does not fit, and before what its rows say together."""
        file: str | None = None
        for result in results:
            if file is not None and result.place.file != file:
                yield from self._of_log(file, flow)
            if file != result.place.file and result.misfit is not None:
                yield Result(result.misfit.place, None, (result.misfit,), of_log=True)
            file = result.place.file
            if result.witness is not None:
                self.testimonies.setdefault(file, Testimony()).add(result.witness, result.place)
            yield result
        if file is not None:
            yield from self._of_log(file, flow)

    def _of_log(self, file: str, flow: RowFlow) -> Iterator[Result]:
        """What the rows of a log say together; one row that was picked out of it is not the log."""
        testimony = self.testimonies.get(file)
        if testimony is None or self.settings.row is not None:
            return
        findings = findings_of_log(file, testimony, flow.groups[file].auditor.codes)
        if findings:
            yield Result(findings[0].place, None, findings, of_log=True)

    def _results(self, flow: RowFlow, counted: Counted) -> Generator[Result, None, None]:
        several = self.executor is not None or (self.settings.jobs or 1) > 1
        executor = self._executor(flow) if several else None
        if executor is not None:
            flow.load()
            how = AuditInChunks(flow, self.chunk_bytes or chunk_bytes(flow.size, executor.jobs), self.observe)
            with closing(how.results(executor, self.summary, counted, self.progress)) as results:
                yield from Detection().once(results)
            return
        told, viewed = Detection(), ViewQuota().take if self.observe else None
        for _, place, item in flow.read(self.summary, self.progress, told, counted):
            result = told.say(flow.group(place.file).result(place, item, viewed))
            yield bare(result) if several else result

    def _executor(self, flow: RowFlow) -> Executor | None:
        """What audits the logs in chunks; None when this process does better alone."""
        if self.executor is not None:
            return self.executor
        executor = executor_for(self.settings.jobs or 1, self.summary)
        alone = executor.here or self.settings.row is not None
        return None if alone or (self.chunk_bytes is None and is_small(flow.files)) else executor


def conclude(summary: Summary) -> None:
    """Say what a reader must not take for a clean log."""
    sampled = summary.sampled
    if sampled is not None and sampled.of and not sampled.rows:
        summary.notices.append(
            f"The sample took none of the {sampled.of} rows: nothing was audited. Pass a larger --sample."
        )
    elif not summary.rollouts and not summary.rows_unreadable:
        summary.notices.append("The log holds no rows: nothing was audited.")
    elif summary.without_ids:
        summary.notices.append(
            f"{summary.without_ids} of {summary.rollouts} rollouts hold no token ids: "
            "nothing was audited in them, which does not mean that they are clean."
        )
    for file, formats in summary.taken.items():
        if len(formats) > 1:
            rare = min(formats, key=lambda name: (formats[name].rows, name))
            summary.notices.append(
                f"{file} holds rows of {len(formats)} formats, each read as its own; "
                f"the first of {rare} is row {formats[rare].first_row}."
            )


def scan_rollouts(
    logs: str | Path | Sequence[str | Path],
    settings: Settings | None = None,
    progress: Progress | None = None,
    *,
    observe: bool = False,
) -> Scan:
    """The audit of logs (files, folders, globs), as results that are computed while they are read.

    With `observe` each result says more than its findings (`Result.observed`).
    """
    return Scan(names_of(logs), settings or Settings(), progress, observe=observe)


def read_rollouts(logs: str | Path | Sequence[str | Path], settings: Settings | None = None) -> Iterator[Rollout]:
    """The rollouts of logs; a row that cannot be read raises RecordError with its place."""
    files, settings = find_logs(names_of(logs)), settings or Settings()
    for _, place, item in RowFlow(files, settings, audits=False).read(Summary()):
        if isinstance(item, str):
            raise RecordError(f"{place}: {item}")
        yield item


def testimony_of(
    logs: str | Path | Sequence[str | Path],
    settings: Settings | None = None,  # noqa: PT028 - no test, for all its name
    progress: Progress | None = None,  # noqa: PT028
) -> Mapping[str, Testimony]:
    """What the rows of each log say together of how they were written, by the log's path; no rule is asked.

    Every row is read, whatever `Settings.limit` and `Settings.sample` say. A pipe, which cannot be read twice, is
    left alone, and so is a log whose rows say nothing of it.
    """
    settings = replace(settings or Settings(), limit=None, sample=None, row=None)
    regular = [str(file) for file in find_logs(names_of(logs)) if file.is_file()]
    if not regular:
        return {}
    scan = Scan(regular, settings, progress)
    scan.asks_rules = False
    for _ in scan:
        pass
    return scan.testimonies


def names_of(logs: str | Path | Sequence[str | Path]) -> list[str]:
    """The logs of a call as text, one or several."""
    return [str(logs)] if isinstance(logs, str | Path) else [str(log) for log in logs]


def _named(flow: RowFlow) -> Iterator[str]:
    """What logs without a tokenizer call their model and their tokenizer themselves, and what to do with it."""
    groups = {file: flow.groups[str(file)] for file in flow.files if file.is_file()}
    without = [(file, group) for file, group in groups.items() if group.auditor.tokenizer is None]
    said: set[str] = set()
    for file, group in without[:_NAMED]:
        named = names_of_log(group.head(file, ROWS))
        if named:
            claim = " and ".join(f"its {key} {name!r}" for key, name in named.items())
            name = named.get("tokenizer") or named["model"]
            use = f"-t {shell_word(name)}" if _LOADABLE.fullmatch(name) else "-t with the tokenizer of that model"
            notice = f"names {claim}, which is its own word: pass {use} to have it compared."
            if notice not in said:
                said.add(notice)
                yield f"{file} {notice}"
