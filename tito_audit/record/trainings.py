"""Trainings: which tokens of a rollout are trained after which context, in 20 bytes per trained span."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Spans: TypeAlias = NDArray[np.void]

ONCE = "once"
"""The repair of repeated training; it runs only when named."""
SPAN = np.dtype([("hash", "<u8"), ("end", "<u4"), ("tokens", "<u4"), ("logprob", "<f4")])
"""A trained span: the hash of all ids up to its end, its end, its number of trained tokens, and the sum of their
logprobs (NaN: unknown). A span of 0 tokens marks where another row may have one: the token after each span, and
the end of a sequence that trains nothing there."""
SEQUENCE = np.dtype([("spans", "<u4"), ("turn", "<i4"), ("id", "<u8")])
"""A sequence that a trainer may read: its number of spans, its call (-1: the training row), and the hash of the
server's id of the answer (0: none)."""


@dataclass(frozen=True, slots=True)
class Trainings:
    """What one rollout trains: its sequences, and their spans one sequence after the other."""

    sequences: bytes
    """SEQUENCE records."""
    spans: bytes
    """SPAN records."""
    calls_at: tuple[tuple[str, int], ...] = ()
    """(file, row) of each call, if single-call rows were joined into the rollout."""


@dataclass(frozen=True, slots=True)
class TrainedAgain:
    """Tokens of one sequence that a run trains more than once, or never."""

    turn: int | None
    """The call whose completion `runs` indexes; None: the training row."""
    runs: tuple[tuple[int, int], ...]
    """Token ranges `[start, end)`, in order."""
    cause: str
    message: str
    trained: bool = True
    """False for sampled tokens that no row trains."""
