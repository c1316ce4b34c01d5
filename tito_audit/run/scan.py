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
from tito_audit.record.rollout import Place, Rollout
from tito_audit.record.testimony import Testimony
from tito_audit.repairs import all_repairs
from tito_audit.rules import all_rules
from tito_audit.run.auditor import Loader, Viewed, load_renderer, selected_codes
from tito_audit.run.fit import ROWS, names_of_log
from tito_audit.run.log_findings import findings_of_log
from tito_audit.run.log_groups import (
    Fits,
    LogGroup,
    Parts,
    Progress,
    asking_nothing,
    head,
    join_notices,
    noted,
    parts_of,
    read,
    share_of,
)
from tito_audit.run.parallel import Counted, Encoders, Spread, bare, chunk_bytes, spread
from tito_audit.run.workers import can_fork
from tito_audit.settings.model import Settings
from tito_audit.storage import RawRow, find_logs
from tito_audit.storage.chunk import Chunk
from tito_audit.summary import Summary
from tito_audit.terminal.shell import shell_word
from tito_audit.tokens.tokenizer import Tokenizer
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

_WORTH_LOADING = 6 << 20
"""Bytes of logs, about 400,000 tokens, from which on loading the fast encoder pays."""
_TRIED_ROWS = 4
_TRIED_TEXTS = 32
_TRIED_CHARACTERS = 4_096
"""How much of a log the fast encoder is tried on before it is trusted: as much as takes a tenth of a second."""
_NAMED = 4
"""Logs that are asked what they call their model, where no tokenizer was given."""
_LOADABLE = re.compile(r"[\w.-]+/[\w.-]+")
"""The name of a model on a hub."""
_ALONE = 1 << 20
"""Bytes of logs that one process is done with before others would have started."""


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
        self.standing_for: Mapping[Path, Path] = {}
        """Logs whose settings are those of others, which overrides may name (a repaired log: the original's)."""
        self.asks_rules = True
        """False: nothing is looked for, and only what rows say of how their log was written is gathered."""
        self.testimonies: dict[str, Testimony] = {}
        """By log: what its rows say together of how they were written, as far as they were read."""

    def __iter__(self) -> Iterator[Result]:
        selected_codes(self.settings)
        files, stock = find_logs(self.logs), Loader()
        parts = parts_of(files, self.settings, stock, self.summary, self.standing_for)
        if not self.asks_rules:
            parts = asking_nothing(parts)
        self.vocabulary = next((part.engine.vocabulary for part in parts.values()), None)
        for tokenizer in stock.tokenizers:
            mine = {file: parts[str(file)] for file in files if parts[str(file)].engine.tokenizer is tokenizer}
            self._choose_encoder(tokenizer, mine)
        started = time.perf_counter()
        encoders, counted = Encoders(stock.tokenizers), Counted()
        with closing(self._results(files, parts, encoders, counted)) as results:
            for result in self._with_logs(noted(results, parts), parts):
                self.summary.add(result)
                self.summary.seconds = time.perf_counter() - started
                yield result
        for tokenizer in stock.tokenizers:
            tokenizer.save()
        encoders.settle(self.summary)
        self.summary.notices += [*_named(files, parts), *join_notices(parts)]
        self.summary.sampled = counted.sampled(share_of(self.settings))
        conclude(self.summary)

    def _with_logs(self, results: Iterable[Result], parts: Parts) -> Iterator[Result]:
        """The results, those of each log behind what it does not fit, and before what its rows say together."""
        file: str | None = None
        for result in results:
            if file is not None and result.place.file != file:
                yield from self._of_log(file, parts)
            if file != result.place.file and result.misfit is not None:
                yield Result(result.misfit.place, None, (result.misfit,), of_log=True)
            file = result.place.file
            if result.witness is not None:
                self.testimonies.setdefault(file, Testimony()).add(result.witness, result.place)
            yield result
        if file is not None:
            yield from self._of_log(file, parts)

    def _of_log(self, file: str, parts: Parts) -> Iterator[Result]:
        """What the rows of a log say together; one row that was picked out of it is not the log."""
        testimony = self.testimonies.get(file)
        if testimony is None or self.settings.row is not None:
            return
        findings = findings_of_log(file, testimony, parts[file].engine.codes)
        if findings:
            yield Result(findings[0].place, None, findings, of_log=True)

    def _choose_encoder(self, tokenizer: Tokenizer, logs: Mapping[Path, LogGroup]) -> None:
        """Load the fast encoder where the logs are worth it, before processes are forked."""
        if self.settings.encoder == "tokenizers":
            return
        wanted = True if self.settings.encoder == "fastokens" else None
        # A pipe cannot be read twice.
        regular = {file: part for file, part in logs.items() if file.is_file()}
        size = sum(file.stat().st_size for file in regular) * (share_of(self.settings) or 1)
        if (wanted or size >= _WORTH_LOADING) and tokenizer.use_fast(wanted):
            first = next(iter(regular.items()), None)
            tokenizer.check_fast(_texts(*first, tokenizer.vocabulary) if first is not None else [])

    def _results(
        self, files: Sequence[Path], parts: Parts, encoders: Encoders, counted: Counted
    ) -> Generator[Result, None, None]:
        several, fits = (self.settings.jobs or 1) > 1, Fits(parts)
        how = self._spread(files, parts) if several else None
        if how is not None:
            for part in dict.fromkeys(parts.values()):
                part.engine.load()
            told = Detection()

            def audit(raw: RawRow, place: Place, viewed: Viewed | None) -> Iterator[Result]:
                part = fits.part(place.file)
                for at, item in part.rollouts(raw, place, told):
                    yield told.say(part.result(at, item, viewed))

            counts = self.summary, counted, self.progress
            with closing(spread(files, audit, how, *counts, encoders)) as results:
                yield from Detection().once(results)
            return
        told, viewed = Detection(), ViewQuota().take if self.observe else None
        for _, place, item in read(files, parts, self.summary, self.progress, told, counted):
            result = told.say(fits.part(place.file).result(place, item, viewed))
            yield bare(result) if several else result

    def _spread(self, files: Sequence[Path], parts: Parts) -> Spread | None:
        """How to share the logs out; None when this process does better alone."""
        jobs, settings = self.settings.jobs or 1, self.settings
        if not can_fork():
            self.summary.notices.append(
                "This system forks no processes that could be used here: one did all the work."
            )
            return None
        total = sum(file.stat().st_size for file in files if file.is_file())
        small = total <= _ALONE and all(file.is_file() for file in files)
        if settings.row is not None or (small and self.chunk_bytes is None):
            return None
        chunk = self.chunk_bytes or chunk_bytes(total, jobs)

        def chunks(file: Path, size: int) -> Iterator[Chunk]:
            part = parts[str(file)]
            return part.chunks(part.open(file), size)

        return Spread(jobs, chunk, settings.limit, chunks, self.observe)


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
    for _, place, item in read(files, parts_of(files, settings), Summary()):
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


def _named(files: Sequence[Path], parts: Parts) -> Iterator[str]:
    """What logs without a tokenizer call their model and their tokenizer themselves, and what to do with it."""
    without = [file for file in files if parts[str(file)].engine.tokenizer is None and file.is_file()]
    said: set[str] = set()
    for file in without[:_NAMED]:
        named = names_of_log(head(file, parts[str(file)], ROWS))
        if named:
            claim = " and ".join(f"its {key} {name!r}" for key, name in named.items())
            name = named.get("tokenizer") or named["model"]
            use = f"-t {shell_word(name)}" if _LOADABLE.fullmatch(name) else "-t with the tokenizer of that model"
            notice = f"names {claim}, which is its own word: pass {use} to have it compared."
            if notice not in said:
                said.add(notice)
                yield f"{file} {notice}"


def _texts(file: Path, part: LogGroup, vocabulary: Vocabulary) -> list[str]:
    """Texts out of the first rows of a log: what messages say, and what ids spell."""
    texts: list[str] = []
    for item in head(file, part, _TRIED_ROWS):
        texts += [message.text for message in item.messages]
        recorded = [item.training_row.token_ids] if item.training_row is not None else []
        recorded += [seen for turn in item.turns[-1:] if (seen := turn.seen_ids) is not None]
        texts += [vocabulary.text(ids[:_TRIED_CHARACTERS]) for ids in recorded]
    return [text[:_TRIED_CHARACTERS] for text in texts[:_TRIED_TEXTS]]
