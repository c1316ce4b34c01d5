"""All facts about a template, with what its arguments change, and which of them make it append-only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice, product

from tito_audit.render.renderer import Renderer
from tito_audit.templates.appends import AppendOnly, append_only, turn_ends
from tito_audit.templates.breaks import Break, Breaks
from tito_audit.templates.probes import CORE, PROBES, Probe, text_of
from tito_audit.templates.returns import (
    CutAnswer,
    Return,
    Returned,
    answer_ending,
    answer_form,
    partial_answers,
    returns,
)
from tito_audit.templates.seams import Content, Seam, contents, seams
from tito_audit.tokens.encoders import ReferenceEncoder
from tito_audit.tokens.tokenizer import Tokenizer

_MOST_SETTINGS = 64
_MOST_ARGUMENTS = 3
"""The most arguments set at once."""
_SHOWING = (*CORE, *(probe for probe in PROBES if probe.name == "a system prompt and two answers"))


@dataclass(frozen=True, slots=True)
class Effect:
    """What one value of an argument changes in the probes."""

    name: str
    value: object
    changes: tuple[str, ...]
    """`generation prompt`, `beginning`, `messages`, `refusals`; () if it changes nothing."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Arguments that were tried, and what they make of usual conversations."""

    arguments: Mapping[str, object]
    append: AppendOnly


def effects(renderer: Renderer) -> tuple[Effect, ...]:
    """What each value of each argument changes, compared with the renderer's own arguments."""
    return tuple(
        Effect(name, value, _changes(renderer, _with(renderer, {name: value})))
        for name, values in _choices(renderer).items()
        for value in values
    )


def settings(renderer: Renderer, plain: AppendOnly) -> tuple[Setting, ...]:
    """Settings that break fewer steps of usual conversations than the given ones, the best first.

    If the given settings break nothing: the settings of one argument that do.
    """
    choices = _choices(renderer)
    if plain.holds:
        tried = _tried(renderer, choices, 1)
        return tuple(setting for setting in tried if setting.append.broken)
    most = len(append_only(renderer, CORE).broken)
    better = [
        setting for setting in _tried(renderer, choices, _MOST_ARGUMENTS) if len(setting.append.broken) < most
    ]
    judged = [setting for setting in better if len(setting.append.refused) <= len(plain.refused)]
    return tuple(
        sorted(_simplest(judged), key=lambda setting: (len(setting.append.broken), len(setting.arguments)))
    )


def _simplest(settings_found: Sequence[Setting]) -> Iterator[Setting]:
    """The settings without those that set more than another and are no better."""
    for setting in settings_found:
        if not any(
            other is not setting
            and other.arguments.items() < setting.arguments.items()
            and len(other.append.broken) <= len(setting.append.broken)
            for other in settings_found
        ):
            yield setting


def _tried(renderer: Renderer, choices: Mapping[str, Sequence[object]], most: int) -> Iterator[Setting]:
    combined = (
        dict(zip(names, values, strict=True))
        for count in range(1, most + 1)
        for names in combinations(choices, count)
        for values in product(*(choices[name] for name in names))
    )
    for arguments in islice(combined, _MOST_SETTINGS):
        yield Setting(arguments, append_only(_with(renderer, arguments), CORE))


def _choices(renderer: Renderer) -> dict[str, list[object]]:
    """For each argument of the templates, the values worth trying that the renderer does not already pass."""
    choices: dict[str, list[object]] = {}
    for template in (renderer.template(False), renderer.template(True)):
        for argument in template.arguments.arguments:
            value_given = renderer.template_args.get(argument.name, argument)
            values = [value for value in argument.values if value is not value_given and _is_plain(value)]
            if values:
                choices.setdefault(argument.name, values)
    return choices


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float)


def _with(renderer: Renderer, arguments: Mapping[str, object]) -> Renderer:
    return replace(renderer, template_args={**renderer.template_args, **arguments})


def _changes(renderer: Renderer, other: Renderer) -> tuple[str, ...]:
    changes: dict[str, None] = {}
    for probe in _SHOWING:
        for name in _changed(renderer, other, probe):
            changes.setdefault(name)
    return tuple(changes)


def _changed(renderer: Renderer, other: Renderer, probe: Probe) -> Iterator[str]:
    """What differs in one conversation between two renderers."""
    ours, theirs = _texts(renderer, probe), _texts(other, probe)
    if ours is None or theirs is None:
        if (ours is None) != (theirs is None):
            yield "refusals"
        return
    if ours[0] != theirs[0]:
        first = probe.messages[0].text
        heads = [text.partition(first)[0] for text in (ours[0], theirs[0])]
        if heads[0] != heads[1]:
            yield "beginning"
        if ours[0].partition(first)[2] != theirs[0].partition(first)[2]:
            yield "messages"
    if ours[1].removeprefix(ours[0]) != theirs[1].removeprefix(theirs[0]):
        yield "generation prompt"


def _texts(renderer: Renderer, probe: Probe) -> tuple[str, str] | None:
    """A conversation without and with a generation prompt; None if the template refuses it."""
    closed, opened = (text_of(renderer, probe.messages, probe.tools, opens=on) for on in (False, True))
    return None if closed is None or opened is None else (closed, opened)


@dataclass(frozen=True, slots=True)
class GenerationPrompt:
    """What the template writes to open an answer."""

    texts: tuple[str, ...]
    """The texts that were found; one if it is the same after any message."""
    continued: bool
    """Whether a conversation that ends with an answer begins with the prompt it was sampled for."""


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
        """Whether a prompt has it twice if it is encoded with special tokens; None if unknown."""
        return None if self.added is None else self.written and self.added


@dataclass(frozen=True, slots=True)
class Stop:
    """A token that may end a turn."""

    text: str
    id: int | None
    """None if unknown, or if it is more than one token."""
    of_tokenizer: bool
    """Whether the tokenizer's files name it as an end token."""
    written: bool
    """Whether the template ends an answer with it."""


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """The facts about one template with one set of arguments."""

    append: AppendOnly
    breaks: tuple[Break, ...]
    """An explanation of each broken step."""
    returned: tuple[Returned, ...]
    partial: tuple[CutAnswer, ...]
    seams: tuple[Seam, ...]
    contents: tuple[Content, ...]
    """How contents are written, for each role."""
    generation_prompt: GenerationPrompt
    stops: tuple[Stop, ...]
    bos: Bos
    clock_formats: tuple[str, ...] | None
    """The formats in which it reads the clock; () if they are unknown, None if it does not."""
    effects: tuple[Effect, ...]
    settings: tuple[Setting, ...]
    """Arguments that fix it; for an append-only template, those that break it."""

    @property
    def rewritten(self) -> tuple[Returned, ...]:
        """The forms of sampled answers that it rewrites."""
        return tuple(returned for returned in self.returned if returned.outcome is Return.REWRITTEN)


def template_facts(renderer: Renderer, tokenizer: Tokenizer | None = None) -> TemplateFacts:
    """What a template does with these conversations; without a tokenizer, nothing about ids."""
    append = append_only(renderer, PROBES)
    explainer = Breaks(renderer)
    return TemplateFacts(
        append,
        tuple(explainer.explain(step) for step in append.broken),
        returns(renderer),
        partial_answers(renderer),
        seams(renderer, tokenizer),
        contents(renderer),
        _generation_prompt(renderer),
        tuple(_stops(renderer, tokenizer)),
        _bos(renderer, tokenizer),
        _clock_formats(renderer),
        effects(renderer),
        settings(renderer, append),
    )


def _generation_prompt(renderer: Renderer) -> GenerationPrompt:
    texts: dict[str, None] = {}
    for probe in PROBES:
        for count, message in enumerate(probe.messages):
            if message.sampled and count and (text := _opener(renderer, probe, count)) is not None:
                texts.setdefault(text)
    return GenerationPrompt(tuple(texts), answer_form(renderer) is not None)


def _opener(renderer: Renderer, probe: Probe, count: int) -> str | None:
    """What a generation prompt adds after these messages; None if it is refused or changes what is before it."""
    closed, opened = (text_of(renderer, probe.messages[:count], probe.tools, opens=on) for on in (False, True))
    if closed is None or opened is None or not opened.startswith(closed):
        return None
    return opened[len(closed) :]


def _stops(renderer: Renderer, tokenizer: Tokenizer | None) -> Iterator[Stop]:
    ends = answer_ending(renderer).strip()
    for text in turn_ends(renderer):
        ids = tokenizer.encode(text).tolist() if tokenizer is not None else []
        yield Stop(text, ids[0] if len(ids) == 1 else None, text in renderer.end_texts, text in ends)


def _bos(renderer: Renderer, tokenizer: Tokenizer | None) -> Bos:
    text = renderer.special_tokens.get("bos_token", "")
    begins = (
        (text_of(renderer, probe.messages, probe.tools, opens=True) or "").startswith(text) for probe in PROBES
    )
    added = None
    if tokenizer is not None:
        plain, ids = (ReferenceEncoder(tokenizer.backend).encode_one("x", special=on) for on in (False, True))
        added = ids[: len(ids) - len(plain)] == [tokenizer.bos_id] if len(ids) > len(plain) else False
    return Bos(text, bool(text) and any(begins), added)


def _clock_formats(renderer: Renderer) -> tuple[str, ...] | None:
    read = [renderer.template(with_tools).arguments for with_tools in (False, True)]
    if not any(arguments.reads_clock for arguments in read):
        return None
    return tuple(dict.fromkeys(text for arguments in read for text in arguments.clock_formats))
