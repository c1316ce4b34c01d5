"""Records what a rollout trains, so that the rows of a run can be compared with each other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from tito_audit.record.arrays import Ids, Logprobs, empty_ids
from tito_audit.record.column import ColumnRole, MaskEncoding, decode_mask
from tito_audit.record.finding import Hit, Severity, Where
from tito_audit.record.prefix import starts_with
from tito_audit.record.rollout import IdsFrom, Rollout, effective_loss_mask, visible_range
from tito_audit.record.runs import Run, trained_runs
from tito_audit.record.trainings import SEQUENCE, SPAN, TrainedAgain, Trainings

_LEAST = -50.0
"""A lower logprob is a sentinel: no sampler draws such a token."""
_ANSWER_ID = re.compile(r"(?:chatcmpl|cmpl|resp|gen|msg)[-_].{6,}", re.DOTALL)
"""An id that a server gives to each answer."""
_LEFT_OUT = ("sample_loss_mask", "sample_mask")
"""Facts that are 0 if the trainer leaves out the whole row (NeMo-RL)."""
_NO_MASK = (MaskEncoding.IMPLIED, MaskEncoding.ABSENT)

_Span = tuple[int, int, int, float]
"""Hash, end, tokens and logprob of a span, as in SPAN."""


def trainings_of(rollout: Rollout) -> Trainings | None:
    """Records of what a rollout trains, in its training row and in each call; None if nothing is known."""
    if rollout.stated.side is not None:
        return None  # several preference pairs may share an answer
    sequences: list[tuple[int, int, int]] = []
    spans: list[_Span] = []
    runs: Sequence[Run]
    row, stated, turns = rollout.training_row, rollout.stated, rollout.turns
    if row is not None and (mask := effective_loss_mask(row)) is not None:
        flags = [stated.facts[name] for name in _LEFT_OUT if name in stated.facts]
        left_out = bool(flags) and any(isinstance(flag, int | float | np.generic) and flag == 0 for flag in flags)
        start, end = visible_range(row)
        # The context is known: a first token is never sampled, nor is padding part of a prompt.
        known = not start and not (len(mask) and mask[0])
        if known and not left_out:
            runs = trained_runs(mask[:end])
            spans += _spans(row.token_ids[:end], runs, row.logprobs, blake2b(digest_size=8))
        if spans:
            sequences.append((len(spans), -1, 0))
    ids = stated.answer_ids or ((stated.facts.get("id"),) if len(turns) == 1 else ())
    hasher, hashed = blake2b(digest_size=8), empty_ids()
    for number, turn in enumerate(turns):
        prompt, completion = turn.prompt_ids, turn.completion_ids
        if prompt is None or completion is None or turn.ids_from is not IdsFrom.LOGGED:
            continue  # its context is unknown
        if not starts_with(prompt, hashed):
            hasher, hashed = blake2b(digest_size=8), empty_ids()
        hasher.update(
            np.ascontiguousarray(prompt[len(hashed) :], np.int32).data
        )  # most prompts extend the last one
        hashed = prompt
        if not len(completion):
            continue
        # What the completion's own mask trains; all of it without one.
        runs = [(0, len(completion))]
        for column in turn.columns:
            encoding = column.encoding if column.role is ColumnRole.LOSS_MASK else None
            if encoding is not None and encoding not in _NO_MASK and len(column.values) == len(completion):
                runs = trained_runs(np.ascontiguousarray(decode_mask(column.values, encoding)))
                break
        if trained := _spans(completion, runs, turn.completion_logprobs, hasher.copy(), len(prompt)):
            answer_id, logged_id = 0, ids[number] if len(ids) == len(turns) else None
            if isinstance(logged_id, str) and _ANSWER_ID.fullmatch(logged_id):
                digest = blake2b(logged_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
                answer_id = int.from_bytes(digest, "little") or 1
            sequences.append((len(trained), number, answer_id))
            spans += trained
    if not sequences:
        return None
    records = np.array(sequences, SEQUENCE).tobytes(), np.array(spans, SPAN).tobytes()
    return Trainings(*records, stated.calls_at)


def retraining_hit(again: TrainedAgain) -> Hit:
    """A hit from the first to the last token that a row trains again, or that is never trained though sampled."""
    where = Where.ROW if again.turn is None else Where.COMPLETION
    severity = None if again.trained else Severity.NOTE
    return Hit(where, again.runs[0][0], again.runs[-1][1], again.message, again.turn, again.cause, severity)


def _spans(
    ids: Ids, runs: Sequence[Run], logprobs: Logprobs | None, hasher: blake2b, before: int = 0
) -> list[_Span]:
    """The records of these trained runs, of the token after each, and of the end of the ids.

    With the token after, a row that trains a turn end matches one that does not. `hasher` has already read the
    `before` tokens that precede `ids`.
    """
    if not runs:
        return []
    data, at, size = np.ascontiguousarray(ids, np.int32).data.cast("B"), 0, len(ids)
    spans: list[_Span] = []
    edges: list[Run] = []
    for start, end in runs:
        edges.append((start, end))
        if end < size:
            edges.append((end + 1, end + 1))
    if end + 1 < size:
        edges.append((size, size))
    for start, end in edges:
        hasher.update(data[4 * at : 4 * end])
        at = end
        total = np.nan
        if logprobs is not None and start < end:
            # An upper bound: an entry that is no logprob counts as 0. Several equal values are a placeholder.
            values = real = logprobs[start:end]
            lowest, highest = np.minimum.reduce(values), np.maximum.reduce(values)
            if not (lowest > _LEAST and highest < 0):
                real = values[(values > _LEAST) & (values < 0)]
                lowest, highest = np.minimum.reduce(real, initial=0), np.maximum.reduce(real, initial=_LEAST)
            if len(real) and (len(values) == 1 or lowest != highest):
                total = float(np.add.reduce(real))
        spans.append((int.from_bytes(hasher.digest(), "little"), before + end, end - start, total))
    return spans
