"""The flags by which a run read its logs, for commands to paste."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime

from tito_audit.settings.model import Settings


def joining_flags(settings: Settings) -> tuple[str, ...]:
    """The flags that join single calls as these settings do."""
    if not settings.join:
        return ("--no-join",)
    return ("--session", settings.session) if settings.session is not None else ()


def reading_flags(settings: Settings) -> tuple[str, ...]:
    """The flags that read and render rows as these settings do, without the tokenizer and those of joining."""
    return tuple(word for flag, value in _flags(settings) if value is not None for word in (flag, value))


def _flags(settings: Settings) -> Iterator[tuple[str, str | None]]:
    yield "--format", settings.format
    yield from (("--map", f"{ours}={theirs}") for ours, theirs in settings.columns.items())
    yield "--rows-at", settings.rows_at
    yield "--messages", settings.messages
    yield "--tools", settings.tools
    yield from (("--on", mine if mine == other else f"{mine}={other}") for mine, other in settings.on.items())
    yield "--chat-template", settings.chat_template
    yield "--template-name", settings.template_name
    yield from (
        ("--template-arg", f"{name}={json.dumps(value)}") for name, value in settings.template_args.items()
    )
    yield "--tool-arguments", None if settings.tool_arguments == "auto" else settings.tool_arguments
    clock = settings.clock
    yield "--clock", clock.isoformat() if isinstance(clock, datetime) else clock
    yield from (("--sampled-role", role) for role in settings.sampled_roles)
