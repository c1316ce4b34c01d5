"""Arrays that engines and trainers log next to token ids: routed experts, kept token sets, advantages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """The MoE experts that an engine chose for each token it was fed (router replay)."""

    name: str
    experts: NDArray[np.integer[Any]]
    """`[rows, layers, k]`; `[rows, layers * k]` or flat if the log does not state its shape."""
    start: int = 0
    """The token that the first row belongs to."""
    count: int | None = None
    """Experts per layer; None if the log does not say."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptSets:
    """The candidates that top-p or top-k sampling kept at each sampled token."""

    name: str
    ids: NDArray[np.integer[Any]]
    """`[N]` the ids of all sets."""
    offsets: NDArray[np.integer[Any]]
    """`[sets + 1]` set i is `ids[offsets[i]:offsets[i + 1]]`; empty: not recorded."""


@dataclass(frozen=True, slots=True, eq=False)
class UnreadableExtra:
    """Routing or kept sets that could not be read."""

    name: str
    because: str
    is_routing: bool
    """Whether it holds routing; if not, kept sets."""
    contradicts_itself: bool
    """False: its form is unknown, so it may well be right."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenExtras:
    """The extras of a turn or a training row, as read: rules compare them with the tokens."""

    routing: tuple[Routing, ...] = ()
    kept_sets: tuple[KeptSets, ...] = ()
    unreadable: tuple[UnreadableExtra, ...] = ()
    credit: Mapping[str, Any] = field(default_factory=dict)
    """Advantages, rewards and response length, as logged."""


NO_EXTRAS = TokenExtras()
