"""Which of the confirming rows a way writes exactly, and which other ways write the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from tito_audit.identify.model import NamedTemplate, Share
from tito_audit.identify.observe import Observation, Part, for_search
from tito_audit.identify.outside import differs_in_answers
from tito_audit.identify.readings import parsed
from tito_audit.identify.ways import CHARACTERS, CLOCK, SYSTEM, Way, Writer
from tito_audit.render.renderer import ToolArguments

_NEIGHBOURS = 24
"""How many observations decide whether an argument changes anything."""


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A way, and which observations it writes exactly."""

    writer: Writer
    template: NamedTemplate
    way: Way
    written: frozenset[int]
    """The positions of these observations."""
    read: Mapping[int, str] = field(default_factory=dict)
    """The system prompts read from them, if each has its own."""

    @property
    def name(self) -> str:
        """The name of its tokenizer."""
        return self.writer.tokenizer.name

    def rank(self, seen: Sequence[Observation]) -> tuple[int, int, int]:
        """A sort key: first prompts written, then all prompts, then how little it claims."""
        first = sum(seen[at].first for at in self.written)
        return first, len(self.written), -self.way.cost - self.read_cost

    @property
    def read_cost(self) -> int:
        """How much it claims by reading values from each prompt, in units of a way's cost."""
        return sum(1 + len(text) // CHARACTERS for text in self.read.values())


def confirmed(writer: Writer, template: NamedTemplate, way: Way, seen: Sequence[Observation]) -> Confirmed:
    """The prompts that a way writes; with values that vary from row to row, if that writes more."""
    best = Confirmed(writer, template, way, _written(writer, way, seen))
    for other in _varied(best):
        if len(best.written) == len(seen):
            break
        written = _written(writer, other, seen)
        if len(written) > len(best.written):
            best = replace(best, way=other, written=written)
    return replace(best, read=_read(best, seen)) if SYSTEM in best.way.varies else best


def _read(best: Confirmed, seen: Sequence[Observation]) -> dict[int, str]:
    own = ((at, best.writer.resolved(best.way, seen[at])) for at in sorted(best.written))
    return {at: way.system for at, way in own if way is not None and way.system is not None}


def _written(writer: Writer, way: Way, seen: Sequence[Observation]) -> frozenset[int]:
    return frozenset(
        at
        for at, one in enumerate(seen)
        if writer.writes(way, one) or (one.part is Part.WHOLE and differs_in_answers(writer, way, one))
    )


def _varied(best: Confirmed) -> Iterator[Way]:
    """The ways in which a value that was read from one prompt is read from each of them."""
    way = best.way
    if way.clock is not None:
        yield replace(way, clock=None, varies=way.varies | {CLOCK})
    if way.system is not None:
        yield replace(way, system=None, varies=way.varies | {SYSTEM})
    for name, _ in way.args:
        argument = best.writer.arguments.named(name)
        if argument is not None and argument.written:
            yield replace(way.without_arg(name), varies=way.varies | {name})


def share_of(written: frozenset[int], seen: Sequence[Observation]) -> Share:
    """How many prompts, turns and tokens are written exactly, out of all."""
    share = Share()
    for at, one in enumerate(seen):
        first, exact = one.first, at in written
        tokens = len(one.ids) if one.part is not Part.START else 0  # the whole row is counted
        share += Share(
            prompts=int(first and exact),
            of_prompts=int(first),
            turns=int(not first and exact),
            of_turns=int(not first),
            tokens=tokens if exact else 0,
            of_tokens=tokens,
        )
    return share


def equal_ways(best: Confirmed, seen: Sequence[Observation], *, calls_tools: bool) -> tuple[list[Way], list[str]]:
    """Other argument values that write the same, and the arguments that make no difference.

    With `calls_tools`, the form of tool call arguments counts as such an argument too.
    """
    writer, way = best.writer, best.way
    few = for_search([seen[at] for at in sorted(best.written)], _NEIGHBOURS)
    equal = [other for other in _same_date(best) if other != way and _same(writer, way, other, few)]
    undetermined: list[str] = []
    forms: tuple[ToolArguments, ...] = ("auto", "object", "string")
    others = [replace(way, tool_arguments=form) for form in forms if form != way.tool_arguments]
    same = [other for other in others if _same(writer, way, other, few)]
    if calls_tools and len(same) == len(others):
        undetermined.append("tool_arguments")
    elif calls_tools:
        equal += [other for other in same if other.tool_arguments == "auto"]
    for argument in writer.arguments.arguments:
        if argument.name in way.varies:
            continue
        others = [way.with_arg(argument.name, value) for value in argument.values]
        others = [other for other in (way.without_arg(argument.name), *others) if other != way]
        same = [other for other in others if _same(writer, way, other, few)]
        if others and len(same) == len(others) and not way.given(argument.name):
            undetermined.append(argument.name)
        else:
            equal += same
    return equal, undetermined


def _same(writer: Writer, way: Way, other: Way, seen: Sequence[Observation]) -> bool:
    return bool(seen) and all(writer.alike(way, other, one) for one in seen)


def _same_date(best: Confirmed) -> Iterator[Way]:
    """The same date as an argument instead of the clock's, and vice versa."""
    way = best.way
    for argument in best.writer.arguments.arguments:
        form, value = argument.clock_format, dict(way.args).get(argument.name)
        if form is not None and way.clock is not None and value is None:
            yield replace(way, clock=None).with_arg(argument.name, way.clock.strftime(form))
        elif form is not None and isinstance(value, str):
            date: datetime | None = parsed([(form, value)])
            if date is not None:
                yield replace(way.without_arg(argument.name), clock=date)
