"""Recorded logprobs compared with a model's: how well they agree, and what explains it if they do not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from tito_audit.evidence.fill import FLOOR, IMPOSSIBLE
from tito_audit.record.arrays import Logprobs, Mask
from tito_audit.record.finding import Where
from tito_audit.rescore.model import BOUND, EDGES, FEWEST, Agreement, ScorePair
from tito_audit.rescore.plan import Scorable

_ROUNDING = 1e-3
_CERTAIN = -1.0
"""A recorded 0.0 is a logprob if the model's is above this; else it is a placeholder."""
_BASES = {math.log(2): "base 2", math.log(10): "base 10"}


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


@dataclass(slots=True)
class Sums:
    """Sums over differences, model minus recorded, from which an `Agreement` is made."""

    tokens: int = 0
    total: float = 0.0
    size: float = 0.0
    squares: float = 0.0
    k3: float = 0.0
    largest: float = 0.0
    above: list[int] = field(default_factory=lambda: [0] * len(EDGES))

    def add(self, differences: Logprobs) -> None:
        if not len(differences):
            return
        sizes = np.abs(differences)
        self.tokens += len(sizes)
        self.total += float(differences.sum())
        self.size += float(sizes.sum())
        self.squares += float((sizes**2).sum())
        with np.errstate(over="ignore"):
            self.k3 += float((np.expm1(differences) - differences).sum())
        self.largest = max(self.largest, float(sizes.max()))
        for number, edge in enumerate(EDGES):
            self.above[number] += int((sizes > edge).sum())

    def agreement(self, tolerance: float) -> Agreement | None:
        """How all of them agree; None without any."""
        n = self.tokens
        if not n:
            return None
        mean, size = self.total / n, self.size / n
        spread = math.sqrt(max(self.squares - n * size * size, 0) / (n - 1)) if n > 1 else 0.0
        above = n >= FEWEST and size - 2 * spread / math.sqrt(n) > tolerance
        shares = tuple(count / n for count in self.above)
        return Agreement(n, mean, size, self.largest, -mean, self.k3 / n, shares, above)


def agreement(sequences: Iterable[ScorePair], tolerance: float = BOUND) -> Agreement | None:
    """How all tokens before any drift agree; None without any."""
    differences = [(sequence.model - sequence.recorded)[~sequence.drifted] for sequence in sequences]
    return agreement_of(np.concatenate(differences) if differences else np.empty(0), tolerance)


def agreement_of(differences: Logprobs, tolerance: float = BOUND) -> Agreement | None:
    """The same for differences, model minus recorded."""
    sums = Sums()
    sums.add(differences)
    return sums.agreement(tolerance)


def used(sequences: Sequence[ScorePair]) -> list[ScorePair]:
    """The calls to compare; the row only if no call has logprobs."""
    calls = [sequence for sequence in sequences if sequence.where is Where.COMPLETION and len(sequence.at)]
    return calls or [sequence for sequence in sequences if sequence.where is Where.ROW]


def is_above(sizes: Logprobs, tolerance: float) -> bool:
    """Whether the mean stays above the tolerance with two standard errors taken off."""
    if len(sizes) < FEWEST:
        return False
    return bool(sizes.mean() - 2 * sizes.std(ddof=1) / math.sqrt(len(sizes)) > tolerance)


def explained(sequences: Sequence[ScorePair], tolerance: float = BOUND) -> str:
    """The explanation that brings all tokens within the tolerance; "" if there is none."""
    for words, sizes in _explanations(sequences):
        if len(sizes) >= FEWEST and sizes.mean() <= tolerance:
            return words
    return ""


def _explanations(sequences: Sequence[ScorePair]) -> Iterable[tuple[str, Logprobs]]:
    for far in (1, -1, 2, -2):
        sizes = [_slid(sequence, far) for sequence in sequences]
        place = "place" if abs(far) == 1 else "places"
        side = "behind" if far > 0 else "ahead of"
        yield f"the recorded logprobs are {abs(far)} {place} {side} their tokens", np.concatenate(sizes)
    for factor, base in _BASES.items():
        yield f"the recorded logprobs are logarithms of {base}", _sizes(sequences, partial(np.multiply, factor))
    yield "the recorded values are probabilities, not logprobs", _sizes(sequences, _log)


def _sizes(sequences: Sequence[ScorePair], meant: Callable[[Logprobs], Logprobs]) -> Logprobs:
    """The absolute differences after the recorded values are converted by `meant`."""
    sizes = [np.abs(sequence.model - meant(sequence.recorded))[~sequence.drifted] for sequence in sequences]
    return np.concatenate(sizes) if sizes else np.empty(0)


def _log(values: Logprobs) -> Logprobs:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(values > 0, np.log(values), np.nan), np.float64)


def _slid(seq: ScorePair, far: int) -> Logprobs:
    """The absolute differences if each recorded value belonged to the token `far` places before it."""
    here, there = (seq.model[:-far], seq.recorded[far:]) if far > 0 else (seq.model[-far:], seq.recorded[:far])
    at = (seq.at[:-far], seq.at[far:]) if far > 0 else (seq.at[-far:], seq.at[:far])
    turns = (seq.turns[:-far], seq.turns[far:]) if far > 0 else (seq.turns[-far:], seq.turns[:far])
    drifted = seq.drifted[:-far] if far > 0 else seq.drifted[-far:]
    inside = (np.abs(at[1] - at[0]) == abs(far)) & (turns[0] == turns[1]) & ~drifted
    return np.asarray(np.abs(here - there)[inside], np.float64)
