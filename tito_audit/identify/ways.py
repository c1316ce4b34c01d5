"""Ways to write a prompt: everything that may change its text, and the resulting text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypeAlias

from tito_audit.errors import EncodeError, RenderError
from tito_audit.identify.observe import Observation, Part
from tito_audit.record.arrays import Ids
from tito_audit.record.message import Message, as_message
from tito_audit.render.globals import Clock
from tito_audit.render.renderer import Renderer, ToolArguments
from tito_audit.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tito_audit.render.arguments import TemplateArguments

# Values read from recorded prompts, located by the template's text before and after them


MARK = "qzvargumentzvq"
"""A placeholder for a value to be read; no template treats it specially."""
SAMPLE_DATE = datetime(1987, 11, 28, 17, 43, 21)
"""The time of a rendering that shows where a template writes the date."""
_CONTEXTS = (400, 64, 24)
"""How many characters before and after a value must match."""
_YEARS = range(2015, 2040)
"""Years to try for a date that names only the weekday."""


def between(text: str, mark: str, recorded: str, longest: int) -> Iterator[str]:
    """The possible values in a recorded text where the rendered one has a mark, the likeliest first."""
    pieces = text.split(mark)
    if len(pieces) < 2:
        return
    first, last = pieces[0], pieces[-1]
    if len(pieces) == 2 and recorded.startswith(first) and recorded.endswith(last):
        value = recorded[len(first) : len(recorded) - len(last)]
        if len(first) + len(last) <= len(recorded) and len(value) <= longest:
            yield value
    yielded = set()
    for before, after in _around(first, pieces[1]):
        # The text between the first `before` and the next `after`; None if they are not found.
        if not before and not after:
            value_found = None
        else:
            at = recorded.find(before)
            start = at + len(before)
            end = recorded.find(after, start) if after else len(recorded)
            value_found = recorded[start:end] if at >= 0 and end >= 0 else None
        if value_found is not None and len(value_found) <= longest and value_found not in yielded:
            yielded.add(value_found)
            yield value_found


def _around(before: str, after: str) -> Iterator[tuple[str, str]]:
    """Candidates for the text around a value: long pieces, then the rest of its line."""
    for size in _CONTEXTS:
        yield before[-size:], after[:size]
    yield before[before.rfind("\n") + 1 :], after[: after.find("\n") + 1] or after[:24]
    yield before[-24:], after[:1]


def date_in(text: str, recorded: str, formats: Sequence[str]) -> datetime | None:
    """The date in a recorded text, where a text rendered at SAMPLE_DATE has that date; None if not found."""
    values: list[tuple[str, str]] = []
    for form in sorted(formats, key=lambda form_name: (-form_name.count("%"), form_name)):
        sample = SAMPLE_DATE.strftime(form)
        text_found = next(between(text, sample, recorded, 2 * len(sample) + 20), None) if sample else None
        if text_found is not None and not _covered(form, values):
            values.append((form, text_found))
    return parsed(values) if values else None


def _covered(form: str, values: Iterable[tuple[str, str]]) -> bool:
    """Whether everything that a format names is named by others too."""
    covered = {part[:1] for other, _ in values for part in other.split("%")[1:]}
    return bool(covered) and bool({part[:1] for part in form.split("%")[1:]} & covered)


def parsed(values: Sequence[tuple[str, str]]) -> datetime | None:
    """The time that these formats write as these texts; None if there is none."""
    try:
        whole = datetime.strptime(" ".join(text for _, text in values), " ".join(form for form, _ in values))
    except ValueError:
        return None
    for year in (whole.year, *_YEARS):
        try:
            moved = whole.replace(year=year)
        except ValueError:  # the 29th of February
            continue
        if all(moved.strftime(form) == text for form, text in values):
            return moved
    return None


# Ways, and what each writes


Reasoning: TypeAlias = Literal["as logged", "dropped", "in content"]
CLOCK = "strftime_now"
"""The name of the clock among values that vary."""
SYSTEM = "system prompt"
"""The name of system prompts that the messages lack, among these; no argument can have it."""
_SYSTEM_ROLES = ("system", "developer")
_REASONING = ("reasoning_content", "reasoning", "thinking")
_LONGEST_VALUE, _LONGEST_SYSTEM = 4_000, 200_000
"""The longest value that is read, and the longest system prompt, in characters."""
CHARACTERS = 16
"""This many characters of text that was read cost as much as a flag."""
_REST = 64
"""How many characters a template may write after the end of a recorded row."""
_THOUGHT = re.compile(r"\A\s*(<think>)?.*?</think>\s*", re.DOTALL)
_NO_THOUGHT = re.compile(r"\A<think>\s*</think>\s*")
_FEW = 1 << 14


@dataclass(frozen=True, slots=True)
class Way:
    """One way to write prompts."""

    args: tuple[tuple[str, object], ...] = ()
    tool_arguments: ToolArguments = "auto"
    clock: datetime | None = None
    without_tools: bool = False
    uses_stated: bool = True
    opens: bool = True
    prefill: str = ""
    bos: int = 0
    """How many BOS tokens are added before the text; -1: the template's own is missing."""
    system: str | None = None
    """The system prompt, instead of the messages' own."""
    drops_system: bool = False
    reasoning: Reasoning = "as logged"
    """What becomes of the reasoning of earlier answers."""
    varies: frozenset[str] = frozenset()
    """Names of arguments, the clock or the system prompt, whose values vary from row to row."""

    def given(self, name: str) -> bool:
        """Whether it gives an argument."""
        return any(name == argument for argument, _ in self.args)

    def with_arg(self, name: str, value: object) -> Way:
        """The same with another value of an argument."""
        others = tuple(pair for pair in self.args if pair[0] != name)
        return replace(self, args=(*others, (name, value)), varies=self.varies - {name})

    def without_arg(self, name: str) -> Way:
        """The same without an argument."""
        others = tuple(pair for pair in self.args if pair[0] != name)
        return replace(self, args=others, varies=self.varies - {name})

    def with_system(self, text: str | None) -> Way:
        """The same with one system prompt for all prompts."""
        return replace(self, system=text, drops_system=False, varies=self.varies - {SYSTEM})

    @property
    def departs(self) -> int:
        """How many departures it has that no flag can express."""
        departures = (not self.uses_stated, not self.opens, self.prefill, self.bos, self.system is not None)
        return sum(map(bool, (*departures, self.drops_system, self.reasoning != "as logged"))) + len(self.varies)

    @property
    def cost(self) -> int:
        """How much it claims: a flag counts once; what no flag can express and text that was read count more."""
        flags = (self.tool_arguments != "auto", self.clock is not None, self.without_tools)
        texts = (*(str(value) for _, value in self.args), self.system or "", self.prefill)
        return len(self.args) + sum(flags) + 4 * self.departs + sum(len(text) // CHARACTERS for text in texts)

    @property
    def key(self) -> str:
        """A text that differs for any two ways."""
        return repr(self)


class Writer:
    """Writes prompts with one tokenizer and one template."""

    def __init__(self, tokenizer: Tokenizer, renderer: Renderer) -> None:
        self.tokenizer = tokenizer
        self.renderer = renderer
        bos = tokenizer.bos_id
        self.bos = tokenizer.vocabulary.piece(bos) if bos is not None else ""
        self.refused: dict[str, int] = {}
        """Why the template could not write prompts, and how often."""
        self.written = 0
        """Characters written so far."""
        self._texts: dict[tuple[str, int], str | None] = {}
        self._recorded: dict[int, str] = {}
        self._kept: list[Observation] = []

    @cached_property
    def arguments(self) -> TemplateArguments:
        """The arguments of the template; of all templates, if tools decide which one is used."""
        from tito_audit.render.arguments import TemplateArguments  # imports jinja2

        templates = [template.arguments for template in self.renderer.templates.values()]
        if self.renderer.name is not None:
            templates = [self.renderer.templates[self.renderer.name].arguments]
        arguments = {argument.name: argument for each in reversed(templates) for argument in each.arguments}
        formats = dict.fromkeys(text for each in templates for text in each.clock_formats)
        return TemplateArguments(
            tuple(arguments.values()), any(each.reads_clock for each in templates), tuple(formats)
        )

    def recorded(self, observation: Observation) -> str:
        """The text of the recorded ids."""
        key = id(observation)
        if key not in self._recorded:
            self._kept.append(observation)  # no other object gets its id
            self._recorded[key] = self.tokenizer.vocabulary.text(observation.ids)
        return self._recorded[key]

    def text(self, way: Way, observation: Observation) -> str | None:
        """The text of an observation in this way; None if the template refuses."""
        key = way.key, id(observation)
        if key not in self._texts:
            self.recorded(observation)
            if len(self._texts) >= _FEW:
                self._texts.clear()
            own = self.resolved(way, observation) if way.varies else way
            self._texts[key] = self._write(own, observation) if own is not None else None
        return self._texts[key]

    def value(self, way: Way, name: str, observation: Observation) -> list[object]:
        """The values that an argument may have had in an observation, the likeliest first."""
        text = self.text(way.with_arg(name, MARK), observation)
        if text is None:
            return []
        texts = between(text, MARK, self.recorded(observation), _LONGEST_VALUE)
        return [value for read in texts for value in plain_value(read)]

    def date(self, way: Way, observation: Observation) -> datetime | None:
        """The date that the template wrote into an observation; None if it is not found."""
        text = self.text(replace(way, clock=SAMPLE_DATE, varies=way.varies - {CLOCK}), observation)
        return (
            date_in(text, self.recorded(observation), self.arguments.clock_formats) if text is not None else None
        )

    def system(self, way: Way, observation: Observation) -> list[str]:
        """The system prompts that an observation may have, the likeliest first."""
        text = self.text(replace(way, system=MARK, drops_system=False), observation)
        return list(between(text, MARK, self.recorded(observation), _LONGEST_SYSTEM)) if text is not None else []

    def own_system(self, way: Way, observation: Observation) -> str | None:
        """The system prompt that a prompt opens with and the messages lack; None if it has none.

        Unlike other texts it is read only if everything around it, up to the end of the first message, is exactly
        what the template writes, and it holds no control tokens.
        """
        if observation.messages[0].role in _SYSTEM_ROLES:
            return None
        recorded, text = self.recorded(observation), self.text(way.with_system(None), observation)
        if text is not None and recorded.startswith(_opening(text, observation)):
            return None
        marked = self.text(way.with_system(MARK), observation)
        if marked is None or marked.count(MARK) != 1:
            return None
        before, _, after = marked.partition(MARK)
        end = recorded.find(_opening(after, observation), len(before))
        system = recorded[len(before) : end]
        if not recorded.startswith(before) or end < 0 or not system or len(system) > _LONGEST_SYSTEM:
            return None
        return system if not any(token in system for token in self.renderer.control_texts) else None

    def resolved(self, way: Way, observation: Observation) -> Way | None:
        """The way with its varying values read from the observation; None if one is not found there."""
        for name in sorted(way.varies - {SYSTEM}):
            if name == CLOCK:
                date = self.date(way, observation)
                if date is None:
                    return None
                way = replace(way, clock=date, varies=way.varies - {CLOCK})
            else:
                values = self.value(way, name, observation)
                if not values:
                    return None
                way = way.with_arg(name, values[0])
        if SYSTEM in way.varies:
            own = self.own_system(way, observation)
            way = way.with_system(own)
        return way

    def spells(self, way: Way, observation: Observation) -> bool:
        """Whether it writes the text of the recorded ids."""
        text = self.text(way, observation)
        if text is not None and observation.part is Part.START:
            return self._is_followed(text, observation)
        return text is not None and self.cut(text, observation) == self.recorded(observation)

    def alike(self, way: Way, other: Way, observation: Observation) -> bool:
        """Whether two ways write the same for an observation."""
        if observation.part is Part.START and self.spells(way, observation) and self.spells(other, observation):
            return True
        return self.text(way, observation) == self.text(other, observation)

    def writes(self, way: Way, observation: Observation) -> bool:
        """Whether what it writes encodes as exactly the recorded ids."""
        text = self.text(way, observation)
        if text is None:
            return False
        if observation.part is Part.START:
            return self._is_followed(text, observation) and self._begins_with(text, observation)
        cut = self.cut(text, observation)
        return cut == self.recorded(observation) and self.encodes(cut, observation.ids)

    def cut(self, text: str, observation: Observation) -> str:
        """A text without what a template writes after the last token of a row."""
        recorded = self.recorded(observation)
        longer = not observation.opens and text.startswith(recorded) and len(text) - len(recorded) <= _REST
        return recorded if longer else text

    def _is_followed(self, text: str, observation: Observation) -> bool:
        """Whether a recorded text begins with this one, and the answer follows."""
        recorded = self.recorded(observation)
        answer = _NO_THOUGHT.sub("", recorded[len(text) :], count=1)
        return recorded.startswith(text) and answer.startswith(observation.answer)

    def _begins_with(self, text: str, observation: Observation) -> bool:
        """Whether the ids begin with those of a text; a row that was encoded as one text may merge its end."""
        ids = self.ids(text)
        begins = ids is not None and _same(ids, observation.ids[: len(ids)])
        return begins or self.encodes(self.recorded(observation), observation.ids)

    def ids(self, text: str) -> Ids | None:
        """The ids of a text; None if the tokenizer cannot encode it."""
        try:
            return self.tokenizer.encode(text)
        except EncodeError:
            return None

    def encodes(self, text: str, ids: Ids) -> bool:
        """Whether the tokenizer encodes a text as these ids."""
        own = self.ids(text)
        return own is not None and _same(own, ids)

    def refusal(self, way: Way, observation: Observation) -> str | None:
        """Why the template refuses an observation; None if it does not."""
        own = self.resolved(way, observation) if way.varies else way
        try:
            if own is not None:
                self._rendered(own, observation)
        except RenderError as error:
            return str(error)
        return None

    def _write(self, way: Way, observation: Observation) -> str | None:
        try:
            text = self._rendered(way, observation)
        except RenderError as error:
            reason = str(error)
            self.refused[reason] = self.refused.get(reason, 0) + 1
            return None
        if text is None:
            return None
        self.written += len(text)
        text = text.removeprefix(self.bos) if way.bos < 0 else self.bos * way.bos + text
        return text + (way.prefill if observation.opens else "")

    def _rendered(self, way: Way, observation: Observation) -> str | None:
        """What the template writes; None if it is given no messages. RenderError if it refuses."""
        renderer = replace(
            self.renderer,
            template_args=dict(way.args),
            tool_arguments=way.tool_arguments,
            clock=Clock(way.clock) if way.clock is not None else None,
            without_tools=way.without_tools,
        )
        # The messages as the template gets them in this way.
        sent = list(observation.messages)
        has_system = bool(sent) and sent[0].role in _SYSTEM_ROLES
        if way.system is not None:
            role = sent[0].role if has_system else "system"
            sent = [as_message({"role": role, "content": way.system}, "system prompt"), *sent[has_system:]]
        elif way.drops_system and has_system:
            sent = sent[1:]
        if way.reasoning != "as logged":
            sent = [_with_reasoning(message, way.reasoning) for message in sent]
        messages = sent
        if not messages:
            return None
        return renderer.render(
            messages,
            observation.tools,
            add_generation_prompt=way.opens and observation.opens,
            template_kwargs=observation.stated if way.uses_stated else {},
        )


def _opening(text: str, observation: Observation) -> str:
    """The text up to the end of the first message's own."""
    first = observation.messages[0].text.strip()
    at = text.find(first) if first else -1
    return text[: at + len(first)] if at >= 0 else text


def _same(ids: Ids, recorded: Ids) -> bool:
    return len(ids) == len(recorded) and bool((ids == recorded).all())


def has_reasoning(message: Message) -> bool:
    """Whether an answer holds reasoning, in a field of its own or in its content."""
    return message.sampled and (message.reasoning is not None or "</think>" in message.text)


def _with_reasoning(message: Message, reasoning: Reasoning) -> Message:
    """An answer without its reasoning, or with that as a part of its content."""
    if not has_reasoning(message) or not isinstance(message.content, str | None):
        return message
    wire = {key: value for key, value in message.wire.items() if key not in _REASONING}
    content = message.content or ""
    if reasoning == "dropped":
        wire["content"] = _THOUGHT.sub("", content, count=1)
    elif message.reasoning is not None:
        thought = message.reasoning.strip("\n")
        wire["content"] = f"<think>\n{thought}\n</think>\n\n{content}"
    return replace(message, wire=wire, reasoning=None)


def plain_value(text: str) -> Sequence[object]:
    """The value that a template writes as this text: a number if it is one, else a string."""
    try:
        number = json.loads(text)
    except ValueError:
        return (text,)
    return (number, text) if isinstance(number, int | float) and str(number) == text else (text,)
