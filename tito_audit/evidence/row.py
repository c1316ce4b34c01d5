"""Compares the training row with its calls, else with the rendered messages, else with its own re-encoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tito_audit.align.alignment import align
from tito_audit.align.blocks import BlockKind, Blocks, BlocksBuilder
from tito_audit.align.pieces import Pieces
from tito_audit.chains.links import LinkKind, last_calls
from tito_audit.evidence.chains import Chains
from tito_audit.evidence.differences import (
    CompletionSpan,
    Stretch,
    completion_at,
    difference,
    find_normal_form,
    starting_before,
    stretches,
)
from tito_audit.evidence.logprob_values import MAX_SLIDE
from tito_audit.evidence.model import Against, Difference, RowComparison, RowView, SampledSpan, Verified
from tito_audit.evidence.reference import Reference, pieces_of
from tito_audit.evidence.rendered import RenderedConversation, TurnsByControl, render_conversation
from tito_audit.evidence.roles import (
    COMMON_ROLES,
    GENERATION_PROMPT,
    TEMPLATE,
    TURN_END,
    UNKNOWN,
    Roles,
    token_roles,
    unknown_roles,
)
from tito_audit.evidence.sft import is_sft
from tito_audit.evidence.unrelated import (
    MESSAGES,
    TRAINING_ROW,
    Unrelated,
    constant_id_offset,
    content_bytes,
    full_text,
    share_an_answer,
    share_words,
)
from tito_audit.record.arrays import Logprobs, Mask
from tito_audit.record.finding import Severity
from tito_audit.record.message import as_message
from tito_audit.record.prefix import same_ids
from tito_audit.record.rollout import Rollout, TrainingRow
from tito_audit.record.runs import trained_runs
from tito_audit.record.speakers import ASSISTANT, UNSAMPLED_SPEAKERS, unknown_role_name
from tito_audit.tokens.vocab import Vocabulary
from tito_audit.ways.recorded_values import holds_marker


def has_template_markers(recorded: Pieces, canonical: Pieces, reference: Reference) -> bool:
    """Whether a row has a template marker other than BOS and turn ends; also True if the template writes none."""
    return not _has_markers(canonical, reference) or _has_markers(recorded, reference)


def _has_markers(pieces: Pieces, reference: Reference) -> bool:
    first = 1 if len(pieces) and int(pieces.ids[0]) == reference.tokenizer.bos_id else 0
    rest = pieces.slice(first, len(pieces))
    if (rest.control & ~np.isin(rest.ids, list(reference.end_ids()))).any():
        return True
    return holds_marker(reference.decode(rest.ids[~rest.control]))


def with_answer_starts(view: RowView, rollout: Rollout, recorded: Pieces, blocks: Blocks) -> RowView:
    """The view with each token between a generation prompt and the first answer token of the template assigned.

    The template writes nothing there, so such tokens belong to the answer, unless they repeat the header or are
    white space that nothing shows to be sampled.
    """
    added = np.zeros(len(recorded), np.bool_)
    removed = np.zeros(len(recorded), np.bool_)
    for kind, start, end, _, _ in blocks.differing_blocks():
        if (
            kind is BlockKind.EXTRA
            and start > 0
            and view.roles[start - 1] == GENERATION_PROMPT
            and (end == len(view.sampled) or view.sampled[end])
        ):
            mask = added if _was_sampled(view, rollout, recorded, start, end) else removed
            mask[start:end] = True
        if kind is BlockKind.MISSING:
            # A lone turn end right beside is that of the missing answer.
            for at in (start - 1, start):
                if 0 <= at < len(removed) and view.sampled[at] and view.roles[at] == TURN_END:
                    before = at > 0 and view.sampled[at - 1]
                    after = at + 1 < len(removed) and view.sampled[at + 1]
                    opened = at > 0 and view.roles[at - 1] == GENERATION_PROMPT
                    removed[at] |= not before and not after and not opened
    if not added.any() and not removed.any():
        return view
    assert isinstance(view.roles, Roles)
    roles = view.roles.with_role(ASSISTANT, added).with_role(TEMPLATE, removed)
    return replace(view, sampled=(view.sampled | added) & ~removed, roles=roles, spans=())


def answer_at(view: RowView | None, generated: Mask | None, stretch: Stretch) -> slice | None:
    """The row tokens of a stretch in an answer; for an empty stretch, the sampled tokens next to it.

    `generated`, `[N]`, marks the canonical tokens that a model would sample. None without an answer there.
    """
    if view is None:
        return None
    start, end = stretch.start, stretch.end
    if start < end:
        return slice(start, end) if view.sampled[start:end].any() else None
    around = slice(max(start - 1, 0), start + 1)
    if generated is not None:
        inside = bool(generated[stretch.canonical_start : stretch.canonical_end].all())
    else:
        inside = start > 0 and bool(view.sampled[around].all())
    return around if inside and view.sampled[around].any() else None


def logprobs_prove_sampled(row: TrainingRow, view: RowView, where: slice) -> bool:
    """Whether logprobs prove that the answer tokens in `where` were sampled: none is missing, not all are fill.

    The fill is the most common value outside the loss, or the format's own: the judgement, which finds it exactly,
    needs the spans of the view that is being made here.
    """
    if row.logprobs is None:
        return False
    sampled = view.sampled[where]
    if row.loss_mask is not None and (sampled & row.loss_mask[where]).any():
        sampled = sampled & row.loss_mask[where]  # tokens outside the loss may have lost their logprob
    return _come_from_sampler(row, row.logprobs[where][sampled])


def _come_from_sampler(row: TrainingRow, values: Logprobs) -> bool:
    """Whether a sampler wrote these logprobs: all finite, none above 0, and at least one is no fill."""
    if not len(values) or not np.isfinite(values).all() or (values > 0).any():
        return False
    real = values < 0
    if row.sentinel is not None:
        real &= values != row.sentinel
    if row.loss_mask is not None and row.logprobs is not None:
        # The most common entry outside the loss: the first one if more than half equal it.
        outside = ~row.loss_mask
        commonest = float(row.logprobs[outside.argmax()])
        alike = int(np.count_nonzero((row.logprobs == commonest) & outside))
        if not np.isfinite(commonest) or 2 * alike <= np.count_nonzero(outside):
            entries = row.logprobs[outside]
            every, counts = np.unique(entries[np.isfinite(entries)], return_counts=True)
            commonest = float(every[counts.argmax()]) if len(every) else np.nan
        real &= values != commonest
    return bool(real.any())


def _was_sampled(view: RowView, rollout: Rollout, recorded: Pieces, start: int, end: int) -> bool:
    """Whether tokens after a generation prompt were sampled, as far as the row and the messages show."""
    data = recorded.bytes_of(start, end)
    if data.strip():
        first = start
        while first and view.roles[first - 1] == GENERATION_PROMPT:
            first -= 1
        header = recorded.bytes_of(first, start).strip()
        return not recorded.control[start:end].any() and not header.endswith(data.strip())
    row = rollout.training_row
    assert row is not None
    if row.loss_mask is not None and row.loss_mask[start:end].all():
        return True
    if row.logprobs is not None and _come_from_sampler(row, row.logprobs[start:end]):
        return True
    following = recorded.bytes_of(end, min(end + 4, len(recorded)))
    start_text = data.decode("utf-8", "replace") + following.decode("utf-8", "ignore")
    return any(message.role == ASSISTANT and message.text.startswith(start_text) for message in rollout.messages)


def compare_row_to_template(
    rollout: Rollout, rendered: RenderedConversation, reference: Reference
) -> RowComparison:
    """The role of each row token as the rendered messages show it, and where the template writes other tokens."""
    row = rollout.training_row
    assert row is not None
    size = len(row.token_ids)
    begins = len(rendered.ids) >= size and bool(np.logical_and.reduce(row.token_ids == rendered.ids[:size]))
    if begins and isinstance(rendered.shown, TurnsByControl):
        spans = tuple([SampledSpan(at, (end, end + 1)) for at, end in rendered.shown.turns if at < size])
        if not spans or spans[-1].ends[0] < size:  # it does not end inside an answer
            verified = Verified.NOTHING if rollout.turns else Verified.IDS
            return RowComparison(_view_of(*rendered.shown.of_tokens(size), spans, verified))
    if row.token_ids is rendered.ids or same_ids(row.token_ids, rendered.ids):
        pieces = reference.pieces(rendered.ids)
        shown = rendered.of_tokens(pieces.start)
        return RowComparison(_view_by_roles(pieces, rollout, reference) if shown is None else _view_of(*shown))
    canonical = reference.pieces(rendered.ids, rendered.data)
    recorded = reference.pieces(row.token_ids, canonical.data if rendered.spelled else None)
    blocks = align(recorded, canonical, open_end=True)
    text_differs = not canonical.data.startswith(recorded.data)
    by_headers = _view_by_roles(recorded, rollout, reference) if text_differs else None
    shown = rendered.of_recorded(recorded, canonical, blocks)
    if shown is None:
        view = _view_by_roles(recorded, rollout, reference)
    elif by_headers is not None and _headers_show_answers(by_headers, rollout):
        view = by_headers  # the row's own headers fit better than those of a different text
    else:
        view = _view_of(*shown)
    of_canonical = rendered.of_tokens(canonical.start)
    generated = None if of_canonical is None else of_canonical[1]
    if text_differs and generated is not None:
        # The row's answers are what it trains and what its own headers show. Is none of the messages' among them?
        own = np.zeros(size, np.bool_) if row.loss_mask is None else row.loss_mask
        own = own if by_headers is None else own | by_headers.sampled
        answers, runs = trained_runs(generated), trained_runs(own if own.any() else ~own)
        if not share_an_answer(canonical, answers, recorded, runs, blocks.swapped()) and not share_words(
            content_bytes(canonical, answers), content_bytes(recorded, runs)
        ):
            return compare_row_to_itself(rollout, reference)._replace(unrelated=UNRELATED_MESSAGES)
    if not has_template_markers(recorded, canonical, reference):
        view = None  # the row was encoded without the template, so nothing shows where its messages are
    if view is not None:
        view = with_answer_starts(view, rollout, recorded, blocks)
        for _, start, end, _, _ in blocks.differing_blocks():
            view.drifted[start:end] = True
    # What the template writes after the end of the row is no difference.
    differing = starting_before(stretches(recorded, canonical, blocks), len(recorded))
    return RowComparison(view, _differences_from_template(rollout, row, view, generated, differing))


def _differences_from_template(
    rollout: Rollout, row: TrainingRow, view: RowView | None, generated: Mask | None, differing: Sequence[Stretch]
) -> list[Difference]:
    """These stretches as differences, each with what it means for a row that should hold what was sampled."""
    of_sft, own_roles = is_sft(rollout), {message.role for message in rollout.messages} - COMMON_ROLES
    differences: list[Difference] = []
    for stretch in differing:
        data, written, lacking = stretch.recorded.data, stretch.canonical.data, stretch.start == stretch.end
        if (
            own_roles
            and data.decode("utf-8", "replace").strip() in own_roles
            and written.decode("utf-8", "replace").strip() in COMMON_ROLES
        ):
            continue  # a role unknown to the template was rendered as a known one
        where = answer_at(view, generated, stretch)
        in_answer = where is not None
        same_text = data == written or find_normal_form(data, written) is not None
        proven = where is not None and view is not None and logprobs_prove_sampled(row, view, where)
        # Tokens that a row for SFT lacks inside an answer count as trained if a token beside them is.
        beside = int(of_sft and lacking)
        near = slice(max(stretch.start - beside, 0), stretch.end + beside)
        trained = row.loss_mask is None or bool(row.loss_mask[near].any())
        # A right row may hold tokens that all have the logprob of certain ones: white space, which parsers strip,
        # or tokens at an edge of an answer, such as another end or marker.
        certain = False
        if view is not None and row.logprobs is not None and not lacking:
            around = slice(max(stretch.start - MAX_SLIDE, 0), stretch.end + MAX_SLIDE)
            at_edge = around.stop > len(row.token_ids) or not view.sampled[around].all()
            certain = not row.logprobs[stretch.start : stretch.end].any()
            certain = certain and (at_edge or data.strip() == written.strip())
        harmless = in_answer and (same_text or not trained or proven or certain)
        if of_sft and in_answer:
            effect = "the set trains another answer than the template writes for these messages"
        elif lacking and in_answer:
            effect = "the row cannot show whether the model sampled it; only a log with the calls could"
        elif lacking:
            effect = "the row lacks what the template writes for these messages"
        elif proven:
            shown = "its logprobs show that it was sampled this way"
            effect = f"{shown}, but it would drift if the messages were re-rendered"
        elif in_answer:
            effect = "it may be what was sampled; only a log with the calls could prove it"
        else:
            effect = "the row holds tokens that the template does not write for these messages"
        severity = Severity.NOTE if harmless else Severity.WARNING
        new = difference(stretch, Against.TEMPLATE, severity, effect)
        differences.append(replace(new, sampled=in_answer))
    return differences


UNRELATED_MESSAGES = Unrelated(
    MESSAGES,
    "messages of another conversation",
    "the messages are of another conversation: none of their answers is in the ids; they are used for nothing",
)


def compare_row_to_itself(rollout: Rollout, reference: Reference) -> RowComparison:
    """The role of each row token as control tokens show it, and where the row differs from its re-encoding."""
    row = rollout.training_row
    assert row is not None
    recorded = reference.pieces(row.token_ids)
    view = _view_by_roles(recorded, rollout, reference)
    encoded = reference.encode_as(reference.text_of(recorded), row.token_ids)
    if same_ids(encoded, row.token_ids):
        return RowComparison(view)
    canonical = reference.pieces(encoded)
    if is_sft(rollout):
        effect = "the set holds these tokens, and a prompt of the same text would hold others"
    else:
        effect = "harmless if it was sampled this way, but would drift if the text were re-encoded"
    differing = stretches(recorded, canonical, align(recorded, canonical))
    return RowComparison(view, [difference(each, Against.REENCODED, Severity.NOTE, effect) for each in differing])


def response_holds_given_turns(rollout: Rollout, reference: Reference) -> bool:
    """Whether a response, logged with a mask that trains all of it, holds turns of a user or a tool.

    A model rarely writes their headers itself; it did if the sampler has a logprob for each of these tokens.
    """
    if len(rollout.turns) != 1 or rollout.training_row is not None:
        return False
    (turn,) = rollout.turns
    ids, logprobs = turn.completion_ids, turn.completion_logprobs
    if turn.as_row is None or ids is None:
        return False
    pieces = reference.pieces(ids)
    if not pieces.control.any():
        return False
    headers = reference.headers(rollout.template_kwargs)
    by_others = token_roles(pieces, reference.end_ids(), headers).among(UNSAMPLED_SPEAKERS)
    if not by_others.any() or logprobs is None:
        return bool(by_others.any())
    scored = logprobs[by_others]
    alike = len(scored) > 1 and bool((scored == scored[0]).all())
    return alike or not (np.isfinite(scored) & (scored < 0)).all()


def _view_by_roles(recorded: Pieces, rollout: Rollout, reference: Reference) -> RowView | None:
    """What was sampled, as role markers show it; None if there are none."""
    roles = token_roles(recorded, reference.end_ids(), reference.headers(rollout.template_kwargs))
    sampled = roles.among((ASSISTANT, TURN_END))
    messages, row = rollout.messages, rollout.training_row
    nameless = len(messages) > 0 and any(unknown_role_name(message.speaker) is not None for message in messages)
    if is_sft(rollout) and row is not None and row.loss_mask is not None and not sampled.any():
        # The row may end before an answer begins, or train parts of what was given.
        by_others = roles.among(UNSAMPLED_SPEAKERS)
        nameless |= bool((by_others & row.loss_mask if row.loss_mask.any() else by_others).any())
    shown = nameless or np.logical_or.reduce(sampled) or roles.unclear().any()
    return _view_of(roles, sampled) if shown else None


def _headers_show_answers(view: RowView, rollout: Rollout) -> bool:
    """Whether role markers show as many answers as there are messages; or who wrote each token, if the mask trains
    nothing but answers."""
    answers, row = len(trained_runs(view.sampled)), rollout.training_row
    if answers == sum(message.sampled for message in rollout.messages):
        return True
    assert isinstance(view.roles, Roles)
    if not answers or (view.roles.unclear() | view.roles.among((UNKNOWN,))).any():
        return False
    return row is None or row.loss_mask is None or not (row.loss_mask & ~view.sampled).any()


def _view_of(
    roles: Sequence[str], sampled: Mask, spans: tuple[SampledSpan, ...] = (), verified: Verified = Verified.NOTHING
) -> RowView:
    no_turn = np.zeros(len(sampled), np.int32) - 1
    return RowView(
        sampled, False, roles, no_turn, no_turn, None, np.zeros(len(sampled), np.bool_), spans, verified
    )


def lacks_answer(rollout: Rollout) -> bool:
    """Whether the messages end with one that was known_unsampled, as they are sent to a sampler."""
    last = rollout.messages[-1] if rollout.messages else None
    return last is not None and not last.sampled and last.known_unsampled


def answer_in_row(rollout: Rollout, reference: Reference) -> tuple[int, int] | None:
    """The tokens of the row that answer its messages; None if neither headers nor mask show them.

    If the row has no more answers than the messages, its last one counts, unless that is the messages' own last
    answer: then the row was cut.
    """
    row, answers = rollout.training_row, sum(message.sampled for message in rollout.messages)
    assert row is not None
    view = compare_row_to_itself(rollout, reference).view
    by_headers = [] if view is None else trained_runs(view.sampled)
    by_mask = [] if row.loss_mask is None else trained_runs(row.loss_mask)
    span = next((runs[answers] for runs in (by_headers, by_mask) if len(runs) > answers), None)
    fewer = by_headers or by_mask
    if span is None and len(fewer):
        last = next((full_text(message) for message in reversed(rollout.messages) if message.sampled), "")
        cut = share_words(
            last.encode("utf-8", "surrogatepass"), content_bytes(reference.pieces(row.token_ids), fewer[-1:])
        )
        span = None if cut else fewer[-1]
    return span


def compare_row_to_request(rollout: Rollout, reference: Reference) -> RowComparison | None:
    """Compare the row up to the answer to its messages, with roles by headers; None if nothing shows that answer.

    The messages are rendered with the answer that the row holds, which is not compared.
    """
    row, answer = rollout.training_row, answer_in_row(rollout, reference)
    if row is None or answer is None:
        return None
    itself, (start, end) = compare_row_to_itself(rollout, reference), answer
    before = reference.decode(row.token_ids[:start])
    questions = [full_text(message).strip() for message in rollout.messages if message.speaker in ("user", "tool")]
    if questions and not any(
        question in before
        or share_words(question.encode("utf-8", "surrogatepass"), before.encode("utf-8", "surrogatepass"))
        for question in questions
        if question
    ):
        return itself._replace(unrelated=UNRELATED_MESSAGES)
    text_end = end
    while text_end > start and int(row.token_ids[text_end - 1]) in reference.end_ids():
        text_end -= 1
    role = next((message.role for message in rollout.messages if message.sampled), "assistant")
    wire = {"role": role, "content": reference.decode(row.token_ids[start:text_end])}
    view = itself.view
    headless = (view is None or not view.sampled[start]) and end == len(row.token_ids)
    closing = row.token_ids[:0]
    if headless and text_end == end:
        # A cut answer gets the turn end of the others, so that alignment does not take its tokens for other text.
        ends = row.token_ids[:start]
        closing = ends[np.isin(ends, sorted(reference.end_ids()))][:1]
    more = len(closing)
    cut = replace(
        row,
        token_ids=np.concatenate((row.token_ids[:end], closing)),
        loss_mask=None if row.loss_mask is None else np.append(row.loss_mask[:end], np.zeros(more, np.bool_)),
        logprobs=None if row.logprobs is None else np.append(row.logprobs[:end], np.full(more, np.nan)),
        columns=(),
        hidden=None,
    )
    whole = replace(rollout, messages=(*rollout.messages, as_message(wire, "the answer")), training_row=cut)
    written, error = render_conversation(whole, reference)
    if written is None:
        return itself._replace(error=error)
    compared = compare_row_to_template(whole, written, reference)
    if headless:  # the header of the answer is missing from the row
        view = view if more and view is not None else compared.view
    if more and view is not None:
        answered = np.arange(end) >= start
        view = RowView(
            view.sampled[:end] | answered,
            view.proven,
            Roles.of([*view.roles[:start], *[ASSISTANT] * (end - start)]),
            view.turn[:end],
            view.turn_offset[:end],
            None,
            view.drifted[:end] & ~answered,
        )
    differences = [
        difference
        for difference in compared.differences
        if difference.start < start or difference.start == difference.end == start
    ]
    return RowComparison(
        view, [*differences, *(difference for difference in itself.differences if difference.start >= start)]
    )


_AlignedChain = tuple[int, Pieces, Blocks]
"""The last call of a chain, what it saw and sampled, and the blocks that align this with the row."""


def compare_row_to_calls(rollout: Rollout, chains: Chains, reference: Reference | None) -> RowComparison:
    """Which row tokens the calls sampled, and where the row holds other tokens.

    Goes chain by chain: first the one that the row holds most of, then those of which it holds at least half.
    """
    row = rollout.training_row
    assert row is not None
    vocabulary, size = reference.vocabulary if reference is not None else None, len(row.token_ids)
    pieces = pieces_of(row.token_ids, vocabulary)
    aligned = _align_chains(chains, pieces, vocabulary)
    unrelated = _find_unrelated_calls(row, pieces, aligned, chains, texts=reference is not None)
    if unrelated is not None:
        return RowComparison(unrelated=unrelated)
    end_ids = reference.end_ids() if reference is not None else frozenset()
    turns, offsets = np.full(size, -1, np.int32), np.full(size, -1, np.int32)
    logprobs, drifted = np.full(size, np.nan), np.zeros(size, np.bool_)
    has_chain = has_logprobs = False
    windowed = any(link.kind is LinkKind.REWRITTEN for link in chains.links)
    differences: dict[tuple[object, ...], Difference] = {}

    def claimed(start: int, end: int) -> bool:
        """Whether an earlier chain sampled these tokens; for an empty range, the tokens on both sides of it."""
        if start == end:
            start, end = start - 1, end + 1
        return start >= 0 and end <= size and bool((turns[start:end] >= 0).all())

    for leaf, recorded, blocks in aligned:
        completions, (own, places) = chains.completions[leaf], blocks.matched_positions()
        if not completions or (has_chain and len(own) * 2 < completions[-1].end):
            continue  # the row belongs to another chain and holds little of this one
        has_chain = True
        for stretch in starting_before(stretches(recorded, pieces, blocks), len(recorded)):
            lacking = stretch.canonical_start == stretch.canonical_end
            # An answer dropped from the history on purpose is not drift.
            if not claimed(stretch.canonical_start, stretch.canonical_end) and not (windowed and lacking):
                severity, effect = _effect_beside_calls(row, completion_at(stretch, completions), stretch, end_ids)
                new = difference(stretch, Against.ROW, severity, effect, leaf, completions)
                differences.setdefault(new.key, new)
        for _, start, _, first, last in blocks.differing_blocks():
            if start < completions[-1].end and not claimed(first, last):
                drifted[first:last] = True
        unclaimed = turns[places] < 0
        bounds = own.searchsorted([(completion.start, completion.end) for completion in completions])
        for completion, (first, last) in zip(completions, bounds.tolist(), strict=True):
            inside = unclaimed[first:last].nonzero()[0] + first
            where, offset = places[inside], own[inside] - completion.start
            turns[where], offsets[where] = completion.turn, offset
            recorded_logprobs = rollout.turns[completion.turn].completion_logprobs
            if recorded_logprobs is not None:
                logprobs[where], has_logprobs = recorded_logprobs[offset], True
    view = None
    if has_chain:
        sampled = turns >= 0
        roles = token_roles(pieces, end_ids) if reference is not None else unknown_roles(size)
        roles = roles.with_role(ASSISTANT, sampled)
        roles = roles.with_role(TURN_END, sampled & np.isin(row.token_ids, list(end_ids)))
        view = RowView(sampled, True, roles, turns, offsets, logprobs if has_logprobs else None, drifted)
    return RowComparison(view, list(differences.values()))


def _effect_beside_calls(
    row: TrainingRow, completion: CompletionSpan | None, stretch: Stretch, end_ids: frozenset[int]
) -> tuple[Severity, str]:
    """The severity and effect of a difference from the calls: ERROR if the row trains on what was not sampled,
    WARNING for drifted context, and NOTE if the row ends early and lacks more than the end of a turn."""
    place, mask = slice(stretch.canonical_start, stretch.canonical_end), row.loss_mask
    lacking, lacked = place.start == place.stop, stretch.recorded
    if (
        lacking
        and place.start == len(row.token_ids)
        and lacked.data.strip()
        and not end_ids.issuperset(lacked.ids.tolist())
    ):
        return Severity.NOTE, "the row ends before these tokens; what it holds was sampled"
    # If the row lacks the tokens, their neighbors show whether the answer is trained there.
    around = slice(max(place.start - 1, 0), place.stop + 1) if lacking else place
    severity = Severity.ERROR if mask is None or mask[around].any() else Severity.WARNING
    if completion is None or place.stop == 0:
        severity = Severity.WARNING  # given, or part of an answer in which the row begins
    if lacking:
        return severity, f"the row lacks tokens that were {'given' if completion is None else 'sampled'}"
    if stretch.start == stretch.end and mask is not None and not mask[place].any():
        return severity, "the row holds tokens that were neither given nor sampled"
    return severity, "the trainer would learn from tokens that were not sampled"


def _find_unrelated_calls(
    row: TrainingRow, pieces: Pieces, aligned: Sequence[_AlignedChain], chains: Chains, *, texts: bool
) -> Unrelated | None:
    """Why a row that trains something does not belong to its calls; None if it may.

    Drift changes tokens, and some words of an answer. A row with none of the answers, nor half of their words,
    belongs to other calls. `texts` says whether pieces hold text, not just ids.
    """
    runs = [(0, len(pieces))] if row.loss_mask is None else trained_runs(row.loss_mask)
    if not len(runs) or not aligned or any(seen is None for seen in chains.seen):
        return None
    span = runs[0][0], runs[-1][1]
    offset = next((far for _, seen, _ in aligned if (far := constant_id_offset(row.token_ids, seen.ids))), 0)
    if offset:
        what = f"its ids are those of its calls {'plus' if offset > 0 else 'minus'} {abs(offset):,}"
        return Unrelated(TRAINING_ROW, "ids at an offset", f"{what}: every token is another one", span)
    answers = {
        leaf: [(completion.start, completion.end) for completion in chains.completions[leaf]]
        for leaf, _, _ in aligned
    }
    if any(share_an_answer(seen, answers[leaf], pieces, runs, blocks) for leaf, seen, blocks in aligned):
        return None
    if texts:
        sampled = b" ".join(content_bytes(seen, answers[leaf]) for leaf, seen, _ in aligned)
        if share_words(sampled, content_bytes(pieces, runs)):
            return None
    elif any(2 * len(blocks.matched_positions()[0]) >= len(seen) for _, seen, blocks in aligned):
        return None  # without a tokenizer, drift of a whole answer looks like another answer
    what = "nothing that it trains was sampled by the calls beside it"
    return Unrelated(TRAINING_ROW, "row of other calls", f"the training row is not of these calls: {what}", span)


def _align_chains(chains: Chains, pieces: Pieces, vocabulary: Vocabulary | None) -> list[_AlignedChain]:
    """Every chain aligned with the row, starting with the one that the row holds most of."""
    aligned = []
    # The prompt + completion of a turn that no later turn continues holds a whole chain.
    parents = {
        link.turn: link.parent
        for link in chains.links
        if link.kind is LinkKind.CONTINUES and link.parent is not None
    }
    for leaf in last_calls((k for k, seen in enumerate(chains.seen) if seen is not None), parents):
        seen = chains.seen[leaf]
        assert seen is not None
        recorded, size = pieces_of(seen, vocabulary), len(pieces)
        starts: list[int] = []
        if 0 < size < len(seen) and not np.array_equal(seen[:size], pieces.ids):
            starts = (seen[: len(seen) - size + 1] == pieces.ids[0]).nonzero()[0].tolist()
        # A row whose start was cut off keeps the end of its chain, so the last of several places counts.
        at = next((at for at in reversed(starts) if np.array_equal(seen[at : at + size], pieces.ids)), None)
        if at is None:
            blocks = align(recorded, pieces, open_end=True)
        else:
            growing = BlocksBuilder()
            growing.add(BlockKind.MISSING, at, 0)
            growing.add(BlockKind.SAME, size, size)
            growing.add(BlockKind.MISSING, len(seen) - at - size, 0)
            blocks = growing.build()
        aligned.append((leaf, recorded, blocks))
    return sorted(aligned, key=lambda chain: -len(chain[2].matched_positions()[0]))
