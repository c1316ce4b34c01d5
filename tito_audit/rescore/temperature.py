"""Whether recorded logprobs are the model's at another temperature, proved from its top tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tito_audit.errors import ProviderError
from tito_audit.provider import ScoredTokens, TokenProvider
from tito_audit.record.arrays import Logprobs
from tito_audit.rescore.compare import is_above
from tito_audit.rescore.model import FEWEST, Compared
from tito_audit.rescore.plan import Part
from tito_audit.terminal.words import decimal

_TOPS = (1000, 20)
"""Alternatives requested: many servers give no more than 20."""
_ROLLOUTS = 4
"""Rollouts examined per run."""
_COARSE = np.arange(0.1, 2.55, 0.05)
_FINE = np.arange(-0.05, 0.055, 0.01)
_VOCABULARY = 2**18
"""More tokens than any model has."""
_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class _Tops:
    """The recorded logprob of some tokens, and what the model says at temperature 1."""

    recorded: _Floats
    """`[N]`"""
    model: _Floats
    """`[N]`"""
    top: _Floats
    """`[N, K]` the likeliest tokens' logprobs, -inf where there are fewer."""


class Temperature:
    """Looks for the temperature of recorded logprobs, in the first rollouts that disagree."""

    def __init__(self, provider: TokenProvider, tolerance: float) -> None:
        self.provider = provider
        self.tolerance = tolerance
        self._asked = 0

    async def explained(self, scored: Sequence[tuple[Part, Logprobs]], found: Sequence[Compared]) -> str:
        """The temperature in words, if proved; else ""."""
        if self._asked >= _ROLLOUTS or not found:
            return ""
        one = max(found, key=lambda compared: len(compared.at))
        part = next(part for part, _ in scored if (part.where, part.turn) == (one.where, one.turn))
        self._asked += 1
        said = await self._tops(part)
        tops = None if said is None else _tops_of(said, part, one)
        temperature = None if tops is None else fitted(tops.recorded, tops.model, tops.top, self.tolerance)
        return (
            "" if temperature is None else f"the recorded logprobs are those at temperature {decimal(temperature)}"
        )

    async def _tops(self, part: Part) -> ScoredTokens | None:
        want = part.want
        for top in _TOPS:
            try:
                return await self.provider.score(want.ids.tolist(), start=want.start, top=top)
            except ProviderError:
                continue
        return None


def fitted(recorded: _Floats, model: _Floats, top: _Floats, tolerance: float) -> float | None:
    """The temperature at which the model gives the recorded values within the tolerance; None if none is proved.

    The mass outside the likeliest tokens bounds the normalization from both sides: a temperature counts only if
    these bounds are within the tolerance and temperature 1 does not fit.
    """
    if len(recorded) < FEWEST or not is_above(np.abs(model - recorded), tolerance):
        return None
    coarse = min(_COARSE.tolist(), key=lambda t: _error(recorded, model, top, t)[0])
    best = min((coarse + _FINE).tolist(), key=lambda t: _error(recorded, model, top, t)[0])
    error, width = _error(recorded, model, top, best)
    return round(best, 2) if error <= tolerance and width <= tolerance else None


def _error(recorded: _Floats, model: _Floats, top: _Floats, temperature: float) -> tuple[float, float]:
    """The mean |difference| from the middle of the possible values at a temperature, and the mean width of their
    range.
    """
    power = 1 / temperature
    rest = np.clip(1 - np.exp(top).sum(axis=1), 0, 1)
    inside = np.exp(top * power).sum(axis=1)
    if power >= 1:
        least, most = (
            np.zeros_like(rest),
            rest * np.exp(top.min(axis=1, initial=0, where=np.isfinite(top))) ** (power - 1),
        )
    else:
        least, most = rest**power, rest**power * _VOCABULARY ** (1 - power)
    low, high = model * power - np.log(inside + most), model * power - np.log(inside + least)
    return float(np.abs(recorded - (low + high) / 2).mean()), float((high - low).mean())


def _tops_of(said: ScoredTokens, part: Part, one: Compared) -> _Tops | None:
    """The compared tokens with their alternatives; None where the provider gave none."""
    if not said.top_logprobs:
        return None
    width = max(len(each) for each in said.top_logprobs)
    if not width:
        return None
    at = one.at[~one.drifted] + part.offset - said.start
    top = np.full((len(at), width), -np.inf)
    for row, place in enumerate(at.tolist()):
        values = [value for _, value in said.top_logprobs[place]]
        top[row, : len(values)] = values
    return _Tops(one.recorded[~one.drifted], one.model[~one.drifted], top)
