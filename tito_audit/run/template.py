"""The template and tokenizer that `template` examines, and a log's conversations as probes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import numpy as np

from tito_audit.errors import SetupError
from tito_audit.record.rollout import with_speakers
from tito_audit.record.speakers import Speakers
from tito_audit.render.globals import Clock
from tito_audit.render.renderer import Renderer
from tito_audit.render.template import compile_template
from tito_audit.run.auditor import Loader
from tito_audit.run.log_groups import first_rows
from tito_audit.settings.model import Settings
from tito_audit.storage import find_logs
from tito_audit.templates.comparison import PromptComparison, compare_templates
from tito_audit.templates.probes import PROBES, Probe
from tito_audit.tokens.bounds import read_template
from tito_audit.tokens.tokenizer import Tokenizer

NO_TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
"""What a template gets as special tokens if there is no tokenizer to name them."""
_ROLLOUTS = 64


@dataclass(frozen=True, slots=True)
class OpenedTemplate:
    """A template to examine."""

    name: str
    """The tokenizer, or the file of the template."""
    renderer: Renderer
    tokenizer: Tokenizer | None


def open_template(settings: Settings) -> OpenedTemplate:
    """The template of these settings; SetupError if there is none. A template file needs no tokenizer."""
    if settings.tokenizer is None:
        if settings.chat_template is None:
            raise SetupError(
                "template: there is no template to look at.\n"
                "Name a tokenizer, as a folder or a hub name, or pass --chat-template FILE."
            )
        path = Path(settings.chat_template)
        try:
            source = read_template(path)
        except (OSError, UnicodeDecodeError) as error:
            raise SetupError(
                f"{path}: the chat template cannot be read ({error}).\nPass the path of a Jinja file in UTF-8."
            ) from None
        renderer = Renderer(
            templates={"default": compile_template(source, str(path), time_limit=settings.template_seconds)},
            special_tokens=NO_TOKENS,
            template_args=dict(settings.template_args),
            tool_arguments=settings.tool_arguments,
            clock=Clock(settings.clock) if isinstance(settings.clock, datetime) else None,
        )
        return OpenedTemplate(str(path), renderer, None)
    auditor, notice = Loader().auditor(settings)
    if auditor.renderer is None:
        raise SetupError(f"{settings.tokenizer}: there is no template to look at.\n{notice}")
    return OpenedTemplate(settings.tokenizer, auditor.renderer, auditor.tokenizer)


def log_probes(logs: Sequence[str], settings: Settings) -> tuple[Probe, ...]:
    """The conversations of a log's first rollouts that have a message after an answer."""
    files = find_logs(logs)
    first = first_rows(files, replace(settings, tokenizer=None, chat_template=None), _ROLLOUTS)
    speakers = Speakers(settings.sampled_roles)
    spoken = [with_speakers(rollout, speakers) for rollout in first.rollouts[:_ROLLOUTS]]
    return tuple(
        Probe(str(rollout.place), rollout.messages, rollout.tools, rollout.template_kwargs)
        for rollout in spoken
        if rollout.messages
    )


@dataclass(frozen=True, slots=True)
class Compared:
    """Two templates, their prompts, and their ids if both have a tokenizer."""

    names: tuple[str, str]
    of_log: bool
    """Whether the conversations come from a log."""
    found: PromptComparison
    equal_ids: int | None
    """How many of the equal prompts have the same ids with both tokenizers; None if there are not two."""

    @property
    def same(self) -> bool:
        """Whether both write the same, as far as was tried."""
        return not self.found.differing and self.equal_ids in (None, self.found.equal)


def compared(settings: Settings, logs: Sequence[str], other: str) -> Compared:
    """The template of these settings against another: a Jinja file, or the template of another tokenizer."""
    first = open_template(settings)
    second = opened_beside(settings, other)
    probes = tuple(log_probes(logs, settings)) if logs else PROBES
    differences = compare_templates(first.renderer, second.renderer, probes)
    names = first.name, other
    ours, theirs, equal_ids = first.tokenizer, second.tokenizer, None
    if ours is not None and theirs is not None and ours is not theirs and ours.name != theirs.name:
        equal_ids = sum(np.array_equal(ours.encode(text), theirs.encode(text)) for text in differences.texts)
    return Compared(names, bool(logs), differences, equal_ids)


def opened_beside(settings: Settings, other: str) -> OpenedTemplate:
    """The other template; SetupError names it, not the tokenizer that it is rendered with."""
    path = Path(other)
    if path.is_file():
        open_template(replace(settings, tokenizer=None, chat_template=other, template_name=None))
        return open_template(replace(settings, chat_template=other, template_name=None))
    if path.suffix in (".jinja", ".jinja2", ".j2") and not path.exists():
        raise SetupError(
            f"{other}: there is no such file, so there is nothing to compare with.\n"
            "Name a Jinja file, or a tokenizer as a folder or a hub name."
        )
    return open_template(replace(settings, tokenizer=other, chat_template=None, template_name=None))
