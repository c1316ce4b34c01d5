"""Pairs the sampler's logprobs with a trainer's of the same tokens, for the rules that compare them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.align.mismatch import LogprobColumns, active_limits
from tito_audit.evidence.logprob_values import IMPOSSIBLE, LOWEST_LOGPROB
from tito_audit.evidence.logprobs import ROUNDING, logprob_shifts
from tito_audit.evidence.model import Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.arrays import Ids, Logprobs, Mask, Offsets
from tito_audit.record.column import Column, ColumnRole
from tito_audit.record.finding import Where
from tito_audit.record.memo import memoized
from tito_audit.record.mismatch import MismatchCause, RowMismatch
from tito_audit.record.policy_columns import SAMPLING, WEIGHTS, expand_to_row, trainer_columns, version_column
from tito_audit.record.rollout import effective_loss_mask
from tito_audit.record.runs import trained_runs
from tito_audit.terminal.words import decimal, listed

_CERTAIN = -1.0
"""If the trainer's logprob is above this, the sampler's 0.0 may be a certain token, else it is a placeholder."""
_UNITS = {
    1 / math.log(10): ("sampler", "base 10"),
    1 / math.log(2): ("sampler", "base 2"),
    math.log(10): ("trainer", "base 10"),
    math.log(2): ("trainer", "base 2"),
}
"""The ratio of the sampler's logprobs to the trainer's, if one of them has another base than e."""
_READABLE = -0.05
"""Logprobs above it are too close to zero for their ratio to mean anything."""


@dataclass(frozen=True, slots=True)
class PairedLogprobs:
    """The sampler's and a trainer's logprobs, as `[N]` arrays over the tokens in the loss that have both."""

    where: Where
    turn: int | None
    ids: Ids
    at: Offsets
    """`[N]` positions in the sequence."""
    sampler: Logprobs
    trainer: Logprobs
    names: tuple[str, str]
    """The names of the sampler's column and of the trainer's."""
    drifted: Mask
    """`[N]` True where the row holds another token than was sampled."""


@memoized
def logprob_pairs(evidence: Evidence) -> list[PairedLogprobs]:
    """Each trainer's column paired with the sampler's, in the row, else in the calls."""
    row, view = evidence.rollout.training_row, evidence.row
    with_both: list[PairedLogprobs] = []
    if row is not None and row.logprobs is not None and not logprob_shifts(evidence):
        inside = effective_loss_mask(row)
        if inside is None:
            inside = np.ones(len(row.token_ids), np.bool_) if view is None else view.sampled
        for column in trainer_columns(row.columns):
            trainer = _without_empty_column(expand_to_row(column, row))
            at: Offsets = (inside & _have_both(row.logprobs, trainer, row.sentinel)).nonzero()[0]
            if len(at):
                drifted = np.zeros(len(at), np.bool_) if view is None or not view.proven else view.drifted[at]
                names, values = (_logprobs_name(row.columns), column.name), (row.logprobs[at], trainer[at])
                with_both.append(PairedLogprobs(Where.ROW, None, row.token_ids, at, *values, names, drifted))
    for number, turn in enumerate(() if with_both else evidence.rollout.turns):
        logprobs, ids = turn.completion_logprobs, turn.completion_ids
        if logprobs is None or ids is None:
            continue
        for column in trainer_columns(turn.columns):
            trainer = _without_empty_column(column.values.astype(np.float64))
            at = _have_both(logprobs, trainer, None).nonzero()[0]
            if len(at):
                names, values = (_logprobs_name(turn.columns), column.name), (logprobs[at], trainer[at])
                nothing = np.zeros(len(at), np.bool_)
                with_both.append(PairedLogprobs(Where.COMPLETION, number, ids, at, *values, names, nothing))
    return with_both


@memoized
def other_bases(evidence: Evidence) -> dict[str, tuple[str, str]]:
    """For each trainer's column in another unit than the sampler's: whose base is not e, and that base.

    Needs at least twelve ratios of the two, nine of ten within 3 % of the ratio of two bases. Between columns of
    one unit ratios scatter around 1: even if each lay anywhere from 0.4 to 2.4 with the same chance, eleven of
    twelve would lie in that window once in 10^18.
    """
    bases: dict[str, tuple[str, str]] = {}
    by_column: dict[str, list[PairedLogprobs]] = {}
    for pair in logprob_pairs(evidence):
        by_column.setdefault(pair.names[1], []).append(pair)
    for name, pairs_of_column in by_column.items():
        sampler = np.concatenate([pair.sampler for pair in pairs_of_column])
        trainer = np.concatenate([pair.trainer for pair in pairs_of_column])
        readable = (sampler < _READABLE) & (trainer < _READABLE)
        if np.count_nonzero(readable) < 12:
            continue
        ratios = sampler[readable] / trainer[readable]
        for ratio, unit in _UNITS.items():
            if np.count_nonzero(np.abs(ratios / ratio - 1) <= 0.03) >= 0.9 * len(ratios):
                bases[name] = unit
    return bases


def join_pairs(evidence: Evidence, column: list[PairedLogprobs]) -> LogprobColumns:
    """The pairs of one trainer's column joined, with what else the log has on each token."""
    named = Needs.WEIGHT_VERSIONS in evidence.present
    versions = [_versions(evidence, pair)[pair.at] for pair in column] if named else []
    experts = [_rerouted(evidence, pair) for pair in column]
    sets = [_set_sizes(evidence, pair) for pair in column]
    return LogprobColumns(
        np.concatenate([pair.ids[pair.at] for pair in column]),
        np.concatenate([pair.at for pair in column]),
        np.concatenate(
            [np.full(len(pair.at), -1 if pair.turn is None else pair.turn, np.int32) for pair in column]
        ),
        np.concatenate([pair.sampler for pair in column]),
        np.concatenate([pair.trainer for pair in column]),
        np.concatenate([pair.drifted for pair in column]),
        np.concatenate(versions) if versions else None,
        _join_all([None if mask is None else mask[pair.at] for mask, pair in zip(experts, column, strict=True)]),
        _join_all([None if sizes is None else sizes[pair.at] for sizes, pair in zip(sets, column, strict=True)]),
        # The number of alternatives where these are all that a token was sampled from: they add up to 1.
        tuple(
            sum(value > LOWEST_LOGPROB for value in top)
            for turn in evidence.rollout.turns
            for top in turn.alternatives
            if abs(sum(math.exp(min(value, 0.0)) for value in top) - 1) < 1e-3
        ),
        sampling_settings(evidence),
    )


def _join_all(parts: list[NDArray[Any] | None]) -> NDArray[Any] | None:
    """The parts concatenated; None if one is missing."""
    whole = [part for part in parts if part is not None]
    return np.concatenate(whole) if len(whole) == len(parts) else None


def sampling_settings(evidence: Evidence) -> Mapping[str, float]:
    """Temperature, top-p, top-k and min-p as the log names them."""
    settings = evidence.rollout.stated.facts.get(SAMPLING, {})
    return settings if isinstance(settings, dict) else {}


def notes_on_causes(evidence: Evidence, mismatch: RowMismatch) -> Iterator[tuple[str, str]]:
    """(cause, what the log says about it) for estimated causes."""
    logged, causes = sampling_settings(evidence), dict(mismatch.shares)
    heat, degrees = mismatch.temperature, logged.get("temperature")
    if heat is not None and degrees:
        words = "that is not it"
        if heat.low <= degrees <= heat.high:
            words = "the trainer left it out"
        elif heat.low <= 1 / degrees <= heat.high:
            words = "the trainer applied it, and the sampler's logprobs are raw"
        yield MismatchCause.TEMPERATURE, f"the log says temperature {decimal(degrees, 3)}: {words}"
    elif MismatchCause.TEMPERATURE in causes and degrees:
        yield MismatchCause.TEMPERATURE, f"the log says temperature {decimal(degrees, 3)}, which fits"
    limits = listed([f"{name.replace('_', '-')} {decimal(logged[name], 3)}" for name in active_limits(logged)])
    if MismatchCause.TRUNCATED in causes and logged:
        top_p = logged.get("top_p", 1.0) if mismatch.mass is not None else 1.0
        mass, words = mismatch.mass, f"the log says {limits}"
        if not limits:
            words = "the log names no limit: a server's defaults may hold one (`generation_config.json`)"
        elif top_p < 1 and mass is not None and not mass.low - 0.01 <= top_p <= mass.high + 0.01:
            words += ", which is not it"
        yield MismatchCause.TRUNCATED, words
    if MismatchCause.TEMPERED in causes:
        words = f"the log says temperature {decimal(degrees or 1.0, 3)} with {limits}: the trainer left both out"
        yield MismatchCause.TEMPERED, words
    row, turns = evidence.rollout.training_row, evidence.rollout.turns
    besides = (holder.extras for holder in (*(() if row is None else (row,)), *turns))
    if MismatchCause.UNKNOWN in causes and any(len(beside.routing) == 1 for beside in besides):
        words = "the log has the experts of one side only; log the other's as `trainer_routed_experts`"
        yield MismatchCause.UNKNOWN, words


def _rerouted(evidence: Evidence, pair: PairedLogprobs) -> Mask | None:
    """`[T]` True where the two sides used other experts for the token before, which make the logprob of a token.

    None unless the log has the experts of both sides.
    """
    rollout = evidence.rollout
    row, before = rollout.training_row, 0
    if pair.turn is not None:
        turn = rollout.turns[pair.turn]
        before = 0 if turn.prompt_ids is None else len(turn.prompt_ids)
        sides = turn.extras.routing
    else:
        sides = () if row is None else row.extras.routing
        for turn in reversed(rollout.turns):
            seen = turn.seen_ids
            begins = seen is not None and np.array_equal(pair.ids[: len(seen)], seen)
            if len(sides) == 1 and turn.extras.routing and begins:
                sides = (*sides, turn.extras.routing[0])
    if len(sides) != 2 or len({(side.start, side.experts.shape[1:]) for side in sides}) > 1:
        return None
    start, size = sides[0].start, min(len(side.experts) for side in sides)
    left, right = (side.experts[:size].astype(np.int64) for side in sides)
    if left.ndim == 3:
        left, right = np.sort(left, axis=2), np.sort(right, axis=2)
    left, right = left.reshape(size, -1), right.reshape(size, -1)
    captured = np.asarray((left > 0).any(axis=1) & (right > 0).any(axis=1))
    out = np.zeros(len(pair.ids) + before, np.bool_)
    part = out[start + 1 : start + 1 + size]
    part[:] = ((left != right).any(axis=1) & captured)[: len(part)]
    return out[before:]


def _set_sizes(evidence: Evidence, pair: PairedLogprobs) -> Logprobs | None:
    """`[T]` how many tokens each was sampled from; NaN where the log does not say, None if it never does."""
    rollout = evidence.rollout
    row, size = rollout.training_row, len(pair.ids)
    if pair.turn is not None:
        sets, places = rollout.turns[pair.turn].extras.kept_sets, [np.arange(size)]
    elif row is None or row.loss_mask is None:
        return None
    else:
        start = int(row.loss_mask.argmax()) if row.prompt_length is None else row.prompt_length
        sets, places = row.extras.kept_sets, [np.arange(size), np.arange(start, size), row.loss_mask.nonzero()[0]]
    for each in sets:
        counts = np.diff(each.offsets)
        for at in places:
            if len(at) == len(counts):
                out = np.full(size, np.nan)
                out[at] = np.where(counts > 0, counts, np.nan)
                return out
    return None


def _versions(evidence: Evidence, pair: PairedLogprobs) -> Logprobs:
    """`[T]` the version of the weights that sampled each token; NaN where the log does not say."""
    rollout, row = evidence.rollout, evidence.rollout.training_row
    out = np.full(len(pair.ids), np.nan)
    if pair.turn is not None:
        turn = rollout.turns[pair.turn]
        column, names, spans = version_column(turn.columns), turn.weight_versions, turn.weight_spans
        values = None if column is None else column.values.astype(np.float64)
    else:
        column = None if row is None else version_column(row.columns)
        values = None if column is None or row is None else expand_to_row(column, row)
        names, spans = tuple(map(str, rollout.stated.policy_versions)), ()
        of_calls = rollout.stated.facts.get(WEIGHTS) or [
            "" if len(turn.weight_versions) != 1 else turn.weight_versions[0] for turn in rollout.turns
        ]
        # One version for each call; the calls of a row are its runs of trained tokens.
        runs = [] if row is None or row.loss_mask is None else trained_runs(row.loss_mask)
        if not names and isinstance(of_calls, list | tuple):
            names = tuple(map(str, of_calls))
            spans = tuple((name, a, b) for name, (a, b) in zip(names, runs, strict=False))
            spans = spans if len(runs) == len(names) else ()
    if values is not None:
        out = np.where(values >= 0, values, np.nan)
    elif spans:
        for version, start, end in spans:
            out[start:end] = _version_number(version)
    elif len(set(names)) == 1:
        out[:] = _version_number(names[0])
    return np.asarray(out)


def _version_number(version: str) -> float:
    """A version that is a number, so that two have a distance; NaN for other names."""
    return float(version) if version.isdecimal() and len(version) < 16 else math.nan


def _have_both(sampler: Logprobs, trainer: Logprobs, sentinel: float | None) -> Mask:
    """`[N]` True where both columns have a logprob: not missing, impossible or a placeholder."""
    out = np.isfinite(sampler) & np.isfinite(trainer)
    for values in (sampler, trainer):
        out &= (values <= ROUNDING) & (values > LOWEST_LOGPROB)
    for fill in (*IMPOSSIBLE, *(() if sentinel is None else (sentinel,))):
        out &= (sampler != fill) | ((fill == 0) & (trainer > _CERTAIN))
    return np.asarray(out & ((sampler != 0) | (trainer > _CERTAIN)))


def _without_empty_column(trainer: Logprobs) -> Logprobs:
    """A trainer's logprobs; all NaN if all of them are 0, as in a column that nobody wrote."""
    return trainer if np.nan_to_num(trainer).any() else np.full_like(trainer, np.nan)


def _logprobs_name(columns: Iterable[Column]) -> str:
    return next((column.name for column in columns if column.role is ColumnRole.LOGPROBS), "logprobs")
