"""The model that a server serves: its name and context length, from `/v1/models`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from tito_audit.errors import ProviderError
from tito_audit.providers._http import Http


@dataclass(frozen=True, slots=True)
class Served:
    """The served model."""

    model: str
    context: int | None
    """Its context length in tokens; None if not stated."""
    root: str | None = None
    """The folder or hub name that it was loaded from; None if not stated."""

    def room(self, prompt: int, name: str) -> int:
        """Tokens that a prompt leaves for an answer; at least 1, because servers report themselves what is too
        long.
        """
        if self.context is None:
            raise ProviderError(f"{name} does not state its context: max_tokens is needed", status=400)
        return max(1, self.context - prompt)


class Finder:
    """Asks a server once what it serves."""

    def __init__(
        self, http: Http, name: str, wanted: str | None, then: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """`then` runs once, after the model was found."""
        self._http, self._name, self._wanted, self._then = http, name, wanted, then
        self._served: Served | None = None
        self._asking: asyncio.Lock | None = None

    async def find(self) -> Served:
        """The wanted model, or the first; ProviderError if it is not served."""
        if self._served is None:
            self._asking = self._asking or asyncio.Lock()
            async with self._asking:
                if self._served is None:
                    served = await self._from_models()
                    if self._then is not None:
                        await self._then()
                    self._served = served
        return self._served

    async def _from_models(self) -> Served:
        cards = [card for card in objects(await self._http.json("GET", "/v1/models"), "data") if card.get("id")]
        if not cards:
            raise ProviderError(f"{self._http.base_url}/v1/models names no model")
        wanted = self._wanted or str(cards[0]["id"])
        card = next((card for card in cards if card["id"] == wanted), None)
        if card is None:
            names = ", ".join(str(card["id"]) for card in cards)
            raise ProviderError(f"{self._name} does not serve {wanted}; it serves {names}", status=404)
        context = card.get("max_model_len")
        root = card.get("root")
        return Served(wanted, context if type(context) is int else None, root if isinstance(root, str) else None)


def objects(answer: Any, key: str) -> list[dict[str, Any]]:
    """The objects of a list in an answer; [] if there is no list."""
    entries = answer.get(key) if isinstance(answer, dict) else None
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
