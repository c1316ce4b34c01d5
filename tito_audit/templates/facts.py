"""All facts about a template: what it does, what its arguments change, and which of them make it append-only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice, product

from tito_audit.render.renderer import Renderer
from tito_audit.templates.append_only import AppendCheck, answer_tail, check_append_only, turn_ends
from tito_audit.templates.breaks import Break, BreakExplainer
from tito_audit.templates.probes import CORE, PROBES, Probe
from tito_audit.templates.round_trips import (
    CutAnswer,
    Fidelity,
    RoundTrip,
    answer_form,
    answer_round_trips,
    call_round_trips,
    cut_answers,
)
from tito_audit.templates.seams import RoleContent, Seam, find_contents, find_seams
from tito_audit.tokens.encoders import ReferenceEncoder
from tito_audit.tokens.tokenizer import Tokenizer

_EFFECT_PROBES = (*CORE, *(probe for probe in PROBES if probe.name == "a system prompt and two answers"))


@dataclass(frozen=True, slots=True)
class Effect:
    """What one value of an argument changes in the probes."""

    name: str
    value: object
    changes: tuple[str, ...]
    """`generation prompt`, `beginning`, `messages`, `refusals`; () if it changes nothing."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Arguments that were tried, and the check of usual conversations with them."""

    arguments: Mapping[str, object]
    append: AppendCheck


def find_effects(renderer: Renderer) -> tuple[Effect, ...]:
    """What each value of each argument changes, compared with the renderer's own arguments."""
    changed: list[Effect] = []
    for name, values in _untried_values(renderer).items():
        for value in values:
            changes: dict[str, None] = {}
            for probe in _EFFECT_PROBES:
                variant = _with_arguments(renderer, {name: value})
                ours, theirs = _render_both(renderer, probe), _render_both(variant, probe)
                if ours is None or theirs is None:
                    differs = {"refusals": ours is not theirs}
                else:
                    first = probe.messages[0].text
                    (head, _, rest), (other_head, _, other) = (text.partition(first) for text, _ in (ours, theirs))
                    openers = (opened.removeprefix(closed) for closed, opened in (ours, theirs))
                    differs = {"beginning": head != other_head, "messages": rest != other}
                    differs["generation prompt"] = len(set(openers)) > 1
                changes |= dict.fromkeys(what for what, differ in differs.items() if differ)
            changed.append(Effect(name, value, tuple(changes)))
    return tuple(changed)


def find_settings(renderer: Renderer, plain: AppendCheck) -> tuple[Setting, ...]:
    """Settings that break fewer steps of usual conversations than the current one, the best first.

    If the template is append-only already (`plain`): the single arguments that break it.
    """
    choices = _untried_values(renderer)
    if plain.is_append_only:
        tried = _try_settings(renderer, choices, 1)
        return tuple(setting for setting in tried if setting.append.broken)
    most = len(check_append_only(renderer, CORE).broken)
    better = [setting for setting in _try_settings(renderer, choices, 3) if len(setting.append.broken) < most]
    judged = [setting for setting in better if len(setting.append.refused) <= len(plain.refused)]
    # Drop a setting if a part of it is just as good.
    simplest = [
        setting
        for setting in judged
        if not any(
            other is not setting
            and other.arguments.items() < setting.arguments.items()
            and len(other.append.broken) <= len(setting.append.broken)
            for other in judged
        )
    ]
    return tuple(sorted(simplest, key=lambda setting: (len(setting.append.broken), len(setting.arguments))))


def _try_settings(renderer: Renderer, choices: Mapping[str, Sequence[object]], most: int) -> Iterator[Setting]:
    combined = (
        dict(zip(names, values, strict=True))
        for count in range(1, most + 1)
        for names in combinations(choices, count)
        for values in product(*(choices[name] for name in names))
    )
    for arguments in islice(combined, 64):
        yield Setting(arguments, check_append_only(_with_arguments(renderer, arguments), CORE))


def _untried_values(renderer: Renderer) -> dict[str, list[object]]:
    """For each argument that the templates read, the values worth trying that the renderer does not pass."""
    choices: dict[str, list[object]] = {}
    for template in (renderer.template(False), renderer.template(True)):
        for argument in template.arguments.arguments:
            passed = renderer.template_args.get(argument.name, argument)
            values: list[object] = [
                value
                for value in argument.values
                if value is not passed and (value is None or isinstance(value, str | int | float))
            ]
            if values:
                choices.setdefault(argument.name, values)
    return choices


def _with_arguments(renderer: Renderer, arguments: Mapping[str, object]) -> Renderer:
    return replace(renderer, template_args={**renderer.template_args, **arguments})


def _render_both(renderer: Renderer, probe: Probe, count: int | None = None) -> tuple[str, str] | None:
    """The first messages without and with a generation prompt; None if the template refuses them."""
    closed, opened = (probe.try_render(renderer, count, opens=on) for on in (False, True))
    return None if closed is None or opened is None else (closed, opened)


@dataclass(frozen=True, slots=True)
class GenerationPrompt:
    """What the template writes to open an answer."""

    texts: tuple[str, ...]
    """Every text that was seen; just one if it is the same after any message."""
    continued: bool
    """Whether a rendered answer begins with the generation prompt that it was sampled after."""


@dataclass(frozen=True, slots=True)
class Bos:
    """The token that begins a prompt."""

    text: str
    """"" if the tokenizer has none."""
    written: bool
    """Whether the template writes it."""
    added: bool | None
    """Whether the tokenizer adds it with `add_special_tokens`; None if unknown."""

    @property
    def doubled(self) -> bool | None:
        """Whether a prompt encoded with special tokens has it twice; None if unknown."""
        return None if self.added is None else self.written and self.added


@dataclass(frozen=True, slots=True)
class Stop:
    """A token that may end a turn."""

    text: str
    id: int | None
    """None if unknown, or if the text is several tokens."""
    of_tokenizer: bool
    """Whether the tokenizer's files name it as an end token."""
    written: bool
    """Whether the template ends an answer with it."""


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """The facts about one template with one set of arguments."""

    append: AppendCheck
    breaks: tuple[Break, ...]
    """An explanation of each broken step."""
    returned: tuple[RoundTrip, ...]
    partial: tuple[CutAnswer, ...]
    seams: tuple[Seam, ...]
    contents: tuple[RoleContent, ...]
    """How the contents of each role are written."""
    generation_prompt: GenerationPrompt
    stops: tuple[Stop, ...]
    bos: Bos
    clock_formats: tuple[str, ...] | None
    """The formats that it passes to `strftime_now`; () if they are unknown, None if it does not read the clock."""
    effects: tuple[Effect, ...]
    settings: tuple[Setting, ...]
    """Arguments that make it append-only; if it is already, those that break it."""

    @property
    def rewritten_answers(self) -> tuple[RoundTrip, ...]:
        """The sampled answers that it rewrites."""
        return tuple(returned for returned in self.returned if returned.outcome is Fidelity.REWRITTEN)


def template_facts(renderer: Renderer, tokenizer: Tokenizer | None = None) -> TemplateFacts:
    """Run all probes through a template; without a tokenizer, the facts about ids are missing."""
    append = check_append_only(renderer, PROBES)
    explainer = BreakExplainer(renderer)
    openers: dict[str, None] = {}
    for probe in PROBES:
        for count, message in enumerate(probe.messages):
            if message.sampled and count:
                texts = _render_both(renderer, probe, count)
                if texts is not None and texts[1].startswith(texts[0]):
                    openers.setdefault(texts[1].removeprefix(texts[0]))
    bos = renderer.special_tokens.get("bos_token", "")
    begins = ((probe.try_render(renderer) or "").startswith(bos) for probe in PROBES)
    added = None
    if tokenizer is not None:
        plain, ids = (ReferenceEncoder(tokenizer.backend).encode_one("x", special=on) for on in (False, True))
        added = ids[: len(ids) - len(plain)] == [tokenizer.bos_id] if len(ids) > len(plain) else False
    stops: list[Stop] = []
    tail, form = answer_tail(renderer), answer_form(renderer)
    for end in turn_ends(renderer):
        ids = tokenizer.encode(end).tolist() if tokenizer is not None else []
        stops.append(Stop(end, ids[0] if len(ids) == 1 else None, end in renderer.end_texts, end in tail))
    read = [renderer.template(with_tools).arguments for with_tools in (False, True)]
    reads_clock = any(arguments.reads_clock for arguments in read)
    return TemplateFacts(
        append,
        tuple(explainer.explain(step) for step in append.broken),
        () if form is None else (*answer_round_trips(renderer, form), *call_round_trips(renderer)),
        () if form is None else tuple(cut_answers(renderer, form)),
        find_seams(renderer, tokenizer),
        find_contents(renderer),
        GenerationPrompt(tuple(openers), form is not None),
        tuple(stops),
        Bos(bos, bool(bos) and any(begins), added),
        tuple(dict.fromkeys(text for arguments in read for text in arguments.clock_formats))
        if reads_clock
        else None,
        find_effects(renderer),
        find_settings(renderer, append),
    )
