"""What a call shows about itself, and what was found about all calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tito_audit.record.arrays import Ids
from tito_audit.record.message import Message


@dataclass(frozen=True, slots=True)
class CallTraits:
    """One call, as its row has it; an index keeps only hashes of it."""

    context: int
    """Calls with different numbers (another format, model or tools) never share a conversation; unsigned, 64
    bits."""
    prompt: Ids | None
    """`[P]`"""
    completion: Ids | None
    """`[C]`"""
    ended: bool
    """Whether the model ended its turn itself, which makes the last completion id an end token."""
    request: Sequence[Message] | None
    """The messages it was sent; None where they are not recorded."""
    answer: Message | None
    prompt_text: str | None = None
    completion_text: str | None = None
    key: bytes | None = None
    """The stated key of its conversation; None where the log has none."""


Reread: TypeAlias = Callable[[Sequence[int]], Iterator[tuple[int, CallTraits]]]
"""The calls with these numbers (ascending), read again, each with its number."""
Decode: TypeAlias = Callable[[Ids], bytes]


class JoinedBy(IntEnum):
    """What joined a call to its conversation."""

    NOTHING = 0  # it is alone, or its conversation starts with it
    KEY = 1  # nothing else was found or, where keys are believed, looked for
    IDS = 2
    MESSAGES = 3
    TEXT = 4


@dataclass(frozen=True, slots=True)
class Conversations:
    """Which calls belong together."""

    of: NDArray[np.int64]
    """`[N]` The number of the first call of each call's conversation; its own if it is alone."""
    by: NDArray[np.uint8]
    """`[N]` JoinedBy"""
    unsure: NDArray[np.int64]
    """Calls that could continue calls of several conversations, or whose predecessor could not be decided;
    ascending."""
    keys_believed: bool
    """Whether the stated keys were taken to name conversations."""
