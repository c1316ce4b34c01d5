"""Explains the first rollouts of a log by another way to write them, and says why that may not be certain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from json import dumps

from tito_audit.record.rollout import Rollout
from tito_audit.render.renderer import Renderer
from tito_audit.render.spans import common_start
from tito_audit.tokens.tokenizer import Tokenizer
from tito_audit.ways.observed import Observation, for_search, observations
from tito_audit.ways.reading import MARK
from tito_audit.ways.search import NEARLY_ALL, SEARCHED, Confirmed, explained, spread
from tito_audit.ways.way import (
    CHARACTERS,
    CLOCK,
    GIVEN_TEMPLATE,
    SYSTEM,
    SYSTEM_ROLES,
    Departure,
    DepartureKind,
    Explanation,
    NamedTemplate,
    Way,
)
from tito_audit.ways.writer import Writer


def explain_head(rollouts: Sequence[Rollout], tokenizer: Tokenizer, renderer: Renderer) -> Explanation | None:
    """What explains the first rollouts of a log with this tokenizer and template but other settings.

    Other settings are arguments, the date, or no tools. None if the renderer already explains the rollouts, or
    nothing does with certainty. If the renderer is right, this costs one rendering of each rollout.
    """
    seen = observations(rollouts)
    first = [observation for observation in seen if observation.first] or seen
    start = Way.of(renderer)
    writer = Writer(tokenizer, renderer)
    right = 0
    for observation in first:
        right += writer.writes(start, observation)
        if right > 0.8 * len(first):
            return None
    if not first:
        return None
    searched = for_search(seen, SEARCHED)
    rest = spread(seen, searched)
    explanations = sorted(
        explained(writer, GIVEN_TEMPLATE, start, searched, rest), key=lambda explanation: explanation.rank(rest)
    )
    best = explanations[-1] if explanations else None
    if best is None or best.way == start or unsure(explanations[::-1], rest):
        return None
    return explanation_of(best.way, writer, GIVEN_TEMPLATE, rest)


# A way as an explanation: the part that flags can express, and the rest


_VALUES = 8
"""The most example values named."""


def explanation_of(way: Way, writer: Writer, template: NamedTemplate, seen: Sequence[Observation]) -> Explanation:
    """The explanation of a way; values that vary from row to row are set to the most frequent one."""
    own = [row_way for observation in seen if (row_way := writer.resolved(way, observation)) is not None]
    clock, args = way.clock, dict(way.args)
    if way.varies and own:
        dates = Counter(row_way.clock for row_way in own)
        clock = dates.most_common(1)[0][0] if CLOCK in way.varies else clock
        for name in sorted(way.varies - {CLOCK, SYSTEM}):
            values = Counter(repr(dict(row_way.args)[name]) for row_way in own)
            wanted = values.most_common(1)[0][0]
            args[name] = next(value for row_way in own if repr(value := dict(row_way.args)[name]) == wanted)
    kind = DepartureKind
    stated = any(observation.messages[0].role in SYSTEM_ROLES for observation in seen)
    texts = {
        kind.SYSTEM_REPLACED if stated else kind.SYSTEM_ADDED: way.system,
        kind.SYSTEM_DROPPED: "" if way.drops_system else None,
        kind.NO_GENERATION_PROMPT: None if way.opens else "",
        kind.PREFILL: way.prefill or None,
        kind.BOS_ADDED: "" if way.bos > 0 else None,
        kind.BOS_MISSING: "" if way.bos < 0 else None,
        kind.REASONING_DROPPED: "" if way.reasoning == "dropped" else None,
        kind.REASONING_IN_CONTENT: "" if way.reasoning == "in content" else None,
        kind.STATED_UNUSED: None if way.uses_stated else "",
    }
    departures = [Departure(what, text) for what, text in texts.items() if text is not None]
    for name in sorted(way.varies):
        if name == CLOCK:
            days = sorted({str(row_way.clock.date()) for row_way in own if row_way.clock is not None})
            departures.append(Departure(kind.CLOCK_VARIES, "", tuple(days)[:_VALUES]))
        elif name == SYSTEM:
            systems = Counter(row_way.system for row_way in own if row_way.system is not None)
            most = tuple(text for text, _ in systems.most_common(_VALUES))
            departures.append(Departure(kind.SYSTEM_VARIES, "", most))
        else:
            read = dict.fromkeys(str(dict(row_way.args)[name]) for row_way in own)
            departures.append(Departure(kind.ARGUMENT_VARIES, name, tuple(read)[:_VALUES]))
    same = way.tool_arguments, clock, way.without_tools
    return Explanation(writer.tokenizer.name, template, args, *same, tuple(departures))


# Whether an explanation is certain


def unsure(ranked: Sequence[Confirmed], rest: Sequence[Observation]) -> str:
    """Why the first of these is not certain to be the explanation; "" if it is."""
    best = ranked[0]
    basis = [at for at, observation in enumerate(rest) if observation.first] or list(range(len(rest)))
    written = sum(at in best.written for at in basis)
    if written < NEARLY_ALL * len(basis) or not written:
        return f"it writes {written:,} of {len(basis):,} prompts exactly"
    prompts = {rest[at].ids.tobytes() for at in best.written}
    if best.way.departs and len(prompts) < 2:
        return "there is only one prompt, which many settings could explain"
    because = _doubt_of_systems(best, ranked[1:], rest) or _other_template(best, rest)
    if because:
        return because
    rivals = (other.written for other in ranked[1:] if sum(at in other.written for at in basis) >= written)
    if all(rival <= best.written for rival in rivals):
        return ""
    return "another explanation writes as many prompts, but different ones"


def _other_template(best: Confirmed, rest: Sequence[Observation]) -> str:
    """Evidence for another template in how conversations open, or in prompts with answers; "" if there is none.

    Two templates of a family often differ only for conversations that few rows have, such as those without a
    system message. A row with the right text and wrong tokens says nothing about the template. Only answers known
    to be sampled may have drifted: if anything else differs in most prompts of a kind, another template may have
    written them.
    """
    right: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    later_right: Counter[str] = Counter()
    later_wrong: Counter[str] = Counter()
    for at, observation in enumerate(rest):
        same = at in best.written or best.writer.spells(best.way, observation)
        if observation.first:
            (right if same else wrong)[observation.opening] += 1
        else:
            same = same or (observation.begun > 0 and best.writer.writes_around_answers(best.way, observation))
            (later_right if same else later_wrong)[observation.kind] += 1
    for opening, number in wrong.items():
        if not right[opening]:
            return f"it writes none of the first prompts {opening} ({number:,})"
    for kind, number in later_wrong.items():
        if not later_right[kind] or number > later_right.total() + later_wrong.total() / 2:
            return f"it writes different text for {number:,} {'prompt' if number == 1 else 'prompts'} with {kind}"
    return ""


# Why system prompts read from recorded prompts, and missing from the messages, may be something else. Reading a
# text from each prompt proves nothing: whatever another template writes there would be read too.


_BEGINNING, _END = 24, 16
"""A common start or end of all system prompts that is at least this long may be a template's."""
_SAID = 24
"""A message text of this many characters is not in a system prompt by accident."""
_LIKELIER = "another template is likelier"


def _doubt_of_systems(best: Confirmed, others: Iterable[Confirmed], rest: Sequence[Observation]) -> str:
    """Why the system prompts that an explanation reads may be something else; "" if it reads none, or they are
    certain.
    """
    read = best.read
    if SYSTEM not in best.way.varies:
        read = {} if best.way.system is None else dict.fromkeys(best.written, best.way.system)
    if any(_holds(text, rest[at], best) for at, text in read.items()):
        return f"the system prompt that it needs holds what the messages or tools say: {_LIKELIER}"
    if SYSTEM not in best.way.varies:
        return ""
    # Each prompt has a system prompt of its own.
    if len({(text, _first(rest[at])) for at, text in read.items()}) < 4:
        return "too few prompts open with a system prompt that the messages lack"
    by_tools: dict[tuple[object, ...], list[int]] = {}
    for at in read:
        stated = repr(sorted(rest[at].stated.items()))
        by_tools.setdefault((bool(rest[at].tools), stated), []).append(at)
    groups = by_tools.values()
    if not all(_in_own_message(best, rest[max(group, key=lambda at: len(_first(rest[at])))]) for group in groups):
        return "the text that the messages lack is not written as a separate message"
    texts = [sorted({read[at] for at in group}) for group in groups]
    if all(len(group) == 1 for group in texts):
        return f"the system prompts that it needs depend on tools or arguments alone: {_LIKELIER}"
    if any(_share_text(group) for group in texts):
        return f"the system prompts that it needs begin or end with the same text: {_LIKELIER}"
    for other in others:
        # Another template that writes the same prompts with other system prompts, which are not all longer
        if other.writer is best.writer or SYSTEM not in other.way.varies or other.read == read:
            continue
        more = [len(other.read.get(at, "")) - len(read.get(at, "")) for at in {*read, *other.read}]
        if best.written <= other.written and (min(more) < 0 or max(more) < CHARACTERS):
            return "another explanation writes as many prompts, with other system prompts"
    return ""


def _in_own_message(best: Confirmed, observation: Observation) -> bool:
    """Whether the system prompt is between control tokens, before the first message."""
    way = best.writer.resolved(best.way.with_system(MARK), observation)
    text = best.writer.text(way, observation) if way is not None else None
    if text is None:
        return False
    before, _, after = text.partition(MARK)
    first = _first(observation)
    start = after.find(first) if first else len(after)
    return best.writer.holds_control(before) and best.writer.holds_control(after[: max(start, 0)])


def _first(observation: Observation) -> str:
    return observation.messages[0].text.strip()


def _share_text(texts: list[str]) -> bool:
    """Whether all of several texts, or all but one, begin or end with the same text."""
    but_one = [[*texts[:at], *texts[at + 1 :]] for at in range(len(texts))] if len(texts) > 2 else []
    for some in ([texts] if len(texts) > 1 else []) + but_one:
        first, last = min(some), max(some)
        beginning = first[: common_start(first, last)]
        turned = [text[::-1] for text in some]
        if len(beginning) >= _BEGINNING or "\n" in beginning or common_start(min(turned), max(turned)) >= _END:
            return True
    return False


def _holds(text: str, observation: Observation, best: Confirmed) -> bool:
    """Whether a text read as the system prompt holds the message's text, or tools that are not rendered."""
    first = observation.messages[0]
    text_of_first = first.text.strip()
    if first.role in SYSTEM_ROLES:
        repeats = bool(text_of_first) and text_of_first in text and text_of_first != text.strip()
    else:
        repeats = len(text_of_first) >= _SAID and text_of_first[:200] in text
    if repeats:
        return True
    written = best.writer.text(best.way, observation) or ""
    for tool in observation.tools:
        function = tool.get("function", tool)
        function = function if isinstance(function, Mapping) else {}
        name, about = function.get("name"), function.get("description")
        quoted = f'"{name}"'
        # A tool that is defined only there; an example may name it elsewhere.
        if isinstance(name, str) and 0 < text.count(quoted) == written.count(quoted):
            about = about.strip() if isinstance(about, str) else ""
            if not about or any(form[:_SAID] in text for form in (about, dumps(about)[1:-1])):
                return True
    return False
