"""The proof for a variant of a chat template: first prompts are unchanged, and history is as sampled."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise

from tito_audit.errors import RenderError
from tito_audit.record.message import Message
from tito_audit.render.renderer import Renderer
from tito_audit.render.template import Template, compile_template
from tito_audit.templates.appends import Outcome, Step, append_only, unwritten
from tito_audit.templates.probes import (
    ANSWER,
    PROBES,
    REASONING,
    TOOLS,
    Probe,
    answer_kind,
    answering,
    probe,
)

_THOUGHT = re.compile(r"<\|?(?:begin_of_)?(?:think|thought|thinking)\|?>\s*\Z")
_SPACED = " \n What is\tthe weather? \n\n"
_SAID = "It is sunny."
_ASK = {"role": "user", "content": "What is the weather?"}
_FIRST: tuple[Probe, ...] = tuple(
    probe(f"{name}{' with tools' if tools else ''}", wires, tools)
    for tools in ((), TOOLS)
    for name, wires in (
        ("a question", [{"role": "user", "content": "What is the weather?"}]),
        ("a spaced question", [{"role": "user", "content": _SPACED}]),
        ("an empty question", [{"role": "user", "content": ""}]),
        ("a question with tags", [{"role": "user", "content": "Is <think>this</think> a tag?"}]),
        (
            "a system prompt",
            [{"role": "system", "content": "  Be brief.\n"}, {"role": "user", "content": _SPACED}],
        ),
        ("a system prompt alone", [{"role": "system", "content": "Be brief."}]),
        ("two questions", [{"role": "user", "content": "Hello"}, {"role": "user", "content": _SPACED}]),
        ("a developer", [{"role": "developer", "content": " Be brief. "}, {"role": "user", "content": "Hello"}]),
    )
)
"""Prompts of first turns."""
PARSED: tuple[Probe, ...] = tuple(
    probe(f"a parsed answer {number}", [_ASK, answering(content, reasoning), _ASK])
    for number, (content, reasoning) in enumerate(
        (
            (f"\n\n{_SAID}", REASONING),
            (_SAID, f"\n{REASONING}\n"),
            (f"\n{_SAID}", f"{REASONING}\n\n"),
        )
    )
)
"""Answers with the whitespace that parsers leave after reasoning: templates that strip it must still do so."""
_SPACES = ("{} \n", "\n\n{}", " {}\n\n", "{}\t")


@dataclass(frozen=True, slots=True)
class Judged:
    """What a template does with some conversations."""

    kept: frozenset[str]
    """The answers that the next prompt holds as sampled, by name."""
    lost: frozenset[str]
    """Those that it does not hold as sampled."""
    lost_with_tools: frozenset[str]
    """Those of them in conversations with tools."""
    trimmed: frozenset[str]
    """Those that it holds without the whitespace at their ends."""
    unsampled: frozenset[str]
    """Those that no model samples, because they lack the reasoning that the prompt begins; and those before a
    system message, which templates may move.
    """
    steps: tuple[Step, ...] = ()

    @property
    def lost_without_tools(self) -> frozenset[str]:
        """Those that are lost in conversations without tools."""
        return self.lost - self.lost_with_tools

    @property
    def faults(self) -> int:
        """How many answers do not come back as sampled."""
        return len(self.lost) + len(self.trimmed)

    def faulty(self, renderer: Renderer) -> list[tuple[Probe, str | None]]:
        """A conversation for each kind of answer that does not come back, up to the next prompt, with that."""
        steps = {step.kind: step for step in self.steps if _name(step) in self.lost}
        found = [replace(step.probe, messages=step.probe.messages[: step.until]) for step in steps.values()]
        found += [_spaced_probe(space) for space in _SPACES[:2] if self.trimmed]
        return [(one, rendered(renderer, one)) for one in found]


def alone(renderer: Renderer, source: str, where: str) -> Renderer:
    """A renderer with this template instead of its own; SetupError if it is not a template."""
    return replace(renderer, templates={"default": compile_template(source, where)}, name=None)


def judge(renderer: Renderer, probes: Sequence[Probe], *, spaces: bool = True) -> Judged:
    """What becomes of the answers of some conversations; `spaces`: also of whitespace at their ends."""
    steps = append_only(renderer, probes).steps
    has_field = _writes_field(renderer)
    kept: set[str] = set()
    lost: set[str] = set()
    trimmed: set[str] = set()
    unsampled: set[str] = set()
    sets = {_Becomes.KEPT: kept, _Becomes.LOST: lost, _Becomes.NOT_SAMPLED: unsampled}
    for step in steps:
        becomes = _becomes(step, has_field=has_field)
        if becomes is not None:
            sets[becomes].add(_name(step))
    for name, held in _spaced(renderer) if spaces else ():
        (kept if held else trimmed).add(name)
    of_tools = {_name(step) for step in steps if step.probe.tools} & lost
    return Judged(
        frozenset(kept), frozenset(lost), frozenset(of_tools), frozenset(trimmed), frozenset(unsampled), steps
    )


class _Becomes(Enum):
    """What an answer counts as."""

    KEPT = 1
    LOST = 2
    NOT_SAMPLED = 3


def _becomes(step: Step, *, has_field: bool) -> _Becomes | None:
    """What an answer counts as; None if the template cannot write it at all."""
    if step.outcome is Outcome.KEPT:
        return _Becomes.KEPT
    if step.outcome is Outcome.REFUSED or (step.message.reasoning and not has_field):
        return None
    if step.outcome is Outcome.LEFT_OUT and not _cuts_thought(step):
        return None
    before_system = any(one.speaker == "system" for one in step.probe.messages[step.answer : step.until])
    unopened = not step.sampled and _opens_thought(step) and not _has_thought(step.message)
    return _Becomes.NOT_SAMPLED if before_system or unopened else _Becomes.LOST


def _name(step: Step) -> str:
    return f"{step.probe.name}, answer {step.answer}"


def _writes_field(renderer: Renderer) -> bool:
    """Whether it writes the field `reasoning_content` of a message."""
    said = answering(ANSWER, REASONING)
    try:
        text = renderer.render(probe("", [_ASK, said]).messages, (), add_generation_prompt=False)
    except RenderError:
        return True
    return REASONING in text


def _cuts_thought(step: Step) -> bool:
    inline = "<think>" in answer_kind(step.message) and not step.message.tool_calls
    return inline and "text" in step.left_out


def _opens_thought(step: Step) -> bool:
    """Whether the generation prompt begins reasoning, which an answer without reasoning cannot continue."""
    return _THOUGHT.search(step.prompt) is not None


def _has_thought(message: Message) -> bool:
    return bool(message.reasoning) or "</think>" in message.text


def _spaced(renderer: Renderer) -> Iterable[tuple[str, bool]]:
    """Whether whitespace at the ends of a plain answer comes back; only for ends where the answer's text directly
    touches the template's.
    """
    plain = _texts(renderer, probe("", [_ASK, answering(_SAID), _ASK]))
    if plain is None:
        return
    for space in _SPACES:
        said = space.format(_SAID)
        leads, trails = not said.startswith(_SAID), not said.endswith(_SAID)
        prompt, after = plain
        # The template may add text after a generation prompt, such as an empty thought.
        if leads and not after.startswith(prompt + _SAID):
            continue
        sampled = after[: after.index(_SAID, len(prompt))] + said if _SAID in after[len(prompt) :] else None
        texts = _texts(renderer, _spaced_probe(space))
        if sampled is not None and texts is not None and (leads or trails):
            yield f"an answer as {said!r}", texts[1].startswith(sampled)


def _spaced_probe(space: str) -> Probe:
    return probe("", [_ASK, answering(space.format(_SAID)), _ASK])


def rendered(renderer: Renderer, one: Probe) -> str | None:
    """A prompt that ends with a generation prompt; None if the template refuses it."""
    return _part(renderer, one, len(one.messages), opens=True)


def _texts(renderer: Renderer, one: Probe) -> tuple[str, str] | None:
    """The prompt of a probe's answer, and the prompt after it; None if the template refuses them."""
    try:
        return (
            renderer.render(one.messages[:1], (), add_generation_prompt=True),
            renderer.render(one.messages, (), add_generation_prompt=True),
        )
    except RenderError:
        return None


def argument_sets(template: Template, given: Mapping[str, object]) -> tuple[Mapping[str, object], ...]:
    """The arguments to prove first prompts with: the given ones, and each value that the template
    distinguishes.
    """
    found = template.arguments.arguments
    return ({}, *({one.name: value} for one in found if one.name not in given for value in one.values))


class Original:
    """A template as it was, with what it writes for first turns."""

    def __init__(self, renderer: Renderer, log: Sequence[Probe] = ()) -> None:
        self.renderer = renderer
        template = renderer.template(False)
        self.arguments = argument_sets(template, renderer.template_args)
        self._few = [(one, args) for one in _FIRST for args in self.arguments[:1]]
        self._many = [(one, args) for one in (*_FIRST, *_heads(PROBES)) for args in self.arguments]
        self._log: list[tuple[Probe, Mapping[str, object]]] = [(one, {}) for one in _heads(log)]
        self._texts: dict[tuple[int, str], str | None] = {}
        self._answers = {id(one): list(_turns(renderer, one)) for one in (*PROBES, *PARSED)}

    @property
    def firsts(self) -> int:
        """How many first prompts are compared."""
        return len(self._many)

    def writes_same(self, variant: Renderer, *, all_of_them: bool = False) -> bool:
        """Whether first prompts are byte for byte the same; a few of them, or all."""
        return all(self._same(variant, *one) for one in (self._many if all_of_them else self._few))

    @property
    def firsts_of_log(self) -> int:
        """How many first prompts of the log are compared."""
        return len(self._log)

    def same_in_log(self, variant: Renderer) -> int:
        """How many first prompts of the log are unchanged."""
        return sum(self._same(variant, *one) for one in self._log)

    def compare(self, variant: Renderer, probes: Sequence[Probe]) -> tuple[bool, bool]:
        """Whether answers and what follows them are unchanged, except for history; and whether anything
        changed.
        """
        turns = [(self._answers[id(one)], list(_turns(variant, one))) for one in probes]
        pairs = [pair for before, after in turns for pair in zip(before, after, strict=True)]
        return all(_agree(*pair) for pair in pairs), any(before != after for before, after in pairs)

    def _same(self, variant: Renderer, one: Probe, args: Mapping[str, object]) -> bool:
        key = id(one), repr(args)
        if key not in self._texts:
            self._texts[key] = _first(self.renderer, one, args)
        return _first(variant, one, args) == self._texts[key]


def _heads(probes: Iterable[Probe]) -> list[Probe]:
    """The messages before the first answer of each."""
    found = []
    for one in probes:
        count = next((i for i, message in enumerate(one.messages) if message.sampled), len(one.messages))
        if count:
            found.append(replace(one, messages=one.messages[:count]))
    return found


def _first(renderer: Renderer, one: Probe, args: Mapping[str, object]) -> str | None:
    try:
        return renderer.render(
            one.messages, one.tools, add_generation_prompt=True, template_kwargs={**one.template_args, **args}
        )
    except RenderError:
        return None


@dataclass(frozen=True, slots=True)
class _Turn:
    """An answer of a probe as a template writes it; None where that cannot be told."""

    last: str | None
    """What the answer is written as while nothing follows."""
    rest: str | None
    """What the next prompt adds to it."""
    after: str | None
    """That prompt."""


def _turns(renderer: Renderer, one: Probe) -> Iterator[_Turn]:
    """The answers of a probe, each with what follows it."""
    answers = [i for i, message in enumerate(one.messages) if message.sampled]
    for answer, until in pairwise([*answers, len(one.messages)]):
        prompt, after = (_part(renderer, one, count, opens=True) for count in (answer, until))
        closed = _part(renderer, one, answer + 1, opens=False)
        last = None
        if prompt is not None and closed is not None and closed.startswith(prompt):
            last = closed[len(prompt) :]
        if closed is None or last is None or unwritten(one.messages[answer], last):
            yield _Turn(None, None, after)
        else:
            whole = closed.rstrip()
            rest = after[len(whole) :] if after is not None and after.startswith(whole) else None
            yield _Turn(last, rest, after)


def _agree(before: _Turn, after: _Turn) -> bool:
    """Whether a variant writes an answer as the template did, and after it the same."""
    if before.last is not None and before.last != after.last:
        return False
    if (before.after is None) != (after.after is None):
        return False
    return before.after is None or after.rest is None or before.after.endswith(after.rest)


def _part(renderer: Renderer, one: Probe, count: int, *, opens: bool) -> str | None:
    try:
        return renderer.render(
            one.messages[:count], one.tools, add_generation_prompt=opens, template_kwargs=one.template_args
        )
    except RenderError:
        return None
