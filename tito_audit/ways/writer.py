"""Writes conversations in any way with one tokenizer and one template, and compares that with recorded ids."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from tito_audit.errors import EncodeError, RenderError
from tito_audit.record.arrays import Ids
from tito_audit.record.prefix import same_ids
from tito_audit.record.rollout import Rollout
from tito_audit.render.globals import Clock
from tito_audit.render.renderer import Renderer
from tito_audit.tokens.tokenizer import Tokenizer
from tito_audit.ways.observed import Observation, Part, first_prompt
from tito_audit.ways.reading import (
    MARK,
    PROBE,
    at_mark,
    between,
    date_in,
    date_near,
    has_clock,
    named_ends,
    plain_value,
)
from tito_audit.ways.way import CLOCK, SYSTEM, SYSTEM_ROLES, Way

if TYPE_CHECKING:
    from tito_audit.render.arguments import TemplateArguments

_LONGEST_VALUE, _LONGEST_SYSTEM = 4_000, 200_000
"""The longest value that is read, and the longest system prompt, in characters."""
_NO_THOUGHT = re.compile(r"\A<think>\s*</think>\s*")


class Writer:
    """Writes prompts with one tokenizer and one template."""

    def __init__(self, tokenizer: Tokenizer, renderer: Renderer) -> None:
        self.tokenizer = tokenizer
        self.renderer = renderer
        self.written = 0
        """Characters written so far."""
        self._texts: dict[tuple[str, int], str | None] = {}
        self._recorded: dict[int, tuple[Observation, str]] = {}

    @cached_property
    def bos(self) -> str:
        """The text of the BOS token; "" without one."""
        bos = self.tokenizer.bos_id
        return self.tokenizer.vocabulary.piece(bos) if bos is not None else ""

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

    # What is recorded, and what a way writes

    def recorded(self, observation: Observation) -> str:
        """The text of the recorded ids."""
        key = id(observation)
        if key not in self._recorded:  # it is kept, so that no other object gets its id
            self._recorded[key] = observation, self.tokenizer.vocabulary.text(observation.ids)
        return self._recorded[key][1]

    def text(self, way: Way, observation: Observation) -> str | None:
        """The text of an observation in this way; None if the template refuses."""
        key = repr(way), id(observation)
        if key not in self._texts:
            self.recorded(observation)
            if len(self._texts) >= 1 << 14:
                self._texts.clear()
            own = self.resolved(way, observation) if way.varies else way
            self._texts[key] = self.write(own, observation) if own is not None else None
        return self._texts[key]

    def write(self, way: Way, observation: Observation) -> str | None:
        """The same, written anew, in a way without values that vary."""
        try:
            text = self._rendered(way, observation)
        except RenderError:
            return None
        if text is None:
            return None
        self.written += len(text)
        text = text.removeprefix(self.bos) if way.bos < 0 else self.bos * way.bos + text
        return text + (way.prefill if observation.opens else "")

    def refusal(self, way: Way, observation: Observation) -> str | None:
        """Why the template refuses an observation; None if it does not."""
        own = self.resolved(way, observation) if way.varies else way
        try:
            if own is not None:
                self._rendered(own, observation)
        except RenderError as error:
            return str(error)
        return None

    def _rendered(self, way: Way, observation: Observation) -> str | None:
        """What the template writes; None if it is given no messages. RenderError if it refuses."""
        messages = way.messages(observation.messages)
        if not messages:
            return None
        return way.renderer(self.renderer).render(
            messages,
            observation.tools if way.tools is None else way.tools,
            add_generation_prompt=way.opens and observation.opens,
            template_kwargs=observation.stated if way.uses_stated else {},
        )

    # Values that an observation holds

    def value(self, way: Way, name: str, observation: Observation) -> list[object]:
        """The values that an argument may have had in an observation, the likeliest first."""
        text = self.text(way.with_arg(name, MARK), observation)
        if text is None:
            return []
        texts = between(text, MARK, self.recorded(observation), _LONGEST_VALUE)
        return [value for read in texts for value in plain_value(read)]

    def date(self, way: Way, observation: Observation) -> datetime | None:
        """The date that the template wrote into an observation; None if it is not found."""
        probed = self.text(replace(way, clock=PROBE.at, varies=way.varies - {CLOCK}), observation)
        return None if probed is None else date_near(probed, self.recorded(observation))

    def system(self, way: Way, observation: Observation) -> list[str]:
        """The system prompts that an observation may have, the likeliest first."""
        text = self.text(replace(way, system=MARK, drops_system=False), observation)
        return list(between(text, MARK, self.recorded(observation), _LONGEST_SYSTEM)) if text is not None else []

    def own_system(self, way: Way, observation: Observation) -> str | None:
        """The system prompt that a prompt opens with and the messages lack; None if it has none.

        Unlike other texts it is read only if everything around it, up to the end of the first message, is exactly
        what the template writes, and it holds no control tokens.
        """
        if observation.messages[0].role in SYSTEM_ROLES:
            return None
        recorded, text = self.recorded(observation), self.text(way.with_system(None), observation)
        if text is not None and recorded.startswith(_opening(text, observation)):
            return None
        marked = self.text(way.with_system(MARK), observation)
        system = at_mark(marked, recorded, lambda after: _opening(after, observation)) if marked else None
        if system is None or len(system) > _LONGEST_SYSTEM or self.holds_control(system):
            return None
        return system

    def holds_control(self, text: str) -> bool:
        """Whether a text holds a control token of the tokenizer."""
        return any(token in text for token in self.renderer.control_texts if token)

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
        return way.with_system(self.own_system(way, observation)) if SYSTEM in way.varies else way

    # Whether a way writes what was recorded

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
            if not self._is_followed(text, observation):
                return False
            ids = self._ids(text)
            begins = ids is not None and same_ids(ids, observation.ids[: len(ids)])
            # A row that was encoded as one text may merge its end.
            return begins or self._encodes(self.recorded(observation), observation.ids)
        cut = self.cut(text, observation)
        return cut == self.recorded(observation) and self._encodes(cut, observation.ids)

    def cut(self, text: str, observation: Observation) -> str:
        """A text without what a template writes after the last token of a row."""
        recorded = self.recorded(observation)
        longer = not observation.opens and text.startswith(recorded) and len(text) - len(recorded) <= 64
        return recorded if longer else text

    def _is_followed(self, text: str, observation: Observation) -> bool:
        """Whether a recorded text begins with this one, and the answer follows."""
        recorded = self.recorded(observation)
        answer = _NO_THOUGHT.sub("", recorded[len(text) :], count=1)
        return recorded.startswith(text) and answer.startswith(observation.answer)

    def _ids(self, text: str) -> Ids | None:
        """The ids of a text; None if the tokenizer cannot encode it."""
        try:
            return self.tokenizer.encode(text)
        except EncodeError:
            return None

    def _encodes(self, text: str, ids: Ids) -> bool:
        """Whether the tokenizer encodes a text as these ids."""
        own = self._ids(text)
        return own is not None and same_ids(own, ids)

    # Whether it writes an observation except for its earlier answers, which were sampled and may have drifted

    def writes_around_answers(self, way: Way, observation: Observation) -> bool:
        """Whether a prompt holds the rendered tokens, except in its answers."""
        text = self.text(way, observation)
        if text is None:
            return False
        text, recorded = self.cut(text, observation), self.recorded(observation)
        vocabulary = self.tokenizer.vocabulary
        if observation.begun:  # it begins with what was sampled: whether it goes on as rendered
            new = observation.ids[observation.begun :]
            added = vocabulary.text(new)
            if text.endswith(added) and self._encodes(added, new):
                return True
        # Answers are from after the name of their role up to their end token.
        stated = observation.stated if way.uses_stated else {}
        core = _CORE.match(self.renderer.generation_prompt({**dict(way.args), **stated}))
        ends = tuple(sorted(map(vocabulary.piece, named_ends(vocabulary) | set(self.tokenizer.eos_ids))))
        roles = tuple(sorted(token for token in self.renderer.control_texts if _ROLE.search(token)))
        if core is None or not core[0] or not (ends or roles):
            return text == recorded
        spans = _answers(text, core[0], _ends(ends, roles))
        recorded_spans = _answers(recorded, core[0], _ends(ends, roles))
        if _outside(text, spans) != _outside(recorded, recorded_spans):
            return False
        ids = self._ids(text)
        if ids is None:
            return False
        canonical = self._ids_outside(ids, text, spans)
        logged = self._ids_outside(observation.ids, recorded, recorded_spans)
        return canonical is None or logged is None or np.array_equal(canonical, logged)

    def _ids_outside(self, ids: Ids, text: str, spans: _Spans) -> Ids | None:
        """The ids outside answers; None if the ids have other bytes than the text."""
        ends = np.cumsum(self.tokenizer.vocabulary.byte_lengths(ids))
        sizes = [len(piece.encode("utf-8", "surrogatepass")) for piece in _outside(text, spans)]
        answers = [len(text[start:end].encode("utf-8", "surrogatepass")) for start, end in spans]
        if not len(ends) or sum(sizes) + sum(answers) != ends[-1]:
            return None
        inside = np.zeros(len(ids), np.bool_)
        at = 0
        for size, answer in zip(sizes, answers, strict=False):
            start, at = at + size, at + size + answer
            first = int(np.searchsorted(ends, start, side="right"))
            inside[first : int(np.searchsorted(ends, at, side="left")) + 1] = True
        outside: Ids = ids[~inside]
        return outside


def _opening(text: str, observation: Observation) -> str:
    """The text up to the end of the first message's own."""
    first = observation.messages[0].text.strip()
    at = text.find(first) if first else -1
    return text[: at + len(first)] if at >= 0 else text


_CORE = re.compile(r"[^\n]*?(?=\n|<think|\Z)")
"""The common part of all generation prompts."""
_ROLE = re.compile(r"(?i)\W(user|system|observation|developer|human|assistant)\W")
"""Part of control tokens that begin a message with its role."""
_Spans: TypeAlias = list[tuple[int, int]]


def _answers(text: str, core: str, ends: re.Pattern[str]) -> _Spans:
    """Where answers are, from after the core to their end; the text is read once."""
    spans: _Spans = []
    at = text.find(core)
    while at >= 0:
        start = at + len(core)
        end = ends.search(text, start)
        if end is None:
            break
        spans.append((start, end.end()))
        at = text.find(core, end.end())
    return spans


@lru_cache(maxsize=64)
def _ends(ends: tuple[str, ...], roles: tuple[str, ...]) -> re.Pattern[str]:
    """What ends an answer: one of `ends`, or the next message where answers end without a token."""
    return re.compile("|".join([*map(re.escape, ends), *(f"(?={re.escape(token)})" for token in roles)]))


def _outside(text: str, spans: _Spans) -> list[str]:
    """The text between the answers."""
    at, pieces = 0, []
    for start, end in spans:
        pieces.append(text[at:start])
        at = end
    return [*pieces, text[at:]]


# First prompts, which a faster engine writes until it shows something else


class FirstWriter:
    """Writes first prompts as a renderer is set, each on its own date if wanted."""

    def __init__(self, tokenizer: Tokenizer, renderer: Renderer, *, own_dates: bool = False) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._own_dates = own_dates

    def writes(self, prompt: Observation) -> bool:
        """Whether the template writes what was recorded, in these tokens or in others for the same text."""
        text = _guessed(prompt, self._renderer_of(prompt))
        if text is None:
            return False
        recorded = _start(prompt, self._tokenizer, len(text))
        if recorded == text if prompt.part is Part.FIRST else recorded.startswith(text):
            return True
        return self._has_ids_of(text, prompt)

    def is_exact(self, prompt: Observation) -> bool:
        """Whether what the template itself writes encodes as exactly the recorded ids."""
        try:
            text = self._renderer_of(prompt).render(
                prompt.messages, prompt.tools, add_generation_prompt=True, template_kwargs=prompt.stated
            )
        except RenderError:
            return False
        return self._has_ids_of(text, prompt)

    def _has_ids_of(self, text: str, prompt: Observation) -> bool:
        """Whether a text encodes as the recorded ids; in a row, its last token may merge with what follows."""
        # No thread may start: processes are forked later.
        (ids,) = self._tokenizer.encode_single_threaded([text])
        if prompt.part is Part.FIRST:
            return np.array_equal(ids, prompt.ids)
        return len(ids) > 1 and np.array_equal(ids[:-1], prompt.ids[: len(ids) - 1])

    def _renderer_of(self, prompt: Observation) -> Renderer:
        return at_date_of(prompt, self._tokenizer, self._renderer) if self._own_dates else self._renderer


def at_own_date(rollout: Rollout, tokenizer: Tokenizer, renderer: Renderer) -> Renderer:
    """The renderer at the date in the rollout's first prompt; unchanged if there is none."""
    prompt = first_prompt(rollout) if has_clock(renderer) else None
    return renderer if prompt is None else at_date_of(prompt, tokenizer, renderer)


def at_date_of(prompt: Observation, tokenizer: Tokenizer, renderer: Renderer) -> Renderer:
    """The renderer at the date that the template wrote into a recorded prompt; unchanged if there is none."""
    probed = _guessed(prompt, replace(renderer, clock=PROBE))
    moment = None if probed is None else date_in(probed, _start(prompt, tokenizer, len(probed)))
    return renderer if moment is None else replace(renderer, clock=Clock(moment))


def _guessed(seen: Observation, renderer: Renderer) -> str | None:
    """What the template writes for it, by a faster engine where possible; None where it cannot be rendered."""
    return renderer.try_render(seen.messages, seen.tools, add_generation_prompt=True, template_kwargs=seen.stated)


def _start(prompt: Observation, tokenizer: Tokenizer, characters: int) -> str:
    """The text of the recorded ids; of a row, at least its first `characters`."""
    ids = prompt.ids if prompt.part is Part.FIRST else prompt.ids[: min(characters + 1, 1 << 16)]
    return tokenizer.vocabulary.text(ids)
