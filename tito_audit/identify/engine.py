"""The search over all candidates: what explains a log best, and whether that is certain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TypeAlias

from tito_audit.errors import EncodeError, SetupError
from tito_audit.evidence.reference import Reference
from tito_audit.identify.confirm import Confirmed, confirmed, doubt_of_systems, equal_ways, share_of
from tito_audit.identify.model import (
    GIVEN_TEMPLATE,
    Candidate,
    Departure,
    DepartureKind,
    Explanation,
    Found,
    Identified,
    Lack,
    Left,
    NamedTemplate,
    TokenizerFit,
)
from tito_audit.identify.observe import Observation, Part, endings, for_search, observations
from tito_audit.identify.outside import differs_in_answers
from tito_audit.identify.search import Search
from tito_audit.identify.tokenizer_fit import (
    Tested,
    not_read,
    not_the_tokenizer,
    share_back,
    tested,
    unknown_ids,
)
from tito_audit.identify.ways import CLOCK, SYSTEM, Way, Writer
from tito_audit.record.finding import Finding
from tito_audit.record.rollout import Place, Rollout
from tito_audit.render.globals import Clock
from tito_audit.render.renderer import Renderer, make_renderer
from tito_audit.terminal.words import many
from tito_audit.tokens.tokenizer import Tokenizer

Audit: TypeAlias = Callable[[Rollout, Tokenizer, Renderer], Iterable[Finding]]
"""What audits one rollout with a tokenizer and a renderer."""

_SEARCHED = 8
"""How many observations are searched."""
_CONFIRMED, _CONFIRMED_IDS = 240, 2_000_000
"""How many observations confirm an explanation, and how many ids these have at most."""
_TESTED = 16
"""How many rollouts decide whether a tokenizer fits."""
_AUDITED = 48
"""How many rollouts are audited to name what is unexplained."""
_NEARLY_ALL = 0.95
"""The share of the prompts that an explanation must write to be certain."""
_RIGHT = 0.8
"""If a renderer writes this share of the prompts, no search is needed."""
_SECONDS, _CHARACTERS = 2.0, 8 * 1024 * 1024
"""Limits of time and size for one rendering in a search."""
_AGAIN = 2
"""How often unexplained rows are searched again."""


def identify(
    rollouts: Sequence[Rollout], candidates: Sequence[Candidate], *, audit: Audit | None = None
) -> Identified:
    """What explains the recorded ids of these rollouts: a few hundred of a log, including its first.

    `audit` counts what the best explanation leaves unexplained, by the findings of an audit with it.
    """
    rows = tested(rollouts[: 4 * _TESTED])[:_TESTED]
    if not rows:
        return Identified(lack=Lack.NO_IDS)
    # Whether each tokenizer can have written the ids; clear misfits are not loaded.
    tokenizers = [offered.tokenizer for offered in candidates]
    whys = not_read(rows, tokenizers)
    fits = [
        _fit(rows, tokenizer) if why is None else TokenizerFit(tokenizer.name, False, why)
        for tokenizer, why in zip(tokenizers, whys, strict=True)
    ]
    fitting = [offered for offered, fit in zip(candidates, fits, strict=True) if fit.fits]
    known = Identified(tokenizers=tuple(fits))
    if not fitting:
        return replace(known, lack=Lack.NO_TOKENIZER)
    seen = observations(rollouts)
    ends = endings(rollouts, Reference(fitting[0].tokenizer, None))
    if not seen:
        return replace(known, lack=Lack.NO_MESSAGES, endings=ends)
    searched = for_search(seen, _SEARCHED)
    rest = _spread(seen, searched)
    all_found: list[Confirmed] = []
    for candidate in fitting:
        for template in candidate.templates:
            writer = _writer(candidate.tokenizer, template)
            if writer is not None:
                all_found += _explained(writer, template, Way(), searched, rest)
    if not all_found:
        return replace(known, lack=Lack.NO_TEMPLATE, endings=ends)
    return _identified(known, all_found, searched, rest, rollouts, audit)


def explain_head(rollouts: Sequence[Rollout], tokenizer: Tokenizer, renderer: Renderer) -> Explanation | None:
    """What explains the first rollouts of a log with this tokenizer and template but other settings.

    Other settings are arguments, the date, or no tools. None if the renderer already explains the rollouts, or
    nothing does with certainty. If the renderer is right, this costs one rendering of each rollout.
    """
    seen = observations(rollouts)
    first = [observation for observation in seen if observation.first] or seen
    start = Way(
        tuple(renderer.template_args.items()),
        renderer.tool_arguments,
        renderer.clock.at if renderer.clock is not None else None,
        renderer.without_tools,
    )
    writer = Writer(tokenizer, renderer)
    right = 0
    for observation in first:
        right += writer.writes(start, observation)
        if right > _RIGHT * len(first):
            return None
    if not first:
        return None
    searched = for_search(seen, _SEARCHED)
    rest = _spread(seen, searched)
    explanations = sorted(
        _explained(writer, GIVEN_TEMPLATE, start, searched, rest), key=lambda explanation: explanation.rank(rest)
    )
    best = explanations[-1] if explanations else None
    if best is None or best.way == start or _unsure(explanations[::-1], searched, rest):
        return None
    return explanation_of(best.way, writer, GIVEN_TEMPLATE, rest)


def _fit(rows: Tested, tokenizer: Tokenizer) -> TokenizerFit:
    """Whether a tokenizer can have written the ids."""
    try:
        renderer = make_renderer(tokenizer, time_limit=_SECONDS, size_limit=_CHARACTERS)
    except SetupError:
        renderer = None
    reference = Reference(tokenizer, renderer)
    try:
        why = not_the_tokenizer(rows, reference)
        if why is not None:
            return TokenizerFit(tokenizer.name, False, why)
        return TokenizerFit(tokenizer.name, True, same=share_back(rows, reference))
    except EncodeError as error:
        return TokenizerFit(tokenizer.name, False, str(error).split("\n")[0])


def _writer(tokenizer: Tokenizer, template: NamedTemplate) -> Writer | None:
    """A writer for a template; None if the tokenizer has none, or it does not compile."""
    try:
        renderer = make_renderer(
            tokenizer,
            chat_template=template.source,
            template_name=template.template_name,
            time_limit=_SECONDS,
            size_limit=_CHARACTERS,
        )
    except SetupError:
        return None
    return Writer(tokenizer, renderer)


def _spread(seen: Sequence[Observation], searched: Sequence[Observation]) -> list[Observation]:
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


def _explained(
    writer: Writer,
    template: NamedTemplate,
    start: Way,
    searched: Sequence[Observation],
    rest: Sequence[Observation],
) -> list[Confirmed]:
    """The best way to write with a template, and other ways for the rows that it does not explain."""
    explanations = [_searched(writer, template, start, searched, rest)]
    for _ in range(_AGAIN):
        written = frozenset().union(*(each.written for each in explanations))
        missing = [seen for at, seen in enumerate(rest) if at not in written and seen.first]
        if not explanations[0].written or len(missing) <= (1 - _NEARLY_ALL) * len(rest):
            break
        other = _searched(writer, template, explanations[0].way, for_search(missing, _SEARCHED), rest)
        if other.written <= written:
            break
        explanations.append(other)
    return explanations


def _searched(
    writer: Writer,
    template: NamedTemplate,
    start: Way,
    searched: Sequence[Observation],
    rest: Sequence[Observation],
) -> Confirmed:
    way = Search(writer, searched).best(start)
    if not any(writer.spells(way, observation) for observation in searched):
        return Confirmed(writer, template, way, frozenset())
    return confirmed(writer, template, way, rest)


def _unsure(ranked: Sequence[Confirmed], searched: Sequence[Observation], rest: Sequence[Observation]) -> str:
    """Why the first of these is not certain to be the explanation; "" if it is."""
    best = ranked[0]
    basis = [at for at, observation in enumerate(rest) if observation.first] or list(range(len(rest)))
    written = sum(at in best.written for at in basis)
    if written < _NEARLY_ALL * len(basis) or not written:
        return f"it writes {written:,} of {len(basis):,} prompts exactly"
    prompts = {rest[at].ids.tobytes() for at in best.written}
    if best.way.departs and len(prompts) < 2:
        return "there is only one prompt, which many settings could explain"
    because = doubt_of_systems(best, ranked[1:], rest) or _other_opening(best, rest) or _other_history(best, rest)
    if because:
        return because
    for other in ranked[1:]:
        does = sum(at in other.written for at in basis)
        if does >= written and not other.written <= best.written:
            return "another explanation writes as many prompts, but different ones"
    return ""


def _other_opening(best: Confirmed, rest: Sequence[Observation]) -> str:
    """Evidence for another template in how conversations open; "" if there is none.

    Two templates of a family often differ only for conversations that few rows have, such as those without a
    system message. A row with the right text and wrong tokens says nothing about the template.
    """
    right: set[str] = set()
    wrong: Counter[str] = Counter()
    for at, observation in enumerate(rest):
        if observation.first:
            if at in best.written or best.writer.spells(best.way, observation):
                right.add(observation.opening)
            else:
                wrong[observation.opening] += 1
    for opening, number in wrong.items():
        if opening not in right:
            return f"it writes none of the first prompts {opening} ({number:,})"
    return ""


def _other_history(best: Confirmed, rest: Sequence[Observation]) -> str:
    """Evidence for another template in prompts with answers; "" if there is none.

    Only answers known to be sampled may have drifted. If anything else differs in most prompts of a kind, another
    template may have written them.
    """
    right: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    for at, observation in enumerate(rest):
        if not observation.first:
            same = at in best.written or best.writer.spells(best.way, observation)
            same = same or (observation.begun > 0 and differs_in_answers(best.writer, best.way, observation))
            (right if same else wrong)[observation.kind] += 1
    for kind, number in wrong.items():
        if not right[kind] or number > right.total() + wrong.total() / 2:
            return f"it writes different text for {many(number, 'prompt')} with {kind}"
    return ""


def _identified(
    so_far: Identified,
    all_found: list[Confirmed],
    searched: Sequence[Observation],
    rest: Sequence[Observation],
    rollouts: Sequence[Rollout],
    audit: Audit | None,
) -> Identified:
    unknown = {explanation.name: unknown_ids(rollouts, explanation.writer.tokenizer) for explanation in all_found}
    ranked = sorted(
        all_found, key=lambda explanation: (*explanation.rank(rest), -unknown[explanation.name]), reverse=True
    )
    best = ranked[0]
    if not best.written:
        ends = endings(rollouts, Reference(best.writer.tokenizer, None))
        return replace(
            so_far, unsure_because=_unsure(ranked, searched, rest), endings=ends, left=_unwritten(best, rest)
        )
    tool_calls = (call for rollout in rollouts for message in rollout.messages for call in message.tool_calls)
    calls = any(isinstance(call.arguments, str) for call in tool_calls)
    listed: list[Found] = []
    counted: set[frozenset[int]] = set()
    for explanation in ranked:
        if explanation.written and explanation.written not in counted:
            counted.add(explanation.written)
            same = [other for other in ranked if other is not explanation and other.written == explanation.written]
            listed.append(_found(explanation, same, rest, calls_tools=calls))
    because = _unsure(ranked, searched, rest)
    tokenizer = best.writer.tokenizer
    return replace(
        so_far,
        found=tuple(listed),
        sure=not because,
        unsure_because=because,
        left=_left(best, listed[0].explanation, rest, rollouts, audit),
        endings=endings(rollouts, Reference(tokenizer, None)),
        rows_searched=len(searched),
        rows_confirmed=len(rest),
    )


def _found(best: Confirmed, same: Sequence[Confirmed], rest: Sequence[Observation], *, calls_tools: bool) -> Found:
    """An explanation with the others that write the same."""
    ways, undetermined = equal_ways(best, rest, calls_tools=calls_tools)
    equal = [explanation_of(way, best.writer, best.template, rest) for way in ways]
    equal += [explanation_of(other.way, other.writer, other.template, rest) for other in same]
    explanation = explanation_of(best.way, best.writer, best.template, rest)
    return Found(
        explanation,
        share_of(best.written, rest),
        tuple(other for other in equal if other != explanation),
        tuple(undetermined),
    )


def _left(
    best: Confirmed,
    explanation: Explanation,
    rest: Sequence[Observation],
    rollouts: Sequence[Rollout],
    audit: Audit | None,
) -> tuple[Left, ...]:
    """The prompts that the best explanation does not write, counted by cause."""
    missing = {rest[at].place for at in range(len(rest)) if at not in best.written}
    if not missing or audit is None:
        return _unwritten(best, rest)
    tokenizer = best.writer.tokenizer
    same_date = explanation.renderer(tokenizer)
    own = _own_dates(best, rest)
    numbers: Counter[str] = Counter()
    first: dict[str, Finding] = {}
    for rollout in [each for each in rollouts if each.place in missing][:_AUDITED]:
        date = own.get(rollout.place)
        renderer = same_date if date is None else replace(same_date, clock=Clock(date))
        for finding in audit(rollout, tokenizer, renderer):
            cause = f"{finding.code} {finding.hit.cause}".rstrip()
            numbers[cause] += 1
            first.setdefault(cause, finding)
    causes = tuple(
        Left(cause, number, first[cause].place, first[cause].hit.turn) for cause, number in numbers.most_common()
    )
    return causes or _unwritten(best, rest)


def _own_dates(best: Confirmed, rest: Sequence[Observation]) -> dict[Place, datetime | None]:
    """The date of each rollout, if dates vary."""
    if CLOCK not in best.way.varies:
        return {}
    own = ((observation.place, best.writer.resolved(best.way, observation)) for observation in rest)
    return {place: way.clock for place, way in own if way is not None}


def _unwritten(best: Confirmed, rest: Sequence[Observation]) -> tuple[Left, ...]:
    """The same without an audit: the template refuses, or text or tokens differ."""
    numbers: Counter[str] = Counter()
    first: dict[str, Observation] = {}
    for at, observation in enumerate(rest):
        if at not in best.written:
            text = best.writer.text(best.way, observation)
            refusal = best.writer.refusal(best.way, observation) if text is None else None
            sampled = differs_in_answers(best.writer, best.way, observation)
            what = "the same text in other tokens" if best.writer.spells(best.way, observation) else "another text"
            cause = f"{what}, in answers" if sampled else what
            cause = f"the template refuses the messages: {refusal}" if refusal is not None else cause
            numbers[cause] += 1
            first.setdefault(cause, observation)
    return tuple(
        Left(cause, number, first[cause].place, first[cause].turn) for cause, number in numbers.most_common()
    )


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
        stated = any(observation.messages[0].role in ("system", "developer") for observation in seen)
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
            dates = dict.fromkeys(str(row_way.clock.date()) for row_way in own if row_way.clock is not None)
            yield Departure(kind.CLOCK_VARIES, "", tuple(sorted(dates))[:_VALUES])
        elif name == SYSTEM:
            systems = Counter(row_way.system for row_way in own if row_way.system is not None)
            yield Departure(kind.SYSTEM_VARIES, "", tuple(text for text, _ in systems.most_common(_VALUES)))
        else:
            values = dict.fromkeys(str(dict(row_way.args)[name]) for row_way in own)
            yield Departure(kind.ARGUMENT_VARIES, name, tuple(values)[:_VALUES])
