"""Finds the way that wrote recorded prompts by hill climbing: one change at a time while the text gets closer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from tito_audit.render.spans import common_start
from tito_audit.ways.observations import Observation, Part, pick_for_search
from tito_audit.ways.way import CHARACTERS, CLOCK, SYSTEM, NamedTemplate, Way, has_reasoning
from tito_audit.ways.writer import Writer

if TYPE_CHECKING:
    from tito_audit.render.arguments import Argument

SEARCHED = 8
"""Observations in one search."""
NEARLY_ALL = 0.95
"""The share of the prompts that an explanation must write to be certain."""
_CONFIRMED, _CONFIRMED_IDS = 240, 2_000_000
"""Observations that confirm an explanation, and the most ids in them."""
_MOST_WRITTEN = 20_000_000
"""Characters rendered in one search at the most."""
_LATER, _FIRST = 2, 5
"""Weights of a prompt with answers, which may have drifted, and of one without."""


class Score(NamedTuple):
    """How well a way writes the observations of a search; greater is better."""

    exact: int
    """The summed weights of those it writes exactly."""
    nearness: float
    negative_cost: int


class Search:
    """The search with one tokenizer and template over a few observations."""

    def __init__(self, writer: Writer, seen: Sequence[Observation]) -> None:
        self._writer = writer
        self._until = writer.rendered_characters + _MOST_WRITTEN
        self._seen = seen
        self._scores: dict[str, Score] = {}
        self._lines: dict[int, Counter[str]] = {}

    def find_best(self, start: Way) -> Way:
        """The way that writes the observations best, the simplest of equal ones; the search begins at `start`."""
        climbed = best_way = self._climb(start)
        if self._is_exact(climbed):
            return self._simplify(climbed)
        # Climb again from all combinations of arguments if they are few, else from each single change
        restarts: Iterable[Way] = (way for options in self._changes() for way in options(climbed))
        arguments = [argument for argument in self._writer.arguments.arguments if argument.values]
        choices = [[None, *argument.values] for argument in arguments]
        if prod(map(len, choices)) <= 128:
            restarts = []
            for values in product(*choices):
                way = climbed
                for argument, value in zip(arguments, values, strict=True):
                    name = argument.name
                    way = way.without_arg(name) if value is None else way.with_arg(name, value)
                restarts.append(way)
        for restart in restarts:
            if self._is_exhausted:
                break
            best_way = max(best_way, self._climb(restart), key=self.score)
            if self._is_exact(best_way):
                break
        return self._simplify(best_way)

    def score(self, way: Way) -> Score:
        """How well a way writes the observations."""
        key = repr(way)
        if key not in self._scores:
            exact, near = 0, 0.0
            for observation in self._seen:
                weight = _FIRST if observation.is_first else _LATER
                if self._writer.writes_text(way, observation):
                    exact += weight
                    near += weight
                    continue
                text = self._writer.rendered_text(way, observation)
                recorded = self._writer.recorded_text(observation)
                at = recorded.find(observation.answer) if observation.answer else -1
                recorded = recorded[:at] if at > 0 else recorded
                if text is None:
                    near -= weight
                elif text and recorded:
                    # How much of the recorded text it writes, at its ends and by lines: below 1
                    start = common_start(text, recorded)
                    end = min(common_start(text[::-1], recorded[::-1]), min(len(text), len(recorded)) - start)
                    lines = self._lines.setdefault(id(observation), Counter(recorded.split("\n")))
                    shared = (Counter(text.split("\n")) & lines).items()
                    shared_characters = sum((len(line) + 1) * number for line, number in shared)
                    longest = max(len(text), len(recorded))
                    near += weight * (0.5 * (start + end) / longest + 0.49 * shared_characters / (longest + 1))
            self._scores[key] = Score(exact, round(near, 6), -way.cost)
        return self._scores[key]

    @property
    def _is_exhausted(self) -> bool:
        return self._writer.rendered_characters > self._until

    def _is_exact(self, way: Way) -> bool:
        return all(self._writer.writes_text(way, observation) for observation in self._seen)

    def _climb(self, way: Way) -> Way:
        """The way after the best single changes, as long as one improves its score."""
        for _ in range(6):
            before = way
            for options in self._changes():
                if self._is_exhausted:
                    return way
                way = max((way, *options(way)), key=self.score)
            if way == before or self._is_exact(way):
                break
        return way

    def _simplify(self, way: Way) -> Way:
        """The way without the changes that no observation needs."""
        exact = self.score(way).exact
        if not exact:
            return way
        for lighter in (
            *(way.without_arg(name) for name, _ in way.args),
            *(replace(way, varies=way.varies - {name}) for name in sorted(way.varies)),
            replace(way, clock=None),
            replace(way, tool_arguments="auto"),
            replace(way, without_tools=False),
            replace(way, uses_stated=True),
            replace(way, system=None, drops_system=False),
            replace(way, reasoning="as logged"),
            replace(way, generation_prompt=True),
            replace(way, prefill=""),
            replace(way, bos=0),
        ):
            if self.score(lighter).exact >= exact and lighter.cost < way.cost:
                return self._simplify(lighter)
        return way

    # What may be changed

    def _changes(self) -> Iterator[Callable[[Way], Iterable[Way]]]:
        """For each thing that may be changed, a function from a way to the changed ways."""
        seen, arguments = self._seen, self._writer.arguments
        yield self._vary_bos
        if arguments.reads_clock:
            yield self._vary_clock
        for argument in arguments.arguments:
            yield self._vary_argument(argument)
        if any(observation.tools for observation in seen):
            yield lambda way: (replace(way, without_tools=not way.without_tools),)
        if any(message.tool_calls for observation in seen for message in observation.messages):
            yield lambda way: (replace(way, tool_arguments=form) for form in ("auto", "string", "object"))
        if any(observation.stated for observation in seen):
            yield lambda way: (replace(way, uses_stated=not way.uses_stated),)
        if any(has_reasoning(message) for observation in seen for message in observation.messages):
            yield lambda way: (replace(way, reasoning=what) for what in ("as logged", "dropped", "in content"))
        yield self._vary_system
        if any(observation.is_answered for observation in seen):
            yield lambda way: (replace(way, generation_prompt=not way.generation_prompt, prefill=""),)
        yield self._vary_prefill

    def _vary_clock(self, way: Way) -> Iterator[Way]:
        """On today's date, on each date read from a prompt, or on the date of each prompt."""
        read = (self._writer.read_date(way, observation) for observation in self._seen)
        dates = list(dict.fromkeys(date for date in read if date is not None))
        bare = replace(way, varies=way.varies - {CLOCK})
        for date in (None, *dates):
            yield replace(bare, clock=date)
        if len(dates) > 1:
            yield replace(bare, clock=None, varies=bare.varies | {CLOCK})

    def _vary_argument(self, argument: Argument) -> Callable[[Way], Iterator[Way]]:
        """With its known values, those read from prompts, or each prompt's own."""
        name = argument.name
        stated = any(name in observation.stated for observation in self._seen)

        def ways(way: Way) -> Iterator[Way]:
            yield way.without_arg(name)
            for value in argument.values:
                yield way.with_arg(name, value)
                if stated:  # else the log's value overrides it
                    yield replace(way.with_arg(name, value), uses_stated=False)
            if argument.written:
                read = [self._writer.read_argument(way, name, observation) for observation in self._seen]
                for value in {repr(value): value for values in read for value in values}.values():
                    yield way.with_arg(name, value)
                if len({repr(values[0]) for values in read if values}) > 1:
                    yield replace(way.without_arg(name), varies=way.varies | {name})

        return ways

    def _vary_system(self, way: Way) -> Iterator[Way]:
        """With no system prompt, one read from prompts, or each prompt's own."""
        way = replace(way, varies=way.varies - {SYSTEM})
        yield replace(way, system=None, drops_system=False)
        if any(observation.messages[0].role in ("system", "developer") for observation in self._seen):
            yield replace(way, system=None, drops_system=True)
        texts = [text for observation in self._seen for text in self._writer.read_systems(way, observation)]
        for text, _ in Counter(texts).most_common(4):
            if not self._writer.holds_control(text):
                yield replace(way, system=text, drops_system=False)
        plain = replace(way, system=None, drops_system=False)
        own = {self._writer.read_own_system(plain, observation) for observation in self._seen}
        if len(own) > 1:
            yield replace(plain, varies=plain.varies | {SYSTEM})

    def _vary_bos(self, way: Way) -> Iterator[Way]:
        """With as many BOS tokens as recorded texts begin with."""
        bos = self._writer.bos
        if not bos:
            return
        plain = replace(way, bos=0)
        yield plain
        for observation in self._seen[:2]:
            text = self._writer.rendered_text(plain, observation)
            if text is not None:
                more = _count_leading(self._writer.recorded_text(observation), bos) - _count_leading(text, bos)
                if more in (-1, 1, 2):
                    yield replace(way, bos=more)

    def _vary_prefill(self, way: Way) -> Iterator[Way]:
        """With the text that recorded prompts have after the rendered text."""
        plain = replace(way, prefill="")
        yield plain
        for observation in self._seen:
            text = self._writer.rendered_text(plain, observation)
            recorded = self._writer.recorded_text(observation)
            has_end = observation.is_answered and not observation.answer  # else the answer follows in the text
            if has_end and text is not None and recorded.startswith(text) and 0 < len(recorded) - len(text) <= 400:
                yield replace(way, prefill=recorded[len(text) :])


def _count_leading(text: str, token: str) -> int:
    return next(number for number in count() if not text.startswith(token, number * len(token)))


@dataclass(frozen=True, slots=True)
class ConfirmedWay:
    """A way, and the observations that it writes exactly."""

    writer: Writer
    template: NamedTemplate
    way: Way
    written: frozenset[int]
    """Their positions."""
    read_systems: Mapping[int, str] = field(default_factory=dict)
    """The system prompt read from each, by position, if each has its own."""

    @property
    def name(self) -> str:
        """The name of its tokenizer."""
        return self.writer.tokenizer.name

    def rank(self, seen: Sequence[Observation]) -> tuple[int, int, int]:
        """A sort key: first prompts written, then all prompts written, then how little it claims."""
        first = sum(seen[at].is_first for at in self.written)
        cost = self.way.cost + sum(1 + len(text) // CHARACTERS for text in self.read_systems.values())
        return first, len(self.written), -cost


def confirm_way(writer: Writer, template: NamedTemplate, way: Way, seen: Sequence[Observation]) -> ConfirmedWay:
    """The prompts that a way writes exactly; it reads values from each prompt, if that writes more of them."""
    best = ConfirmedWay(writer, template, way, _written_exactly(writer, way, seen))
    others = []
    if way.clock is not None:
        others.append(replace(way, clock=None, varies=way.varies | {CLOCK}))
    if way.system is not None:
        others.append(replace(way, system=None, varies=way.varies | {SYSTEM}))
    for name, _ in way.args:
        argument = writer.arguments.named(name)
        if argument is not None and argument.written:
            others.append(replace(way.without_arg(name), varies=way.varies | {name}))
    for other in others:
        if len(best.written) == len(seen):
            break
        written = _written_exactly(writer, other, seen)
        if len(written) > len(best.written):
            best = replace(best, way=other, written=written)
    if SYSTEM not in best.way.varies:
        return best
    resolved = ((at, writer.resolve(best.way, seen[at])) for at in sorted(best.written))
    systems = {at: own.system for at, own in resolved if own is not None and own.system is not None}
    return replace(best, read_systems=systems)


def _written_exactly(writer: Writer, way: Way, seen: Sequence[Observation]) -> frozenset[int]:
    """The positions of the observations that a way writes exactly; of whole rows, all but the answers counts."""
    return frozenset(
        at
        for at, observation in enumerate(seen)
        if writer.writes_ids(way, observation)
        or (observation.part is Part.WHOLE and writer.writes_around_answers(way, observation))
    )


def pick_confirming(seen: Sequence[Observation], searched: Sequence[Observation]) -> list[Observation]:
    """The observations that a way is confirmed on: those of the search, and others evenly spread."""
    in_search = set(map(id, searched))
    picked = list(searched)
    size = sum(len(observation.ids) for observation in picked)
    for part in Part:
        others = [
            observation for observation in seen if observation.part is part and id(observation) not in in_search
        ]
        most = _CONFIRMED * 2 // 3 if part is Part.FIRST else _CONFIRMED // 3
        step = max(len(others) / most, 1.0)
        for observation in (others[int(number * step)] for number in range(min(most, len(others)))):
            size += len(observation.ids)
            if size > _CONFIRMED_IDS:
                break
            picked.append(observation)
    return picked


def find_ways(
    writer: Writer,
    template: NamedTemplate,
    start: Way,
    searched: Sequence[Observation],
    rest: Sequence[Observation],
) -> list[ConfirmedWay]:
    """The best way to write with a template, then up to two more for the first prompts it does not write."""
    explanations: list[ConfirmedWay] = []
    written = frozenset[int]()
    for _ in range(3):
        way = Search(writer, searched).find_best(explanations[0].way if explanations else start)
        if any(writer.writes_text(way, observation) for observation in searched):
            other = confirm_way(writer, template, way, rest)
        else:
            other = ConfirmedWay(writer, template, way, frozenset())
        if explanations and other.written <= written:
            break
        explanations.append(other)
        written |= other.written
        missing = [seen for at, seen in enumerate(rest) if at not in written and seen.is_first]
        if not written or len(missing) <= (1 - NEARLY_ALL) * len(rest):
            break
        searched = pick_for_search(missing, SEARCHED)
    return explanations
