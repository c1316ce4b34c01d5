"""The draft of a row, and the catalogue of faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from benchmarks.calls import calls_of, runs_of

__all__ = ["CATALOGUE", "ENDS", "Draft", "Fault", "Kit", "fault"]

ENDS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<eos>", "</s>")
"""Tokens that end turns in published templates."""
Array = Any


@dataclass(frozen=True, slots=True)
class Kit:
    """A tokenizer with what planting needs."""

    encode: Callable[[str], Any]
    vocabulary: Any
    bos: int | None
    template: Callable[[list[dict[str, Any]], bool], str]
    """A conversation as text, with the generation prompt or without."""

    def ids(self, text: str) -> list[int]:
        """The ids of a text."""
        return [int(one) for one in self.encode(text)]

    def bytes_of(self, ids: Sequence[int]) -> bytes:
        """The bytes that ids spell."""
        return b"".join(self.vocabulary.token_bytes(int(one)) for one in ids)

    def token(self, data: bytes) -> int | None:
        """The ordinary token with these bytes."""
        found = [one for one in self.vocabulary.ids_of_bytes(data) if one not in self.vocabulary.added_ids]
        return found[0] if found else None

    def plain(self, token: int) -> bool:
        """Whether a token is not an added one."""
        return token not in self.vocabulary.added_ids

    def strange(self) -> Sequence[int]:
        """Some tokens that encoding their own text never gives."""
        return _strange(self)

    def spelled(self, text: str) -> list[int]:
        """The text in single-byte tokens if there are any, never as a control token."""
        found = [self.token(bytes([byte])) for byte in text.encode()]
        return [one for one in found if one is not None]


@lru_cache(maxsize=1)
def _strange(kit: Kit) -> list[int]:
    found = []
    for token in np.random.default_rng(0).permutation(kit.vocabulary.size)[:20_000].tolist():
        text = kit.vocabulary.piece(token)
        if kit.plain(token) and "\ufffd" not in text and text.strip() and kit.ids(f" {text}")[1:] == kit.ids(text):
            found += [token] * (len(kit.ids(text)) == 2)
    return found


@dataclass(slots=True)
class Draft:
    """A row, correct until a fault is planted."""

    kit: Kit
    draw: np.random.Generator
    messages: list[dict[str, Any]]
    tools: list[Any] | None
    ids: Array
    mask: Array
    """The sampled tokens, until a fault changes them."""
    logprobs: Array
    heard: tuple[Any, Any] | None = None
    """Ids and mask as in later prompts; None: as sampled."""
    calls: list[dict[str, Any]] | None = None
    broken: bool = False
    """True: the row's messages are not JSON."""
    more: dict[str, Any] = field(default_factory=dict)
    """Columns that a trainer or a server adds, by name."""

    def copy(self) -> Draft:
        """A copy to change."""
        arrays = (array.copy() for array in (self.ids, self.mask, self.logprobs))
        return Draft(self.kit, self.draw, deepcopy(self.messages), self.tools, *arrays)

    def make_calls(self) -> None:
        """Make the calls of the conversation."""
        self.calls = calls_of(self.ids, self.mask, self.logprobs, *(self.heard or (self.ids, self.mask)))

    @property
    def end(self) -> int:
        """The token that ends an answer."""
        return int(self.ids[self.runs()[0][1] - 1])

    def runs(self) -> list[tuple[int, int]]:
        """The span of each answer."""
        return runs_of(self.mask)

    def answers(self) -> list[dict[str, Any]]:
        """The message of each answer."""
        return [message for message in self.messages if message["role"] == "assistant"]

    def replace(self, start: int, stop: int, new: Sequence[int], *, sampled: bool) -> None:
        """Replace `[start, stop)` with other tokens."""
        values = -self.draw.exponential(0.4, len(new)).round(4) - 1e-4 if sampled else np.zeros(len(new))
        parts = np.asarray(new, np.int32), np.full(len(new), sampled, np.int8), values
        for name, part in zip(("ids", "mask", "logprobs"), parts, strict=True):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old[:start], part.astype(old.dtype), old[stop:]]))

    def append(self, text: str, ids: Sequence[int], *, last: bool = True) -> bool:
        """Append text, sampled in these tokens, to an answer without tool calls."""
        runs, answers = self.runs(), self.answers()
        plain = [at for at, one in enumerate(answers) if not one.get("tool_calls")]
        plain = plain if last else [at for at in plain if at < len(answers) - 1]
        if not plain or not ids:
            return False
        at = int(self.draw.choice(plain))
        answers[at]["content"] += text
        stop = runs[at][1] - 1
        self.replace(stop, stop, ids, sampled=True)
        return True

    def pick(self, values: Sequence[int] | Array) -> int:
        """A random one of several."""
        return int(values[int(self.draw.integers(len(values)))])


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, and the rules that should find it."""

    name: str
    codes: tuple[str, ...]
    """Rules, one of which has to find it."""
    plant: Callable[[Draft], bool]
    rows: bool = True
    calls: bool = True
    made: bool = field(default=False)
    """True: it changes the calls, after they were made from the conversation."""


CATALOGUE: dict[str, Fault] = {}


def fault(
    *codes: str, rows: bool = True, calls: bool = True, made: bool = False
) -> Callable[[Callable[[Draft], bool]], Callable[[Draft], bool]]:
    """Add a function to the catalogue, under its name."""

    def entered(plant: Callable[[Draft], bool]) -> Callable[[Draft], bool]:
        name = plant.__name__.replace("_", " ")
        CATALOGUE[name] = Fault(name, codes, plant, rows, calls, made)
        return plant

    return entered
