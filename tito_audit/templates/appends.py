"""Whether a template only appends: each prompt starts with the one before it and what was sampled for that.

What a model samples is taken from the template itself: the last answer as the template writes it, from after the
generation prompt to the token that ends the turn. So an answer breaks here only if the template rewrites it once
something follows, not because a model spaced it differently (see `returns.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from tito_audit.errors import RenderError
from tito_audit.record.message import Message
from tito_audit.render.renderer import Renderer
from tito_audit.render.spans import common_start
from tito_audit.templates.probes import ANSWER, PROBES, USER, Probe, answer_kind, answering, probe

_RUN = re.compile(r"(?:<[^<>\s]{1,40}>|\[[A-Z_/]{2,20}\])+")
"""What may end a turn if the tokenizer is unknown."""
_TAIL = re.compile(r"(?:\s*<[^<>\s]{1,40}>)+\s*\Z")
"""Tokens at the end of a text."""
_PIECES = re.compile(r"</?think>")
_SIMPLE = probe("one answer", [{"role": "user", "content": USER}, answering(ANSWER)])


class Fate(StrEnum):
    """What became of a sampled answer in the next prompt."""

    KEPT = "kept"
    """The next prompt starts with the prompt before it and all that was sampled."""
    BROKEN = "broken"
    """It does not."""
    UNKNOWN = "unknown"
    """It starts with the prompt before it; what was sampled is unknown from the template."""
    LEFT_OUT = "left out"
    """The template never writes a part of the answer, so what was sampled cannot come back."""
    REFUSED = "refused"
    """The template raised an error."""


@dataclass(frozen=True, slots=True)
class Step:
    """One answer in a conversation, and the next prompt."""

    probe: Probe
    answer: int
    """The index of the answer's message."""
    until: int
    """How many messages the next prompt holds."""
    outcome: Fate
    prompt: str = ""
    """The prompt that the answer was sampled for; texts are "" for a step that was kept."""
    sampled: str = ""
    """The answer as sampled, its end token included; "" if unknown."""
    after: str = ""
    """The next prompt."""
    at: int | None = None
    """How many characters `prompt + sampled` and `after` share, if it is broken."""
    refusal: str | None = None
    """What the template, or Jinja, said when it refused."""
    left_out: tuple[str, ...] = ()
    """The parts of the answer that the template never writes: `reasoning`, `text`, `tool calls`."""

    @property
    def kind(self) -> str:
        """What the answer consists of."""
        return answer_kind(self.message)

    @property
    def message(self) -> Message:
        """The answer."""
        return self.probe.messages[self.answer]

    @property
    def next(self) -> str:
        """Who speaks after the answer: `user`, `tool`, `system`, or `assistant` if the model is called again."""
        if self.until == self.answer + 1:
            return "assistant"
        return self.probe.messages[self.answer + 1].speaker

    @property
    def seen(self) -> str:
        """The prompt and what was sampled for it."""
        return self.prompt + self.sampled


@dataclass(frozen=True, slots=True)
class AppendOnly:
    """What became of every answer in some conversations."""

    steps: tuple[Step, ...]

    @property
    def holds(self) -> bool:
        """Whether it appends to every answer that it writes, and writes at least one that is not empty."""
        judged = [step for step in self.steps if step.outcome not in (Fate.REFUSED, Fate.LEFT_OUT)]
        written = any(step.message.text or step.message.reasoning or step.message.tool_calls for step in judged)
        return written and all(step.outcome is Fate.KEPT for step in judged)

    @property
    def broken(self) -> tuple[Step, ...]:
        """The steps that the template writes but does not keep, or may not keep."""
        return tuple(step for step in self.steps if step.outcome in (Fate.BROKEN, Fate.UNKNOWN))

    @property
    def left_out(self) -> tuple[Step, ...]:
        """The steps whose answers the template writes without a part."""
        return tuple(step for step in self.steps if step.outcome is Fate.LEFT_OUT)

    @property
    def refused(self) -> tuple[Step, ...]:
        """The steps that the template refused."""
        return tuple(step for step in self.steps if step.outcome is Fate.REFUSED)

    def by_next(self) -> Mapping[str, AppendOnly]:
        """The steps by who speaks after the answer."""
        names = dict.fromkeys(step.next for step in self.steps)
        return {name: AppendOnly(tuple(step for step in self.steps if step.next == name)) for name in names}

    def by_kind(self) -> Mapping[tuple[str, str], AppendOnly]:
        """The steps by what the answer consists of and who speaks after it."""
        names = dict.fromkeys((step.kind, step.next) for step in self.steps)
        return {
            name: AppendOnly(tuple(step for step in self.steps if (step.kind, step.next) == name))
            for name in names
        }


def append_only(renderer: Renderer, probes: Iterable[Probe] = PROBES) -> AppendOnly:
    """What becomes of each answer of these conversations once something follows it."""
    ends = turn_ends(renderer)
    steps: list[Step] = []
    for conversation in probes:
        answers = [index for index, message in enumerate(conversation.messages) if message.sampled]
        for answer, until in pairwise([*answers, len(conversation.messages)]):
            if answer + 1 < len(conversation.messages) and answer > 0:
                steps.append(_step(renderer, conversation, answer, until, ends))
    return AppendOnly(tuple(steps))


def answer_tail(renderer: Renderer) -> str:
    """What a template writes after an answer, without the white space around it."""
    return (_SIMPLE.text(renderer, opens=False) or "").partition(ANSWER)[2].strip()


def turn_ends(renderer: Renderer) -> tuple[str, ...]:
    """The texts that a turn may end with: the tokenizer's end tokens, and what the template writes after an
    answer."""
    tail = answer_tail(renderer)
    tokens = sorted(filter(None, renderer.control_texts), key=len, reverse=True)
    run = re.compile(f"(?:{'|'.join(map(re.escape, tokens))})+") if tokens else _RUN
    match = run.search(tail)
    end = match.group() if match is not None else tail if len(tail) <= 40 else ""
    return tuple(dict.fromkeys((*renderer.end_texts, *([end] if end else []))))


def sampled_text(written: str, prompt: str, ends: Sequence[str]) -> tuple[str, bool]:
    """The part of a rendered conversation that a model sampled after a prompt, and whether it ends a turn.

    Of several tokens at its end, the first one that ends turns counts: the others end the conversation.
    """
    rest = written[len(prompt) :]
    tail = _TAIL.search(rest)
    last = max((rest.rfind(end) for end in ends if end and rest.rstrip().endswith(end)), default=-1)
    start = min(tail.start() if tail is not None else len(rest), last if last >= 0 else len(rest))
    places = [(at, -len(end)) for end in ends if end and (at := rest.find(end, start)) >= 0]
    if not places:
        return rest, False
    at, length = min(places)
    return rest[: at - length], True


def unwritten(answer: Message, written: str) -> tuple[str, ...]:
    """The parts of an answer that a text does not hold."""
    parts = [("text", _PIECES.split(answer.text)), ("reasoning", [answer.reasoning or ""])]
    missing = [name for name, pieces in parts if any(piece.strip() not in written for piece in pieces)]
    for call in answer.tool_calls:
        # Its name and the texts among its arguments, each in whatever syntax
        arguments, texts = call.arguments, [[call.name]]
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                texts.append([arguments])
        for value in arguments.values() if isinstance(arguments, Mapping) else ():
            if isinstance(value, str):
                texts.append([value.strip(), *(json.dumps(value, ensure_ascii=to)[1:-1] for to in (False, True))])
        if not all(any(form in written for form in forms) for forms in texts):
            return (*missing, "tool calls")
    return tuple(missing)


def _step(renderer: Renderer, conversation: Probe, answer: int, until: int, ends: Sequence[str]) -> Step:
    """What becomes of one answer in the prompt of the next call."""
    try:
        prompt, after = (conversation.render(renderer, count) for count in (answer, until))
    except RenderError as error:
        return Step(conversation, answer, until, Fate.REFUSED, refusal=str(error))
    written = conversation.text(renderer, answer + 1, opens=False)
    if written is None or not written.startswith(prompt):
        outcome = Fate.UNKNOWN if after.startswith(prompt) else Fate.BROKEN
        return Step(conversation, answer, until, outcome, prompt, "", after, common_start(prompt, after))
    missing = unwritten(conversation.messages[answer], written[len(prompt) :])
    if missing:
        return Step(conversation, answer, until, Fate.LEFT_OUT, left_out=missing)
    sampled, ended = sampled_text(written, prompt, ends)
    if not ended and not renderer.end_texts and _TAIL.search(sampled):
        sampled, ended = sampled.rstrip(), True  # without a tokenizer any token may end a turn
    if ended:
        appended = after.startswith(prompt + sampled)
    else:  # the turn's end is then what the next prompt writes after it
        body = sampled.rstrip()
        left = after[len(prompt + body) :].lstrip() if after.startswith(prompt + body) else ""
        end = next((end for end in ends if end and left.startswith(end)), None)
        appended = end is not None or (not ends and after.startswith(prompt + body))
        sampled = body + (end or (ends[0] if ends else ""))
    if appended:
        return Step(conversation, answer, until, Fate.KEPT)
    at = common_start(prompt + sampled, after)
    return Step(conversation, answer, until, Fate.BROKEN, prompt, sampled, after, at)
