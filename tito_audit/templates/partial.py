"""Incomplete answers: cut by a length limit, or begun by the caller (prefill)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tito_audit.errors import RenderError
from tito_audit.record.message import as_messages
from tito_audit.render.renderer import Renderer
from tito_audit.templates.probes import ANSWER, REASONING, TOOLS, USER, answering
from tito_audit.templates.returns import AnswerForm, Return, answer_form, call_text

_HALF = "It is sun"
_HALF_THOUGHT = "They ask for the"
_ASKED = {"role": "user", "content": USER}


@dataclass(frozen=True, slots=True)
class Partial:
    """One incomplete answer."""

    case: str
    outcome: Return
    added: str = ""
    """What the template writes right after what was sampled, which the model never sampled; for a prefill, between
    the generation prompt and the text that the caller gave."""


def partial_answers(renderer: Renderer) -> tuple[Partial, ...]:
    """What becomes of incomplete answers; () if answers do not continue the generation prompt."""
    form = answer_form(renderer)
    if form is None:
        return ()
    return (*_cut(renderer, form), *_prefilled(renderer, form))


def _cut(renderer: Renderer, form: AnswerForm) -> Iterator[Partial]:
    before = f"{form.opens}{REASONING}{form.closes}" if form.closes is not None else ""
    thought = REASONING if form.closes is not None else None
    yield _partial(renderer, "cut inside the answer", form.prompt, before + _HALF, answering(_HALF, thought))
    if form.closes is not None:
        sampled = form.opens + _HALF_THOUGHT
        yield _partial(renderer, "cut inside the reasoning", form.prompt, sampled, answering("", _HALF_THOUGHT))
        text = form.opens + _HALF_THOUGHT
        yield _partial(
            renderer, "cut inside the reasoning, left in the content", form.prompt, text, answering(text)
        )
    prompt = _rendered(renderer, [_ASKED], opens=True, tools=True)
    written = call_text(renderer, prompt) if prompt is not None else None
    if prompt is not None and written is not None:
        half = written[0][: written[0].find("Xqv")]
        yield _partial(renderer, "cut inside a tool call", prompt, half, answering(half), tools=True)


def _partial(
    renderer: Renderer, case: str, prompt: str, sampled: str, answer: Mapping[str, Any], *, tools: bool = False
) -> Partial:
    """What the template makes of a text that was sampled without an end token."""
    written = _rendered(renderer, [_ASKED, answer], opens=False, tools=tools)
    if written is None:
        return Partial(case, Return.REFUSED)
    if not written.startswith(prompt + sampled):
        return Partial(case, Return.REWRITTEN)
    return Partial(case, Return.KEPT, written[len(prompt + sampled) :])


def _prefilled(renderer: Renderer, form: AnswerForm) -> Iterator[Partial]:
    """An answer that the caller began, cut where it ends, as `continue_final_message` does."""
    written = _rendered(renderer, [_ASKED, answering(_HALF)], opens=False)
    if written is None:
        yield Partial("prefill: the beginning of an answer", Return.REFUSED)
        return
    cut = written[: written.rfind(_HALF) + len(_HALF)]
    whole = _rendered(renderer, [_ASKED, answering(ANSWER)], opens=False)
    kept = _HALF in written and whole is not None and whole.startswith(cut)
    before = cut[len(form.prompt) : len(cut) - len(_HALF)] if cut.startswith(form.prompt) else ""
    yield Partial("prefill: the beginning of an answer", Return.KEPT if kept else Return.REWRITTEN, before)


def _rendered(
    renderer: Renderer, wires: list[Mapping[str, Any]], *, opens: bool, tools: bool = False
) -> str | None:
    try:
        return renderer.render(as_messages(wires, "a case"), TOOLS if tools else (), add_generation_prompt=opens)
    except RenderError:
        return None
