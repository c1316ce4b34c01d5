"""Recorded logprobs compared with a model's: how well they agree, and what explains it if they do not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from tito_audit.evidence.fill import FLOOR, IMPOSSIBLE
from tito_audit.record.arrays import Logprobs, Mask
from tito_audit.record.finding import Where
from tito_audit.rescore.model import BOUND, FEWEST, Changes, ScorePair
from tito_audit.rescore.plan import Scorable

_ROUNDING = 1e-3
_CERTAIN = -1.0
"""A recorded 0.0 is a logprob if the model's is above this; else it is a placeholder."""


def compared(part: Scorable, scores: Logprobs) -> ScorePair:
    """The recorded and the model's logprobs of the tokens that have both; `scores` `[T]` belong to `part.ids`."""
    model = scores[part.offset :]
    recorded = part.recorded if part.recorded is not None else np.full(len(model), np.nan)
    at = np.flatnonzero(part.sampled & is_logprob(recorded, model, part.sentinel) & np.isfinite(model))
    return ScorePair(
        part.where, part.turn, at.astype(np.int32), part.turns[at], recorded[at], model[at], part.drifted[at]
    )


def is_logprob(recorded: Logprobs, model: Logprobs, sentinel: float | None) -> Mask:
    """`[N]` which recorded values are logprobs: not missing, impossible or a placeholder.

    A 0.0 is a logprob where the model is nearly certain of the token.
    """
    with np.errstate(invalid="ignore"):
        out = np.isfinite(recorded) & (recorded <= _ROUNDING) & (recorded > FLOOR)
        certain = ~(model <= _CERTAIN)
    for fill in (*IMPOSSIBLE, *(() if sentinel is None else (sentinel,))):
        out &= (recorded != fill) | ((fill == 0) & certain)
    return np.asarray(out & ((recorded != 0) | certain))


def used(sequences: Sequence[ScorePair]) -> list[ScorePair]:
    """The calls to compare; the row only if no call has logprobs."""
    calls = [sequence for sequence in sequences if sequence.where is Where.COMPLETION and len(sequence.at)]
    return calls or [sequence for sequence in sequences if sequence.where is Where.ROW]


def explained(sequences: Sequence[ScorePair], tolerance: float = BOUND) -> str:
    """The explanation that brings all tokens within the tolerance; "" if there is none."""
    ways = []
    for far in (1, -1, 2, -2):
        place = "place" if abs(far) == 1 else "places"
        side = "behind" if far > 0 else "ahead of"
        words = f"the recorded logprobs are {abs(far)} {place} {side} their tokens"
        ways.append((words, [_slid(sequence, far) for sequence in sequences]))
    conversions: list[tuple[str, Callable[[Logprobs], Logprobs]]] = [
        ("the recorded logprobs are logarithms of base 2", partial(np.multiply, math.log(2))),
        ("the recorded logprobs are logarithms of base 10", partial(np.multiply, math.log(10))),
        ("the recorded values are probabilities, not logprobs", np.log),
    ]
    with np.errstate(divide="ignore", invalid="ignore"):
        for words, meant in conversions:
            ways.append((words, [np.abs(s.model - meant(s.recorded))[~s.drifted] for s in sequences]))
    for words, parts in ways:
        sizes = np.concatenate(parts)
        if len(sizes) >= FEWEST and sizes.mean() <= tolerance:
            return words
    return ""


def _slid(seq: ScorePair, far: int) -> Logprobs:
    """The absolute differences if each recorded value belonged to the token `far` places before it."""
    here, there = slice(max(-far, 0), -far if far > 0 else None), slice(max(far, 0), far if far < 0 else None)
    inside = (np.abs(seq.at[there] - seq.at[here]) == abs(far)) & (seq.turns[here] == seq.turns[there])
    return np.asarray(np.abs(seq.model[here] - seq.recorded[there])[inside & ~seq.drifted[here]], np.float64)


# Whether recorded logprobs are the model's at another temperature, proved from its top tokens.

_COARSE = np.arange(0.1, 2.55, 0.05)
_FINE = np.arange(-0.05, 0.055, 0.01)
_VOCABULARY = 2**18
"""More tokens than any model has."""


def fitted(recorded: Logprobs, model: Logprobs, top: Logprobs, tolerance: float) -> float | None:
    """The temperature at which the model gives the recorded values within the tolerance; None if none is proved.

    `recorded` and `model` `[N]` are the logprobs of some tokens, the model's at temperature 1; `top` `[N, K]` the
    likeliest tokens' logprobs, -inf where there are fewer.

    The mass outside the likeliest tokens bounds the normalization from both sides: a temperature counts only if
    these bounds are within the tolerance and temperature 1 does not fit.
    """
    agreed = Changes.of(model - recorded).agreement(tolerance)
    if agreed is None or not agreed.disagrees:
        return None
    coarse = min(_COARSE.tolist(), key=lambda t: _error(recorded, model, top, t)[0])
    best = min((coarse + _FINE).tolist(), key=lambda t: _error(recorded, model, top, t)[0])
    error, width = _error(recorded, model, top, best)
    return round(best, 2) if error <= tolerance and width <= tolerance else None


def _error(recorded: Logprobs, model: Logprobs, top: Logprobs, temperature: float) -> tuple[float, float]:
    """The mean |difference| from the middle of the possible values, and the mean width of their range."""
    power = 1 / temperature
    rest = np.clip(1 - np.exp(top).sum(axis=1), 0, 1)
    inside = np.exp(top * power).sum(axis=1)
    if power >= 1:
        least = np.zeros_like(rest)
        most = rest * np.exp(top.min(axis=1, initial=0, where=np.isfinite(top))) ** (power - 1)
    else:
        least, most = rest**power, rest**power * _VOCABULARY ** (1 - power)
    low, high = model * power - np.log(inside + most), model * power - np.log(inside + least)
    return float(np.abs(recorded - (low + high) / 2).mean()), float((high - low).mean())
