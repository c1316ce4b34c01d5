"""Rewriting: whether the template writes earlier turns of a log again in another way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tito_audit.errors import RenderError
from tito_audit.record.finding import Finding, Hit, Severity, Where
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


def rewriting(
    head: Sequence[Rollout], renderer: Renderer, speakers: Speakers, template: Sequence[str]
) -> Finding | None:
    """The finding that the template writes earlier turns of these rollouts again in another way; else None.

    `template` are the words after `tito-audit template` that name it.
    """
    several = [one for one in (with_speakers(rollout, speakers) for rollout in head) if len(_answers(one)) > 1]
    looked = several[:_ROLLOUTS]
    found = [(one, place) for one in looked if (place := _rewritten(one, renderer)) is not None]
    if not found:
        return None
    first, place = found[0]
    here = f"row {first.place.row}" + (f", item {first.place.item}" if first.place.item else "")
    command = " ".join(map(shell_word, ("tito-audit", "template", *template)))
    message = (
        f"the template is not append-only for {len(found)} of the first {many(len(looked), 'conversation')}: "
        f"after the answer in message {place.message} of {here} it writes {place.was!r}, and in a later prompt "
        f"{place.becomes!r}; `{command}` says where it breaks, and which argument would keep it"
    )
    hit = Hit(Where.LOG, 0, 0, message, cause="not append-only", severity=Severity.NOTE)
    return Finding(CODE, Severity.NOTE, first.place, hit)


def _answers(rollout: Rollout) -> list[int]:
    """The messages that were sampled."""
    return [place for place, message in enumerate(rollout.messages[:_MESSAGES]) if message.sampled and place]


def _rewritten(rollout: Rollout, renderer: Renderer) -> _Rewritten | None:
    """The first place where an earlier text is not the start of the last prompt; None without one.

    What the faster engine shows counts only where the reference shows the same.
    """
    forms = Forms()
    found = _place(rollout, partial(renderer.guess, forms=forms))
    return found and _place(rollout, partial(_by_reference, renderer))


def _by_reference(renderer: Renderer, *messages: Any, **how: Any) -> str | None:
    """What the template writes; None where it refuses the messages."""
    try:
        return renderer.render(*messages, **how)
    except RenderError:
        return None


def _place(rollout: Rollout, render: Callable[..., str | None]) -> _Rewritten | None:
    *earlier, last = _answers(rollout)
    render = partial(render, tools=rollout.tools, template_kwargs=rollout.template_kwargs)
    whole = render(rollout.messages[:last], add_generation_prompt=True)
    if whole is None:
        return None
    for answer in (*earlier[: _ANSWERS - 1], *earlier[_ANSWERS - 1 :][-1:]):
        for messages, opens in ((rollout.messages[:answer], True), (rollout.messages[: answer + 1], False)):
            text = render(messages, add_generation_prompt=opens)
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
