"""Records of what a rollout trains, for comparing the rows of a run with each other."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b

import numpy as np

from tito_audit.record.arrays import Ids, Logprobs, Mask, empty_ids
from tito_audit.record.column import Column, ColumnRole, MaskEncoding, decode_mask
from tito_audit.record.finding import Hit, Severity, Where
from tito_audit.record.prefix import starts_with
from tito_audit.record.rollout import IdsFrom, Rollout, TrainingRow, effective_loss_mask, visible_range
from tito_audit.record.runs import Run
from tito_audit.record.trainings import SEQUENCE, SPAN, TrainedAgain, Trainings

_LEAST = -50.0
"""A logprob below this is a sentinel: no sampler draws such a token."""
_ANSWER_ID = re.compile(r"(?:chatcmpl|cmpl|resp|gen|msg)[-_].{6,}", re.DOTALL)
"""An id that a server gives to each answer."""
_LEFT_OUT = ("sample_loss_mask", "sample_mask")
"""Facts that are 0 where the trainer leaves out the whole row (NeMo-RL)."""

_Span = tuple[int, int, int, float]
"""Hash, end, tokens and logprob of a span, as in SPAN."""


def trainings_of(rollout: Rollout) -> Trainings | None:
    """What a rollout trains, in its training row and in each of its calls; None if nothing is known."""
    if rollout.stated.side is not None:
        return None  # several preference pairs may share an answer
    sequences: list[tuple[int, int, int]] = []
    spans: list[_Span] = []
    row, stated, turns = rollout.training_row, rollout.stated, rollout.turns
    if row is not None and len(trained := _of_row(row, stated.facts)):
        sequences.append((len(trained), -1, 0))
        spans += trained
    ids = stated.answer_ids or ((stated.facts.get("id"),) if len(turns) == 1 else ())
    hasher, hashed = blake2b(digest_size=8), empty_ids()
    for number, turn in enumerate(turns):
        prompt, completion = turn.prompt_ids, turn.completion_ids
        if prompt is None or completion is None or turn.ids_from is not IdsFrom.LOGGED:
            continue  # its context is unknown
        if not starts_with(prompt, hashed):
            hasher, hashed = blake2b(digest_size=8), empty_ids()
        more = prompt[len(hashed) :]  # most prompts go on from the one before
        hasher.update(np.ascontiguousarray(more, np.int32).data)
        hashed = prompt
        if not len(completion):
            continue
        sampled = _sampled(turn.columns, len(completion))
        runs = [(0, len(completion))] if sampled is None else _runs(sampled)
        if trained := _spans(completion, runs, turn.completion_logprobs, hasher.copy(), len(prompt)):
            answer_id = _answer_id(ids[number]) if len(ids) == len(turns) else 0
            sequences.append((len(trained), number, answer_id))
            spans += trained
    if not sequences:
        return None
    records = np.array(sequences, SEQUENCE).tobytes(), np.array(spans, SPAN).tobytes()
    return Trainings(*records, stated.calls_at)


def hit_again(again: TrainedAgain) -> Hit:
    """What a row trains again, or what of a call is never trained, as a hit from the first such token to the
    last."""
    where = Where.ROW if again.turn is None else Where.COMPLETION
    severity = None if again.trained else Severity.NOTE
    return Hit(where, again.runs[0][0], again.runs[-1][1], again.message, again.turn, again.cause, severity)


def _of_row(row: TrainingRow, facts: Mapping[str, object]) -> list[_Span]:
    mask = effective_loss_mask(row)
    flags = [facts[name] for name in _LEFT_OUT if name in facts]
    if mask is None or any(isinstance(flag, int | float | np.generic) and flag == 0 for flag in flags):
        return []
    start, end = visible_range(row)
    if start or (len(mask) and mask[0]):
        return []  # The context is unknown: a first token is never sampled, nor is padding part of a prompt.
    return _spans(row.token_ids[:end], _runs(mask[:end]), row.logprobs, blake2b(digest_size=8))


def _sampled(columns: Sequence[Column], size: int) -> Mask | None:
    """`[C]` what its mask trains in a completion; None without a mask."""
    for column in columns:
        if column.role is ColumnRole.LOSS_MASK and column.encoding is not None and len(column.values) == size:
            if column.encoding in (MaskEncoding.IMPLIED, MaskEncoding.ABSENT):
                continue
            return np.ascontiguousarray(decode_mask(column.values, column.encoding))
    return None


def _runs(mask: Mask) -> list[Run]:
    """What `trained_runs` returns, without a copy of the mask."""
    if not len(mask):
        return []
    edges = (mask[1:] != mask[:-1]).nonzero()[0] + 1
    bounds = [*([0] if mask[0] else []), *edges.tolist(), *([len(mask)] if mask[-1] else [])]
    return list(zip(bounds[::2], bounds[1::2], strict=True))


def _spans(
    ids: Ids, runs: Sequence[Run], logprobs: Logprobs | None, hasher: blake2b, before: int = 0
) -> list[_Span]:
    """The records of these trained runs, of the token after each, and of the end of the ids.

    This lets a row that trains a turn end match one that does not. `hasher` has the `before` tokens before them.
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
        total = np.nan if logprobs is None or start == end else _sum(logprobs[start:end])
        spans.append((int.from_bytes(hasher.digest(), "little"), before + end, end - start, total))
    return spans


def _sum(values: Logprobs) -> float:
    """An upper bound of these tokens' total logprob: what is not a logprob counts as certain; NaN if none is one.

    Values that are all the same are a placeholder.
    """
    real, lowest, highest = values, np.minimum.reduce(values), np.maximum.reduce(values)
    if not (lowest > _LEAST and highest < 0):
        real = values[(values > _LEAST) & (values < 0)]
        lowest, highest = np.minimum.reduce(real, initial=0), np.maximum.reduce(real, initial=_LEAST)
    return np.nan if not len(real) or (len(values) > 1 and lowest == highest) else float(np.add.reduce(real))


def _answer_id(value: object) -> int:
    """The hash of a server's id of an answer; 0 for anything else."""
    if not isinstance(value, str) or not _ANSWER_ID.fullmatch(value):
        return 0
    digest = blake2b(value.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1
