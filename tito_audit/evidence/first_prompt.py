"""The first prompt of a rollout: what a template wrote before anything was sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import numpy as np

from tito_audit.errors import RenderError
from tito_audit.evidence.prompts import prompt_messages
from tito_audit.evidence.reference import Reference
from tito_audit.record.arrays import Ids
from tito_audit.record.message import Message
from tito_audit.record.rollout import Rollout, visible_part
from tito_audit.render.dates import ClockProbe, date_in, reads_clock
from tito_audit.render.globals import Clock
from tito_audit.render.renderer import Renderer
from tito_audit.tokens.tokenizer import Tokenizer

_LONGEST = 1 << 16
"""The most recorded ids that are decoded."""


@dataclass(frozen=True, slots=True)
class FirstPrompt:
    """The messages and the recorded ids of a first prompt."""

    rollout: Rollout
    messages: Sequence[Message]
    ids: Ids
    """`[N]` the prompt; in a training row, also what follows it."""
    whole: bool
    """Whether nothing follows the prompt."""

    def text(self, reference: Reference) -> str | None:
        """What the template writes for it, by a faster engine where possible; None where it cannot be rendered."""
        assert reference.renderer is not None
        rollout = self.rollout
        return reference.renderer.guess(
            self.messages, rollout.tools, add_generation_prompt=True, template_kwargs=rollout.template_kwargs
        )

    def recorded(self, reference: Reference, characters: int) -> str:
        """The text of the recorded ids, at least its first `characters`."""
        return reference.text(self.ids[: min(characters + 1, _LONGEST)] if not self.whole else self.ids)

    def is_written(self, reference: Reference) -> bool:
        """Whether the template writes what was recorded, in these tokens or in others for the same text."""
        text = self.text(reference)
        if text is None:
            return False
        recorded = self.recorded(reference, len(text))
        if recorded == text if self.whole else recorded.startswith(text):
            return True
        return self.has_ids_of(text, reference)

    def is_exact(self, reference: Reference) -> bool:
        """Whether what the template itself writes encodes as exactly the recorded ids."""
        rollout = self.rollout
        try:
            text = reference.render(self.messages, rollout.tools, rollout.template_kwargs, opens_answer=True)
        except RenderError:
            return False
        return self.has_ids_of(text, reference)

    def has_ids_of(self, text: str, reference: Reference) -> bool:
        """Whether a text encodes as the recorded ids; in a row, its last token may merge with what follows."""
        # No thread may start: processes are forked later.
        (ids,) = reference.tokenizer.encode_alone([text])
        if self.whole:
            return np.array_equal(ids, self.ids)
        return len(ids) > 1 and np.array_equal(ids[:-1], self.ids[: len(ids) - 1])


def first_prompt(rollout: Rollout) -> FirstPrompt | None:
    """The first prompt of a rollout: its first call's, else its training row's; None where the log has none."""
    if rollout.turns:
        ids, sent = rollout.turns[0].prompt_ids, prompt_messages(rollout, 0)
        return None if ids is None or not len(ids) or not sent else FirstPrompt(rollout, sent, ids, whole=True)
    row = rollout.training_row
    answer = next((place for place, message in enumerate(rollout.messages) if message.sampled), 0)
    if row is None or not answer:
        return None
    start, end = visible_part(row)
    return FirstPrompt(rollout, rollout.messages[:answer], row.token_ids[start:end], whole=False)


# The date in a rollout's own prompt, for templates that write one


def has_clock(renderer: Renderer) -> bool:
    """Whether its templates may write the date."""
    return any(reads_clock(template.source) for template in renderer.templates.values())


def at(renderer: Renderer, moment: datetime) -> Renderer:
    """The renderer with its clock stopped at this moment."""
    return replace(renderer, clock=Clock(moment))


def own_date(prompt: FirstPrompt, tokenizer: Tokenizer, renderer: Renderer) -> datetime | None:
    """The date that the template wrote into a recorded prompt; None if it wrote none there."""
    reference = Reference(tokenizer, replace(renderer, clock=ClockProbe()))
    probed = prompt.text(reference)
    return None if probed is None else date_in(probed, prompt.recorded(reference, len(probed)))


def at_own_date(rollout: Rollout, tokenizer: Tokenizer, renderer: Renderer) -> Renderer:
    """The renderer at the date in the rollout's first prompt; unchanged if there is none."""
    prompt = first_prompt(rollout) if has_clock(renderer) else None
    moment = own_date(prompt, tokenizer, renderer) if prompt is not None else None
    return renderer if moment is None else at(renderer, moment)
