"""`tito-audit rescore`: compares a log's logprobs with a model's, and prices its drift."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TextIO

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tito_audit.cli._exit import FAILED
from tito_audit.cli._options import Options
from tito_audit.cli._outputs import json_writer, refuse_overwriting, wanted_reports, write_finished_reports
from tito_audit.errors import SetupError
from tito_audit.provider import ProviderOptions
from tito_audit.providers import key_of, open_provider
from tito_audit.report import ReportOptions
from tito_audit.report_objects import as_json, finding_object, mismatch_object, pick
from tito_audit.rescore.journal import ScoreJournal
from tito_audit.rescore.model import EDGES, NEAR, Agreement, RescoredRollout, Sums
from tito_audit.rescore.prompts import PromptRun, PromptSummary, Question
from tito_audit.rescore.run import RescoredLog, Rescoring, check_target, scores_of
from tito_audit.rescore.summary import (
    Pieces,
    RescoreSummary,
    Row,
    after_table,
    agreement_table,
    describe_place,
    drifted_table,
    mismatch_table,
    most_expensive,
    page,
    reach_lines,
)
from tito_audit.storage.remote import is_url
from tito_audit.summary import Summary
from tito_audit.terminal.escape import elided, visible
from tito_audit.terminal.page import heading, page_writer, ruled_table
from tito_audit.terminal.terminal import RunProgress, colors, page_width, with_progress
from tito_audit.terminal.words import decimal, many, percent, small


def rescore(options: Options, logs: list[str]) -> None:
    """Score recorded tokens with a model."""
    settings = options.settings()
    out, journal = options.out, options.journal
    places = [path for path in (out, journal) if path is not None]
    read = options.input_files(settings)
    refuse_overwriting({"-o": out, "--journal": journal}, logs, read)
    reports = PROMPT_REPORTS if options.prompts else REPORTS
    wanted = wanted_reports(options, logs, places, read, reports)
    keeping = {"-o": out, "--journal": journal, "--resume": options.resume, "--unsafe": options.unsafe}
    if options.prompts and (flags := [flag for flag, value in keeping.items() if value]):
        raise SetupError(f"{', '.join(flags)}: --prompts scores nothing, so there is nothing to keep or write.")
    kept_in = journal
    if journal is None and out is not None:
        # The journal grows while the model is asked, so that of a remote output is kept in the working folder.
        kept_in = f"{Path(out).name if is_url(out) else out.rstrip('/')}.scores"
    if kept_in is None and options.resume:
        raise SetupError("--resume: no journal is named.\nName it with --journal FILE, or pass -o OUT.")
    if out is not None:
        check_target(logs, out, force=options.force)
    scorer = open_provider(
        options.provider, ProviderOptions(options.model, key_of(options.provider), connections=options.requests)
    )
    pace = RunProgress()
    page = ReportOptions(color=colors(sys.stdout), width=page_width())
    if options.prompts:
        asking = PromptRun(logs, settings, scorer, replay=options.replay, jobs=options.requests, progress=pace)
        for _ in with_progress(asking, pace, silent=options.quiet):
            pass
        finished = PromptsRun(asking.summary, asking.scan, options.worst, asking.pieces)
        write_finished_reports(finished, PROMPT_REPORTS, wanted, page)
        if asking.summary.differences:
            raise typer.Exit(FAILED)
        return
    with ExitStack() as stack:
        scores = ScoreJournal(None if kept_in is None else Path(kept_in), scorer.name, resume=options.resume)
        stack.callback(scores.close)
        jobs, keeps, tolerance = options.requests, out is not None, options.tolerance
        run = Rescoring(
            logs, settings, scorer, jobs=jobs, keeps=keeps, tolerance=tolerance, journal=scores, progress=pace
        )
        details = None
        if "json" in [name for name, _ in wanted]:
            details = stack.enter_context(TemporaryFile("w+", encoding="utf-8"))
        with closing(with_progress(run, pace, silent=options.quiet)) as results:
            for number, result in enumerate(results):
                if details is not None:
                    details.write((",\n" if number else "\n") + as_json(rollout_object(result)))
        written = None
        if out is not None:
            model_said = f"{scores.model or 'the model'} ({scorer.name})"
            values = scores_of(logs, scores, model_said, replaces=options.unsafe)
            pace = RunProgress()
            written = RescoredLog(logs, out, settings, values, force=options.force, progress=pace)
            for _ in with_progress(written, pace, silent=options.quiet):
                pass
            scores.close(done=journal is None)
        done = RescoreRun(run.summary, details, options.worst, run.pieces, written)
        write_finished_reports(done, REPORTS, wanted, page)
    if run.summary.failed:
        raise typer.Exit(FAILED)


_TEXT_WIDTH = 36
_MOST_FINDINGS = 3


@dataclass(frozen=True, slots=True)
class RescoreRun:
    """A finished run."""

    summary: RescoreSummary
    details: TextIO | None
    """A temporary file with the rollouts as JSON, which follow the summary; None if no report has them."""
    worst: int
    """How many findings are shown with their price."""
    pieces: Pieces
    """Ids as text."""
    written: RescoredLog | None = None
    """What was written; None without -o."""


def _write_json(run: RescoreRun, out: TextIO, look: ReportOptions) -> None:
    written, summary = run.written, summary_object(run.summary)
    summary["written"] = None
    if written is not None:
        files = [{"log": str(log), "written": str(target)} for log, target in written.files]
        summary["written"] = {"files": files, **pick(written, "rows changed"), "refused": dict(written.refused)}
    out.write('{"summary":' + as_json(summary) + ',\n"rollouts":[')
    if run.details is not None:
        run.details.seek(0)
        shutil.copyfileobj(run.details, out)
    out.write("\n]}\n")


REPORTS: dict[str, Callable[[RescoreRun, TextIO, ReportOptions], None]] = {
    "text": page_writer(lambda run: page_parts(run.summary, run.worst, run.pieces, run.written)),
    "json": _write_json,
    "html": lambda run, out, _: print(
        page(run.summary, verdict(run.summary), run.worst, run.pieces), end="", file=out
    ),
}


def page_parts(
    summary: RescoreSummary, worst: int, pieces: Pieces, written: RescoredLog | None = None
) -> Iterator[RenderableType]:
    """The parts of the page, top to bottom."""
    yield _title(summary, f"{many(summary.scored_tokens, 'sampled token')} scored by")
    yield Text(verdict(summary), style="bold red" if summary.failed else "bold green")
    if (by_turn := agreement_table(summary, 12)).rows:
        yield from heading("Recorded logprobs against the model's")
        yield from (_table(by_turn.heads, by_turn.rows), Text(""), by_turn.legend)
    for words, number in summary.explanations.most_common():
        yield Text(f"{many(number, 'rollout')}: {visible(words)}.")
    if (shares := mismatch_table(summary)).rows:
        yield from heading("Why they differ: shares of the difference")
        yield from (_table(shares.heads, shares.rows), Text(""))
    if summary.causes:
        # By cause: the drifted tokens, then the sampled tokens after them.
        yield from heading("What drift costs, in nats")
        drifted = drifted_table(summary)
        yield from (_table(drifted.heads, drifted.rows), Text(""), drifted.legend)
        if (after := after_table(summary)).rows:
            yield from heading("What drift does to the sampled tokens after it")
            yield from (_table(after.heads, after.rows), Text(""), after.legend)
        yield from reach_lines(summary)
    if prices := most_expensive(summary, worst):
        yield from heading("The most expensive findings")
        # Two lines a finding: where it is, then the tokens of both sides and the price.
        for place, price in prices:
            first = price.segments[0]
            share = f", {percent(price.share)} of the change there" if math.isfinite(price.share) else ""
            yield Text(visible(f"  {describe_place(place, price)}"))
            more = f" and {len(price.segments) - 1:,} more" if len(price.segments) > 1 else ""
            sides = [elided(visible(pieces(ids)), _TEXT_WIDTH) for ids in (first.sampled_ids, first.other_ids)]
            numbers = f"{price.sampled:.2f} → {price.other:.2f} ({price.difference:+.2f}{share})"
            yield Text(f"    {sides[0]} → {sides[1]}{more}: {numbers}")
    yield from _findings_and_notes(summary, filled=written is not None)
    if written is not None:
        yield from heading("Written")
        for log, target in written.files:
            yield Text(visible(f"  {target}, from {log} (unchanged)"))
        yield Text(f"  logprobs written in {many(written.changed, 'row')} of {written.rows:,}, audited again")
        for because, number in written.refused.most_common():
            yield Text(visible(f"  {many(number, 'row')} as they were: {because}"))


def verdict(summary: RescoreSummary) -> str:
    """One sentence: whether the log's logprobs are the model's."""
    whole = summary.agreement
    words = f"No recorded logprob to compare; {many(summary.scored_tokens, 'token')} scored."
    if whole is not None:
        agree, above = "agree", ""
        if summary.disagreeing or whole.disagrees:
            agree, above = "disagree", f"; {summary.disagreeing:,} of {many(summary.rollouts, 'rollout')} above it"
        differ = f"they differ by {small(whole.size)} on average (tolerance {decimal(summary.tolerance, 6)})"
        words = f"Recorded logprobs {agree} with the model: {differ}{above}."
    return words + (" Not everything could be scored." if summary.unscored else "")


def _title(summary: RescoreSummary | PromptSummary, what: str) -> Text:
    """The first line: how many rollouts, and `what` was done by which provider and model."""
    model = f", model {summary.model}" if summary.model else ""
    words = f"{many(summary.rollouts, 'rollout')} · {what} {summary.provider}{model}"
    return Text("tito-audit rescore  ", style="bold").append(visible(words), style="")


def _table(heads: Row, rows: Sequence[Row]) -> Table:
    """A table of names and numbers, in which only names wrap."""
    table = ruled_table()
    table.collapse_padding = True
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left", no_wrap=number > 0)
    for row in rows:
        table.add_row(*row)
    return table


def _findings_and_notes(summary: RescoreSummary, *, filled: bool) -> Iterator[RenderableType]:
    """The findings by the model's values, then what could not be scored or priced; `filled`: -o was passed."""
    if summary.findings:
        yield from heading(f"By the model's values: {many(len(summary.findings), 'finding')}")
        for finding in summary.findings[:_MOST_FINDINGS]:
            yield Text(f"  {finding.code} {visible(str(finding.place))}: {visible(finding.hit.message)}")
        if len(summary.findings) > _MOST_FINDINGS:
            yield Text(f"  … and {len(summary.findings) - _MOST_FINDINGS:,} more; --report json lists all")
    lines = [
        *(
            f"{number:,} not scored: {visible(because)} (first: {visible(str(place))})"
            for because, (number, place) in list(summary.unscored.items())[:8]
        ),
        *(f"{many(number, 'finding')} without a price: {because}" for because, number in summary.unpriced.items()),
        *(visible(notice) for notice in summary.scan.notices),
    ]
    if summary.missing and not filled:
        lines.append(
            f"{many(summary.missing, 'sampled token')} without a recorded logprob: -o OUT writes the model's"
        )
    if lines:
        yield from heading("Notes")
        yield from (Text(f"  {line}") for line in lines)


def summary_object(summary: RescoreSummary) -> dict[str, Any]:
    """The JSON object of a run, without its rollouts."""
    scan, counts, changes = summary.scan, summary.counts, summary.changes
    return {
        "schema_version": 1,
        **pick(summary, "provider model"),
        "weight_versions": sorted(summary.weight_versions),
        "files": [str(file) for file in scan.files],
        **pick(scan, "tokenizer tokenizer_commits notices"),
        **pick(summary, "failed tolerance rollouts scored"),
        "rows_unreadable": summary.unreadable,
        **pick(summary, "scored_tokens missing disagreeing"),
        "agreement": agreement_object(summary.agreement),
        "by_turn": [
            {"turn": None if turn < 0 else turn, **(agreement_object(sums.agreement(summary.tolerance)) or {})}
            for turn, sums in sorted(summary.by_turn.items())
        ],
        "explanations": dict(summary.explanations),
        "mismatch": None if summary.mismatch is None else mismatch_object(summary.mismatch),
        "causes": [
            {
                **pick(cause, "code cause findings segments sampled_tokens other_tokens"),
                **pick(cause, "sampled other likelier lowest"),
                "behind": _sums(cause.behind),
            }
            for _, cause in sorted(summary.causes.items())
        ],
        "changed": {
            "turns": len(changes),
            "mean": sum(changes) / len(changes) if changes else None,
            "lowest": min(changes, default=None),
            "highest": max(changes, default=None),
        },
        "near": [
            {"from": first, **_sums(near)} for first, near in zip(NEAR, summary.near, strict=True) if near.tokens
        ],
        "unpriced": dict(summary.unpriced),
        "unscored": [
            {"because": because, "number": number, **pick(first, "file row item")}
            for because, (number, first) in summary.unscored.items()
        ],
        "findings": [finding_object(finding) for finding in summary.findings],
        "requests": {
            "sent": counts.requests,
            "tokens": counts.tokens,
            "spared": counts.saved,
            "refused": counts.failed,
        },
        "seconds": round(summary.seconds, 3),
    }


def rollout_object(result: RescoredRollout) -> dict[str, Any]:
    """The JSON object of a rollout: how its logprobs agree, and the price of each of its drift findings."""
    return {
        **pick(result.place, "file row item"),
        "agreement": agreement_object(result.agreement),
        "explanation": result.explanation or None,
        **pick(result, "scored_tokens missing weight_versions"),
        "prices": [
            {
                "finding": finding_object(price.finding),
                **pick(price, "against sampled other difference share"),
                "behind": _sums(price.behind),
                "segments": [pick(segment, "sampled_ids other_ids sampled other") for segment in price.segments],
            }
            for price in result.prices
        ],
        "unpriced": dict(result.unpriced),
        "unscored": result.unscored,
        "findings": [finding_object(finding) for finding in result.findings],
        "error": result.error or None,
    }


def agreement_object(agreement: Agreement | None) -> dict[str, Any] | None:
    """How recorded logprobs and the model's agree; None where nothing could be compared."""
    if agreement is None:
        return None
    numbers = pick(agreement, "tokens mean size largest k1 k3")
    return {**numbers, "above": _by_edge(agreement.above), "disagrees": agreement.disagrees}


def _sums(behind: Sums) -> dict[str, Any]:
    return {
        "tokens": behind.tokens,
        "change": behind.total,
        "size": behind.size / behind.tokens if behind.tokens else None,
        "largest": behind.largest,
        "above": _by_edge(behind.above),
    }


def _by_edge(values: Sequence[float]) -> dict[str, float]:
    return {f"{edge:g}": value for edge, value in zip(EDGES, values, strict=True)}


# `rescore --prompts`: whether a server sees the prompts of a log.


@dataclass(frozen=True, slots=True)
class PromptsRun:
    """A finished run of `--prompts`."""

    summary: PromptSummary
    scan: Summary
    worst: int
    """How many differences are shown."""
    pieces: Pieces
    """Ids as text."""


def prompt_verdict(summary: PromptSummary) -> str:
    """One sentence: whether the prompts of the log are the server's."""
    calls = many(sum(summary.compared.values()), "comparison")
    skipped = sum(number for number, _ in summary.skipped.values())
    rest = f" {many(skipped, 'comparison')} could not be made." if skipped else ""
    if not summary.differences:
        return f"The server has the tokens of the log in {calls}.{rest}"
    differing = sum(summary.differing.values())
    return f"The server has other tokens than the log in {differing:,} of {calls}.{rest}"


def _prompts_page(run: PromptsRun) -> Iterator[RenderableType]:
    summary = run.summary
    yield _title(summary, "prompts sent to")
    yield Text(prompt_verdict(summary), style="bold red" if summary.differences else "bold green")
    yield from heading("Calls, by how they were sent")
    rows = [
        (str(question), f"{summary.compared[question]:,}", f"{summary.differing[question]:,}")
        for question in Question
    ]
    yield _table(("", "compared", "different"), rows)
    if summary.differences:
        yield from heading(f"Where the server differs: {many(len(summary.differences), 'place')}")
    for differs in summary.differences[: run.worst]:
        yield Text(visible(f"  {differs}, {differs.question}"))
        yield Text(visible(f"    {differs.what}"))
        sides = [elided(visible(run.pieces(ids)), _TEXT_WIDTH) for ids in (differs.recorded, differs.server)]
        yield Text(f"    log {sides[0]} → server {sides[1]}")
    if len(summary.differences) > run.worst:
        yield Text(f"  … and {len(summary.differences) - run.worst:,} more; --report json lists all")
    lines = [
        f"{number:,} not {question}: {because} (first: {place})"
        for (question, because), (number, place) in summary.skipped.items()
    ]
    if summary.replayed:
        lines.append(f"{many(summary.replayed, 'token')} replayed")
    if summary.spliced:
        prompts = many(summary.spliced, "prompt")
        lines.append(f"{prompts} as the server would write it, except tokens kept from earlier calls")
    lines += run.scan.notices
    if lines:
        yield from heading("Notes")
        yield from (Text(visible(f"  {line}")) for line in lines)


def prompts_object(run: PromptsRun) -> dict[str, Any]:
    """The JSON object of a run of `--prompts`."""
    summary = run.summary
    counts = {
        "schema_version": 1,
        **pick(summary, "provider model rollouts"),
        **pick(run.scan, "tokenizer notices"),
        "failed": bool(summary.differences),
        "questions": [
            {"question": each, "compared": summary.compared[each], "differing": summary.differing[each]}
            for each in Question
        ],
        **pick(summary, "spliced replayed"),
        "skipped": [
            {"question": question, "because": because, "number": number, **pick(first, "file row item")}
            for (question, because), (number, first) in summary.skipped.items()
        ],
    }
    own = "turn where start end code cause what recorded server"
    differences = [
        {"question": differs.question, **pick(differs.place, "file row item"), **pick(differs, own)}
        for differs in summary.differences
    ]
    return {"summary": counts, "differences": differences}


PROMPT_REPORTS: dict[str, Callable[[PromptsRun, TextIO, ReportOptions], None]] = {
    "text": page_writer(_prompts_page),
    "json": json_writer(prompts_object),
}
