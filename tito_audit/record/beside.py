"""What stands beside the tokens of a row or a call and has to fit them: experts, kept sets, advantages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """The experts that an engine chose for each token that it was fed."""

    name: str
    experts: NDArray[np.integer[Any]]
    """`[rows, layers, k]`; `[rows, layers * k]` or flat if the log does not say more."""
    start: int = 0
    """How many tokens come before that of the first row."""
    count: int | None = None
    """How many experts a layer has, if the log says."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptSets:
    """The tokens that top-p or top-k sampling left to choose from, at each sampled token."""

    name: str
    ids: NDArray[np.integer[Any]]
    """`[N]` the ids of all sets."""
    offsets: NDArray[np.integer[Any]]
    """`[sets + 1]` set i is `ids[offsets[i]:offsets[i + 1]]`; an empty set says nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Unfit:
    """A value that contradicts itself, or whose form is not known."""

    name: str
    because: str
    experts: bool
    """False: it holds kept sets."""
    wrong: bool
    """False: it may be right in a form that is not known."""


@dataclass(frozen=True, slots=True, eq=False)
class BesideTokens:
    """What stands beside tokens; the values were not compared with them."""

    routing: tuple[Routing, ...] = ()
    sets: tuple[KeptSets, ...] = ()
    unfit: tuple[Unfit, ...] = ()
    """Experts and kept sets that could not be read."""
    credit: Mapping[str, Any] = field(default_factory=dict)
    """Advantages, rewards and the length of the response, as logged."""


NOTHING_BESIDE = BesideTokens()
