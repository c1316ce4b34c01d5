"""Whether two engines agree: their logprobs of the same ids, compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from tito_audit.provider import GenerationResult, ScoredTokens, TopLogprobs
from tito_audit.rescore.model import Sums

Scored: TypeAlias = GenerationResult | ScoredTokens

FLOAT32 = 1e-3
"""How much two engines in float32 may differ at a token. vLLM 0.32 and transformers 5.19 on one CPU, both with the
weights of SmolLM2-135M-Instruct, differ by 0.0000065 on average and by up to 0.000058 in 3,153 tokens.
"""
BFLOAT16 = 0.5
"""The same for an engine in bfloat16 and one in float32: 0.038 on average, up to 0.33 in 1,576 tokens."""
THRESHOLDS = (0.001, 0.01, 0.1, 1.0)
"""Differences above these are counted."""
_WORST = 5


@dataclass(frozen=True, slots=True)
class TokenGap:
    """One token whose logprobs differ."""

    position: int
    """Its position in all ids, the prompt included."""
    token_id: int
    a: float
    b: float


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """Where two outputs of one prompt diverge. Even greedy ones may, if two tokens are almost equally likely."""

    position: int
    a: int
    """What side a picked."""
    b: int
    a_is_likely_in_b: bool
    """Whether a's pick is among the likeliest tokens that side b returned there."""
    b_is_likely_in_a: bool


@dataclass(frozen=True, slots=True)
class LogprobComparison:
    """How two columns of logprobs of the same tokens agree; a difference is b minus a."""

    close: bool
    """All tokens are within the tolerance, and where outputs diverge, each pick is likely on the other side."""
    tokens: int
    """Tokens that both sides scored after the same ids."""
    outside: int
    """Tokens that are not within the tolerance."""
    mean: float
    """The mean of the absolute differences."""
    largest: float
    k1: float
    """Schulman's estimates of the divergence of a, which sampled, from b (joschu.net/blog/kl-approx.html)."""
    k3: float
    above: tuple[tuple[float, float], ...]
    """For each of `THRESHOLDS`, the share of tokens that differ by more."""
    worst: tuple[TokenGap, ...]
    """Up to five tokens that differ, the worst first."""
    first_difference: FirstDifference | None = None
    """Where the outputs diverge; None if they are the same."""

    def __str__(self) -> str:
        lines = [
            f"{self.tokens} tokens, {self.outside} outside the tolerance: mean |difference| {self.mean:.3g}, "
            f"largest {self.largest:.3g}, k1 {self.k1:.3g}, k3 {self.k3:.3g}"
        ]
        lines += [f"  token {gap.position} (id {gap.token_id}): {gap.a:.6g} and {gap.b:.6g}" for gap in self.worst]
        part = self.first_difference
        if part is not None:
            likely = "both picks are likely on the other side"
            if not (part.a_is_likely_in_b and part.b_is_likely_in_a):
                likely = f"id {part.b if part.a_is_likely_in_b else part.a} is not likely on the other side"
            lines.append(f"  the outputs diverge at token {part.position} (ids {part.a} and {part.b}): {likely}")
        return "\n".join(lines)


def check_logprobs_close(a: Scored, b: Scored, *, atol: float = FLOAT32, rtol: float = 0.0) -> LogprobComparison:
    """Compare two providers' logprobs of the same ids, token by token: |a - b| <= atol + rtol * |b|.

    Answers and scores may be mixed: an answer's ids are its prompt and what was sampled. Two answers to one prompt
    may diverge if both have `top_logprobs`; they are compared up to there, as in vLLM's own tests. `atol` is by
    default what two engines in float32 need (`FLOAT32`); pass `BFLOAT16` for engines in bfloat16.

    ValueError, with the first place, if the ids are not the same, or if no token has logprobs on both sides.
    """
    first, ids, part = _shared(a, b)
    values = (np.array(side.logprobs, np.float64)[first - _start(side) :] for side in (a, b))
    ours, theirs = (side[: len(ids) - first] for side in values)
    if not len(ours) and part is None:
        raise ValueError(f"no token has logprobs on both sides: they begin at {_start(a)} and {_start(b)}")
    sizes = np.abs(theirs - ours)
    outside = int((~(sizes <= atol + rtol * np.abs(theirs))).sum())
    agreed = Sums.of(theirs - ours).agreement()
    differ_most = [int(at) for at in np.argsort(-sizes, kind="stable")[:_WORST] if sizes[at] > 0]
    likely = part is None or (part.a_is_likely_in_b and part.b_is_likely_in_a)
    return LogprobComparison(
        close=not outside and likely,
        tokens=len(ours),
        outside=outside,
        mean=agreed.size if agreed else 0.0,
        largest=agreed.largest if agreed else 0.0,
        k1=agreed.k1 if agreed else 0.0,
        k3=agreed.k3 if agreed else 0.0,
        above=tuple((edge, float((sizes > edge).mean()) if len(sizes) else 0.0) for edge in THRESHOLDS),
        worst=tuple(
            TokenGap(first + at, ids[first + at], float(ours[at]), float(theirs[at])) for at in differ_most
        ),
        first_difference=part,
    )


def _shared(a: Scored, b: Scored) -> tuple[int, tuple[int, ...], FirstDifference | None]:
    """The first position that both sides scored, the ids that they share, and where two outputs diverge."""
    ours, theirs = _ids(a), _ids(b)
    first = max(_start(a), _start(b))
    if ours == theirs:
        return first, ours, None
    at = next((at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        raise ValueError(f"the ids are not the same: one side has {len(ours)} of them, the other {len(theirs)}")
    place = f"position {at}: {ours[at]} and {theirs[at]}"
    if not (isinstance(a, GenerationResult) and isinstance(b, GenerationResult)) or at < first:
        raise ValueError(f"the ids are not the same, from {place}")
    tops = _top(a, at), _top(b, at)
    if tops[0] is None or tops[1] is None:
        raise ValueError(
            f"the outputs diverge at {place}; sample both with top_logprobs to see whether both picks are likely"
        )
    part = FirstDifference(at, ours[at], theirs[at], ours[at] in dict(tops[1]), theirs[at] in dict(tops[0]))
    return first, ours[:at], part


def _ids(side: Scored) -> tuple[int, ...]:
    return side.ids if isinstance(side, ScoredTokens) else (*side.input_ids, *side.output_ids)


def _start(side: Scored) -> int:
    return side.start if isinstance(side, ScoredTokens) else len(side.input_ids)


def _top(side: Scored, position: int) -> TopLogprobs | None:
    """The likeliest tokens at a position; None if not requested."""
    return None if side.top_logprobs is None else side.top_logprobs[position - _start(side)]
