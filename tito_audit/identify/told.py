"""A way as an explanation: the part that flags can express, and the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from tito_audit.identify.model import Departure, DepartureKind, Explanation, NamedTemplate
from tito_audit.identify.observe import Observation
from tito_audit.identify.ways import CLOCK, SYSTEM, Way, Writer

_VALUES = 8
"""The most example values named."""


def explanation_of(way: Way, writer: Writer, template: NamedTemplate, seen: Sequence[Observation]) -> Explanation:
    """The explanation of a way; values that vary from row to row are set to the most frequent one."""
    own = [one for observation in seen if (one := writer.resolved(way, observation)) is not None]
    clock, args = way.clock, dict(way.args)
    if way.varies and own:
        dates = Counter(one.clock for one in own)
        clock = dates.most_common(1)[0][0] if CLOCK in way.varies else clock
        for name in sorted(way.varies - {CLOCK, SYSTEM}):
            values = Counter(repr(dict(one.args)[name]) for one in own)
            wanted = values.most_common(1)[0][0]
            args[name] = next(value for one in own if repr(value := dict(one.args)[name]) == wanted)
    return Explanation(
        writer.tokenizer.name,
        template,
        args,
        way.tool_arguments,
        clock,
        way.without_tools,
        tuple(_departures(way, own, seen)),
    )


def _departures(way: Way, own: Sequence[Way], seen: Sequence[Observation]) -> Iterator[Departure]:
    kind = DepartureKind
    if way.system is not None:
        stated = any(one.messages[0].role in ("system", "developer") for one in seen)
        yield Departure(kind.SYSTEM_REPLACED if stated else kind.SYSTEM_ADDED, way.system)
    if way.drops_system:
        yield Departure(kind.SYSTEM_DROPPED)
    if not way.opens:
        yield Departure(kind.NO_GENERATION_PROMPT)
    if way.prefill:
        yield Departure(kind.PREFILL, way.prefill)
    if way.bos:
        yield Departure(kind.BOS_ADDED if way.bos > 0 else kind.BOS_MISSING)
    if way.reasoning != "as logged":
        yield Departure(kind.REASONING_DROPPED if way.reasoning == "dropped" else kind.REASONING_IN_CONTENT)
    if not way.uses_stated:
        yield Departure(kind.STATED_UNUSED)
    for name in sorted(way.varies):
        if name == CLOCK:
            dates = dict.fromkeys(str(one.clock.date()) for one in own if one.clock is not None)
            yield Departure(kind.CLOCK_VARIES, "", tuple(sorted(dates))[:_VALUES])
        elif name == SYSTEM:
            systems = Counter(one.system for one in own if one.system is not None)
            yield Departure(kind.SYSTEM_VARIES, "", tuple(text for text, _ in systems.most_common(_VALUES)))
        else:
            values = dict.fromkeys(str(dict(one.args)[name]) for one in own)
            yield Departure(kind.ARGUMENT_VARIES, name, tuple(values)[:_VALUES])
