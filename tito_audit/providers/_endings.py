"""When an answer ends, decided token by token as vLLM decides it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Ending:
    """Why an answer ended."""

    finish_reason: str
    """`stop` or `length`."""
    stop_reason: str | int | None = None
    """The stop text or stop token of the request that was found; None for an end token of the model."""


@dataclass(slots=True)
class Endings:
    """Decides when one answer ends: at an end token, a stop token, a stop text or the limit, in this order."""

    eos_ids: Collection[int]
    stop_ids: Collection[int]
    stop: Sequence[str]
    max_tokens: int
    token_bytes: Callable[[int], bytes]
    """The text of a token, special tokens included; called only if there are stop texts."""
    _tokens: int = 0
    _tail: bytes = field(default=b"", repr=False)
    """The last text of the answer, as far as a stop text can reach back."""

    def after(self, token: int) -> Ending | None:
        """The end after this next token; None if the answer goes on."""
        self._tokens += 1
        if token in self.eos_ids:
            return Ending("stop")
        if token in self.stop_ids:
            return Ending("stop", token)
        text = self._stop_text(token)
        if text is not None:
            return Ending("stop", text)
        return Ending("length") if self._tokens >= self.max_tokens else None

    def _stop_text(self, token: int) -> str | None:
        """The first stop text that this token completes; it may end inside the token."""
        if not self.stop:
            return None
        self._tail += self.token_bytes(token)
        for text in self.stop:
            if text.encode() in self._tail:
                return text
        longest = max(len(text.encode()) for text in self.stop)
        self._tail = self._tail[max(0, len(self._tail) - longest + 1) :]
        return None
