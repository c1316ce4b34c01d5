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
from tito_audit.run.log_groups import read_first_rows
from tito_audit.settings.model import Settings
from tito_audit.storage import find_logs
from tito_audit.templates.comparison import PromptComparison, compare_prompts
from tito_audit.templates.probes import PROBES, Probe
from tito_audit.tokens.bounds import read_template
from tito_audit.tokens.tokenizer import Tokenizer

PLACEHOLDER_TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
"""The special tokens that a template gets without a tokenizer."""
_MOST_ROLLOUTS = 64


@dataclass(frozen=True, slots=True)
class OpenedTemplate:
    """A template to examine."""

    name: str
    """The name of the tokenizer or of the template file."""
    renderer: Renderer
    tokenizer: Tokenizer | None


def open_template(settings: Settings) -> OpenedTemplate:
    """The template that the settings name, a file also without a tokenizer; SetupError if there is none."""
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
            special_tokens=PLACEHOLDER_TOKENS,
            template_args=dict(settings.template_args),
            tool_arguments=settings.tool_arguments,
            clock=Clock(settings.clock) if isinstance(settings.clock, datetime) else None,
        )
        return OpenedTemplate(str(path), renderer, None)
    auditor, notice = Loader().load_auditor(settings)
    if auditor.renderer is None:
        raise SetupError(f"{settings.tokenizer}: there is no template to look at.\n{notice}")
    return OpenedTemplate(settings.tokenizer, auditor.renderer, auditor.tokenizer)


def log_probes(logs: Sequence[str], settings: Settings) -> tuple[Probe, ...]:
    """The conversations of the first rollouts of logs."""
    files = find_logs(logs)
    first = read_first_rows(files, replace(settings, tokenizer=None, chat_template=None), _MOST_ROLLOUTS)
    speakers = Speakers(settings.sampled_roles)
    spoken = [with_speakers(rollout, speakers) for rollout in first.rollouts[:_MOST_ROLLOUTS]]
    return tuple(
        Probe(str(rollout.place), rollout.messages, rollout.tools, rollout.template_kwargs)
        for rollout in spoken
        if rollout.messages
    )


@dataclass(frozen=True, slots=True)
class TemplateComparison:
    """What two templates write for the same conversations."""

    names: tuple[str, str]
    of_log: bool
    """Whether the conversations come from a log."""
    prompts: PromptComparison
    equal_ids: int | None
    """How many of the equal prompts have equal ids with both tokenizers; None if there are not two tokenizers."""

    @property
    def same(self) -> bool:
        """Whether all prompts and ids that were compared are equal."""
        return not self.prompts.differing and self.equal_ids in (None, self.prompts.equal)


def compare_templates(settings: Settings, logs: Sequence[str], other: str) -> TemplateComparison:
    """Compare the template of the settings with another: a Jinja file, or that of another tokenizer."""
    first = open_template(settings)
    second = open_other_template(settings, other)
    probes = tuple(log_probes(logs, settings)) if logs else PROBES
    differences = compare_prompts(first.renderer, second.renderer, probes)
    names = first.name, other
    ours, theirs, equal_ids = first.tokenizer, second.tokenizer, None
    if ours is not None and theirs is not None and ours is not theirs and ours.name != theirs.name:
        equal_ids = sum(np.array_equal(ours.encode(text), theirs.encode(text)) for text in differences.texts)
    return TemplateComparison(names, bool(logs), differences, equal_ids)


def open_other_template(settings: Settings, other: str) -> OpenedTemplate:
    """Open the other template: a Jinja file, rendered with the settings' tokenizer, or that of a tokenizer."""
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
