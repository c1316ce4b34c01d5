"""Rewriting: whether the template writes earlier turns of a log differently in later prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tito_audit.errors import RenderError
from tito_audit.record.finding import Finding, Hit, Severity, Where
from tito_audit.record.rollout import Rollout, with_speakers
from tito_audit.record.speakers import Speakers
from tito_audit.render.renderer import ChatForms, Renderer
from tito_audit.render.spans import common_start
from tito_audit.run.headlines import with_headline
from tito_audit.terminal.escape import shell_word
from tito_audit.terminal.words import many

REWRITING_CODE = "TPL213"
_ANSWERS = 3
"""The most answers of a rollout that are checked: the first ones and the last but one."""
_SHOWN, _BEFORE = 40, 12
"""How many characters of each side are shown, and how many of these may be before the difference."""


@dataclass(frozen=True, slots=True)
class _Rewrite:
    """A text of the template that a later prompt does not start with."""

    message: int
    """The number of the answer that the earlier text ends before or with."""
    was: str
    becomes: str
    """The earlier and the later text around the first difference."""


def find_rewriting(
    head: Sequence[Rollout], renderer: Renderer, speakers: Speakers, template: Sequence[str]
) -> Finding | None:
    """The finding that the template rewrites earlier turns of these rollouts; None if it does not.

    `template` are the words that name it after `tito-audit template`.
    """

    def by_reference(*messages: Any, **how: Any) -> str | None:
        try:
            return renderer.render(*messages, **how)
        except RenderError:
            return None

    several = [
        each for each in (with_speakers(rollout, speakers) for rollout in head) if len(_answer_numbers(each)) > 1
    ]
    looked = several[:8]
    rewritten: list[tuple[Rollout, _Rewrite]] = []
    for each in looked:
        # What the fast engine shows counts only if the reference shows it too.
        place = _first_rewrite(each, partial(renderer.try_render, forms=ChatForms())) and _first_rewrite(
            each, by_reference
        )
        if place is not None:
            rewritten.append((each, place))
    if not rewritten:
        return None
    first, place = rewritten[0]
    here = f"row {first.place.row}" + (f", item {first.place.item}" if first.place.item else "")
    command = " ".join(map(shell_word, ("tito-audit", "template", *template)))
    message = (
        f"the template is not append-only for {len(rewritten)} of the first {many(len(looked), 'conversation')}: "
        f"rendered up to the answer in message {place.message} of {here} it writes {place.was!r}, but in a later "
        f"prompt {place.becomes!r}; `{command}` shows where it breaks and which argument would prevent that"
    )
    hit = Hit(Where.LOG, 0, 0, message, cause="not append-only", severity=Severity.NOTE)
    return with_headline(Finding(REWRITING_CODE, Severity.NOTE, first.place, hit))


def _answer_numbers(rollout: Rollout) -> list[int]:
    return [place for place, message in enumerate(rollout.messages[:64]) if message.sampled and place]


def _first_rewrite(rollout: Rollout, render: Callable[..., str | None]) -> _Rewrite | None:
    """The first text that the last prompt does not start with; None if it starts with all."""
    *earlier, last = _answer_numbers(rollout)
    render = partial(render, tools=rollout.tools, template_kwargs=rollout.template_kwargs)
    whole = render(rollout.messages[:last], add_generation_prompt=True)
    if whole is None:
        return None
    for answer in (*earlier[: _ANSWERS - 1], *earlier[_ANSWERS - 1 :][-1:]):
        for messages, opens in ((rollout.messages[:answer], True), (rollout.messages[: answer + 1], False)):
            text = render(messages, add_generation_prompt=opens)
            if text is not None and not whole.startswith(text.rstrip()):
                shared = common_start(text, whole)
                at = max(text.rfind("\n", 0, shared) + 1, shared - _BEFORE)  # the start of the line, if it is near
                return _Rewrite(answer, text[at : at + _SHOWN], whole[at : at + _SHOWN])
    return None
