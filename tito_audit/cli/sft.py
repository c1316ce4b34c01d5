"""`tito-audit sft`: shows what a trainer would make of chat data, before it is tokenized."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from tito_audit.cli._exit import FAILED
from tito_audit.cli._options import Options
from tito_audit.cli._outputs import print_object
from tito_audit.errors import SetupError
from tito_audit.report import ReportOptions
from tito_audit.report_objects import pick
from tito_audit.run.log_groups import reading_flags
from tito_audit.run.sft import PreFlight
from tito_audit.sft.preflight import ADVICE, PlannedRow
from tito_audit.terminal.escape import elided, shell_word, visible
from tito_audit.terminal.page import STYLES, heading, open_page, print_commands, print_list, print_parts, wrap
from tito_audit.terminal.sequence import DrawOptions, TokenLine, draw_tokens
from tito_audit.terminal.terminal import RunProgress, colors, page_width, with_progress
from tito_audit.terminal.words import many, share

_SEVERITY_WIDTH = 9
"""The width of the severity in front of a problem."""


def sft(options: Options, logs: list[str]) -> None:
    """Show what SFT would train of chat data before it is tokenized."""
    pace = RunProgress()
    run = PreFlight(logs, options.settings(), options.against, options.max_length, pace)
    shown, first = None, None
    for planned in with_progress(run, pace, silent=options.quiet):
        first = planned if first is None and len(planned.ids) else first
        if planned.place.row == options.row and shown is None:
            shown = planned
    if options.row is not None and shown is None:
        raise SetupError(
            f"--row {options.row}: there is no such row; there are {run.plan.rows:,}, counted from 0."
        )
    shown = shown or first
    if options.shape == "json":
        print_object(_plan_object(run, shown))
    else:
        with open_page(sys.stdout, ReportOptions(color=colors(sys.stdout), width=page_width())) as console:
            print_parts(console, _plan_lines(run, console))
            if shown is not None:
                vocabulary = run.reference.vocabulary
                look = DrawOptions(
                    width=page_width(),
                    encoding=sys.stdout.encoding or "utf-8",
                    piece=vocabulary.piece,
                    control=vocabulary.special_ids,
                    full=options.full,
                    ids=options.ids,
                )
                trained = f"{int(shown.trained.sum()):,} trained (marked =)"
                title = f"{shown.place} · {many(len(shown.ids), 'token')}, {trained}"
                print_parts(console, heading(visible(title)))
                for some in draw_tokens(TokenLine(shown.ids, shown.trained), look):
                    print_parts(console, some.lines)
            notes = [_NO_MARKERS] if run.plan.answers and not run.has_markers else []
            notes += [visible(notice)] if (notice := options.config_notice()) is not None else []
            print_list(console, "Note", notes)
            if run.plan.answers:
                words = run.logs[0], "--to", "sft", "-o", "OUT", "-t", run.settings.tokenizer or ""
                command = f"tito-audit convert {' '.join(map(shell_word, (*words, *reading_flags(run.settings))))}"
                print_commands(console, "Next", [f"{command}   the ids and labels that are shown here"])
            if not run.plan.rows:
                console.print(Text("nothing to train: there are no rows"))
    if run.plan.failed or not run.plan.rows:
        raise typer.Exit(FAILED)


def _plan_object(run: PreFlight, shown: PlannedRow | None) -> dict[str, Any]:
    """The JSON object: counts of the set, its problems with the first row of each, and one row as tokens."""
    plan = run.plan
    piece = run.reference.vocabulary.piece
    return {
        **pick(plan, "rows tokens trained answers ends longest nothing"),
        "generation_markers": run.has_markers,
        "tokenizer": run.settings.tokenizer,
        "against": run.against,
        "max_length": run.planner.max_length,
        "problems": [
            {
                "problem": problem.value,
                "severity": plan.severity(problem).word,
                "rows": count.rows,
                "first": pick(count.first, "file row item"),
                "shown": count.shown,
            }
            for problem, count in plan.problems.items()
        ],
        "row": None
        if shown is None
        else {
            **pick(shown.place, "file row item"),
            "ids": shown.ids.tolist(),
            "pieces": list(map(piece, shown.ids.tolist())),
            "trained": shown.trained.tolist(),
        },
    }


_NO_MARKERS = (
    "The template has no {% generation %} markers, so `assistant_only_loss=True` of TRL would train nothing (it "
    "raises an error). What is trained here is what the rendering shows the assistant wrote; `convert --to sft` "
    "writes it as labels."
)


def _plan_lines(run: PreFlight, console: Console) -> Iterator[Text]:
    """What would be trained, then each problem with the first row that has it."""
    plan = run.plan
    yield Text("tito-audit sft ", style="bold").append(visible(", ".join(run.logs[:3])))
    facts = [many(plan.rows, "row"), many(plan.answers, "trained answer"), many(plan.tokens, "token")]
    longest = f"longest row {many(plan.longest, 'token')}"
    length = run.planner.max_length
    yield Text(" · ".join([*facts, longest, *([f"cut at {length:,}"] if length is not None else [])]))
    words = f"{plan.trained:,} of {many(plan.tokens, 'token')} trained ({share(plan.trained, plan.tokens)})"
    words += f", ends in {plan.ends:,} of {many(plan.answers, 'turn')}"
    words += f", nothing in {many(plan.nothing, 'row')}" if plan.nothing else ""
    yield Text(words, style="bold red" if not plan.trained else "")
    by = "its {% generation %} markers" if run.has_markers else "what the rendering shows of each answer"
    yield Text(visible(f"tokenizer {run.settings.tokenizer}, mask by {by}"))
    yield Text()
    if not plan.problems:
        yield Text("No problem was found.", style="green")
    ranked = sorted(plan.problems.items(), key=lambda item: (-plan.severity(item[0]), -item[1].rows))
    for problem, count in ranked:
        severity = plan.severity(problem)
        line = Text(f"{severity.word:<{_SEVERITY_WIDTH}}", style=STYLES[severity])
        words = f"{many(count.rows, 'row')} ({share(count.rows, plan.rows)}): {problem}"
        yield line.append(words, style="not bold default")
        example = f"{count.first}: {elided(count.shown, 160)}"
        for words, style in ((example, "dim"), (f"→ {ADVICE[problem]}", "")):
            width, indent = console.width - _SEVERITY_WIDTH - 2, " " * _SEVERITY_WIDTH
            yield from wrap(Text(visible(words), style=style), console, width, indent)
