"""The training row compared with the calls, else with the rendered messages, else with its re-encoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tito_audit.align.blocks import Blocks
from tito_audit.align.drift import align
from tito_audit.align.pieces import Pieces
from tito_audit.chains.links import LinkKind, last_calls
from tito_audit.evidence.answers import answer_at, has_template_markers, logprobs_prove_sampled, with_answer_starts
from tito_audit.evidence.chains import Chains
from tito_audit.evidence.differences import Region, difference, region_of
from tito_audit.evidence.many import GrowingDifferences, many_of
from tito_audit.evidence.masks import is_end, spans_of
from tito_audit.evidence.model import Against, Difference, RowView, SampledSpan, Sound
from tito_audit.evidence.narrowed import normalised
from tito_audit.evidence.once import first_of_each
from tito_audit.evidence.reference import Reference, pieces_of
from tito_audit.evidence.rendered import RenderedConversation, ToldTurns
from tito_audit.evidence.roles import COMMON_ROLES, TURN_END, Roles, token_roles, unknown_roles
from tito_audit.evidence.stretches import ManyStretches, Stretch, starting_before, stretches
from tito_audit.record.arrays import Ids, Mask, Offsets
from tito_audit.record.finding import Severity, Where
from tito_audit.record.rollout import Rollout, TrainingRow
from tito_audit.record.runs import trained_runs
from tito_audit.record.speakers import ASSISTANT, GIVEN_SPEAKERS, unknown_role_name

Found = tuple[RowView | None, Sequence[Difference]]


def row_against_calls(rollout: Rollout, chains: Chains, reference: Reference | None) -> Found:
    """Which row tokens were sampled according to the calls, and where the row holds others."""
    row = rollout.training_row
    assert row is not None
    held = _pieces(row.token_ids, reference)
    view = _RowColumns(rollout, row, held, reference)
    out = GrowingDifferences()
    windowed = any(link.kind is LinkKind.REWRITTEN for link in chains.links)
    for leaf, recorded, blocks in _align_chains(chains, held, reference):
        found = _unclaimed(starting_before(stretches(recorded, held, blocks), len(recorded)), view)
        if not view.take(blocks, chains.regions[leaf]):
            continue  # the row belongs to another chain and holds little of this one
        for stretch in found:
            region = region_of(stretch, chains.regions[leaf])
            if windowed and stretch.canonical_start == stretch.canonical_end:
                continue  # an answer dropped from the history on purpose is not drift
            one = difference(
                stretch,
                Against.ROW,
                _row_severity(row, region, stretch.canonical_start, stretch.canonical_end),
                _effect_on_row(row, region, stretch),
                regions=chains.regions[leaf],
                turn=leaf,
                turns=rollout.turns,
            )
            out.append(one)
    return view.finish(), first_of_each(out.done())


def _effect_on_row(row: TrainingRow, region: Region | None, stretch: Stretch) -> str:
    """The effect of a row that differs from its calls, as a clause."""
    place = slice(stretch.canonical_start, stretch.canonical_end)
    if place.start == place.stop:
        return f"the row lacks tokens that were {'given' if region is None else 'sampled'}"
    if stretch.start == stretch.end and row.loss_mask is not None and not row.loss_mask[place].any():
        return "the row holds tokens that were neither given nor sampled"
    return "the trainer would learn from tokens that were not sampled"


def _unclaimed(found: Sequence[Stretch], view: _RowColumns) -> Sequence[Stretch]:
    """Those whose row tokens no earlier chain's calls sampled."""
    if isinstance(found, ManyStretches):
        claimed = [view.claimed(one.canonical_start, one.canonical_end) for one in found]
        return found.part(~np.array(claimed, np.bool_))
    return [one for one in found if not view.claimed(one.canonical_start, one.canonical_end)]


def _row_severity(row: TrainingRow, region: Region | None, start: int, end: int) -> Severity:
    """ERROR where the row trains on what was not sampled; WARNING for drifted context."""
    if region is None:
        return Severity.WARNING
    # For tokens that the row lacks, their neighbors show whether the answer is trained there.
    around = slice(max(start - 1, 0), end + 1) if start == end else slice(start, end)
    if row.loss_mask is None or row.loss_mask[around].any():
        return Severity.ERROR
    return Severity.WARNING


def _align_chains(chains: Chains, held: Pieces, reference: Reference | None) -> list[tuple[int, Pieces, Blocks]]:
    """The chain of every leaf aligned with the row, starting with the one that the row holds most of."""
    laid = []
    for leaf in _leaves(chains):
        seen = chains.seen[leaf]
        assert seen is not None
        recorded = _pieces(seen, reference)
        laid.append((leaf, recorded, align(recorded, held, open_end=True)))
    return sorted(laid, key=lambda one: -len(one[2].matched()[0]))


def _leaves(chains: Chains) -> list[int]:
    """Turns that no later turn continues: their prompt + completion holds a whole chain."""
    parents = {
        link.turn: link.parent
        for link in chains.links
        if link.kind is LinkKind.CONTINUES and link.parent is not None
    }
    return last_calls((k for k, seen in enumerate(chains.seen) if seen is not None), parents)


def _pieces(ids: Ids, reference: Reference | None) -> Pieces:
    """The pieces of these ids; without a tokenizer, pieces that compare ids."""
    return pieces_of(ids, reference.vocabulary if reference is not None else None)


class _RowColumns:
    """The columns of a RowView, filled chain by chain."""

    def __init__(self, rollout: Rollout, row: TrainingRow, held: Pieces, reference: Reference | None) -> None:
        size = len(row.token_ids)
        self.turns = rollout.turns
        self.ids = row.token_ids
        self.end_ids = reference.end_ids() if reference else frozenset()
        self.roles = token_roles(held, self.end_ids) if reference else unknown_roles(size)
        self.turn = np.full(size, -1, np.int32)
        self.offset = np.full(size, -1, np.int32)
        self.expected = np.full(size, np.nan)
        self.drifted = np.zeros(size, np.bool_)
        self.any_logprobs = False
        self.laid = False

    def take(self, blocks: Blocks, regions: Sequence[Region]) -> bool:
        """Fill in one chain; False, filling in nothing, when the row holds less than half of it."""
        recorded, held = blocks.matched()
        if not regions or len(recorded) * 2 < regions[-1].end:
            return False
        self.laid = True
        for _, start, _, first, last in blocks.differing():
            if start < regions[-1].end and not self.claimed(first, last):
                self.drifted[first:last] = True
        unclaimed = self.turn[held] < 0
        bounds = recorded.searchsorted([(region.start, region.end) for region in regions])
        for region, (first, last) in zip(regions, bounds.tolist(), strict=True):
            inside = np.flatnonzero(unclaimed[first:last]) + first
            where, offset = held[inside], recorded[inside] - region.start
            self.turn[where] = region.turn
            self.offset[where] = offset
            logprobs = self.turns[region.turn].completion_logprobs
            if logprobs is not None:
                self.expected[where] = logprobs[offset]
                self.any_logprobs = True
        return True

    def claimed(self, start: int, end: int) -> bool:
        """Whether an earlier filled-in call sampled these row tokens; for an empty range, those on both sides."""
        if start == end:
            start, end = start - 1, end + 1
        return start >= 0 and end <= len(self.turn) and bool((self.turn[start:end] >= 0).all())

    def finish(self) -> RowView | None:
        """The view; None when no chain was found in the row."""
        if not self.laid:
            return None
        sampled = self.turn >= 0
        ends = sampled & np.isin(self.ids, list(self.end_ids))
        roles = self.roles.with_role(ASSISTANT, sampled).with_role(TURN_END, ends)
        expected = self.expected if self.any_logprobs else None
        return RowView(sampled, True, roles, self.turn, self.offset, expected, self.drifted)


def row_against_template(rollout: Rollout, rendered: RenderedConversation, reference: Reference) -> Found:
    """The role of each row token by the rendered messages, and where the template writes other tokens."""
    row = rollout.training_row
    assert row is not None
    if row.token_ids is rendered.ids or np.array_equal(row.token_ids, rendered.ids):
        if rendered.told is not None:
            return _told_view(rendered.told, rollout), []
        if rendered.byte_roles is None:
            return _view_by_roles(reference.pieces(rendered.ids), rollout, reference), []
        return _view(*rendered.byte_roles.of_tokens(rendered.starts)), []
    canonical = reference.pieces(rendered.ids, rendered.data)
    held = reference.pieces(row.token_ids, canonical.data if rendered.spelled else None)
    blocks = align(held, canonical, open_end=True)
    other = not canonical.data.startswith(held.data)
    headed = _view_by_roles(held, rollout, reference) if other else None
    at = _canonical_bytes(held, canonical, blocks)
    if rendered.told is None and rendered.byte_roles is None:
        view = _view_by_roles(held, rollout, reference)
    elif headed is not None and _answers_in(headed) == sum(message.sampled for message in rollout.messages):
        view = headed  # the row's own headers fit better than those of a different text
    elif rendered.told is not None:
        view = _view_at(at, rendered.told, row.token_ids, canonical, reference)
    elif rendered.byte_roles is not None:
        view = _view(*rendered.byte_roles.of_tokens(at))
    generated = _generated(rendered)
    if not has_template_markers(held, canonical, reference):
        view = None  # encoded without the template, so nothing shows where its messages are
    if view is not None:
        view = with_answer_starts(view, rollout, held, blocks)
        for _, start, end, _, _ in blocks.differing():
            view.drifted[start:end] = True
    out = GrowingDifferences()
    # The row may end before the template does.
    for stretch in starting_before(stretches(held, canonical, blocks), len(held)):
        if _names_role(stretch, rollout):
            continue  # a role unknown to the template was rendered as a known one
        own = answer_at(view, generated, stretch)
        mine = own is not None
        texts = stretch.recorded.data, stretch.canonical.data
        same_text = texts[0] == texts[1] or normalised(*texts) is not None
        proven = own is not None and view is not None and logprobs_prove_sampled(row, view, own)
        trained = row.loss_mask is None or bool(row.loss_mask[stretch.start : stretch.end].any())
        found = difference(
            stretch,
            Against.TEMPLATE,
            Severity.NOTE if mine and (same_text or not trained or proven) else Severity.WARNING,
            _effect(mine, proven, lacking=stretch.start == stretch.end),
            regions=(),
            turn=None,
            where=Where.ROW,
        )
        out.append(replace(found, sampled=mine))
    return view, out.done()


def _told_view(told: ToldTurns, rollout: Rollout) -> RowView:
    """What was sampled in a rendered conversation whose turns control tokens show."""
    spans = tuple(SampledSpan(start, (closer, closer + 1)) for start, closer in told.turns)
    sound = Sound.NOTHING if rollout.turns else Sound.IDS
    return replace(_view(*told.of_tokens()), spans=spans, sound=sound)


def _view_at(at: Offsets, told: ToldTurns, ids: Ids, canonical: Pieces, reference: Reference) -> RowView:
    """The same for a row whose tokens, `[T]`, lie at these bytes of the conversation."""
    view, end_ids = _view(*told.of_bytes(at, _starts(canonical))), reference.end_ids()
    return replace(view, spans=spans_of(view.sampled, lambda place: is_end(place, ids, view, end_ids)))


def _generated(rendered: RenderedConversation) -> Mask | None:
    """`[N]` what a model would sample in a rendered conversation; None if unknown."""
    if rendered.told is not None:
        return rendered.told.of_tokens()[1]
    return None if rendered.byte_roles is None else rendered.byte_roles.of_tokens(rendered.starts)[1]


def _names_role(stretch: Stretch, rollout: Rollout) -> bool:
    """Whether a stretch is only the log's name for a role that the template names differently."""
    recorded, canonical = (
        side.data.decode("utf-8", "replace").strip() for side in (stretch.recorded, stretch.canonical)
    )
    logged = {message.role for message in rollout.messages}
    return canonical in COMMON_ROLES and recorded in logged - COMMON_ROLES


def _effect(mine: bool, proven: bool, *, lacking: bool) -> str:
    """The effect of a difference from the template, as a clause; `lacking`: the row has nothing there."""
    if lacking and mine:
        return "the row cannot show whether the model sampled it; only a log with the calls could"
    if lacking:
        return "the row lacks what the template writes for these messages"
    if proven:
        return (
            "its logprobs show that it was sampled this way, but it would drift if the messages were re-rendered"
        )
    if mine:
        return "it may be what was sampled; only a log with the calls could prove it"
    return "the row holds tokens that the template does not write for these messages"


def row_against_itself(rollout: Rollout, reference: Reference) -> Found:
    """The role of each row token by its control tokens, and where the row differs from its re-encoding."""
    row = rollout.training_row
    assert row is not None
    held = reference.pieces(row.token_ids)
    encoded = reference.reencoded(row.token_ids)
    if np.array_equal(encoded, row.token_ids):
        return _view_by_roles(held, rollout, reference), []
    canonical = reference.pieces(encoded)
    return _view_by_roles(held, rollout, reference), _reencoded(held, canonical)


def holds_given_turns(rollout: Rollout, reference: Reference) -> bool:
    """Whether a response, logged with a mask that trains all of it, holds turns of a user or a tool.

    A model rarely writes their headers itself. Where the sampler has a logprob for each of these tokens, it did.
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
    given = token_roles(pieces, reference.end_ids(), headers).among(GIVEN_SPEAKERS)
    if not given.any() or logprobs is None:
        return bool(given.any())
    scored = logprobs[given]
    alike = len(scored) > 1 and bool((scored == scored[0]).all())
    return alike or not (np.isfinite(scored) & (scored < 0)).all()


def _reencoded(held: Pieces, canonical: Pieces) -> Sequence[Difference]:
    """Where a row differs from its re-encoding."""

    def made(stretch: Stretch) -> Difference:
        harmless = "harmless if it was sampled this way, but would drift if the text were re-encoded"
        return difference(
            stretch, Against.REENCODED, Severity.NOTE, harmless, regions=(), turn=None, where=Where.ROW
        )

    found = stretches(held, canonical, align(held, canonical))
    many = many_of(found, made)
    return many if many is not None else [made(stretch) for stretch in found]


def _view_by_roles(held: Pieces, rollout: Rollout, reference: Reference) -> RowView | None:
    """What was sampled, by the role markers; None when there are none."""
    roles = _roles(held, rollout, reference)
    sampled = roles.among((ASSISTANT, TURN_END))
    nameless = any(unknown_role_name(message.speaker) is not None for message in rollout.messages)
    return _view(roles, sampled) if nameless or sampled.any() or roles.unclear().any() else None


def _answers_in(view: RowView) -> int:
    """How many answers the role markers of a row show: each begins after its header."""
    return len(trained_runs(view.sampled))


def _roles(held: Pieces, rollout: Rollout, reference: Reference) -> Roles:
    """The role of each row token, by the role markers."""
    return token_roles(held, reference.end_ids(), reference.headers(rollout.template_kwargs))


def _view(roles: Sequence[str], sampled: Mask) -> RowView:
    no_turn = np.full(len(sampled), -1, np.int32)
    return RowView(sampled, False, roles, no_turn, no_turn, None, np.zeros(len(sampled), np.bool_))


def _starts(held: Pieces) -> NDArray[np.int64]:
    """`[T]` the byte at which each token begins."""
    return np.concatenate((np.zeros(1, np.int64), held.end[:-1])) if len(held) else held.end


def _canonical_bytes(held: Pieces, canonical: Pieces, blocks: Blocks) -> NDArray[np.int64]:
    """`[T]` the byte of the canonical text at which each row token lies."""
    starts = _starts(held)
    block_of = np.searchsorted(blocks.recorded_end, np.arange(len(held)), side="right")
    ends = np.concatenate((np.zeros(1, np.int64), held.end))
    canonical_ends = np.concatenate((np.zeros(1, np.int64), canonical.end))
    recorded_first = np.concatenate((np.zeros(1, np.int64), blocks.recorded_end[:-1]))
    canonical_first = np.concatenate((np.zeros(1, np.int64), blocks.canonical_end[:-1]))
    base = canonical_ends[canonical_first[block_of]]
    last = np.maximum(canonical_ends[blocks.canonical_end[block_of]] - 1, 0)
    within = starts - ends[recorded_first[block_of]]
    return np.minimum(base + within, last)
