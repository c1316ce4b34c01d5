"""Gathers the evidence on a rollout: every comparison is made once, before any rule runs."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce
from itertools import accumulate
from operator import attrgetter, or_

import numpy as np

from tito_audit.align.alignment import align
from tito_audit.align.blocks import SAME_BYTES
from tito_audit.align.pieces import Pieces
from tito_audit.evidence.chains import Chains, chain_turns
from tito_audit.evidence.completions import (
    CompletionInContext,
    ConfirmedIds,
    answers_to_reencode,
    reencoded_differences,
)
from tito_audit.evidence.differences import merge_duplicates
from tito_audit.evidence.images import has_images, image_tokens, is_expansion
from tito_audit.evidence.judgement import JUDGEMENT, judge_view
from tito_audit.evidence.model import Against, Difference, Evidence, KnownCause, RowComparison, Verified
from tito_audit.evidence.needs import Needs
from tito_audit.evidence.prompts import RenderedTexts, render_texts, rendered_differences
from tito_audit.evidence.recover import recover_ids
from tito_audit.evidence.reference import Reference
from tito_audit.evidence.rendered import render_conversation
from tito_audit.evidence.roles import TEMPLATE, Roles
from tito_audit.evidence.row import (
    UNRELATED_MESSAGES,
    answer_in_row,
    compare_row_to_calls,
    compare_row_to_itself,
    compare_row_to_request,
    compare_row_to_template,
    lacks_answer,
    response_holds_given_turns,
)
from tito_audit.evidence.sft import is_sft, with_sampled_ends, with_trained_edges
from tito_audit.evidence.unrelated import Unrelated, messages_are_unrelated
from tito_audit.record.column import ColumnRole
from tito_audit.record.finding import Severity, Where
from tito_audit.record.policy_columns import versions_and_trainers_logged
from tito_audit.record.reading import NO_CONVENTIONS, Conventions
from tito_audit.record.rollout import (
    IdsFrom,
    Rollout,
    TrainingRow,
    Turn,
    hidden_and_trained,
    visible_range,
    with_call_as_row,
    with_speakers,
)
from tito_audit.record.speakers import DEFAULT_SPEAKERS, Speakers
from tito_audit.record.stated import Unread
from tito_audit.record.token_extras import NO_EXTRAS
from tito_audit.record.trainings import TrainedAgain
from tito_audit.render.renderer import Renderer
from tito_audit.tokens.tokenizer import Tokenizer
from tito_audit.ways.observations import Part, observe_prompt, prompt_messages
from tito_audit.ways.other_texts import OtherWays, tools_as_sent
from tito_audit.ways.recorded_values import date_formats
from tito_audit.ways.writer import Writer


def gather(
    rollout: Rollout,
    tokenizer: Tokenizer | None,
    renderer: Renderer | None,
    speakers: Speakers = DEFAULT_SPEAKERS,
    conventions: Conventions = NO_CONVENTIONS,
    trained_again: tuple[TrainedAgain, ...] = (),
) -> Evidence:
    """The evidence on a rollout. Never raises because of what a log holds.

    `speakers` says which roles were sampled, `conventions` how the run writes its training rows, and
    `trained_again` what it trains more than once in this rollout. Without a tokenizer only ids are compared;
    without a renderer or messages, nothing is compared with the template.
    """
    rollout = with_speakers(rollout, speakers)
    reference = Reference(tokenizer, renderer, speakers) if tokenizer is not None else None
    end_ids = reference.end_ids() if reference is not None else frozenset[int]()
    problems: tuple[tuple[int, str], ...] = ()
    if rollout.turns:
        rollout, problems = _with_recovered_ids(rollout, reference)
    if reference is not None and rollout.turns and response_holds_given_turns(rollout, reference):
        rollout = with_call_as_row(rollout)
        assert rollout.training_row is not None
        first = rollout.training_row.prompt_length or 0
        trained_again = tuple(
            again
            if again.turn is None
            else replace(again, turn=None, runs=tuple((start + first, end + first) for start, end in again.runs))
            for again in trained_again
        )
    if reference is not None and rollout.stated.converted_tools:
        rollout = replace(rollout, tools=tools_as_sent(rollout, reference.vocabulary))
    unrelated: list[Unrelated] = []
    if reference is not None and rollout.turns and messages_are_unrelated(rollout, reference.decode):
        unrelated.append(UNRELATED_MESSAGES)
        rollout = _without_messages(rollout, _OF_OTHERS)
    chains = chain_turns(rollout, reference)
    texts: RenderedTexts = {}
    errors: tuple[tuple[int | None, str], ...] = ()
    confirmed: tuple[ConfirmedIds, ...] = ()
    answers: list[CompletionInContext] = []
    if rollout.turns and reference is not None:
        if renderer is not None:
            texts, errors, confirmed = render_texts(rollout, chains, reference)
        answers = answers_to_reencode(rollout, chains, reference, confirmed)
    view, row_differences, row_error, unrelated_part, unused = _compare_row(rollout, chains, reference)
    if unused:
        rollout = _without_messages(rollout, unused)
    if unrelated_part is not None:
        unrelated.append(unrelated_part)
        if unrelated_part is UNRELATED_MESSAGES:
            rollout = _without_messages(rollout, _OF_OTHERS)
        else:
            because = "the training row is not of them"
            rollout = replace(rollout, stated=rollout.stated.not_used(Unread.CALLS, because))
    row, judged = rollout.training_row, None
    if view is not None and row is not None and reference is not None:
        of_sft = (row.logprobs is None or rollout.stated.kind is not None) and is_sft(rollout)
        view = with_trained_edges(view, row, reference) if of_sft else view
        view, judged = judge_view(view, row, end_ids, reference.decode, conventions)
        view = with_sampled_ends(view) if of_sft else view
    differences: Sequence[Difference] = ()
    if chains.differences or row_differences:
        differences = merge_duplicates((*chains.differences, *row_differences))
    if reference is not None:
        from_encoding = reencoded_differences(rollout, answers, reference) if answers else ()
        from_template = rendered_differences(rollout, chains, texts, answers, reference) if texts else ()
        if differences or from_encoding or from_template:
            groups = [group for group in (from_encoding, from_template) if group]
            differences = _combine_differences(differences, groups, reference, row)
            differences = with_known_causes(rollout, differences, reference)
    rendered = bool(texts) or (view is not None and not rollout.turns and bool(rollout.messages))
    compared = frozenset(texts)
    if rendered and not texts and renderer is not None and row_error is None:
        compared = frozenset((None,))
    return Evidence(
        rollout,
        reference.vocabulary if reference else None,
        _find_needs_met(rollout, reference, renderer, sampled_known=view is not None, rendered=rendered),
        bos_id=tokenizer.bos_id if tokenizer else None,
        end_ids=end_ids,
        differences=tuple(differences),
        links=chains.links,
        row=view,
        rendered=compared,
        render_errors=errors if row_error is None else (*errors, (None, row_error)),
        date_formats=date_formats(renderer) if differences and renderer is not None else (),
        recovery_problems=problems,
        conventions=conventions,
        trained_again=trained_again,
        unrelated=tuple(unrelated),
        memo={} if judged is None else {JUDGEMENT: judged},
        speakers=speakers,
    )


def _compare_row(rollout: Rollout, chains: Chains, reference: Reference | None) -> RowComparison:
    """Compare the training row with the best evidence in the log: its calls, else its messages, else itself."""
    if rollout.training_row is None:
        return RowComparison()
    start, end = visible_range(rollout.training_row)
    if end - start < len(rollout.training_row.token_ids):
        return _compare_padded_row(rollout, rollout.training_row, (start, end), chains, reference)
    if rollout.turns and any(seen is not None for seen in chains.seen):
        return compare_row_to_calls(rollout, chains, reference)
    if reference is None or not len(rollout.training_row.token_ids):
        return RowComparison()
    error = None
    if lacks_answer(rollout) and reference.renderer is not None:
        comparison = compare_row_to_request(rollout, reference)
        if comparison is not None:
            return comparison
        if all(message.known_unsampled for message in rollout.messages):
            return compare_row_to_itself(rollout, reference)._replace(unused=_NO_ANSWER)
    if rollout.messages and reference.renderer is not None:
        rendered, error = render_conversation(rollout, reference)
        if rendered is not None:
            return compare_row_to_template(rollout, rendered, reference)
    comparison = compare_row_to_itself(rollout, reference)
    return comparison if error is None else comparison._replace(error=error)


def _compare_padded_row(
    rollout: Rollout, row: TrainingRow, part: tuple[int, int], chains: Chains, reference: Reference | None
) -> RowComparison:
    """Compare the row without its padding; the result has positions in the whole row."""
    start, end = part
    cut = replace(
        row,
        token_ids=row.token_ids[start:end],
        loss_mask=None if row.loss_mask is None else row.loss_mask[start:end],
        logprobs=None if row.logprobs is None else row.logprobs[start:end],
        prompt_length=None if row.prompt_length is None else max(row.prompt_length - start, 0),
        columns=(),
        hidden=None,
    )
    comparison = _compare_row(replace(rollout, training_row=cut), chains, reference)
    view, unrelated = comparison.view, comparison.unrelated
    if unrelated is not None:
        first, last = unrelated.span
        unrelated = replace(unrelated, span=(first + start, last + start))
    if view is not None:
        pads, expected = (start, len(row.token_ids) - end), view.expected_logprobs
        view = replace(
            view,
            sampled=np.pad(view.sampled, pads),
            roles=Roles.of([TEMPLATE] * pads[0] + list(view.roles) + [TEMPLATE] * pads[1]),
            turn=np.pad(view.turn, pads, constant_values=-1),
            turn_offset=np.pad(view.turn_offset, pads, constant_values=-1),
            expected_logprobs=None if expected is None else np.pad(expected, pads, constant_values=np.nan),
            drifted=np.pad(view.drifted, pads),
            spans=(),
            verified=Verified.NOTHING,
        )
    differences = [
        replace(each, start=each.start + start, end=each.end + start) if each.where is Where.ROW else each
        for each in comparison.differences
    ]
    return comparison._replace(view=view, differences=differences, unrelated=unrelated)


_OF_OTHERS = "they are of another conversation"
_NO_ANSWER = "they hold no answer, and nothing shows where the row's begin"
"""Why messages were not used."""


def _without_messages(rollout: Rollout, because: str) -> Rollout:
    """The rollout without its messages, which states the reason."""
    turns = tuple(replace(turn, message_index=None) for turn in rollout.turns)
    stated = rollout.stated.not_used(Unread.MESSAGES, because)
    return replace(rollout, messages=(), turns=turns, stated=stated)


def _with_recovered_ids(
    rollout: Rollout, reference: Reference | None
) -> tuple[Rollout, tuple[tuple[int, str], ...]]:
    """The rollout with ids for completions logged as token strings only; and (turn, problem) where that failed."""
    turns, problems, recovered = [*rollout.turns], list[tuple[int, str]](), False
    for number, turn in enumerate(rollout.turns):
        if reference is not None and turn.completion_ids is None and turn.token_texts:
            ids = recover_ids(turn.token_texts, reference.vocabulary, reference.end_ids())
            if ids.problem is not None:
                problems.append((number, ids.problem))
            if ids.ids is not None:
                logprobs = np.array([token.logprob for token in turn.token_texts])
                turns[number] = replace(
                    turn,
                    completion_ids=ids.ids,
                    completion_logprobs=None if np.isnan(logprobs).all() else logprobs,
                    ids_from=IdsFrom.RECOVERED,
                )
                recovered = True
    return replace(rollout, turns=tuple(turns)) if recovered else rollout, tuple(problems)


def _combine_differences(
    differences: Sequence[Difference],
    groups: Sequence[Sequence[Difference]],
    reference: Reference,
    row: TrainingRow | None,
) -> Sequence[Difference]:
    """The differences, with those of each group that no earlier one covers.

    Left out are images that a processor expanded, and tokens that neither the model sees nor the loss trains.
    """
    for group in groups:
        differences = [*differences, *uncovered(group, differences)] if differences else group
    if row is not None and row.hidden is not None:
        unseen = row.hidden if row.loss_mask is None else row.hidden & ~row.loss_mask
        differences = [
            each for each in differences if each.where is not Where.ROW or not unseen[each.start : each.end].any()
        ]
    tokens = image_tokens(reference.vocabulary)
    if tokens is None:
        return differences
    return [difference for difference in differences if not is_expansion(difference, tokens)]


def uncovered(new: Iterable[Difference], earlier: Iterable[Difference]) -> list[Difference]:
    """The new differences that no earlier one of the same sequence covers.

    A difference in tokens alone covers none in text.
    """
    sequences: dict[tuple[Where, int | None], list[Difference]] = {}
    for old in sorted(earlier, key=attrgetter("start")):
        sequences.setdefault((old.where, old.turn), []).append(old)
    # For each difference, the furthest end among it and those before it: where to stop looking back.
    furthest = {place: list(accumulate((old.end for old in every), max)) for place, every in sequences.items()}
    out = []
    for difference in new:
        place = difference.where, difference.turn
        every = sequences.get(place, [])
        at = bisect_right(every, difference.start, key=attrgetter("start")) - 1
        covered = False
        while not covered and at >= 0 and furthest[place][at] >= difference.end:
            old = every[at]
            inside = (
                difference.start < difference.end or old.start < difference.start < old.end or old.start == old.end
            )
            covered = old.end >= difference.end and inside
            if covered and old.recorded.data == old.canonical.data:
                covered = difference.recorded.data == difference.canonical.data
            at -= 1
        if not covered:
            out.append(difference)
    return out


def _find_needs_met(
    rollout: Rollout,
    reference: Reference | None,
    renderer: Renderer | None,
    *,
    sampled_known: bool,
    rendered: bool,
) -> Needs:
    """Which needs of rules the rollout meets."""
    turns, row = rollout.turns, rollout.training_row
    rendered = rendered and renderer is not None
    versions, trainers = versions_and_trainers_logged(rollout)
    images = has_images(rollout)
    beside = [] if row is None or row.extras is NO_EXTRAS else [row.extras]
    messages, prompts, completions = bool(rollout.messages), False, False
    for turn in turns:
        messages = messages or bool(turn.prompt_messages)
        prompts = prompts or turn.prompt_ids is not None
        completions = completions or turn.completion_ids is not None
        if turn.extras is not NO_EXTRAS:
            beside.append(turn.extras)
    met = [
        messages,
        prompts,
        completions,
        turns != () and True in _have_logprobs(turns),
        len(turns) > 1,
        row is not None and len(row.token_ids) > 0,
        row is not None and row.loss_mask is not None,
        row is not None and _LOGPROBS in [column.role for column in row.columns],
        reference is not None,
        rendered,
        sampled_known,
        versions,
        row is not None and row.hidden is not None and hidden_and_trained(row) is not None,
        trainers,
        images,
        (messages and not images) or (reference is not None and image_tokens(reference.vocabulary) is not None),
        len(turns) > 1 or rendered,
        renderer is not None,
    ]
    if beside:
        routed, sets = any(each.routing for each in beside), any(each.kept_sets for each in beside)
        unreadable = [part for extras in beside for part in extras.unreadable]
        for is_routing, read in ((True, routed), (False, sets)):
            parts = [part for part in unreadable if part.is_routing is is_routing]
            met += [read or bool(parts), read or any(part.contradicts_itself for part in parts)]
        met.append(any(extras.credit for extras in beside))
    flags = tuple(met)
    if flags not in _NEEDS_MET:
        needs = [need for need, there in zip(Needs, flags, strict=False) if there]
        _NEEDS_MET[flags] = reduce(or_, needs, Needs.NOTHING)
    return _NEEDS_MET[flags]


_NEEDS_MET: dict[tuple[bool, ...], Needs] = {}
"""The needs that are met, by a flag for each in their order; at the end, flags that are False may be left out."""


def partly_recorded(rollout: Rollout) -> Needs:
    """What some calls with completion ids have and others lack: prompt ids, or logprobs."""
    needs = Needs.NOTHING
    if len(rollout.turns) < 2:
        return needs
    calls: list[Turn] = []
    prompts: set[bool] = set()
    for turn in rollout.turns:
        if turn.completion_ids is not None and len(turn.completion_ids):
            calls.append(turn)
            prompts.add(turn.prompt_ids is not None)
    if len(prompts) > 1:
        needs |= Needs.PROMPTS
    if len(set(_have_logprobs(calls))) > 1:
        needs |= Needs.COMPLETION_LOGPROBS
    return needs


_LOGPROBS = ColumnRole.LOGPROBS


def _have_logprobs(turns: Sequence[Turn]) -> list[bool]:
    """For each call, whether it has logprobs, or a column that should hold them."""
    return [
        turn.completion_logprobs is not None
        or (turn.columns != () and _LOGPROBS in [column.role for column in turn.columns])
        for turn in turns
    ]


def with_known_causes(
    rollout: Rollout, differences: Sequence[Difference], reference: Reference
) -> Sequence[Difference]:
    """The differences, each with the way of writing the messages that explains it, if one was found."""
    if reference.renderer is None:
        return differences
    out = [*differences]
    sequences: dict[tuple[Where, int | None], array[int]] = {}
    for number, difference in enumerate(differences):
        if (
            difference.against is Against.TEMPLATE
            and difference.where is not Where.COMPLETION
            and difference.kind not in SAME_BYTES
        ):
            sequences.setdefault((difference.where, difference.turn), array("q")).append(number)
    for (_, turn), numbers in list(sequences.items())[:8]:  # rendering is slow
        if all(_is_proven_sampled(out[number]) for number in numbers):
            continue
        # The recorded sequence with the messages it was rendered from, if the log has them.
        if turn is None:
            assert rollout.training_row is not None
            ids, part = rollout.training_row.token_ids, Part.WHOLE
            if lacks_answer(rollout):
                part, answer = Part.LATER, answer_in_row(rollout, reference)
                ids = ids if answer is None else ids[: answer[0]]
            observation = observe_prompt(rollout, None, rollout.messages, ids, part)
        else:
            prompt_ids, sent = rollout.turns[turn].prompt_ids, prompt_messages(rollout, turn)
            if prompt_ids is None or not sent:
                continue
            observation = observe_prompt(rollout, turn, sent, prompt_ids, Part.LATER)
        recorded = reference.pieces(observation.ids)
        # A run of one control token other than BOS at the very start or end of a sequence is padding.
        ids, bos = observation.ids, reference.tokenizer.bos_id
        place = "prompt ids" if observation.is_answered else "row"
        for number in numbers:
            start, end = out[number].start, out[number].end
            outside = start == 0 or end == len(ids)
            if end - start < 2 or not outside or len(out[number].canonical.ids):
                continue
            pad = int(ids[start])
            if recorded.control[start] and bool((ids[start:end] == pad).all()) and pad != bos:
                what = f"{end - start} padding tokens are in the {place}"
                padding = KnownCause("REC004", f"padding in the {place}", what)
                out[number] = replace(out[number], known_cause=padding)
        unexplained = [number for number in numbers if out[number].known_cause is None]
        ways = OtherWays(Writer(reference.tokenizer, reference.renderer), observation)
        if unexplained and ways.has_role_markers:
            _find_known_causes(ways, recorded, reference, out, unexplained)
    return out


def _is_proven_sampled(difference: Difference) -> bool:
    """Whether the recorded tokens are proven to be sampled, which leaves nothing to explain."""
    return difference.sampled and difference.severity is Severity.NOTE


def _find_known_causes(
    ways: OtherWays, recorded: Pieces, reference: Reference, out: list[Difference], numbers: Sequence[int]
) -> None:
    """Set the known causes of differences `numbers` of `out`, all of one sequence; the widest cause goes first."""
    causes: list[tuple[KnownCause, list[int]]] = []
    for text, code, cause, what in ways.texts():
        # The ranges of recorded tokens that this way of writing does not explain.
        written, opens = reference.pieces(reference.encode_as(text, recorded.ids)), ways.observation.is_answered
        rest = [
            (start, end)
            for kind, start, end, _, _ in align(recorded, written, open_end=not opens).differing_blocks()
            if kind not in SAME_BYTES and (opens or start < len(recorded))
        ]
        explained = [number for number in numbers if not any(_touches(out[number], part) for part in rest)]
        if not explained or not all(any(_touches(out[number], part) for number in numbers) for part in rest):
            continue
        causes.append((KnownCause(code, cause, what), explained))
        if all(number in explained or _is_proven_sampled(out[number]) for number in numbers):
            break
    for known_cause, explained in sorted(causes, key=lambda pair: -len(pair[1])):
        for number in explained:
            if out[number].known_cause is None:
                out[number] = replace(out[number], known_cause=known_cause)


def _touches(difference: Difference, stretch: tuple[int, int]) -> bool:
    """Whether a range of recorded tokens overlaps a difference, or lies right next to it."""
    return stretch[0] <= difference.end and difference.start <= stretch[1]
