"""From a rollout to its evidence: each comparison is made once, before any rule runs."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, reduce
from itertools import accumulate
from operator import attrgetter, or_

import numpy as np

from tito_audit.align.alignment import align
from tito_audit.align.blocks import SAME_BYTES
from tito_audit.align.pieces import Pieces
from tito_audit.evidence.belonging import Unrelated, of_another_conversation
from tito_audit.evidence.chains import Chains, chain_turns
from tito_audit.evidence.completions import Answer, ConfirmedIds, answers_of, reencoded_differences
from tito_audit.evidence.differences import each_once
from tito_audit.evidence.images import image_tokens, is_expansion, states_images
from tito_audit.evidence.judgement import JUDGEMENT, with_turn_ends
from tito_audit.evidence.model import Against, Construction, Difference, Evidence, RowFound, RowView, Sound
from tito_audit.evidence.needs import Needs
from tito_audit.evidence.prompts import RenderedTexts, render_texts, rendered_differences
from tito_audit.evidence.recover import recover_ids
from tito_audit.evidence.reference import Reference
from tito_audit.evidence.rendered import render_conversation
from tito_audit.evidence.roles import TEMPLATE, Roles
from tito_audit.evidence.row import (
    OTHER_MESSAGES,
    answer_to,
    holds_given_turns,
    is_as_sent,
    row_against_calls,
    row_against_itself,
    row_against_request,
    row_against_template,
)
from tito_audit.evidence.sft import is_sft, with_edges, with_ends
from tito_audit.record.beside import NOTHING_BESIDE, BesideTokens
from tito_audit.record.by_name import versions_and_trainers
from tito_audit.record.column import ColumnRole
from tito_audit.record.finding import Severity, Where
from tito_audit.record.reading import NOTHING_STATED, Conventions
from tito_audit.record.rollout import (
    IdsFrom,
    Rollout,
    TrainingRow,
    Turn,
    as_training_row,
    hidden_and_trained,
    visible_part,
    with_speakers,
)
from tito_audit.record.speakers import DEFAULT, Speakers
from tito_audit.record.stated import Unread
from tito_audit.record.trainings import TrainedAgain
from tito_audit.render.renderer import Renderer
from tito_audit.tokens.tokenizer import Tokenizer
from tito_audit.ways.observed import Observation, Part, observed, prompt_messages
from tito_audit.ways.reading import date_formats
from tito_audit.ways.row import OtherWays, tools_as_sent
from tito_audit.ways.writer import Writer


def gather(
    rollout: Rollout,
    tokenizer: Tokenizer | None,
    renderer: Renderer | None,
    speakers: Speakers = DEFAULT,
    conventions: Conventions = NOTHING_STATED,
    trained_again: tuple[TrainedAgain, ...] = (),
) -> Evidence:
    """The evidence on a rollout, from what the log holds and what was given to the run.

    `speakers` are the roles that were sampled; `conventions` is what the run states about how its training rows
    were written; `trained_again` is what the run trains more than once in this rollout.

    Without a tokenizer, ids are compared with ids; without a renderer or messages, nothing is compared with the
    template. Never raises because of what a log holds.
    """
    rollout = with_speakers(rollout, speakers)
    reference = Reference(tokenizer, renderer, speakers) if tokenizer is not None else None
    rollout, problems = _recovered(rollout, reference)
    if reference is not None and holds_given_turns(rollout, reference):
        rollout = as_training_row(rollout)
        trained_again = tuple(_in_row(again, rollout) for again in trained_again)
    if reference is not None and rollout.stated.converted_tools:
        rollout = replace(rollout, tools=tools_as_sent(rollout, reference.vocabulary))
    unrelated: list[Unrelated] = []
    if reference is not None and rollout.turns and of_another_conversation(rollout, reference.text):
        unrelated.append(OTHER_MESSAGES)
        rollout = _without_messages(rollout, _OF_OTHERS)
    chains = chain_turns(rollout, reference)
    texts: RenderedTexts = {}
    errors: tuple[tuple[int | None, str], ...] = ()
    confirmed: tuple[ConfirmedIds, ...] = ()
    answers: list[Answer] = []
    if rollout.turns and reference is not None:
        if renderer is not None:
            texts, errors, confirmed = render_texts(rollout, chains, reference)
        answers = answers_of(rollout, chains, reference, confirmed)
    row, more, row_error, other, unused = _row(rollout, chains, reference)
    if unused:
        rollout = _without_messages(rollout, unused)
    if other is not None:
        unrelated.append(other)
        if other is OTHER_MESSAGES:
            rollout = _without_messages(rollout, _OF_OTHERS)
        else:
            because = "the training row is not of them"
            rollout = replace(rollout, stated=rollout.stated.not_used(Unread.CALLS, because))
    judged = None
    if row is not None and rollout.training_row is not None and reference is not None:
        of_sft = (rollout.training_row.logprobs is None or rollout.stated.kind is not None) and is_sft(rollout)
        row = with_edges(row, rollout.training_row, reference) if of_sft else row
        row, judged = with_turn_ends(row, rollout.training_row, reference.end_ids(), reference.text, conventions)
        row = with_ends(row) if of_sft else row
    differences: Sequence[Difference] = each_once((*chains.differences, *more))
    if reference is not None:
        again = reencoded_differences(rollout, answers, reference) if answers else ()
        written = rendered_differences(rollout, chains, texts, reference) if texts else ()
        groups = [group for group in (again, written) if group]
        if differences or groups:
            differences = _together(differences, groups, reference, rollout.training_row)
            differences = with_constructions(rollout, differences, reference)
    rendered = bool(texts) or (row is not None and not rollout.turns and bool(rollout.messages))
    compared = frozenset(texts)
    if rendered and not texts and renderer is not None and row_error is None:
        compared = frozenset((None,))
    return Evidence(
        rollout,
        reference.vocabulary if reference else None,
        _present(rollout, reference, row, rendered, renderer),
        bos_id=tokenizer.bos_id if tokenizer else None,
        end_ids=reference.end_ids() if reference else frozenset(),
        differences=tuple(differences),
        links=chains.links,
        row=row,
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


def _row(rollout: Rollout, chains: Chains, reference: Reference | None) -> RowFound:
    """The training row compared with the best evidence in the log: calls, else messages, else itself."""
    if rollout.training_row is None:
        return RowFound()
    start, end = visible_part(rollout.training_row)
    if end - start < len(rollout.training_row.token_ids):
        return _padded(rollout, rollout.training_row, (start, end), chains, reference)
    if any(seen is not None for seen in chains.seen):
        return row_against_calls(rollout, chains, reference)
    if reference is None or not len(rollout.training_row.token_ids):
        return RowFound()
    error = None
    if is_as_sent(rollout) and reference.renderer is not None:
        as_sent = row_against_request(rollout, reference)
        if as_sent is not None:
            return as_sent
        if all(message.given for message in rollout.messages):
            return row_against_itself(rollout, reference)._replace(unused=_NO_ANSWER)
    if rollout.messages and reference.renderer is not None:
        written, error = render_conversation(rollout, reference)
        if written is not None:
            return row_against_template(rollout, written, reference)
    return row_against_itself(rollout, reference)._replace(error=error)


def _padded(
    rollout: Rollout, row: TrainingRow, part: tuple[int, int], chains: Chains, reference: Reference | None
) -> RowFound:
    """The same for a row's tokens without padding, with positions in the whole row."""
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
    of_part = _row(replace(rollout, training_row=cut), chains, reference)
    view, unrelated = of_part.view, of_part.unrelated
    if unrelated is not None:
        first, last = unrelated.span
        unrelated = replace(unrelated, span=(first + start, last + start))
    if view is not None:  # padding is of the template, and not sampled
        room, expected = (start, len(row.token_ids) - end), view.expected_logprobs
        view = replace(
            view,
            sampled=np.pad(view.sampled, room),
            roles=Roles.of([TEMPLATE] * room[0] + list(view.roles) + [TEMPLATE] * room[1]),
            turn=np.pad(view.turn, room, constant_values=-1),
            turn_offset=np.pad(view.turn_offset, room, constant_values=-1),
            expected_logprobs=None if expected is None else np.pad(expected, room, constant_values=np.nan),
            drifted=np.pad(view.drifted, room),
            spans=(),
            sound=Sound.NOTHING,
        )
    return RowFound(
        view,
        [
            replace(difference, start=difference.start + start, end=difference.end + start)
            if difference.where is Where.ROW
            else difference
            for difference in of_part.differences
        ],
        of_part.error,
        unrelated,
        of_part.unused,
    )


_OF_OTHERS = "they are of another conversation"
_NO_ANSWER = "they hold no answer, and nothing shows where the row's begin"
"""Why messages were used for nothing."""


def _without_messages(rollout: Rollout, because: str) -> Rollout:
    """The rollout without its messages, and with the reason."""
    turns = tuple(replace(turn, message_index=None) for turn in rollout.turns)
    stated = rollout.stated.not_used(Unread.MESSAGES, because)
    return replace(rollout, messages=(), turns=turns, stated=stated)


def _recovered(rollout: Rollout, reference: Reference | None) -> tuple[Rollout, tuple[tuple[int, str], ...]]:
    """The rollout with ids looked up from token strings where the log has only those."""
    strings_only = [turn.completion_ids is None and bool(turn.token_texts) for turn in rollout.turns]
    if reference is None or True not in strings_only:
        return rollout, ()
    turns, problems = [], []
    for number, turn in enumerate(rollout.turns):
        if strings_only[number] and turn.token_texts is not None:
            ids = recover_ids(turn.token_texts, reference.vocabulary, reference.end_ids())
            if ids.problem is not None:
                problems.append((number, ids.problem))
            if ids.ids is not None:
                logprobs = np.array([token.logprob for token in turn.token_texts])
                turn = replace(
                    turn,
                    completion_ids=ids.ids,
                    completion_logprobs=None if np.isnan(logprobs).all() else logprobs,
                    ids_from=IdsFrom.RECOVERED,
                )
        turns.append(turn)
    return replace(rollout, turns=tuple(turns)), tuple(problems)


def _in_row(again: TrainedAgain, rollout: Rollout) -> TrainedAgain:
    """What is trained again in a call, with the places of the training row that it was read as."""
    row = rollout.training_row
    if row is None or again.turn is None:
        return again
    first = row.prompt_length or 0
    return replace(again, turn=None, runs=tuple((start + first, end + first) for start, end in again.runs))


def _together(
    differences: Sequence[Difference],
    groups: Sequence[Sequence[Difference]],
    reference: Reference,
    row: TrainingRow | None,
) -> Sequence[Difference]:
    """The differences with those of each group that none from before covers; no image that a processor expanded,
    and nothing that neither the model sees nor the loss trains."""
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
    """Those of new differences that no earlier one of the same sequence covers."""
    sequences: dict[tuple[Where, int | None], list[Difference]] = {}
    for old in sorted(earlier, key=attrgetter("start")):
        sequences.setdefault((old.where, old.turn), []).append(old)
    # The furthest end of each and all before it.
    furthest = {place: list(accumulate((old.end for old in every), max)) for place, every in sequences.items()}
    out = []
    for difference in new:
        place = difference.where, difference.turn
        every = sequences.get(place, [])
        at = bisect_right(every, difference.start, key=attrgetter("start")) - 1
        while at >= 0 and furthest[place][at] >= difference.end and not _covers(every[at], difference):
            at -= 1
        if at < 0 or furthest[place][at] < difference.end:
            out.append(difference)
    return out


def _covers(old: Difference, new: Difference) -> bool:
    """Whether a difference that does not begin later covers another one; one that only spells the same text in
    other tokens does not cover a difference in text."""
    inside = new.start < new.end or old.start < new.start < old.end or old.start == old.end
    text = old.recorded.data != old.canonical.data or new.recorded.data == new.canonical.data
    return old.end >= new.end and inside and text


def _present(
    rollout: Rollout,
    reference: Reference | None,
    row: RowView | None,
    rendered: bool,
    renderer: Renderer | None,
) -> Needs:
    turns, line = rollout.turns, rollout.training_row
    rendered = rendered and renderer is not None
    versions, trainers = versions_and_trainers(rollout)
    images = states_images(rollout)
    beside = [each.beside for each in turns if each.beside is not NOTHING_BESIDE]
    if line is not None and line.beside is not NOTHING_BESIDE:
        beside.append(line.beside)
    messages = bool(rollout.messages) or any(turn.prompt_messages for turn in turns)
    return _needs(
        (
            messages,
            True in [turn.prompt_ids is not None for turn in turns],
            True in [turn.completion_ids is not None for turn in turns],
            True in _scored(turns),
            len(turns) > 1,
            line is not None and len(line.token_ids) > 0,
            line is not None and line.loss_mask is not None,
            line is not None and _LOGPROBS in [column.role for column in line.columns],
            reference is not None,
            rendered,
            row is not None,
            versions,
            hidden_and_trained(line) is not None,
            trainers,
            images,
            (messages and not images)
            or (reference is not None and image_tokens(reference.vocabulary) is not None),
            len(turns) > 1 or rendered,
            renderer is not None,
            *(_beside(beside) if beside else (False,) * 5),
        )
    )


def _beside(beside: Sequence[BesideTokens]) -> tuple[bool, ...]:
    """Whether experts, kept sets and credit are there, the first two also whether they were read."""
    unfit = [part for values in beside for part in values.unfit]
    met: list[bool] = []
    for experts, read in (
        (True, any(each.routing for each in beside)),
        (False, any(each.sets for each in beside)),
    ):
        own = [part for part in unfit if part.experts is experts]
        met += [read or bool(own), read or any(part.wrong for part in own)]
    return (*met, any(values.credit for values in beside))


def partly_recorded(rollout: Rollout) -> Needs:
    """What some calls with completion ids have, and others lack: prompt ids, or logprobs."""
    calls = [turn for turn in rollout.turns if turn.completion_ids is not None and len(turn.completion_ids)]
    prompts = {turn.prompt_ids is not None for turn in calls}
    logprobs = set(_scored(calls))
    if len(prompts) <= 1 and len(logprobs) <= 1:
        return Needs.NOTHING
    return (Needs.PROMPTS if len(prompts) > 1 else Needs.NOTHING) | (
        Needs.COMPLETION_LOGPROBS if len(logprobs) > 1 else Needs.NOTHING
    )


@lru_cache(maxsize=256)
def _needs(met: tuple[bool, ...]) -> Needs:
    """The needs that are met, of all in their order."""
    return reduce(or_, (need for need, there in zip(Needs, met, strict=True) if there), Needs.NOTHING)


_LOGPROBS = ColumnRole.LOGPROBS


def _scored(turns: Sequence[Turn]) -> list[bool]:
    """Whether each call has logprobs, or a column that should hold them."""
    return [
        turn.completion_logprobs is not None
        or (turn.columns != () and _LOGPROBS in [column.role for column in turn.columns])
        for turn in turns
    ]


def with_constructions(
    rollout: Rollout, differences: Sequence[Difference], reference: Reference
) -> Sequence[Difference]:
    """The same differences, each with the construction that explains it, if one was found."""
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
    for (where, turn), numbers in list(sequences.items())[:8]:  # rendering is slow
        if all(_harmless(out[number]) for number in numbers):
            continue
        observation = _observation(rollout, where, turn, reference)
        if observation is None:
            continue
        recorded = reference.pieces(observation.ids)
        # A run of one control token at the very start or end of a sequence is padding.
        ids, bos = observation.ids, reference.tokenizer.bos_id
        place = "prompt ids" if observation.opens else "row"
        for number in numbers:
            start, end = out[number].start, out[number].end
            outside = start == 0 or end == len(ids)
            if end - start < 2 or not outside or len(out[number].canonical.ids):
                continue
            pad = int(ids[start])
            if recorded.control[start] and bool((ids[start:end] == pad).all()) and pad != bos:
                what = f"{end - start} padding tokens are in the {place}"
                padding = Construction("REC004", f"padding in the {place}", what)
                out[number] = replace(out[number], construction=padding)
        unexplained = [number for number in numbers if out[number].construction is None]
        ways = OtherWays(Writer(reference.tokenizer, reference.renderer), observation)
        if unexplained and ways.has_role_markers:
            _explain(ways, recorded, reference, out, unexplained)
    return out


def _observation(rollout: Rollout, where: Where, turn: int | None, reference: Reference) -> Observation | None:
    """A sequence with the messages that it was rendered from; None where the log does not say."""
    if where is not Where.ROW:
        assert turn is not None
        ids, sent = rollout.turns[turn].prompt_ids, prompt_messages(rollout, turn)
        return None if ids is None or not sent else observed(rollout, turn, sent, ids, Part.LATER)
    row = rollout.training_row
    if row is None:
        return None
    if not is_as_sent(rollout):
        return observed(rollout, None, rollout.messages, row.token_ids, Part.WHOLE)
    answer = answer_to(rollout, reference)
    before = row.token_ids if answer is None else row.token_ids[: answer[0]]
    return observed(rollout, None, rollout.messages, before, Part.LATER)


def _harmless(difference: Difference) -> bool:
    """Whether it is proven to be what a model sampled, which leaves nothing to explain."""
    return difference.sampled and difference.severity is Severity.NOTE


def _explain(
    ways: OtherWays, recorded: Pieces, reference: Reference, out: list[Difference], numbers: Sequence[int]
) -> None:
    """Give the differences of one sequence their constructions, starting with those that explain the most."""
    explaining: list[tuple[Construction, list[int]]] = []
    for text, code, cause, what in ways.texts():
        # The ranges of recorded tokens whose bytes differ from the text's.
        written, opens = reference.pieces(reference.encode_as(text, recorded.ids)), ways.observation.opens
        rest = [
            (start, end)
            for kind, start, end, _, _ in align(recorded, written, open_end=not opens).differing_blocks()
            if kind not in SAME_BYTES and (opens or start < len(recorded))
        ]
        explained = [number for number in numbers if not any(_touch(out[number], part) for part in rest)]
        if not explained or not all(any(_touch(out[number], part) for number in numbers) for part in rest):
            continue
        explaining.append((Construction(code, cause, what), explained))
        if all(number in explained or _harmless(out[number]) for number in numbers):
            break
    for construction, explained in sorted(explaining, key=lambda pair: -len(pair[1])):
        for number in explained:
            if out[number].construction is None:
                out[number] = replace(out[number], construction=construction)


def _touch(difference: Difference, stretch: tuple[int, int]) -> bool:
    """Whether a stretch of recorded tokens is part of a difference, or next to it."""
    return stretch[0] <= difference.end and difference.start <= stretch[1]
