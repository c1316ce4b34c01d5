"""STUB for development."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from tito_audit.record.arrays import Ids
from tito_audit.record.message import Message


class JoinedBy(IntEnum):
    NOTHING = 0
    KEY = 1
    IDS = 2
    MESSAGES = 3
    TEXT = 4


@dataclass(frozen=True, slots=True)
class CallTraits:
    context: int
    prompt: Ids | None
    completion: Ids | None
    ended: bool
    request: Sequence[Message] | None
    answer: Message | None
    prompt_text: str | None = None
    completion_text: str | None = None
    key: bytes | None = None


@dataclass
class Conversations:
    of: NDArray[np.int64]
    by: NDArray[np.uint8]
    unsure: NDArray[np.int64]
    keys_believed: bool


class HistoryIndex:
    def __init__(self) -> None:
        self.calls: list[CallTraits] = []

    def add(self, call: CallTraits) -> int:
        self.calls.append(call)
        return len(self.calls) - 1

    def settle(self, reread, decode) -> Conversations:
        n = len(self.calls)
        par = list(range(n))
        seen = {}
        for k, c in enumerate(self.calls):
            if c.prompt is not None and c.completion is not None:
                seen.setdefault((c.context, tuple(c.prompt.tolist() + c.completion.tolist())), k)
        by = np.zeros(n, np.uint8)

        def find(a):
            while par[a] != a:
                a = par[a]
            return a

        for k, c in enumerate(self.calls):
            if c.prompt is None:
                continue
            p = c.prompt.tolist()
            for m in range(len(p), 0, -1):
                a = seen.get((c.context, tuple(p[:m])))
                if a is not None and a != k:
                    x, y = sorted((find(a), find(k)))
                    par[y] = x
                    by[k] = 2
                    break
        of = np.array([find(k) for k in range(n)], np.int64)
        return Conversations(of, by, np.zeros(0, np.int64), False)
