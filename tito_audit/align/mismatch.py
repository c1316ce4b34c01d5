"""Why the logprobs of a sampler and of a trainer differ for the same tokens, from the two columns alone.

Differences are judged as differences of logits, `log p - log(1 - p)`: rounding and other kernels move these as
much for certain tokens as for rare ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tito_audit.record.arrays import Ids, Logprobs, Mask
from tito_audit.record.mismatch import EDGES, CauseShare, Interval, MismatchCause, RowMismatch, WorstToken

_CAUSES = tuple(MismatchCause)
_CODE = {cause: code for code, cause in enumerate(_CAUSES)}
_MIN_TOKENS = 16
"""A cause of a whole column needs at least this many tokens."""
_SURE, _NEARLY_CERTAIN, _UNLIKELY = math.log(0.99), math.log(0.995), math.log(0.01)


@dataclass(frozen=True, slots=True)
class LogprobColumns:
    """Two columns of one rollout, `[N]` each: the tokens in the loss that have both logprobs."""

    ids: Ids
    at: Ids
    """The positions of the tokens in their completion or row."""
    turns: Ids
    """The call of each token; -1 for a row."""
    sampler: Logprobs
    trainer: Logprobs
    drifted: Mask
    """True where the token is not the one that was sampled."""
    version: Logprobs | None = None
    """The version of the weights that sampled each token; NaN where unknown."""
    rerouted: Mask | None = None
    """Tokens for which the two sides used other experts; None if the log does not have the experts of both."""
    set_sizes: Logprobs | None = None
    """How many tokens top-p, top-k and min-p left to choose from; NaN where unknown."""
    top_sizes: tuple[int, ...] = ()
    """The same for some tokens, by their top-k logprobs."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Temperature, top-p, top-k and min-p as the log names them."""


BFLOAT16 = 0.075
"""The largest median |difference of logits| of two engines with the same weights in bfloat16.

Measured on SmolLM2-135M: vLLM's server against transformers on one CPU, both in float32, has a median of 9e-6 (99
% of 3,153 tokens below 5e-5); bfloat16 against float32 one of 0.047 (99 % of 4,336 below 0.25, none above 0.44).
Two sides in bfloat16 have up to the square root of 2 times that.
"""
_TAIL = 10.0
"""Arithmetic alone makes a token differ by at most this many medians; measured: 9."""
_MIN_TAIL = 1e-3
_CLEAR_GAP = 0.06
"""A gap between logprobs of nearly certain tokens that bfloat16 does not blur."""
_BAND, _MOST_IN_BAND, _FEWEST_IN_BAND = (5.0, 12.0), 0.0125, 4
"""Differences of this many medians are rare where arithmetic makes them (measured: 0.7 % of the tokens), as in a
normal distribution. A few optimizer steps leave 4 % there."""
_MIN_FILLS = 4
_FILL_BELOW = -5.0
_CERTAIN = -1.0
_NEAR_ONE = -1e-5
"""Logprobs closer to zero have too few digits for a logit."""
_CONFIDENT = (1.0, 10.0)
"""Logits of the tokens from which a temperature is read."""
_MEDIAN_ENTROPY = 2.2
"""The median Renyi entropy of the alternatives of such a token at a temperature near 1, in nats."""
_ENTROPY_RANGE = (0.4, 1.6)
"""Factors for the ends of the interval: other models have other entropies."""
_MIN_CORRELATION, _MAX_SPREAD = 0.75, 0.95
"""How closely a temperature's changes follow the logits (measured: 0.81 or more; those of older weights: up to
0.86), and how far apart four fifths of the likely tokens are, in medians (0.77 or less in nine of ten rows; with
older weights, 0.87 or more)."""
_MOST_ENTROPY = 12.0
"""The entropy of any vocabulary."""
_MIN_LOG_MASS = math.log(0.05)
"""Sampling that keeps less than 5 % of the probability is not believed."""
_CONTEXT_TOKENS = 64
"""How many tokens after drift the changed context shows in."""


def active_limits(sampling: Mapping[str, float]) -> list[str]:
    """Which of `top_p`, `top_k` and `min_p` leave tokens out."""
    effective = {"top_p": sampling.get("top_p", 1.0) < 1, "top_k": sampling.get("top_k", 0.0) > 0}
    effective["min_p"] = sampling.get("min_p", 0.0) > 0
    return [name for name, limits in effective.items() if limits]


def explain_mismatch(
    columns: LogprobColumns, sampler: str, trainer: str, *, shifted: bool = False, near: bool = False
) -> RowMismatch:
    """Assign each token one cause, and sum up the causes; `sampler` and `trainer` name the columns.

    `shifted`: the trainer's values are those of other tokens. `near`: tokens without a cause count as numerics.
    """
    differences = columns.trainer - columns.sampler
    sizes = np.abs(differences)
    logits = _logit(columns.trainer) - _logit(columns.sampler)
    causes = np.full(len(sizes), _CODE[MismatchCause.NUMERICS], np.int8)
    details: dict[str, object] = {}
    if shifted or is_copied(columns.sampler, columns.trainer):
        causes[:] = _CODE[MismatchCause.SHIFTED if shifted else MismatchCause.COPIED]
    else:
        core = ~_logged_causes(columns, sizes, logits, causes)
        details = _fit_causes(columns, core, differences, logits, causes)
        if near:
            causes[causes == _CODE[MismatchCause.UNKNOWN]] = _CODE[MismatchCause.NUMERICS]
    shares, worst = [], []
    for code in np.unique(causes).tolist():
        tokens = np.flatnonzero(causes == code)
        shares.append((_CAUSES[code].value, _share(tokens, sizes)))
        k = int(tokens[sizes[tokens].argmax()])
        turn, at = int(columns.turns[k]), int(columns.at[k])
        values = int(columns.ids[k]), float(columns.sampler[k]), float(columns.trainer[k])
        worst.append(WorstToken(_CAUSES[code].value, None if turn < 0 else turn, at, *values))

    def unproven(where: Mask) -> tuple[CauseShare, CauseShare]:
        numerics, unknown = (
            _share(np.flatnonzero(where & (causes == _CODE[cause])), sizes)
            for cause in (MismatchCause.NUMERICS, MismatchCause.UNKNOWN)
        )
        return numerics, unknown

    versions = []
    if columns.version is not None:
        for number in np.unique(columns.version[np.isfinite(columns.version)]).tolist():
            versions.append((int(number), *unproven(columns.version == number)))
    confident = (columns.sampler > _SURE) & (columns.trainer < _UNLIKELY)
    bins = np.bincount(np.searchsorted(EDGES, np.abs(logits)), minlength=len(EDGES) + 1)
    return RowMismatch(
        sampler,
        trainer,
        len(sizes),
        tuple(sorted(shares, key=lambda pair: (-pair[1].size, pair[0]))),
        int(confident.sum()),
        tuple(bins.tolist()),
        versions=tuple(versions),
        rerouted=None if columns.rerouted is None else unproven(columns.rerouted),
        worst=tuple(worst),
        points=sample_points(columns.sampler, columns.trainer, causes == _CODE[MismatchCause.NUMERICS]),
        **details,  # type: ignore[arg-type]
    )


def _logit(logprobs: Logprobs) -> Logprobs:
    near = np.minimum(logprobs, _NEAR_ONE)
    return np.asarray(near - np.log(-np.expm1(near)))


def is_copied(sampler: Logprobs, trainer: Logprobs) -> bool:
    """Whether all values are equal to the bit, and neither rounding nor certainty explains that."""
    if not np.array_equal(sampler, trainer):
        return False
    values = sampler[sampler < -1e-3]
    # Columns rounded to four digits or fewer may be equal by chance.
    steps = values / 1e-4
    return len(np.unique(values)) >= _MIN_TOKENS and bool((np.abs(steps - np.rint(steps)) > 1e-3).mean() > 0.5)


def _logged_causes(columns: LogprobColumns, sizes: Logprobs, logits: Logprobs, causes: NDArray[np.int8]) -> Mask:
    """Write to `causes` what the log itself shows: placeholders, drift, other experts. Returns those tokens."""
    far = sizes > 1.0
    placeholder = far & (columns.trainer == 0) & (columns.sampler <= _CERTAIN)
    if far.sum() >= _MIN_FILLS:
        # A fill, or the logarithm of a probability that was clamped: one value at most of the far tokens.
        values, times = np.unique(columns.trainer[far], return_counts=True)
        fill, often = values[times.argmax()], times.max()
        if often >= _MIN_FILLS and 2 * often >= far.sum() and fill < _FILL_BELOW:
            placeholder |= far & (columns.trainer == fill)
    median = np.median(np.abs(logits)) if len(logits) else 0.0
    beyond = np.abs(logits) > max(_TAIL * min(median, BFLOAT16), _MIN_TAIL)
    causes[placeholder] = _CODE[MismatchCause.PLACEHOLDER]
    drift = columns.drifted & ~placeholder
    if drift.any():
        last = np.maximum.accumulate(np.where(drift, columns.at, -_CONTEXT_TOKENS - 1))
        drift |= beyond & (columns.at - last <= _CONTEXT_TOKENS) & (columns.at >= last) & ~placeholder
        causes[drift] = _CODE[MismatchCause.DRIFT]
    own = placeholder | drift
    if columns.rerouted is not None:
        rerouted, others = sizes[columns.rerouted & ~own], sizes[~columns.rerouted & ~own]
        if min(len(rerouted), len(others)) >= 4:
            low = rerouted.mean() - 2 * rerouted.std(ddof=1) / math.sqrt(len(rerouted))
            if low > others.mean() <= rerouted.mean() / 2:
                causes[columns.rerouted & ~own] = _CODE[MismatchCause.ROUTING]
                own |= columns.rerouted
    return np.asarray(own)


def _fit_causes(
    columns: LogprobColumns, core: Mask, differences: Logprobs, logits: Logprobs, causes: NDArray[np.int8]
) -> dict[str, object]:
    """Write to `causes` what explains the `core` tokens; returns the estimates, as fields of `RowMismatch`."""
    inside = np.flatnonzero(core)
    sizes = np.abs(logits[inside])
    median = float(np.median(sizes)) if len(sizes) else 0.0
    if len(inside) >= _MIN_TOKENS:
        sampler, trainer = columns.sampler[inside], columns.trainer[inside]
        set_sizes = None if columns.set_sizes is None else columns.set_sizes[inside]
        truncation = _fit_truncation(sampler, trainer, set_sizes, columns.top_sizes)
        if truncation is not None:
            mass, kind, within = truncation
            causes[inside] = np.where(within, _CODE[MismatchCause.TRUNCATED], _CODE[MismatchCause.UNKNOWN])
            return {"mass": mass, "truncation": kind}
        fitted = _fit_temperature(sampler, trainer)
        if fitted is not None:
            interval, fits = fitted
            causes[inside] = np.where(fits, _CODE[MismatchCause.TEMPERATURE], _CODE[MismatchCause.UNKNOWN])
            return {"temperature": interval}
        stated = _stated_temperature(sampler, trainer, columns.sampling)
        if stated is not None:
            causes[inside] = _CODE[stated]
            return {}
    beyond = sizes > max(_TAIL * median, _MIN_TAIL)
    if median > _MIN_TAIL and len(inside):
        in_band = (sizes > _BAND[0] * median) & (sizes < _BAND[1] * median)
        mean = float(np.abs(differences[inside[~beyond]]).mean())
        if median > BFLOAT16 or mean > 0.06 or in_band.sum() >= _FEWEST_IN_BAND + _MOST_IN_BAND * len(inside):
            beyond = np.ones(len(inside), np.bool_)
    causes[inside[beyond]] = _CODE[MismatchCause.UNKNOWN]
    if columns.version is not None:
        # Stale: what grows with the distance from the newest version.
        sizes = np.abs(differences)
        versions = columns.version[inside]
        newest = versions == np.nanmax(versions, initial=-math.inf)
        older = inside[versions < versions.max(initial=-math.inf, where=newest)]
        newest = inside[newest]
        if _share(older, sizes).is_staler(_share(newest, sizes)):
            causes[older] = _CODE[MismatchCause.STALE]
    return {}


def _has_lost_mass(differences: Logprobs) -> bool:
    """Whether the sampler left out tokens that the trainer finds possible.

    The mean of exp(trainer - sampler) over sampled tokens is the probability mass kept: 1 for a full distribution.
    """
    ratios = np.exp(np.minimum(differences, 50.0))
    return bool(ratios.mean() + 4 * ratios.std(ddof=1) / math.sqrt(len(ratios)) < 1)


def _fit_truncation(
    sampler: Logprobs, trainer: Logprobs, set_sizes: Logprobs | None, top_sizes: tuple[int, ...]
) -> tuple[Interval | None, str, Mask] | None:
    """The mass kept, by what, and which tokens it fits; None where the columns do not look truncated.

    Renormalised logprobs are higher than the trainer's at every token, by the logarithm of the mass kept.
    """
    differences = trainer - sampler
    if not _has_lost_mass(differences):
        return None
    above, below = differences > 0, differences < 0
    higher, lower = float(differences[above].sum()), float(-differences[below].sum())
    noises = np.abs(_logit(trainer) - _logit(sampler))[above]
    noise, most = np.quantile(noises, (0.5, 0.95)).tolist() if len(noises) else (0.0, 0.0)
    strictly = higher <= 0.002 * lower
    if not strictly and not (higher <= 0.15 * lower and noise <= 0.07 and most <= 0.25):
        return None
    slack = max(_TAIL * noise, _MIN_TAIL)
    if set_sizes is None or np.isnan(set_sizes).any():
        alone = (sampler == 0) & (differences < -_MIN_TAIL)
        sizes = np.array(top_sizes)
    else:
        # Only tokens that the sampler chose from others may have a logprob below zero.
        alone, strictly, sizes = (set_sizes == 1) & (sampler > -slack), True, set_sizes
    mass, kind, least = None, "", _MIN_LOG_MASS
    others = trainer[~alone & (sampler < 0)]
    if strictly and alone.sum() >= 3 and len(others):
        # A token is the only one of top-p where it has that probability by itself: a sharp threshold.
        last, first = float(others.max()), float(trainer[alone].min())
        if last <= first + slack and float(np.quantile(differences, 0.01)) >= last - slack:
            low, high = sorted((last, first))
            mass, kind, least = Interval(math.exp((low + high) / 2), math.exp(low), math.exp(high)), "top-p", low
        elif last - first > _CLEAR_GAP:
            kind = "min-p"
    else:
        equal = len(sizes) >= _MIN_TOKENS and (np.diff(np.quantile(sizes, (0.05, 0.95))) == 0).all()
        if equal or (strictly and not alone.any() and (others > _NEARLY_CERTAIN).sum() >= 3):
            kind = "top-k"
    fits = (differences <= slack) & (differences >= least - slack)
    return mass, kind, fits


def _stated_temperature(
    sampler: Logprobs, trainer: Logprobs, sampling: Mapping[str, float]
) -> MismatchCause | None:
    """The cause, if the temperature that the log names is missing from the trainer's logprobs.

    The columns alone do not prove it: truncation hides a temperature, and a high one leaves few likely tokens. But
    they must not contradict it.
    """
    degrees = sampling.get("temperature", 1.0)
    if degrees <= 0 or degrees == 1 or len(sampler) < _MIN_TOKENS:
        return None
    if active_limits(sampling):
        # At least the trainer's divided by a temperature below 1; above 1, less the entropy of a vocabulary.
        slack = BFLOAT16 + max(0.0, 1 - 1 / degrees) * _MOST_ENTROPY
        fits = (sampler >= trainer / degrees - slack).mean() >= 0.98 and _has_lost_mass(trainer - sampler)
        return MismatchCause.TEMPERED if fits else None
    base, change, slope = _logit(trainer), _logit(sampler) - _logit(trainer), 1 / degrees - 1
    needed, slack = change / slope - base, 1.0 + BFLOAT16 / abs(slope)
    fits = ((needed >= -slack) & (needed <= _MOST_ENTROPY + slack)).mean() >= 0.95
    # Other weights move tokens at random; a temperature, the further the likelier they are.
    follows = np.std(change) > 0 and np.corrcoef(base, change)[0, 1] * np.sign(slope) >= 0.5
    return MismatchCause.TEMPERATURE if fits and follows else None


def _fit_temperature(sampler: Logprobs, trainer: Logprobs) -> tuple[Interval, Mask] | None:
    """The temperature that turns the trainer's logits into the sampler's, and which tokens it fits; None if it
    does not explain the columns.

    With b = 1 / T, a token's logit changes by (b - 1) (logit + R), where R >= 0 is the Renyi entropy of order b of
    its alternatives. The columns do not show R, but for likely tokens it is small beside the logit, and the
    changes of nine in ten have one sign.
    """
    base, change = _logit(trainer), _logit(sampler) - _logit(trainer)
    likely = (base >= _CONFIDENT[0]) & (base <= _CONFIDENT[1]) & (sampler < _NEAR_ONE)
    # Tokens that were the only ones to choose from: truncated too, and the two do not come apart.
    alone = (sampler == 0) & (trainer < -_MIN_TAIL)
    if likely.sum() < 8 or alone.sum() >= 3:
        return None
    base_L, change_L = base[likely], change[likely]
    slopes = change_L / (base_L + _MEDIAN_ENTROPY)
    least, low, middle, high, most = np.quantile(slopes, (0.1, 0.25, 0.5, 0.75, 0.9)).tolist()
    if max((high - low) / 0.6, (most - least) / _MAX_SPREAD) > abs(middle) or abs(middle) < 0.02 or middle <= -0.9:
        return None
    rest = _MEDIAN_ENTROPY * (1 + middle) ** -0.75
    best, *ends = (float(np.median(change_L / (base_L + rest * part))) for part in (1.0, *_ENTROPY_RANGE))
    error = 1.6 * (high - low) / math.sqrt(len(base_L))
    lowest, highest = min(ends) - error, max(ends) + error
    # What R would have to be at each token: below 0, or above the entropy of any vocabulary, it is another cause.
    needed = change / best - base
    # Training sharpens a policy, which is like a lower temperature in the mean, but not token by token.
    readable = sampler < _NEAR_ONE
    (spread, common), (_, moved) = np.cov(base[readable], change[readable])
    follows = common * np.sign(best) >= _MIN_CORRELATION * math.sqrt(spread * moved)
    below = -0.25 - BFLOAT16 / abs(best)
    slack = (3 * abs(highest - lowest) * np.abs(base) + BFLOAT16) / abs(best) + 1.0
    fits = (needed >= -slack) & (needed <= _MOST_ENTROPY + slack)
    fits |= (sampler >= _NEAR_ONE) & (trainer >= math.log(0.9))
    if fits.mean() < 0.9 or not follows or np.quantile(needed[readable], 0.05) < below:
        return None
    return Interval(1 / (1 + best), 1 / (1 + highest), 1 / max(1 + lowest, 0.05)), fits


def sample_points(sampler: Logprobs, trainer: Logprobs, numerics: Mask) -> tuple[tuple[float, float, bool], ...]:
    """Up to 24 tokens at equal distances, for a plot: (trainer, sampler - trainer, whether it is numerics)."""
    at = np.unique(np.linspace(0, len(sampler) - 1, 24).astype(np.intp))
    values = trainer[at].round(3), (sampler - trainer)[at].round(3), numerics[at]
    return tuple(zip(*(column.tolist() for column in values), strict=True))


def _share(tokens: NDArray[np.intp], sizes: Logprobs) -> CauseShare:
    return CauseShare(len(tokens), float(sizes[tokens].sum()))
