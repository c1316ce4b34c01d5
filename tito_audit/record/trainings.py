"""Trainings: which tokens of a rollout are trained, in which context, as a few numbers per trained span."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Spans: TypeAlias = NDArray[np.void]

ONCE = "once"
"""The name of the repair of repeated training, which runs only when named."""
SPAN = np.dtype([("hash", "<u8"), ("end", "<u4"), ("tokens", "<u4"), ("logprob", "<f4")])
"""A trained span: the hash of all ids up to its end, where it ends, how many tokens it trains, and the sum of
their logprobs (NaN: unknown). A span without tokens marks a place where another row may have a span: the token
after each span, and the end of a sequence that trains nothing there."""
SEQUENCE = np.dtype([("spans", "<u4"), ("turn", "<i4"), ("id", "<u8")])
"""Ids that a trainer may read, with this many spans: `turn` -1 is the training row, else the call; `id` is the
hash of the server's id of the answer, 0 where the log has none."""


@dataclass(frozen=True, slots=True)
class Trainings:
    """What one rollout trains: records of its sequences and, one after another, of their spans."""

    sequences: bytes
    """SEQUENCE records."""
    spans: bytes
    """SPAN records."""
    calls_at: tuple[tuple[str, int], ...] = ()
    """The file and row of each call, if single-call rows were joined into the rollout."""


@dataclass(frozen=True, slots=True)
class TrainedAgain:
    """Tokens of one sequence that the logs of a run train more than once, or never."""

    turn: int | None
    """The call whose completion the runs index; None: the training row."""
    runs: tuple[tuple[int, int], ...]
    """Half-open ranges of tokens, in order."""
    cause: str
    message: str
    trained: bool = True
    """False for sampled tokens that no row trains."""
