"""Adoption: what a log's first prompts were written with, if the settings say otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tito_audit.evidence.first_prompt import FirstPrompt, at, first_prompt, own_date
from tito_audit.evidence.reference import Reference
from tito_audit.record.finding import Finding, Hit, Where
from tito_audit.record.rollout import Rollout, with_speakers
from tito_audit.record.speakers import Speakers
from tito_audit.render.renderer import Renderer
from tito_audit.run.headlines import headed
from tito_audit.settings.model import RECORDED, Settings
from tito_audit.terminal.words import many
from tito_audit.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tito_audit.run.change import Change

CODES = frozenset(("REC011", "TPL210", "TPL212"))
"""Codes of the finding that a log was not written with these settings."""
_FIRST = 3
"""How many prompts are rendered if they all match."""
_LEAST = 3
"""The fewest prompts that allow a conclusion."""
_RIGHT = 0.8
"""The share of the prompts that must match for the settings to fit."""
_SHARE = 0.75
"""The share of the prompts that an explanation must write exactly."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """What a log is audited with instead of what was given."""

    finding: Finding
    """The finding about the log that says so."""
    renderer: Renderer
    own_dates: bool
    """Whether each rollout is rendered on the date that its first prompt holds."""


def adopted(
    head: Sequence[Rollout],
    tokenizer: Tokenizer,
    renderer: Renderer,
    settings: Settings,
    codes: frozenset[str],
) -> Adopted | None:
    """What the first rollouts prove that a log was written with, if a finding of these codes may say so.

    None if the settings fit, or if nothing else certainly does. EncodeError if the tokenizer cannot encode the
    prompts.
    """
    speakers = Speakers(settings.sampled_roles)
    rollouts = [with_speakers(rollout, speakers) for rollout in head]
    prompts = [prompt for prompt in map(first_prompt, rollouts) if prompt is not None]
    reading_given = _Reading(tokenizer, renderer, own_dates=settings.clock == RECORDED)
    if len(prompts) < _LEAST or reading_given.fits(prompts):
        return None
    from tito_audit.run.change import changes_of  # slow to import, and rarely needed

    right = sum(map(reading_given.writes, prompts))
    # If many prompts match as given, an explanation must write those and all others.
    least = _SHARE * len(prompts) if 2 * right < len(prompts) else len(prompts)
    for change in changes_of(rollouts, prompts, tokenizer, renderer, settings):
        reading = replace(reading_given, renderer=change.renderer, own_dates=change.own_dates)
        exact = reading.exact(prompts)
        if exact >= least:
            return _adopted(change, reading, exact, right, prompts) if change.code in codes else None
    return None


def _adopted(change: Change, reading: _Reading, exact: int, right: int, prompts: Sequence[FirstPrompt]) -> Adopted:
    """An adopted change, with the finding that says so."""
    of = many(len(prompts), "prompt")
    message = (
        f"{change.says}: {exact:,} of the first {of} match exactly that way, {right or 'none'} as given; "
        f"the log is audited that way; {change.advice}"
    )
    hit = Hit(Where.LOG, 0, 0, message, cause=change.cause, severity=change.severity)
    finding = headed(Finding(change.code, change.severity, prompts[0].rollout.place, hit))
    return Adopted(finding, reading.renderer, reading.own_dates)


@dataclass(frozen=True, slots=True)
class _Reading:
    """What prompts are rendered and encoded with."""

    tokenizer: Tokenizer
    renderer: Renderer
    own_dates: bool

    def fits(self, prompts: Sequence[FirstPrompt]) -> bool:
        """Whether it writes most prompts; usually a few show it."""
        few = prompts[:: max(len(prompts) // _FIRST, 1)][:_FIRST]
        if all(map(self.writes, few)):
            return True
        return sum(map(self.writes, prompts)) > _RIGHT * len(prompts)

    def writes(self, prompt: FirstPrompt) -> bool:
        """Whether it writes the text of a prompt."""
        return prompt.is_written(self._reference(prompt))

    def exact(self, prompts: Sequence[FirstPrompt]) -> int:
        """How many prompts it writes in exactly the recorded tokens."""
        return sum(prompt.is_exact(self._reference(prompt)) for prompt in prompts)

    def _reference(self, prompt: FirstPrompt) -> Reference:
        date = own_date(prompt, self.tokenizer, self.renderer) if self.own_dates else None
        return Reference(self.tokenizer, self.renderer if date is None else at(self.renderer, date))
