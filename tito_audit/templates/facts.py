"""All facts about a template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tito_audit.errors import RenderError
from tito_audit.render.renderer import Renderer
from tito_audit.templates.appends import AppendOnly, append_only, turn_ends
from tito_audit.templates.breaks import Break, Breaks
from tito_audit.templates.contents import Content, contents
from tito_audit.templates.partial import Partial, partial_answers
from tito_audit.templates.probes import PROBES, Probe
from tito_audit.templates.returns import Return, Returned, answer_ending, answer_form, returns
from tito_audit.templates.seams import Seam, seams
from tito_audit.templates.settings import Effect, Setting, effects, settings
from tito_audit.tokens.encoders import ReferenceEncoder
from tito_audit.tokens.tokenizer import Tokenizer


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
    partial: tuple[Partial, ...]
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
        return tuple(one for one in self.returned if one.outcome is Return.REWRITTEN)


def template_facts(
    renderer: Renderer, tokenizer: Tokenizer | None = None, probes: Sequence[Probe] = PROBES
) -> TemplateFacts:
    """What a template does with these conversations; without a tokenizer, nothing about ids."""
    append = append_only(renderer, probes)
    explainer = Breaks(renderer)
    return TemplateFacts(
        append,
        tuple(explainer.explain(step) for step in append.broken),
        returns(renderer),
        partial_answers(renderer),
        seams(renderer, tokenizer),
        contents(renderer),
        _generation_prompt(renderer, probes),
        tuple(_stops(renderer, tokenizer)),
        _bos(renderer, tokenizer, probes),
        _clock_formats(renderer),
        effects(renderer),
        settings(renderer, append),
    )


def _generation_prompt(renderer: Renderer, probes: Sequence[Probe]) -> GenerationPrompt:
    texts: dict[str, None] = {}
    for probe in probes:
        for count, message in enumerate(probe.messages):
            if message.sampled and count and (text := _opener(renderer, probe, count)) is not None:
                texts.setdefault(text)
    return GenerationPrompt(tuple(texts), answer_form(renderer) is not None)


def _opener(renderer: Renderer, probe: Probe, count: int) -> str | None:
    """What a generation prompt adds after these messages; None if it is refused or changes what is before it."""
    try:
        closed = renderer.render(probe.messages[:count], probe.tools, add_generation_prompt=False)
        opened = renderer.render(probe.messages[:count], probe.tools, add_generation_prompt=True)
    except RenderError:
        return None
    return opened[len(closed) :] if opened.startswith(closed) else None


def _stops(renderer: Renderer, tokenizer: Tokenizer | None) -> Iterator[Stop]:
    ends = answer_ending(renderer).strip()
    for text in turn_ends(renderer):
        ids = tokenizer.encode(text).tolist() if tokenizer is not None else []
        yield Stop(text, ids[0] if len(ids) == 1 else None, text in renderer.end_texts, text in ends)


def _bos(renderer: Renderer, tokenizer: Tokenizer | None, probes: Sequence[Probe]) -> Bos:
    text = renderer.special_tokens.get("bos_token", "")
    written = bool(text) and any((_rendered(renderer, probe) or "").startswith(text) for probe in probes)
    added = None
    if tokenizer is not None:
        plain, ids = (ReferenceEncoder(tokenizer.backend).encode_one("x", special=on) for on in (False, True))
        added = ids[: len(ids) - len(plain)] == [tokenizer.bos_id] if len(ids) > len(plain) else False
    return Bos(text, written, added)


def _rendered(renderer: Renderer, probe: Probe) -> str | None:
    try:
        return renderer.render(probe.messages, probe.tools, add_generation_prompt=True)
    except RenderError:
        return None


def _clock_formats(renderer: Renderer) -> tuple[str, ...] | None:
    read = [renderer.template(with_tools).arguments for with_tools in (False, True)]
    if not any(one.reads_clock for one in read):
        return None
    return tuple(dict.fromkeys(text for one in read for text in one.clock_formats))
