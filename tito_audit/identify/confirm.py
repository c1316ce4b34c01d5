"""Which of the confirming rows a way writes exactly, and which other ways write the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from json import dumps

from tito_audit.identify.model import NamedTemplate, Share
from tito_audit.identify.observe import Observation, Part, for_search
from tito_audit.identify.outside import differs_in_answers
from tito_audit.identify.search import common_start
from tito_audit.identify.ways import CHARACTERS, CLOCK, MARK, SYSTEM, Way, Writer, parsed
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
    if SYSTEM not in best.way.varies:
        return best
    own = ((at, best.writer.resolved(best.way, seen[at])) for at in sorted(best.written))
    return replace(best, read={at: way.system for at, way in own if way is not None and way.system is not None})


def _written(writer: Writer, way: Way, seen: Sequence[Observation]) -> frozenset[int]:
    return frozenset(
        at
        for at, observation in enumerate(seen)
        if writer.writes(way, observation)
        or (observation.part is Part.WHOLE and differs_in_answers(writer, way, observation))
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
    for at, observation in enumerate(seen):
        first, exact = observation.first, at in written
        tokens = len(observation.ids) if observation.part is not Part.START else 0  # the whole row is counted
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
    return bool(seen) and all(writer.alike(way, other, observation) for observation in seen)


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


# Why system prompts read from recorded prompts, and missing from the messages, may be something else. Reading a
# text from each prompt proves nothing: whatever another template writes there would be read too.


_LEAST = 4
"""How many system prompts with different first messages are needed."""
_BEGINNING, _END = 24, 16
"""A common start or end of all system prompts that is at least this long may be a template's."""
_SAID = 24
"""A message text of this many characters is not in a system prompt by accident."""
_LOOKED = 200
_LIKELIER = "another template is likelier"


def doubt_of_systems(best: Confirmed, others: Iterable[Confirmed], rest: Sequence[Observation]) -> str:
    """Why the system prompts that an explanation reads may be something else; "" if it reads none, or they are
    certain.
    """
    if SYSTEM in best.way.varies:
        read: Mapping[int, str] = best.read
    elif best.way.system is not None:
        read = dict.fromkeys(best.written, best.way.system)
    else:
        return ""
    if any(_holds(text, rest[at], best) for at, text in read.items()):
        return f"the system prompt that it needs holds what the messages or tools say: {_LIKELIER}"
    return _doubt_of_own(best, others, rest) if SYSTEM in best.way.varies else ""


def _doubt_of_own(best: Confirmed, others: Iterable[Confirmed], rest: Sequence[Observation]) -> str:
    """The same where each prompt has a system prompt of its own."""
    if len({(text, _first(rest[at])) for at, text in best.read.items()}) < _LEAST:
        return "too few prompts open with a system prompt that the messages lack"
    groups = _groups(best, rest)
    if not all(_in_own_message(best, rest[max(group, key=lambda at: len(_first(rest[at])))]) for group in groups):
        return "the text that the messages lack is not written as a separate message"
    texts = [sorted({best.read[at] for at in group}) for group in groups]
    if all(len(group) == 1 for group in texts):
        return f"the system prompts that it needs depend on tools or arguments alone: {_LIKELIER}"
    if any(_share_text(group) for group in texts):
        return f"the system prompts that it needs begin or end with the same text: {_LIKELIER}"
    if any(_rivals(best, other) for other in others):
        return "another explanation writes as many prompts, with other system prompts"
    return ""


def _groups(best: Confirmed, rest: Sequence[Observation]) -> list[list[int]]:
    """The prompts with a system prompt of their own, those of the same tools and stated arguments together."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for at in best.read:
        observation = rest[at]
        groups.setdefault((bool(observation.tools), repr(sorted(observation.stated.items()))), []).append(at)
    return list(groups.values())


def _in_own_message(best: Confirmed, observation: Observation) -> bool:
    """Whether the system prompt is between control tokens, before the first message."""
    way = best.writer.resolved(best.way.with_system(MARK), observation)
    text = best.writer.text(way, observation) if way is not None else None
    if text is None:
        return False
    before, _, after = text.partition(MARK)
    first = _first(observation)
    start = after.find(first) if first else len(after)
    return _has_control(best.writer, before) and _has_control(best.writer, after[: max(start, 0)])


def _has_control(writer: Writer, text: str) -> bool:
    return any(token in text for token in writer.renderer.control_texts)


def _first(observation: Observation) -> str:
    return observation.messages[0].text.strip()


def _share_text(texts: Sequence[str]) -> bool:
    """Whether all of several texts, or all but one, begin or end with the same text."""
    for some in _all_but_one(texts):
        first, last = min(some), max(some)
        beginning = first[: common_start(first, last)]
        turned = [text[::-1] for text in some]
        if len(beginning) >= _BEGINNING or "\n" in beginning or common_start(min(turned), max(turned)) >= _END:
            return True
    return False


def _all_but_one(texts: Sequence[str]) -> Iterator[list[str]]:
    if len(texts) > 1:
        yield list(texts)
    if len(texts) > 2:
        yield from ([*texts[:at], *texts[at + 1 :]] for at in range(len(texts)))


def _rivals(best: Confirmed, other: Confirmed) -> bool:
    """Whether another template writes the same prompts with other system prompts that are not all longer."""
    if other.writer is best.writer or not best.written <= other.written:
        return False
    if SYSTEM not in other.way.varies or other.read == best.read:
        return False
    own, theirs = best.read, other.read
    more = [len(theirs.get(at, "")) - len(own.get(at, "")) for at in {*own, *theirs}]
    return min(more) < 0 or max(more) < CHARACTERS


def _holds(text: str, observation: Observation, best: Confirmed) -> bool:
    """Whether a text read as the system prompt holds the message's text, or tools that are not rendered."""
    first = observation.messages[0]
    text_of_first = first.text.strip()
    if (
        first.role in ("system", "developer")
        and text_of_first
        and text_of_first in text
        and text_of_first != text.strip()
    ):
        return True
    if (
        first.role not in ("system", "developer")
        and len(text_of_first) >= _SAID
        and text_of_first[:_LOOKED] in text
    ):
        return True
    written = best.writer.text(best.way, observation) or ""
    functions = [tool.get("function", tool) for tool in observation.tools]
    return any(_writes_tool(text, written, each) for each in functions if isinstance(each, Mapping))


def _writes_tool(text: str, written: str, function: Mapping[str, object]) -> bool:
    """Whether a tool is defined only in a system prompt; an example may name it elsewhere."""
    name, about = function.get("name"), function.get("description")
    if not isinstance(name, str) or f'"{name}"' not in text:
        return False
    if written.count(f'"{name}"') != text.count(f'"{name}"'):
        return False
    if not isinstance(about, str) or not about.strip():
        return True
    return any(form[:_SAID] in text for form in (about.strip(), dumps(about.strip())[1:-1]))
