"""What `template` does with --training and --against."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from tito_audit.errors import SetupError
from tito_audit.settings.model import Settings


def train(settings: Settings, logs: Sequence[str], file: str, shape: str, *, force: bool) -> bool:
    """Search a training variant, write it if it is proved, and print the result; whether it was written."""
    from tito_audit.cli._template_training import Trained, page_lines, training_object, write_variant
    from tito_audit.run.template import log_probes, open_template
    from tito_audit.storage.atomic import refuse_target
    from tito_audit.templates.training import find_variant

    refuse_target(Path(file), overwrite=force)  # before the search, which takes seconds
    opened = open_template(settings)
    if opened.renderer.name is None and len(opened.renderer.templates) > 1:
        raise SetupError(
            f"{opened.name}: there is a template for conversations with tools, and one for those without.\n"
            "A variant is one template for both, so prompts would change.\n"
            f"Name the one to edit: --template-name {' or '.join(sorted(opened.renderer.templates))}."
        )
    log = tuple(log_probes(logs, settings)) if logs else ()
    trained = Trained(opened.name, find_variant(opened.renderer, log), Path(file))
    if trained.writes:
        write_variant(trained, force=force)
    _print(training_object(trained), page_lines(trained), shape)
    return trained.writes


def compare(settings: Settings, logs: Sequence[str], other: str, shape: str) -> bool:
    """Compare two templates on a log's conversations, or the built-in ones; whether they write the same."""
    from tito_audit.cli._template_against import against_object, page_lines
    from tito_audit.run.against import compared

    found = compared(settings, logs, other)
    _print(against_object(found), page_lines(found), shape)
    return found.same


def _print(as_object: dict[str, Any], page: Iterable[RenderableType], shape: str) -> None:
    from tito_audit.report import ReportOptions
    from tito_audit.report_objects import as_json
    from tito_audit.terminal.escape import inert
    from tito_audit.terminal.page import printed
    from tito_audit.terminal.terminal import colors, page_width

    if shape == "json":
        print(as_json(as_object))
        return
    options = ReportOptions(color=colors(sys.stdout), width=page_width())
    sys.stdout.writelines(inert(line) + "\n" for line in printed(list(page), options).splitlines())
