"""What the arguments of a template change, and which of them make it append-only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice, product

from tito_audit.errors import RenderError
from tito_audit.render.renderer import Renderer
from tito_audit.templates.appends import AppendOnly, append_only
from tito_audit.templates.probes import CORE, PROBES, Probe

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


def settings(renderer: Renderer, given: AppendOnly) -> tuple[Setting, ...]:
    """Settings that break fewer steps of usual conversations than the given ones, the best first.

    If the given settings break nothing: the settings of one argument that do.
    """
    choices = _choices(renderer)
    if given.holds:
        tried = _tried(renderer, choices, 1)
        return tuple(one for one in tried if one.append.broken)
    most = len(append_only(renderer, CORE).broken)
    better = [one for one in _tried(renderer, choices, _MOST_ARGUMENTS) if len(one.append.broken) < most]
    judged = [one for one in better if len(one.append.refused) <= len(given.refused)]
    return tuple(sorted(_simplest(judged), key=lambda one: (len(one.append.broken), len(one.arguments))))


def _simplest(found: Sequence[Setting]) -> Iterator[Setting]:
    """The settings without those that set more than another and are no better."""
    for one in found:
        if not any(
            other is not one
            and other.arguments.items() < one.arguments.items()
            and len(other.append.broken) <= len(one.append.broken)
            for other in found
        ):
            yield one


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
    found: dict[str, list[object]] = {}
    for template in (renderer.template(False), renderer.template(True)):
        for argument in template.arguments.arguments:
            given = renderer.template_args.get(argument.name, argument)
            values = [value for value in argument.values if value is not given and _is_plain(value)]
            if values:
                found.setdefault(argument.name, values)
    return found


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float)


def _with(renderer: Renderer, arguments: Mapping[str, object]) -> Renderer:
    return replace(renderer, template_args={**renderer.template_args, **arguments})


def _changes(renderer: Renderer, other: Renderer) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for probe in _SHOWING:
        for name in _changed(renderer, other, probe):
            found.setdefault(name)
    return tuple(found)


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
    try:
        closed = renderer.render(probe.messages, probe.tools, add_generation_prompt=False)
        return closed, renderer.render(probe.messages, probe.tools, add_generation_prompt=True)
    except RenderError:
        return None
