"""What `template --against` found: a page, and one JSON object."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from tito_audit.run.against import Compared
from tito_audit.templates.against import Cause, Parted
from tito_audit.terminal.cut import elided
from tito_audit.terminal.escape import visible
from tito_audit.terminal.words import many

_BEFORE, _AFTER = 30, 70


def page_lines(compared: Compared) -> Iterator[RenderableType]:
    """How many prompts are equal, and the first one of each kind that is not."""
    found = compared.found
    line = Text("tito-audit template ", style="bold").append(visible(compared.names[0]))
    yield line.append(" against ", style="bold").append(visible(compared.names[1]))
    of = "the log's" if compared.of_log else "the built-in conversations'"
    style = "bold green" if compared.same else "bold red"
    yield Text(f"{found.equal:,} of {found.prompts:,} of {of} prompts are equal.", style=style)
    if compared.equal_ids is not None and found.equal:
        yield Text(f"{compared.equal_ids:,} of them have the same ids with both tokenizers.")
    for cause, group in found.by_cause().items():
        yield Text()
        yield Text(f"{cause}", style="bold red").append(f" · {many(len(group), 'prompt')}", style="")
        yield from _sides(group[0], compared.names)


def _sides(one: Parted, names: tuple[str, str]) -> Iterator[Text]:
    yield Text(f"  {visible(one.probe.name)}, the prompt of message {one.count}", style="dim")
    width = max(map(len, names))
    for name, text, style in zip(names, (one.first, one.second), ("red", "green"), strict=True):
        line = Text(f"  {visible(name):<{width}} ", style="dim")
        if one.cause in (Cause.REFUSED, Cause.BOTH_REFUSE):
            yield line.append(visible(elided(text, _AFTER)))
            continue
        before = ("…" if one.at > _BEFORE else "") + text[max(one.at - _BEFORE, 0) : one.at]
        line.append(visible(before)).append("│").append(
            visible(elided(text[one.at :], _AFTER)) or "∅", style=style
        )
        yield line


def against_object(compared: Compared) -> dict[str, Any]:
    """The same as one JSON object."""
    found = compared.found
    return {
        "schema_version": 1,
        "template": compared.names[0],
        "against": compared.names[1],
        "of_log": compared.of_log,
        "prompts": found.prompts,
        "equal": found.equal,
        "equal_ids": compared.equal_ids,
        "differences": [
            {"cause": cause, "prompts": len(group), "first": _difference(group[0])}
            for cause, group in found.by_cause().items()
        ],
    }


def _difference(one: Parted) -> dict[str, Any]:
    begin = max(one.at - _BEFORE, 0)
    return {
        "conversation": one.probe.name,
        "message": one.count,
        "at": one.at,
        "texts": [text[begin : one.at + 200] for text in (one.first, one.second)],
    }
