"""The date in a rollout's own prompt, for templates that write one."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from tito_audit.evidence.first_prompt import FirstPrompt, first_prompt
from tito_audit.evidence.reference import Reference
from tito_audit.record.rollout import Rollout
from tito_audit.render.dates import Probe, date_in, reads_clock
from tito_audit.render.globals import Clock
from tito_audit.render.renderer import Renderer
from tito_audit.tokens.tokenizer import Tokenizer


def has_clock(renderer: Renderer) -> bool:
    """Whether its templates may write the date."""
    return any(reads_clock(template.source) for template in renderer.templates.values())


def at(renderer: Renderer, moment: datetime) -> Renderer:
    """The renderer with its clock stopped at this moment."""
    return replace(renderer, clock=Clock(moment))


def own_date(prompt: FirstPrompt, tokenizer: Tokenizer, renderer: Renderer) -> datetime | None:
    """The date that the template wrote into a recorded prompt; None if it wrote none there."""
    reference = Reference(tokenizer, replace(renderer, clock=Probe()))
    probed = prompt.text(reference)
    return None if probed is None else date_in(probed, prompt.recorded(reference, len(probed)))


def at_own_date(rollout: Rollout, tokenizer: Tokenizer, renderer: Renderer) -> Renderer:
    """The renderer at the date in the rollout's first prompt; unchanged if there is none."""
    prompt = first_prompt(rollout) if has_clock(renderer) else None
    found = own_date(prompt, tokenizer, renderer) if prompt is not None else None
    return renderer if found is None else at(renderer, found)
