"""Whether two engines agree: their logprobs of the same ids, compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from tito_audit.provider import GenerationResult, ScoredTokens, TopLogprobs
from tito_audit.rescore.model import Sums

Scored: TypeAlias = GenerationResult | ScoredTokens

FLOAT32 = 1e-3
"""The tolerance for a token between two engines in float32. vLLM 0.32 and transformers 5.19 on one CPU, with the
weights of SmolLM2-135M-Instruct, differ by 0.0000065 on average and by at most 0.000058 over 3,153 tokens.
"""
BFLOAT16 = 0.5
"""The tolerance between bfloat16 and float32: they differ by 0.038 on average, at most 0.33 over 1,576 tokens."""
THRESHOLDS = (0.001, 0.01, 0.1, 1.0)
"""`LogprobComparison.above` counts the differences above each of these."""
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
    """The id that side a picked."""
    b: int
    a_is_likely_in_b: bool
    """Whether a's pick is among the likeliest tokens that side b returned there."""
    b_is_likely_in_a: bool


@dataclass(frozen=True, slots=True)
class LogprobComparison:
    """How two columns of logprobs of the same tokens agree; differences are b minus a."""

    close: bool
    """All tokens are within the tolerance, and where outputs diverge, each pick is likely on the other side."""
    tokens: int
    """How many tokens both sides scored after the same ids."""
    outside: int
    """How many of them are outside the tolerance."""
    mean: float
    """The mean of the absolute differences."""
    largest: float
    k1: float
    """Schulman's estimates of the divergence of a, which sampled, from b (joschu.net/blog/kl-approx.html)."""
    k3: float
    above: tuple[tuple[float, float], ...]
    """Each of `THRESHOLDS`, with the share of tokens that differ by more."""
    worst: tuple[TokenGap, ...]
    """The tokens that differ most, up to five, the worst first."""
    first_difference: FirstDifference | None = None
    """Where the outputs diverge; None if they do not."""

    def __str__(self) -> str:
        lines = [
            f"{self.tokens} tokens, {self.outside} outside the tolerance: mean |difference| {self.mean:.3g}, "
            f"largest {self.largest:.3g}, k1 {self.k1:.3g}, k3 {self.k3:.3g}"
        ]
        lines += [f"  token {gap.position} (id {gap.token_id}): {gap.a:.6g} and {gap.b:.6g}" for gap in self.worst]
        split = self.first_difference
        if split is not None:
            picks = "both picks are likely on the other side"
            if not (split.a_is_likely_in_b and split.b_is_likely_in_a):
                picks = f"id {split.b if split.a_is_likely_in_b else split.a} is not likely on the other side"
            lines.append(f"  the outputs diverge at token {split.position} (ids {split.a} and {split.b}): {picks}")
        return "\n".join(lines)


def check_logprobs_close(a: Scored, b: Scored, *, atol: float = FLOAT32, rtol: float = 0.0) -> LogprobComparison:
    """Compare two providers' logprobs of the same ids, token by token: |a - b| <= atol + rtol * |b|.

    Each side may be an answer, whose ids are the prompt and what was sampled, or scores. Two answers to one prompt
    may diverge if both have `top_logprobs`; they are compared up to there, as in vLLM's own tests. The default
    `atol` suits two engines in float32; pass `BFLOAT16` if one is in bfloat16.

    ValueError, with the first place, if the ids differ, or if no token has logprobs on both sides.
    """
    ids, ids_b, first = _ids(a), _ids(b), max(_start(a), _start(b))
    split: FirstDifference | None = None
    if ids != ids_b:
        at = next((at for at, pair in enumerate(zip(ids, ids_b, strict=False)) if pair[0] != pair[1]), None)
        if at is None:
            raise ValueError(f"the ids are not the same: one side has {len(ids)} of them, the other {len(ids_b)}")
        place = f"position {at}: {ids[at]} and {ids_b[at]}"
        if not (isinstance(a, GenerationResult) and isinstance(b, GenerationResult)) or at < first:
            raise ValueError(f"the ids are not the same, from {place}")
        tops_a, tops_b = _top_at(a, at), _top_at(b, at)
        if tops_a is None or tops_b is None:
            raise ValueError(
                f"the outputs diverge at {place}; sample both with top_logprobs to see whether both picks are "
                "likely"
            )
        split = FirstDifference(at, ids[at], ids_b[at], ids[at] in dict(tops_b), ids_b[at] in dict(tops_a))
        ids = ids[:at]
    logprobs = (np.array(side.logprobs, np.float64)[first - _start(side) :] for side in (a, b))
    logprobs_a, logprobs_b = (side[: len(ids) - first] for side in logprobs)
    if not len(logprobs_a) and split is None:
        raise ValueError(f"no token has logprobs on both sides: they begin at {_start(a)} and {_start(b)}")
    sizes = np.abs(logprobs_b - logprobs_a)
    outside = int((~(sizes <= atol + rtol * np.abs(logprobs_b))).sum())
    agreed = Sums.of(logprobs_b - logprobs_a).agreement()
    worst = [int(at) for at in np.argsort(-sizes, kind="stable")[:_WORST] if sizes[at] > 0]
    likely = split is None or (split.a_is_likely_in_b and split.b_is_likely_in_a)
    return LogprobComparison(
        close=not outside and likely,
        tokens=len(sizes),
        outside=outside,
        mean=agreed.size if agreed else 0.0,
        largest=agreed.largest if agreed else 0.0,
        k1=agreed.k1 if agreed else 0.0,
        k3=agreed.k3 if agreed else 0.0,
        above=tuple((edge, float((sizes > edge).mean()) if len(sizes) else 0.0) for edge in THRESHOLDS),
        worst=tuple(
            TokenGap(first + at, ids[first + at], float(logprobs_a[at]), float(logprobs_b[at])) for at in worst
        ),
        first_difference=split,
    )


def _ids(side: Scored) -> tuple[int, ...]:
    return side.ids if isinstance(side, ScoredTokens) else (*side.input_ids, *side.output_ids)


def _start(side: Scored) -> int:
    return side.start if isinstance(side, ScoredTokens) else len(side.input_ids)


def _top_at(side: Scored, position: int) -> TopLogprobs | None:
    """The likeliest tokens at a position; None if they were not requested."""
    return None if side.top_logprobs is None else side.top_logprobs[position - _start(side)]
