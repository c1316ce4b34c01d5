"""Explains the prompts of a log by another way to write them, and says why that may not be certain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from json import dumps

from tito_audit.record.rollout import Rollout
from tito_audit.render.renderer import Renderer
from tito_audit.render.spans import common_start
from tito_audit.tokens.tokenizer import Tokenizer
from tito_audit.ways.observations import Observation, observe_rollouts, pick_for_search
from tito_audit.ways.recorded_values import MARK
from tito_audit.ways.search import NEARLY_ALL, SEARCHED, ConfirmedWay, find_ways, pick_confirming
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
    """The other settings (arguments, date, no tools) with which this template wrote the first rollouts of a log.

    None if the renderer writes them as it is set, which costs one rendering each, or if nothing does for certain.
    """
    seen = observe_rollouts(rollouts)
    first = [observation for observation in seen if observation.is_first] or seen
    start = Way.from_renderer(renderer)
    writer = Writer(tokenizer, renderer)
    right = 0
    for observation in first:
        right += writer.writes_ids(start, observation)
        if right > 0.8 * len(first):
            return None
    if not first:
        return None
    searched = pick_for_search(seen, SEARCHED)
    rest = pick_confirming(seen, searched)
    ways = find_ways(writer, GIVEN_TEMPLATE, start, searched, rest)
    ranked = sorted(ways, key=lambda way: way.rank(rest))[::-1]
    if not ranked or ranked[0].way == start or why_unsure(ranked, rest):
        return None
    return explain_way(ranked[0].way, writer, GIVEN_TEMPLATE, rest)


_VALUES = 8
"""Example values of a departure."""


def explain_way(way: Way, writer: Writer, template: NamedTemplate, seen: Sequence[Observation]) -> Explanation:
    """A way as flags and departures; a value that varies from row to row is set to the most frequent one."""
    own = [row_way for observation in seen if (row_way := writer.resolve(way, observation)) is not None]
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
        kind.NO_GENERATION_PROMPT: None if way.generation_prompt else "",
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


def why_unsure(ranked: Sequence[ConfirmedWay], rest: Sequence[Observation]) -> str:
    """Why the first of these ways, ranked best first, may not be the right one; "" if it is certain."""
    best = ranked[0]
    basis = [at for at, observation in enumerate(rest) if observation.is_first] or list(range(len(rest)))
    written = sum(at in best.written for at in basis)
    if written < NEARLY_ALL * len(basis) or not written:
        return f"it writes {written:,} of {len(basis):,} prompts exactly"
    prompts = {rest[at].ids.tobytes() for at in best.written}
    if best.way.departure_count and len(prompts) < 2:
        return "there is only one prompt, which many settings could explain"
    because = _doubt_of_systems(best, ranked[1:], rest) or _doubt_of_template(best, rest)
    if because:
        return because
    rivals = (other.written for other in ranked[1:] if sum(at in other.written for at in basis) >= written)
    if all(rival <= best.written for rival in rivals):
        return ""
    return "another explanation writes as many prompts, but different ones"


def _doubt_of_template(best: ConfirmedWay, rest: Sequence[Observation]) -> str:
    """Evidence that another template wrote the prompts; "" if there is none.

    Templates of one family often differ only for conversations that few rows have, such as those without a system
    message: so each kind of conversation needs a prompt that is written. A row with the right text in other tokens
    says nothing about the template, and answers known to be sampled may have drifted.
    """
    right: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    later_right: Counter[str] = Counter()
    later_wrong: Counter[str] = Counter()
    for at, observation in enumerate(rest):
        same = at in best.written or best.writer.writes_text(best.way, observation)
        if observation.is_first:
            (right if same else wrong)[observation.opening_in_words] += 1
        else:
            if not same and observation.sampled_prefix:
                same = best.writer.writes_around_answers(best.way, observation)
            (later_right if same else later_wrong)[observation.kind_in_words] += 1
    for opening, number in wrong.items():
        if not right[opening]:
            return f"it writes none of the first prompts {opening} ({number:,})"
    for kind, number in later_wrong.items():
        if not later_right[kind] or number > later_right.total() + later_wrong.total() / 2:
            return f"it writes different text for {number:,} {'prompt' if number == 1 else 'prompts'} with {kind}"
    return ""


_BEGINNING, _END = 24, 16
"""Characters of a common start or end of all system prompts from which it may be the template's."""
_SAID = 24
"""Characters from which a message's text is not in a system prompt by accident."""
_LIKELIER = "another template is likelier"


def _doubt_of_systems(best: ConfirmedWay, others: Iterable[ConfirmedWay], rest: Sequence[Observation]) -> str:
    """Why the system prompts that a way reads from prompts may be something else; "" if that is ruled out.

    Reading a text from each prompt proves nothing: whatever another template writes there would be read too.
    """
    read = best.read_systems
    if SYSTEM not in best.way.varies:
        read = {} if best.way.system is None else dict.fromkeys(best.written, best.way.system)
    if any(_repeats_log(text, rest[at], best) for at, text in read.items()):
        return f"the system prompt that it needs holds what the messages or tools say: {_LIKELIER}"
    if SYSTEM not in best.way.varies:
        return ""
    if len({(text, _first_text(rest[at])) for at, text in read.items()}) < 4:
        return "too few prompts open with a system prompt that the messages lack"
    by_tools: dict[tuple[object, ...], list[int]] = {}
    for at in read:
        stated = repr(sorted(rest[at].stated.items()))
        by_tools.setdefault((bool(rest[at].tools), stated), []).append(at)
    groups = by_tools.values()
    for group in groups:
        # It must be written between control tokens, before the first message.
        observation = rest[max(group, key=lambda at: len(_first_text(rest[at])))]
        way = best.writer.resolve(best.way.with_system(MARK), observation)
        marked = best.writer.rendered_text(way, observation) if way is not None else None
        before, _, after = (marked or "").partition(MARK)
        first = _first_text(observation)
        between = after[: max(after.find(first), 0)] if first else after
        if not best.writer.holds_control(before) or not best.writer.holds_control(between):
            return "the text that the messages lack is not written as a separate message"
    texts = [sorted({read[at] for at in group}) for group in groups]
    if all(len(group) == 1 for group in texts):
        return f"the system prompts that it needs depend on tools or arguments alone: {_LIKELIER}"
    if any(_share_start_or_end(group) for group in texts):
        return f"the system prompts that it needs begin or end with the same text: {_LIKELIER}"
    for other in others:
        theirs = other.read_systems
        if other.writer is best.writer or SYSTEM not in other.way.varies or theirs == read:
            continue
        # Longer ones in all prompts only hold more of the template, so this way is the better one.
        more = [len(theirs.get(at, "")) - len(read.get(at, "")) for at in {*read, *theirs}]
        if best.written <= other.written and (min(more) < 0 or max(more) < CHARACTERS):
            return "another explanation writes as many prompts, with other system prompts"
    return ""


def _first_text(observation: Observation) -> str:
    return observation.messages[0].text.strip()


def _share_start_or_end(texts: list[str]) -> bool:
    """Whether several texts, or all but one of them, begin or end with the same text."""
    but_one = [[*texts[:at], *texts[at + 1 :]] for at in range(len(texts))] if len(texts) > 2 else []
    for some in ([texts] if len(texts) > 1 else []) + but_one:
        first, last = min(some), max(some)
        beginning = first[: common_start(first, last)]
        turned = [text[::-1] for text in some]
        if len(beginning) >= _BEGINNING or "\n" in beginning or common_start(min(turned), max(turned)) >= _END:
            return True
    return False


def _repeats_log(text: str, observation: Observation, best: ConfirmedWay) -> bool:
    """Whether a text read as the system prompt holds the first message, or tools that are not rendered."""
    first = observation.messages[0]
    text_of_first = first.text.strip()
    if first.role in SYSTEM_ROLES:
        repeats = bool(text_of_first) and text_of_first in text and text_of_first != text.strip()
    else:
        repeats = len(text_of_first) >= _SAID and text_of_first[:200] in text
    if repeats:
        return True
    written = best.writer.rendered_text(best.way, observation) or ""
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
