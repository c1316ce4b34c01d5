"""Whether a template is append-only: each prompt starts with the previous prompt and the answer sampled for it.

The sampled answer is taken from the template itself: what it writes for the last answer, from the end of the
generation prompt to the token that ends the turn. So an answer breaks here only if the template rewrites it once
something follows, not because a model spaced it differently (see `facts.py`).
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
from tito_audit.templates.probes import ANSWER, PROBES, USER, Probe, answer_kind, assistant, make_probe

_TAG_RUN = re.compile(r"(?:<[^<>\s]{1,40}>|\[[A-Z_/]{2,20}\])+")
"""Tags that may end a turn if the tokenizer is unknown."""
_FINAL_TAGS = re.compile(r"(?:\s*<[^<>\s]{1,40}>)+\s*\Z")
"""Tags at the end of a text."""
_THINK_TAG = re.compile(r"</?think>")
_ONE_ANSWER = make_probe("one answer", [{"role": "user", "content": USER}, assistant(ANSWER)])


class StepOutcome(StrEnum):
    """What becomes of a sampled answer in the next prompt."""

    KEPT = "kept"
    """The next prompt starts with the prompt before it and all that was sampled."""
    BROKEN = "broken"
    """The next prompt starts otherwise."""
    UNKNOWN = "unknown"
    """The next prompt starts with the prompt before it, but the template does not show what was sampled."""
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
    outcome: StepOutcome
    prompt: str = ""
    """The prompt that the answer was sampled for; this and the next two texts are "" for a step that was kept."""
    sampled: str = ""
    """The answer as sampled, with its end token; "" if unknown."""
    after: str = ""
    """The next prompt."""
    at: int | None = None
    """Where `prompt + sampled` and `after` begin to differ, if the step is broken."""
    refusal: str | None = None
    """The error of the template or of Jinja, if it refused."""
    left_out: tuple[str, ...] = ()
    """The parts of the answer that the template never writes: `reasoning`, `text`, `tool calls`."""

    @property
    def answer_kind(self) -> str:
        """What the answer consists of, in words."""
        return answer_kind(self.message)

    @property
    def message(self) -> Message:
        """The answer."""
        return self.probe.messages[self.answer]

    @property
    def next_speaker(self) -> str:
        """Who speaks after the answer: `user`, `tool`, `system`, or `assistant` if the model is called again."""
        if self.until == self.answer + 1:
            return "assistant"
        return self.probe.messages[self.answer + 1].speaker

    @property
    def prompt_and_sampled(self) -> str:
        """The prompt and what was sampled for it."""
        return self.prompt + self.sampled


@dataclass(frozen=True, slots=True)
class AppendCheck:
    """The steps of some conversations: what becomes of each answer."""

    steps: tuple[Step, ...]

    @property
    def is_append_only(self) -> bool:
        """Whether the template keeps every answer that it writes, and writes at least one that is not empty."""
        judged = [step for step in self.steps if step.outcome not in (StepOutcome.REFUSED, StepOutcome.LEFT_OUT)]
        written = any(step.message.text or step.message.reasoning or step.message.tool_calls for step in judged)
        return written and all(step.outcome is StepOutcome.KEPT for step in judged)

    @property
    def broken(self) -> tuple[Step, ...]:
        """The steps whose answer the template does not keep, or may not keep."""
        return tuple(step for step in self.steps if step.outcome in (StepOutcome.BROKEN, StepOutcome.UNKNOWN))

    @property
    def left_out(self) -> tuple[Step, ...]:
        """The steps whose answer the template writes without some part."""
        return tuple(step for step in self.steps if step.outcome is StepOutcome.LEFT_OUT)

    @property
    def refused(self) -> tuple[Step, ...]:
        """The steps that the template refused."""
        return tuple(step for step in self.steps if step.outcome is StepOutcome.REFUSED)

    def by_speaker(self) -> Mapping[str, AppendCheck]:
        """The steps by who speaks after the answer: users, tools, systems, assistants, then any others."""
        names = {step.next_speaker: None for step in self.steps}
        ordered = [
            name for name in dict.fromkeys(("user", "tool", "system", "assistant", *names)) if name in names
        ]
        return {
            name: AppendCheck(tuple(step for step in self.steps if step.next_speaker == name)) for name in ordered
        }

    def by_kind(self) -> Mapping[tuple[str, str], AppendCheck]:
        """The steps by what the answer consists of and who speaks after it."""
        names = dict.fromkeys((step.answer_kind, step.next_speaker) for step in self.steps)
        return {
            name: AppendCheck(tuple(step for step in self.steps if (step.answer_kind, step.next_speaker) == name))
            for name in names
        }


def check_append_only(renderer: Renderer, probes: Iterable[Probe] = PROBES) -> AppendCheck:
    """Check what becomes of each answer of these conversations once something follows it."""
    ends = turn_ends(renderer)
    steps: list[Step] = []
    for conversation in probes:
        answers = [index for index, message in enumerate(conversation.messages) if message.sampled]
        for answer, until in pairwise([*answers, len(conversation.messages)]):
            if answer + 1 < len(conversation.messages) and answer > 0:
                steps.append(_check_step(renderer, conversation, answer, until, ends))
    return AppendCheck(tuple(steps))


def answer_tail(renderer: Renderer) -> str:
    """What a template writes after an answer, stripped."""
    return (_ONE_ANSWER.try_render(renderer, opens=False) or "").partition(ANSWER)[2].strip()


def turn_ends(renderer: Renderer) -> tuple[str, ...]:
    """The texts that may end a turn: the tokenizer's end tokens, and what the template writes after an answer."""
    tail = answer_tail(renderer)
    tokens = sorted(filter(None, renderer.control_texts), key=len, reverse=True)
    run = re.compile(f"(?:{'|'.join(map(re.escape, tokens))})+") if tokens else _TAG_RUN
    match = run.search(tail)
    end = match.group() if match is not None else tail if len(tail) <= 40 else ""
    return tuple(dict.fromkeys((*renderer.end_texts, *([end] if end else []))))


def sampled_text(written: str, prompt: str, ends: Sequence[str]) -> tuple[str, bool]:
    """What a model sampled after the prompt in a rendered conversation, and whether that includes an end of turn.

    If several tags end the text, the first one that ends turns counts: the others end the conversation.
    """
    rest = written[len(prompt) :]
    tail = _FINAL_TAGS.search(rest)
    last = max((rest.rfind(end) for end in ends if end and rest.rstrip().endswith(end)), default=-1)
    start = min(tail.start() if tail is not None else len(rest), last if last >= 0 else len(rest))
    places = [(at, -len(end)) for end in ends if end and (at := rest.find(end, start)) >= 0]
    if not places:
        return rest, False
    at, length = min(places)
    return rest[: at - length], True


def missing_parts(answer: Message, written: str) -> tuple[str, ...]:
    """Which parts of an answer a text lacks: `text`, `reasoning`, `tool calls`."""
    parts = [("text", _THINK_TAG.split(answer.text)), ("reasoning", [answer.reasoning or ""])]
    missing = [name for name, pieces in parts if any(piece.strip() not in written for piece in pieces)]
    for call in answer.tool_calls:
        # The name and the string arguments, in any syntax
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


def _check_step(renderer: Renderer, conversation: Probe, answer: int, until: int, ends: Sequence[str]) -> Step:
    """What becomes of one answer in the next prompt, which holds `until` messages."""
    try:
        prompt, after = (conversation.render(renderer, count) for count in (answer, until))
    except RenderError as error:
        return Step(conversation, answer, until, StepOutcome.REFUSED, refusal=str(error))
    written = conversation.try_render(renderer, answer + 1, opens=False)
    if written is None or not written.startswith(prompt):
        outcome = StepOutcome.UNKNOWN if after.startswith(prompt) else StepOutcome.BROKEN
        return Step(conversation, answer, until, outcome, prompt, "", after, common_start(prompt, after))
    missing = missing_parts(conversation.messages[answer], written[len(prompt) :])
    if missing:
        return Step(conversation, answer, until, StepOutcome.LEFT_OUT, left_out=missing)
    sampled, ended = sampled_text(written, prompt, ends)
    if not ended and not renderer.end_texts and _FINAL_TAGS.search(sampled):
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
        return Step(conversation, answer, until, StepOutcome.KEPT)
    at = common_start(prompt + sampled, after)
    return Step(conversation, answer, until, StepOutcome.BROKEN, prompt, sampled, after, at)
