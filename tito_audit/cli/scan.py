"""`tito-audit scan`: audit logs, print reports."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import Annotated

import typer

from tito_audit.cli import _complete
from tito_audit.cli import _options as options

__all__ = ["scan"]

_AT_ONCE = ("concise", "github", "jsonl")
"""Reports that write each finding when it comes."""


def scan(
    context: typer.Context,
    logs: Annotated[
        list[str],
        typer.Argument(
            metavar="LOG...",
            help="Files, folders, globs: .jsonl, .json, .parquet, .arrow, .gz, .zst; .pt by name.",
        ),
    ],
    tokenizer: options.Tokenizer = None,
    chat_template: options.ChatTemplate = None,
    template_name: options.TemplateName = None,
    template_arg: options.TemplateArgs = None,
    template_seconds: options.TemplateSeconds = options.TEMPLATE_SECONDS,
    tool_arguments: options.ToolArgumentsOption = options.ToolArgumentsWord.AUTO,
    sampled_roles: options.SampledRoles = None,
    format: options.FormatName = None,
    columns: options.Map = None,
    rows_at: options.RowsAt = None,
    messages: options.Messages = None,
    tools: options.Tools = None,
    on: options.On = None,
    select: options.Select = None,
    extend_select: options.ExtendSelect = None,
    ignore: options.Ignore = None,
    fail_on: Annotated[
        options.FailOnWord, typer.Option("--fail-on", help="Exit 1 if a finding is at least this severe.")
    ] = options.FailOnWord.ERROR,
    max_rate: options.MaxRates = None,
    baseline: options.Baseline = None,
    update_baseline: Annotated[
        bool,
        typer.Option(
            "--update-baseline",
            help="Write the baseline anew: what would fail is known from now on, what is fixed goes.",
        ),
    ] = False,
    report: Annotated[
        list[str] | None,
        typer.Option(
            "--report",
            "-r",
            metavar="NAME[=FILE]",
            autocompletion=_complete.reports,
            help="A report, to stdout or to a file; `tito-audit list reports` names them. Repeatable.",
        ),
    ] = None,
    output_format: Annotated[
        str | None,
        typer.Option(
            "--output-format",
            "-f",
            metavar="NAME",
            autocompletion=_complete.reports,
            help="The report that stands on stdout; everything else goes to stderr. [default: text]",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", metavar="N", min=1, help="Stop after so many rows of all logs together."),
    ] = None,
    sample: options.Sample = None,
    max_row_bytes: options.MaxRowBytes = options.MAX_ROW_BYTES,
    trust_remote_code: options.TrustRemoteCode = False,
    no_config: options.NoConfig = False,
    config: options.ConfigFile = None,
    jobs: options.Jobs = None,
    encoder: options.EncoderOption = options.EncoderWord.AUTO,
    worst: Annotated[
        int, typer.Option("--worst", metavar="N", min=0, help="Findings shown in full by the text report.")
    ] = 10,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet/--no-quiet", "-q", help="No progress, and no report that was not asked for by name."
        ),
    ] = False,
) -> None:
    """Audit logs: what drifted, where, and what it did to training. Exits 1 if anything fails the gate.

    A finding fails when it is at least as severe as --fail-on and the baseline does not hold it. Findings whose
    code has a --max-rate (the longest beginning of the code counts) are judged together in place of one by one:
    they fail when there are more of them for each generated token, or rollout, than the rate. With --fail-on never
    rates count findings of every severity.
    """
    from tito_audit.cli._deliver import deliver, wanted_reports
    from tito_audit.cli._exits import FAILED
    from tito_audit.gate import gate_rollouts
    from tito_audit.report import ReportOptions
    from tito_audit.rules import all_rules
    from tito_audit.run.workers import can_fork, usable_cores
    from tito_audit.terminal.terminal import RunProgress, colors, compute_first, page_width, with_progress

    settings = options.settings_of(
        tokenizer=tokenizer,
        chat_template=chat_template,
        template_name=template_name,
        template_args=template_arg,
        template_seconds=template_seconds,
        tool_arguments=tool_arguments,
        sampled_roles=sampled_roles,
        format=format,
        columns=columns,
        rows_at=rows_at,
        messages=messages,
        tools=tools,
        on=on,
        select=select,
        extend_select=extend_select,
        ignore=ignore,
        fail_on=fail_on,
        limit=limit,
        sample=sample,
        max_row_bytes=max_row_bytes,
        trust_remote_code=trust_remote_code,
        jobs=jobs or (usable_cores() if can_fork() else 1),
        encoder=encoder,
        overrides=options.overrides_of(context),
    )
    gate = options.gate_settings_of(max_rate=max_rate, baseline=baseline, update_baseline=update_baseline)
    flags = [options.on_command_line(context, name) for name in ("report", "output_format")]
    inputs = options.inputs_of(context, settings)
    wanted = wanted_reports(
        report or [], logs, baseline, inputs=inputs, output_format=output_format, quiet=quiet, flags=flags
    )
    # Lines that appear one by one and a line that moves would overwrite each other.
    live = any(one.path is None and one.report.name in _AT_ONCE for one in wanted) and sys.stdout.isatty()
    pace = RunProgress()
    run = gate_rollouts(logs, settings, gate, pace, observe=any(one.report.observes for one in wanted))
    if (notice := options.about_config(context)) is not None:
        run.summary.notices.append(notice)
    page = ReportOptions(
        color=colors(sys.stdout),
        width=page_width(),
        worst=worst,
        titles={rule.code: rule.title for rule in all_rules()},
        docs={rule.code: rule.doc for rule in all_rules()},
        ran=run.codes,
        fails=run.fails,
    )
    with closing(compute_first(with_progress(run, silent=quiet or live, pace=pace))) as results:
        deliver(results, run.summary, wanted, page)
    if run.summary.gate is not None and run.summary.gate.failed:
        raise typer.Exit(FAILED)
