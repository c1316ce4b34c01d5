"""Rewriting: whether the template writes earlier turns of a log again in another way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tito_audit.errors import RenderError
from tito_audit.record.finding import Finding, Hit, Severity, Where
from tito_audit.record.message import Message
from tito_audit.record.rollout import Rollout, with_speakers
from tito_audit.record.speakers import Speakers
from tito_audit.render.renderer import Forms, Renderer
from tito_audit.terminal.shell import shell_word
from tito_audit.terminal.words import many

CODE = "TPL213"
_ROLLOUTS = 8
"""Most rollouts to look at."""
_ANSWERS = 3
"""Most answers of one to look at, the first ones and the last but one."""
_MESSAGES = 64
"""Most messages of a conversation to render."""
_SHOWN, _BEFORE = 40, 12
"""Characters to show of each side, and most of them before what differs."""


@dataclass(frozen=True, slots=True)
class _Rewritten:
    """A place where a text that the template wrote is not the start of a later one."""

    message: int
    """The answer up to which the earlier text goes."""
    was: str
    becomes: str
    """What stands there in both, from where they differ."""


def rewriting(head: Sequence[Rollout], renderer: Renderer, speakers: Speakers, tokenizer: str) -> Finding | None:
    """The finding that the template writes earlier turns of these rollouts again in another way; else None."""
    several = [one for one in (with_speakers(rollout, speakers) for rollout in head) if len(_answers(one)) > 1]
    looked = several[:_ROLLOUTS]
    found = [(one, place) for one in looked if (place := _rewritten(one, renderer)) is not None]
    if not found:
        return None
    first, place = found[0]
    here = f"row {first.place.row}" + (f", item {first.place.item}" if first.place.item else "")
    message = (
        f"the template is not append-only for {len(found)} of the first {many(len(looked), 'conversation')}: "
        f"after the answer in message {place.message} of {here} it writes {place.was!r}, and in a later prompt "
        f"{place.becomes!r}; `tito-audit template {shell_word(tokenizer)}` says where it breaks, and which "
        "argument would keep it"
    )
    hit = Hit(Where.LOG, 0, 0, message, cause="not append-only", severity=Severity.NOTE)
    return Finding(CODE, Severity.NOTE, first.place, hit)


def _answers(rollout: Rollout) -> list[int]:
    """The messages that were sampled."""
    return [place for place, message in enumerate(rollout.messages[:_MESSAGES]) if message.sampled and place]


def _rewritten(rollout: Rollout, renderer: Renderer) -> _Rewritten | None:
    """The first place where an earlier text is not the start of the last prompt; None without one."""
    *earlier, last = _answers(rollout)
    writer = _Writer(rollout, renderer)
    whole = writer.text(rollout.messages[:last], opens=True)
    if whole is None:
        return None
    for answer in (*earlier[: _ANSWERS - 1], *earlier[_ANSWERS - 1 :][-1:]):
        for messages, opens in ((rollout.messages[:answer], True), (rollout.messages[: answer + 1], False)):
            text = writer.text(messages, opens=opens)
            if text is not None and not whole.startswith(text.rstrip()):
                at = _start(text, _shared(text, whole))
                return _Rewritten(answer, text[at : at + _SHOWN], whole[at : at + _SHOWN])
    return None


def _start(text: str, at: int) -> int:
    """Where to begin to show what differs at a place: with its line, or what stands close before it."""
    return max(text.rfind("\n", 0, at) + 1, at - _BEFORE)


def _shared(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    differing = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))


@dataclass(slots=True)
class _Writer:
    """Renders parts of one conversation."""

    rollout: Rollout
    renderer: Renderer
    forms: Forms

    def __init__(self, rollout: Rollout, renderer: Renderer) -> None:
        self.rollout, self.renderer, self.forms = rollout, renderer, Forms()

    def text(self, messages: Sequence[Message], *, opens: bool) -> str | None:
        """What the template writes for some of the messages; None where it refuses them."""
        tools, kwargs = self.rollout.tools, self.rollout.template_kwargs
        fast = self.renderer.render_fast(
            messages, tools, add_generation_prompt=opens, template_kwargs=kwargs, forms=self.forms
        )
        if fast is not None:
            return fast
        try:
            return self.renderer.render(messages, tools, add_generation_prompt=opens, template_kwargs=kwargs)
        except RenderError:
            return None
