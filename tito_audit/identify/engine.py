"""The search over all candidates: what explains a log best, and whether that is certain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TypeAlias

import numpy as np

from tito_audit.errors import EncodeError, SetupError
from tito_audit.evidence.reference import Reference
from tito_audit.identify.model import (
    Candidate,
    Ending,
    Found,
    Identified,
    Lack,
    Left,
    Share,
    TokenizerFit,
)
from tito_audit.identify.tokenizer_fit import (
    Tested,
    not_read,
    not_the_tokenizer,
    share_back,
    tested,
    unknown_ids,
)
from tito_audit.record.arrays import Ids
from tito_audit.record.finding import Finding
from tito_audit.record.rollout import Place, Rollout
from tito_audit.record.runs import trained_runs
from tito_audit.render.globals import Clock
from tito_audit.render.renderer import Renderer, ToolArguments, make_renderer
from tito_audit.tokens.tokenizer import Tokenizer
from tito_audit.ways.explain import explanation_of, unsure
from tito_audit.ways.explanation import Explanation
from tito_audit.ways.observed import Observation, Part, for_search, observations
from tito_audit.ways.reading import PROBE, date_near
from tito_audit.ways.search import SEARCHED, Confirmed, explained, spread
from tito_audit.ways.way import CLOCK, Way
from tito_audit.ways.writer import Writer

Audit: TypeAlias = Callable[[Rollout, Tokenizer, Renderer], Iterable[Finding]]
"""What audits one rollout with a tokenizer and a renderer."""

_TESTED = 16
"""How many rollouts decide whether a tokenizer fits."""
_SECONDS, _CHARACTERS = 2.0, 8 * 1024 * 1024
"""Limits of time and size for one rendering in a search."""


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
    fitted = Identified(tokenizers=tuple(fits))
    if not fitting:
        return replace(fitted, lack=Lack.NO_TOKENIZER)
    seen = observations(rollouts)
    ends = endings(rollouts, Reference(fitting[0].tokenizer, None))
    if not seen:
        return replace(fitted, lack=Lack.NO_MESSAGES, endings=ends)
    searched = for_search(seen, SEARCHED)
    rest = spread(seen, searched)
    confirmed_ways: list[Confirmed] = []
    for candidate in fitting:
        for template in candidate.templates:
            try:
                renderer = template.renderer(candidate.tokenizer, time_limit=_SECONDS, size_limit=_CHARACTERS)
            except SetupError:
                continue
            writer = Writer(candidate.tokenizer, renderer)
            confirmed_ways += explained(writer, template, Way(), searched, rest)
    if not confirmed_ways:
        return replace(fitted, lack=Lack.NO_TEMPLATE, endings=ends)
    return _identified(fitted, confirmed_ways, searched, rest, rollouts, audit)


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


def _identified(
    so_far: Identified,
    confirmed_ways: list[Confirmed],
    searched: Sequence[Observation],
    rest: Sequence[Observation],
    rollouts: Sequence[Rollout],
    audit: Audit | None,
) -> Identified:
    unknown = {way.name: unknown_ids(rollouts, way.writer.tokenizer) for way in confirmed_ways}
    ranked = sorted(confirmed_ways, key=lambda way: (*way.rank(rest), -unknown[way.name]), reverse=True)
    best = ranked[0]
    if not best.written:
        ends = endings(rollouts, Reference(best.writer.tokenizer, None))
        return replace(so_far, unsure_because=unsure(ranked, rest), endings=ends, left=_unwritten(best, rest))
    tool_calls = (call for rollout in rollouts for message in rollout.messages for call in message.tool_calls)
    calls = any(isinstance(call.arguments, str) for call in tool_calls)
    listed: list[Found] = []
    counted: set[frozenset[int]] = set()
    for explanation in ranked:
        if explanation.written and explanation.written not in counted:
            counted.add(explanation.written)
            same = [other for other in ranked if other is not explanation and other.written == explanation.written]
            ways, undetermined = equal_ways(explanation, rest, calls_tools=calls)
            equal = [explanation_of(way, explanation.writer, explanation.template, rest) for way in ways]
            equal += [explanation_of(other.way, other.writer, other.template, rest) for other in same]
            own = explanation_of(explanation.way, explanation.writer, explanation.template, rest)
            others = tuple(other for other in equal if other != own)
            listed.append(Found(own, share_of(explanation.written, rest), others, tuple(undetermined)))
    because = unsure(ranked, rest)
    return replace(
        so_far,
        found=tuple(listed),
        sure=not because,
        unsure_because=because,
        left=_left(best, listed[0].explanation, rest, rollouts, audit),
        endings=endings(rollouts, Reference(best.writer.tokenizer, None)),
        rows_searched=len(searched),
        rows_confirmed=len(rest),
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
    dates: dict[Place, datetime | None] = {}
    if CLOCK in best.way.varies:
        ways = ((observation.place, best.writer.resolved(best.way, observation)) for observation in rest)
        dates = {place: way.clock for place, way in ways if way is not None}
    causes = []
    for rollout in [each for each in rollouts if each.place in missing][:48]:
        date = dates.get(rollout.place)
        renderer = same_date if date is None else replace(same_date, clock=Clock(date))
        for finding in audit(rollout, tokenizer, renderer):
            causes.append((f"{finding.code} {finding.hit.cause}".rstrip(), finding.place, finding.hit.turn))
    return _by_cause(causes) or _unwritten(best, rest)


def _unwritten(best: Confirmed, rest: Sequence[Observation]) -> tuple[Left, ...]:
    """The same without an audit: the template refuses, or text or tokens differ."""
    writer, way, causes = best.writer, best.way, []
    for at, observation in enumerate(rest):
        if at not in best.written:
            cause = "the same text in other tokens" if writer.spells(way, observation) else "another text"
            if writer.writes_around_answers(way, observation):
                cause += ", in answers"
            refusal = writer.refusal(way, observation) if writer.text(way, observation) is None else None
            if refusal is not None:
                cause = f"the template refuses the messages: {refusal}"
            causes.append((cause, observation.place, observation.turn))
    return _by_cause(causes)


def _by_cause(causes: Sequence[tuple[str, Place, int | None]]) -> tuple[Left, ...]:
    """Each cause with its number and its first place, the most frequent first."""
    numbers = Counter(cause for cause, _, _ in causes)
    first = {cause: (place, turn) for cause, place, turn in reversed(causes)}
    return tuple(Left(cause, number, *first[cause]) for cause, number in numbers.most_common())


def share_of(written: frozenset[int], seen: Sequence[Observation]) -> Share:
    """How many prompts, turns and tokens are written exactly, out of all."""
    first = {at for at, observation in enumerate(seen) if observation.first}
    # A row whose prompt is counted apart is counted as a whole too, with all its tokens.
    sizes = [0 if observation.part is Part.START else len(observation.ids) for observation in seen]
    tokens = sum(sizes[at] for at in written)
    turns, of_turns = len(written - first), len(seen) - len(first)
    return Share(len(first & written), len(first), turns, of_turns, tokens, sum(sizes))


def equal_ways(best: Confirmed, seen: Sequence[Observation], *, calls_tools: bool) -> tuple[list[Way], list[str]]:
    """Other argument values that write the same, and the arguments that make no difference.

    With `calls_tools`, the form of tool call arguments counts as such an argument too.
    """
    writer, way = best.writer, best.way
    few = for_search([seen[at] for at in sorted(best.written)], 24)
    dated: list[Way] = []  # the same date as an argument instead of the clock's, and vice versa
    for argument in writer.arguments.arguments:
        format_, value = argument.clock_format, dict(way.args).get(argument.name)
        if format_ is not None and way.clock is not None and value is None:
            dated.append(replace(way, clock=None).with_arg(argument.name, way.clock.strftime(format_)))
        elif format_ is not None and isinstance(value, str):
            date = date_near(PROBE(format_), value)
            if date is not None:
                dated.append(replace(way.without_arg(argument.name), clock=date))
    equal = [other for other in dated if other != way and _same(writer, way, other, few)]
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
        if others and len(same) == len(others) and not way.states(argument.name):
            undetermined.append(argument.name)
        else:
            equal += same
    return equal, undetermined


def _same(writer: Writer, way: Way, other: Way, seen: Sequence[Observation]) -> bool:
    return bool(seen) and all(writer.alike(way, other, observation) for observation in seen)


_CUT_OFF = frozenset(("length", "max_tokens", "abort", "error"))


def endings(rollouts: Iterable[Rollout], reference: Reference) -> tuple[Ending, ...]:
    """The control tokens that end sampled turns, the most frequent first."""
    ends, vocabulary = reference.end_ids(), reference.vocabulary
    turns: Counter[int] = Counter()
    after: dict[int, Counter[str]] = {}
    for rollout in rollouts:
        for answer, rest in _answers(rollout):
            last = int(answer[-1])
            if last in ends:
                turns[last] += 1
                if rest is not None:  # the text before the next control token
                    rest = rest[:32]
                    control = np.flatnonzero(vocabulary.control(rest))
                    gap = vocabulary.text(rest[: int(control[0])] if len(control) else rest)
                    after.setdefault(last, Counter())[gap] += 1
    return tuple(
        Ending(
            token, vocabulary.piece(token), number, after[token].most_common(1)[0][0] if token in after else None
        )
        for token, number in turns.most_common(6)
    )


def _answers(rollout: Rollout) -> Iterator[tuple[Ids, Ids | None]]:
    """Every sampled turn that was not cut off, with the ids that follow it in the next prompt or the row."""
    for turn, later in zip(rollout.turns, (*rollout.turns[1:], None), strict=False):
        ids = turn.completion_ids
        if ids is None or not len(ids) or turn.finish_reason in _CUT_OFF:
            continue
        seen, prompt = turn.seen_ids, later.prompt_ids if later is not None else None
        goes_on = seen is not None and prompt is not None and len(prompt) > len(seen)
        same = goes_on and seen is not None and prompt is not None and np.array_equal(prompt[: len(seen)], seen)
        yield ids, prompt[len(seen) :] if same and prompt is not None and seen is not None else None
    row = rollout.training_row
    if not rollout.turns and row is not None and row.loss_mask is not None:
        for start, end in trained_runs(row.loss_mask):
            rest = row.token_ids[end:]
            yield row.token_ids[start:end], rest if len(rest) else None
