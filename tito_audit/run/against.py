"""Two templates compared on the conversations of a log: `template --against`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tito_audit.errors import SetupError
from tito_audit.run.template import OpenedTemplate, log_probes, open_template
from tito_audit.settings.model import Settings
from tito_audit.templates.against import PromptsCompared, compare
from tito_audit.templates.probes import PROBES

_TEMPLATE_FILES = (".jinja", ".jinja2", ".j2")


@dataclass(frozen=True, slots=True)
class Compared:
    """Two templates, their prompts, and their ids if both have a tokenizer."""

    names: tuple[str, str]
    of_log: bool
    """Whether the conversations come from a log."""
    found: PromptsCompared
    equal_ids: int | None
    """How many of the equal prompts have the same ids with both tokenizers; None if there are not two."""

    @property
    def same(self) -> bool:
        """Whether both write the same, as far as was tried."""
        return not self.found.parted and self.equal_ids in (None, self.found.equal)


def compared(settings: Settings, logs: Sequence[str], other: str) -> Compared:
    """The template of these settings against another: a Jinja file, or the template of another tokenizer."""
    first = open_template(settings)
    second = _opened(settings, other)
    probes = tuple(log_probes(logs, settings)) if logs else PROBES
    found = compare(first.renderer, second.renderer, probes)
    names = first.name, other
    return Compared(names, bool(logs), found, _equal_ids(first, second, found))


def _opened(settings: Settings, other: str) -> OpenedTemplate:
    """The other template; SetupError names it, not the tokenizer that it is rendered with."""
    path = Path(other)
    if path.is_file():
        open_template(replace(settings, tokenizer=None, chat_template=other, template_name=None))
        return open_template(replace(settings, chat_template=other, template_name=None))
    if path.suffix in _TEMPLATE_FILES and not path.exists():
        raise SetupError(
            f"{other}: there is no such file, so there is nothing to compare with.\n"
            "Name a Jinja file, or a tokenizer as a folder or a hub name."
        )
    return open_template(replace(settings, tokenizer=other, chat_template=None, template_name=None))


def _equal_ids(first: OpenedTemplate, second: OpenedTemplate, found: PromptsCompared) -> int | None:
    mine, other = first.tokenizer, second.tokenizer
    if mine is None or other is None or mine is other or mine.name == other.name:
        return None
    return sum(np.array_equal(mine.encode(text), other.encode(text)) for text in found.texts)
