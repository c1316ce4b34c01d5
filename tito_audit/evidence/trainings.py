"""Records what a rollout trains, so that the rows of a run can be compared with each other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import accumulate

import numpy as np

from tito_audit.chains.links import Link, parents_of
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
_Part = tuple[Ids, Sequence[Run], Logprobs | None, blake2b, int]
"""Ids, their trained runs and logprobs, a hasher that read what precedes them, and how many tokens that is."""


def trainings_of(rollout: Rollout, links: Iterable[Link] = ()) -> Trainings | None:
    """Records of what a rollout trains, in its training row and in each call; None if nothing is known.

    `links` of its calls spare the comparison of prompts that they already show to continue each other.
    """
    if rollout.stated.side is not None:
        return None  # several preference pairs may share an answer
    parts: list[_Part] = []
    numbers: list[int] = []  # the call of each part, -1 for the training row
    runs: Sequence[Run]
    row, stated, turns = rollout.training_row, rollout.stated, rollout.turns
    if row is not None and (mask := effective_loss_mask(row)) is not None:
        flags = [stated.facts[name] for name in _LEFT_OUT if name in stated.facts] if stated.facts else []
        left_out = bool(flags) and any(isinstance(flag, int | float | np.generic) and flag == 0 for flag in flags)
        start, end = visible_range(row)
        # The context is known: a first token is never sampled, nor is padding part of a prompt.
        known = not start and not (len(mask) and mask[0])
        if known and not left_out:
            runs = trained_runs(mask[:end])
            parts.append((row.token_ids[:end], runs, row.logprobs, blake2b(digest_size=8), 0))
            numbers.append(-1)
    ids = stated.answer_ids or ((stated.facts.get("id"),) if len(turns) == 1 else ())
    parents = parents_of(links) if len(turns) > 1 else {}
    hasher, hashed, latest = blake2b(digest_size=8), empty_ids(), -1
    for number, turn in enumerate(turns):
        prompt, completion = turn.prompt_ids, turn.completion_ids
        if prompt is None or completion is None or turn.ids_from is not IdsFrom.LOGGED:
            continue  # its context is unknown
        if parents.get(number) != latest and not starts_with(prompt, hashed):
            hasher, hashed = blake2b(digest_size=8), empty_ids()
        hasher.update(
            np.ascontiguousarray(prompt[len(hashed) :], np.int32).data
        )  # most prompts extend the last one
        hashed, latest = prompt, number
        if not len(completion):
            continue
        # What the completion's own mask trains; all of it without one.
        runs = [(0, len(completion))]
        for column in turn.columns:
            encoding = column.encoding if column.role is ColumnRole.LOSS_MASK else None
            if encoding is not None and encoding not in _NO_MASK and len(column.values) == len(completion):
                runs = trained_runs(np.ascontiguousarray(decode_mask(column.values, encoding)))
                break
        parts.append((completion, runs, turn.completion_logprobs, hasher.copy(), len(prompt)))
        numbers.append(number)
    spans, counts = _spans(parts)
    if not spans:
        return None
    sequences: list[tuple[int, int, int]] = []
    for number, count in zip(numbers, counts, strict=True):
        answer_id, logged_id = 0, ids[number] if number >= 0 and len(ids) == len(turns) else None
        if isinstance(logged_id, str) and _ANSWER_ID.fullmatch(logged_id):
            digest = blake2b(logged_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
            answer_id = int.from_bytes(digest, "little") or 1
        if count:
            sequences.append((count, number, answer_id))
    records = np.array(sequences, SEQUENCE).tobytes(), np.array(spans, SPAN).tobytes()
    return Trainings(*records, stated.calls_at)


def retraining_hit(again: TrainedAgain) -> Hit:
    """A hit from the first to the last token that a row trains again, or that is never trained though sampled."""
    where = Where.ROW if again.turn is None else Where.COMPLETION
    severity = None if again.trained else Severity.NOTE
    return Hit(where, again.runs[0][0], again.runs[-1][1], again.message, again.turn, again.cause, severity)


def _spans(parts: Sequence[_Part]) -> tuple[list[_Span], list[int]]:
    """The records of trained runs, of the token after each, and of the end of the ids; and how many for each part.

    With the token after, a row that trains a turn end matches one that does not.
    """
    spans: list[_Span] = []
    counts: list[int] = []
    scored = [(runs, logprobs) for _, runs, logprobs, _, _ in parts if logprobs is not None]
    totals = iter(_sum_logprobs([logprobs[start:end] for runs, logprobs in scored for start, end in runs]))
    for ids, runs, logprobs, hasher, before in parts:
        data, at, size = np.ascontiguousarray(ids, np.int32).data.cast("B"), 0, len(ids)
        edges: list[Run] = []
        for start, end in runs:
            edges.append((start, end))
            if end < size:
                edges.append((end + 1, end + 1))
        if edges and edges[-1][1] < size:
            edges.append((size, size))
        for start, end in edges:
            hasher.update(data[4 * at : 4 * end])
            at = end
            total = next(totals) if logprobs is not None and start < end else np.nan
            spans.append((int.from_bytes(hasher.digest(), "little"), before + end, end - start, total))
        counts.append(len(edges))
    return spans, counts


def _sum_logprobs(stretches: Sequence[Logprobs]) -> list[float]:
    """An upper bound of the sum of each stretch, as an entry that is no logprob counts as 0; NaN if unknown.

    Several equal values are a placeholder.
    """
    if not stretches:
        return []
    values, starts = np.concatenate(stretches), [0, *accumulate(map(len, stretches[:-1]))]
    sums: list[float]
    lows, highs, sums = [reduce.reduceat(values, starts).tolist() for reduce in (np.minimum, np.maximum, np.add)]
    for number, (stretch, low, high) in enumerate(zip(stretches, lows, highs, strict=True)):
        if not (low > _LEAST and high < 0):
            real = stretch[(stretch > _LEAST) & (stretch < 0)]
            low, high = real.min(initial=0), real.max(initial=_LEAST)
            sums[number] = float(real.sum()) if len(real) else np.nan
        if len(stretch) > 1 and low == high:
            sums[number] = np.nan
    return sums
