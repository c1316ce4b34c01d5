"""Rows for SFT: which tokens next to an answer their writers train, and what each row shows of its mask."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from string import ascii_letters

import numpy as np

from tito_audit.evidence.model import Against, Evidence, RowView
from tito_audit.evidence.reference import Reference
from tito_audit.evidence.roles import GENERATION_PROMPT, TEMPLATE, TURN_END, Roles
from tito_audit.record.column import ColumnRole
from tito_audit.record.memo import memoized
from tito_audit.record.rollout import Rollout, TrainingRow, effective_loss_mask
from tito_audit.record.runs import trained_runs
from tito_audit.record.speakers import ASSISTANT

ROWS, TOKENS, TRAINED, NOTHING, CUT = "rows", "tokens", "trained", "nothing_trained", "cut_before_answer"
ENDS, ENDS_TRAINED, ENDLESS, UNFINISHED = "ends", "ends_trained", "no_end_trained", "answer_without_end"
TWO_BOS, BOS_ALONE, PACKED = "two_bos", "two_bos_not_compared", "packed"
SPACED, UNSPACED, SPLIT_OTHERWISE = "with_spaces", "without_spaces", "without_spaces_split_otherwise"
"""What the facts of a row count: `ends` are turn ends of answers that it trains; `packed` is 1 for the second
sample of a row, so that packed rows are counted once. A long text without one space is counted again if it
re-encodes as other tokens."""
_OTHERS = bytes(set(range(256)) - set(ascii_letters.encode()))
"""All bytes but letters."""


def is_sft(rollout: Rollout) -> bool:
    """Whether a rollout is a row for SFT: as the run states, else by labels or assistant masks without logprobs.

    TRL writes `labels`, `assistant_masks` and `completion_mask` over the whole row (huggingface/trl
    `trl/trainer/sft_trainer.py`), axolotl and LLaMA-Factory `labels`, Fireworks weights.
    """
    row, kind = rollout.training_row, rollout.stated.kind
    if row is None or rollout.turns or kind is not None:
        return row is not None and not rollout.turns and kind == "sft"
    if row.loss_mask is None or row.prompt_length is not None:
        return False
    if rollout.format != "generic":
        return rollout.format in _SETS
    if ColumnRole.LOGPROBS in map(attrgetter("role"), row.columns):
        return False
    names = {column.name for column in row.columns if column.alignment is not None}
    return not _OF_SFT.isdisjoint(names) and _OF_RL.isdisjoint(names)


def with_trained_edges(view: RowView, row: TrainingRow, reference: Reference) -> RowView:
    """The view with tokens that are trained right before and after a whole answer counted as the answer's.

    Trainers train white space after a turn end (the line feed in LLaMA-Factory's templates and inside TRL's
    `{% generation %}`, and an end of sequence after the last one), and some the header of the answer too (TRL's
    template for DeepSeek-V3).
    """
    if row.loss_mask is None or view.proven or not isinstance(view.roles, Roles):
        return view
    mask, out = effective_loss_mask(row), view.sampled.copy()
    assert mask is not None
    new_ends = np.zeros_like(out)
    header = view.roles.among((GENERATION_PROMPT,))
    closing = np.isin(row.token_ids, list(reference.end_ids()))
    after, ends = view.roles.among((TEMPLATE,)) & ~closing, view.roles.among((TURN_END,))
    for start, end in trained_runs(view.sampled):
        if not mask[start:end].all():
            continue
        first, last = start, end
        while first and mask[first - 1] and header[first - 1]:
            first -= 1
        while last < len(mask) and mask[last] and after[last]:
            last += 1
        if first and mask[first - 1] and not view.sampled[first - 1]:
            first = start
        if reference.decode(row.token_ids[end:last]).strip():
            last = end
        elif end < last == len(mask) - 1 and mask[last] and closing[last]:
            last += 1  # an end of sequence after the last turn
        elif last < len(mask) and mask[last]:
            last = end
        out[first:last] = True
        new_ends[end:last] = ends[end - 1]  # an answer whose end is not trained lacks both
    if np.array_equal(out, view.sampled):
        return view
    return replace(view, sampled=out, roles=view.roles.with_role(TURN_END, new_ends), spans=())


def with_sampled_ends(view: RowView) -> RowView:
    """The view with the turn end after each answer counted as sampled: one writer wrote both."""
    if view.proven or not isinstance(view.roles, Roles):
        return view
    ends, out = view.roles.among((TURN_END,)), view.sampled.copy()
    for _, end in trained_runs(view.sampled):
        while end < len(ends) and ends[end]:
            out[end] = True
            end += 1
    return view if np.array_equal(out, view.sampled) else replace(view, sampled=out)


def sft_facts(evidence: Evidence) -> dict[str, int]:
    """What a row for SFT shows, each fact a count; {} for other rollouts."""
    row = evidence.rollout.training_row
    if row is None or (row.logprobs is not None and evidence.rollout.stated.kind is None):
        return {}  # as nearly every row
    return _count_facts(evidence) if is_sft(evidence.rollout) else {}


@memoized
def _count_facts(evidence: Evidence) -> dict[str, int]:
    row, view = evidence.rollout.training_row, evidence.row
    if row is None:
        return {}
    size = len(row.token_ids)
    mask = effective_loss_mask(row)
    facts = {ROWS: 1, TOKENS: size, PACKED: int(evidence.rollout.place.item == 1)}
    if mask is not None:
        facts |= {TRAINED: int(np.count_nonzero(mask)), NOTHING: int(not mask.any())}
    if evidence.bos_id is not None and size > 1 and (row.token_ids[:2] == evidence.bos_id).all():
        facts |= {TWO_BOS: 1, BOS_ALONE: int(not evidence.rendered)}
    data = b" " if evidence.vocabulary is None else evidence.vocabulary.bytes_of(row.token_ids)
    if b" " in data:
        facts[SPACED] = 1
    elif len(data.translate(None, _OTHERS)) >= 200:  # neither short, nor written in other letters
        again = any(difference.against is Against.REENCODED for difference in evidence.differences)
        facts |= {UNSPACED: 1, SPLIT_OTHERWISE: int(again)}
    if view is None or mask is None or not isinstance(view.roles, Roles):
        return facts
    ends = view.roles.among((TURN_END,))
    answers = trained_runs(view.roles.among((ASSISTANT, TURN_END)) | view.sampled)
    closed = [(start, end) for start, end in answers if mask[start:end].any() and ends[start:end].any()]
    trained = sum(bool(mask[start:end][ends[start:end]].any()) for start, end in closed)
    left_out = bool(closed) and not trained and evidence.conventions.end != "untrained"
    facts |= {ENDS: len(closed), ENDS_TRAINED: trained, ENDLESS: int(left_out)}
    last = answers[-1] if answers else (0, 0)
    facts[UNFINISHED] = int(last[1] == size and bool(mask[slice(*last)].any()) and not ends[slice(*last)].any())
    facts[CUT] = int(not mask.any() and not answers)
    return facts


_SETS = frozenset(("fireworks", "llamafactory"))
"""Formats of sets for SFT."""
_OF_SFT = frozenset(("labels", "assistant_masks", "assistant_mask", "completion_mask"))
_OF_RL = frozenset(("advantages", "advantage", "returns", "rewards", "old_logprobs", "ref_logprobs"))
"""Names of columns that rows for SFT have, and names of columns that they never have."""
