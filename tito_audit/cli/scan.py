"""`tito-audit scan`: audit logs, print reports."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import Annotated

import typer

from tito_audit.cli import _options as options

__all__ = ["scan"]


def scan(
    context: typer.Context,
    logs: Annotated[
        list[str],
        typer.Argument(
            metavar="LOG...", help="Files, folders or globs: .jsonl, .json, .parquet, .gz, .zst; .pt by name."
        ),
    ],
    tokenizer: options.Tokenizer = None,
    chat_template: options.ChatTemplate = None,
    template_name: options.TemplateName = None,
    template_arg: options.TemplateArgs = None,
    template_seconds: options.TemplateSeconds = options.TEMPLATE_SECONDS,
    tool_arguments: options.ToolArgumentsOption = options.ToolArgumentsWord.AUTO,
    format: options.FormatName = None,
    columns: options.Map = None,
    messages: options.Messages = None,
    tools: options.Tools = None,
    on: options.On = None,
    select: options.Select = None,
    ignore: options.Ignore = None,
    fail_on: Annotated[
        options.FailOnWord, typer.Option("--fail-on", help="Exit 1 if a finding is at least this severe.")
    ] = options.FailOnWord.ERROR,
    report: Annotated[
        list[str] | None,
        typer.Option(
            "--report",
            "-r",
            metavar="NAME[=FILE]",
            help="text, json or jsonl, to stdout or a file. Repeatable. [default: text]",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Stop after so many rows of all logs together.")
    ] = None,
    max_row_bytes: options.MaxRowBytes = options.MAX_ROW_BYTES,
    trust_remote_code: options.TrustRemoteCode = False,
    no_config: options.NoConfig = False,
    config: options.ConfigFile = None,
    jobs: options.Jobs = None,
    encoder: options.EncoderOption = options.EncoderWord.AUTO,
    worst: Annotated[int, typer.Option("--worst", min=0, help="Findings shown in full by the text report.")] = 10,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress, and no report that --report did not ask for.")
    ] = False,
) -> None:
    """Audit logs: what drifted, where, and what it did to training. Exits 1 if anything was found."""
    from tito_audit.cli._deliver import deliver, wanted_reports
    from tito_audit.cli._terminal import Pace, begun, colors, page_width, watched
    from tito_audit.jobs import can_fork, usable_cores
    from tito_audit.pipeline import scan_rollouts
    from tito_audit.record.finding import Severity
    from tito_audit.report import ReportOptions
    from tito_audit.rules import all_rules

    settings = options.settings_of(
        tokenizer=tokenizer,
        chat_template=chat_template,
        template_name=template_name,
        template_args=template_arg,
        template_seconds=template_seconds,
        tool_arguments=tool_arguments,
        format=format,
        columns=columns,
        messages=messages,
        tools=tools,
        on=on,
        select=select,
        ignore=ignore,
        fail_on=fail_on,
        limit=limit,
        max_row_bytes=max_row_bytes,
        trust_remote_code=trust_remote_code,
        jobs=jobs or (usable_cores() if can_fork() else 1),
        encoder=encoder,
    )
    wanted = wanted_reports(report or ([] if quiet else ["text"]), logs)
    # Lines that appear one by one and a line that moves would overwrite each other.
    live = any(one.path is None and one.report.name == "jsonl" for one in wanted) and sys.stdout.isatty()
    pace = Pace()
    run = scan_rollouts(logs, settings, pace)
    if (notice := options.about_config(context)) is not None:
        run.summary.notices.append(notice)
    page = ReportOptions(
        color=colors(sys.stdout),
        width=page_width(),
        worst=worst,
        titles={rule.code: rule.title for rule in all_rules()},
    )
    with closing(begun(watched(run, silent=quiet or live, pace=pace))) as results:
        deliver(results, run.summary, wanted, page)
    found = run.summary.worst()
    if settings.fail_on != "never" and found is not None and found >= Severity[settings.fail_on.upper()]:
        raise typer.Exit(1)
