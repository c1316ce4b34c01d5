"""Adoption: what the first prompts of a log were written with, where that is not what the settings say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from tito_audit.evidence.first_prompt import FirstPrompt, first_prompt
from tito_audit.evidence.own_date import at, has_clock, own_date
from tito_audit.evidence.reference import Reference
from tito_audit.identify import Explanation, NamedTemplate
from tito_audit.record.finding import Finding, Hit, Severity, Where
from tito_audit.record.rollout import Rollout, with_speakers
from tito_audit.record.speakers import Speakers
from tito_audit.render.renderer import Renderer
from tito_audit.settings.model import NO_TOOLS, RECORDED, Settings
from tito_audit.terminal.shell import shell_word
from tito_audit.terminal.words import listed, many
from tito_audit.tokens.tokenizer import Tokenizer

CODES = frozenset(("REC011", "TPL210", "TPL212"))
"""The findings of an adoption."""
_FIRST = 3
"""How many prompts are rendered if they come out as they should."""
_LEAST = 3
"""How many prompts there must be."""
_SHARE = 0.75
"""The share of the prompts that an explanation has to write exactly."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """What a log is audited with in place of what was given."""

    finding: Finding
    """The one finding of the log, which says so."""
    renderer: Renderer
    own_dates: bool
    """Whether each rollout is rendered on the date that its first prompt holds."""


@dataclass(frozen=True, slots=True)
class _Log:
    """The first prompts of a log and what it is audited with."""

    prompts: Sequence[FirstPrompt]
    tokenizer: Tokenizer
    renderer: Renderer
    settings: Settings

    def written(self, prompt: FirstPrompt, renderer: Renderer) -> bool:
        """Whether a renderer writes the text of a prompt."""
        return prompt.is_written(Reference(self.tokenizer, renderer))

    def own(self, prompt: FirstPrompt, renderer: Renderer) -> Renderer:
        """The renderer on the date that a prompt holds."""
        found = own_date(prompt, self.tokenizer, renderer)
        return renderer if found is None else at(renderer, found)


def adopted(
    head: Sequence[Rollout],
    tokenizer: Tokenizer,
    renderer: Renderer,
    settings: Settings,
    codes: frozenset[str],
) -> Adopted | None:
    """What the first rollouts of a log prove that it was written with; None where the settings fit, or nothing
    else does."""
    speakers = Speakers(settings.sampled_roles)
    found = (first_prompt(with_speakers(rollout, speakers)) for rollout in head)
    log = _Log([one for one in found if one is not None], tokenizer, renderer, settings)
    if len(log.prompts) < _LEAST:
        return None
    fits = _fitting(log)
    if fits is None:
        return None
    for way in _ways(log):
        if way.code in codes and way.writes(log) >= _SHARE * len(log.prompts):
            return way.adopted(log, fits)
    return None


def _fitting(log: _Log) -> int | None:
    """How many prompts come out as the settings say; None if most of them do."""
    own = log.settings.clock == RECORDED
    right: Callable[[FirstPrompt], bool] = lambda one: log.written(  # noqa: E731
        one, log.own(one, log.renderer) if own else log.renderer
    )
    prompts = log.prompts
    few = prompts[:: max(len(prompts) // _FIRST, 1)][:_FIRST]
    if 2 * sum(map(right, few)) > len(few):
        return None
    all_ = sum(map(right, prompts))
    return None if 2 * all_ >= len(prompts) else all_
