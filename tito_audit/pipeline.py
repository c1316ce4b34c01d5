"""Read, gather, check: the flow from logs to results, and the only module that knows every room."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from tito_audit.check import check
from tito_audit.config import Settings
from tito_audit.errors import RecordError, SetupError
from tito_audit.evidence.gather import gather
from tito_audit.format import Format
from tito_audit.formats import Told, format_named, map_columns, number_columns
from tito_audit.jobs import can_fork
from tito_audit.join import Join, form_of, holds, joined_counts
from tito_audit.record.finding import Finding, Hit, Result, Severity, Where
from tito_audit.record.rollout import Place, Rollout
from tito_audit.render.renderer import Renderer, make_renderer
from tito_audit.repair import Repair
from tito_audit.repairs import all_repairs
from tito_audit.rule import Rule, selected
from tito_audit.rules import all_rules
from tito_audit.spread import Spread, bare, chunk_bytes, spread
from tito_audit.storage import RawRow, find_logs, open_log
from tito_audit.summary import Summary
from tito_audit.tokens.load import load_tokenizer
from tito_audit.tokens.tokenizer import Tokenizer
from tito_audit.tokens.vocab import Vocabulary

__all__ = [
    "Engine",
    "Progress",
    "Scan",
    "audit_rollout",
    "conclude",
    "counts_of",
    "load_renderer",
    "load_run",
    "names_of",
    "read_rollouts",
    "scan_rollouts",
    "selected_codes",
    "unreadable",
]

Progress = Callable[[int, int, int], None]
"""Called with rows read, bytes read and bytes in all, of all logs together."""


_WORTH_LOADING = 6 << 20
"""Bytes of logs, about 400,000 tokens, from which on loading the fast encoder pays."""
_SAMPLED_ROWS = 4
_SAMPLED_TEXTS = 32
_SAMPLED_CHARACTERS = 4_096
"""How much of a log the fast encoder is tried on before it is trusted: as much as takes a tenth of a second."""
_ALONE = 1 << 20
"""Bytes of logs that one process is done with before others would have started."""


class Scan:
    """Results of logs, one rollout after the other; `summary` is complete once they are used up.

    Making one opens nothing; iterating raises SetupError or StorageError when the run cannot be made. With
    more than one job (`Settings.jobs`) the rollout of a result holds its place and format only.
    """

    def __init__(self, logs: Sequence[str], settings: Settings, progress: Progress | None = None) -> None:
        self.logs = logs
        self.settings = settings
        self.progress = progress
        self.summary = Summary()
        self.vocabulary: Vocabulary | None = None
        """For showing pieces; None without a tokenizer, set once iteration has started."""
        self.chunk_bytes: int | None = None
        """How much of a log a process is given at once, about; None: as fits the logs."""

    def __iter__(self) -> Iterator[Result]:
        codes = selected_codes(self.settings)
        files = find_logs(self.logs)
        tokenizer, renderer = load_run(self.settings, self.summary)
        self.vocabulary = tokenizer.vocabulary if tokenizer is not None else None
        engine = Engine(tokenizer, renderer, all_rules(), codes, all_repairs)
        self._choose_encoder(tokenizer, files)
        started = time.perf_counter()
        join = Join.of(self.settings, files)
        with closing(self._results(files, engine, join)) as results:
            for result in results if join is None else join.noted(results):
                self.summary.add(result)
                self.summary.seconds = time.perf_counter() - started
                yield result
        if tokenizer is not None:
            tokenizer.save()
            self.summary.encoder = self.summary.encoder or tokenizer.encoder_name  # or what another process said
            if tokenizer.encoder_notice and tokenizer.encoder_notice not in self.summary.notices:
                self.summary.notices.append(tokenizer.encoder_notice)
        self.summary.notices += join.notices() if join is not None else ()
        conclude(self.summary)

    def _choose_encoder(self, tokenizer: Tokenizer | None, files: Sequence[Path]) -> None:
        """Load the fast encoder where the logs are worth it, before processes are forked."""
        if tokenizer is None or self.settings.encoder == "tokenizers":
            return
        wanted = True if self.settings.encoder == "fastokens" else None
        regular = [file for file in files if file.is_file()]
        if (wanted or sum(file.stat().st_size for file in regular) >= _WORTH_LOADING) and tokenizer.use_fast(
            wanted
        ):
            # A pipe cannot be read twice.
            tokenizer.check_fast(_sample(regular[:1], self.settings, tokenizer.vocabulary))

    def _results(self, files: Sequence[Path], engine: Engine, join: Join | None) -> Generator[Result, None, None]:
        several = (self.settings.jobs or 1) > 1
        how = self._spread(files, join) if several else None
        if how is not None:
            if engine.tokenizer is not None:
                engine.tokenizer.load()
            if engine.renderer is not None:
                engine.renderer.load()
            engine.repairs()
            named, told = _named(self.settings), Told()

            def audit(raw: RawRow, place: Place) -> Iterator[Result]:
                for at, item in _rollouts(raw, place, named, self.settings, told, join):
                    yield _result(at, item, engine, told)

            def encoder() -> tuple[str | None, str | None]:
                at_work = engine.tokenizer
                return (at_work.encoder_name, at_work.encoder_notice) if at_work is not None else (None, None)

            with closing(spread(files, audit, how, self.summary, self.progress, encoder)) as results:
                yield from Told().once(results)
            return
        told = Told()
        for place, item in _read(files, self.settings, self.summary, self.progress, told, join):
            result = _result(place, item, engine, told)
            yield bare(result) if several else result

    def _spread(self, files: Sequence[Path], join: Join | None) -> Spread | None:
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
        arrays = number_columns(settings.columns)
        how = Spread(jobs, chunk, settings.max_row_bytes, settings.limit, arrays)
        return how if join is None else replace(how, chunks=join.chunks)


@dataclass(frozen=True, slots=True)
class Engine:
    """What rollouts are audited with, loaded once for all of them, before processes are forked."""

    tokenizer: Tokenizer | None
    renderer: Renderer | None
    rules: Sequence[Rule]
    codes: frozenset[str]
    """The rules that are asked."""
    repairs: Callable[[], Sequence[Repair]]
    """Imported when the first finding asks what would mend it."""


def audit_rollout(rollout: Rollout, engine: Engine) -> Result:
    """Everything that is found in one rollout."""
    evidence = gather(rollout, engine.tokenizer, engine.renderer)
    findings, skips = check(evidence, engine.rules, engine.codes, engine.repairs)
    return Result(rollout.place, evidence.rollout, findings, skips, counts_of(evidence.rollout))


def _result(place: Place, item: Rollout | str, engine: Engine, told: Told) -> Result:
    if isinstance(item, str):
        return unreadable(place, item, engine.codes)
    return told.say(audit_rollout(item, engine))


def load_run(settings: Settings, summary: Summary) -> tuple[Tokenizer | None, Renderer | None]:
    """The tokenizer and the renderer of a run, each None when there is none; the summary says so."""
    if settings.tokenizer is None:
        if settings.chat_template:
            raise SetupError(
                "--chat-template was given without a tokenizer.\n"
                "The template's text has to be encoded before it can be compared.\n"
                "Pass --tokenizer DIR as well."
            )
        summary.notices.append(
            "No tokenizer given: only rules that need none could run. Pass --tokenizer DIR or a hub name."
        )
        return None, None
    tokenizer = load_tokenizer(settings.tokenizer, trust_remote_code=settings.trust_remote_code)
    summary.tokenizer = tokenizer.name
    renderer = None
    if settings.chat_template or tokenizer.chat_templates:
        renderer = _renderer(tokenizer, settings)
    else:
        summary.notices.append(
            f"{tokenizer.name} has no chat template, so nothing could be rendered again. "
            "Pass --chat-template FILE to check prompts against one."
        )
    return tokenizer, renderer


def conclude(summary: Summary) -> None:
    """Say what a reader must not take for a clean log."""
    if not summary.rollouts and not summary.rows_unreadable:
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
) -> Scan:
    """The audit of logs (files, folders, globs), as results that are computed while they are read."""
    return Scan(names_of(logs), settings or Settings(), progress)


def read_rollouts(logs: str | Path | Sequence[str | Path], settings: Settings | None = None) -> Iterator[Rollout]:
    """The rollouts of logs; a row that cannot be read raises RecordError with its place."""
    files, settings = find_logs(names_of(logs)), settings or Settings()
    for place, item in _read(files, settings, Summary(), None, join=Join.of(settings, files)):
        if isinstance(item, str):
            raise RecordError(f"{place}: {item}")
        yield item


def load_renderer(tokenizer: str, settings: Settings | None = None) -> Renderer:
    """The chat template of a tokenizer folder or hub name, ready to render; SetupError without one."""
    settings = settings or Settings()
    loaded = load_tokenizer(tokenizer, trust_remote_code=settings.trust_remote_code)
    return _renderer(loaded, settings)


def names_of(logs: str | Path | Sequence[str | Path]) -> list[str]:
    """The logs of a call as text, one or several."""
    return [str(logs)] if isinstance(logs, str | Path) else [str(log) for log in logs]


def _renderer(tokenizer: Tokenizer, settings: Settings) -> Renderer:
    source = None
    if settings.chat_template:
        path = Path(settings.chat_template)
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SetupError(
                f"{path}: the chat template cannot be read ({error}).\n"
                "Pass --chat-template with the path of a Jinja text file."
            ) from None
    return make_renderer(
        tokenizer,
        chat_template=source,
        template_name=settings.template_name,
        template_args=settings.template_args,
        tool_arguments=settings.tool_arguments,
        time_limit=settings.template_seconds,
    )


def selected_codes(settings: Settings) -> frozenset[str]:
    """The codes that run; a prefix that fits no rule is a mistake of the user's."""
    codes = [rule.code for rule in all_rules()]
    for prefix in (*settings.select, *settings.ignore):
        if not any(code.startswith(prefix) for code in codes):
            raise SetupError(
                f"{prefix!r} is the beginning of no rule's code.\n"
                "A selection that fits nothing would let every fault pass.\n"
                "`tito-audit list rules` prints the codes."
            )
    return frozenset(code for code in codes if selected(code, settings.select, settings.ignore))


def _read(
    files: Sequence[Path],
    settings: Settings,
    summary: Summary,
    progress: Progress | None,
    told: Told | None = None,
    join: Join | None = None,
) -> Generator[tuple[Place, Rollout | str], None, None]:
    """Every rollout with its place, or why its row could not be read."""
    named = _named(settings)
    total = sum(file.stat().st_size for file in files if file.is_file())
    rows = done = 0
    for file in files:
        summary.files.append(str(file))
        log = open_log(file, max_row_bytes=settings.max_row_bytes, arrays=number_columns(settings.columns))
        for raw in log if join is None else join.rows(log):
            if settings.limit is not None and rows >= settings.limit:
                summary.notices.append(f"Stopped after {rows} rows, as asked by --limit.")
                return
            rows += 1
            if settings.row is not None and not holds(raw, settings.row):
                if raw.index > settings.row:
                    break
                continue
            yield from _rollouts(raw, Place(str(file), raw.index), named, settings, told, join)
            if progress is not None:
                progress(rows, done + log.position, total)
        done += log.size


def _sample(files: Sequence[Path], settings: Settings, vocabulary: Vocabulary) -> list[str]:
    """Texts out of the first rows of logs: what messages say, and what ids spell."""
    texts: list[str] = []
    with closing(_read(files, replace(settings, limit=_SAMPLED_ROWS, row=None), Summary(), None)) as rows:
        for _, item in rows:
            if isinstance(item, str):
                continue
            texts += [message.text for message in item.messages]
            recorded = [item.training_row.token_ids] if item.training_row is not None else []
            recorded += [seen for turn in item.turns[-1:] if (seen := turn.seen_ids) is not None]
            texts += [vocabulary.text(ids[:_SAMPLED_CHARACTERS]) for ids in recorded]
    return [text[:_SAMPLED_CHARACTERS] for text in texts[:_SAMPLED_TEXTS]]


def _named(settings: Settings) -> Format | None:
    """The one format of all rows; None when each row shows its own."""
    if settings.format is not None:
        return format_named(settings.format)
    return format_named("generic") if settings.columns else None


def _rollouts(
    raw: RawRow,
    place: Place,
    named: Format | None,
    settings: Settings,
    told: Told | None = None,
    join: Join | None = None,
) -> Iterator[tuple[Place, Rollout | str]]:
    """The rollouts of a row, or why it cannot be read."""
    if raw.value is None:
        yield place, raw.error or "the row cannot be read"
        return
    row = raw.value
    try:
        if settings.columns:
            row = map_columns(row, settings.columns)
        form = form_of(row, named)
        rollouts = form.read(row, place) if join is None else join.given(form.read(row, place), raw.value)
    except RecordError as error:
        yield place, str(error)
        return
    if told is not None:
        told.look(place.file, form, row)
    for rollout in rollouts:
        yield rollout.place, rollout


def unreadable(place: Place, error: str, codes: frozenset[str]) -> Result:
    """A row that cannot be read, as its finding."""
    hit = Hit(Where.ROW, 0, 0, error, cause="row cannot be read")
    finding = Finding("REC001", Severity.ERROR, place, hit)
    return Result(place, None, (finding,) if "REC001" in codes else ())


def counts_of(rollout: Rollout) -> dict[str, int]:
    """Turns, tokens that were audited, and tokens that were generated."""
    generated = sum(len(t.completion_ids) for t in rollout.turns if t.completion_ids is not None)
    tokens = generated + sum(len(t.prompt_ids) for t in rollout.turns if t.prompt_ids is not None)
    row = rollout.training_row
    if row is not None:
        tokens += len(row.token_ids)
        if not rollout.turns and row.loss_mask is not None:
            generated += int(row.loss_mask.sum())
    return {"turns": len(rollout.turns), "tokens": tokens, "generated_tokens": generated, **joined_counts(rollout)}
