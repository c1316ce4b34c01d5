"""One sampled answer as its client gets it: text, reasoning and tool calls. Its ids do not change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from uuid import uuid4

from tito_audit.parser import Delta, Parsed, ParserRun
from tito_audit.parsers import collected, finish_reason, to_delta, to_message
from tito_audit.tokens.text_stream import TextStream


class Reading:
    """Reads the ids of one answer; its deltas add up to `message`."""

    def __init__(self, text: TextStream, run: ParserRun) -> None:
        self._text, self._run = text, run
        self._deltas: list[Delta] = []
        self._ids: list[str] = []
        self._parsed: Parsed | None = None

    def feed(self, ids: Iterable[int]) -> list[dict[str, Any]]:
        """The deltas that the next ids add, as OpenAI writes them."""
        return self._taken(self._run.feed(self._text.feed(ids)))

    def close(self) -> list[dict[str, Any]]:
        """The deltas that were held back, at the end of the answer."""
        return self._taken((*self._run.feed(self._text.close()), *self._run.close()))

    def say(self, deltas: Sequence[Delta]) -> list[dict[str, Any]]:
        """Deltas parsed elsewhere, as OpenAI writes them."""
        return self._taken(deltas)

    @property
    def parsed(self) -> Parsed:
        """The parsed answer so far."""
        self._parsed = self._parsed or collected(self._deltas)
        return self._parsed

    @property
    def text(self) -> str:
        """The content so far."""
        return self.parsed.content or ""

    def message(self) -> dict[str, Any]:
        """The assistant message so far."""
        return to_message(self.parsed, self._call_id)

    def why(self, sampled: str | None) -> str | None:
        """The finish reason that the client gets."""
        return finish_reason(self.parsed, sampled)

    def _taken(self, deltas: Sequence[Delta]) -> list[dict[str, Any]]:
        self._deltas += deltas
        self._parsed = None
        return [said for delta in deltas if (said := to_delta(delta, self._call_id))]

    def _call_id(self, number: int) -> str:
        """The id of a tool call; always the same for one number."""
        while len(self._ids) <= number:
            self._ids.append(f"call_{uuid4().hex[:24]}")
        return self._ids[number]
