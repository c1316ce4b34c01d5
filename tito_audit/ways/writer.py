"""Renders conversations in any way with one tokenizer and template, and compares the result with recorded ids."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from tito_audit.errors import EncodeError, RenderError
from tito_audit.record.arrays import Ids
from tito_audit.record.prefix import same_ids
from tito_audit.record.rollout import Rollout
from tito_audit.render.globals import Clock
from tito_audit.render.renderer import Renderer
from tito_audit.tokens.tokenizer import Tokenizer
from tito_audit.ways.observations import Observation, Part, observe_first_prompt
from tito_audit.ways.recorded_values import (
    MARK,
    PROBE,
    has_clock,
    parse_plain_value,
    read_at_mark,
    read_between,
    read_date,
    read_date_near,
    turn_end_ids,
)
from tito_audit.ways.way import CLOCK, SYSTEM, SYSTEM_ROLES, Way

if TYPE_CHECKING:
    from tito_audit.render.arguments import TemplateArguments

_LONGEST_VALUE, _LONGEST_SYSTEM = 4_000, 200_000
"""Characters of a value and of a system prompt that are read from a prompt at the most."""
_NO_THOUGHT = re.compile(r"\A<think>\s*</think>\s*")


class Writer:
    """Writes observations in any way with one tokenizer and one template; each text is rendered once."""

    def __init__(self, tokenizer: Tokenizer, renderer: Renderer) -> None:
        self.tokenizer = tokenizer
        self.renderer = renderer
        self.rendered_characters = 0
        """So far."""
        self._texts: dict[tuple[str, int], str | None] = {}
        self._recorded: dict[int, tuple[Observation, str]] = {}

    @cached_property
    def bos(self) -> str:
        """The text of the BOS token; "" without one."""
        bos_id = self.tokenizer.bos_id
        return self.tokenizer.vocabulary.piece(bos_id) if bos_id is not None else ""

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

    def recorded_text(self, observation: Observation) -> str:
        """The text of the recorded ids."""
        key = id(observation)
        if key not in self._recorded:  # holds the observation, so that no other object gets its id
            self._recorded[key] = observation, self.tokenizer.vocabulary.text(observation.ids)
        return self._recorded[key][1]

    def rendered_text(self, way: Way, observation: Observation) -> str | None:
        """The text that a way writes for an observation; None if the template refuses it. Cached."""
        key = repr(way), id(observation)
        if key not in self._texts:
            self.recorded_text(observation)
            if len(self._texts) >= 1 << 14:
                self._texts.clear()
            own = self.resolve(way, observation) if way.varies else way
            self._texts[key] = self.render(own, observation) if own is not None else None
        return self._texts[key]

    def render(self, way: Way, observation: Observation) -> str | None:
        """The text that a way without varying values writes; None if the template refuses. Not cached."""
        try:
            text = self._render(way, observation)
        except RenderError:
            return None
        if text is None:
            return None
        self.rendered_characters += len(text)
        text = text.removeprefix(self.bos) if way.bos < 0 else self.bos * way.bos + text
        return text + (way.prefill if observation.is_answered else "")

    def refusal(self, way: Way, observation: Observation) -> str | None:
        """Why the template refuses an observation; None if it does not."""
        own = self.resolve(way, observation) if way.varies else way
        try:
            if own is not None:
                self._render(own, observation)
        except RenderError as error:
            return str(error)
        return None

    def _render(self, way: Way, observation: Observation) -> str | None:
        """What the template writes; None if it is given no messages. RenderError if it refuses."""
        messages = way.rewrite(observation.messages)
        if not messages:
            return None
        return way.apply_to(self.renderer).render(
            messages,
            observation.tools if way.tools is None else way.tools,
            add_generation_prompt=way.generation_prompt and observation.is_answered,
            template_kwargs=observation.stated if way.uses_stated else {},
        )

    def read_argument(self, way: Way, name: str, observation: Observation) -> list[object]:
        """The values that an argument may have had in a recorded text, the likeliest first."""
        text = self.rendered_text(way.with_arg(name, MARK), observation)
        if text is None:
            return []
        texts = read_between(text, MARK, self.recorded_text(observation), _LONGEST_VALUE)
        return [value for read in texts for value in parse_plain_value(read)]

    def read_date(self, way: Way, observation: Observation) -> datetime | None:
        """The date that the template wrote into a recorded text; None if it is not found."""
        probed = self.rendered_text(replace(way, clock=PROBE.at, varies=way.varies - {CLOCK}), observation)
        return None if probed is None else read_date_near(probed, self.recorded_text(observation))

    def read_systems(self, way: Way, observation: Observation) -> list[str]:
        """The system prompts that a recorded text may have, the likeliest first."""
        text = self.rendered_text(replace(way, system=MARK, drops_system=False), observation)
        return list(read_between(text or "", MARK, self.recorded_text(observation), _LONGEST_SYSTEM))

    def read_own_system(self, way: Way, observation: Observation) -> str | None:
        """The system prompt that a recorded text opens with and the messages lack; None if there is none.

        It is read only if the template writes everything around it, up to the end of the first message, and it
        holds no control tokens.
        """
        if observation.messages[0].role in SYSTEM_ROLES:
            return None
        recorded, text = self.recorded_text(observation), self.rendered_text(way.with_system(None), observation)
        if text is not None and recorded.startswith(_text_through_first(text, observation)):
            return None
        marked = self.rendered_text(way.with_system(MARK), observation)
        system = read_at_mark(marked or "", recorded, lambda after: _text_through_first(after, observation))
        if system is None or len(system) > _LONGEST_SYSTEM or self.holds_control(system):
            return None
        return system

    def holds_control(self, text: str) -> bool:
        """Whether a text holds a control token of the tokenizer."""
        return any(token in text for token in self.renderer.control_texts if token)

    def resolve(self, way: Way, observation: Observation) -> Way | None:
        """The way with its varying values read from the recorded text; None if one is not found there."""
        for name in sorted(way.varies - {SYSTEM}):
            if name == CLOCK:
                date = self.read_date(way, observation)
                if date is None:
                    return None
                way = replace(way, clock=date, varies=way.varies - {CLOCK})
            else:
                values = self.read_argument(way, name, observation)
                if not values:
                    return None
                way = way.with_arg(name, values[0])
        return way.with_system(self.read_own_system(way, observation)) if SYSTEM in way.varies else way

    def writes_text(self, way: Way, observation: Observation) -> bool:
        """Whether a way writes the text of the recorded ids."""
        text = self.rendered_text(way, observation)
        if text is not None and observation.part is Part.START:
            return self._is_followed(text, observation)
        return text is not None and self.trim_end(text, observation) == self.recorded_text(observation)

    def writes_alike(self, way: Way, other: Way, observation: Observation) -> bool:
        """Whether two ways write the same for an observation."""
        ways = (way, other)
        if observation.part is Part.START and all(self.writes_text(each, observation) for each in ways):
            return True
        return self.rendered_text(way, observation) == self.rendered_text(other, observation)

    def writes_ids(self, way: Way, observation: Observation) -> bool:
        """Whether the text of a way encodes as exactly the recorded ids."""
        text = self.rendered_text(way, observation)
        if text is None:
            return False
        if observation.part is Part.START:
            if not self._is_followed(text, observation):
                return False
            ids = self._try_encode(text)
            begins = ids is not None and same_ids(ids, observation.ids[: len(ids)])
            # In a row that was encoded as one text, the end of the prompt may merge with the answer.
            return begins or self._encodes_as(self.recorded_text(observation), observation.ids)
        cut = self.trim_end(text, observation)
        return cut == self.recorded_text(observation) and self._encodes_as(cut, observation.ids)

    def trim_end(self, text: str, observation: Observation) -> str:
        """The text of a row without what the template writes after the row's last token."""
        recorded = self.recorded_text(observation)
        longer = not observation.is_answered and text.startswith(recorded) and len(text) - len(recorded) <= 64
        return recorded if longer else text

    def _is_followed(self, text: str, observation: Observation) -> bool:
        """Whether the recorded text begins with this text and goes on with the answer."""
        recorded = self.recorded_text(observation)
        answer = _NO_THOUGHT.sub("", recorded[len(text) :], count=1)
        return recorded.startswith(text) and answer.startswith(observation.answer)

    def _try_encode(self, text: str) -> Ids | None:
        try:
            return self.tokenizer.encode(text)
        except EncodeError:
            return None

    def _encodes_as(self, text: str, ids: Ids) -> bool:
        own = self._try_encode(text)
        return own is not None and same_ids(own, ids)

    def writes_around_answers(self, way: Way, observation: Observation) -> bool:
        """Whether a way writes the recorded tokens outside answers, which were sampled and may have drifted."""
        text = self.rendered_text(way, observation)
        if text is None:
            return False
        text, recorded = self.trim_end(text, observation), self.recorded_text(observation)
        vocabulary = self.tokenizer.vocabulary
        if observation.sampled_prefix:  # an earlier prompt with its answer: only what follows has to match
            new = observation.ids[observation.sampled_prefix :]
            added = vocabulary.text(new)
            if text.endswith(added) and self._encodes_as(added, new):
                return True
        # An answer goes from the end of its role header to its end token.
        stated = observation.stated if way.uses_stated else {}
        core = _CORE.match(self.renderer.generation_prompt({**dict(way.args), **stated}))
        ends = sorted(map(vocabulary.piece, turn_end_ids(vocabulary) | set(self.tokenizer.eos_ids)))
        roles = sorted(token for token in self.renderer.control_texts if _ROLE.search(token))
        if core is None or not core[0] or not (ends or roles):
            return text == recorded
        # An answer also ends with the header of the next message, where it has no end token.
        pattern = re.compile("|".join([*map(re.escape, ends), *(f"(?={re.escape(token)})" for token in roles)]))
        spans, recorded_spans = _answer_spans(text, core[0], pattern), _answer_spans(recorded, core[0], pattern)
        if _text_outside(text, spans) != _text_outside(recorded, recorded_spans):
            return False
        ids = self._try_encode(text)
        if ids is None:
            return False
        canonical = self._ids_outside(ids, text, spans)
        logged = self._ids_outside(observation.ids, recorded, recorded_spans)
        return canonical is None or logged is None or np.array_equal(canonical, logged)

    def _ids_outside(self, ids: Ids, text: str, spans: _Spans) -> Ids | None:
        """The ids outside the answers at `spans` of their text; None if the ids have other bytes than the text."""
        ends = np.cumsum(self.tokenizer.vocabulary.byte_lengths(ids))
        sizes = [len(piece.encode("utf-8", "surrogatepass")) for piece in _text_outside(text, spans)]
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


def _text_through_first(text: str, observation: Observation) -> str:
    """A rendered text up to the end of the first message; all of it if that is not in it."""
    first = observation.messages[0].text.strip()
    at = text.find(first) if first else -1
    return text[: at + len(first)] if at >= 0 else text


_CORE = re.compile(r"[^\n]*?(?=\n|<think|\Z)")
"""The start of a generation prompt, which thinking switches do not change."""
_ROLE = re.compile(r"(?i)\W(user|system|observation|developer|human|assistant)\W")
"""Found in control tokens that open a message of a role."""
_Spans: TypeAlias = list[tuple[int, int]]


def _answer_spans(text: str, core: str, ends: re.Pattern[str]) -> _Spans:
    """`[start, end)` of each answer, from the end of its `core` to the end that the pattern finds."""
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


def _text_outside(text: str, spans: _Spans) -> list[str]:
    at, pieces = 0, []
    for start, end in spans:
        pieces.append(text[at:start])
        at = end
    return [*pieces, text[at:]]


class FirstWriter:
    """Writes first prompts as a renderer is set, by the fast engine where it may; on their own dates if wanted."""

    def __init__(self, tokenizer: Tokenizer, renderer: Renderer, *, own_dates: bool = False) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._own_dates = own_dates

    def writes(self, prompt: Observation) -> bool:
        """Whether the template writes the recorded text, in the same tokens or others."""
        text = _guess_text(prompt, self._renderer_of(prompt))
        if text is None:
            return False
        recorded = _recorded_start(prompt, self._tokenizer, len(text))
        if recorded == text if prompt.part is Part.FIRST else recorded.startswith(text):
            return True
        return self._has_ids_of(text, prompt)

    def is_exact(self, prompt: Observation) -> bool:
        """Whether the reference engine's text encodes as exactly the recorded ids."""
        try:
            text = self._renderer_of(prompt).render(
                prompt.messages, prompt.tools, add_generation_prompt=True, template_kwargs=prompt.stated
            )
        except RenderError:
            return False
        return self._has_ids_of(text, prompt)

    def _has_ids_of(self, text: str, prompt: Observation) -> bool:
        """Whether a text encodes as the recorded ids; in a row, its last token may merge with what follows."""
        # encode_alone starts no thread: processes are forked later.
        (ids,) = self._tokenizer.encode_single_threaded([text])
        if prompt.part is Part.FIRST:
            return np.array_equal(ids, prompt.ids)
        return len(ids) > 1 and np.array_equal(ids[:-1], prompt.ids[: len(ids) - 1])

    def _renderer_of(self, prompt: Observation) -> Renderer:
        return renderer_at_date_of(prompt, self._tokenizer, self._renderer) if self._own_dates else self._renderer


def renderer_at_own_date(rollout: Rollout, tokenizer: Tokenizer, renderer: Renderer) -> Renderer:
    """The renderer at the date that the rollout's first prompt holds; unchanged if it holds none."""
    prompt = observe_first_prompt(rollout) if has_clock(renderer) else None
    return renderer if prompt is None else renderer_at_date_of(prompt, tokenizer, renderer)


def renderer_at_date_of(prompt: Observation, tokenizer: Tokenizer, renderer: Renderer) -> Renderer:
    """The renderer at the date that a recorded prompt holds; unchanged if it holds none."""
    probed = _guess_text(prompt, replace(renderer, clock=PROBE))
    moment = None if probed is None else read_date(probed, _recorded_start(prompt, tokenizer, len(probed)))
    return renderer if moment is None else replace(renderer, clock=Clock(moment))


def _guess_text(seen: Observation, renderer: Renderer) -> str | None:
    """The text of a seen, by the fast engine where it may; None if the template refuses."""
    return renderer.try_render(seen.messages, seen.tools, add_generation_prompt=True, template_kwargs=seen.stated)


def _recorded_start(prompt: Observation, tokenizer: Tokenizer, characters: int) -> str:
    """The text of the recorded ids; of a row, only its start, of at least this many characters."""
    ids = prompt.ids if prompt.part is Part.FIRST else prompt.ids[: min(characters + 1, 1 << 16)]
    return tokenizer.vocabulary.text(ids)
