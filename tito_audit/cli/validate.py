"""`tito-audit validate`: shows the level of logs, and what they lack for the next."""

from __future__ import annotations

from contextlib import nullcontext

import typer
from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from tito_audit.cli._exit import FAILED
from tito_audit.cli._options import Options
from tito_audit.cli._outputs import print_result
from tito_audit.levels.facts import RecordLevel
from tito_audit.run.validate import validate_rollouts
from tito_audit.terminal.escape import visible
from tito_audit.terminal.terminal import RunProgress, show_progress
from tito_audit.terminal.words import listed, many, share


def validate(options: Options, logs: list[str]) -> None:
    """Show what logs hold, as the level of their record."""
    settings = options.settings()
    pace = RunProgress(limit=settings.limit)
    with nullcontext() if options.quiet else show_progress(pace):
        validated = validate_rollouts(logs, settings, pace)
    page: list[RenderableType] = []
    for log in validated.logs:
        page.append(Text(visible(log.file)).append(f": {log.level.in_words}", style="bold"))
        if not log.rollouts:
            page.append(Text("  The log holds no rollouts."))
        if log.formats:
            read = many(log.rollouts - log.unreadable, "rollout")
            page.append(Text(f"  {read} read as {listed([*log.formats])}, whose logs hold up to {log.holds}"))
        for level, number in log.levels.items() if len(log.levels) > 1 else ():
            first = visible(str(log.firsts[level]))
            page.append(Text(f"  {level!s:8}  {number:,} ({share(number, log.rollouts)}), first {first}"))
        for who, lines in log.groups():
            page.append(Text(visible(f"  For {RecordLevel(log.level + 1)}, {who}:")))
            for line, words in lines.items():
                page.append(Padding(Text(visible(f"- {listed(words)}: {line}")), (0, 0, 0, 4)))
        for unread in log.unread:
            page.append(Padding(Text(visible(f"{unread}.")), (0, 0, 0, 2)))
        if log.level >= RecordLevel.L3 and log.not_asked:
            page.append(Padding(Text(log.not_asked), (0, 0, 0, 2)))
        page.append(Text())
    if len(validated.logs) > 1:
        level = validated.level
        every = "Both" if len(validated.logs) == 2 else f"All {len(validated.logs):,}"
        page.append(Text(f"{every} logs: {level.in_words}"))
        page.append(Text())
    for because in validated.because:
        page.append(Text(visible(f"failed: {because}")))
    if validated.required and not validated.because:
        page.append(Text("passed"))
    print_result(options.shape, validated.as_object, page, (), options.config_notice())
    if validated.because:
        raise typer.Exit(FAILED)
