"""`tito-audit config`: the effective settings, and where each comes from."""

from __future__ import annotations

from typing import Annotated

import typer

from tito_audit.cli._command import command
from tito_audit.cli._given import Given


@command("config")
def config(
    given: Given,
    shape: str,
    schema: bool,
    no_config: bool,
    report: list[str],
    logs: Annotated[
        list[str] | None, typer.Argument(metavar="[LOG]...", help="Logs whose own settings are shown as well.")
    ] = None,
) -> None:
    """Show the effective settings and where each comes from: a file, a flag or the default.

    Takes the flags of the other commands, to show what they would change.
    """
    import sys
    from importlib.resources import files

    from tito_audit.cli._effective import as_object, effective, lines
    from tito_audit.report_objects import as_json
    from tito_audit.storage import find_logs
    from tito_audit.terminal.escape import inert, visible

    if schema:
        sys.stdout.write(files("tito_audit").joinpath("schemas/config.schema.json").read_text(encoding="utf-8"))
        return
    _refuse_what_no_run_takes(given, logs or [], report)
    found = effective(given.context, find_logs(logs or []))
    if shape == "json":
        print(as_json(as_object(found, no_config)))
        return
    for line in lines(found, given.flagged("config"), no_config):
        print(inert(visible(line)))


def _refuse_what_no_run_takes(given: Given, logs: list[str], report: list[str]) -> None:
    """SetupError for settings with which no run could start."""
    from tito_audit.cli._deliver import wanted_reports
    from tito_audit.formats import format_named
    from tito_audit.repairs import repair_named

    settings = given.settings()
    for format in (settings.format, *(one.changes.get("format") for one in settings.overrides)):
        if format is not None:
            format_named(format)
    for name in given.repair().strategies:
        repair_named(name)
    given.gate()
    wanted_reports(report, logs)
