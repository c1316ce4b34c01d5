"""The best way to write a few prompts, by hill climbing: one change at a time while the text gets closer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from tito_audit.render.spans import common_start
from tito_audit.ways.observed import Observation, Part, for_search
from tito_audit.ways.way import CHARACTERS, CLOCK, SYSTEM, NamedTemplate, Way, has_reasoning
from tito_audit.ways.writer import Writer

if TYPE_CHECKING:
    from tito_audit.render.arguments import Argument

SEARCHED = 8
"""How many observations are searched."""
NEARLY_ALL = 0.95
"""The share of the prompts that an explanation must write to be certain."""
_CONFIRMED, _CONFIRMED_IDS = 240, 2_000_000
"""How many observations confirm an explanation, and how many ids these have at most."""
_MOST_WRITTEN = 20_000_000
"""The most characters rendered in one search."""
_LATER, _FIRST = 2, 5
"""The weight of a prompt with answers, which may have drifted, and of one without."""


class Score(NamedTuple):
    """How well a way writes some prompts; greater is better."""

    exact: int
    near: float
    cheap: int


class Search:
    """The search with one tokenizer and template over a few observations."""

    def __init__(self, writer: Writer, seen: Sequence[Observation]) -> None:
        self._writer = writer
        self._until = writer.written + _MOST_WRITTEN
        self._seen = seen
        self._scores: dict[str, Score] = {}
        self._lines: dict[int, Counter[str]] = {}

    def best(self, start: Way) -> Way:
        """The way that writes most of the observations exactly, found from `start`; of equal ones the simplest."""
        best_way = self._climb(start)
        if self._is_exact(best_way):
            return self._simplest(best_way)
        for other in self._starts(best_way):
            if self._exhausted:
                break
            climbed = self._climb(other)
            best_way = climbed if self.score(climbed) > self.score(best_way) else best_way
            if self._is_exact(best_way):
                break
        return self._simplest(best_way)

    def score(self, way: Way) -> Score:
        """How well a way writes the observations."""
        key = repr(way)
        if key not in self._scores:
            exact, near = 0, 0.0
            for observation in self._seen:
                weight = _FIRST if observation.first else _LATER
                if self._writer.spells(way, observation):
                    exact += weight
                    near += weight
                else:
                    # How much of the recorded text is rendered, at its start, its end and line by line; below 1.
                    text = self._writer.text(way, observation)
                    recorded = self._writer.recorded(observation)
                    at = recorded.find(observation.answer) if observation.answer else -1
                    recorded = recorded[:at] if at > 0 else recorded
                    if not text or not recorded:
                        nearness = -1.0 if text is None else 0.0
                    else:
                        start = common_start(text, recorded)
                        end = min(common_start(text[::-1], recorded[::-1]), min(len(text), len(recorded)) - start)
                        lines = self._lines.setdefault(id(observation), Counter(recorded.split("\n")))
                        shared = sum(
                            len(line) * number + number
                            for line, number in (Counter(text.split("\n")) & lines).items()
                        )
                        longest = max(len(text), len(recorded))
                        nearness = 0.5 * (start + end) / longest + 0.49 * shared / (longest + 1)
                    near += weight * nearness
            self._scores[key] = Score(exact, round(near, 6), -way.cost)
        return self._scores[key]

    @property
    def _exhausted(self) -> bool:
        return self._writer.written > self._until

    def _is_exact(self, way: Way) -> bool:
        return all(self._writer.spells(way, observation) for observation in self._seen)

    def _climb(self, way: Way) -> Way:
        """The way after single changes, as long as one helps."""
        for _ in range(6):
            before = way
            for options in self._dimensions():
                if self._exhausted:
                    return way
                way = max((way, *options(way)), key=self.score)
            if way == before or self._is_exact(way):
                break
        return way

    def _starts(self, start: Way) -> Iterator[Way]:
        """Other starting points: all combinations of arguments if they are few, else each change alone."""
        choices = [[None, *argument.values] for argument in self._writer.arguments.arguments if argument.values]
        names = [argument.name for argument in self._writer.arguments.arguments if argument.values]
        if prod(map(len, choices)) <= 128:
            for values in product(*choices):
                way = start
                for name, value in zip(names, values, strict=True):
                    way = way.without_arg(name) if value is None else way.with_arg(name, value)
                yield way
            return
        for options in self._dimensions():
            yield from options(start)

    def _simplest(self, way: Way) -> Way:
        """The way without everything that no observation needs."""
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
            replace(way, opens=True),
            replace(way, prefill=""),
            replace(way, bos=0),
        ):
            if self.score(lighter).exact >= exact and lighter.cost < way.cost:
                return self._simplest(lighter)
        return way

    # What may be changed

    def _dimensions(self) -> Iterator[Callable[[Way], Iterable[Way]]]:
        """For each dimension, a function that makes the changed ways."""
        seen, arguments = self._seen, self._writer.arguments
        yield self._bos
        if arguments.reads_clock:
            yield self._clocks
        for argument in arguments.arguments:
            yield self._values(argument)
        if any(observation.tools for observation in seen):
            yield lambda way: (replace(way, without_tools=not way.without_tools),)
        if any(message.tool_calls for observation in seen for message in observation.messages):
            yield lambda way: (replace(way, tool_arguments=form) for form in ("auto", "string", "object"))
        if any(observation.stated for observation in seen):
            yield lambda way: (replace(way, uses_stated=not way.uses_stated),)
        if any(has_reasoning(message) for observation in seen for message in observation.messages):
            yield lambda way: (replace(way, reasoning=what) for what in ("as logged", "dropped", "in content"))
        yield self._system_prompts
        if any(observation.opens for observation in seen):
            yield lambda way: (replace(way, opens=not way.opens, prefill=""),)
        yield self._prefills

    def _clocks(self, way: Way) -> Iterator[Way]:
        dates = [date for observation in self._seen if (date := self._writer.date(way, observation)) is not None]
        bare = replace(way, varies=way.varies - {CLOCK})
        yield replace(bare, clock=None)
        for date in dict.fromkeys(dates):
            yield replace(bare, clock=date)
        if len(set(dates)) > 1:
            yield replace(bare, clock=None, varies=bare.varies | {CLOCK})

    def _values(self, argument: Argument) -> Callable[[Way], Iterator[Way]]:
        name = argument.name
        stated = any(name in observation.stated for observation in self._seen)

        def ways(way: Way) -> Iterator[Way]:
            yield way.without_arg(name)
            for value in argument.values:
                yield way.with_arg(name, value)
                if stated:  # else the log's value overrides it
                    yield replace(way.with_arg(name, value), uses_stated=False)
            if argument.written:
                read = [self._writer.value(way, name, observation) for observation in self._seen]
                for value in {repr(value): value for values in read for value in values}.values():
                    yield way.with_arg(name, value)
                if len({repr(values[0]) for values in read if values}) > 1:
                    yield replace(way.without_arg(name), varies=way.varies | {name})

        return ways

    def _system_prompts(self, way: Way) -> Iterator[Way]:
        way = replace(way, varies=way.varies - {SYSTEM})
        yield replace(way, system=None, drops_system=False)
        if any(observation.messages[0].role in ("system", "developer") for observation in self._seen):
            yield replace(way, system=None, drops_system=True)
        texts = [text for observation in self._seen for text in self._writer.system(way, observation)]
        for text, _ in Counter(texts).most_common(4):
            if not self._writer.holds_control(text):
                yield replace(way, system=text, drops_system=False)
        plain = replace(way, system=None, drops_system=False)
        own = {self._writer.own_system(plain, observation) for observation in self._seen}
        if len(own) > 1:
            yield replace(plain, varies=plain.varies | {SYSTEM})

    def _bos(self, way: Way) -> Iterator[Way]:
        """With BOS tokens added or removed, if the recorded texts begin with another number of them."""
        bos = self._writer.bos
        if not bos:
            return
        plain = replace(way, bos=0)
        yield plain
        for observation in self._seen[:2]:
            text = self._writer.text(plain, observation)
            if text is not None:
                more = _leading(self._writer.recorded(observation), bos) - _leading(text, bos)
                if more in (-1, 1, 2):
                    yield replace(way, bos=more)

    def _prefills(self, way: Way) -> Iterator[Way]:
        """With the text that all recorded prompts have after the rendered text."""
        plain = replace(way, prefill="")
        yield plain
        for observation in self._seen:
            text, recorded = self._writer.text(plain, observation), self._writer.recorded(observation)
            if observation.opens and not observation.answer and text is not None and recorded.startswith(text):
                rest = recorded[len(text) :]
                if 0 < len(rest) <= 400:
                    yield replace(way, prefill=rest)


def _leading(text: str, token: str) -> int:
    """How often a text begins with a token."""
    return next(number for number in count() if not text.startswith(token, number * len(token)))


# Which of the confirming rows a way writes exactly


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
        cost = self.way.cost + sum(1 + len(text) // CHARACTERS for text in self.read.values())
        return first, len(self.written), -cost


def confirmed(writer: Writer, template: NamedTemplate, way: Way, seen: Sequence[Observation]) -> Confirmed:
    """The prompts that a way writes; with values that vary from row to row, if that writes more."""
    best = Confirmed(writer, template, way, _written(writer, way, seen))
    # The ways in which a value that was read from one prompt is read from each of them
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
        written = _written(writer, other, seen)
        if len(written) > len(best.written):
            best = replace(best, way=other, written=written)
    if SYSTEM not in best.way.varies:
        return best
    own = ((at, best.writer.resolved(best.way, seen[at])) for at in sorted(best.written))
    return replace(best, read={at: way.system for at, way in own if way is not None and way.system is not None})


def _written(writer: Writer, way: Way, seen: Sequence[Observation]) -> frozenset[int]:
    return frozenset(
        at
        for at, observation in enumerate(seen)
        if writer.writes(way, observation)
        or (observation.part is Part.WHOLE and writer.writes_around_answers(way, observation))
    )


def spread(seen: Sequence[Observation], searched: Sequence[Observation]) -> list[Observation]:
    """The observations that confirm: those of the search, and others spread evenly over the rest."""
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


def explained(
    writer: Writer,
    template: NamedTemplate,
    start: Way,
    searched: Sequence[Observation],
    rest: Sequence[Observation],
) -> list[Confirmed]:
    """The best way to write with a template, and other ways for the rows that it does not explain."""
    explanations: list[Confirmed] = []
    written = frozenset[int]()
    for _ in range(3):  # of what is left, the unexplained rows are searched again
        way = Search(writer, searched).best(explanations[0].way if explanations else start)
        if any(writer.spells(way, observation) for observation in searched):
            other = confirmed(writer, template, way, rest)
        else:
            other = Confirmed(writer, template, way, frozenset())
        if explanations and other.written <= written:
            break
        explanations.append(other)
        written |= other.written
        missing = [seen for at, seen in enumerate(rest) if at not in written and seen.first]
        if not written or len(missing) <= (1 - NEARLY_ALL) * len(rest):
            break
        searched = for_search(missing, SEARCHED)
    return explanations
