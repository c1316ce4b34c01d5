"""ModelScores: a model's logprobs of one rollout's sampled tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tito_audit.record.arrays import Logprobs, Mask

RECORDED = "recorded_logprobs"
"""The column that keeps recorded logprobs once a model's replace them."""


@dataclass(frozen=True, slots=True)
class ModelScores:
    """The logprobs of a model, each token given all tokens before it."""

    source: str
    """Model, weights, provider and date, as a clause for notes."""
    calls: Mapping[int, Logprobs] = field(default_factory=dict)
    """By call, `[C]`; NaN where the model gives none."""
    row: Logprobs | None = None
    """`[T]` of the training row, NaN outside the loss; None if it was not scored."""
    recorded: Mapping[int | None, Mask] = field(default_factory=dict)
    """By call (None: the training row), True where the log has a logprob, not a gap or a placeholder."""
    replaces: bool = False
    """Whether they also replace recorded logprobs."""
    adds: bool = True
    """Whether a column may be added if the log has none; tables have fixed columns."""
