"""Words of the page of `inspect`."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from tito_audit.inspect import Role
from tito_audit.terminal.cut import elided
from tito_audit.terminal.escape import visible

IDS = (Role.IDS, Role.PROMPT_IDS, Role.COMPLETION_IDS)
_PATH = 48
"""Characters of a path to show."""


def title(words: str) -> Iterator[Text]:
    """A heading, after an empty line."""
    yield Text()
    yield Text(words, style="bold")


def short(path: str) -> str:
    """A path for the page: on one line, cut to fit."""
    return visible(elided(path, _PATH))


def number(value: float) -> str:
    """`151643`, `-0.39`: whole numbers in full, others with four digits; zero without a sign."""
    if value == int(value) and abs(value) < 1e15:
        return f"{value:.0f}" if value else "0"
    return f"{value:.4g}"
