"""The sampler's logprobs next to a trainer's of the same tokens, for the rules that compare them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from tito_audit.align.mismatch import LogprobColumns
from tito_audit.evidence.fill import FLOOR, IMPOSSIBLE
from tito_audit.evidence.logprobs import ROUNDING, shifts
from tito_audit.evidence.model import Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.arrays import Ids, Logprobs, Mask, Offsets
from tito_audit.record.by_name import over_row, trainer_columns, version_column
from tito_audit.record.column import Column, ColumnRole
from tito_audit.record.finding import Where
from tito_audit.record.rollout import seen_by_loss

_CERTAIN = -1.0
"""A trainer's logprob above which the sampler's 0.0 may be a certain token; below, it is LPR505's placeholder."""
_UNITS = {
    1 / math.log(10): ("sampler", "base 10"),
    1 / math.log(2): ("sampler", "base 2"),
    math.log(10): ("trainer", "base 10"),
    math.log(2): ("trainer", "base 2"),
}
"""What the sampler's logprobs are times the trainer's, where one of them has another base than e."""
_FEWEST = 12
"""Tokens with a ratio, the fewest from which a base is read."""
_READABLE = -0.05
"""Logprobs above it are too close to zero for their ratio to mean anything."""
_NEAR = 0.03
"""How far a ratio may be from that of two bases, as a share of it."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two columns of logprobs over the same tokens, as `[N]` arrays; only tokens in the loss that have both."""

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
    """`[N]` tokens of the row that are not those which were sampled."""


def pairs(evidence: Evidence) -> list[Pair]:
    """Every trainer's column with the sampler's, of the row or else of the calls; [] where no token has both."""
    return evidence.once("pairs of logprobs", lambda evidence: [*_of_row(evidence)] or [*_of_calls(evidence)])


def other_base(evidence: Evidence) -> dict[str, tuple[str, str]]:
    """By trainer's column: which of the two columns has another base than e, and the base.

    Read where nine of ten ratios of the two, of at least twelve, are that of two bases within 3 %. Between columns
    of one unit ratios scatter around 1: even if each lay anywhere from 0.4 to 2.4 with the same chance, eleven of
    twelve would lie in that window once in 10^18.
    """
    return evidence.once("other base", _other_base)


def _other_base(evidence: Evidence) -> dict[str, tuple[str, str]]:
    bases: dict[str, tuple[str, str]] = {}
    by_column: dict[str, list[Pair]] = {}
    for pair in pairs(evidence):
        by_column.setdefault(pair.names[1], []).append(pair)
    for name, pairs_of_column in by_column.items():
        sampler, trainer = (
            np.concatenate([getattr(p, side) for p in pairs_of_column]) for side in ("sampler", "trainer")
        )
        readable = (sampler < _READABLE) & (trainer < _READABLE)
        if np.count_nonzero(readable) < _FEWEST:
            continue
        ratios = sampler[readable] / trainer[readable]
        for ratio, unit in _UNITS.items():
            if np.count_nonzero(np.abs(ratios / ratio - 1) <= _NEAR) >= 0.9 * len(ratios):
                bases[name] = unit
    return bases


def together(evidence: Evidence, column: list[Pair]) -> LogprobColumns:
    """The pairs of one trainer's column as one, with the version of each token where the log has it."""
    versions = [_versions(evidence, pair) for pair in column] if has_versions(evidence) else []
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
    )


def has_versions(evidence: Evidence) -> bool:
    """Whether the log names the weights that sampled the tokens."""
    return Needs.WEIGHT_VERSIONS in evidence.present


def _versions(evidence: Evidence, pair: Pair) -> Logprobs:
    """`[N]` the version of the weights that sampled each token of a pair; NaN where the log does not say."""
    rollout, row = evidence.rollout, evidence.rollout.training_row
    out = np.full(len(pair.ids), np.nan)
    if pair.turn is not None:
        turn = rollout.turns[pair.turn]
        column, names, spans = version_column(turn.columns), turn.weight_versions, turn.weight_spans
        values = None if column is None else column.values.astype(np.float64)
    else:
        column = None if row is None else version_column(row.columns)
        values = None if column is None or row is None else over_row(column, row)
        names, spans = tuple(map(str, dict.fromkeys(rollout.stated.policy_versions))), ()
    if values is not None:
        out = np.where(values >= 0, values, np.nan)
    elif spans:
        for version, start, end in spans:
            out[start:end] = _number(version)
    elif len(names) == 1:
        out[:] = _number(names[0])
    return np.asarray(out[pair.at])


def _number(version: str) -> float:
    """A version as a number, so that two have a distance; NaN for any other name."""
    return float(version) if version.isdecimal() and len(version) < 16 else math.nan


def _of_row(evidence: Evidence) -> Iterator[Pair]:
    row, view = evidence.rollout.training_row, evidence.row
    if row is None or row.logprobs is None or shifts(evidence):
        return
    inside = seen_by_loss(row)
    if inside is None:
        inside = np.ones(len(row.token_ids), np.bool_) if view is None else view.sampled
    name = _name(row.columns)
    for column in trainer_columns(row.columns):
        trainer = _filled(over_row(column, row))
        at: Offsets = (inside & _both(row.logprobs, trainer, row.sentinel)).nonzero()[0]
        if len(at):
            drifted = np.zeros(len(at), np.bool_) if view is None or not view.proven else view.drifted[at]
            values = row.logprobs[at], trainer[at]
            yield Pair(Where.ROW, None, row.token_ids, at, *values, (name, column.name), drifted)


def _of_calls(evidence: Evidence) -> Iterator[Pair]:
    for number, turn in enumerate(evidence.rollout.turns):
        values, ids = turn.completion_logprobs, turn.completion_ids
        if values is None or ids is None:
            continue
        for column in trainer_columns(turn.columns):
            trainer = _filled(column.values.astype(np.float64))
            at: Offsets = _both(values, trainer, None).nonzero()[0]
            if len(at):
                pair = values[at], trainer[at]
                nothing = np.zeros(len(at), np.bool_)
                names = _name(turn.columns), column.name
                yield Pair(Where.COMPLETION, number, ids, at, *pair, names, nothing)


def _both(sampler: Logprobs, trainer: Logprobs, sentinel: float | None) -> Mask:
    """`[N]` tokens with a logprob in both columns: neither missing, nor impossible, nor a placeholder."""
    out = np.isfinite(sampler) & np.isfinite(trainer)
    for values in (sampler, trainer):
        out &= (values <= ROUNDING) & (values > FLOOR)
    for fill in (*IMPOSSIBLE, *(() if sentinel is None else (sentinel,))):
        out &= (sampler != fill) | ((fill == 0) & (trainer > _CERTAIN))
    return np.asarray(out & ((sampler != 0) | (trainer > _CERTAIN)))


def _filled(trainer: Logprobs) -> Logprobs:
    """A trainer's logprobs; NaN throughout where all of them are 0, as a column is that nobody wrote."""
    return trainer if np.nan_to_num(trainer).any() else np.full_like(trainer, np.nan)


def _name(columns: Iterable[Column]) -> str:
    return next((column.name for column in columns if column.role is ColumnRole.LOGPROBS), "logprobs")
