"""Conversations from a seed: prose, code, JSON, tool calls, Chinese and emoji, as agents write them.

Words are the tokenizer's own, drawn by rank as in natural text (a few often, most rarely); one in
twenty is a name that no vocabulary has. No text is used twice, so caches help no more here than on a real log,
which has groups of samples of one prompt.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

__all__ = ["TOOLS", "Writer"]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "run",
            "description": "Run a command and return what it prints.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}},
                "required": ["command"],
            },
        },
    }
]
_CHINESE = np.array([chr(code) for code in range(0x4E00, 0x4E00 + 3000)], dtype=object)
_EMOJI = ("🙂", "🚀", "🔥", "🎉", "🤖", "✅", "❌", "📦", "🧪", "💡", "🌍", "👩‍💻")
_ENDS = (".", ",", ";", "?", "!\n", ".\n\n", ":", " 🙂")
_PLACES = 4096


class Writer:
    """Writes conversations from one stream of random numbers."""

    def __init__(self, words: Sequence[str] | Any, draw: np.random.Generator, length: int) -> None:
        self._words = np.asarray(words, dtype=object)
        self._draw = draw
        self._length = length
        self._share = _by_rank(len(words))
        self._han = _by_rank(len(_CHINESE))

    def conversation(self, turns: int) -> list[dict[str, Any]]:
        """Messages with `turns` answers, the last one without a tool call."""
        messages = [
            {"role": "system", "content": self._prose(40)},
            {"role": "user", "content": self._text()},
        ]
        for turn in range(turns - 1):
            if self._draw.random() < 0.4:
                messages.append({"role": "assistant", "content": self._text()})
                messages.append({"role": "user", "content": self._text()})
            else:
                messages += self._call(f"call_{turn}")
        messages.append({"role": "assistant", "content": self._text()})
        return messages

    def _call(self, name: str) -> list[dict[str, Any]]:
        """An answer that calls the tool, and the tool's result."""
        call = {"name": "run", "arguments": json.dumps({"command": self._prose(12)})}
        calls = [{"id": name, "type": "function", "function": call}]
        return [
            {"role": "assistant", "content": self._prose(self._length // 3), "tool_calls": calls},
            {"role": "tool", "tool_call_id": name, "content": self._text()},
        ]

    def _text(self) -> str:
        """One message, usually prose."""
        size = max(8, int(self._draw.normal(self._length, self._length / 4)))
        kind = self._draw.random()
        if kind < 0.55:
            return self._prose(size)
        if kind < 0.8:
            return self._code(size // 5)
        if kind < 0.9:
            return self._json(size // 12)
        han = "".join(_CHINESE[self._han.searchsorted(self._draw.random(size))].tolist())
        return f"{han}{_EMOJI[self._draw.integers(len(_EMOJI))]} {self._prose(max(size // 4, 8))}"

    def _some(self, count: int) -> list[str]:
        """Words, by rank of the vocabulary; some are new."""
        words: list[str] = self._words[self._share.searchsorted(self._draw.random(count))].tolist()
        for at in self._draw.integers(0, count, count // 20).tolist():
            words[at] += words[at - 1].title()
        return words

    def _prose(self, count: int) -> str:
        words = self._some(count)
        ends = self._draw.integers(0, _PLACES, len(words) // 11 + 1).tolist()
        for at, end in zip(range(7, len(words), 11), ends, strict=False):
            words[at] += _ENDS[end % len(_ENDS)] if end % 9 else f" {end}"
        return " ".join(words).strip()

    def _code(self, lines: int) -> str:
        words = iter(self._some(2 * lines + 2))
        out = ["```python"]
        for number in self._draw.integers(0, _PLACES, lines + 1).tolist():
            name = next(words).lower()
            out.append(f"{'    ' * (number % 4)}{name}_{number % 89} = {name}({number}, '{next(words)}')")
        return "\n".join([*out, "```"])

    def _json(self, entries: int) -> str:
        words = self._some(9 * entries + 9)
        numbers = iter(self._draw.integers(1 << 60, size=entries + 1).tolist())
        found = {
            words[at]: {
                "id": f"{next(numbers):x}",
                "path": "/".join(words[at + 1 : at + 4]),
                "text": " ".join(words[at + 4 : at + 9]),
            }
            for at in range(0, 9 * entries, 9)
        }
        return json.dumps(found, indent=2)


@cache
def _by_rank(count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Cumulative shares: the n-th entry is about n times rarer than the first."""
    shares = 1.0 / (np.arange(count) + 10.0)
    cumulated: np.ndarray[Any, np.dtype[np.float64]] = np.cumsum(shares) / shares.sum()
    cumulated[-1] = 1.0
    return cumulated
